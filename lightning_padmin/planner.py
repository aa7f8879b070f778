"""Which rows run together: sorted micro-batches of the least total cost.

    cost = slots + launch_cost * micro-batches,   slots = sum over micro-batches of rows x rounded width

Rows are sorted by rounded length, longest first, and the sorted list is cut into runs. With one length per row some
best partition has this form: swap a longer row of a narrower group for a shorter row of a wider one, and no width
grows. So the best cuts, found by dynamic programming over start positions (Bellman 1957), are the best plan. The
usual alternative, `method="greedy"`, fills each group up to the budget and ignores what a wide group costs.
With two lengths per row the cuts are the best of that order, which is a good one but not proven best.

Models with chunked scans pad inside, so `cost_multiple_of` makes the cost rows x the width rounded up once more,
while the budget stays one of slots; `attention_width` adds what grows with the square of the width. The swap keeps
the number of rows of both groups and lets no width grow; the slots, and the cost as a monotone function of the width,
follow, so the sorted runs are still enough.

Pure functions of integers, numpy only. Shapes: B rows, A axes (2 for encoder-decoder rows), K groups.
"""

from __future__ import annotations

import heapq
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.errors import PadMinWarning, PlanError
from lightning_padmin.pack_planner import first_fit_decreasing
from lightning_padmin.search import (
    Bools,
    Ints,
    Limits,
    SlotCost,
    arrange,
    greedy_sizes,
    optimal_sizes,
    orders_of,
    round_up,
    sorted_rows,
    split_order,
)
from lightning_padmin.shape_set import ShapeSet, shaped_sizes

_MOST_SQUARED = 2**31  # longest row and multiple together, where they are squared
_MOST = 2**50  # of one length or option, so that one rounded length stays far inside int64


@dataclass(frozen=True, eq=False)
class Plan:
    """An assignment of every row to exactly one micro-batch, longest micro-batch first.

    Attributes:
        groups: K int64 arrays of row indices, longest row first, ties by row index.
        widths: (K, A) int64, rounded width of each group and axis, in positions.
        lengths: (B, A) int64, what was planned, in tokens.
        over_budget: int64 indices of the rows whose own rounded slots exceed the budget.
        rounded: (B, A) int64, lengths after rounding, in positions.
        riders: (B,) bool, rows that may not make up a group by themselves; all False where that rule is off.
        token_budget: most slots of one group.
        launch_cost: what one more group costs, in slots.
        notice: what exceeds the limits, in words; empty if nothing does.
        slot_cost: what the width of a row costs.
        shapes: the shapes that groups have, if they are bounded.
        is_packed: each group is one row of whole documents; its width is the sum of their lengths.
    """

    groups: tuple[Ints, ...]
    widths: Ints
    lengths: Ints
    over_budget: Ints
    rounded: Ints = field(repr=False)
    riders: Bools = field(repr=False)
    token_budget: int
    launch_cost: int
    notice: str = field(default="", repr=False)
    slot_cost: SlotCost = field(default=SlotCost())
    shapes: ShapeSet | None = field(default=None, repr=False)
    is_packed: bool = False

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def slots_per_group(self) -> Ints:
        """(K,) int64: rows x width, summed over axes."""
        return self._areas(self.widths)

    @property
    def slots(self) -> int:
        """Slots of all groups together."""
        return int(self.slots_per_group.sum())

    @property
    def real_tokens(self) -> int:
        """Sum of all lengths, in tokens."""
        return int(self.lengths.sum())

    @property
    def waste(self) -> float:
        """Padding fraction, 1 - real_tokens / slots; 0.0 for an empty plan."""
        return 1.0 - self.real_tokens / self.slots if self.groups else 0.0

    @property
    def cost(self) -> int:
        """What the planner minimises, in slots: rows x cost width over all groups + launch_cost * K.

        The cost width is that of `slot_cost`, summed over axes; it may pass the batch's width.
        """
        areas = self._areas(self.slot_cost.of(self.widths))
        return int(areas.sum()) + self.launch_cost * len(self)

    def _areas(self, widths: Ints) -> Ints:
        """(K,) int64: rows x width of each group, for (K, A) widths."""
        counts = 1 if self.is_packed else np.array([len(rows) for rows in self.groups], np.int64)
        areas: Ints = counts * widths.sum(axis=1)
        return areas

    def at_least(self, k: int) -> Plan:
        """Cuts groups until there are `k`, each time by that one cut of all which saves most cost, then most slots.

        Args:
            k: wanted number of micro-batches.

        Returns:
            This plan if it has `k` groups or more; else a finer one. It still has fewer than `k` groups where
            nothing is left to cut: single rows, and groups with only one row that is no rider.

        Raises:
            PlanError: `k` is not an integer of at least 1.
        """
        _check_integer("k", k)
        if len(self) >= k or not self.groups:
            return self
        serial = itertools.count()  # among equal savings the piece made first is cut first
        heap = [_best_cut(rows, next(serial), self) for rows in self.groups]
        heapq.heapify(heap)
        while len(heap) < k and heap[0].position:
            best = heapq.heappop(heap)
            for piece in (best.rows[: best.position], best.rows[best.position :]):
                heapq.heappush(heap, _best_cut(piece, next(serial), self))
        pieces = [cut.rows for cut in heap]
        if self.is_packed:
            return _with_packs(self, pieces)
        groups, widths = _longest_first(pieces, self.lengths, self.rounded, self.shapes)
        return replace(self, groups=groups, widths=widths)


