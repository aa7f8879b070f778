"""Tables, a picture, and the facts for machines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, never a window

import torch
from matplotlib import pyplot as plt
from rich.table import Column, Table

from .methods import DEFAULT, GREEDY, RECTANGLE, ROLL, span
from .packing import LEAKS
from .timing import Result
from .workload import Workload

OURS, OTHERS, LIMIT, INK = "#0072B2", "#BBBBBB", "#E69F00", "#333333"


def conditions(model: Any, repeats: int) -> str:
    """What the seconds depend on."""
    weight = next(model.parameters())
    size = sum(each.numel() for each in model.parameters()) / 1e6
    where = torch.cuda.get_device_name() if weight.is_cuda else f"{torch.get_num_threads()} CPU threads"
    load = f" at load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{type(model).__name__}, {size:.1f} million weights, {str(weight.dtype).removeprefix('torch.')}, "
        f"torch {torch.__version__}, {where}{load}; medians of {repeats} turns"
    )


def facts(results: Sequence[Result], workload: Workload, clock: str) -> list[dict[str, Any]]:
    """One mapping for each method that was run."""
    by_name = {result.name: result for result in results}
    return [
        {
            "method": result.name,
            "seconds": result.seconds("wall"),
            "cpu_seconds": result.seconds("cpu"),
            "turns": list(result.wall.values()),
            "preparing_seconds": min(result.preparing, default=float("nan")),
            "slots": result.slots,
            "real_share": workload.real_tokens / result.slots if result.slots else float("nan"),
            "micro_batches": result.count,
            "memory_bytes": result.memory,
            "gradient_difference": result.gradient_difference,
            "speed": result.speed_against(by_name[RECTANGLE], clock),
            "launch_costs": list(result.launch_costs),
            "failure": result.failure,
        }
        for result in results
        if result.wall or result.failure
    ]


def table(rows: Sequence[dict[str, Any]], clock: str, title: str, leak: float) -> Table:
    """One line for each method."""
    drawn = Table(Column("method", no_wrap=True), title=title, title_justify="left", title_style="bold")
    speed = "speed" if clock == "wall" else "speed\n(CPU)"
    for column in (
        "s",
        "CPU s",
        "slots",
        "real/\nslots",
        "micro-\nbatches",
        "memory\nMB",
        "gradient\ndiff.",
        speed,
    ):
        drawn.add_column(column, justify="right")
    for row in rows:
        if row["failure"]:
            drawn.add_row(f"{label(row)}: {row['failure']}")
            continue
        gap = row["gradient_difference"]
        drawn.add_row(
            label(row),
            f"{row['seconds']:.2f}",
            f"{row['cpu_seconds']:.3f}",
            f"{row['slots']:,}",
            f"{min(1, row['real_share']):.2f}",
            str(row["micro_batches"]),
            f"{row['memory_bytes'] / 1e6:,.0f}",
            "" if gap is None else f"{gap:.0e}",
            f"{row['speed']:.2f}",
        )
    if leak > LEAKS:
        drawn.add_row(f"packed: leaks {leak:.1g}")
    return drawn


def label(row: dict[str, Any]) -> str:
    """A method's name; our default plan with the launch costs that make it."""
    if row["method"] != DEFAULT:
        return str(row["method"])
    return f"{DEFAULT}, launch cost {span(row['launch_costs'])} (default)"


def verdict(rows: Sequence[dict[str, Any]], results: Sequence[Result], clock: str) -> str:
    """What the table says about our plan."""
    by_name = {result.name: result for result in results}
    ours, row = by_name[DEFAULT], next(row for row in rows if row["method"] == DEFAULT)
    plans = [result for result in results if result.launch_costs]
    fastest = max(plans, key=lambda result: result.speed_against(by_name[RECTANGLE], clock))
    share = row["preparing_seconds"] / row["seconds"]
    words = (
        f"Our plan runs at {ours.speed_against(by_name[GREEDY], clock):.2f} times the speed of the greedy budget, "
        f"{ours.speed_against(by_name[ROLL], clock):.2f} times that of roll + trim, "
        f"{row['speed']:.2f} times that of the perfect rectangle. "
        f"Preparing it takes {1e3 * row['preparing_seconds']:.1f} ms, {share:.1%} of the update."
    )
    if len(plans) > 1:
        slower = fastest.speed_against(ours, clock)
        words += f" Fastest of the sweep: launch cost {span(fastest.launch_costs)}; "
        words += f"the default takes {slower:.2f} times its seconds."
    return words


def draw(blocks: Sequence[tuple[str, Sequence[dict[str, Any]]]], clock: str, path: Path) -> None:
    """Speed against the perfect rectangle, a panel for each table."""
    plt.rcParams.update({"font.size": 9, "text.color": INK, "axes.labelcolor": INK})
    tallest = max(len(rows) for _, rows in blocks)
    size = (6.5 * len(blocks), 0.32 * tallest + 1.4)
    figure, panels = plt.subplots(1, len(blocks), figsize=size, layout="constrained", squeeze=False)
    for axes, (title, rows) in zip(panels[0], blocks, strict=True):
        shown = [row for row in rows if not row["failure"]]
        names = [label(row) for row in shown]
        colours = [OURS if row["launch_costs"] else LIMIT if row["method"] == RECTANGLE else OTHERS for row in shown]
        key, unit = ("seconds", "s") if clock == "wall" else ("cpu_seconds", "CPU s")
        bars = axes.barh(range(len(shown)), [row["speed"] for row in shown], color=colours)
        axes.bar_label(bars, [f"{row['speed']:.2f}  ({row[key]:.2f} {unit})" for row in shown], padding=3, fontsize=8)
        axes.set_yticks(range(len(shown)), names)
        axes.set_ylim(len(shown) - 0.4, -0.6)  # the first on top
        axes.set(xlabel="speed against the perfect rectangle", xlim=(0, 1.5 * max(row["speed"] for row in shown)))
        axes.set_title(title, fontsize=9, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
