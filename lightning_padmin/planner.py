"""Which rows run together: sorted micro-batches of the least total cost.

    cost = slots + launch_cost * micro-batches,   slots = sum over micro-batches of rows x rounded width

Rows are sorted by rounded length, longest first, and the sorted list is cut into runs. With one length per row some
best partition has this form: swap a longer row of a narrower group for a shorter row of a wider one, and no width
grows. So the best cuts, found by dynamic programming over start positions (Bellman 1957), are the best plan. The
usual alternative, `method="greedy"`, fills each group up to the budget and ignores what a wide group costs.

Pure functions of integers, numpy only. Shapes: B rows, A axes (2 for encoder-decoder rows, else 1), K groups.
"""

from __future__ import annotations

import heapq
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.errors import PadMinWarning, PlanError

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
_MOST = 2**50  # of one length or option, so that a single rounded length stays far inside int64
_LOAN_ROUNDS = 4  # orders of the rows that are tried where riders need a carrier from elsewhere


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
    """

    groups: tuple[Ints, ...]
    widths: Ints
    lengths: Ints
    over_budget: Ints
    rounded: Ints = field(repr=False)
    riders: Bools = field(repr=False)
    token_budget: int
    launch_cost: int

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def slots_per_group(self) -> Ints:
        """(K,) int64: rows x width, summed over axes."""
        return np.array([len(rows) for rows in self.groups], np.int64) * self.widths.sum(axis=1)

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
        """What the planner minimises, in slots: slots + launch_cost * K."""
        return self.slots + self.launch_cost * len(self)

    def at_least(self, k: int) -> Plan:
        """Cuts groups until there are `k`, each time by that one cut of all which saves most slots.

        Args:
            k: wanted number of micro-batches.

        Returns:
            This plan if it has `k` groups or more; else a finer one. It still has fewer than `k` groups where nothing
            is left to cut: single rows, and groups with only one row that is no rider.

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
        groups, widths = _longest_first([cut.rows for cut in heap], self.lengths, self.rounded)
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
) -> Plan:
    """Splits a batch into micro-batches whose rows x rounded width stay within a token budget.

    Args:
        lengths: (B,) or (B, 2) integers of at least 1, in tokens: a sequence, array or CPU tensor. Two columns are
            encoder and decoder lengths; the slots of a group are then rows x (widest encoder + widest decoder).
        token_budget: most slots of one group, after rounding. None: the slots of the trimmed batch.
        pad_to_multiple_of: widths become multiples of this.
        max_width: original width of the batch (one number, or one per axis), which rounding does not pass.
        max_rows: most rows of one group.
        min_micro_batches: the plan is cut further until it has this many groups, see `Plan.at_least`.
        launch_cost: what one more group costs, in slots.
        method: "optimal" (least cost), or "greedy" (fill up to the budget, then cut) for comparison.
        riders: (B,) bool, rows without loss tokens. A group of riders alone would have a loss of 0 / 0, so each group
            gets another row, lent from elsewhere in the sorted order if need be; the cost is then the least found,
            not always the least there is. If all rows are riders, the rule is off.

    Returns:
        The plan; empty for no rows. Of plans of equal cost, one with the fewest groups.

    Raises:
        PlanError: an option or a length is out of range; the message names it, its value and the fix.

    Warns:
        PadMinWarning: once per call, if rows exceed the budget by themselves (each runs alone), or if there are too
            few rows with loss to keep the groups that riders need within the limits.

    Example:
        >>> plan = plan_micro_batches([120, 90, 300, 40, 55, 30, 210, 65], 400)
        >>> [rows.tolist() for rows in plan.groups], plan.slots
        ([[2], [6], [0, 1], [7, 4, 3, 5]], 1010)
    """
    if method not in ("optimal", "greedy"):
        raise PlanError(f"method={method!r} is unknown; use 'optimal' or 'greedy'")
    _check_integer("min_micro_batches", min_micro_batches)
    table = _as_lengths(lengths)
    rounded = _round_up(
        table, _check_integer("pad_to_multiple_of", pad_to_multiple_of, most=_MOST), max_width
    )
    riding = _as_riders(riders, len(table))
    whole = len(table) * int(rounded.max(axis=0, initial=0).sum())
    if whole >= 2**62:
        raise PlanError(
            f"lengths: {len(table)} rows of the longest length are {whole} slots; plan fewer rows at once"
        )
    budget = whole if token_budget is None else _check_integer("token_budget", token_budget)
    limits = _Limits(
        min(budget, whole),
        len(table) if max_rows is None else min(_check_integer("max_rows", max_rows), len(table)),
        _check_integer("launch_cost", launch_cost, least=0, most=_MOST),
    )
    alone = np.flatnonzero(rounded.sum(axis=1) > limits.budget)
    empty = np.zeros((0, table.shape[1]), np.int64)
    plan = Plan((), empty, table, alone, rounded, riding, budget, limits.launch_cost)
    if not len(table):
        return plan
    pieces = _arrange(table, rounded, ~riding, limits, _optimal if method == "optimal" else _greedy)
    groups, widths = _longest_first(pieces, table, rounded)
    plan = replace(plan, groups=groups, widths=widths)
    _warn_over_limits(plan, limits)
    return plan.at_least(min_micro_batches)