def plan_micro_batches(
    lengths: Any,
    token_budget: int | None = None,
    *,
    pad_to_multiple_of: int = 1,
    max_width: int | Sequence[int] | None = None,
    max_rows: int | None = None,
    min_micro_batches: int = 1,
    launch_cost: int = 128,
    method: Literal["optimal", "greedy"] = "optimal",
    riders: Any = None,
    cost_multiple_of: int = 1,
    attention_width: int | None = None,
) -> Plan:
    """Splits a batch into micro-batches whose rows x rounded width stay within a token budget.

    Args:
        lengths: (B,) or (B, 2) integers of at least 1, in tokens: a sequence, array or CPU tensor. Two columns
            are encoder and decoder lengths; slots are then rows x (widest encoder + widest decoder).
        token_budget: most slots of one group, after rounding. None: the slots of the trimmed batch.
        pad_to_multiple_of: widths become multiples of this.
        max_width: width of the batch (one integer, or one per axis), which rounding does not pass.
        max_rows: most rows of one group.
        min_micro_batches: the plan is cut further until it has this many groups, see `Plan.at_least`.
        launch_cost: what one more group costs, in slots.
        method: "optimal" (least cost), or "greedy" (fill up to the budget, then cut) for comparison.
        riders: (B,) bool, rows without loss tokens. The mean loss of riders alone would be 0 / 0, so each group
            gets a row that is none, from elsewhere in the sorted order if need be. Where that happens, the plan
            is a good one, not always the best. If no row carries loss, the rule is off.
        cost_multiple_of: to what the model pads inside (the `chunk_size` of chunked scans). If above 1, a group
            costs rows x (its width rounded up to a multiple of this, on each axis and even past `max_width`). Budget,
            widths and slots stay those of the layout. "greedy" ignores it.
        attention_width: width at which attention, whose cost of a slot grows with the width, costs as much as all else
            of the slot: a group costs rows x (w + w^2 / attention_width). None: not counted. "greedy" ignores it.

    Returns:
        The plan; empty for no rows. Of plans of equal cost, one with the fewest groups, and of these (up to some
        10,000 rows, or 1,000 with riders) one with the fewest slots.

    Raises:
        PlanError: an option or a length is out of range; the message names it, its value and the fix.

    Warns:
        PadMinWarning: once per call, if rows exceed the budget by themselves (each runs alone, or with the one
            row a rider needs), or if too few rows carry loss to keep all groups within the limits.

    Example:
        >>> plan = plan_micro_batches([120, 90, 300, 40, 55, 30, 210, 65], 400)
        >>> [rows.tolist() for rows in plan.groups], plan.slots
        ([[2], [6], [0, 1], [7, 4, 3, 5]], 1010)
    """
    plan = plan_quietly(
        lengths,
        token_budget,
        pad_to_multiple_of=pad_to_multiple_of,
        max_width=max_width,
        max_rows=max_rows,
        min_micro_batches=min_micro_batches,
        launch_cost=launch_cost,
        method=method,
        riders=riders,
        cost_multiple_of=cost_multiple_of,
        attention_width=attention_width,
    )
    if plan.notice:
        warnings.warn(plan.notice, PadMinWarning, stacklevel=2)
    return plan


