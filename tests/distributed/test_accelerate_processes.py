"""PadMin with a real Accelerator: one process, and two gloo processes with uneven work, against the plain loop."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loop_cases
import processes
import pytest
import torch
from processes import Ranks

WORKER = Path(__file__).with_name("accelerate_worker.py")
EQUAL = ["uneven", "accumulated", "clipped"]
SCENARIOS = {
    "one": [*EQUAL, "without_accumulate", "equal_weights", "evaluation"],
    "ddp": [
        *EQUAL,
        "without_accumulate",
        "equal_weights",
        "malformed",
        "left_early",
        "reductions",
        "unprepared",
        "join",
        "disagree",
        "evaluation",
    ],
    "fsdp2": [*EQUAL, "equal_weights", "malformed", "audits"],
    "fsdp1": [*EQUAL, "equal_weights", "malformed", "audits"],
    "zero0": EQUAL,
    "zero1": [*EQUAL, "deepspeed_control"],
    "zero2": [*EQUAL, "equal_weights", "deepspeed_control", "malformed"],
    "zero3": EQUAL,
}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
MARKS = {
    "fsdp1": [pytest.mark.slow],
    "fsdp2": [pytest.mark.slow],
    **{f"zero{k}": [needs_deepspeed, pytest.mark.slow] for k in range(4)},
}
Get = Callable[[str], Ranks]


def kinds(scenario: str) -> list[Any]:
    return [pytest.param(kind, marks=MARKS.get(kind, ())) for kind, names in SCENARIOS.items() if scenario in names]


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Results of all scenarios of a kind, from one pair of processes each."""
    done: dict[str, Ranks] = {}

    def run(kind: str) -> Ranks:
        if kind not in done:
            output, count = tmp_path_factory.mktemp(kind) / "result.out", 1 if kind == "one" else 2
            fresh = kind.startswith("zero")
            started = processes.start(WORKER, output, kind, *SCENARIOS[kind], ranks=count, fresh=fresh)
            for code, text in processes.finish(started, timeout=200):
                assert code == 0, text[-6000:]
            files = [output.with_suffix(f".rank{rank}.pt") for rank in range(count)]
            done[kind] = [torch.load(file, weights_only=False) for file in files]
        return done[kind]

    return run


def moved(result: dict[str, Any], name: str) -> float:
    """Difference of parameters to the plain loop's, by how far these went."""
    plain = result["plain"]
    displacement = (plain["parameters"] - plain["start"]).abs().max()
    return float((result[name]["parameters"] - plain["parameters"]).abs().max() / displacement)


def bound(kind: str) -> float:
    return 1e-5 if in_float32(kind) else 1e-12


def in_float32(kind: str) -> bool:
    return kind.startswith(("zero", "fsdp1"))


@pytest.mark.parametrize(
    ("kind", "scenario"),
    [pytest.param(*k.values, s, marks=k.marks) for s in (*EQUAL, "without_accumulate") for k in kinds(s)],
)
def test_training_is_that_of_the_plain_loop(ranks_of: Get, kind: str, scenario: str) -> None:
    ranks = ranks_of(kind)
    for rank in ranks:
        result = rank[scenario]
        plain, split = result["plain"], result["split"]
        assert moved(result, "split") <= bound(kind)
        assert split["losses"] == pytest.approx(plain["losses"], rel=1e-5 if in_float32(kind) else 1e-12)
        assert split["clipped"] == pytest.approx(plain["clipped"], rel=1e-4 if in_float32(kind) else 1e-12)
        assert split["rates"] == plain["rates"]
        assert (plain["passes"], split["passes"]) == (10, 50)
        # Two epochs of five batches: windows of two are three per epoch, the last one ragged.
        windows = 10 if scenario in ("uneven", "without_accumulate") else 6
        assert split["synchronised"] == plain["synchronised"] == windows
        assert len(split["metrics"]) == windows
        if kind.startswith("zero"):
            assert split["engine_steps"] == plain["engine_steps"] == windows
    if len(ranks) > 1:
        assert torch.equal(*(rank[scenario]["split"]["parameters"] for rank in ranks))


@pytest.mark.parametrize("kind", ["one", "ddp", *(pytest.param(f"fsdp{k}", marks=pytest.mark.slow) for k in (1, 2))])
def test_clipping_clips(ranks_of: Get, kind: str) -> None:
    clipped, free = (ranks_of(kind)[0][name]["plain"] for name in ("clipped", "accumulated"))
    assert min(clipped["clipped"]) > 0.05
    assert not torch.allclose(clipped["parameters"], free["parameters"], rtol=1e-3)


