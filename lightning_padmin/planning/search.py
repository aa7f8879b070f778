"""Where to cut the sorted rows: the search behind `planner.plan_micro_batches`, on arrays that are known to be valid.

Shapes: B rows, A axes (2 for encoder-decoder rows, else 1). A run is a group of rows that follow one another in the
sorted order; an area is its rows x width. It costs rows x cost width, see `SlotCost`, summed over axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


def round_up(lengths: Ints, multiple: int) -> Ints:
    """Each length, rounded up to a multiple."""
    rounded: Ints = -(-lengths // multiple) * multiple
    return rounded


class SlotCost(NamedTuple):
    """What a row of some width costs, in slots.

    Attributes:
        multiple: to what the model pads inside.
        attention_width: at this width attention costs as much as all else; 0 where it is not counted.
    """

    multiple: int = 1
    attention_width: int = 0

    def of(self, widths: Ints) -> Ints:
        """Cost width of each width w: c + c^2 / attention_width, of c = w rounded up; it grows with w."""
        rounded = round_up(widths, self.multiple)
        return rounded + rounded * rounded // self.attention_width if self.attention_width else rounded

    @property
    def is_plain(self) -> bool:
        """Whether slots themselves are the cost."""
        return self == SlotCost()


class Limits(NamedTuple):
    """Most slots and rows of one group, and what one more group and a row of it cost, in slots."""

    budget: int
    max_rows: int
    launch_cost: int
    slot_cost: SlotCost = SlotCost()

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
    orders, rounded = orders_of(lengths, rounded, carrier, limits)
    tried: list[tuple[int, int, int, int, int, list[Ints]]] = []
    # Costs of many tokens at once are often equal; then fewer groups and slots decide.
    coarse = not limits.slot_cost.is_plain
    costs = limits.slot_cost.of(rounded)
    for turn, order in enumerate(orders):
        pieces = split_order(order, solve(_rows_of(rounded, order), carrier[order], limits))
        areas = _areas_of(rounded, pieces)
        broken = [area for p, area in zip(pieces, areas, strict=True) if limits.broken_by(len(p), area)]
        cost = sum(_areas_of(costs, pieces) if coarse else areas) + limits.launch_cost * len(areas)
        tried.append((max(broken, default=0), cost, coarse * len(areas), coarse * sum(areas), turn, pieces))
    return min(tried)[-1]


def orders_of(lengths: Ints, rounded: Ints, carrier: Bools, limits: Limits) -> tuple[list[Ints], Ints]:
    """Orders of the rows in which to cut, the plainly sorted one first, and the rounded lengths, see `arrange`."""
    orders = [sorted_rows(lengths, rounded)]
    if not carrier.all():
        # Rows of one rounded length are alike but for this, so where riders stand among them is free to choose.
        orders += [_sorted_by(rounded), _sorted_by(rounded, _mixed(rounded, carrier))]
    # Every group has a carrier, so none is narrower than the least: lifting riders to it changes no area.
    rounded = np.maximum(rounded, rounded[carrier].min(axis=0))
    for order in (orders[0], orders[-1]) if len(orders) > 1 else ():
        wish = split_order(order, optimal_sizes(_rows_of(rounded, order), carrier[order], limits, lend=True))
        if not all(carrier[piece].any() for piece in wish):
            orders.append(_lend(wish, carrier))
    return orders, rounded


def _areas_of(widths: Ints, pieces: list[Ints]) -> list[int]:
    return [len(p) * int(widths[p].max(axis=0).sum()) for p in pieces]


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
    """Run sizes of least cost: best[i] = min over sizes of (cost(i, size) + launch cost + best[i + size]).

    All numbers are scaled, see `_scaled`, so that of plans of equal cost one with the fewest runs is taken. If no
    run from a start fits and has a carrier, the shortest that has one is taken at a price no other plan reaches.
    With `lend`, riders may be a run, if there is room for the carrier to come, whose slots they pay.
    """
    n = len(rows)
    scaled, launch, budget, price, dead = _scaled(rows, limits, 2 if carrier.all() else n + 2)
    leading, needed = _needs(carrier)
    most = _useful_rows(rows, leading, limits).tolist()
    last = n - 1 if lend else int(np.flatnonzero(carrier)[-1])
    lead_of, need_of = leading.tolist(), [1] * n if lend else needed.tolist()
    if rows.ndim == 1 and carrier.all():
        need_of = _least_rows(rows, limits).tolist()
    counts = np.arange(1, n + 1).astype(scaled.dtype)
    best = np.zeros(n + 1, scaled.dtype)
    best[last + 1 : n] = dead  # only riders are left
    sizes = [0] * n
    for i in range(last, -1, -1):
        least, extra = need_of[i], launch
        areas = _areas(scaled, counts, i, most[i], budget)
        if lend and lead_of[i]:
            riding = areas[: lead_of[i]]
            riding += riding // counts[: len(riding)]
            if len(riding) == len(areas) > 1 and not _room_for_one(rows[i : i + len(areas)], limits):
                areas = areas[:-1]
        if least > len(areas):
            areas, extra = _areas(scaled, counts, i, least, price), launch + price
        totals = areas[least - 1 :] + best[i + least : i + len(areas) + 1]
        choice = len(totals) - 1 - int(totals[::-1].argmin())  # of equals the fuller run, so the largest comes first
        sizes[i] = least + choice
        best[i] = totals[choice] + extra
    starts = [0]
    while starts[-1] < n:
        starts.append(starts[-1] + sizes[starts[-1]])
    return [end - start for start, end in itertools.pairwise(starts)]


class _Scaled(NamedTuple):
    """The numbers of `optimal_sizes`: rows, one more run, budget of a run, price of a forced run, and a dead end."""

    rows: NDArray[Any]
    launch: int
    budget: int
    price: int
    dead: int


def _scaled(rows: Ints, limits: Limits, prices: int) -> _Scaled:
    """Scales so that sums of integers are compared by cost, then by the number of runs, then by slots.

    A slot of cost counts `unit` and a run `run` on top. Where cost widths are wider than the rows, a slot of the
    layout counts 1, if int64 has the room: up to some 10,000 rows of 1,000 tokens, or 1,000 rows with riders.
    A dead end costs as much as `prices` forced runs.
    """
    n = len(rows)
    costs = limits.slot_cost.of(rows)
    price = n * (_width(costs) + limits.launch_cost + 1)
    run = (
        2 * n * _width(rows) + 1 if not limits.slot_cost.is_plain else 1
    )  # twice, since with `lend` a row is lent to each
    if 2 * prices * price * (n + 1) * run >= 2**63:
        run = 1
    unit = (n + 1) * run
    dead = prices * price * unit
    kind: Any = np.int64 if 2 * dead < 2**63 else object  # Python integers where int64 could overflow
    scaled = costs.astype(kind) * unit + (rows if run > 1 else 0)
    # Scaled costs can be held against the budget only where they are scaled slots; else `_useful_rows` is exact.
    budget = limits.budget * unit if limits.slot_cost.is_plain else price * unit
    return _Scaled(scaled, limits.launch_cost * unit + run, budget, price * unit, dead)


def _width(rows: Ints) -> int:
    """Width of all these rows together, summed over axes."""
    return int(rows.reshape(len(rows), -1).max(axis=0).sum())


def _room_for_one(rows: Ints, limits: Limits) -> bool:
    """Whether one more row, no wider than these, keeps to the limits."""
    return not limits.broken_by(len(rows) + 1, (len(rows) + 1) * _width(rows))


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

    Cutting [i, j) at p saves a cost of at least (own[i] - tail[p]) * (j - p), where no run from p on has a cost
    width above tail[p]. If that exceeds the launch cost and both pieces have a carrier, [i, j) is in no best plan.
    Exact in the budget if costs are not slots.
    """
    most = _fitting_rows(rows, limits)
    if rows.ndim > 1 and not limits.slot_cost.is_plain:
        counts = np.arange(1, len(rows) + 1)
        most = np.array([len(_areas(rows, counts, i, m, limits.budget)) for i, m in enumerate(most.tolist())])
    table = limits.slot_cost.of(rows).reshape(len(rows), -1)
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


def _least_rows(rows: Ints, limits: Limits) -> Ints:
    """From each start, the least rows of a run in a best plan, for `rows` (B,) that all are carriers.

    Where all rows of one cost width that are left fit in one run, no best plan has a shorter one. If the next run
    ended among them, merging both would save a launch; if not, cutting between the cost widths instead would be
    cheaper. So the inside of a long stretch of equal cost, where no cut helps, is not searched.
    """
    here = np.arange(len(rows))
    costs = limits.slot_cost.of(rows)
    ends = np.searchsorted(-costs, -costs, side="right")
    return np.where(ends - here <= _fitting_rows(rows, limits), ends - here, 1)


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


def split_order(order: Ints, sizes: Sequence[int]) -> list[Ints]:
    """The runs of an order."""
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
