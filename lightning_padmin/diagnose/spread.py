"""Statistics of lengths, and their histogram."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BINS = 12


@dataclass(frozen=True)
class LengthStats:
    """Lengths of all rows, in tokens.

    Attributes:
        rows, tokens: how many.
        mean, median, p10, p90, p99, longest: of the rows.
        edges: of the histogram's bins, which hold [edge, next edge); the last holds everything from its edge on.
        counts: rows in each bin.
    """

    rows: int
    tokens: int
    mean: float
    median: float
    p10: float
    p90: float
    p99: float
    longest: int
    edges: tuple[int, ...]
    counts: tuple[int, ...]


def length_stats(lengths: NDArray[Any]) -> LengthStats:
    """Statistics of (n,) lengths; percentiles are lengths that occur."""
    quantiles = np.percentile(lengths, [10, 50, 90, 99], method="inverted_cdf")
    p10, median, p90, p99 = (float(each) for each in quantiles)
    longest, tokens = int(lengths.max()), int(lengths.sum())
    edges = _edges(int(lengths.min()), int(p99), longest)
    counts, _ = np.histogram(lengths, [*edges, np.iinfo(np.int64).max])
    return LengthStats(
        len(lengths), tokens, tokens / len(lengths), median, p10, p90, p99, longest, edges, tuple(counts.tolist())
    )


def _edges(shortest: int, most: int, longest: int) -> tuple[int, ...]:
    """Round numbers in equal steps up to the 99th percentile; outliers would leave nothing to see of the rest."""
    step = 1
    for step in (base * 10**power for power in range(10) for base in (1, 2, 5)):
        if (most - shortest) < step * (_BINS - 1):
            break
    start = shortest // step * step
    return tuple(range(start, min(most, longest) + 1, step))
