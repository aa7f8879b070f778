"""Kinds of faults in planning: budgets overrun, rows lost, too long, or run in a bad order."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support import make_batch

from lightning_padmin import MicroBatcher, PadMinConfig, PadMinWarning, plan_micro_batches

Groups = list[list[int]]


def groups(plan: object) -> Groups:
    return [rows.tolist() for rows in plan.groups]  # type: ignore[attr-defined]


def area(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return len(rows) * max(lengths[row] for row in rows)


def filled_by_sums(lengths: Sequence[int], budget: int) -> Groups:
    """The fault of R29: groups are filled until the *sum of lengths* reaches the budget."""
    made: Groups = [[]]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if made[-1] and sum(lengths[each] for each in made[-1]) + lengths[row] > budget:
            made.append([])
        made[-1].append(row)
    return made


@pytest.mark.parametrize(
    ("lengths", "budget", "right"),
    [
        ([5, 4, 1], 10, [[0, 1], [2]]),
        ([7, 1, 1, 1, 1, 1], 12, [[0], [1, 2, 3, 4, 5]]),
        ([9, 9, 2, 2], 22, [[0, 1], [2, 3]]),
        ([3, 8, 5], 16, [[1], [2, 0]]),
    ],
)
def test_r29_the_budget_counts_padded_areas(lengths: list[int], budget: int, right: Groups) -> None:
    plan = plan_micro_batches(lengths, budget)
    assert groups(plan) == right
    assert max(area(rows, lengths) for rows in groups(plan)) <= budget
    assert max(area(rows, lengths) for rows in filled_by_sums(lengths, budget)) > budget


@pytest.mark.parametrize(("lengths", "budget", "right"), [([6] * 5, 10, 5), ([4] * 7, 10, 4), ([9, 9, 9, 3, 3], 12, 4)])
def test_r29_the_sum_of_lengths_gives_too_few_micro_batches(lengths: list[int], budget: int, right: int) -> None:
    assert len(plan_micro_batches(lengths, budget)) == right > math.ceil(sum(lengths) / budget)


@pytest.mark.parametrize("multiple", [4, 8])
@pytest.mark.parametrize("budget", [40, 64, 100])
def test_r29_areas_are_counted_after_rounding(budget: int, multiple: int) -> None:
    lengths = np.random.default_rng(budget).integers(1, 33, 60).tolist()

    def rounded(plan: object) -> int:
        tops = [max(lengths[row] for row in rows) for rows in groups(plan)]
        sizes = [len(rows) for rows in groups(plan)]
        return max(n * math.ceil(top / multiple) * multiple for n, top in zip(sizes, tops, strict=True))

    assert rounded(plan_micro_batches(lengths, budget, pad_to_multiple_of=multiple)) <= budget
    assert rounded(plan_micro_batches(lengths, budget)) > budget, "rounding what was planned without it overruns"


@pytest.mark.parametrize(
    ("lengths", "budget", "alone"),
    [([30, 4, 4], 16, [0]), ([4, 17, 4, 40], 16, [3, 1]), ([3, 3, 9], 8, [2])],
)
def test_r31_a_row_above_the_budget_runs_alone_and_whole(lengths: list[int], budget: int, alone: list[int]) -> None:
    named = re.escape(f"{len(alone)} of {len(lengths)} rows exceed token_budget={budget} and run alone, the longest is")
    with pytest.warns(PadMinWarning, match=named) as told:
        plan = plan_micro_batches(lengths, budget)
    assert len(told) == 1
    assert [rows for rows in groups(plan) if rows[0] in alone] == [[row] for row in alone]
    assert sorted(np.concatenate(plan.groups).tolist()) == list(range(len(lengths)))
    kept = [row for row, length in enumerate(lengths) if length <= budget]  # the fault: filtered in silence
    assert len(kept) < sum(map(len, groups(plan)))


def test_r31_no_token_of_a_long_row_is_cut_and_the_warning_comes_once() -> None:
    batcher = MicroBatcher(PadMinConfig(token_budget=16))
    with pytest.warns(PadMinWarning) as told:
        prepared = [batcher.prepare(make_batch([30, 4, 4], seed=seed)) for seed in range(3)]
    assert len(told) == 1
    for micro_batches in prepared:
        assert sum(int(micro.batch["attention_mask"].sum()) for micro in micro_batches) == 38
        assert micro_batches.stats.over_budget_rows == 1
        cut = sum(int(micro.batch["attention_mask"][:, :16].sum()) for micro in micro_batches)
        assert cut == 24, "the fault: cut to the budget"


@pytest.mark.parametrize(("lengths", "budget"), [([16], 16), ([16, 4, 4], 16), ([8, 8], 16)])
def test_r31_a_row_of_exactly_the_budget_fits_without_a_word(lengths: list[int], budget: int) -> None:
    assert not len(plan_micro_batches(lengths, budget).over_budget)  # a warning would be an error


@pytest.mark.parametrize("rows", range(1, 51))
def test_r32_every_row_runs_exactly_once_and_weights_sum_to_one(rows: int) -> None:
    lengths = np.random.default_rng(rows).integers(2, 20, rows).tolist()
    micro_batches = MicroBatcher(PadMinConfig(token_budget=45, launch_cost=3)).prepare(make_batch(lengths))
    assert sorted(np.concatenate([micro.rows for micro in micro_batches]).tolist()) == list(range(rows))
    assert micro_batches.weights.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("rows", "most"), [(7, 3), (5, 4), (11, 2), (50, 7)])
def test_r32_a_remainder_is_no_rest_to_be_dropped(rows: int, most: int) -> None:
    plan = plan_micro_batches([5] * rows, max_rows=most, launch_cost=10**6)
    assert sorted(np.concatenate(plan.groups).tolist()) == list(range(rows))
    assert len(plan) == math.ceil(rows / most)
    assert max(map(len, plan.groups)) <= most
    assert rows // most * most < rows, "the fault: whole groups only"


@pytest.mark.parametrize(
    ("lengths", "right", "slots"),
    [
        ([2, 3, 3, 40], [[3], [1, 2, 0]], 49),
        ([40, 2, 2, 2], [[0], [1, 2, 3]], 46),
        ([10, 60, 9, 61], [[3, 1], [0, 2]], 142),
    ],
)
def test_r62_rows_are_padded_to_their_micro_batch(lengths: list[int], right: Groups, slots: int) -> None:
    plan = plan_micro_batches(lengths, launch_cost=8)
    assert groups(plan) == right
    assert plan.slots == slots
    assert plan.waste == pytest.approx(1 - sum(lengths) / slots)
    assert plan.slots < len(lengths) * max(lengths), "the fault: one block, as wide as the longest row"


@pytest.mark.parametrize("lengths", [[2, 3, 3, 40], [3, 40, 2, 3, 39]])
def test_r62_what_belongs_to_a_row_moves_with_it(lengths: list[int]) -> None:
    rows = torch.arange(len(lengths))
    batch = make_batch(lengths) | {"advantages": rows.float()}
    batch["old_logps"] = batch["attention_mask"] * (1 + rows[:, None])
    config = PadMinConfig(launch_cost=8, batch_schema={"old_logps": "position"})
    order = []
    for micro in MicroBatcher(config).prepare(batch):
        assert micro.batch["advantages"].tolist() == micro.rows.tolist()
        assert micro.batch["old_logps"].max(dim=1).values.tolist() == (micro.rows + 1).tolist()
        assert torch.equal(micro.batch["old_logps"] != 0, micro.batch["attention_mask"] != 0)
        order += micro.rows.tolist()
    assert order != rows.tolist(), "the fault: entries left in the batch's order would be taken for other rows"


@pytest.mark.parametrize("width_of_model", [8192, 4096, 151_936])
def test_r63_a_budget_caps_what_a_kernel_indexes(width_of_model: int) -> None:
    cap = (2**31 - 1) // width_of_model
    lengths = [cap, cap // 2, cap // 2, cap // 3, 100, 100]
    plan = plan_micro_batches(lengths, cap)
    assert max(int(slots) for slots in plan.slots_per_group) * width_of_model < 2**31
    assert len(lengths) * max(lengths) * width_of_model >= 2**31, "the fault: one pass, with indices beyond 32 bits"


@pytest.mark.parametrize(
    ("lengths", "slots"),
    [([2**20] * 4096, 2**32), ([2**33, 2**33], 2**34), ([500_000] * 10_000, 5_000_000_000)],
)
def test_r63_plans_count_beyond_32_bits(lengths: list[int], slots: int) -> None:
    plan = plan_micro_batches(lengths)
    assert plan.slots == slots
    assert int(np.array(slots).astype(np.int32)) != slots, "the fault: counted in 32 bits"


@pytest.mark.parametrize("widths", [[16, 512, 64, 2048], [7, 9, 8], [100, 10, 1000, 10, 500]])
def test_r64_the_widest_micro_batch_runs_first(widths: list[int]) -> None:
    plan = plan_micro_batches(widths, max(widths), launch_cost=0)
    found = plan.widths[:, 0].tolist()
    assert found == sorted(set(widths), reverse=True)
    assert found[0] == max(widths) != widths[0], "the fault: the order of the batch"
    assert found != sorted(found), "the fault: shortest first, so that memory runs out late"


def test_r64_the_order_changes_no_gradient() -> None:
    weights = {}
    for lengths in ([16, 51, 6, 20], [51, 20, 16, 6]):
        micro_batches = MicroBatcher(PadMinConfig(token_budget=51, launch_cost=0)).prepare(make_batch(lengths))
        widths = [micro.batch["input_ids"].shape[1] for micro in micro_batches]
        assert widths == [51, 20, 16, 6]
        weights[tuple(lengths)] = micro_batches.weights.tolist()
    first, second = weights.values()
    assert first == second != [0.25] * 4
