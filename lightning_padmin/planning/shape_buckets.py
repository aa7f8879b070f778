"""A bounded set of micro-batch shapes, for compilers and graphs that pay once for every new one.

A set has some widths and, for each, the row counts 1, 2, 4, ... up to a power of its own. Any rows can be put into
such shapes without filler rows, which a loss would have to know of: a count that is no power of two is several
micro-batches, and a row is as wide as the next width says. Any shape can be halved.

Which widths and powers are worth their place is found on the lengths of one batch, by always adding those shapes that
save most cost for each shape added. The search for the best runs among them is exact: swapping a longer row of a
narrower group for a shorter row of a wider one changes no shape, so some best partition has sorted runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.planning.search import Bools, Ints, Limits, round_up

_WIDTHS, _SAMPLE = 16, 256  # widths of each of two kinds that are tried, and rows that they are tried on
_LONGER = (2, 4)  # single rows of so many times the longest, for later batches
_NEVER = 2**62


@dataclass(frozen=True)
class ShapeSet:
    """Shapes (rows, width) that micro-batches may have.

    Attributes:
        powers: width -> the largest p of its row counts 2^0 ... 2^p.
    """

    powers: Mapping[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(power + 1 for power in self.powers.values())

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """All (rows, width), the widest first."""
        return tuple(
            (2**p, width) for width in sorted(self.powers, reverse=True) for p in range(self.powers[width] + 1)
        )

    @cached_property
    def widest(self) -> int:
        """The widest row that has a place."""
        return max(self.powers)

    @cached_property
    def _widths(self) -> dict[int, Ints]:
        """Row count -> widths that have it, rising."""
        most = max(self.powers.values())
        return {
            2**p: np.array(sorted(w for w, top in self.powers.items() if top >= p), np.int64) for p in range(most + 1)
        }

    def widths_of(self, rows: int, longest: Ints) -> Ints:
        """The narrowest width for `rows` rows with each of these longest ones; -1 where there is none.

        A row longer than all widths is as wide as it is, alone.
        """
        widths = self._widths.get(rows)
        if widths is None:
            return np.full(len(longest), -1, np.int64)
        found = np.append(widths, -1)[np.searchsorted(widths, longest)]
        return np.where((found < 0) & (rows == 1), longest, found)

    def with_width(self, width: int, power: int) -> ShapeSet:
        """The set with more row counts at one width."""
        return ShapeSet({**self.powers, width: max(power, self.powers.get(width, 0))})


def choose_shapes(
    lengths: Ints, count: int, limits: Limits, *, multiple: int = 1, with_riders: bool = False
) -> ShapeSet:
    """At most `count` shapes that suit these lengths.

    Args:
        lengths: (B,) tokens of the rows of one batch.
        count: most shapes, at least 1. From 8 on, two of them are single rows of 2 and 4 times the longest.
        limits: budget and rows of one micro-batch, and what it costs.
        multiple: widths are multiples of this.
        with_riders: rows without loss are to be expected, the longest ones too, which need another row beside them.
    """
    rows: Ints = -np.sort(-np.random.default_rng(0).permutation(lengths)[:_SAMPLE])
    top = _up(int(lengths.max()), multiple)
    chosen = ShapeSet({top * k: 0 for k in (1, *_LONGER)} if count >= 8 else {top: 0})
    if with_riders and len(chosen) < count and 2 * top <= limits.budget and limits.max_rows > 1:
        chosen = chosen.with_width(top, 1)
    steps = [*np.geomspace(max(1, int(rows[-1])), top, _WIDTHS), *np.quantile(rows, np.linspace(0, 1, _WIDTHS))]
    ladder = sorted({min(top, _up(math.ceil(step), multiple)) for step in steps} | {top})
    while True:
        cost, best, gained = _cost(rows, chosen, limits), chosen, 0.0
        for more in _additions(chosen, ladder, limits):
            if len(chosen) < len(more) <= count:
                gain = (cost - _cost(rows, more, limits)) / (len(more) - len(chosen))
                best, gained = (more, gain) if gain > gained else (best, gained)
        if best is chosen:
            return chosen
        chosen = best


def _additions(chosen: ShapeSet, ladder: list[int], limits: Limits) -> Iterator[ShapeSet]:
    for width in ladder:
        most = max(1, min(limits.max_rows, limits.budget // width))
        for power in range(most.bit_length()):
            yield chosen.with_width(width, power)


def _up(width: int, multiple: int) -> int:
    return int(round_up(np.array(width), multiple))


def _cost(rows: Ints, shapes: ShapeSet, limits: Limits) -> int:
    costs = _costs(rows, shapes, limits)
    return int(_best(costs, len(rows))[0][0])


def _costs(rows: Ints, shapes: ShapeSet, limits: Limits) -> dict[int, Ints]:
    """Row count n -> (B - n + 1,) cost of a run of n rows from each start, `_NEVER` where there is no shape for it."""
    found: dict[int, Ints] = {}
    for n in shapes._widths:
        if n > len(rows):
            break
        longest: NDArray[np.int64] = np.lib.stride_tricks.sliding_window_view(rows, n).max(axis=1)
        widths = shapes.widths_of(n, longest)
        costs = n * limits.slot_cost.of(np.maximum(widths, 0)) + limits.launch_cost
        found[n] = np.where(widths < 0, _NEVER, costs)
    return found


def _best(costs: Mapping[int, Ints], n: int) -> tuple[list[int], list[int]]:
    """Cost of the best runs from each start to the end, and the size of the first of them; `_NEVER` for none."""
    table = {size: values.tolist() for size, values in costs.items()}
    best, sizes = [0] * (n + 1), [0] * n
    for i in range(n - 1, -1, -1):
        least, chosen = _NEVER, 0
        for size, values in table.items():
            if i + size > n:
                break
            total = values[i] + best[i + size]
            if total <= least:  # of equals the larger, so fewer runs
                least, chosen = total, size
        best[i], sizes[i] = min(least, _NEVER), chosen
    return best, sizes


def shaped_sizes(rows: Ints, carrier: Bools, limits: Limits, shapes: ShapeSet) -> tuple[int, list[int]] | None:
    """Cost and sizes of the best runs whose shapes are in the set, each with a carrier; None if there are none such.

    Args:
        rows: (B,) tokens, in the order in which they are cut.
        carrier: (B,) bool, rows that may be a run by themselves.
        limits: what a run costs; its budget was heeded when the set was chosen.
        shapes: the set.
    """
    costs = _costs(rows, shapes, limits)
    carriers = np.concatenate([[0], np.cumsum(carrier)])
    for size, values in costs.items():
        values[carriers[size:] == carriers[:-size]] = _NEVER
    best, sizes = _best(costs, len(rows))
    if best[0] >= _NEVER:
        return None
    starts = [0]
    while starts[-1] < len(rows):
        starts.append(starts[-1] + sizes[starts[-1]])
    return best[0], [end - start for start, end in itertools.pairwise(starts)]
