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

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from lightning_padmin.errors import PadMinWarning, PlanError
from lightning_padmin.planning.inputs import (
    MOST,
    as_lengths,
    as_riders,
    as_slot_cost,
    check_integer,
    rounded_lengths,
    slots_of_all,
)
from lightning_padmin.planning.packs import first_fit_decreasing
from lightning_padmin.planning.plan import Plan, longest_first, with_packs
from lightning_padmin.planning.search import (
    Bools,
    Ints,
    Limits,
    SlotCost,
    arrange,
    greedy_sizes,
    optimal_sizes,
    orders_of,
    split_order,
)
from lightning_padmin.planning.shape_buckets import ShapeSet, shaped_sizes
from lightning_padmin.planning.spec import PlanSpec


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
    spec = PlanSpec(
        token_budget=token_budget,
        pad_to_multiple_of=pad_to_multiple_of,
        max_width=max_width,  # type: ignore[arg-type]  # checked with the lengths
        max_rows=max_rows,
        min_micro_batches=min_micro_batches,
        launch_cost=launch_cost,
        method=method,
        cost_multiple_of=cost_multiple_of,
        attention_width=attention_width,
    )
    plan = plan_quietly(lengths, spec, riders)
    if plan.notice:
        warnings.warn(plan.notice, PadMinWarning, stacklevel=2)
    return plan


def plan_quietly(lengths: Any, spec: PlanSpec, riders: Any = None, shapes: ShapeSet | None = None) -> Plan:
    """`plan_micro_batches` for callers that tell `Plan.notice` in their own way, once for many batches.

    With `shapes` every group has one of them; `method` then is "optimal", and there is one length per row.
    """
    method, launch_cost = spec.method, spec.launch_cost
    if method not in ("optimal", "greedy"):
        raise PlanError(f"method={method!r} is unknown; use 'optimal' or 'greedy'")
    check_integer("min_micro_batches", spec.min_micro_batches)
    check_integer("pad_to_multiple_of", spec.pad_to_multiple_of, most=MOST)
    check_integer("launch_cost", launch_cost, least=0, most=MOST)
    table = as_lengths(lengths)
    rounded = rounded_lengths(table, spec.pad_to_multiple_of, spec.max_width)
    slot_cost = as_slot_cost(spec.cost_multiple_of, spec.attention_width, rounded)
    riding = as_riders(riders, len(table))
    whole = slots_of_all("lengths", rounded)
    slots_of_all("cost_multiple_of" if spec.attention_width is None else "attention_width", slot_cost.of(rounded))
    budget = whole if spec.token_budget is None else check_integer("token_budget", spec.token_budget)
    most_rows = len(table) if spec.max_rows is None else check_integer("max_rows", spec.max_rows)
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
    groups, widths = longest_first(pieces, table, rounded, shapes)
    plan = replace(plan, groups=groups, widths=widths, shapes=shapes)
    notice = "; ".join(filter(None, [_over_limits(plan, limits), _beyond_shapes(plan, missed)]))
    return replace(plan, notice=notice).at_least(spec.min_micro_batches)


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
    check_integer("min_micro_batches", min_micro_batches)
    check_integer("launch_cost", launch_cost, least=0, most=MOST)
    table = as_lengths(lengths)
    if table.shape[1] > 1:
        raise PlanError("rows with two lengths, of an encoder-decoder, cannot be packed")
    total = int(table.sum())
    if total >= 2**62:
        raise PlanError(f"lengths sum to {total}, which is above 2**62; plan fewer rows")
    budget = max(total, 1) if token_budget is None else check_integer("token_budget", token_budget)
    most = max(len(table), 1) if max_rows is None else check_integer("max_rows", max_rows)
    riding = as_riders(riders, len(table))
    alone = np.flatnonzero(table[:, 0] > budget)
    plan = Plan((), table[:0], table, alone, table, riding, budget, int(launch_cost), is_packed=True)
    if not len(table):
        return plan
    plan = with_packs(plan, first_fit_decreasing(table[:, 0], budget, most, riding))
    return replace(plan, notice=_over_limits(plan, Limits(budget, most, plan.launch_cost))).at_least(min_micro_batches)


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
