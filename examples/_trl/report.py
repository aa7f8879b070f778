"""What the examples say at their end: tables, a picture, and a sentence."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, never a window

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.table import Table

from .probe import Record, steps_alike, worst_difference

STOCK, OURS, INK = "#E69F00", "#0072B2", "#333333"  # orange and blue: apart for every kind of colour vision
BOUND = 1e-4  # of what is logged, in float32 and after many steps


def conditions() -> str:
    """What seconds depend on."""
    load = f" at load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    threads = torch.get_num_threads()
    return f"float32, torch {torch.__version__}, {threads} thread{'s' if threads > 1 else ''}{load}"


def table(records: Sequence[Record]) -> Table:
    """One line per run."""
    drawn = Table("run")
    seconds = ("policy update\nseconds", "policy update\nCPU seconds", "seconds\nin all")
    for column in ("slots", "real", *seconds, "reward\nfirst", "reward\nlast"):
        drawn.add_column(column, justify="right")
    for record in records:
        first, last = ends(record.values("reward"))
        drawn.add_row(
            record.name,
            f"{record.slots:,}",
            f"{record.real_tokens / record.slots:.1%}",
            *(f"{seconds:.2f}" for seconds in record.typical()),
            f"{record.seconds:.0f}",
            f"{first:.3f}",
            f"{last:.3f}",
        )
    return drawn


def costs_table(records: Sequence[Record]) -> Table:
    """One line per run of a trainer that generates nothing."""
    drawn = Table("run")
    for column in ("slots", "real", "seconds\nper step", "CPU seconds\nper step"):
        drawn.add_column(column, justify="right")
    for record in records:
        share, seconds = f"{record.real_tokens / record.slots:.1%}", record.typical()
        drawn.add_row(record.name, f"{record.slots:,}", share, *(f"{each:.2f}" for each in seconds))
    return drawn


def losses_table(stock: Record, ours: Record) -> Table:
    """One line per step."""
    drawn = Table("step")
    for column in (f"loss, {stock.name}", f"loss, {ours.name}", "difference"):
        drawn.add_column(column, justify="right")
    for step, (theirs, mine) in enumerate(zip(stock.values("loss"), ours.values("loss"), strict=True), start=1):
        drawn.add_row(str(step), f"{theirs:.6f}", f"{mine:.6f}", f"{abs(mine - theirs):.1e}")
    return drawn


def pace(stock: Record, ours: Record) -> str:
    """How many times as fast a step is, by the clock and in CPU seconds."""
    clock, cpu = (before / after for before, after in zip(stock.typical(), ours.typical(), strict=True))
    return f"{clock:.2f} times as fast by the clock, {cpu:.2f} in CPU seconds"


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last quarter: single steps have few problems, so they scatter."""
    quarter = max(1, len(values) // 4)
    return statistics.fmean(values[:quarter]), statistics.fmean(values[-quarter:])


def differences(ours: Record, stock: Record) -> dict[str, float]:
    """Worst differences over the steps with the same completions; empty if there are none.

    The loss says little here: with ratios of 1 and without KL its value does not depend on the model. Gradients do.
    """
    alike = steps_alike(ours, stock)
    if not alike:
        return {}
    return {
        name: worst_difference(ours.values(name)[:alike], stock.values(name)[:alike])
        for name in ("loss", "entropy", "grad_norm")
    }


def verdict(ours: Record, stock: Record) -> str:
    """How long the runs were the same, and how they differ in cost."""
    alike, steps, found = steps_alike(ours, stock), len(stock.completions), differences(ours, stock)
    if not found:
        return "NOT the same training: the very first completions differ, before anything was trained."
    where = f"in all {steps} steps" if alike == steps else f"in steps 1 to {alike} of {steps}"
    words = f"The same completions {where}; largest differences there: loss {found['loss']:.1e}, "
    words += f"entropy {found['entropy']:.1e}, gradient norm {found['grad_norm']:.1e}. "
    if max(found.values()) > BOUND:
        words = "NOT the same training. " + words
    if alike < steps:
        words += (
            f"In step {alike + 1} another token was drawn: sampling compares random numbers with probabilities, and "
            "those differ by rounding. From there on the two are different samples of the same training. "
        )
    return words + f"{1 - ours.slots / stock.slots:.0%} fewer slots, policy updates {pace(stock, ours)}."


def draw_rewards(stock: Record, ours: Record, title: str, path: Path) -> None:
    """The reward by step, and by CPU seconds spent in policy updates."""
    plt.rcParams.update(
        {"font.size": 9, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
    for record, style in (
        (stock, {"color": STOCK, "linewidth": 5, "alpha": 0.55, "label": "stock GRPOTrainer"}),
        (ours, {"color": OURS, "linewidth": 1.8, "marker": "o", "markersize": 3.5, "label": "with PadMinMixin"}),
    ):
        rewards = record.values("reward")
        left.plot(range(1, len(rewards) + 1), rewards, **style)
        right.plot(list(accumulate(seconds.cpu for seconds in record.steps)), rewards, **style)
    alike = steps_alike(ours, stock)
    if 0 < alike < len(stock.completions):
        _mark(left, alike)
    left.set(xlabel="optimizer step", ylabel="mean reward")
    right.set(xlabel="CPU seconds spent in policy updates")
    right.set_xlim(left=0)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.tick_params(axis="y", labelleft=True)
    left.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def _mark(axes: Axes, alike: int) -> None:
    """Where sampling began to draw other tokens."""
    axes.axvline(alike + 0.5, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate("another token\nis drawn", (alike + 0.7, 0.02), xycoords=("data", "axes fraction"), fontsize=8)
