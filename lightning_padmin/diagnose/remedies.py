"""What a step costs: as batched today, trimmed, rolled and trimmed, planned within a budget, packed.

    cost = slots + launch_cost x micro-batches; a step takes as long as its slowest rank

Shapes: S steps, W ranks, A batches of a step, B rows of a batch, K budgets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.diagnose.packing import packed_rows
from lightning_padmin.diagnose.sampling import Sample, Setup
from lightning_padmin.planning import Plan, PlanSpec, plan_quietly, round_up

Ints: TypeAlias = NDArray[np.int64]
LIMITS = ("budget", "max rows", "launch cost", "end of the step")


@dataclass(frozen=True, eq=False)
class Costs:
    """What one way to run the sampled steps takes.

    Attributes:
        slots: (S, W) int64.
        passes: (S, W) int64: forward and backward passes.
        limits: micro-batches by what ended them, in the order of `LIMITS`; zeros where nothing was planned.
        largest: slots of the largest pass.
    """

    slots: Ints
    passes: Ints
    limits: Ints
    largest: int

    def per_step(self, launch_cost: int) -> Ints:
        """(S,) int64: slots and launches of each step's slowest rank."""
        slowest: Ints = (self.slots + launch_cost * self.passes).max(axis=1)
        return slowest


def real_tokens(sample: Sample) -> Ints:
    """(S, W) int64 tokens of each step and rank."""
    tokens: Ints = sample.lengths.sum(axis=(2, 3, 4))
    return tokens


def widths_today(sample: Sample) -> Ints:
    """(S, W, A) int64: width that each batch is padded to today."""
    setup, lengths = sample.setup, sample.lengths
    if setup.batching == "generation":
        # As TRL pads them: each side to the longest of the rank's whole generation, which is cut into batches later.
        widths = lengths.max(axis=(2, 3)).sum(axis=2)
        return np.broadcast_to(_rounded(widths, setup)[:, :, None], lengths.shape[:3])
    if setup.batching == "fixed":
        return np.full(lengths.shape[:3], setup.max_length, np.int64)
    return _rounded(lengths.sum(axis=4).max(axis=3), setup)


def today(sample: Sample) -> Costs:
    """The batches as they are."""
    return _batched(sample, widths_today(sample))


def trimmed(sample: Sample) -> Costs:
    """The same batches without columns that are padding in every row; prompts still end in one column."""
    sides = sample.lengths if sample.setup.batching == "generation" else sample.lengths.sum(axis=4, keepdims=True)
    return _batched(sample, _rounded(sides.max(axis=3).sum(axis=3), sample.setup))


def rolled(sample: Sample) -> Costs:
    """The same with rows moved to the left first: as wide as the longest row, not as both longest sides."""
    return _batched(sample, _rounded(sample.lengths.sum(axis=4).max(axis=3), sample.setup))


def planned(
    sample: Sample,
    budget: int | None,
    method: Literal["optimal", "greedy"] = "optimal",
    tell: Callable[[], None] | None = None,
) -> Costs:
    """The rows of a rank's whole step, planned within a token budget; ranks run equally many micro-batches.

    Args:
        sample: the steps.
        budget: most slots of a micro-batch; None: no limit.
        method: of the planner.
        tell: called after each step.
    """
    steps, ranks = sample.lengths.shape[:2]
    slots, passes = np.zeros((2, steps, ranks), np.int64)
    limits, largest = np.zeros(len(LIMITS), np.int64), 0
    rows = sample.lengths.sum(axis=4).reshape(steps, ranks, -1)
    for step in range(steps):
        plans = [_plan(rows[step, rank], budget, sample.setup, method) for rank in range(ranks)]
        most = max(len(plan) for plan in plans)
        for rank, plan in enumerate(plans):
            limits += _ended_by(plan, sample.setup.max_rows)
            largest = max(largest, int(plan.slots_per_group.max()))
            finer = plan.at_least(most)
            # Ranks with nothing left to cut run a copy of one of their rows, for which they take the shortest.
            slots[step, rank] = finer.slots + (most - len(finer)) * int(finer.rounded.min())
            passes[step, rank] = most
        if tell is not None:
            tell()
    return Costs(slots, passes, limits, largest)


def packed(sample: Sample, budget: int) -> Costs:
    """The rows of a rank's whole step packed end to end, passes of up to `budget` slots.

    Batches padded to a fixed width are packed into rows of that width, which keep a rest of padding each. Else rows
    follow one another without any, as kernels for variable lengths take them.
    """
    steps, ranks = sample.lengths.shape[:2]
    rows = sample.lengths.sum(axis=4).reshape(steps * ranks, -1)
    setup = sample.setup
    context = setup.max_length if setup.batching == "fixed" and setup.max_length else max(budget, int(rows.max()))
    counts = np.array([packed_rows(each, context) for each in rows.tolist()], np.int64).reshape(steps, ranks)
    at_once = max(1, budget // context)
    slots = counts * context if setup.batching == "fixed" else real_tokens(sample)
    return Costs(slots, -(-counts // at_once), np.zeros(len(LIMITS), np.int64), at_once * context)


def _batched(sample: Sample, widths: Ints) -> Costs:
    slots = widths.sum(axis=2) * sample.setup.batch_size
    largest = int(widths.max()) * sample.setup.batch_size
    return Costs(slots, np.full_like(slots, sample.setup.accumulate), np.zeros(len(LIMITS), np.int64), largest)


def _rounded(widths: Ints, setup: Setup) -> Ints:
    return round_up(widths, setup.pad_to_multiple_of)


def _plan(lengths: Ints, budget: int | None, setup: Setup, method: Literal["optimal", "greedy"]) -> Plan:
    spec = PlanSpec(
        token_budget=budget,
        pad_to_multiple_of=setup.pad_to_multiple_of,
        max_rows=setup.max_rows,
        launch_cost=setup.launch_cost,
        method=method,
    )
    return plan_quietly(lengths, spec)


def _ended_by(plan: Plan, max_rows: int | None) -> Ints:
    """How many micro-batches one more row would take over a limit, how many a cut was cheaper for, and the last one."""
    sizes = np.array([len(rows) for rows in plan.groups], np.int64)
    full = (sizes + 1) * plan.widths[:, 0] > plan.token_budget
    full[-1] = False  # there was no further row
    crowded = ~full & (sizes == max_rows) if max_rows is not None else np.zeros_like(full)
    crowded[-1] = False
    return np.array([full.sum(), crowded.sum(), len(sizes) - 1 - full.sum() - crowded.sum(), 1], np.int64)
