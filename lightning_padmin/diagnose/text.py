"""A report as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_padmin.diagnose.report import Remedy, Report
from lightning_padmin.diagnose.sampling import Ratio, Setup
from lightning_padmin.diagnose.spread import LengthStats
from lightning_padmin.diagnose.verdict import judge
from lightning_padmin.printing import printable

_BAR = 40


def render(report: Report) -> str:
    """Everything that `padmin diagnose SOURCE` prints."""
    verdict = judge(report)
    stats = report.lengths
    source, how = printable(report.source, 200), printable(report.how, 600)
    blocks = [
        [f"{source}: {stats.rows:,} rows, {stats.tokens:,} tokens ({how})"],
        _length_table(report),
        histogram(stats),
        [_setup_line(report), "", *_remedy_table(report.remedies)],
        [_sweep_heading(report), "", *_sweep_table(report)],
        list(verdict.sentences),
        [f"{name + ':':11} " + code.replace("\n", "\n" + 12 * " ") for name, code in verdict.lines],
        list(verdict.unknown),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, the first to the left and all others to the right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _length_table(report: Report) -> list[str]:
    names = ["rows", "prompts", "completions"]
    found = [report.lengths, *report.parts]
    return table(
        ["tokens of", "mean", "10%", "median", "90%", "99%", "longest"],
        [
            [
                name,
                f"{each.mean:,.1f}",
                *(f"{value:,.0f}" for value in (each.p10, each.median, each.p90, each.p99)),
                f"{each.longest:,}",
            ]
            for name, each in zip(names, found, strict=False)
        ],
    )


def histogram(stats: LengthStats) -> list[str]:
    """One bar per bin; what is there at all shows at least one mark."""
    most = max(stats.counts)
    edges = [f"{edge:,}" for edge in stats.edges]
    step = stats.edges[1] - stats.edges[0] if len(stats.edges) > 1 else 1
    names = [
        edge if step == 1 else f"{edge} - {low + step - 1:,}" for edge, low in zip(edges, stats.edges, strict=True)
    ]
    if stats.longest >= stats.edges[-1] + step:
        names[-1] = f"{edges[-1]} and more"
    width = max(map(len, names))
    return [
        f"{name:>{width}} |{'#' * max(bool(count), round(_BAR * count / most)):{_BAR}} {count / stats.rows:6.1%}"
        for name, count in zip(names, stats.counts, strict=True)
    ]


def _setup_line(report: Report) -> str:
    setup = report.setup
    passes = "one pass over the data" if report.is_whole else "a sample"
    return (
        f"Today: {_batching(setup)}; an optimizer step is {_count(setup.batch_size, 'row')} x "
        f"{_count(setup.accumulate, 'batch', 'batches')} x {_count(setup.world_size, 'rank')}. Looked at: "
        f"{_count(report.steps, 'step')} ({passes}); ± is the standard error over them."
    )


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _batching(setup: Setup) -> str:
    return {
        "random": "shuffled batches, each padded to its longest row",
        "sorted": "batches of rows sorted by length, each padded to its longest row",
        "file": "batches in the order of the file, each padded to its longest row",
        "fixed": f"batches padded to {setup.max_length} tokens",
        "generation": "prompts and completions each padded to the longest of a rank's whole step",
    }[setup.batching]


def _remedy_table(remedies: Sequence[Remedy]) -> list[str]:
    return table(
        ["per step", "slots", "waste", "rows per pass", "passes", "time"],
        [
            [
                _NAMES[each.name],
                f"{each.slots:,.0f}",
                percent(each.waste),
                f"{each.rows:.1f}",
                f"{each.passes:.1f}",
                percent(each.time),
            ]
            for each in remedies
        ],
    )


_NAMES = {
    "today": "today",
    "trim": "trim",
    "roll + trim": "roll + trim",
    "greedy": "greedy plan",
    "budgeted": "budgeted plan",
    "packed": "packed (the limit)",
}


def _sweep_heading(report: Report) -> str:
    launch = f"launch cost {report.setup.launch_cost:,} slots ({report.launch_cost_source})"
    rows = "no limit of rows" if report.setup.max_rows is None else f"at most {report.setup.max_rows} rows"
    return f"Budgets ({launch}, {rows}; time against today, by slots and launches):"


def _sweep_table(report: Report) -> list[str]:
    header = ["budget", "micro-batches", "mean rows", "mostly ended by", "waste", "longer rows", "time"]
    lines = table(
        header,
        [
            [
                f"{line.budget:,}",
                f"{line.outcome.passes:.1f}",
                f"{line.outcome.rows:.1f}",
                f"{line.binding} ({line.share:.0%})",
                percent(line.outcome.waste),
                f"{line.over:,}",
                percent(line.outcome.time),
            ]
            for line in report.sweep
        ],
    )
    marks = ["", *("  <- the plan above" if line.budget == report.recommended else "" for line in report.sweep)]
    told = [line + mark for line, mark in zip(lines, marks, strict=True)]
    return [
        *told,
        f"Budgets above {report.loose_budget:,} slots change no plan: no micro-batch of these steps has more.",
    ]


def percent(ratio: Ratio) -> str:
    """A ratio in percent, with its standard error."""
    error = "" if ratio.error is None else f" ± {100 * ratio.error:.1f}"
    return f"{100 * ratio.value:.1f}%{error}"