def plan_quietly(
    lengths: Any,
    token_budget: int | None,
    *,
    pad_to_multiple_of: int,
    max_width: int | Sequence[int] | None,
    max_rows: int | None,
    min_micro_batches: int,
    launch_cost: int,
    method: Literal["optimal", "greedy"],
    riders: Any,
    cost_multiple_of: int = 1,
    attention_width: int | None = None,
    shapes: ShapeSet | None = None,
) -> Plan:
    """`plan_micro_batches` for callers that tell `Plan.notice` in their own way, once for many batches.

    With `shapes` every group has one of them; `method` then is "optimal", and there is one length per row.
    """
    if method not in ("optimal", "greedy"):
        raise PlanError(f"method={method!r} is unknown; use 'optimal' or 'greedy'")
    _check_integer("min_micro_batches", min_micro_batches)
    _check_integer("pad_to_multiple_of", pad_to_multiple_of, most=_MOST)
    _check_integer("launch_cost", launch_cost, least=0, most=_MOST)
    table = _as_lengths(lengths)
    rounded = _round_up(table, pad_to_multiple_of, max_width)
    slot_cost = _as_slot_cost(cost_multiple_of, attention_width, rounded)
    riding = _as_riders(riders, len(table))
    whole = _slots_of_all("lengths", rounded)
    _slots_of_all("cost_multiple_of" if attention_width is None else "attention_width", slot_cost.of(rounded))
    budget = whole if token_budget is None else _check_integer("token_budget", token_budget)
    most_rows = len(table) if max_rows is None else _check_integer("max_rows", max_rows)
    # Greedy takes no notice of costs, not even between the orders that it tries for riders.
    searched = slot_cost if method == "optimal" else SlotCost()
    limits = Limits(min(budget, whole), min(most_rows, len(table)), int(launch_cost), searched)
    alone = np.flatnonzero(rounded.sum(axis=1) > limits.budget)
    empty = np.zeros((0, table.shape[1]), np.int64)
    plan = Plan((), empty, table, alone, rounded, riding, budget, limits.launch_cost, slot_cost=slot_cost)
    if not len(table):
        return plan
    pieces = None if shapes is None else _in_shapes(table, rounded, ~riding, limits, shapes)
    missed = shapes is not None and pieces is None
    if pieces is None:
        shapes = None
        pieces = arrange(table, rounded, ~riding, limits, optimal_sizes if method == "optimal" else greedy_sizes)
    groups, widths = _longest_first(pieces, table, rounded, shapes)
    plan = replace(plan, groups=groups, widths=widths, shapes=shapes)
    notice = "; ".join(filter(None, [_over_limits(plan, limits), _beyond_shapes(plan, missed)]))
    return replace(plan, notice=notice).at_least(min_micro_batches)


def _in_shapes(lengths: Ints, rounded: Ints, carrier: Bools, limits: Limits, shapes: ShapeSet) -> list[Ints] | None:
    """Groups whose shapes are in the set, of the least cost of all orders; None if riders leave no choice of shapes."""
    tried: list[tuple[int, int, list[Ints]]] = []
    orders, rounded = orders_of(lengths, rounded, carrier, limits)
    for turn, order in enumerate(orders):
        found = shaped_sizes(rounded[order, 0], carrier[order], limits, shapes)
        if found is not None:
            tried.append((found[0], turn, split_order(order, found[1])))
    if tried:
        return min(tried)[-1]
    # Riders leave no runs; as if there were none, and then carriers change places with riders.
    order = orders[0]
    free = shaped_sizes(rounded[order, 0], np.ones(len(order), np.bool_), limits, shapes)
    return None if free is None else _with_carriers(split_order(order, free[1]), rounded[:, 0], carrier, shapes)