class _Limits(NamedTuple):
    budget: int
    max_rows: int
    launch_cost: int

    def broken_by(self, count: int, area: int) -> bool:
        """Whether `count` rows on `area` slots may not be a group; a row alone always may."""
        return count > 1 and (area > self.budget or count > self.max_rows)


def _arrange(
    lengths: Ints,
    rounded: Ints,
    carrier: Bools,
    limits: _Limits,
    solve: Callable[[Ints, Bools, _Limits], list[int]],
) -> list[Ints]:
    """Groups of row indices. With riders, tries several orders of the rows, each with carriers lent to riders.

    By the exchange argument of the module, made for carriers and for riders, a group of a good plan is a run of the
    sorted rows, or a run of riders and the longest carrier left. A pass that may borrow tells where the latter pays;
    the rows are reordered so and planned anew, hence no plan is worse than that of the sorted order.
    """
    order = _sorted_rows(lengths, rounded)
    if carrier.all():
        return _split(order, solve(_rows_of(rounded, order), carrier, limits))
    # As every group holds a carrier, no width is below that of the least carrier: lifting riders to it changes nothing.
    lifted = np.maximum(rounded, rounded[carrier].min(axis=0))
    tried: list[tuple[int, int, int, list[Ints]]] = []
    for turn in range(_LOAN_ROUNDS):
        rows, may_carry = _rows_of(lifted, order), carrier[order]
        pieces = _split(order, solve(rows, may_carry, limits))
        areas = [len(p) * int(lifted[p].max(axis=0).sum()) for p in pieces]
        broken = [area for p, area in zip(pieces, areas, strict=True) if limits.broken_by(len(p), area)]
        cost = sum(areas) + limits.launch_cost * len(areas)
        tried.append((max(broken, default=0), cost, turn, pieces))
        loans = _split(order, _optimal(rows, may_carry, limits, lend=True))
        if all(carrier[p].any() for p in loans):
            break
        order = _lend(loans, carrier)
    return min(tried)[3]


def _lend(pieces: list[Ints], carrier: Bools) -> Ints:
    """A new order of all rows: each piece of riders takes a carrier from a later piece, or else from an earlier one."""
    parts = list(pieces)
    spare = [
        int(carrier[p].sum()) - (len(p) > 1) for p in parts
    ]  # a carrier alone may go, its piece dissolves
    ahead = 0
    for taker in [i for i, p in enumerate(parts) if not carrier[p].any()]:
        ahead = max(ahead, taker + 1)
        while ahead < len(parts) and spare[ahead] < 1:
            ahead += 1
        giver = (
            ahead if ahead < len(parts) else next((i for i in range(taker - 1, -1, -1) if spare[i] > 0), None)
        )
        if giver is None:
            break
        at = np.flatnonzero(carrier[parts[giver]])[0 if giver > taker else -1]
        parts[taker] = np.append(parts[taker], parts[giver][at])
        parts[giver] = np.delete(parts[giver], at)
        spare[giver] -= 1
    return np.concatenate(parts)


