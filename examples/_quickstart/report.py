"""What the quickstart says at its end: a table, a picture of one batch, and a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, never a window

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from rich.table import Table

from lightning_padmin import plan_micro_batches

GRADIENT_TARGET = 1e-5  # of float32 gradients, relative to the largest one
REAL, PADDING, INK = "#0072B2", "#F2C58C", "#333333"  # blue and light orange: apart for every kind of colour vision


@dataclass(frozen=True)
class Result:
    """What one run cost and where it ended. Counts are of all steps; `seconds` leaves out the first."""

    name: str
    real_tokens: int
    slots: int
    micro_batches: int
    seconds: float
    final_loss: float
    gradient_difference: float | None = None  # from the other run, at the first step

    @property
    def waste(self) -> float:
        """Padding fraction."""
        return 1 - self.real_tokens / self.slots


def table(results: Sequence[Result]) -> Table:
    """One line per run."""
    columns = ["slots", "waste", "micro-\nbatches", "seconds", "final\nloss", "gradient\ndifference"]
    drawn = Table("run")
    for column in columns:
        drawn.add_column(column, justify="right")
    for result in results:
        difference = result.gradient_difference
        drawn.add_row(
            result.name,
            f"{result.slots:,}",
            f"{result.waste:.1%}",
            str(result.micro_batches),
            f"{result.seconds:.1f}",
            f"{result.final_loss:.4f}",
            "" if difference is None else f"{difference:.1e}",
        )
    return drawn


def verdict(plain: Result, padmin: Result) -> str:
    """One sentence: the same gradients or not, less padding or not, less time or not."""
    difference = padmin.gradient_difference
    assert difference is not None
    if not difference <= GRADIENT_TARGET:  # also where it is not a number
        return f"NOT the same training: gradients differ by {difference:.1e}, more than rounding explains."
    ratio = plain.seconds / padmin.seconds
    pace = f"{ratio:.2f} times as fast" if ratio >= 1 else f"but {1 / ratio:.2f} times as slow"
    return (
        f"Same gradients (within {difference:.1e}), {1 - padmin.slots / plain.slots:.0%} fewer slots "
        f"(waste {plain.waste:.0%} -> {padmin.waste:.0%}), {pace}."
    )


def typical(batches: Sequence[Sequence[int]]) -> Sequence[int]:
    """The batch, given as its rows' lengths, of which as many waste more as waste less."""
    by_waste = sorted(batches, key=lambda lengths: 1 - sum(lengths) / (max(lengths) * len(lengths)))
    return by_waste[len(by_waste) // 2]


def draw_batch(lengths: Sequence[int], token_budget: int, path: Path) -> None:
    """Draw one batch before and after: a bar per row, its tokens and its padding."""
    plan = plan_micro_batches(lengths, token_budget)
    order = [(int(row), int(width)) for rows, (width,) in zip(plan.groups, plan.widths, strict=True) for row in rows]
    real, widest = sum(lengths), max(lengths)
    waste_before, waste = 1 - real / (widest * len(lengths)), plan.waste

    plt.rcParams.update({"font.size": 9, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    _draw_rows(left, lengths, [widest] * len(lengths), range(len(lengths)))
    _draw_rows(right, [lengths[row] for row, _ in order], [width for _, width in order], _spread(plan.groups))
    left.set_title(f"as batched: {len(lengths)} rows x {widest} = {widest * len(lengths):,} slots", fontsize=10)
    right.set_title(f"as run: {len(plan)} micro-batches, {plan.slots:,} slots", fontsize=10)
    _name_groups(right, plan.groups, plan.widths[:, 0])
    figure.suptitle(f"Waste of a typical batch: {waste_before:.0%} → {waste:.0%}", fontweight="bold")
    patches = [Patch(color=REAL, label="tokens"), Patch(color=PADDING, label="padding")]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def _draw_rows(axes: Axes, lengths: Sequence[int], widths: Sequence[int], heights: Sequence[float]) -> None:
    axes.barh(heights, widths, height=0.8, color=PADDING)
    axes.barh(heights, lengths, height=0.8, color=REAL)
    axes.invert_yaxis()  # the first row on top
    axes.set(yticks=[], xlabel="tokens", xlim=(0, 1.18 * max(widths)))  # room for the groups' names
    axes.spines[["top", "right", "left"]].set_visible(False)


def _spread(groups: Sequence[np.ndarray]) -> list[float]:
    """Heights of the bars: one per row, and a gap after each group."""
    return [float(bar + gap) for gap, rows in enumerate(groups) for bar in range(*_span(groups, gap))]


def _span(groups: Sequence[np.ndarray], index: int) -> tuple[int, int]:
    first = sum(len(rows) for rows in groups[:index])
    return first, first + len(groups[index])


def _name_groups(axes: Axes, groups: Sequence[np.ndarray], widths: Sequence[int]) -> None:
    """Write "rows x width" to the right of each group."""
    for index, width in enumerate(widths):
        first, end = _span(groups, index)
        label = f"{end - first} x {width}"
        axes.text(width + 0.01 * max(widths), (first + end - 1) / 2 + index, label, va="center")