def _with_carriers(pieces: list[Ints], rounded: Ints, carrier: Bools, shapes: ShapeSet) -> list[Ints] | None:
    """The pieces with a carrier in each, by swapping rows of most alike lengths, or by joining pieces of one size.

    None where neither can be done.
    """
    parts = [piece.copy() for piece in pieces]
    while riding := [part for part in parts if not carrier[part].any()]:
        taker = riding[0]
        givers = [part for part in parts if carrier[part].sum() > 1]
        swaps = [
            (abs(int(rounded[part[i]]) - int(rounded[taker[j]])), k, i, j)
            for k, part in enumerate(givers)
            for i in np.flatnonzero(carrier[part]).tolist()
            for j in range(len(taker))
        ]
        if swaps:
            _, k, i, j = min(swaps)
            givers[k][i], taker[j] = taker[j], givers[k][i]
            continue
        alike = [k for k, part in enumerate(parts) if part is not taker and len(part) == len(taker)]
        if not alike:
            return None
        host = min(
            alike, key=lambda k: (not carrier[parts[k]].any(), abs(rounded[parts[k]].max() - rounded[taker].max()))
        )
        joined = np.concatenate([parts[host], taker])
        parts = [part for k, part in enumerate(parts) if part is not taker and k != host] + [joined]
    fits = all(shapes.widths_of(len(part), np.array([rounded[part].max()]))[0] >= 0 for part in parts)
    return parts if fits else None


class _Cut(NamedTuple):
    """A cut of one group of sorted rows. Ordered by what it loses: minus the cost saved, or 1 if there is none."""

    loss: int
    slots_lost: int
    serial: int
    position: int
    rows: Ints


def _best_cut(rows: Ints, serial: int, plan: Plan) -> _Cut:
    """The cut of `rows` (n,) that saves most cost, then slots, of those that leave a non-rider on both sides."""
    if plan.is_packed:
        return _half_of_pack(rows, serial, plan)
    carriers = np.cumsum(~plan.riders[rows])
    allowed = (carriers[:-1] > 0) & (carriers[:-1] < carriers[-1])
    if plan.shapes is not None:
        allowed &= np.arange(1, len(rows)) * 2 == len(rows)  # halves of a shape are shapes
    if not allowed.any():
        return _Cut(1, 0, serial, 0, rows)
    table = plan.rounded[rows]
    slots = _cut_losses(table)
    loss = slots
    if not plan.slot_cost.is_plain:
        loss = _cut_losses(plan.slot_cost.of(table))
        allowed &= loss == loss[allowed].min()
    best = int(np.where(allowed, slots, 1).argmin())
    return _Cut(int(loss[best]), int(slots[best]), serial, best + 1, rows)


def _half_of_pack(rows: Ints, serial: int, plan: Plan) -> _Cut:
    """The cut nearest to the middle of a pack that leaves a non-rider on both sides; the longest pack is cut first."""
    carriers = np.cumsum(~plan.riders[rows])
    allowed = np.flatnonzero((carriers[:-1] > 0) & (carriers[:-1] < carriers[-1]))
    tokens = np.cumsum(plan.rounded[rows, 0])
    if not len(allowed):
        return _Cut(1, 0, serial, 0, rows)
    best = int(allowed[np.abs(2 * tokens[allowed] - tokens[-1]).argmin()])
    return _Cut(0, -int(tokens[-1]), serial, best + 1, rows)


def _with_packs(plan: Plan, packs: list[Ints]) -> Plan:
    """The plan with these groups, those of most tokens first."""
    tokens = np.array([plan.lengths[rows, 0].sum() for rows in packs], np.int64)
    order = np.lexsort((np.arange(len(packs)), -tokens))
    return replace(plan, groups=tuple(packs[k] for k in order), widths=tokens[order][:, None])


