"""Planning where slots are not the cost: models that pad inside, and attention on wide rows. Limits stay slots."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_padmin.errors import PadMinWarning, PlanError
from lightning_padmin.planning import search
from lightning_padmin.planning.plan import Plan
from lightning_padmin.planning.planner import plan_micro_batches

Groups = list[list[int]]
Shapes = Sequence[tuple[int, ...]]

CHUNK = 256
SHORT = [120, 90, 200, 40, 55, 30, 210, 65]  # no row fills a chunk


# --- Exhaustive search, in plain Python and without a line of the planner. ---


def up(width: int, multiple: int) -> int:
    return (width + multiple - 1) // multiple * multiple


def with_attention(width: int, attention_width: int | None) -> int:
    return width if attention_width is None else width + width * width // attention_width


def layout_of(lengths: Shapes, multiple: int, cap: int | None) -> Shapes:
    return [tuple(min(up(length, multiple), cap or 10**9) for length in row) for row in lengths]


def widths_of(group: Sequence[int], shapes: Shapes) -> list[int]:
    return [max(shapes[row][axis] for row in group) for axis in range(len(shapes[0]))]


class Rules:
    """What a plan may not do, and what it costs."""

    def __init__(
        self,
        shapes: Shapes,
        budget: int | None,
        launch_cost: int,
        cost_width: Callable[[int], int],
        max_rows: int | None = None,
        riders: Sequence[bool] = (),
    ) -> None:
        self.shapes, self.launch_cost, self.cost_width = shapes, launch_cost, cost_width
        self.budget, self.max_rows = budget or 10**9, max_rows or 10**9
        self.riders = [] if all(riders) else riders

    def key(self, groups: Groups) -> tuple[float, int, int]:
        """Cost, groups and slots, in the order in which they decide; the cost is infinite where a rule is broken."""
        cost: float = 0
        slots = 0
        for group in groups:
            widths = widths_of(group, self.shapes)
            area = len(group) * sum(widths)
            if len(group) > 1 and (area > self.budget or len(group) > self.max_rows):
                cost = math.inf
            if self.riders and all(self.riders[row] for row in group):
                cost = math.inf
            slots += area
            cost += len(group) * sum(self.cost_width(width) for width in widths) + self.launch_cost
        return cost, len(groups), slots

    def best(self, candidates: Iterator[Groups]) -> tuple[float, int, int]:
        return min(map(self.key, candidates))


def set_partitions(rows: int) -> Iterator[Groups]:
    """All ways to group `rows` rows: 877 for 7 rows, 21,147 for 9."""
    if rows == 0:
        yield []
        return
    for smaller in set_partitions(rows - 1):
        for i in range(len(smaller)):
            yield [*smaller[:i], [*smaller[i], rows - 1], *smaller[i + 1 :]]
        yield [*smaller, [rows - 1]]


def sorted_splits(order: Sequence[int]) -> Iterator[Groups]:
    """All ways to cut a list into runs."""
    for cuts in itertools.product((False, True), repeat=len(order) - 1):
        at = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(order)]
        yield [list(order[a:b]) for a, b in itertools.pairwise(at)]


def longest_first(shapes: Shapes) -> list[int]:
    return sorted(range(len(shapes)), key=lambda row: (-sum(shapes[row]), -shapes[row][0], row))


def groups_of(plan: Plan) -> Groups:
    return [rows.tolist() for rows in plan.groups]


def key_of(plan: Plan) -> tuple[int, int, int]:
    return plan.cost, len(plan), plan.slots


def quiet_plan(*args: Any, **kwargs: Any) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PadMinWarning)
        return plan_micro_batches(*args, **kwargs)


def planned(lengths: Shapes, options: dict[str, Any], riders: Sequence[bool] = ()) -> tuple[Plan, Rules]:
    """A plan that keeps the layout of its options, and the rules by which it is judged."""
    plan = quiet_plan(lengths, **options, riders=riders or None)
    multiple, chunk = options["pad_to_multiple_of"], options["cost_multiple_of"]
    shapes = layout_of(lengths, multiple, options.get("max_width"))
    rules = Rules(
        shapes,
        options["token_budget"],
        options["launch_cost"],
        lambda width: with_attention(up(width, chunk), options.get("attention_width")),
        options["max_rows"],
        riders,
    )
    assert sorted(itertools.chain(*groups_of(plan))) == list(range(len(lengths)))
    assert plan.widths.tolist() == [widths_of(group, shapes) for group in groups_of(plan)]
    assert plan.cost == sum(
        len(group) * sum(rules.cost_width(width) for width in widths_of(group, shapes)) + plan.launch_cost
        for group in groups_of(plan)
    )
    return plan, rules


# --- Against exhaustive search. ---

options = st.fixed_dictionaries(
    {
        "token_budget": st.none() | st.integers(1, 120),
        "pad_to_multiple_of": st.sampled_from([1, 1, 3, 8]),
        "cost_multiple_of": st.sampled_from([1, 2, 4, 12, 16, 32]),
        "max_rows": st.none() | st.integers(1, 5),
        "launch_cost": st.sampled_from([0, 1, 5, 16, 128]),
        "max_width": st.none() | st.integers(30, 37),
        "attention_width": st.none() | st.sampled_from([1, 7, 20, 1000]),
    }
)
short_lengths = st.integers(1, 30)


def one_axis(least: int, most: int) -> st.SearchStrategy[list[tuple[int, ...]]]:
    return st.lists(st.tuples(short_lengths), min_size=least, max_size=most)


@settings(deadline=None, max_examples=100)
@given(one_axis(1, 7), options)
def test_no_partition_at_all_is_better(lengths: Shapes, options: dict[str, Any]) -> None:
    plan, rules = planned(lengths, options)
    assert key_of(plan) == rules.key(groups_of(plan)) == rules.best(set_partitions(len(lengths)))


@settings(deadline=None, max_examples=80)
@given(one_axis(8, 9), options)
def test_no_split_of_the_sorted_rows_is_better(lengths: Shapes, options: dict[str, Any]) -> None:
    plan, rules = planned(lengths, options)
    assert key_of(plan) == rules.key(groups_of(plan)) == rules.best(sorted_splits(longest_first(rules.shapes)))


@pytest.mark.parametrize("seed", range(4))
def test_no_partition_of_nine_rows_is_better(seed: int) -> None:
    lengths = [(int(length),) for length in np.random.default_rng(seed).integers(1, 60, 9)]
    options = {"token_budget": 200, "pad_to_multiple_of": 1 + seed % 2, "cost_multiple_of": 16, "launch_cost": 20}
    plan, rules = planned(lengths, {**options, "max_rows": 3 + seed})
    assert key_of(plan) == rules.key(groups_of(plan)) == rules.best(set_partitions(9))


@settings(deadline=None, max_examples=60)
@given(
    one_axis(1, 6),
    st.lists(st.integers(0, 9), min_size=30, max_size=30),
    st.integers(1, 120),
    st.none() | st.integers(1, 4),
    st.integers(0, 40),
)
def test_sorted_runs_are_enough_for_every_monotone_cost(
    lengths: Shapes, steps: list[int], budget: int, max_rows: int | None, launch_cost: int
) -> None:
    costs = [0, *itertools.accumulate(steps)]
    rules = Rules(lengths, budget, launch_cost, costs.__getitem__, max_rows)
    assert rules.best(sorted_splits(longest_first(lengths))) == rules.best(set_partitions(len(lengths)))


def test_sorted_runs_are_not_enough_for_other_costs() -> None:
    rules = Rules([(4,), (3,), (2,)], None, 0, {4: 1, 3: 5, 2: 20}.__getitem__, 2)
    assert rules.key([[0, 2], [1]])[0] == 7
    assert rules.best(sorted_splits([0, 1, 2]))[0] == 11


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(short_lengths, short_lengths), min_size=1, max_size=8), options)
def test_two_lengths_per_row_are_rounded_apart(lengths: Shapes, options: dict[str, Any]) -> None:
    plan, rules = planned(lengths, options)
    assert key_of(plan) == rules.key(groups_of(plan)) == rules.best(sorted_splits(longest_first(rules.shapes)))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(short_lengths), min_size=1, max_size=60), options)
def test_never_worse_than_greedy(lengths: Shapes, options: dict[str, Any]) -> None:
    best = quiet_plan(lengths, **options)
    greedy = quiet_plan(lengths, **options, method="greedy")
    assert key_of(best) <= key_of(greedy)
    assert groups_of(greedy) == groups_of(quiet_plan(lengths, **{**options, "cost_multiple_of": 1}, method="greedy"))
    for plan in (best, greedy):
        assert all(
            len(rows) == 1 or slots <= plan.token_budget
            for rows, slots in zip(plan.groups, plan.slots_per_group, strict=True)
        )


@pytest.mark.parametrize("size", [60, 300])
@pytest.mark.parametrize("chunk", [1, 64, 256, 4096])
def test_long_lists_against_the_plain_recurrence(size: int, chunk: int) -> None:
    """Runs that the planner does not even look at are in no best plan."""
    rng = np.random.default_rng(size)
    for launch_cost, factor in itertools.product((0, 7, 128, 5000), (4, size)):
        lengths = sorted((rng.lognormal(5, 1, size) + 1).astype(int).tolist(), reverse=True)
        budget = max(lengths) * factor
        best: list[tuple[int, int, int]] = [(0, 0, 0)]
        for end in range(1, size + 1):
            ends = [
                (cost + up(lengths[i], chunk) * (end - i) + launch_cost, groups + 1, slots + lengths[i] * (end - i))
                for i, (cost, groups, slots) in enumerate(best)
                if end - i == 1 or lengths[i] * (end - i) <= budget
            ]
            best.append(min(ends))
        plan = plan_micro_batches(lengths, budget, launch_cost=launch_cost, cost_multiple_of=chunk)
        assert key_of(plan) == best[size]


# --- Rows that carry no loss. ---

riding = st.integers(2, 9).flatmap(
    lambda n: st.tuples(
        st.lists(short_lengths, min_size=n, max_size=n), st.lists(st.booleans(), min_size=n, max_size=n)
    )
)


@settings(deadline=None, max_examples=150)
@given(riding, options)
def test_riders_against_sorted_splits(rows: tuple[list[int], list[bool]], options: dict[str, Any]) -> None:
    lengths, riders = [(length,) for length in rows[0]], rows[1]
    plan, rules = planned(lengths, options, riders)
    assert all(riders) or not any(plan.riders[group].all() for group in plan.groups)
    own = rules.key(groups_of(plan))
    # Infinite on the right is a sorted order that does not allow it; finite there must be finite here.
    assert own[0] <= rules.best(sorted_splits(longest_first(rules.shapes)))[0]
    greedy = quiet_plan(lengths, **options, riders=riders, method="greedy")
    assert own[0] <= rules.key(groups_of(greedy))[0]
    unchanged = quiet_plan(lengths, **{**options, "cost_multiple_of": 1}, riders=riders, method="greedy")
    assert groups_of(greedy) == groups_of(unchanged)


@settings(deadline=None, max_examples=150)
@given(riding, st.integers(1, 120), st.integers(1, 6), st.sampled_from([0, 3, 20]), st.sampled_from([1, 4, 16]))
def test_one_order_with_riders_is_cut_best(
    rows: tuple[list[int], list[bool]], budget: int, max_rows: int, launch_cost: int, chunk: int
) -> None:
    """For any order of the rows, sorted or not."""
    lengths, riders = np.array(rows[0]), np.array(rows[1])
    riders[riders.argmin() if not riders.all() else 0] = False
    limits = search.Limits(budget, max_rows, launch_cost, search.SlotCost(chunk))
    sizes = search.optimal_sizes(lengths[:, None], ~riders, limits)
    groups = [piece.tolist() for piece in np.split(np.arange(len(lengths)), np.cumsum(sizes)[:-1])]
    shapes = [(length,) for length in rows[0]]
    rules = Rules(shapes, budget, launch_cost, lambda width: up(width, chunk), max_rows, riders.tolist())
    own, best = rules.key(groups), rules.best(sorted_splits(range(len(lengths))))
    assert own == best or own[0] == best[0] == math.inf


@pytest.mark.parametrize("seed", range(5))
def test_riders_against_all_partitions_of_nine_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, riders = [(int(length),) for length in rng.integers(1, 60, 9)], rng.random(9) < 0.4
    riders[rng.integers(9)] = False
    options = {"token_budget": 240, "pad_to_multiple_of": 2, "cost_multiple_of": 16, "launch_cost": 20, "max_rows": 5}
    plan, rules = planned(lengths, options, riders.tolist())
    assert rules.key(groups_of(plan)) == key_of(plan)
    assert key_of(plan)[:2] == rules.best(set_partitions(9))[:2]


@pytest.mark.parametrize(
    ("lengths", "riders", "budget", "max_rows", "launch_cost", "chunk"),
    [
        ([17, 15, 8, 11, 8, 11], [1, 1, 0, 1, 1, 0], 79, 5, 5, 16),  # by cost: another has 10 slots less
        ([25, 27, 3, 14, 30, 2, 10, 26], [1, 0, 0, 1, 0, 1, 1, 0], 103, 5, 0, 4),  # then by groups
        ([6, 23, 5, 2], [1, 0, 0, 1], 106, 2, 5, 8),  # then by slots
    ],
)
def test_the_best_of_the_orders_with_riders_is_taken(
    lengths: list[int], riders: list[int], budget: int, max_rows: int, launch_cost: int, chunk: int
) -> None:
    options = {"token_budget": budget, "max_rows": max_rows, "launch_cost": launch_cost, "pad_to_multiple_of": 1}
    rows = [(length,) for length in lengths]
    plan, rules = planned(rows, {**options, "cost_multiple_of": chunk}, [bool(rider) for rider in riders])
    assert key_of(plan) == rules.best(set_partitions(len(lengths)))


def test_riders_borrow_within_the_budget_of_the_layout() -> None:
    lengths = np.r_[np.full(20, 300), np.arange(40, 80)]
    plan = plan_micro_batches(lengths, 1500, riders=lengths == 300, cost_multiple_of=CHUNK)  # a warning is an error
    assert plan.slots_per_group.max() <= 1500
    assert [len(rows) for rows in plan.groups[:5]] == [5] * 5
    assert not any(plan.riders[rows].all() for rows in plan.groups)


# --- What it is good for. ---


def chunked_cost(plan: Plan) -> int:
    """What the model computes, in positions, and the launches."""
    return sum(len(rows) * up(int(plan.rounded[rows].max()), CHUNK) + plan.launch_cost for rows in plan.groups)


def test_rows_shorter_than_a_chunk_are_not_cut_apart_for_nothing() -> None:
    plain, chunked = plan_micro_batches(SHORT), plan_micro_batches(SHORT, cost_multiple_of=CHUNK)
    assert [len(rows) for rows in plain.groups] == [2, 2, 4]
    assert [len(rows) for rows in chunked.groups] == [8]
    assert plain.slots < chunked.slots  # what the cuts save is not what the model computes
    assert chunked_cost(plain) == 8 * CHUNK + 3 * 128
    assert chunked.cost == chunked_cost(chunked) == 8 * CHUNK + 128
    assert chunked_cost(plain) > chunked_cost(chunked)


def test_cuts_between_chunks_stay() -> None:
    lengths = [250, 200, 300, 280, 1000, 30]
    plan = plan_micro_batches(lengths, cost_multiple_of=CHUNK)
    assert groups_of(plan) == [[4], [2, 3], [0, 1, 5]]
    assert plan.cost == 1024 + 2 * 512 + 3 * 256 + 3 * 128


def test_the_budget_is_one_of_slots() -> None:
    # At 256 wide not even two rows would fit; at their own widths all of them do but one.
    plan = plan_micro_batches(SHORT, 900, cost_multiple_of=CHUNK)
    assert plan.over_budget.tolist() == []
    assert plan.slots_per_group.max() <= 900
    assert chunked_cost(plan) < chunked_cost(plan_micro_batches(SHORT, 900))
    tight = plan_micro_batches([40, 40, 40], 120, cost_multiple_of=CHUNK)
    assert (len(tight), tight.token_budget, tight.slots) == (1, 120, 120)
    with pytest.warns(PadMinWarning, match="1 of 2 rows exceed token_budget=100 and run alone.*row 1 with 120 slots"):
        plan_micro_batches([40, 120], 100, cost_multiple_of=CHUNK)


def test_of_equal_costs_fewer_groups_and_then_fewer_slots() -> None:
    # Whichever way: two groups, six rows of one chunk. The cut after the long rows leaves the fewest slots.
    plan = plan_micro_batches([200, 190, 20, 19, 18, 17], 600, cost_multiple_of=CHUNK)
    assert [len(rows) for rows in plan.groups] == [2, 4]
    assert plan.slots == 2 * 200 + 4 * 20
    assert len(plan_micro_batches([200, 190, 20], 600, cost_multiple_of=CHUNK, launch_cost=0)) == 1


def test_cost_widths_may_pass_the_width_of_the_batch() -> None:
    plan = plan_micro_batches([300, 300], max_width=300, pad_to_multiple_of=64, cost_multiple_of=CHUNK)
    assert (plan.widths.tolist(), plan.slots, plan.token_budget) == ([[300]], 600, 600)
    assert plan.cost == 2 * 512 + 128
    pairs = plan_micro_batches([(300, 10)], max_width=(300, 12), cost_multiple_of=CHUNK)
    assert (pairs.slots, pairs.cost) == (310, 512 + 256 + 128)


def test_multiples_that_do_not_divide_each_other() -> None:
    plan = plan_micro_batches([40], pad_to_multiple_of=24, cost_multiple_of=32)
    assert (plan.slots, plan.cost, plan.slot_cost.multiple) == (48, 64 + 128, 32)


def test_greedy_tells_the_same_cost() -> None:
    plan = plan_micro_batches(SHORT, 900, method="greedy", cost_multiple_of=CHUNK)
    assert groups_of(plan) == groups_of(plan_micro_batches(SHORT, 900, method="greedy"))
    assert plan.cost == chunked_cost(plan)


# --- Off by default. ---


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(short_lengths), min_size=1, max_size=30), options)
def test_a_divisor_of_the_padding_changes_no_plan(lengths: Shapes, options: dict[str, Any]) -> None:
    options = {**options, "pad_to_multiple_of": 8, "max_width": None, "attention_width": None}
    plain = quiet_plan(lengths, **{**options, "cost_multiple_of": 1})
    assert plain.cost == plain.slots + plain.launch_cost * len(plain)
    for divisor in (2, 8):
        other = quiet_plan(lengths, **{**options, "cost_multiple_of": divisor})
        assert key_of(other) == key_of(plain)
        assert groups_of(other) == groups_of(plain)


def test_the_default_plans_as_before() -> None:
    lengths = (np.random.default_rng(7).lognormal(5, 1, 64) + 1).astype(int)
    for options in ({}, {"cost_multiple_of": 1}):
        plan = plan_micro_batches(lengths, 2000, pad_to_multiple_of=8, max_width=1101, **options)
        assert [len(rows) for rows in plan.groups] == [1, 3, 1, 3, 5, 6, 10, 8, 10, 6, 11]
        assert key_of(plan) == (13485, 11, 12077)
        assert plan.slot_cost.multiple == 1


# --- More micro-batches. ---


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(short_lengths, short_lengths, st.booleans()), min_size=2, max_size=14),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from([4, 16]),
)
def test_the_next_cut_is_the_best_one(
    rows: list[tuple[int, int, bool]], axes: int, with_riders: bool, chunk: int
) -> None:
    riders = [row[2] and with_riders for row in rows]
    lengths = [row[:axes] for row in rows]
    plan = quiet_plan(lengths, launch_cost=60, riders=riders, cost_multiple_of=chunk)
    rules = Rules(lengths, None, 60, lambda width: up(width, chunk), riders=riders)
    groups = groups_of(plan)
    finer = [
        rules.key([*groups[:i], rows[:cut], rows[cut:], *groups[i + 1 :]])
        for i, rows in enumerate(groups)
        for cut in range(1, len(rows))
    ]
    best = min(finer, default=(math.inf, 0, 0))
    own = plan.at_least(len(plan) + 1)
    assert key_of(own) == (best if best[0] < math.inf else key_of(plan))


def test_cuts_without_a_saving_of_cost_still_save_slots() -> None:
    plan = plan_micro_batches(SHORT, cost_multiple_of=CHUNK, min_micro_batches=2)
    assert [len(rows) for rows in plan.groups] == [3, 5]
    assert plan.cost == 8 * CHUNK + 2 * 128
    assert plan.slots == 3 * 210 + 5 * 90
    assert len(plan.at_least(99)) == 8


# --- Large numbers, and what is refused. ---


def test_huge_numbers_give_the_same_cost() -> None:
    """Where scaled costs have no room for slots, and where they do not fit in 64 bits at all."""
    rng = np.random.default_rng(5)
    lengths, riders = rng.integers(1, 500, 60), rng.random(60) < 0.2
    for given_riders in (None, riders):
        options = {"riders": given_riders}
        small = plan_micro_batches(lengths, 3000, launch_cost=60, cost_multiple_of=64, **options)
        for scale in (2**12, 2**20, 2**40):
            big = plan_micro_batches(
                lengths * scale, 3000 * scale, launch_cost=60 * scale, cost_multiple_of=64 * scale, **options
            )
            assert (big.cost, len(big)) == (small.cost * scale, len(small))
            assert big.slots_per_group.max() <= 3000 * scale


@pytest.mark.parametrize("prices", [2, 65_538])
def test_many_rows_are_planned_in_64_bits(prices: int) -> None:
    limits = search.Limits(16_384, 65_536, 128, search.SlotCost(CHUNK))
    assert search._scaled(np.full(65_536, 1000), limits, prices).rows.dtype == np.int64


def test_squares_that_leave_64_bits_are_refused() -> None:
    with pytest.raises(PlanError, match=r"attention_width=64: the square of \d+ tokens is too large"):
        plan_micro_batches([2**40, 5], attention_width=64)


def test_attention_cuts_wide_rows_apart() -> None:
    """Rows of 1,000 and 990 tokens: a launch costs more than the padding of one group, until attention counts."""
    lengths = [1000] * 4 + [990] * 4
    assert groups_of(plan_micro_batches(lengths)) == [list(range(8))]
    plan = plan_micro_batches(lengths, attention_width=100)
    assert groups_of(plan) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan.cost == 4 * (1000 + 10_000) + 4 * (990 + 9801) + 2 * 128
    assert plan.slots == 4 * 1000 + 4 * 990


def test_no_rows() -> None:
    plan = plan_micro_batches([], cost_multiple_of=CHUNK)
    assert (len(plan), plan.cost, len(plan.at_least(3))) == (0, 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost_multiple_of": 0}, "cost_multiple_of=0 must be an integer, at least 1"),
        ({"cost_multiple_of": -4}, "cost_multiple_of=-4 must be"),
        ({"cost_multiple_of": True}, "cost_multiple_of=True must be an integer"),
        ({"cost_multiple_of": 256.0}, "cost_multiple_of=256.0 must be an integer"),
        ({"attention_width": 0}, "attention_width=0 must be an integer, at least 1"),
        ({"attention_width": 2.5}, "attention_width=2.5 must be"),
        ({"cost_multiple_of": None}, "cost_multiple_of=None must be"),
        ({"cost_multiple_of": 2**60}, "cost_multiple_of=1152921504606846976 is too large"),
    ],
)
@pytest.mark.parametrize("method", ["optimal", "greedy"])
def test_bad_options(options: dict[str, Any], message: str, method: Any) -> None:
    with pytest.raises(PlanError, match=message):
        plan_micro_batches([5, 7, 2], method=method, **options)


def test_costs_beyond_the_integers_are_refused() -> None:
    assert len(plan_micro_batches(np.ones(2**13, int))) == 1
    with pytest.raises(
        PlanError, match=r"cost_multiple_of: 8192 rows x longest = 9223372036854775808 slots is above 2\*\*62"
    ):
        plan_micro_batches(np.ones(2**13, int), cost_multiple_of=2**50)
