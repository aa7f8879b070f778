"""`Plan`: which rows run together, and how it is cut further.

Shapes: B rows, A axes (2 for encoder-decoder rows), K groups.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from lightning_padmin.planning.inputs import check_integer
from lightning_padmin.planning.search import Bools, Ints, SlotCost, sorted_rows
from lightning_padmin.planning.shape_buckets import ShapeSet


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
        check_integer("k", k)
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
            return with_packs(self, pieces)
        groups, widths = longest_first(pieces, self.lengths, self.rounded, self.shapes)
        return replace(self, groups=groups, widths=widths)


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


def with_packs(plan: Plan, packs: list[Ints]) -> Plan:
    """The plan with these groups, those of most tokens first."""
    tokens = np.array([plan.lengths[rows, 0].sum() for rows in packs], np.int64)
    order = np.lexsort((np.arange(len(packs)), -tokens))
    return replace(plan, groups=tuple(packs[k] for k in order), widths=tokens[order][:, None])


def _cut_losses(table: Ints) -> Ints:
    """(n - 1,) minus the slots that each cut of n rows (n, A) saves."""
    before = np.maximum.accumulate(table).sum(axis=1)
    after = np.maximum.accumulate(table[::-1])[::-1].sum(axis=1)
    count = np.arange(1, len(table))
    losses: Ints = count * before[:-1] + count[::-1] * after[1:] - len(table) * before[-1]
    return losses


def longest_first(
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
