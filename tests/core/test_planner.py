"""The planner against exhaustive search, its limits, and inputs on which other planners went wrong."""

from __future__ import annotations

import functools
import itertools
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_padmin.errors import PadMinWarning, PlanError
from lightning_padmin.planning import search
from lightning_padmin.planning.plan import Plan
from lightning_padmin.planning.planner import plan_micro_batches

WORKED_EXAMPLE = [120, 90, 300, 40, 55, 30, 210, 65]


# --- Exhaustive search, in plain Python and without a line of the planner. ---


def round_length(length: int, multiple: int, cap: int | None) -> int:
    rounded = (length + multiple - 1) // multiple * multiple
    return rounded if cap is None else min(rounded, cap)


def area_of(group: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> int:
    return len(group) * sum(max(shapes[row][axis] for row in group) for axis in range(len(shapes[0])))


def cost_of(
    groups: Sequence[Sequence[int]],
    shapes: Sequence[tuple[int, ...]],
    *,
    budget: int,
    launch_cost: int,
    max_rows: int,
    riders: Sequence[bool],
) -> tuple[int, int] | None:
    """(cost, number of groups), or None where a rule is broken."""
    cost = 0
    for group in groups:
        area = area_of(group, shapes)
        if len(group) > 1 and (area > budget or len(group) > max_rows):
            return None
        if all(riders[row] for row in group) and not all(riders):
            return None
        cost += area + launch_cost
    return cost, len(groups)


def set_partitions(rows: int) -> Iterator[list[list[int]]]:
    """All ways to group `rows` rows: 877 for 7 rows, 21,147 for 9."""
    if rows == 0:
        yield []
        return
    for smaller in set_partitions(rows - 1):
        for i in range(len(smaller)):
            yield [*smaller[:i], [*smaller[i], rows - 1], *smaller[i + 1 :]]
        yield [*smaller, [rows - 1]]


def sorted_splits(order: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to cut a list into runs."""
    for cuts in itertools.product((False, True), repeat=len(order) - 1):
        at = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(order)]
        yield [list(order[a:b]) for a, b in itertools.pairwise(at)]


def longest_first(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    return sorted(range(len(shapes)), key=lambda row: (-sum(shapes[row]), -shapes[row][0], row))


def best_of(candidates: Iterator[list[list[int]]], shapes: Sequence[tuple[int, ...]], **rules: Any) -> Any:
    costs = (cost_of(groups, shapes, **rules) for groups in candidates)
    return min((cost for cost in costs if cost is not None), default=None)


def rules_of(plan: Plan, max_rows: int | None = None) -> dict[str, Any]:
    return {
        "budget": plan.token_budget,
        "launch_cost": plan.launch_cost,
        "max_rows": max_rows or len(plan.lengths),
        "riders": plan.riders.tolist(),
    }


def groups_of(plan: Plan) -> list[list[int]]:
    return [rows.tolist() for rows in plan.groups]


def shapes_of(plan: Plan) -> list[tuple[int, ...]]:
    return [tuple(row) for row in plan.rounded.tolist()]


def assert_best(plan: Plan, candidates: Iterator[list[list[int]]], max_rows: int | None = None) -> None:
    shapes, rules = shapes_of(plan), rules_of(plan, max_rows)
    assert (plan.cost, len(plan)) == cost_of(groups_of(plan), shapes, **rules)
    assert (plan.cost, len(plan)) == best_of(candidates, shapes, **rules)


def assert_sound(plan: Plan, max_rows: int | None = None) -> None:
    """What holds for every plan that gave no warning about riders."""
    shapes = shapes_of(plan)
    assert sorted(itertools.chain(*groups_of(plan))) == list(range(len(plan.lengths)))
    assert all(len(rows) for rows in plan.groups)
    for rows, widths, slots in zip(groups_of(plan), plan.widths.tolist(), plan.slots_per_group.tolist(), strict=True):
        assert widths == [max(shapes[row][axis] for row in rows) for axis in range(len(widths))]
        assert slots == area_of(rows, shapes)
        assert len(rows) == 1 or (slots <= plan.token_budget and len(rows) <= (max_rows or len(rows)))
        # Longest first inside a group; equal lengths by index.
        keys = [(-sum(shapes[row]), -shapes[row][0], -plan.lengths[row].sum(), row) for row in rows]
        assert keys == sorted(keys)
        assert not all(plan.riders[row] for row in rows)
    totals = plan.widths.sum(axis=1).tolist()
    assert totals == sorted(totals, reverse=True)
    assert plan.slots == sum(area_of(rows, shapes) for rows in groups_of(plan))
    assert plan.real_tokens == plan.lengths.sum()


def quiet_plan(*args: Any, **kwargs: Any) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PadMinWarning)
        return plan_micro_batches(*args, **kwargs)


# --- Against exhaustive search. ---

options = st.fixed_dictionaries(
    {
        "token_budget": st.none() | st.integers(1, 120),
        "pad_to_multiple_of": st.sampled_from([1, 1, 3, 8]),
        "max_rows": st.none() | st.integers(1, 5),
        "launch_cost": st.sampled_from([0, 1, 5, 16, 128]),
        "max_width": st.none() | st.integers(30, 37),
    }
)
short_lengths = st.integers(1, 30)


@settings(deadline=None, max_examples=80)
@given(st.lists(short_lengths, min_size=1, max_size=7), options)
def test_no_partition_at_all_is_better(lengths: list[int], options: dict[str, Any]) -> None:
    plan = quiet_plan(lengths, **options)
    assert_sound(plan, options["max_rows"])
    assert_best(plan, set_partitions(len(lengths)), options["max_rows"])


@settings(deadline=None, max_examples=60)
@given(st.lists(short_lengths, min_size=8, max_size=9), options)
def test_no_split_of_the_sorted_rows_is_better(lengths: list[int], options: dict[str, Any]) -> None:
    plan = quiet_plan(lengths, **options)
    assert_best(plan, sorted_splits(longest_first(shapes_of(plan))), options["max_rows"])


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}),
        (1, {"pad_to_multiple_of": 8, "max_width": 62}),
        (2, {"max_rows": 3}),
        (3, {"pad_to_multiple_of": 4, "max_rows": 4, "launch_cost": 0}),
        (4, {"pad_to_multiple_of": 16, "max_rows": 2, "launch_cost": 40}),
    ],
)
def test_no_partition_of_nine_rows_is_better(seed: int, options: dict[str, Any]) -> None:
    lengths = np.random.default_rng(seed).integers(1, 60, 9)
    plan = plan_micro_batches(lengths, 200, **{"launch_cost": 20, **options})
    assert_sound(plan, options.get("max_rows"))
    assert_best(plan, set_partitions(9), options.get("max_rows"))


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(short_lengths, short_lengths), min_size=1, max_size=8), options)
def test_two_lengths_per_row(lengths: list[tuple[int, int]], options: dict[str, Any]) -> None:
    plan = quiet_plan(lengths, **options)
    assert plan.widths.shape == (len(plan), 2)
    assert_sound(plan, options["max_rows"])
    # Among rows of equal shape the real length decides the order, which changes no cost.
    assert_best(plan, sorted_splits(longest_first(shapes_of(plan))), options["max_rows"])


def test_a_shuffled_plan_is_noticed() -> None:
    plan = plan_micro_batches(WORKED_EXAMPLE, 400, launch_cost=20)
    assert_best(plan, set_partitions(8))
    order = np.random.default_rng(0).permutation(8)
    groups = tuple(np.sort(order[rows]) for rows in plan.groups)
    widths = np.stack([plan.rounded[rows].max(axis=0) for rows in groups])
    shuffled = replace(plan, groups=groups, widths=widths, token_budget=10**6)
    with pytest.raises(AssertionError):
        assert_best(shuffled, set_partitions(8))
    with pytest.raises(AssertionError):
        assert_sound(shuffled)


def test_one_row_less_is_noticed() -> None:
    plan = plan_micro_batches(WORKED_EXAMPLE, 400)
    with pytest.raises(AssertionError):
        assert_sound(replace(plan, groups=(plan.groups[0], plan.groups[1], plan.groups[2], plan.groups[3][1:])))


@settings(deadline=None, max_examples=100)
@given(st.lists(short_lengths, min_size=1, max_size=60), options)
def test_never_worse_than_greedy(lengths: list[int], options: dict[str, Any]) -> None:
    best, greedy = quiet_plan(lengths, **options), quiet_plan(lengths, **options, method="greedy")
    assert_sound(best, options["max_rows"])
    assert_sound(greedy, options["max_rows"])
    assert (best.cost, len(best)) <= (greedy.cost, len(greedy))


@pytest.mark.parametrize("size", [60, 300])
def test_long_lists_against_the_plain_recurrence(size: int) -> None:
    """Runs that the planner does not even look at are in no best plan."""
    rng = np.random.default_rng(size)
    for launch_cost in (0, 7, 128, 5000):
        lengths = sorted((rng.lognormal(5, 1, size) + 1).astype(int).tolist(), reverse=True)
        budget = max(lengths) * 4
        best: list[tuple[int, int]] = [(0, 0)]
        for end in range(1, size + 1):
            ends = [
                (best[i][0] + lengths[i] * (end - i) + launch_cost, best[i][1] + 1)
                for i in range(end)
                if end - i == 1 or lengths[i] * (end - i) <= budget
            ]
            best.append(min(ends))
        plan = plan_micro_batches(lengths, budget, launch_cost=launch_cost)
        assert (plan.cost, len(plan)) == best[size]


# --- Greedy, and the worked example. ---


def test_greedy_fills_up_to_the_budget() -> None:
    plan = plan_micro_batches(WORKED_EXAMPLE, 400, method="greedy")
    assert groups_of(plan) == [[2], [6], [0, 1, 7], [4, 3, 5]]
    assert groups_of(plan_micro_batches(WORKED_EXAMPLE, 400, method="greedy", max_rows=2)) == [
        [2],
        [6],
        [0, 1],
        [7, 4],
        [3, 5],
    ]


def test_worked_example() -> None:
    plan = plan_micro_batches(WORKED_EXAMPLE, 400)
    assert groups_of(plan) == [[2], [6], [0, 1], [7, 4, 3, 5]]
    assert plan.widths.tolist() == [[300], [210], [120], [65]]
    assert plan.slots_per_group.tolist() == [300, 210, 240, 260]
    assert (plan.slots, plan.real_tokens, plan.cost, len(plan)) == (1010, 910, 1010 + 4 * 128, 4)
    assert plan.waste == pytest.approx(1 - 910 / 1010)
    assert_best(plan, set_partitions(8))


def test_a_dearer_launch_gives_fewer_micro_batches() -> None:
    counts = [len(plan_micro_batches(WORKED_EXAMPLE, launch_cost=cost)) for cost in (0, 20, 60, 200, 10**6)]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (8, 1)


def test_equal_costs_are_decided_by_fewer_micro_batches() -> None:
    # Cutting [4, 2] saves 2 slots, exactly the launch cost.
    assert groups_of(plan_micro_batches([4, 2], launch_cost=2)) == [[0, 1]]
    assert groups_of(plan_micro_batches([5, 5, 5], launch_cost=0)) == [[0, 1, 2]]
    # Cut after the longest row, either one or two runs of the rest cost 27.
    pairs = [(1, 3), (5, 3), (3, 4), (3, 1)]
    assert groups_of(plan_micro_batches(pairs, 31, launch_cost=3)) == [[1], [2, 3, 0]]
    # Of equal plans, the one whose first micro-batch is the fuller.
    assert groups_of(plan_micro_batches([9, 9, 9], 20)) == [[0, 1], [2]]


# --- Budget. ---


def test_the_count_is_not_a_lower_bound_of_sums() -> None:
    assert len(plan_micro_batches([6, 6, 6, 6, 6], 10)) == 5
    assert groups_of(plan_micro_batches([5, 4, 1], 10)) == [[0, 1], [2]]


def test_a_row_over_the_budget_runs_alone_with_one_warning() -> None:
    with pytest.warns(PadMinWarning) as caught:
        plan = plan_micro_batches([4, 30, 4, 17], 16)
    assert len(caught) == 1
    assert "2 of 4 rows exceed token_budget=16 and run alone" in str(caught[0].message)
    assert "row 1 with 30 slots" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert groups_of(plan) == [[1], [3], [0, 2]]
    assert plan.over_budget.tolist() == [1, 3]
    assert_sound(plan)


def test_a_row_of_exactly_the_budget_is_fine() -> None:
    plan = plan_micro_batches([16, 4, 4], 16)
    assert groups_of(plan) == [[0], [1, 2]]
    assert plan.over_budget.tolist() == []


def test_rounding_may_bring_a_row_over_the_budget() -> None:
    with pytest.warns(PadMinWarning, match="row 0 with 24 slots"):
        plan_micro_batches([17, 4], 20, pad_to_multiple_of=8)
    assert len(plan_micro_batches([17, 4], 20, pad_to_multiple_of=8, max_width=20)) == 2


def test_no_budget_is_the_trimmed_batch() -> None:
    plan = plan_micro_batches([7, 5, 3], pad_to_multiple_of=4, launch_cost=10**6)
    assert (plan.token_budget, plan.slots, len(plan)) == (24, 24, 1)
    pairs = plan_micro_batches([(7, 1), (2, 9)], launch_cost=10**6)
    assert (pairs.token_budget, len(pairs)) == (32, 1)


@pytest.mark.parametrize("rows", range(1, 51))
def test_no_row_is_ever_lost(rows: int) -> None:
    lengths = np.random.default_rng(rows).integers(1, 300, rows)
    for options in ({"max_rows": 3}, {"launch_cost": 0}, {"method": "greedy"}, {"pad_to_multiple_of": 64}):
        plan = plan_micro_batches(lengths, 2000, **options)
        assert_sound(plan, options.get("max_rows"))
        assert_sound(plan.at_least(4), options.get("max_rows"))
        assert len(plan.at_least(4)) >= min(4, rows)


def test_one_long_row_no_longer_widens_the_others() -> None:
    plan = plan_micro_batches([2, 3, 3, 40], launch_cost=8)
    assert groups_of(plan) == [[3], [1, 2, 0]]
    assert plan.slots == 49
    assert plan.waste == pytest.approx(1 - 48 / 49)


@pytest.mark.parametrize("kind", [np.int32, np.uint16, np.int64])
def test_more_slots_than_32_bits_count(kind: type) -> None:
    plan = plan_micro_batches(np.full(40_000, 65_000, kind), 2**40)
    assert plan.slots == 40_000 * 65_000 > 2**31
    assert len(plan) == 1


def test_huge_numbers_give_the_same_plan() -> None:
    """2**50 slots and beyond, where scaled costs no longer fit in 64 bits."""
    rng = np.random.default_rng(5)
    lengths, riders = rng.integers(1, 500, 60), rng.random(60) < 0.2
    for given_riders in (None, riders):
        small = plan_micro_batches(lengths, 3000, launch_cost=60, riders=given_riders)
        for scale in (2**20, 2**41):
            big = plan_micro_batches(lengths * scale, 3000 * scale, launch_cost=60 * scale, riders=given_riders)
            assert groups_of(big) == groups_of(small)
            assert big.cost == small.cost * scale
            assert big.at_least(40).slots == small.at_least(40).slots * scale
    unlimited = plan_micro_batches([5, 4], 10**30, max_rows=10**30)
    assert unlimited.token_budget == 10**30
    assert len(unlimited) == 1


# --- Order and determinism. ---


def test_the_widest_micro_batch_comes_first() -> None:
    assert plan_micro_batches([16, 512, 64, 2048], launch_cost=0).widths.ravel().tolist() == [2048, 512, 64, 16]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30), st.randoms())
def test_the_order_of_the_rows_does_not_matter(lengths: list[tuple[int, int]], random: Any) -> None:
    shuffled = random.sample(lengths, len(lengths))
    for pick in (lambda pair: pair[0], lambda pair: pair):
        one = plan_micro_batches([pick(p) for p in lengths], 300, launch_cost=9, pad_to_multiple_of=2)
        two = plan_micro_batches([pick(p) for p in shuffled], 300, launch_cost=9, pad_to_multiple_of=2)
        assert one.widths.tolist() == two.widths.tolist()
        for rows_one, rows_two in zip(one.groups, two.groups, strict=True):
            assert one.rounded[rows_one].tolist() == two.rounded[rows_two].tolist()


def test_the_plan_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "import numpy as np; from lightning_padmin.planning.planner import plan_micro_batches as p;"
        "r = np.random.default_rng(3);"
        "print([g.tolist() for g in p(r.integers(1, 9, 80), 60, riders=r.random(80) < 0.3).at_least(30).groups])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert seen.pop().count("[") > 30


# --- Rounding. ---


def test_the_plan_is_made_after_rounding() -> None:
    # Three rows of 9 are 27 slots, but 48 once they are 16 wide.
    plan = plan_micro_batches([9, 9, 9], 32, pad_to_multiple_of=8)
    assert groups_of(plan) == [[0, 1], [2]]
    assert plan.slots == 48


def test_rounding_leaves_few_shapes() -> None:
    plan = plan_micro_batches([9, 11, 14, 15, 18], pad_to_multiple_of=8, launch_cost=0)
    assert set(plan.widths.ravel().tolist()) == {16, 24}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=25),
    st.integers(1, 100),
    st.integers(0, 9),
)
def test_widths_are_multiples_but_never_wider_than_the_batch(
    lengths: list[tuple[int, int]], multiple: int, room: int
) -> None:
    caps = [max(pair[axis] for pair in lengths) + room for axis in (0, 1)]
    plan = quiet_plan(lengths, 500, pad_to_multiple_of=multiple, max_width=caps)
    assert_sound(plan)
    for axis in (0, 1):
        widths = plan.widths[:, axis]
        assert ((widths % multiple == 0) | (widths == caps[axis])).all()
        assert (widths <= caps[axis]).all()
        for rows, width in zip(plan.groups, widths, strict=True):
            longest = max(lengths[row][axis] for row in rows)
            assert width == round_length(longest, multiple, caps[axis])


# --- Rows that carry no loss. ---


def test_riders_never_run_by_themselves() -> None:
    riders = [True, True, False, False]
    plan = plan_micro_batches([50, 50, 10, 10], launch_cost=0, riders=riders)
    assert groups_of(plan) == [[0, 1, 2], [3]]
    free = plan_micro_batches([50, 50, 10, 10], launch_cost=0)
    assert groups_of(free) == [[0, 1], [2, 3]]
    assert groups_of(plan_micro_batches([50, 10, 10], launch_cost=0, riders=[True] * 3)) == [[0], [1, 2]]
    assert groups_of(plan_micro_batches([50, 10, 10], launch_cost=0, riders=[False] * 3)) == [[0], [1, 2]]


@pytest.mark.parametrize("method", ["optimal", "greedy"])
def test_many_long_riders_stay_within_the_budget(method: Any) -> None:
    """Truncated completions without loss are the longest rows; each of their groups needs a shorter row."""
    lengths = np.r_[np.full(20, 300), np.arange(40, 80)]
    plan = plan_micro_batches(lengths, 1500, riders=lengths == 300, method=method)  # a warning would be an error
    assert_sound(plan)
    assert [len(rows) for rows in plan.groups[:5]] == [5, 5, 5, 5, 5]
    # The carriers that are lent are the longest: they would have been the dearest elsewhere.
    assert {lengths[rows].min() for rows in plan.groups[:5]} <= {75, 76, 77, 78, 79}


def test_riders_borrow_within_the_most_rows() -> None:
    plan = plan_micro_batches([30] * 4 + [10] * 4, max_rows=2, riders=[True] * 4 + [False] * 4)
    assert_sound(plan, 2)
    assert [plan.lengths[rows].ravel().tolist() for rows in plan.groups] == [[30, 10]] * 4


def test_riders_borrow_shorter_rows_before_longer_ones() -> None:
    lengths = np.r_[np.full(6, 100), np.full(12, 30), np.full(6, 5)]
    plan = plan_micro_batches(lengths, 300, launch_cost=1, riders=lengths == 30)
    assert_sound(plan)
    assert plan.slots == 6 * 100 + (12 + 2) * 30 + (6 - 2) * 5


def test_short_riders_share_the_last_carriers() -> None:
    plan = plan_micro_batches([100, 100, 1, 1], 200, riders=[False, False, True, True], launch_cost=0)
    assert_sound(plan)
    assert sorted(map(len, plan.groups)) == [2, 2]
    # A rider is no cheaper than the shortest carrier, so no more than two fit into a group.
    riders = [False, False, True, True, False, True, False]
    plan = plan_micro_batches([5, 5, 3, 1, 5, 2, 5], 14, launch_cost=1, riders=riders)
    assert_sound(plan)


def test_too_few_carriers_are_told() -> None:
    with pytest.warns(PadMinWarning) as caught:
        plan = plan_micro_batches([9, 9, 9, 9, 5], 20, riders=[True] * 4 + [False])
    assert groups_of(plan) == [[0, 1, 2, 3, 4]]
    assert len(caught) == 1
    assert "1 micro-batches exceed token_budget=20 or max_rows=5, the largest has 45 slots" in str(caught[0].message)


def test_one_slot_too_many_is_told() -> None:
    riders = [True, True, False]
    assert len(plan_micro_batches([7, 7, 7], 21, riders=riders)) == 1
    with pytest.warns(PadMinWarning, match="the largest has 21 slots"):
        plan_micro_batches([7, 7, 7], 20, riders=riders)
    with pytest.warns(PadMinWarning, match="token_budget=21 or max_rows=2, the largest has 21 slots"):
        plan_micro_batches([7, 7, 7], max_rows=2, riders=riders)


def test_a_rider_over_the_budget_takes_one_carrier() -> None:
    with pytest.warns(PadMinWarning) as caught:
        plan = plan_micro_batches([50, 45, 8, 7, 6], 30, riders=[True, True, False, False, False], launch_cost=1)
    assert sorted(map(len, plan.groups)) == [1, 2, 2]
    assert len(caught) == 1
    assert "2 of 5 rows exceed token_budget=30" in str(caught[0].message)
    assert "2 micro-batches exceed" in str(caught[0].message)


def test_over_budget_only_when_nothing_else_is_left() -> None:
    """A group over budget would save launches and slots here, but another plan keeps the rules."""
    plan = plan_micro_batches([10, 10, 10, 10], 20, riders=[False, True, True, False], launch_cost=1000)
    assert_sound(plan)
    assert len(plan) == 2


@pytest.mark.parametrize(
    ("lengths", "riders", "slots"),
    [
        ([1, 1, 1, 1, 1, 1, 2, 5, 5], [0, 0, 1, 1, 0, 1, 1, 1, 1], 48),
        ([1, 1, 1, 1, 1, 5, 1, 1, 2], [0, 0, 0, 0, 0, 1, 0, 0, 1], 44),
    ],
)
def test_riders_among_rows_of_one_rounded_length(lengths: list[int], riders: list[int], slots: int) -> None:
    options: dict[str, Any] = {"max_rows": 3, "launch_cost": 0, "pad_to_multiple_of": 4}
    plan = plan_micro_batches(lengths, 24, riders=np.array(riders, bool), **options)  # would warn over the limits
    assert plan.slots == slots


riding = st.integers(2, 9).flatmap(
    lambda n: st.tuples(
        st.lists(short_lengths, min_size=n, max_size=n), st.lists(st.booleans(), min_size=n, max_size=n)
    )
)


@settings(deadline=None, max_examples=150)
@given(riding, st.integers(1, 120), st.integers(1, 6), st.sampled_from([0, 3, 20]), st.sampled_from([1, 4]))
def test_riders_against_sorted_splits(
    rows: tuple[list[int], list[bool]], budget: int, max_rows: int, launch_cost: int, multiple: int
) -> None:
    lengths, riders = rows
    options: dict[str, Any] = {"max_rows": max_rows, "launch_cost": launch_cost, "pad_to_multiple_of": multiple}
    plan = quiet_plan(lengths, budget, riders=riders, **options)
    assert sorted(itertools.chain(*groups_of(plan))) == list(range(len(lengths)))
    assert all(riders) or not any(plan.riders[rows].all() for rows in plan.groups)
    shapes, rules = shapes_of(plan), rules_of(plan, max_rows)
    own = cost_of(groups_of(plan), shapes, **rules)
    split = best_of(sorted_splits(longest_first(shapes)), shapes, **rules)
    if split is not None:
        assert own is not None  # the rules are kept if the sorted order allows it
        assert own[0] <= split[0]
    filled = quiet_plan(lengths, budget, riders=riders, method="greedy", **options)
    assert all(riders) or not any(plan.riders[rows].all() for rows in filled.groups)
    greedy = cost_of(groups_of(filled), shapes, **rules)
    if greedy is not None:
        assert own is not None
        assert own[0] <= greedy[0]


@settings(deadline=None, max_examples=100)
@given(riding, st.integers(1, 120), st.integers(1, 6), st.sampled_from([0, 3, 20]))
def test_one_order_with_riders_is_cut_best(
    rows: tuple[list[int], list[bool]], budget: int, max_rows: int, launch_cost: int
) -> None:
    """For any order of the rows, sorted or not."""
    lengths, riders = np.array(rows[0]), np.array(rows[1])
    riders[riders.argmin() if not riders.all() else 0] = False
    limits = search.Limits(budget, max_rows, launch_cost)
    sizes = search.optimal_sizes(lengths[:, None], ~riders, limits)
    groups = [piece.tolist() for piece in np.split(np.arange(len(lengths)), np.cumsum(sizes)[:-1])]
    rules: dict[str, Any] = {"budget": budget, "launch_cost": launch_cost, "max_rows": max_rows, "riders": riders}
    shapes = [(int(length),) for length in lengths]
    assert not any(riders[group].all() for group in groups)
    assert cost_of(groups, shapes, **rules) == best_of(sorted_splits(range(len(lengths))), shapes, **rules)


@pytest.mark.parametrize("seed", range(5))
def test_riders_against_all_partitions_of_nine_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, riders = rng.integers(1, 60, 9), rng.random(9) < 0.4
    riders[rng.integers(9)] = False
    plan = plan_micro_batches(lengths, 240, max_rows=5, launch_cost=20, riders=riders, pad_to_multiple_of=2)
    assert_sound(plan, 5)
    assert_best(plan, set_partitions(9), 5)
    # The search over carriers and riders apart, used below for longer lists, finds the same.
    assert plan.cost == best_with_riders(plan)


def best_with_riders(plan: Plan) -> int:
    """Least cost of any partition into groups with a carrier: each takes the longest carriers and riders left."""
    rounded = plan.rounded[:, 0]
    carriers = sorted(rounded[~plan.riders].tolist(), reverse=True)
    riders = sorted(rounded[plan.riders].tolist(), reverse=True)

    @functools.cache
    def best(i: int, j: int) -> float:
        if i == len(carriers):
            return 0 if j == len(riders) else math.inf
        least = math.inf
        for more_carriers in range(1, len(carriers) - i + 1):
            for more_riders in range(len(riders) - j + 1):
                rows = more_carriers + more_riders
                area = rows * max(carriers[i], riders[j] if more_riders else 0)
                if rows > 1 and area > plan.token_budget:
                    break
                rest = best(i + more_carriers, j + more_riders)
                least = min(least, area + plan.launch_cost + rest)
        return least

    return int(best(0, 0))


@pytest.mark.parametrize("where", ["longest", "anywhere", "shortest", "truncated"])
def test_riders_cost_little_more_than_the_best_partition(where: str) -> None:
    own, best = 0, 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        lengths = (rng.lognormal(5, 1, 24) + 1).astype(int)
        if where == "truncated":
            lengths = np.minimum(lengths, 300)
        chosen = {
            "longest": lengths >= np.quantile(lengths, 0.8),
            "anywhere": rng.random(24) < 0.25,
            "shortest": lengths <= np.quantile(lengths, 0.2),
            "truncated": (lengths == 300) & (rng.random(24) < 0.8),
        }[where]
        plan = plan_micro_batches(lengths, int(lengths.max()) * 3, launch_cost=64, riders=chosen)
        assert_sound(plan)
        own, best = own + plan.cost, best + best_with_riders(plan)
    assert best <= own <= 1.01 * best


def test_riders_and_two_lengths() -> None:
    rng = np.random.default_rng(2)
    lengths, riders = rng.integers(1, 50, (40, 2)), rng.random(40) < 0.3
    assert_sound(plan_micro_batches(lengths, 400, riders=riders, max_rows=6), 6)


# --- Equal counts over ranks. ---


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(short_lengths, short_lengths, st.booleans()), min_size=2, max_size=14),
    st.integers(1, 2),
    st.booleans(),
)
def test_the_next_cut_is_the_best_one(rows: list[tuple[int, int, bool]], axes: int, with_riders: bool) -> None:
    riders = [row[2] and with_riders for row in rows]
    plan = quiet_plan([row[:axes] for row in rows], launch_cost=60, riders=riders)
    shapes = shapes_of(plan)
    savings = [
        area_of(rows, shapes) - area_of(rows[:cut], shapes) - area_of(rows[cut:], shapes)
        for rows in groups_of(plan)
        for cut in range(1, len(rows))
        if not plan.riders[rows[:cut]].all() and not plan.riders[rows[cut:]].all()
    ]
    finer = plan.at_least(len(plan) + 1)
    if savings:
        assert len(finer) == len(plan) + 1
        assert plan.slots - finer.slots == max(savings)
        assert_sound(finer)
    else:
        assert len(finer) == len(plan)


def test_cuts_until_nothing_is_left() -> None:
    plan = plan_micro_batches([7, 7, 5, 3, 2], launch_cost=10**6)
    assert plan.at_least(1) is plan
    assert len(plan.at_least(3)) == 3
    finest = plan.at_least(99)
    assert groups_of(finest) == [[0], [1], [2], [3], [4]]
    assert finest.waste == 0.0
    assert plan_micro_batches([7, 7, 5, 3, 2], min_micro_batches=3, launch_cost=10**6).slots == plan.at_least(3).slots
    slots = [plan.at_least(k).slots for k in range(1, 6)]
    assert slots == sorted(slots, reverse=True)


def test_cuts_leave_a_carrier_in_every_piece() -> None:
    riders = [False, True, True, False, True, True]
    plan = plan_micro_batches([9, 8, 7, 6, 5, 4], launch_cost=10**6, riders=riders)
    finest = plan.at_least(99)
    assert len(finest) == 2
    assert_sound(finest)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 45), st.integers(1, 8))
def test_cuts_keep_all_rules(lengths: list[int], k: int, max_rows: int) -> None:
    plan = quiet_plan(lengths, 150, min_micro_batches=k, max_rows=max_rows, pad_to_multiple_of=4)
    assert_sound(plan, max_rows)
    assert len(plan) >= min(k, len(lengths))


# --- What is accepted and what is refused. ---


@pytest.mark.parametrize("lengths", [[], np.zeros(0, np.int64), np.zeros((0, 2), np.int64), torch.zeros(0, dtype=int)])
@pytest.mark.parametrize("options", [{}, {"token_budget": 5}, {"riders": []}, {"method": "greedy", "max_width": 4}])
def test_no_rows(lengths: Any, options: dict[str, Any]) -> None:
    plan = plan_micro_batches(lengths, min_micro_batches=3, **options)
    assert (len(plan), plan.slots, plan.real_tokens, plan.cost, plan.waste) == (0, 0, 0, 0, 0.0)
    assert plan.widths.shape == (0, plan.lengths.shape[1])
    assert len(plan.at_least(5)) == 0


@pytest.mark.parametrize(
    "lengths", [(5, 3), np.array([5, 3], np.uint8), torch.tensor([5, 3]), np.array([[5], [3]]), [np.int32(5), 3]]
)
def test_kinds_of_lengths(lengths: Any) -> None:
    plan = plan_micro_batches(lengths, launch_cost=0)
    assert plan.lengths.tolist() == [[5], [3]]
    assert plan.lengths.dtype == plan.widths.dtype == plan.groups[0].dtype == plan.over_budget.dtype == np.int64


def test_the_input_is_not_kept() -> None:
    lengths = np.array([5, 3])
    plan = plan_micro_batches(lengths)
    lengths[:] = 1
    assert plan.lengths.tolist() == [[5], [3]]


class OnAnotherDevice:
    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert device tensor to numpy")


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 0, 5], r"lengths\[1\]=0 is not in 1"),
        ([3, 4, -2], r"lengths\[2\]=-2 is not in 1"),
        ([(3, 4), (5, 0)], r"lengths\[1\]=0 is not in 1"),
        ([3, 2**51], r"lengths\[1\]=2251799813685248 is not in 1"),
        ([3.0, 2.5], r"lengths\[1\]=\[2.5\] is float64; pass integers"),
        ([3.0], r"lengths\[0\]=\[3.0\] is float64; pass integers"),
        ([float("nan"), 2], r"lengths\[0\]=\[nan\] is float64"),
        (np.array([True]), r"lengths\[0\]=\[True\] is bool"),
        (["3"], r"lengths\[0\]=\['3'\] is <U1"),
        ([None], r"lengths\[0\]=\[None\] is object"),
        ([2**70], r"lengths\[0\]=\[1180591620717411303424\] is object"),
        (7, r"lengths has shape \(\); pass \(B,\)"),
        (np.ones((2, 3), int), r"lengths has shape \(2, 3\)"),
        (np.ones((2, 1, 1), int), r"lengths has shape \(2, 1, 1\)"),
        ([[1, 2], [3]], r"lengths is no array in host memory"),
        (OnAnotherDevice(), r"lengths is no array in host memory \(can't convert device tensor"),
        (np.full(2**13, 2**50), r"8192 rows x longest = 9223372036854775808 slots is above 2\*\*62"),
    ],
)
def test_bad_lengths(lengths: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_micro_batches(lengths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 0}, "token_budget=0 must be an integer, at least 1"),
        ({"token_budget": -5}, "token_budget=-5 must be"),
        ({"token_budget": True}, "token_budget=True must be an integer"),
        ({"token_budget": 16.0}, "token_budget=16.0 must be an integer"),
        ({"token_budget": "16"}, "token_budget='16' must be an integer"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0 must be an integer, at least 1"),
        ({"pad_to_multiple_of": 2**60}, "pad_to_multiple_of=1152921504606846976 is too large"),
        ({"pad_to_multiple_of": None}, "pad_to_multiple_of=None must be"),
        ({"max_rows": 0}, "max_rows=0 must be an integer, at least 1"),
        ({"max_rows": 2.5}, "max_rows=2.5 must be"),
        ({"min_micro_batches": 0}, "min_micro_batches=0 must be an integer, at least 1"),
        ({"min_micro_batches": False}, "min_micro_batches=False must be"),
        ({"launch_cost": -1}, "launch_cost=-1 must be an integer, at least 0"),
        ({"launch_cost": 1.5}, "launch_cost=1.5 must be"),
        ({"launch_cost": 2**60}, "launch_cost=1152921504606846976 is too large"),
        ({"method": "best"}, "method='best' is unknown; use 'optimal' or 'greedy'"),
        ({"method": None}, "method=None is unknown"),
        ({"max_width": 0}, "max_width=0 must be an integer, at least 1"),
        ({"max_width": 6}, r"lengths\[1\]=7 is above max_width=6"),
        ({"max_width": (9, 9)}, r"max_width=\(9, 9\) must be an integer, or 1: one per axis"),
        ({"max_width": 9.5}, "max_width=9.5 must be an integer"),
        ({"riders": [True]}, r"riders has shape \(1,\) of bool; pass one bool per row: \(3,\)"),
        ({"riders": [0, 1, 0]}, r"riders has shape \(3,\) of int64"),
        ({"riders": True}, r"riders has shape \(\) of bool"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_micro_batches([5, 7, 2], **options)


@pytest.mark.parametrize("k", [0, -1, True, 2.0, None])
def test_bad_number_of_micro_batches(k: Any) -> None:
    with pytest.raises(PlanError, match=f"k={k!r} must be an integer, at least 1"):
        plan_micro_batches([5, 7, 2]).at_least(k)


def test_width_per_axis() -> None:
    with pytest.raises(PlanError, match=r"lengths\[0\]=8 is above max_width=\(9, 7\)"):
        plan_micro_batches([(9, 8)], max_width=(9, 7))
    plan = plan_micro_batches([(9, 5)], pad_to_multiple_of=8, max_width=(10, 7))
    assert plan.widths.tolist() == [[10, 7]]
