"""What the planner is given: what is taken as it is, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_padmin.errors import PlanError
from lightning_padmin.planning.inputs import (
    MOST,
    as_lengths,
    as_riders,
    as_slot_cost,
    check_integer,
    rounded_lengths,
    slots_of_all,
)


def test_integers() -> None:
    for value in (1, np.int32(1), 2**40):
        assert type(check_integer("n", value)) is int
        assert check_integer("n", value) == value
    assert check_integer("n", 0, least=0) == 0
    assert check_integer("n", 7, most=7) == 7
    for value in (0, -1, 1.0, "1", True, None):
        with pytest.raises(PlanError, match=r"n=.* must be an integer, at least 1"):
            check_integer("n", value)
    with pytest.raises(PlanError, match="n=8 is too large, use at most 7"):
        check_integer("n", 8, most=7)


def test_what_a_width_costs() -> None:
    rounded = np.array([[8], [4]])
    assert as_slot_cost(2, None, rounded) == (2, 0)
    cost = as_slot_cost(2, 64, rounded)
    assert (cost.multiple, cost.attention_width) == (2, 64)
    as_slot_cost(8, 64, np.array([[2**31 - 8]]))
    with pytest.raises(PlanError, match=f"the square of {2**31 - 7} tokens is too large"):
        as_slot_cost(8, 64, np.array([[2**31 - 7]]))
    as_slot_cost(8, None, np.array([[2**31]]))  # no square
    as_slot_cost(1, 64, np.zeros((0, 1), np.int64))
    for options, name in (
        ((0, None), "cost_multiple_of"),
        ((1, 0), "attention_width"),
        ((MOST + 1, None), "too large"),
    ):
        with pytest.raises(PlanError, match=name):
            as_slot_cost(*options, rounded)


def test_slots_of_all_rows() -> None:
    assert slots_of_all("plan", np.array([[3, 5], [4, 1]])) == 2 * (4 + 5)
    assert slots_of_all("plan", np.zeros((0, 2), np.int64)) == 0
    assert slots_of_all("plan", np.full((2, 1), 2**60)) == 2**61
    with pytest.raises(PlanError, match=r"plan: 4 rows x longest = .* above 2\*\*62"):
        slots_of_all("plan", np.full((4, 1), 2**60))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([3, 1, 2**50], [[3], [1], [2**50]]),
        (torch.tensor([2, 5]), [[2], [5]]),
        (np.array([[1, 2], [3, 4]], np.uint8), [[1, 2], [3, 4]]),
    ],
)
def test_lengths(given: Any, expected: list[list[int]]) -> None:
    lengths = as_lengths(given)
    assert (lengths.tolist(), lengths.dtype) == (expected, np.int64)


def test_no_lengths() -> None:
    assert as_lengths([]).shape == (0, 1)
    assert as_lengths(np.zeros((0, 2))).shape == (0, 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([3, 0], r"lengths\[1\]=0 is not in 1"),
        ([[3, 1], [1, -2]], r"lengths\[1\]=-2 is not in 1"),
        ([2**50 + 1], r"lengths\[0\]=.* is not in 1 \.\.\. 2\*\*50"),
        ([3.0, 2.5], r"lengths\[1\]=\[2.5\] is float64; pass integers"),
        ([3.0, 2.0], r"lengths\[0\]=\[3.0\] is float64; pass integers"),
        ([[3.0, 4.0], [3.0, 2.5]], r"lengths\[1\]=\[3.0, 2.5\] is float64"),
        ([True, False], "is bool; pass integers"),
        (["a"], "pass integers"),
        (3, r"lengths has shape \(\); pass \(B,\)"),
        (np.ones((2, 3), int), r"lengths has shape \(2, 3\)"),
        (np.ones((2, 1, 1), int), r"lengths has shape \(2, 1, 1\)"),
        ([[1, 2], [3]], "lengths is no array in host memory"),
    ],
)
def test_lengths_that_are_refused(given: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        as_lengths(given)


def test_rounded_but_not_past_the_batch() -> None:
    lengths = np.array([[3, 9], [4, 10]])
    assert rounded_lengths(lengths, 4, None).tolist() == [[4, 12], [4, 12]]
    assert rounded_lengths(lengths, 4, 10).tolist() == [[4, 10], [4, 10]]
    assert rounded_lengths(lengths, 4, [4, 11]).tolist() == [[4, 11], [4, 11]]
    with pytest.raises(PlanError, match=r"lengths\[1\]=10 is above max_width=9"):
        rounded_lengths(lengths, 4, [9, 9][0])
    with pytest.raises(PlanError, match=r"lengths\[1\]=4 is above max_width=\(3, 12\)"):
        rounded_lengths(lengths, 1, (3, 12))
    with pytest.raises(PlanError, match="must be an integer, or 2: one per axis"):
        rounded_lengths(lengths, 1, [10, 10, 10])
    with pytest.raises(PlanError, match="max_width=0 must be an integer"):
        rounded_lengths(lengths, 1, [0, 12])


def test_riders() -> None:
    assert as_riders(None, 2).tolist() == [False, False]
    assert as_riders([True, False], 2).tolist() == [True, False]
    assert as_riders(np.array([True, True]), 2).tolist() == [False, False]  # nothing is left to carry them
    assert as_riders([], 0).tolist() == []
    for wrong in ([True], [1, 0], np.ones((2, 1), bool)):
        with pytest.raises(PlanError, match=r"riders has shape .* pass one bool per row: \(2,\)"):
            as_riders(wrong, 2)
