"""What our planner takes and what it gives, beside other planners; no model is run.

    python examples/benchmarks/planner.py [--rows 32 128] [--json FILE]

Four tables: milliseconds by number of rows; cost (slots + launch cost x micro-batches) of each planner on several
kinds of lengths, as times that of ours; what a bound on shapes costs (`shape_buckets`); and what planning the rows of
an accumulation window together saves. Exit code 1 if any planner is cheaper than ours, or if ours is not the cheapest
of all partitions of a few rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _speed import partitions
from _speed.workload import EXAMPLES, FILES, Ints, read_lengths
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from lightning_padmin import plan_micro_batches
from lightning_padmin.planning.plan import Plan
from lightning_padmin.planning.planner import plan_quietly
from lightning_padmin.planning.search import Limits
from lightning_padmin.planning.shape_buckets import choose_shapes
from lightning_padmin.planning.spec import PlanSpec

GSM8K = EXAMPLES.parent / "tests" / "diagnose" / "gsm8k_lengths.csv"
RIVALS = ("roll + trim", "greedy", "balanced", "first fit", "strided")


def workloads() -> dict[str, tuple[Ints, int]]:
    """Lengths to draw from, and a budget that goes with them."""
    source = np.random.default_rng(0)
    short, long = source.integers(40, 200, 3500), source.integers(1500, 2500, 500)
    found = {
        "RL": (read_lengths(FILES["rl"]).sum(axis=1), 16_384),
        "GSM8K, sample": (read_lengths(FILES["gsm8k"]).sum(axis=1), 16_384),
        "uniform": (source.integers(1, 2049, 4000), 8192),
        "bimodal": (np.concatenate([short, long]), 8192),
        "all alike": (np.full(4000, 300), 4096),
    }
    if GSM8K.is_file():
        found["GSM8K"] = (read_lengths(GSM8K).sum(axis=1), 16_384)
    return found


def planning_times(sizes: Sequence[int], repeats: int, launch_cost: int) -> list[dict[str, Any]]:
    """Medians in milliseconds, by number of rows; CPU time is what counts where other programs run too."""
    rows = []
    for name in ("RL", "uniform"):
        lengths, budget = workloads()[name]
        for size in sizes:
            drawn = np.random.default_rng(size).choice(lengths, size)
            wall, cpu = [], []
            for _ in range(repeats + 1):
                start, start_cpu = time.perf_counter(), time.process_time()
                plan = plan_micro_batches(drawn, max(budget, int(drawn.max())), launch_cost=launch_cost)
                wall.append(1e3 * (time.perf_counter() - start))
                cpu.append(1e3 * (time.process_time() - start_cpu))
            found = {"milliseconds": statistics.median(wall[1:]), "cpu_milliseconds": statistics.median(cpu[1:])}
            rows.append({"lengths": name, "rows": size, "micro_batches": len(plan), **found})
    return rows


def compare(rows: int, draws: int, launch_cost: int) -> list[dict[str, Any]]:
    """Cost of each planner over some draws, as times ours; and the worst single draw."""
    table = []
    found = workloads()
    for name in track(found, "planning", console=Console(stderr=True), transient=True):
        lengths, budget = found[name]
        ratios: dict[str, list[float]] = {rival: [] for rival in RIVALS}
        waste, launches = [], []
        for draw in range(draws):
            drawn = np.random.default_rng(draw).choice(lengths, rows)
            ours = plan_micro_batches(drawn, budget, launch_cost=launch_cost)
            waste.append(ours.waste)
            launches.append(len(ours))
            for rival, groups in rivals(drawn, budget).items():
                assert partitions.fits(groups, drawn, budget), (name, rival)
                assert sorted(row for group in groups for row in group) == list(range(rows)), (name, rival)
                ratios[rival].append(partitions.cost(groups, drawn, launch_cost) / ours.cost)
        table.append(
            {
                "lengths": name,
                "rows": rows,
                "budget": budget,
                "waste": statistics.fmean(waste),
                "micro_batches": statistics.fmean(launches),
                "times_ours": {rival: statistics.fmean(values) for rival, values in ratios.items()},
                "least": min(min(values) for values in ratios.values()),
            }
        )
    return table


def rivals(lengths: Ints, budget: int) -> dict[str, partitions.Groups]:
    """What the other planners make of it."""
    greedy = plan_micro_batches(lengths, budget, method="greedy")
    return {
        "roll + trim": partitions.in_order(lengths, budget),
        "greedy": [group.tolist() for group in greedy.groups],
        "balanced": partitions.balanced(lengths, budget),
        "first fit": partitions.first_fit(lengths, budget),
        "strided": partitions.strided(lengths, budget),
    }


def against_all_partitions(draws: int, rows: int = 7) -> int:
    """How many small batches our plan does not have the least cost of; 0 is right."""
    source, wrong = np.random.default_rng(0), 0
    for _ in range(draws):
        lengths = source.integers(1, 40, int(source.integers(1, rows + 1)))
        budget, launch_cost = int(source.integers(lengths.max(), 160)), int(source.integers(0, 60))
        ours = plan_micro_batches(lengths, budget, launch_cost=launch_cost).cost
        wrong += ours != partitions.exhaustive(lengths, budget, launch_cost)
    return wrong


def bounded(bounds: Sequence[int], rows: int, draws: int, launch_cost: int) -> list[dict[str, Any]]:
    """Cost of plans with a bound on shapes (rows x width), chosen on one batch, as times that of free plans."""
    table = []
    for name in ("RL", "GSM8K, sample", "uniform"):
        lengths, budget = workloads()[name]
        batches = [np.random.default_rng(draw).choice(lengths, rows) for draw in range(draws + 1)]
        free = [plan_micro_batches(batch, budget, launch_cost=launch_cost, pad_to_multiple_of=8) for batch in batches]
        found = {"lengths": name, "rows": rows, "free_shapes": len(_shapes(free[1:])), "bounds": {}}
        for bound in bounds:
            shapes = choose_shapes(batches[0], bound, Limits(budget, budget, launch_cost), multiple=8)
            plans = [
                plan_quietly(
                    batch,
                    PlanSpec(token_budget=budget, pad_to_multiple_of=8, launch_cost=launch_cost),
                    shapes=shapes,
                )
                for batch in batches[1:]
            ]
            ratio = sum(plan.cost for plan in plans) / sum(plan.cost for plan in free[1:])
            found["bounds"][bound] = {"cost": ratio, "shapes": len(_shapes(plans))}
        table.append(found)
    return table


def _shapes(plans: Sequence[Plan]) -> set[tuple[int, int]]:
    return {(len(rows), int(w[0])) for plan in plans for rows, w in zip(plan.groups, plan.widths, strict=True)}


def show_bounded(table: Sequence[dict[str, Any]], console: Console) -> None:
    """The third table."""
    drawn = Table(Column("lengths", no_wrap=True), title="Cost with bounded shapes, as times that of free ones")
    drawn.add_column("rows", justify="right")
    drawn.add_column("shapes if free", justify="right")
    for bound in table[0]["bounds"]:
        drawn.add_column(f"at most {bound}", justify="right")
    for row in table:
        cells = (f"{each['cost']:.2f} ({each['shapes']} used)" for each in row["bounds"].values())
        drawn.add_row(row["lengths"], str(row["rows"]), f"{row['free_shapes']:,}", *cells)
    console.print(drawn)


def windows(draws: int, launch_cost: int, batches: int = 8, rows: int = 4) -> list[dict[str, Any]]:
    """Cost of accumulation windows as times their real tokens: as they come, planned one by one, planned together."""
    table = []
    for name in ("RL", "GSM8K, sample", "uniform"):
        lengths, budget = workloads()[name]
        trimmed = alone = together = real = 0
        for draw in range(draws):
            drawn = np.random.default_rng(draw).choice(lengths, batches * rows)
            parts = drawn.reshape(batches, rows)
            real += int(drawn.sum())
            trimmed += sum(rows * int(part.max()) + launch_cost for part in parts)
            alone += sum(plan_micro_batches(part, budget, launch_cost=launch_cost).cost for part in parts)
            together += plan_micro_batches(drawn, budget, launch_cost=launch_cost, min_micro_batches=batches).cost
        costs = {"roll + trim": trimmed, "one by one": alone, "together": together}
        table.append({"lengths": name, "window": f"{batches} x {rows}", **{k: v / real for k, v in costs.items()}})
    return table


def show_windows(table: Sequence[dict[str, Any]], console: Console) -> None:
    """The fourth table."""
    drawn = Table(Column("lengths", no_wrap=True), title="Cost of accumulation windows, as times their real tokens")
    for column in ("window", "roll + trim", "one by one", "together"):
        drawn.add_column(column, justify="right")
    for row in table:
        drawn.add_row(
            row["lengths"], row["window"], *(f"{row[k]:.2f}" for k in ("roll + trim", "one by one", "together"))
        )
    console.print(drawn)


def show(times: Sequence[dict[str, Any]], costs: Sequence[dict[str, Any]], console: Console) -> None:
    """Both tables."""
    drawn = Table("lengths", title="Planning time")
    for column in ("rows", "ms", "CPU ms", "micro-batches"):
        drawn.add_column(column, justify="right")
    for row in times:
        spent = (f"{row['milliseconds']:.1f}", f"{row['cpu_milliseconds']:.1f}")
        drawn.add_row(row["lengths"], f"{row['rows']:,}", *spent, f"{row['micro_batches']:,}")
    console.print(drawn)
    drawn = Table(Column("lengths", no_wrap=True), title="Cost as times ours")
    for column in ("rows", "budget", "our waste", "micro-\nbatches", *RIVALS):
        drawn.add_column(column, justify="right")
    for row in costs:
        others = (f"{row['times_ours'][rival]:.2f}" for rival in RIVALS)
        ours = (f"{row['budget']:,}", f"{row['waste']:.1%}", f"{row['micro_batches']:.1f}")
        drawn.add_row(row["lengths"], str(row["rows"]), *ours, *others)
    console.print(drawn)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[32, 128], help="rows of a batch where costs are compared"
    )
    parser.add_argument("--draws", type=int, default=10, help="batches of each kind")
    parser.add_argument("--small", type=int, default=200, help="small batches compared with all partitions")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 128, 512, 4096, 16_384, 65_536])
    parser.add_argument("--bounds", type=int, nargs="+", default=[8, 16, 32, 64], help="most shapes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--launch-cost", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 0, or 1 where our plan is not the cheapest."""
    options = parse(arguments)
    times = planning_times(options.sizes, options.repeats, options.launch_cost)
    costs = [row for rows in options.rows for row in compare(rows, options.draws, options.launch_cost)]
    wrong = against_all_partitions(options.small)
    console = Console(width=max(120, Console().width))
    show(times, costs, console)
    limited = bounded(options.bounds, max(options.rows), options.draws, options.launch_cost)
    show_bounded(limited, console)
    pooled = windows(options.draws, options.launch_cost)
    show_windows(pooled, console)
    print(f"launch cost {options.launch_cost}, means of {options.draws} batches")
    print(f"{options.small - wrong} of {options.small} small batches: the least cost of all partitions")
    if options.json:
        facts = {
            "times": times,
            "costs": costs,
            "bounded": limited,
            "windows": pooled,
            "small": options.small,
            "small_wrong": wrong,
        }
        options.json.write_text(json.dumps(facts, indent=1))
    beaten = [f"{row['lengths']}, {row['rows']} rows" for row in costs if row["least"] < 1]
    if beaten:
        print(f"another planner is cheaper on: {'; '.join(beaten)}", file=sys.stderr)
    return 1 if beaten or wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