def plan_packs(
    lengths: Any,
    token_budget: int | None = None,
    *,
    max_rows: int | None = None,
    min_micro_batches: int = 1,
    launch_cost: int = 128,
    riders: Any = None,
) -> Plan:
    """Puts whole rows behind each other in packs whose tokens stay within a budget, first-fit decreasing.

    Args:
        lengths: (B,) integers of at least 1, in tokens.
        token_budget: most tokens of one pack. None: all of them.
        max_rows: most rows of one pack.
        min_micro_batches: packs are cut further until there are this many.
        launch_cost: what one more pack costs, in slots; part of `Plan.cost` alone.
        riders: see `plan_micro_batches`.

    Returns:
        A plan with `is_packed`, whose slots are the tokens themselves.

    Raises:
        PlanError: an option or a length is out of range.

    Example:
        >>> plan = plan_packs([120, 90, 300, 40, 55, 30, 210, 65], 512)
        >>> [rows.tolist() for rows in plan.groups], plan.slots
        ([[2, 6], [0, 1, 7, 4, 3, 5]], 910)
    """
    _check_integer("min_micro_batches", min_micro_batches)
    _check_integer("launch_cost", launch_cost, least=0, most=_MOST)
    table = _as_lengths(lengths)
    if table.shape[1] > 1:
        raise PlanError("rows with two lengths, of an encoder-decoder, cannot be packed")
    total = int(table.sum())
    if total >= 2**62:
        raise PlanError(f"lengths sum to {total}, which is above 2**62; plan fewer rows")
    budget = max(total, 1) if token_budget is None else _check_integer("token_budget", token_budget)
    most = max(len(table), 1) if max_rows is None else _check_integer("max_rows", max_rows)
    riding = _as_riders(riders, len(table))
    alone = np.flatnonzero(table[:, 0] > budget)
    plan = Plan((), table[:0], table, alone, table, riding, budget, int(launch_cost), is_packed=True)
    if not len(table):
        return plan
    plan = _with_packs(plan, first_fit_decreasing(table[:, 0], budget, most, riding))
    return replace(plan, notice=_over_limits(plan, Limits(budget, most, plan.launch_cost))).at_least(min_micro_batches)


def _cut_losses(table: Ints) -> Ints:
    """(n - 1,) minus the slots that each cut of n rows (n, A) saves."""
    before = np.maximum.accumulate(table).sum(axis=1)
    after = np.maximum.accumulate(table[::-1])[::-1].sum(axis=1)
    count = np.arange(1, len(table))
    losses: Ints = count * before[:-1] + count[::-1] * after[1:] - len(table) * before[-1]
    return losses


def _longest_first(
    pieces: list[Ints], lengths: Ints, rounded: Ints, shapes: ShapeSet | None = None
) -> tuple[tuple[Ints, ...], Ints]:
    """Groups and (K, A) widths in a plan's order: what does not fit in memory fails in the first micro-batch."""
    order = sorted_rows(lengths, rounded)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    sizes = np.array([len(p) for p in pieces])
    rows = np.concatenate(pieces)
    rows = rows[np.lexsort((rank[rows], np.repeat(np.arange(len(pieces)), sizes)))]
    starts = np.cumsum(sizes) - sizes
    widths = np.maximum.reduceat(rounded[rows], starts, axis=0)
    if shapes is not None:
        widths = np.array([shapes.widths_of(n, width) for n, width in zip(sizes.tolist(), widths, strict=True)])
    sequence = np.lexsort((rank[rows[starts]], -widths.sum(axis=1)))
    groups = np.split(rows, starts[1:])
    return tuple(groups[i] for i in sequence), widths[sequence]


def _check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise PlanError(f"{name}={value!r} must be an integer, at least {least}")
    if most is not None and value > most:
        raise PlanError(f"{name}={value!r} is too large, use at most {most}")
    return int(value)


def _as_slot_cost(multiple: int, attention_width: int | None, rounded: Ints) -> SlotCost:
    multiple = _check_integer("cost_multiple_of", multiple, most=_MOST)
    if attention_width is None:
        return SlotCost(multiple)
    width = _check_integer("attention_width", attention_width, most=_MOST)
    longest = int(rounded.max(initial=0))
    if longest + multiple > _MOST_SQUARED:
        raise PlanError(f"attention_width={attention_width}: the square of {longest} tokens is too large to plan with")
    return SlotCost(multiple, width)


def _slots_of_all(name: str, widths: Ints) -> int:
    """Slots of all rows in one group, by (B, A) widths; refuses what would leave int64 no room."""
    slots = len(widths) * int(widths.max(axis=0, initial=0).sum())
    if slots >= 2**62:
        raise PlanError(f"{name}: {len(widths)} rows x longest = {slots} slots is above 2**62; plan fewer rows")
    return slots


