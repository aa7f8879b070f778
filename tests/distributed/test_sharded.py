"""PadMinCallback where parameters are sharded: two real gloo processes under FSDP2 and FSDP1, uneven work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import support
import torch
from processes import Ranks

WORKER = Path(__file__).with_name("sharded_worker.py")
STRATEGIES = ("fsdp2", pytest.param("fsdp1", marks=pytest.mark.slow))
COMMON = [
    "uneven",
    "adamw",
    "clipped",
    "equal_weights",
    "checked",
    "audited",
    "malformed",
    "no_loss_on_one_rank",
    "joint",
]
SCENARIOS = {"fsdp2": [*COMMON, "tensor_parallel"], "fsdp1": COMMON}
EXACT = 1e-12


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ranks]:
    """Results of all scenarios of a strategy, from one pair of processes each."""
    done: dict[str, Ranks] = {}

    def run(strategy: str) -> Ranks:
        if strategy not in done:
            output = tmp_path_factory.mktemp(strategy) / "result.out"
            done[strategy] = processes.results(WORKER, output, strategy, *SCENARIOS[strategy])
        return done[strategy]

    return run


def worst(result: dict[str, Any]) -> float:
    pairs = list(zip(result["split"]["gradients"], result["plain"]["gradients"], strict=True))
    assert pairs
    return max(support.relative(a, b) for a, b in pairs)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scenario", ["uneven", "adamw", "clipped"])
def test_gradients_and_parameters_are_the_stock_ones(
    ranks_of: Callable[[str], Ranks], strategy: str, scenario: str
) -> None:
    for rank, result in enumerate(ranks[scenario] for ranks in ranks_of(strategy)):
        assert worst(result) <= EXACT
        assert support.relative(result["split"]["parameters"], result["plain"]["parameters"]) <= EXACT
        torch.testing.assert_close(result["split"]["losses"], result["plain"]["losses"], rtol=1e-12, atol=0)
        # Rank 1 would need one micro-batch for each of its four batches, and keeps step with rank 0.
        assert result["stats"]["micro_batches"] == 20
        assert result["stats"]["dummies"] == (0, 4)[rank]
        assert result["logged"]["padmin/micro_batches"] == 40


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_new_on_one_rank_is_looked_at_on_both(ranks_of: Callable[[str], Ranks], strategy: str) -> None:
    first, second = ranks_of(strategy)
    for rank in (first, second):
        (found, steps), (wanted, _) = rank["audited"]["right"]
        assert steps == 4
        assert torch.equal(found, wanted)  # to the bit as without any check
        words, steps = rank["audited"]["wrong"]
        assert "audit of step 4" in words
        assert steps == 3  # neither has taken the step
    assert "'classes' is 1" in second["audited"]["wrong"][0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_against_a_gradient_that_no_strategy_has_touched(ranks_of: Callable[[str], Ranks], strategy: str) -> None:
    for rank in ranks_of(strategy):
        assert support.relative(rank["uneven"]["split"]["gradients"][0], rank["uneven"]["hand"]) <= EXACT


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_of_one_over_k_are_far_off(ranks_of: Callable[[str], Ranks], strategy: str) -> None:
    assert all(worst(rank["equal_weights"]) > 0.1 for rank in ranks_of(strategy))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_check_finds_wrong_declarations_on_all_ranks(ranks_of: Callable[[str], Ranks], strategy: str) -> None:
    first, second = (rank["checked"] for rank in ranks_of(strategy))
    assert first == second
    for case, how in (("row-mean", "row-mean"), ("one_tells", "row-mean"), ("sum", "sum")):
        assert first[case].startswith("GradientCheckError: first-batch check")
        assert f"set loss_reduction='{how}'" in first[case]
    assert first["right"] == ["trained"] * 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_raise_when_one_batch_is_malformed(ranks_of: Callable[[str], Ranks], strategy: str) -> None:
    first, second = (rank["malformed"] for rank in ranks_of(strategy))
    assert first.startswith("PeerError: rank 1 refused its batch (BatchError)")
    assert second.startswith("BatchError: 'attention_mask' is all zero")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_without_loss_tokens_gives_a_gradient_of_zero(ranks_of: Callable[[str], Ranks], strategy: str) -> None:
    for rank in ranks_of(strategy):
        result = rank["no_loss_on_one_rank"]
        assert support.relative(result["found"][0], result["expected"]) <= EXACT
    assert ranks_of(strategy)[1]["no_loss_on_one_rank"]["losses"][0] == 0


def test_a_batch_that_two_tensor_parallel_ranks_share_counts_once(ranks_of: Callable[[str], Ranks]) -> None:
    for rank in ranks_of("fsdp2"):
        metrics = rank["tensor_parallel"]
        assert (metrics["padmin/micro_batches"], metrics["padmin/real_tokens"]) == (5, 97)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", ["coupled", "own loss"])
def test_joint_mode_runs_equally_many_chunks_on_every_rank(
    ranks_of: Callable[[str], Ranks], strategy: str, case: str
) -> None:
    for rank, found in enumerate(ranks["joint"] for ranks in ranks_of(strategy)):
        result = found[case]
        assert worst(result) <= EXACT
        torch.testing.assert_close(result["split"]["losses"], result["plain"]["losses"], rtol=1e-12, atol=0)
        batches = len(result["plain"]["losses"])
        assert result["stats"]["batches"] == batches
        assert result["stats"]["micro_batches"] == 5 * batches
        assert result["stats"]["dummies"] == (0, batches)[rank]
    assert len({tuple(rank["joint"]["calls"]) for rank in ranks_of(strategy)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_without_an_exchange_ranks_wait_for_each_other(strategy: str, tmp_path: Path) -> None:
    """Negative control: they run into each other's collectives, or into the timeout."""
    output = tmp_path / "alone.out"
    codes = [code for code, _ in processes.finish(processes.start(WORKER, output, strategy, "joint_alone"), 90)]
    files = [output.with_suffix(f".rank{rank}.pt") for rank in range(2)]
    said = [torch.load(file)["joint_alone"] for file in files if file.exists()]
    assert any(codes) or any(words != "trained" for words in said)
