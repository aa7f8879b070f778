"""Kinds of faults between ranks: two real processes with gloo under DDP, FSDP2 and FSDP1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import support
import torch
from processes import Ranks

from lightning_padmin import PaddingStats, plan_micro_batches

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("rank_worker.py")
NAMES = ["r05", "r06", "r09", "r40", "r41", "r47", "r52", "r53", "r39"]
UNEVEN = {"3 and 1": ([8, 8, 8], [2, 2, 2]), "2 and 4": ([4, 4, 8], [8, 7, 6, 5]), "1 and 5": ([2, 2], [8, 8, 8, 8, 8])}
FEW_ROWS = {"4 and 2": ([8] * 4, [3, 3]), "3 and 1": ([8, 7, 7], [2]), "1 and 5": ([3], [8, 6, 6, 6, 5])}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Ranks that wait for each other are killed at the timeout, and the test fails."""
    return processes.results(WORKER, tmp_path_factory.mktemp("reports") / "result.out", *NAMES, timeout=200)


def worst(result: dict[str, Any]) -> float:
    pairs = list(zip(result["split"]["gradients"], result["plain"]["gradients"], strict=True))
    assert pairs
    return max(support.relative(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", UNEVEN)
def test_r05_ranks_run_equally_many_passes(ranks: Ranks, name: str) -> None:
    alone = [len(plan_micro_batches(lengths, 8, launch_cost=4)) for lengths in UNEVEN[name]]
    assert alone[0] != alone[1], "the fault: ranks that count for themselves"
    for rank in ranks:
        result = rank["r05"][name]
        assert result["stats"]["micro_batches"] == 2 * max(alone) == len(result["split"]["shapes"])
        assert worst(result) <= 1e-12


@pytest.mark.parametrize("name", FEW_ROWS)
def test_r06_dummies_add_nothing_but_passes(ranks: Ranks, name: str) -> None:
    plans = [plan_micro_batches(lengths, 8, launch_cost=4) for lengths in FEW_ROWS[name]]
    passes = max(map(len, plans))
    for rank, lengths in zip(ranks, FEW_ROWS[name], strict=True):
        result = rank["r06"][name]
        assert worst(result) <= 1e-12
        assert result["stats"]["micro_batches"] == 2 * passes
        assert result["stats"]["dummies"] == 2 * max(0, passes - len(lengths))
        assert result["stats"]["rows"] == 2 * len(lengths)
        assert result["stats"]["real_tokens"] == 2 * sum(lengths)
        assert result["stats"]["loss_tokens"] == 2 * (sum(lengths) - len(lengths))
    assert max(worst(rank["r06"]["fault"]) for rank in ranks) > 0.1, "the fault: dummies that weigh something"


@pytest.mark.parametrize("name", ["one row", "several passes", "unequal passes"])
def test_r09_a_loss_of_zero_stays_in_the_graph(ranks: Ranks, name: str) -> None:
    for number, rank in enumerate(ranks):
        found, expected, loss = rank["r09"][name]
        assert len(found) == len(expected), "every parameter has a gradient"
        assert support.relative(found, expected) <= 1e-12
        assert (loss == 0) == (number == 0)
    detached = torch.zeros(())
    with pytest.raises(RuntimeError, match="does not require grad"):
        detached.backward()  # the fault


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp1"])
def test_r39_no_sync_is_for_replicated_gradients_alone(ranks: Ranks, strategy: str) -> None:
    for rank in ranks:
        result, (replicated, sharded) = rank["r39"][strategy]
        assert worst(result) <= 1e-12
        assert sharded == 0
        assert (replicated > 0) == (strategy == "ddp"), "the fault: the same for all"


@pytest.mark.parametrize("count", [1, 3])
def test_r40_gradients_are_reduced_once_per_batch(ranks: Ranks, count: int) -> None:
    for rank in ranks:
        (plain, split, passes), (around_both, around_backward) = rank["r40"][0][count], rank["r40"][1]
        assert plain == split
        assert passes >= 5 * count
        assert (around_both, around_backward) == (1, 3), "the fault: no_sync around the backward pass alone"


@pytest.mark.parametrize("kind", ["Checkpointed", "CheckpointedPlainly"])
def test_r41_checkpoints_see_one_forward_pass_before_each_backward_pass(ranks: Ranks, kind: str) -> None:
    for rank in ranks:
        result = rank["r41"][0][kind]
        assert worst(result) <= 1e-12
        assert result["stats"]["micro_batches"] == 10
    first, second = (rank["r41"][1] for rank in ranks)
    assert isinstance(first, str) or support.relative(first, second) > 0.1, "the fault: ranks do not agree"


@pytest.mark.parametrize(("case", "right"), [(0, 2.0), (1, 2.5), (2, 0.0)])
def test_r47_manual_optimization_reduces_gradients(ranks: Ranks, case: int, right: float) -> None:
    for rank in ranks:
        *gradients, parameter = rank["r47"][case][0]
        assert gradients == pytest.approx([right, right], abs=1e-12)
        assert parameter == pytest.approx(-right, abs=1e-12)
    first, second = (rank["r47"][case][1][-1] for rank in ranks)
    assert first != second, "the fault: each rank trains its own parameters"


@pytest.mark.parametrize(("case", "numbers"), list(enumerate([[1, 2], [2**31 - 1, 2**40], [2**62, 0, 5]])))
def test_r52_counts_are_gathered_in_64_bits(ranks: Ranks, case: int, numbers: list[int]) -> None:
    for rank in ranks:
        assert rank["r52"][case] == [numbers, [number + 1 for number in numbers]]
    narrow = np.array([number + 1 for number in numbers]).astype(np.int32).tolist()
    assert (narrow == [number + 1 for number in numbers]) == (max(numbers) < 2**31 - 1), "the fault"


@pytest.mark.parametrize("case", [0, 1, 2])
def test_r53_evaluation_runs_as_it_does_without_us(ranks: Ranks, case: int) -> None:
    for number, rank in enumerate(ranks):
        (counts, plain_shapes, plain), (_, shapes, found) = rank["r53"][2 * case : 2 * case + 2]
        assert shapes == plain_shapes
        assert len(shapes) == counts[number]
        assert found == pytest.approx(plain, rel=1e-12)
    passes = [len(plan_micro_batches(lengths, 24, launch_cost=4)) for lengths in ([24, 20, 12, 12, 6], [4, 3, 5, 2])]
    assert passes[0] != passes[1], "the fault: evaluation split by each rank for itself"


@pytest.mark.parametrize("empty", [[0], [1], [0, 1]])
def test_r53_counts_have_one_shape_on_every_rank(empty: list[int]) -> None:
    """Also on a rank that has run nothing."""
    full = PaddingStats(batches=1, rows=2, real_tokens=8, slots_before=16, slots=10, micro_batches=2, longest_row=5)
    table = [(PaddingStats() if rank in empty else full).as_counts() for rank in (0, 1)]
    merged = PaddingStats.merge_ranks(table)
    assert merged.real_tokens == 8 * (2 - len(empty))
    assert 0 <= merged.waste < 1
    by_name = [
        {name: value for name, value in PaddingStats.from_counts(row).metrics().items() if value} for row in table
    ]
    assert {len(row) for row in table} == {11}
    assert min(map(len, by_name)) == 0, "the fault: a rank that sends only what it has"
