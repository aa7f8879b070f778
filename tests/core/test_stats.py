"""Counts are summed over batches and ranks; ratios are taken last."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_padmin.errors import PadMinError
from lightning_padmin.stats import PaddingStats

NAMES = [field.name for field in fields(PaddingStats)]
# Two rows of 3 and 5 attended tokens, 8 wide; run as (1, 3) and (1, 5) plus a dummy (1, 3).
ONE_BATCH = PaddingStats(
    batches=1,
    rows=2,
    real_tokens=8,
    loss_tokens=4,
    slots_before=16,
    slots=11,
    micro_batches=3,
    dummies=1,
    over_budget_rows=0,
    wait_slots=5,
    longest_row=5,
)
counts = st.lists(st.integers(0, 2**40), min_size=len(NAMES), max_size=len(NAMES))


def test_ratios() -> None:
    assert ONE_BATCH.waste_before == 0.5
    assert ONE_BATCH.waste == pytest.approx(3 / 11)  # the dummy's slots were run too
    assert ONE_BATCH.idle == pytest.approx(5 / 16)


def test_nothing_counted_is_no_waste() -> None:
    empty = PaddingStats()
    assert (empty.waste, empty.waste_before, empty.idle) == (0.0, 0.0, 0.0)
    assert set(empty.metrics().values()) == {0}


def test_ratios_are_not_averaged() -> None:
    full = PaddingStats(real_tokens=1000, slots=1000, slots_before=1000)
    empty = PaddingStats(real_tokens=1, slots=10, slots_before=10)
    both = full + empty
    assert both.waste == pytest.approx(1 - 1001 / 1010)
    assert both.waste != pytest.approx((full.waste + empty.waste) / 2)


def test_sums_but_for_the_longest_row() -> None:
    other = replace(ONE_BATCH, longest_row=3)
    both = ONE_BATCH + other
    for name in NAMES:
        expected = 5 if name == "longest_row" else 2 * getattr(ONE_BATCH, name)
        assert getattr(both, name) == expected
    assert other + ONE_BATCH == both == ONE_BATCH.merge(other)
    assert ONE_BATCH.slots == 11  # neither operand has changed
    assert sum([ONE_BATCH, other], PaddingStats()) == both


def test_adds_only_its_own_kind() -> None:
    with pytest.raises(TypeError):
        ONE_BATCH + 1  # type: ignore[operator]


@settings(deadline=None, max_examples=50)
@given(st.lists(counts, min_size=1, max_size=5))
def test_merging_ranks_is_adding_them(table: list[list[int]]) -> None:
    total = PaddingStats()
    for row in table:
        total = total + PaddingStats.from_counts(row)
    assert PaddingStats.merge_ranks(np.array(table)) == total
    assert PaddingStats.merge_ranks(np.array(table[::-1])) == total
    assert all(type(value) is int for value in total.as_counts())


def test_the_order_of_the_counts_is_fixed() -> None:
    """Ranks send each other bare integers."""
    assert ONE_BATCH.as_counts() == [1, 2, 8, 4, 16, 11, 3, 1, 0, 5, 5]
    assert PaddingStats.from_counts(np.array(ONE_BATCH.as_counts())) == ONE_BATCH


def test_no_overflow_over_ranks() -> None:
    merged = PaddingStats.merge_ranks(np.full((4, len(NAMES)), 2**62))
    assert (merged.slots, merged.longest_row) == (2**64, 2**62)


@pytest.mark.parametrize(
    "table", [[[1, 2]], [1] * len(NAMES), np.ones((2, len(NAMES))), np.ones((1, len(NAMES) + 1), int), [[]]]
)
def test_counts_of_another_version_are_refused(table: Any) -> None:
    with pytest.raises(PadMinError, match=r"counts have shape .* of .*: run the same version"):
        PaddingStats.merge_ranks(table)


def test_counts_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(PadMinError, match=r"shape \(1, 10\)"):
        PaddingStats.from_counts(ONE_BATCH.as_counts()[:-1])


def test_metrics() -> None:
    assert ONE_BATCH.metrics() == {
        "padmin/waste": pytest.approx(3 / 11),
        "padmin/waste_before": 0.5,
        "padmin/real_tokens": 8,
        "padmin/loss_tokens": 4,
        "padmin/slots": 11,
        "padmin/micro_batches": 3,
        "padmin/longest_row": 5,
        "padmin/dummies": 1,
        "padmin/over_budget_rows": 0,
        "padmin/idle": pytest.approx(5 / 16),
    }
    assert set(ONE_BATCH.metrics("")) == {name.removeprefix("padmin/") for name in ONE_BATCH.metrics()}
    assert all(type(value) in (int, float) for value in ONE_BATCH.metrics().values())


def test_state_survives_a_checkpoint() -> None:
    state = ONE_BATCH.state_dict()
    assert all(type(value) is int for value in state.values())
    loaded = PaddingStats(slots=99)
    loaded.load_state_dict(state)
    assert loaded == ONE_BATCH


def test_a_numpy_count_becomes_a_plain_one() -> None:
    stats = PaddingStats(slots=np.int64(3))
    assert type(stats.state_dict()["slots"]) is int
    stats.load_state_dict({"slots": np.int64(4)})
    assert type(stats.slots) is int


def test_a_state_without_some_count_starts_it_at_zero() -> None:
    stats = PaddingStats(slots=3, rows=2)
    stats.load_state_dict({"slots": 4})
    assert (stats.slots, stats.rows) == (4, 0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"slots": 4, "slot": 1}, "'slot' is no count of PaddingStats"),
        ({"slots": 4, "rows": 1.5}, "rows=1.5 must be an integer"),
        ({"slots": 4, "rows": None}, "rows=None must be an integer"),
        ({"slots": 4, "rows": True}, "rows=True must be an integer"),
    ],
)
def test_a_bad_state_changes_nothing(state: dict[str, Any], message: str) -> None:
    stats = replace(ONE_BATCH)
    with pytest.raises(PadMinError, match=message):
        stats.load_state_dict(state)
    assert stats == ONE_BATCH
