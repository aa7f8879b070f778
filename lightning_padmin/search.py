"""Where to cut the sorted rows: the search behind `planner.plan_micro_batches`, on arrays that are known to be valid.

Shapes: B rows, A axes (2 for encoder-decoder rows, else 1). A run is a group of rows that follow one another in the
sorted order; an area is its rows x width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


class Limits(NamedTuple):
    """Most slots and rows of one group, and what one more group costs, in slots."""

    budget: int
    max_rows: int
    launch_cost: int

    def broken_by(self, count: int, area: int) -> bool:
        """Whether `count` rows on `area` slots may not be a group; one row alone always may."""
        return count > 1 and (area > self.budget or count > self.max_rows)


_Solver: TypeAlias = Callable[[Ints, Bools, Limits], list[int]]


def arrange(lengths: Ints, rounded: Ints, carrier: Bools, limits: Limits, solve: _Solver) -> list[Ints]:
    """Groups of row indices: runs of the sorted order or, if better, of another order in which riders are served.

    Made for carriers (the rows that are no riders) and for riders apart, the swaps of the module's argument lead to
    groups that are sorted runs, or riders with the longest carrier left. So a first pass lets riders borrow a carrier,
    these are moved, and the new order is planned. Otherwise many long rows without loss (truncated completions, say)
    would be one group as far as the first row with loss, way over the budget.
    """
    orders = [sorted_rows(lengths, rounded)]
    if not carrier.all():
        # Rows of one rounded length are alike but for this, so where riders stand among them is free to choose.
        orders += [_sorted_by(rounded), _sorted_by(rounded, _mixed(rounded, carrier))]
    # Every group has a carrier, so none is narrower than the least: lifting riders to it changes no area.
    rounded = np.maximum(rounded, rounded[carrier].min(axis=0))
    for order in (orders[0], orders[-1]) if len(orders) > 1 else ():
        wish = _split(order, optimal_sizes(_rows_of(rounded, order), carrier[order], limits, lend=True))
        if not all(carrier[piece].any() for piece in wish):
            orders.append(_lend(wish, carrier))
    tried: list[tuple[int, int, int, list[Ints]]] = []
    for turn, order in enumerate(orders):
        pieces = _split(order, solve(_rows_of(rounded, order), carrier[order], limits))
        areas = [len(p) * int(rounded[p].max(axis=0).sum()) for p in pieces]
        broken = [area for p, area in zip(pieces, areas, strict=True) if limits.broken_by(len(p), area)]
        tried.append((max(broken, default=0), sum(areas) + limits.launch_cost * len(areas), turn, pieces))
    return min(tried)[3]


def _lend(pieces: list[Ints], carrier: Bools) -> Ints:
    """A new order of all rows, in which each piece of riders has a carrier of a later piece, or else of an earlier."""
    parts = list(pieces)
    spare = [int(carrier[p].sum()) - (not carrier[p].all()) for p in parts]  # one must stay, if with riders
    ahead = 0
    for taker in [i for i, p in enumerate(parts) if not carrier[p].any()]:
        ahead = max(ahead, taker + 1)
        while ahead < len(parts) and spare[ahead] < 1:
            ahead += 1
        behind = (i for i in range(taker - 1, -1, -1) if spare[i] > 0)
        giver = ahead if ahead < len(parts) else next(behind, None)
        if giver is None:
            break
        at = np.flatnonzero(carrier[parts[giver]])[0 if giver > taker else -1]
        parts[taker] = np.append(parts[taker], parts[giver][at])
        parts[giver] = np.delete(parts[giver], at)
        spare[giver] -= 1
    return np.concatenate(parts)


def optimal_sizes(rows: Ints, carrier: Bools, limits: Limits, lend: bool = False) -> list[int]:
    """Run sizes of least cost: best[i] = min over sizes of (area(i, size) + launch cost + best[i + size]).

    All numbers are scaled by B + 1 and each run costs 1 on top, so the number of runs decides between equal
    costs. If no run from a start fits and has a carrier, the shortest that has one is taken at a price no other
    plan reaches. With `lend`, riders may be a run, if there is room for the carrier to come, whose slots they pay.
    """
    n, unit = len(rows), len(rows) + 1
    widest = int(rows.reshape(n, -1).max(axis=0).sum())
    price = unit * n * (widest + limits.launch_cost + 1)
    dead = price * (2 if carrier.all() else n + 2)
    kind: Any = np.int64 if 2 * dead < 2**63 else object  # Python integers where int64 could overflow
    leading, needed = _needs(carrier)
    most = _useful_rows(rows, leading, limits).tolist()
    last = n - 1 if lend else int(np.flatnonzero(carrier)[-1])
    lead_of, need_of = leading.tolist(), [1] * n if lend else needed.tolist()
    launch, budget = limits.launch_cost * unit + 1, limits.budget * unit
    rows, counts = rows.astype(kind) * unit, np.arange(1, n + 1).astype(kind)
    best = np.zeros(n + 1, kind)
    best[last + 1 : n] = dead  # only riders are left
    sizes = [0] * n
    for i in range(last, -1, -1):
        least, extra = need_of[i], launch
        areas = _areas(rows, counts, i, most[i], budget)
        if lend and lead_of[i]:
            riding = areas[: lead_of[i]]
            riding += riding // counts[: len(riding)]
            no_room = areas[-1] > budget or len(areas) >= limits.max_rows
            areas = areas[:-1] if no_room and len(riding) == len(areas) > 1 else areas
        if least > len(areas):
            areas, extra = _areas(rows, counts, i, least, price), launch + price
        totals = areas[least - 1 :] + best[i + least : i + len(areas) + 1]
        choice = len(totals) - 1 - int(totals[::-1].argmin())  # of equals the fuller run, so the largest comes first
        sizes[i] = least + choice
        best[i] = totals[choice] + extra
    starts = [0]
    while starts[-1] < n:
        starts.append(starts[-1] + sizes[starts[-1]])
    return [end - start for start, end in itertools.pairwise(starts)]


def greedy_sizes(rows: Ints, carrier: Bools, limits: Limits) -> list[int]:
    """Sizes of runs filled up to the limits one after the other; each has a carrier, as in `optimal_sizes`."""
    n = len(rows)
    _, needed = _needs(carrier)
    most, counts = _fitting_rows(rows, limits), np.arange(1, n + 1)
    last = int(np.flatnonzero(carrier)[-1])
    sizes: list[int] = []
    start = 0
    while start < n:
        size = max(len(_areas(rows, counts, start, int(most[start]), limits.budget)), int(needed[start]))
        if last < start + size < n:  # would leave only riders, so the last carrier starts the next run
            size = last - start
        sizes.append(size)
        start += size
    return sizes


def _needs(carrier: Bools) -> tuple[Ints, Ints]:
    """From each start: how many riders come before a carrier, and the least rows of a run that has a carrier.

    A run that has the last carrier goes on to the end, or only riders would be left.
    """
    here = np.arange(len(carrier))
    found = np.minimum.accumulate(np.where(carrier, here, len(carrier))[::-1])[::-1]
    last = np.flatnonzero(carrier)[-1]
    return found - here, np.where(found < last, found + 1, len(carrier)) - here


def _fitting_rows(rows: Ints, limits: Limits) -> Ints:
    """From each start, a bound on the rows of a run within the limits, at least 1; exact if `rows` is (B,)."""
    own = rows.reshape(len(rows), -1).sum(axis=1)
    fitting: Ints = np.clip(limits.budget // own, 1, limits.max_rows)
    return np.minimum(fitting, np.arange(len(rows), 0, -1))


def _useful_rows(rows: Ints, leading: Ints, limits: Limits) -> Ints:
    """As `_fitting_rows`, without runs that one more cut would improve; what is left is near-linear to search.

    Cutting [i, j) at p saves at least (own[i] - tail[p]) * (j - p) slots, where no run from p on is wider than
    tail[p]. If that exceeds the launch cost and both pieces have a carrier, [i, j) is in no best plan.
    """
    most = _fitting_rows(rows, limits)
    table = rows.reshape(len(rows), -1)
    own = table.sum(axis=1)
    tail = np.maximum.accumulate(table[::-1])[::-1].sum(axis=1)
    offset = 1
    while offset < len(rows):
        drop = own[:-offset] - tail[offset:]
        cuttable = (drop > 0) & (leading[:-offset] < offset)
        useful = np.where(cuttable, limits.launch_cost // np.maximum(drop, 1), len(rows))
        most[:-offset] = np.minimum(most[:-offset], offset + np.maximum(useful, leading[offset:]))
        offset *= 2
    return most


def _areas(rows: Ints, counts: Ints, start: int, most: int, budget: int) -> Ints:
    """Slots of the runs of 1, 2, ..., `most` rows from `start`, up to the budget; the run of one row in any case."""
    areas: Ints
    if rows.ndim == 1:
        areas = rows[start] * counts[:most]
        return areas
    areas = np.maximum.accumulate(rows[start : start + most]).sum(axis=1) * counts[:most]
    return areas[: max(1, int(np.searchsorted(areas, budget, side="right")))]


def _rows_of(rounded: Ints, order: Ints) -> Ints:
    """Rows to plan: (B,) if lengths only fall, so that a run is as wide as its first row, else (B, A)."""
    rows = rounded[order]
    falling = rows.shape[1] == 1 and bool((rows[1:] <= rows[:-1]).all())
    return rows[:, 0] if falling else rows


def _split(order: Ints, sizes: Sequence[int]) -> list[Ints]:
    return np.split(order, np.cumsum(sizes)[:-1])


def sorted_rows(lengths: Ints, rounded: Ints) -> Ints:
    """(B,) row indices, longest first: by rounded length, equal shapes together, then by length, then by index."""
    return _sorted_by(rounded, -lengths.sum(axis=1))


def _sorted_by(rounded: Ints, ties: NDArray[Any] | None = None) -> Ints:
    """(B,) row indices by rounded length, equal shapes together, among them by `ties` (B,), then by index."""
    return np.lexsort((np.zeros(len(rounded)) if ties is None else ties, -rounded[:, 0], -rounded.sum(axis=1)))


def _mixed(rounded: Ints, carrier: Bools) -> NDArray[np.float64]:
    """(B,) sort keys that spread the riders of one rounded length evenly among its carriers."""
    _, shape = np.unique(rounded, axis=0, return_inverse=True)
    kind = 2 * shape.ravel() + carrier
    order = np.argsort(kind, kind="stable")
    sizes = np.bincount(kind)
    first = np.cumsum(sizes) - sizes
    place = np.empty(len(kind))
    place[order] = np.arange(len(kind)) - first[kind[order]]
    return (place + 0.5) / sizes[kind]