def _optimal(rows: Ints, carrier: Bools, limits: _Limits, lend: bool = False) -> list[int]:
    """Sizes of the runs of least cost, by best[i] = min over size of area(i, size) + launch cost + best[i + size].

    All numbers are scaled by B + 1 and each run costs 1 on top, so the number of runs decides between equal costs. If
    no run from a start fits and keeps a carrier, the shortest that keeps one is taken at a price no other plan
    reaches. With `lend`, riders may be a run if there is room for the carrier to come, whose slots it pays.
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
    launch = limits.launch_cost * unit + 1
    rows, counts = rows.astype(kind) * unit, np.arange(1, n + 1).astype(kind)
    best = np.zeros(n + 1, kind)
    best[last + 1 : n] = dead  # only riders are left
    sizes = [0] * n
    for i in range(last, -1, -1):
        least, extra = need_of[i], launch
        areas = _areas(rows, counts, i, most[i], limits.budget * unit)
        if lend and lead_of[i]:
            areas = _with_loan(areas, counts, lead_of[i], limits, unit)
        if least > len(areas):
            areas, extra = _areas(rows, counts, i, least, price), launch + price
        totals = areas[least - 1 :] + best[i + least : i + len(areas) + 1]
        choice = int(totals.argmin())
        sizes[i] = least + choice
        best[i] = totals[choice] + extra
    starts = [0]
    while starts[-1] < n:
        starts.append(starts[-1] + sizes[starts[-1]])
    return np.diff(starts).tolist()


def _greedy(rows: Ints, carrier: Bools, limits: _Limits) -> list[int]:
    """Sizes of runs filled up to the limits one after the other; each keeps a carrier, as in `_optimal`."""
    n = len(rows)
    _, needed = _needs(carrier)
    most, counts = _fitting_rows(rows, limits), np.arange(1, n + 1)
    last = int(np.flatnonzero(carrier)[-1])
    sizes: list[int] = []
    start = 0
    while start < n:
        size = max(len(_areas(rows, counts, start, int(most[start]), limits.budget)), int(needed[start]))
        if last < start + size < n:  # would leave riders only, so the last carrier starts the next run
            size = last - start
        sizes.append(size)
        start += size
    return sizes


def _needs(carrier: Bools) -> tuple[Ints, Ints]:
    """From each start: the riders before the next carrier, and the least rows of a run that keeps the rider rule.

    Such a run reaches the next carrier, and the end of all rows if that carrier is the last one.
    """
    here = np.arange(len(carrier))
    next_carrier = np.minimum.accumulate(np.where(carrier, here, len(carrier))[::-1])[::-1]
    last = np.flatnonzero(carrier)[-1]
    needed = np.where(next_carrier < last, next_carrier - here + 1, len(carrier) - here)
    return next_carrier - here, needed


def _fitting_rows(rows: Ints, limits: _Limits) -> Ints:
    """From each start, a bound on the rows of a run within the limits: exact if `rows` is (B,), at least 1."""
    own = rows.reshape(len(rows), -1).sum(axis=1)
    return np.minimum(np.clip(limits.budget // own, 1, limits.max_rows), np.arange(len(rows), 0, -1))


def _useful_rows(rows: Ints, leading: Ints, limits: _Limits) -> Ints:
    """As `_fitting_rows`, without runs that one more cut would improve.

    Cutting the run [i, j) at p saves at least (own[i] - tail[p]) * (j - p) slots, where tail[p] is the widest that any
    run from p can be. If that is above the launch cost and both pieces keep a carrier, [i, j) is in no best plan.
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
    """Slots of the runs of 1, 2, ..., `most` rows from `start`; the tail over budget is left out, but never one row."""
    if rows.ndim == 1:
        return rows[start] * counts[:most]
    areas = np.maximum.accumulate(rows[start : start + most]).sum(axis=1) * counts[:most]
    return areas[: max(1, int(np.searchsorted(areas, budget, side="right")))]


def _with_loan(areas: Ints, counts: Ints, lead: int, limits: _Limits, unit: int) -> Ints:
    """Adds the carrier to come to the first `lead` areas, which are of riders only; drops one that has no room."""
    areas[:lead] += areas[:lead] // counts[: len(areas[:lead])]
    full = areas[-1] > limits.budget * unit or len(areas) >= limits.max_rows
    return areas[:-1] if lead >= len(areas) > 1 and full else areas


class _Cut(NamedTuple):
    """A cut of one group of sorted rows. Ordered by what it loses: minus the slots saved, 1 if there is no cut."""

    loss: int
    serial: int
    position: int
    rows: Ints


def _best_cut(rows: Ints, serial: int, plan: Plan) -> _Cut:
    """The cut of `rows` (n,) that saves most slots, of those that leave a non-rider on both sides."""
    carriers = np.cumsum(~plan.riders[rows])
    allowed = (carriers[:-1] > 0) & (carriers[:-1] < carriers[-1])
    if not allowed.any():
        return _Cut(1, serial, 0, rows)
    table = plan.rounded[rows]
    before = np.maximum.accumulate(table).sum(axis=1)
    after = np.maximum.accumulate(table[::-1])[::-1].sum(axis=1)
    count = np.arange(1, len(rows))
    loss = count * before[:-1] + count[::-1] * after[1:] - len(rows) * before[-1]
    best = int(np.where(allowed, loss, 1).argmin())
    return _Cut(int(loss[best]), serial, best + 1, rows)


def _rows_of(rounded: Ints, order: Ints) -> Ints:
    """Rows in the order to plan: (B,) if lengths only fall, so that a run is as wide as its first row, else (B, A)."""
    rows = rounded[order]
    falling = rows.shape[1] == 1 and bool((rows[1:] <= rows[:-1]).all())
    return rows[:, 0] if falling else rows


def _split(order: Ints, sizes: list[int]) -> list[Ints]:
    return np.split(order, np.cumsum(sizes)[:-1])


def _sorted_rows(lengths: Ints, rounded: Ints) -> Ints:
    """(B,) row indices, longest first: by rounded length, then length, both summed over axes, then by index."""
    return np.lexsort((-lengths.sum(axis=1), -rounded.sum(axis=1)))