@pytest.mark.parametrize("kind", kinds("uneven"))
def test_switched_off_is_the_plain_loop_to_the_bit(ranks_of: Get, kind: str) -> None:
    for rank in ranks_of(kind):
        for scenario in EQUAL:
            plain, off = rank[scenario]["plain"], rank[scenario]["off"]
            assert torch.equal(off["parameters"], plain["parameters"])
            assert off["losses"] == plain["losses"]
            assert off["passes"] == plain["passes"]
            assert off["stats"]["batches"] == 0
            assert not any(off["metrics"])


@pytest.mark.parametrize("kind", kinds("equal_weights"))
def test_negative_control_equal_weights(ranks_of: Get, kind: str) -> None:
    assert all(moved(rank["equal_weights"], "split") > 0.1 for rank in ranks_of(kind))


@pytest.mark.parametrize("kind", kinds("audits"))
def test_ranks_check_losses_together(ranks_of: Get, kind: str) -> None:
    loop_cases.assert_audited([rank["audits"] for rank in ranks_of(kind)], bound(kind))


@pytest.mark.parametrize("kind", kinds("deepspeed_control"))
def test_negative_control_an_engine_that_is_not_told(ranks_of: Get, kind: str) -> None:
    for rank in ranks_of(kind):
        result = rank["deepspeed_control"]
        assert moved(result, "split") > 0.1
        assert result["split"]["engine_steps"] == 5 * result["plain"]["engine_steps"]


@pytest.mark.parametrize("kind", kinds("malformed"))
def test_both_ranks_raise_when_one_batch_is_malformed(ranks_of: Get, kind: str) -> None:
    first, second = (rank["malformed"] for rank in ranks_of(kind))
    assert first["message"].startswith("PeerError: rank 1 refused its batch (BatchError)")
    assert second["message"].startswith("BatchError: 'attention_mask' is all zero")
    for result in (first, second):
        assert result["passes"] == 0
        assert result["loss"] > 1


def test_metrics_are_counts_over_ranks_once_per_step(ranks_of: Get) -> None:
    # Rank 0, lengths 24 | 20 | 12 12 | 6 6 6 6 | 3 2: slots 24 + 20 + 24 + 24 + 6 = 98. Rank 1 must come to five with
    # four rows 5 4 3 2: four single rows, 14 slots, and a dummy of the shortest, 2.
    first, second = (rank["uneven"]["split"]["metrics"] for rank in ranks_of("ddp"))
    assert first == second
    for metrics in first:
        assert metrics["padmin/micro_batches"] == 10
        assert metrics["padmin/slots"] == 98 + 14 + 2
        assert metrics["padmin/real_tokens"] == 97 + 14
        assert metrics["padmin/dummies"] == 1
    windows = ranks_of("ddp")[0]["accumulated"]["split"]["metrics"]
    assert [metrics["padmin/micro_batches"] for metrics in windows] == [20, 20, 10, 20, 20, 10]


def test_gradients_are_reduced_once_per_window(ranks_of: Get) -> None:
    for rank in ranks_of("ddp"):
        plain, split = rank["reductions"]
        assert plain == split > 0


def test_both_ranks_hear_of_a_loop_that_one_left(ranks_of: Get) -> None:
    first, second = (rank["left_early"] for rank in ranks_of("ddp"))
    assert first["message"].startswith("PeerError: rank 1 refused its batch (BatchError)")
    assert second["message"].startswith("BatchError: the loop over the previous batch was left after 1 of 5")
    assert first["synchronises"] is second["synchronises"] is True


def test_what_nobody_would_reduce_is_refused(ranks_of: Get) -> None:
    for rank in ranks_of("ddp"):
        assert rank["unprepared"].startswith("ConfigError: model=Model: its gradients are reduced by nobody")
        assert rank["join"].startswith("ConfigError: join_uneven_inputs")


def test_ranks_that_found_different_configurations_refuse_together(ranks_of: Get) -> None:
    for message in (rank["disagree"] for rank in ranks_of("ddp")):
        assert message.startswith("ConfigError: PadMin: enabled differs between ranks: True on rank 0; False on rank 1")
        assert "Here they come from: " in message


@pytest.mark.parametrize("kind", kinds("evaluation"))
def test_an_evaluation_loader_is_untouched(ranks_of: Get, kind: str) -> None:
    for rank in ranks_of(kind):
        assert rank["evaluation"] == list(range(11))
