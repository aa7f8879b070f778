"""How long a training step takes in Lightning, TRL and Accelerate, stock and with this library, and what we cost.

    python examples/benchmarks/frameworks.py [--repeats 5] [--frameworks lightning trl accelerate]
    python examples/benchmarks/frameworks.py --control      # wrong weights: has to end with 1

Stock and ours have the same weights and rows, and take turns of `--steps` optimizer steps each; the first turn is not
timed. Gradients of every optimizer step are compared. "Overhead" is what the library's own functions take, as a share
of its step; forward and backward passes and calls of the framework, of which there are more, are not in it. The
first-batch check, once in a fit, is told apart. Memory: against stock batches of our largest micro-batch's shape.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _frameworks import memory, report
from _frameworks.parts import wrong_weights
from _frameworks.runs import Setting
from _frameworks.turns import RUNS, measure
from _speed import workload
from _speed.report import conditions
from rich.console import Console
from transformers.utils import logging as transformers_logging

BOUND = 1e-4


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frameworks", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--repeats", type=int, default=5, help="timed turns")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of a turn")
    parser.add_argument("--rows", type=int, default=32, help="rows of an optimizer step")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of an optimizer step (TRL, Accelerate)")
    parser.add_argument("--lengths", default="rl", help="rl, gsm8k, or a CSV file of prompt and completion tokens")
    parser.add_argument("--scale", type=int, default=8, help="lengths are divided by this")
    parser.add_argument("--seed", type=int, default=0, help="which rows are drawn")
    parser.add_argument("--budget", type=int, default=2048, help="most slots of a micro-batch")
    parser.add_argument("--launch-cost", type=int, default=128, help="what a micro-batch costs, in slots")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu where other programs run too")
    parser.add_argument("--control", action="store_true", help="weights are wrong on purpose; ends with 1 if noticed")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args(arguments)
    if options.rows % options.accumulate or options.rows < 2 * options.accumulate:
        parser.error(f"--rows {options.rows} must be a multiple of --accumulate {options.accumulate}, and twice it")
    if options.repeats < 1 or options.steps < 1:
        parser.error("--repeats and --steps must be at least 1")
    return options


def setting_of(options: argparse.Namespace) -> Setting:
    """Rows and sizes."""
    table = workload.read_lengths(workload.FILES.get(options.lengths, options.lengths))
    drawn = workload.draw(table, options.steps * options.rows, options.scale, options.seed)
    return Setting(
        lengths=drawn.reshape(options.steps, options.rows, 2),
        hidden=options.hidden,
        layers=options.layers,
        accumulate=options.accumulate,
        budget=options.budget,
        launch_cost=options.launch_cost,
        is_control=options.control,
    )


def judge(found: Sequence[dict[str, Any]], is_control: bool) -> int:
    """0 if all gradients are those of stock; of a control, 1 if none is, and 2 if some went unnoticed."""
    same = [each["framework"] for each in found if each["largest_gradient_difference"] <= BOUND]
    differ = [each["framework"] for each in found if each["framework"] not in same]
    if is_control and same:
        print(f"wrong weights were not noticed: {', '.join(same)}", file=sys.stderr)
        return 2
    if differ:
        print(f"gradients differ: {', '.join(differ)}", file=sys.stderr)
    return 1 if differ else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 0, or 1 if gradients differ."""
    options = parse(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    assert memory.notices(), "peaks cannot be measured with this version of torch"
    setting, console = setting_of(options), Console(width=max(120, Console().width))
    found = []
    with wrong_weights() if options.control else nullcontext():
        for name in options.frameworks:
            found.append(measure(name, setting, options.repeats, options.clock))
    rows = (
        f"{conditions(setting.model(), options.repeats)}; {options.rows} rows of {Path(options.lengths).stem} / "
        f"{options.scale} a step, {options.accumulate} batches (Lightning: 1), {options.steps} steps a turn, budget "
        f"{options.budget:,}, {options.clock} clock"
    )
    console.print(report.steps(found, options.clock))
    console.print(report.parts(found))
    console.print(f"{report.words(found, BOUND)}\n{rows}", highlight=False, soft_wrap=True)
    if options.json:
        worst = max(each["largest_gradient_difference"] for each in found)
        facts = {"conditions": rows, "bound": BOUND, "is_exact": worst <= BOUND, "frameworks": found}
        facts |= {"largest_gradient_difference": worst, "torch": torch.__version__}
        options.json.write_text(json.dumps(facts, indent=1))
    return judge(found, options.control)


if __name__ == "__main__":
    raise SystemExit(main())