def _longest_first(pieces: Sequence[Ints], lengths: Ints, rounded: Ints) -> tuple[tuple[Ints, ...], Ints]:
    """Groups and (K, A) widths in the order of a plan: if memory runs out, then in the first micro-batch."""
    order = _sorted_rows(lengths, rounded)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    sizes = np.array([len(p) for p in pieces])
    starts = np.cumsum(sizes) - sizes
    rows = np.concatenate(pieces)
    rows = rows[np.lexsort((rank[rows], np.repeat(np.arange(len(pieces)), sizes)))]
    widths = np.maximum.reduceat(rounded[rows], starts, axis=0)
    sequence = np.lexsort((rank[rows[starts]], -widths.sum(axis=1)))
    groups = np.split(rows, starts[1:])
    return tuple(groups[i] for i in sequence), widths[sequence]


def _check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise PlanError(f"{name}={value!r} must be an integer of at least {least}")
    if most is not None and value > most:
        raise PlanError(f"{name}={value!r} is too large, use at most {most}")
    return int(value)


def _as_lengths(lengths: Any) -> Ints:
    """(B, A) int64 from what the caller gave; nothing is rounded or clipped into range."""
    try:
        table = np.asarray(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"lengths cannot be read as an array, pass integers in host memory: {error}"
        ) from error
    if table.ndim == 1:
        table = table[:, None]
    if table.ndim != 2 or table.shape[1] not in (1, 2):
        raise PlanError(
            f"lengths has shape {np.shape(lengths)}; pass (B,), or (B, 2) for encoder and decoder lengths"
        )
    if not len(table):
        return np.zeros(table.shape, np.int64)
    if table.dtype.kind not in "iu":
        bad = 0 if table.dtype.kind != "f" else int(np.argmax((table != np.floor(table)).any(axis=1)))
        raise PlanError(
            f"lengths[{bad}]={table[bad].tolist()} is {table.dtype}, not an integer; count tokens per row"
        )
    wrong = (table < 1) | (table > _MOST)
    if wrong.any():
        bad, axis = (int(i) for i in np.argwhere(wrong)[0])
        raise PlanError(
            f"lengths[{bad}]={table[bad, axis]} must be from 1 to {_MOST}; leave rows without tokens out of the batch"
        )
    return table.astype(np.int64)


def _round_up(lengths: Ints, multiple: int, max_width: int | Sequence[int] | None) -> Ints:
    """Lengths (B, A) rounded up to the multiple, but not past the batch's own width."""
    rounded = -(-lengths // multiple) * multiple
    if max_width is None:
        return rounded
    given = np.ravel(np.array(max_width, dtype=object))
    if len(given) not in (1, lengths.shape[1]):
        raise PlanError(f"max_width={max_width!r} must be one integer, or one per axis ({lengths.shape[1]})")
    caps = np.array([_check_integer("max_width", cap, most=_MOST) for cap in given], np.int64)
    above = np.argwhere(lengths > caps)
    if len(above):
        row, axis = (int(i) for i in above[0])
        raise PlanError(
            f"lengths[{row}]={lengths[row, axis]} is above max_width={max_width!r}; pass the width of the original batch"
        )
    return np.minimum(rounded, caps)


def _as_riders(riders: Any, count: int) -> Bools:
    """(B,) bool; all False where the rule is off because no row, or every row, is a rider."""
    if riders is None:
        return np.zeros(count, np.bool_)
    given = np.asarray(riders)
    if given.shape != (count,) or (count and given.dtype != np.bool_):
        raise PlanError(
            f"riders has shape {given.shape} and dtype {given.dtype}; pass one bool per row, shape ({count},)"
        )
    return given.astype(np.bool_) & (not given.all())


def _warn_over_limits(plan: Plan, limits: _Limits) -> None:
    """The one warning of a call: rows that exceed the budget alone, groups that riders force over a limit."""
    told: list[str] = []
    if len(plan.over_budget):
        own = plan.rounded[plan.over_budget].sum(axis=1)
        told.append(
            f"{len(own)} of {len(plan.lengths)} rows exceed token_budget={plan.token_budget} by themselves and run alone "
            f"(the longest is row {plan.over_budget[own.argmax()]} with {own.max()} slots); raise token_budget to fit it"
        )
    sizes = [len(rows) for rows in plan.groups]
    areas = plan.slots_per_group.tolist()
    forced = [area for size, area in zip(sizes, areas, strict=True) if limits.broken_by(size, area)]
    if forced:
        told.append(
            f"{len(forced)} micro-batches exceed token_budget={plan.token_budget} or max_rows={limits.max_rows} (the "
            f"largest has {max(forced)} slots): rows without loss tokens need a row with some; raise the limit"
        )
    if told:
        warnings.warn("; ".join(told), PadMinWarning, stacklevel=3)
