"""FabricPadMin in two real gloo processes with uneven work, against the same loops on un-split batches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loop_cases
import processes
import pytest
import support
import torch
from processes import Ranks

WORKER = Path(__file__).with_name("fabric_worker.py")
SCENARIOS = {
    "ddp": [
        "uneven",
        "every_time",
        "clipped",
        "clipped_by_value",
        "equal_weights",
        "against_hand",
        "metrics",
        "malformed",
        "training_mode_on_one_rank",
        "collectives",
        "reductions",
        "left_early",
        "one_rank_left_early",
        "no_loss_on_one_rank",
        "global_mean",
        "audits",
    ],
    "ddp_static": ["uneven", "left_early"],
    "ddp_find_unused": ["uneven", "no_loss_on_one_rank"],
    "fsdp1": [
        "uneven",
        "deferred",
        "clipped_by_value",
        "equal_weights",
        "against_hand",
        "metrics",
        "malformed",
        "left_early",
        "no_loss_on_one_rank",
        "audits",
        "deferred_audits",
    ],
    "fsdp1_single": ["clipped"],
    "fsdp2": [
        "uneven",
        "every_time",
        "clipped",
        "clipped_by_value",
        "equal_weights",
        "against_hand",
        "metrics",
        "malformed",
        "collectives",
        "left_early",
        "after_fabrics_own_context",
        "given_up_under_no_sync",
        "no_loss_on_one_rank",
        "global_mean",
        "memory",
        "audits",
    ],
    "tensor_parallel": ["same_batch_on_both"],
}
FIVE, ONE = [24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2]


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ranks]:
    """Results of all scenarios of a strategy, from one pair of processes each."""
    done: dict[str, Ranks] = {}

    def run(strategy: str) -> Ranks:
        if strategy not in done:
            output = tmp_path_factory.mktemp(strategy) / "result.out"
            done[strategy] = processes.results(WORKER, output, strategy, *SCENARIOS[strategy], timeout=200)
        return done[strategy]

    return run


def pairs(scenario: str) -> list[Any]:
    """Strategies of a scenario; of those that shard, the processes run with the slow tests."""
    return [marked(strategy) for strategy, names in SCENARIOS.items() if scenario in names]


def marked(strategy: str, *more: str) -> Any:
    return pytest.param(strategy, *more, marks=[pytest.mark.slow] if strategy.startswith("fsdp") else [])


def worst(result: dict[str, Any]) -> float:
    steps = zip(result["split"]["gradients"], result["plain"]["gradients"], strict=True)
    return max(support.relative(a, b) for a, b in steps)


def assert_same_training(result: dict[str, Any], bound: float = 1e-12) -> None:
    assert len(result["plain"]["gradients"]) == 3
    assert worst(result) <= bound
    assert support.relative(result["split"]["parameters"], result["plain"]["parameters"]) <= 10 * bound
    assert result["split"]["losses"] == pytest.approx(result["plain"]["losses"], rel=bound)
    assert result["split"]["passes"] == 5 * result["plain"]["passes"] == 30


@pytest.mark.parametrize(
    ("strategy", "scenario"),
    [
        marked(strategy, scenario)
        for scenario in ("uneven", "deferred", "every_time", "clipped", "clipped_by_value")
        for strategy in SCENARIOS
        if scenario in SCENARIOS[strategy]
    ],
)
def test_training_is_that_of_the_whole_batches(ranks_of: Callable[[str], Ranks], strategy: str, scenario: str) -> None:
    ranks = ranks_of(strategy)
    for rank in ranks:
        # FSDP clips by norm in float32 only, whatever the gradients are.
        assert_same_training(rank[scenario], bound=1e-5 if strategy == "fsdp1_single" else 1e-12)
    assert torch.equal(ranks[0][scenario]["split"]["parameters"], ranks[1][scenario]["split"]["parameters"])
    assert [rank[scenario]["stats"]["batches"] for rank in ranks] == [6, 6]


@pytest.mark.parametrize("strategy", pairs("equal_weights"))
def test_negative_control_equal_weights(ranks_of: Callable[[str], Ranks], strategy: str) -> None:
    assert worst(ranks_of(strategy)[0]["equal_weights"]) > 0.1


@pytest.mark.parametrize(
    ("strategy", "scenario"),
    [
        marked(strategy, scenario)
        for scenario in ("against_hand", "global_mean", "no_loss_on_one_rank", "after_fabrics_own_context")
        for strategy in SCENARIOS
        if scenario in SCENARIOS[strategy]
    ],
)
def test_gradient_is_that_of_a_hand_made_mean_over_ranks(
    ranks_of: Callable[[str], Ranks], strategy: str, scenario: str
) -> None:
    for rank in ranks_of(strategy):
        assert support.relative(rank[scenario]["found"], rank[scenario]["expected"]) <= 1e-12


@pytest.mark.parametrize("strategy", pairs("no_loss_on_one_rank"))
def test_loss_of_a_batch_without_loss_tokens_is_zero(ranks_of: Callable[[str], Ranks], strategy: str) -> None:
    losses = [rank["no_loss_on_one_rank"]["loss"] for rank in ranks_of(strategy)]
    assert losses[0] > 1
    assert losses[1] == 0


@pytest.mark.parametrize(
    ("strategy", "scenario"),
    [marked(s, name) for name in ("audits", "deferred_audits") for s in SCENARIOS if name in SCENARIOS[s]],
)
def test_ranks_check_losses_together(ranks_of: Callable[[str], Ranks], strategy: str, scenario: str) -> None:
    loop_cases.assert_audited([rank[scenario] for rank in ranks_of(strategy)], bound=1e-12)


@pytest.mark.parametrize("strategy", pairs("metrics"))
def test_metrics_are_the_same_on_both_ranks_and_equal_a_hand_count(
    ranks_of: Callable[[str], Ranks], strategy: str
) -> None:
    # Rank 0, lengths 24 | 20 | 12 12 | 6 6 6 6 | 3 2: slots 24 + 20 + 24 + 24 + 6 = 98. Rank 1 must come to five with
    # four rows 5 4 3 2: four single rows, 14 slots, and a dummy of the shortest, 2. Two such batches.
    real, before, slots = sum(FIVE) + sum(ONE), 10 * 24 + 4 * 5, 98 + 14 + 2
    expected = {
        "real_tokens": 2 * real,
        "loss_tokens": 2 * (real - 14),  # one prompt token in each of 10 + 4 rows
        "slots": 2 * slots,
        "waste": 1 - real / slots,
        "waste_before": 1 - real / before,
        "micro_batches": 20,
        "longest_row": 24,
        "dummies": 2,
        "over_budget_rows": 0,
        # Before the counts were aligned rank 1 planned one micro-batch of 4 x 5 slots, rank 0 waits for nobody.
        "idle": (98 - 20) / (98 - 20 + slots),
    }
    ranks = [rank["metrics"] for rank in ranks_of(strategy)]
    for rank in ranks:
        assert rank["metrics"].pop("padmin/audits") >= 0
        rank["metrics"].pop("padmin/audit_worst", None)
        rank["metrics"].pop("padmin/mode", None)
        assert rank["metrics"] == pytest.approx({f"padmin/{name}": value for name, value in expected.items()})
        assert rank["again"] == {}
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    assert [rank["stats"]["dummies"] for rank in ranks] == [0, 2]


@pytest.mark.slow
def test_a_tensor_parallel_group_counts_its_batch_once(ranks_of: Callable[[str], Ranks]) -> None:
    first, second = (rank["same_batch_on_both"] for rank in ranks_of("tensor_parallel"))
    assert first == second
    assert first["padmin/real_tokens"] == sum(FIVE)
    assert first["padmin/micro_batches"] == 5


@pytest.mark.parametrize("strategy", pairs("malformed"))
def test_both_ranks_raise_when_one_batch_is_malformed(ranks_of: Callable[[str], Ranks], strategy: str) -> None:
    first, second = (rank["malformed"] for rank in ranks_of(strategy))
    assert first["message"].startswith("PeerError: rank 1 refused its batch (BatchError)")
    assert second["message"].startswith("BatchError: 'attention_mask' is all zero")
    for result in (first, second):
        assert result["forwards"] == 0
        assert support.relative(result["found"], result["expected"]) <= 1e-12


def test_both_ranks_raise_when_one_model_cannot_be_split(ranks_of: Callable[[str], Ranks]) -> None:
    first, second = (rank["training_mode_on_one_rank"] for rank in ranks_of("ddp"))
    assert first.startswith("PeerError: rank 1 refused")
    assert second.startswith("ArchitectureError: 2 is a BatchNorm1d in training mode")


@pytest.mark.parametrize("strategy", pairs("collectives"))
def test_ranks_agree_once_per_batch_before_the_first_micro_batch(
    ranks_of: Callable[[str], Ranks], strategy: str
) -> None:
    for rank in ranks_of(strategy):
        assert rank["collectives"] == (1, 0)


def test_gradients_are_reduced_once_per_step(ranks_of: Callable[[str], Ranks]) -> None:
    for rank in ranks_of("ddp"):
        plain, deferred, every_time = rank["reductions"]
        assert plain == deferred > 0
        assert every_time == 10 * plain  # two batches of five micro-batches in each step


@pytest.mark.parametrize("strategy", pairs("left_early"))
def test_gradients_are_reduced_again_however_a_loop_ends(ranks_of: Callable[[str], Ranks], strategy: str) -> None:
    waits = strategy in ("ddp", "fsdp1")
    for rank in ranks_of(strategy):
        found = rank["left_early"]
        assert found["inside"] is found["kept"] is not waits
        assert [found[when] for when in ("before", "break", "raise", "discarded", "end")] == [True] * 5
        for when in ("break_refused", "raise_refused"):
            assert found[when].startswith("BatchError: the loop over the previous batch was left after 1 of 5")
        assert support.relative(found["found"], found["expected"]) <= 1e-12


def test_both_ranks_hear_of_a_loop_that_one_left(ranks_of: Callable[[str], Ranks]) -> None:
    first, second = (rank["one_rank_left_early"] for rank in ranks_of("ddp"))
    assert first.startswith("PeerError: rank 1 refused its batch (BatchError)")
    assert second.startswith("BatchError: the loop over the previous batch was left after 1 of 5 micro-batches")


@pytest.mark.slow
def test_why_model_parallel_does_not_defer(ranks_of: Callable[[str], Ranks]) -> None:
    for rank in ranks_of("fsdp2"):
        ours, deferred, whole = rank["memory"]
        assert ours < 0.6 * whole
        assert deferred == whole
        given_up = rank["given_up_under_no_sync"]
        assert support.relative(given_up["found"], given_up["expected"]) > 0.1
        assert rank["after_fabrics_own_context"]["still"] is False  # mended: see the test against a hand-made mean


@pytest.mark.slow
def test_both_processes_end_when_one_raises_in_a_micro_batch(tmp_path: Path) -> None:
    (code_0, _), (code_1, text_1) = processes.finish(
        processes.start(WORKER, tmp_path / "result.out", "ddp", "one_rank_fails"), timeout=150
    )
    assert code_0 != 0
    assert code_1 != 0
    assert "rank 1 fails in its second micro-batch" in text_1


def run_example(*arguments: str) -> list[str]:
    """The lines that name a step."""
    file = Path(__file__).parents[2] / "examples" / "fabric_loop.py"
    command = [sys.executable, str(file), "--steps", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.slow
def test_example_prints_metrics_and_the_losses_of_whole_batches() -> None:
    split, whole = (run_example("--devices", "2", "--strategy", "ddp", "--budget", budget) for budget in ("1536", "0"))
    assert [line.split(" padmin/")[0] for line in split] == [line.strip() for line in whole]
    assert len(split) == 2
    for line in split:
        values = line.split("padmin/")[1:]
        metrics = {name: float(value) for name, value in (pair.split() for pair in values)}
        assert metrics["waste"] < 0.12 < metrics["waste_before"]
        assert metrics["micro_batches"] > 4
