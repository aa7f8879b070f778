"""Pictures of a report: one step before and after, and what each budget leaves of padding and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lightning_padmin.diagnose.problems import DiagnoseError, first_line, needed
from lightning_padmin.diagnose.reading import Lengths
from lightning_padmin.diagnose.remedies import widths_today
from lightning_padmin.diagnose.report import Report
from lightning_padmin.diagnose.sampling import cut_to, draw_steps
from lightning_padmin.planning import PlanSpec, plan_quietly

_REAL, _PADDING, _LINE = "#2a6f97", "#f2b8a0", "#c1440e"


def save_plot(report: Report, lengths: Lengths, path: Path) -> None:
    """Writes the pictures of a report into one file; its suffix says which kind.

    Args:
        report: what `make_report` returned for these lengths.
        lengths: of all rows.
        path: for example `waste.png`.

    Raises:
        DiagnoseError: matplotlib is missing, or the file cannot be written.
    """
    needed("matplotlib", "--plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.2), dpi=120, layout="constrained")
    rows = figure.subplots(2, 2, height_ratios=[1.15, 1])
    _draw_step(rows[0], report, lengths)
    figure.legend(*rows[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8)
    _draw_lengths(rows[1, 0], report)
    _draw_sweep(rows[1, 1], report)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise DiagnoseError(f"--plot {path}: cannot be written ({first_line(error)})") from error


def _draw_step(axes: Any, report: Report, lengths: Lengths) -> None:
    """One rank's step, row by row: padded as today, and in the micro-batches of the plan."""
    sample = draw_steps(cut_to(lengths, report.setup.max_length)[0], report.setup)
    setup = sample.setup
    own = sample.lengths[0, 0].sum(axis=2).reshape(-1)
    widths = np.repeat(widths_today(sample)[0, 0], setup.batch_size)
    spec = PlanSpec(
        token_budget=report.recommended,
        pad_to_multiple_of=setup.pad_to_multiple_of,
        max_rows=setup.max_rows,
        launch_cost=setup.launch_cost,
    )
    plan = plan_quietly(own, spec)
    order = np.concatenate(plan.groups)
    planned = np.repeat(plan.widths[:, 0], [len(rows) for rows in plan.groups])
    passes = [setup.batch_size] * setup.accumulate, [len(rows) for rows in plan.groups]
    _bars(axes[0], "today", own, widths, passes[0], int(widths.max()))
    _bars(axes[1], f"planned within {report.recommended:,} slots", own[order], planned, passes[1], int(widths.max()))


def _bars(axes: Any, name: str, own: Any, widths: Any, sizes: list[int], right: int) -> None:
    edges = np.arange(len(own) + 1)
    # One polygon for all rows: thousands of bars would take minutes.
    for values, color, label in ((widths, _PADDING, "padding"), (own, _REAL, "real tokens")):
        axes.fill_betweenx(edges, np.append(values, values[-1]), step="post", color=color, linewidth=0, label=label)
    ends = np.cumsum(sizes)[:-1]
    axes.hlines(ends, 0, widths[ends - 1], color="white", linewidth=1.0 if len(own) <= 64 else 0.4)
    slots = int(widths.sum())
    passes = f"{len(sizes)} pass" + ("es" if len(sizes) > 1 else "")
    axes.set_title(f"One step, {name}\n{slots:,} slots, {1 - own.sum() / slots:.0%} padding, {passes}", fontsize=10)
    axes.set(xlabel="position", ylabel="rows", xlim=(0, right), ylim=(len(own), 0))
    axes.yaxis.get_major_locator().set_params(integer=True)


def _draw_lengths(axes: Any, report: Report) -> None:
    stats = report.lengths
    step = stats.edges[1] - stats.edges[0] if len(stats.edges) > 1 else 1
    axes.bar(stats.edges, np.array(stats.counts) / stats.rows, step * 0.94, align="edge", color=_REAL)
    for value, name, style in ((stats.median, "median", "-"), (stats.p99, "99%", "--")):
        axes.axvline(value, color=_LINE, linewidth=1.2, linestyle=style, label=f"{name}: {value:,.0f}")
    axes.set_title(f"Lengths of {stats.rows:,} rows (longest {stats.longest:,})", fontsize=10)
    axes.set(xlabel="tokens (the last bar holds all longer rows)", ylabel="share of rows")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(fontsize=8)


def _draw_sweep(axes: Any, report: Report) -> None:
    budgets = [line.budget for line in report.sweep]
    for name, color, outcomes in (
        ("padding", _LINE, [line.outcome.waste for line in report.sweep]),
        ("predicted time, of today's", _REAL, [line.outcome.time for line in report.sweep]),
    ):
        errors = [each.error or 0.0 for each in outcomes]
        axes.errorbar(
            budgets, [each.value for each in outcomes], errors, color=color, marker="o", capsize=3, label=name
        )
    axes.axhline(report.remedy("today").waste.value, color=_LINE, linestyle=":", linewidth=1.2, label="padding today")
    axes.axvline(report.recommended, color="gray", linewidth=0.8, linestyle="--", label="the plan shown")
    axes.set_xscale("log", base=2)
    axes.set_xticks([budget for budget in budgets if budget & (budget - 1) == 0] or budgets)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_locator(needed("matplotlib.ticker", "--plot").NullLocator())
    axes.tick_params(axis="x", labelsize=8, rotation=30 if len(budgets) > 6 else 0)
    axes.set_ylim(0, max(1.05, *(1.05 * line.outcome.time.value for line in report.sweep)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title("What each budget leaves", fontsize=10)
    axes.set(xlabel="token budget, in slots")
    axes.legend(fontsize=8)
