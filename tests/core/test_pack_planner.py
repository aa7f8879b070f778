"""Which rows share a pack: worked out by hand, and on random lengths against the limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_padmin.planning.packs import first_fit_decreasing


def packs(lengths: list[int], budget: int, max_rows: int = 99, riders: list[int] | None = None) -> list[list[int]]:
    rides = np.isin(np.arange(len(lengths)), riders or [])
    return [pack.tolist() for pack in first_fit_decreasing(np.array(lengths), budget, max_rows, rides)]


@pytest.mark.parametrize(
    ("lengths", "budget", "max_rows", "expected"),
    [
        ([5, 4, 3, 3, 2, 1], 6, 99, [[0, 5], [1, 4], [2, 3]]),
        ([1, 2, 3, 3, 4, 5], 6, 99, [[5, 0], [4, 1], [2, 3]]),
        ([5, 4, 3, 3, 2, 1], 18, 99, [[0, 1, 2, 3, 4, 5]]),
        ([5, 4, 3, 3, 2, 1], 18, 4, [[0, 1, 2, 3], [4, 5]]),
        ([5, 4, 3], 18, 1, [[0], [1], [2]]),
        ([2, 9, 2], 6, 99, [[1], [0, 2]]),  # longer than the budget: by itself
        ([3, 3, 3], 3, 99, [[0], [1], [2]]),
    ],
)
def test_by_hand(lengths: list[int], budget: int, max_rows: int, expected: list[list[int]]) -> None:
    assert packs(lengths, budget, max_rows) == expected


def test_within_the_limits_and_few() -> None:
    dice = np.random.default_rng(0)
    for _ in range(50):
        lengths = dice.integers(1, 50, dice.integers(1, 60)).tolist()
        found = packs(lengths, 60, 7)
        assert sorted(row for pack in found for row in pack) == list(range(len(lengths)))
        assert all(sum(lengths[row] for row in pack) <= 60 and len(pack) <= 7 for pack in found)
        least = max(math.ceil(sum(lengths) / 60), math.ceil(len(lengths) / 7))
        assert len(found) <= 2 * least


@pytest.mark.parametrize(
    ("lengths", "budget", "max_rows", "riders", "expected"),
    [
        ([7, 3, 6], 10, 99, [2], [[0], [2, 1]]),  # the shortest carrier that can be spared, and fits
        ([7, 3, 8], 10, 99, [2], [[2, 0, 1]]),  # it would not fit: the rider goes where there is least
        ([7, 3, 6], 10, 1, [2], [[0], [2, 1]]),
        ([6, 3, 3, 2], 6, 99, [0], [[1, 2], [0, 3]]),  # the emptiest
        ([7, 3, 6, 2], 10, 99, [2], [[0, 1], [2, 3]]),  # has one already
        ([7, 3, 6], 10, 99, [1], [[0, 1], [2]]),
        ([9, 9, 1, 1], 10, 99, [2, 3], [[0, 2], [1, 3]]),
        ([4, 4, 9], 10, 99, [0, 1], [[2, 0, 1]]),
        ([6, 4, 6], 10, 99, [2], [[0], [2, 1]]),  # it just fits
        ([7, 5, 4], 12, 99, [2], [[0], [1, 2]]),  # the longest first
        ([6, 5, 3, 1], 10, 99, [1, 3], [[0, 3], [1, 2]]),  # another rider is no carrier
        ([7, 7, 6, 6, 3, 3], 10, 99, [2, 3], [[0], [1], [2, 4], [3, 5]]),
    ],
)
def test_riders_are_never_alone(
    lengths: list[int], budget: int, max_rows: int, riders: list[int], expected: list[list[int]]
) -> None:
    found = packs(lengths, budget, max_rows, riders)
    assert found == expected
    assert all(set(pack) - set(riders) for pack in found)
