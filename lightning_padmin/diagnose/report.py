"""Lengths and a set-up as a report: statistics, remedies, budgets. Whatever is printed or drawn stands in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.diagnose.reading import Lengths
from lightning_padmin.diagnose.remedies import LIMITS, Costs, packed, planned, real_tokens, rolled, today, trimmed
from lightning_padmin.diagnose.sampling import Ratio, Sample, Setup, cut_to, draw_steps, ratio
from lightning_padmin.diagnose.spread import LengthStats, length_stats

_BUDGETS = (8_192, 16_384, 32_768, 65_536)
_MOST_BUDGETS = 8
_ENOUGH = 1.01  # times the least predicted time: a larger budget than that takes memory and gains nothing


@dataclass(frozen=True)
class Remedy:
    """One way to run the sampled steps.

    Attributes:
        name: in words.
        slots: per optimizer step, all ranks.
        waste: 1 - real tokens / slots.
        rows: mean rows of a forward and backward pass.
        passes: per step and rank.
        time: predicted, relative to today; a step takes as long as its slowest rank.
        idle: share of all ranks' time that is spent waiting for the slowest.
    """

    name: str
    slots: float
    waste: Ratio
    rows: float
    passes: float
    time: Ratio
    idle: float


@dataclass(frozen=True)
class Budget:
    """One line of the sweep.

    Attributes:
        budget: token budget, in slots.
        outcome: what a plan within it takes.
        binding: what most micro-batches end by, one of `LIMITS`.
        share: of the micro-batches that end by it.
        over: rows of the whole data that are longer than the budget by themselves.
    """

    budget: int
    outcome: Remedy
    binding: str
    share: float
    over: int


@dataclass(frozen=True)
class Report:
    """What `padmin diagnose SOURCE` has found.

    Attributes:
        source, how: what was read and measured.
        setup: how the user trains; batch size, accumulation and ranks as sampled.
        lengths: of whole rows; `parts`: of prompts and of completions, empty if rows have one length.
        steps: sampled; `is_whole` if they are one pass over the data.
        remedies: today first, then trim, roll and trim, greedy, budgeted, packed.
        sweep: by budget, ascending.
        recommended: the budget, one of the sweep.
        peak_slots: of the largest batch of today in the sample.
        loose_budget: from here on, larger budgets change no plan of the sample.
        cut, skipped: rows longer than `max_length`; rows of 0 tokens that were left out.
        is_short: there are fewer rows than a step of the set-up has, so a smaller step was looked at.
        launch_cost_source: where the launch cost comes from, in words.
    """

    source: str
    how: str
    setup: Setup
    lengths: LengthStats
    parts: tuple[LengthStats, ...]
    steps: int
    is_whole: bool
    remedies: tuple[Remedy, ...]
    sweep: tuple[Budget, ...]
    recommended: int
    peak_slots: int
    loose_budget: int
    cut: int = 0
    skipped: int = 0
    is_short: bool = False
    launch_cost_source: str = "the default"

    def remedy(self, name: str) -> Remedy:
        """The remedy of that name."""
        return next(each for each in self.remedies if each.name == name)

    @property
    def line(self) -> Budget:
        """The sweep's line of the recommended budget."""
        return next(each for each in self.sweep if each.budget == self.recommended)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def make_report(
    lengths: Lengths, setup: Setup, tell: Callable[[int], None] | None = None, launch_cost_source: str = "the default"
) -> Report:
    """Simulates training on the lengths.

    Args:
        lengths: of all rows.
        setup: how the user trains.
        tell: called with the number of steps planned so far, over all budgets.
        launch_cost_source: where `setup.launch_cost` comes from, in words.

    Raises:
        DiagnoseError: an option is out of range.
    """
    lengths, cut = cut_to(lengths, setup.max_length)
    sample = draw_steps(lengths, setup)
    total = lengths.total
    as_it_is = today(sample)
    count = itertools.count(1)
    step = None if tell is None else lambda: tell(next(count))
    loose = planned(sample, None, tell=step).largest
    budgets = setup.budgets or choose_budgets(int(total.max()), loose, as_it_is.largest)
    found = {budget: planned(sample, budget, tell=step) for budget in budgets}
    sweep = tuple(
        Budget(budget, _outcome(f"budget {budget:,}", each, sample, as_it_is), *_binding(each), _longer(total, budget))
        for budget, each in found.items()
    )
    recommended = recommend(sweep, as_it_is.largest)
    ways = {
        "today": as_it_is,
        "trim": trimmed(sample),
        "roll + trim": rolled(sample),
        "greedy": planned(sample, recommended, "greedy", step),
        "budgeted": found[recommended],
        "packed": packed(sample, recommended),
    }
    return Report(
        lengths.source,
        lengths.how,
        sample.setup,
        length_stats(total),
        tuple(length_stats(column) for column in lengths.table.T) if lengths.table.shape[1] > 1 else (),
        len(sample.lengths),
        sample.is_whole,
        tuple(_outcome(name, each, sample, as_it_is) for name, each in ways.items()),
        sweep,
        recommended,
        as_it_is.largest,
        loose,
        cut,
        lengths.skipped,
        len(total) < setup.rows_per_step,
        launch_cost_source,
    )


def _longer(total: NDArray[np.int64], budget: int) -> int:
    return int((total > budget).sum())


def _outcome(name: str, costs: Costs, sample: Sample, as_it_is: Costs) -> Remedy:
    real, slots = real_tokens(sample).sum(axis=1), costs.slots.sum(axis=1)
    used = ratio(real, slots)
    cost = sample.setup.launch_cost
    slowest = costs.per_step(cost)
    all_ranks = slowest.sum() * sample.setup.world_size
    return Remedy(
        name,
        float(slots.mean()),
        Ratio(1 - used.value, used.error),
        sample.setup.rows_per_rank * costs.passes.size / float(costs.passes.sum()),
        float(costs.passes.mean()),
        ratio(slowest, as_it_is.per_step(cost)),
        1 - float((costs.slots + cost * costs.passes).sum()) / float(all_ranks),
    )


def _binding(costs: Costs) -> tuple[str, float]:
    most = int(costs.limits.argmax())
    return LIMITS[most], float(costs.limits[most] / costs.limits.sum())


def choose_budgets(longest: int, loose: int, peak: int) -> tuple[int, ...]:
    """Budgets worth trying: powers of two from the longest row to where they stop to matter, and today's batch.

    Args:
        longest: of all rows, in tokens; a budget below it leaves rows out of the plan.
        loose: from here on, larger budgets change nothing.
        peak: slots of today's largest batch.
    """
    lowest, highest = _power(longest), max(_power(loose), _power(longest))
    powers = [lowest * 2**k for k in range(50) if lowest * 2**k <= highest]
    usual = [each for each in _BUDGETS if each <= highest]
    chosen = sorted({*powers[-_MOST_BUDGETS:], *usual, max(longest, min(peak, highest))})
    return tuple(chosen)


def _power(number: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(0, number - 1).bit_length()


def recommend(sweep: tuple[Budget, ...], peak: int) -> int:
    """The smallest budget with all that budgets can give, of those that take no more memory than today.

    Slots of today's largest batch are known to fit. Without a budget up to that, all are candidates.
    """
    known = [each for each in sweep if each.budget <= peak] or list(sweep)
    fitting = [each for each in known if not each.over] or known
    least = min(each.outcome.time.value for each in fitting)
    return next(each.budget for each in fitting if each.outcome.time.value <= least * _ENOUGH)