def _as_array(name: str, value: Any) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"{name} is no array in host memory ({error}); pass a flat list or .cpu()") from error


def _as_lengths(lengths: Any) -> Ints:
    """(B, A) int64 from what the caller gave; refuses what would need a guess."""
    table = _as_array("lengths", lengths)
    shape = table.shape
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or table.shape[1] not in (1, 2):
        raise PlanError(f"lengths has shape {shape}; pass (B,), or (B, 2) for encoder and decoder")
    if not len(table):
        return np.zeros(table.shape, np.int64)
    if table.dtype.kind not in "iu":
        odd = (table != np.floor(table)).any(axis=1) if table.dtype.kind == "f" else np.zeros(1)
        bad = int(np.argmax(odd))
        raise PlanError(f"lengths[{bad}]={table[bad].tolist()} is {table.dtype}; pass integers")
    wrong = np.argwhere((table < 1) | (table > _MOST))
    if len(wrong):
        bad, axis = wrong[0].tolist()
        raise PlanError(f"lengths[{bad}]={table[bad, axis]} is not in 1 ... 2**50; leave out rows without tokens")
    return table.astype(np.int64)


def _round_up(lengths: Ints, multiple: int, max_width: int | Sequence[int] | None) -> Ints:
    """Lengths (B, A) rounded up to the multiple, but not past the width of the batch."""
    rounded = round_up(lengths, multiple)
    if max_width is None:
        return rounded
    given = np.ravel(np.array(max_width, dtype=object))
    if len(given) not in (1, lengths.shape[1]):
        raise PlanError(f"max_width={max_width!r} must be an integer, or {lengths.shape[1]}: one per axis")
    caps = np.array([_check_integer("max_width", cap, most=_MOST) for cap in given], np.int64)
    above = np.argwhere(lengths > caps)
    if len(above):
        bad, axis = above[0].tolist()
        raise PlanError(f"lengths[{bad}]={lengths[bad, axis]} is above max_width={max_width!r}, the batch's width")
    return np.minimum(rounded, caps)


def _as_riders(riders: Any, count: int) -> Bools:
    """(B,) bool; all False where the rule is off because no row, or every row, is a rider."""
    given = np.zeros(count, np.bool_) if riders is None else _as_array("riders", riders)
    if given.shape != (count,) or (count and given.dtype != np.bool_):
        raise PlanError(f"riders has shape {given.shape} of {given.dtype}; pass one bool per row: ({count},)")
    return given.astype(np.bool_) & (not given.all())


def _beyond_shapes(plan: Plan, missed: bool) -> str:
    """What has another shape than those that shapes are bounded to, in words."""
    if missed:
        return "rows without loss leave no choice of shapes, so shape_buckets does not bound those of this batch"
    longest = int(plan.widths.max())
    if plan.shapes is not None and longest > plan.shapes.widest:
        return (
            f"a row of {longest} positions is longer than the widest of the {len(plan.shapes)} shapes that were chosen "
            f"on the first batch ({plan.shapes.widest}), and runs in a shape of its own: begin with a longer row"
        )
    return ""


def _over_limits(plan: Plan, limits: Limits) -> str:
    """Rows that exceed the budget and groups that riders force over a limit, in words."""
    told: list[str] = []
    if len(plan.over_budget):
        own = plan.rounded[plan.over_budget].sum(axis=1)
        told.append(
            f"{len(own)} of {len(plan.lengths)} rows exceed token_budget={plan.token_budget} and run alone, the "
            f"longest is row {plan.over_budget[own.argmax()]} with {own.max()} slots: raise token_budget"
        )
    areas = plan.slots_per_group.tolist()
    sizes = [len(rows) for rows in plan.groups]
    forced = [area for size, area in zip(sizes, areas, strict=True) if limits.broken_by(size, area)]
    if forced:
        told.append(
            f"{len(forced)} micro-batches exceed token_budget={plan.token_budget} or max_rows={limits.max_rows}, "
            f"the largest has {max(forced)} slots, since rows without loss need one that has some: raise the limit"
        )
    return "; ".join(told)
