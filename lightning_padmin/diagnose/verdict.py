"""What a report means, in words, and the lines to paste; also when there is nothing to gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_padmin.config import PadMinConfig
from lightning_padmin.diagnose.report import Report
from lightning_padmin.diagnose.sampling import Setup

FULL = 0.05  # padding below this share is not worth anybody's time
SMALL = 0.05  # ... nor is a predicted saving below this one
_MOST_OF_IT = 0.9
_NOTABLE = 0.1

Kind = Literal["full", "small", "trim", "plan"]


@dataclass(frozen=True)
class Verdict:
    """What to do.

    Attributes:
        kind: "full": hardly any padding; "small": padding, and little to gain by removing it; "trim": trimming alone
            gives most of it; "plan": a plan within a budget gives more.
        sentences: for people.
        lines: to paste, by framework; empty where there is nothing to gain.
        unknown: what was not measured.
    """

    kind: Kind
    sentences: tuple[str, ...]
    lines: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]


def judge(report: Report) -> Verdict:
    """The verdict on a report."""
    kind = _kind(report)
    sentences = [_opening(report, kind), *_about_launches(report, kind), *_about_ranks(report), *_warnings(report)]
    lines = paste_lines(report) if kind in ("trim", "plan") else ()
    unknown = [
        "From lengths only: memory and time were not measured. Times are slots + launch cost x passes; what grows with "
        "the square of the width (attention) is left out."
    ]
    return Verdict(kind, tuple(sentences), lines, tuple(unknown))


def _kind(report: Report) -> Kind:
    today, best = report.remedy("today"), report.remedy("budgeted")
    if today.waste.value < FULL:
        return "full"
    saving = 1 - best.time.value
    if saving < SMALL:
        return "small"
    return "trim" if 1 - report.remedy("roll + trim").time.value >= _MOST_OF_IT * saving else "plan"


def _opening(report: Report, kind: Kind) -> str:
    today, best = report.remedy("today"), report.remedy("budgeted")
    waste, time = _percent(today.waste.value), best.time.value
    if kind == "full":
        full = _percent(1 - today.waste.value)
        return f"Padding is not your bottleneck: your batches are {full} full; look at batch size instead."
    if kind == "small":
        return (
            f"Padding is {waste} of your slots, and removing it would save about {_percent(max(0.0, 1 - time))} of the "
            "time: not worth a change."
        )
    cost = (
        f"Padding costs you: {waste} of all slots are padding. Planned within {report.recommended:,} slots, the same "
        f"rows take {times(today.slots / best.slots)} fewer slots ({_percent(best.waste.value)} padding) and about "
        f"{_percent(time)} of today's time."
    )
    if kind == "trim":
        cost += (
            " Cutting each batch to its longest row gives most of that: where the collator can do it, "
            'padding="longest" is enough.'
        )
    return cost


def _about_launches(report: Report, kind: Kind) -> list[str]:
    """Where passes are so small that starting them is a notable part of the time."""
    today = report.remedy("today")
    launches = report.setup.launch_cost * today.passes * report.setup.world_size
    share = launches / (launches + today.slots)
    if kind not in ("full", "small") or share < _NOTABLE:
        return []
    told = (
        f"Starting passes is about {_percent(share)} of the predicted time, with {today.rows:.1f} rows in a pass: more "
        "rows per batch, if memory allows, would save most of that."
    )
    best = report.remedy("budgeted")
    if best.time.value < 1 - SMALL:
        told += (
            f" A plan within {report.recommended:,} slots makes {best.passes:.1f} passes of {today.passes:.1f}, for "
            f"about {_percent(best.time.value)} of today's time."
        )
    return [told]


def _about_ranks(report: Report) -> list[str]:
    today, best = report.remedy("today"), report.remedy("budgeted")
    if today.idle < _NOTABLE:
        return []
    return [
        f"Ranks wait for the slowest {_percent(today.idle)} of the time ({_percent(best.idle)} when planned): more "
        "rows per step even that out."
    ]


def _warnings(report: Report) -> list[str]:
    told = []
    line = report.line
    if line.over:
        told.append(
            f"Warning: {line.over:,} of {report.lengths.rows:,} rows are longer than the budget of {line.budget:,}; "
            f"each runs alone, the longest with {report.lengths.longest:,} slots."
        )
    if line.budget > report.peak_slots:
        told.append(
            f"Warning: today's largest batch has {report.peak_slots:,} slots; {line.budget:,} may need more memory."
        )
    if report.is_short:
        told.append(f"There are fewer rows than a step has: one of {report.setup.rows_per_step} rows was looked at.")
    if report.cut:
        told.append(f"{report.cut:,} rows are longer than --max-length and count as cut to it.")
    if report.skipped:
        told.append(f"{report.skipped:,} rows of 0 tokens were left out (--skip-empty).")
    return told


def paste_lines(report: Report) -> tuple[tuple[str, str], ...]:
    """(framework, lines of code) with the recommended options."""
    setup = report.setup
    options = _options(report.recommended, setup)
    whole = ""
    if setup.accumulate > 1:
        # These plan one batch at a time, so what would be accumulated belongs into one batch.
        whole = f"  # with batch_size={setup.rows_per_rank} and no accumulation"
    trainer = "GRPOTrainer" if setup.batching == "generation" else "SFTTrainer"
    config = f"PadMinConfig({options})"
    return (
        (
            "Lightning",
            "from lightning_padmin import PadMinCallback\n"
            f"trainer = Trainer(callbacks=[PadMinCallback({options})]){whole}",
        ),
        (
            "TRL",
            "from lightning_padmin import PadMinConfig\n"
            "from lightning_padmin.integrations.trl.mixin import PadMinMixin\n"
            f"class MyTrainer(PadMinMixin, {trainer}): ...\n"
            f"trainer = MyTrainer(..., padmin={config})",
        ),
        (
            "Accelerate",
            "from lightning_padmin import PadMinConfig\n"
            "from lightning_padmin.integrations.accelerate.loop import PadMin\n"
            f"pad = PadMin(accelerator, {config}){whole}",
        ),
    )


def _options(budget: int, setup: Setup) -> str:
    """Options of PadMinConfig that are not its defaults, and the budget."""
    default = PadMinConfig()
    named = {name: getattr(setup, name) for name in ("launch_cost", "max_rows", "pad_to_multiple_of")}
    told = {name: value for name, value in named.items() if value != getattr(default, name)}
    return ", ".join(f"{name}={value:_}" for name, value in {"token_budget": budget, **told}.items())


def times(factor: float) -> str:
    """A factor in words: "1.53 times", "12 times"."""
    return f"{factor:.2f} times" if factor < 10 else f"{factor:,.0f} times"


def _percent(share: float) -> str:
    """Whole percents, and tenths where whole ones would say all or nothing."""
    whole = round(100 * share)
    if 0.0005 <= share < 0.05 or 0.995 <= share < 0.9995:
        return f"{100 * share:.1f}%"
    return f"{whole}%"
