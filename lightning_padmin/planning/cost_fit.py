"""Time of a pass as a function of its shape, and the largest budget that fits. Pure functions; others do the timing.

seconds = start + slot x slots + wide x slots x width,   launch cost = start / slot, in slots
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, int]  # rows, width


@dataclass(frozen=True)
class Fit:
    """Parts of the time of a forward and backward pass, none below 0.

    Attributes:
        start: seconds of any pass.
        slot: seconds of a slot.
        wide: seconds of a slot for each position of its row (attention).
        error: largest relative difference between a measured time and the fit.
    """

    start: float
    slot: float
    wide: float
    error: float

    @property
    def launch_cost(self) -> int:
        """What starting one more pass costs, in slots."""
        return round(self.start / self.slot)

    @property
    def attention_width(self) -> int | None:
        """Width at which what grows with it takes as long as the rest of a slot; None if that is not seen."""
        return max(1, round(self.slot / self.wide)) if self.wide > 0 else None


def fit_times(shapes: Sequence[Shape], seconds: Sequence[float]) -> Fit:
    """Least squares of relative differences, under the condition that no part is negative.

    Args:
        shapes: at least three different (rows, width).
        seconds: measured for each.

    Raises:
        ValueError: fewer than three shapes.
    """
    if len(set(shapes)) < 3:
        raise ValueError(f"{len(set(shapes))} different shapes do not tell three parts of the time apart")
    rows, widths = np.array(shapes, float).T
    slots = rows * widths
    measured = np.array(seconds, float)
    # Divided by the times, so that a pass of a millisecond counts as much as one of a second.
    matrix = np.stack([np.ones_like(slots), slots, slots * widths], axis=1) / measured[:, None]
    start, slot, wide = _non_negative(matrix)
    error = float(np.abs(matrix @ np.array([start, slot, wide]) - 1).max())
    return Fit(start, slot, wide, error)


def _non_negative(matrix: NDArray[Any]) -> tuple[float, float, float]:
    """The best coefficients x >= 0 of matrix @ x = 1: with three of them, all choices of zeros are tried."""
    best: tuple[float, tuple[float, float, float]] | None = None
    for others in itertools.chain.from_iterable(itertools.combinations((0, 2), n) for n in range(3)):
        chosen = sorted({1, *others})
        found = np.linalg.lstsq(matrix[:, chosen], np.ones(len(matrix)), rcond=None)[0]
        if (found < 0).any():
            continue
        whole = np.zeros(3)
        whole[chosen] = found
        loss = float(((matrix @ whole - 1) ** 2).sum())
        if best is None or loss < best[0]:
            best = loss, (float(whole[0]), float(whole[1]), float(whole[2]))
    assert best is not None  # slots alone always fit with a positive part
    return best[1]


def largest_budget(
    fits: Callable[[Shape], bool], widest: int, start: int = 1024, most: int = 2**22
) -> tuple[int | None, tuple[Shape, ...]]:
    """The largest power of two times `start` whose extreme shapes fit, each of them tried.

    Args:
        fits: runs a shape and says whether its memory suffices.
        widest: longest row in tokens; the other extreme is many rows of 1/16 of it.
        start: first budget.
        most: where to stop.

    Returns:
        The budget, None if not even the first fits; and the shapes of it that were tried.
    """
    found: int | None = None
    tried: tuple[Shape, ...] = ()
    budget = start
    while budget <= most:
        shapes = tuple((max(1, budget // width), width) for width in (min(widest, budget), max(1, widest // 16)))
        if not all(fits(shape) for shape in shapes):
            break
        found, tried = budget, shapes
        budget *= 2
    return found, tried
