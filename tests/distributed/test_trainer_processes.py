"""PadMinTrainerMixin under DistributedDataParallel: two real gloo processes, batches of other lengths on each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import processes
import pytest
import support
import torch
from processes import Ranks

WORKER = Path(__file__).with_name("trainer_worker.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return processes.results(WORKER, tmp_path_factory.mktemp("trainer") / "result.out", fresh=True)


def worst(result: dict[str, Any]) -> float:
    pairs = list(zip(result["ours"]["gradients"], result["stock"]["gradients"], strict=True))
    assert len(pairs) > 1
    return max(support.relative(a, b) for a, b in pairs)


@pytest.mark.parametrize("case", ["sums", "means", "joint"])
def test_gradients_losses_and_parameters_are_the_stock_ones(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        result = rank[case]
        assert worst(result) <= 1e-5
        assert result["ours"]["losses"] == pytest.approx(result["stock"]["losses"], abs=1e-5)
        assert float((result["ours"]["parameters"] - result["stock"]["parameters"]).abs().max()) <= 1e-5
        assert result["ours"]["slots"] < result["stock"]["slots"]
    assert torch.equal(*(rank[case]["ours"]["parameters"] for rank in ranks))


def test_weights_of_one_over_k_are_far_off(ranks: Ranks) -> None:
    assert all(worst(rank["equal_weights"]) > 0.1 for rank in ranks)


def test_both_ranks_refuse_together(ranks: Ranks) -> None:
    first, second = (rank["refused"] for rank in ranks)
    assert first == second
    assert "set loss_reduction='token-mean'" in first


def test_a_malformed_batch_on_one_rank_stops_both(ranks: Ranks) -> None:
    first, second = (rank["malformed"] for rank in ranks)
    assert first.startswith("PeerError: rank 1 refused its batch (BatchError)")
    assert second.startswith("BatchError: 'labels' is set on")


@pytest.mark.parametrize(("case", "rank"), [("out of memory", 1), ("out of memory, means", 0)])
def test_both_ranks_hear_of_one_that_runs_out_of_memory(ranks: Ranks, case: str, rank: int) -> None:
    where = rf"OutOfMemoryError: out of memory on rank {rank} in micro-batch \d of \d: \d x \d+ = [2-6]\d slots\. "
    assert all(re.match(where, each[case]) for each in ranks)


def test_the_budget_that_is_named_fits(ranks: Ranks) -> None:
    assert [rank["the budget that is named"] for rank in ranks] == ["trained", "trained"]
