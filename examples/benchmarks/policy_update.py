"""How long a policy update takes, by how its rows are put into micro-batches.

    python examples/benchmarks/policy_update.py                     # Qwen2 and LFM2, 32 rows: minutes on two cores
    python examples/benchmarks/policy_update.py --model qwen2 --rows 128 --scale 8 --budget 4096 --sweep
    python examples/benchmarks/policy_update.py --full              # all models, 32 and 128 rows: an hour

An update is a pass of a reference model without gradients, then forward and backward of the policy, over one optimizer
batch with the lengths of a reinforcement-learning run (divided by `--scale`). Models have random weights. All methods
run in one process and take turns; "speed" is that against the perfect rectangle, as many tokens in rows of one length,
compared turn by turn. Gradients of all methods are compared with those of the padded batch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _speed import models, packing, report, timing, workload
from _speed.methods import DEFAULT, GREEDY, RECTANGLE, ROLL, methods
from _speed.update import reference_of
from rich.console import Console
from transformers.utils import logging as transformers_logging

SWEEP = (8, 16, 32, 64, 128, 256, 512)
COMPARED = (DEFAULT, GREEDY, ROLL, RECTANGLE)  # which the last sentences are about
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Block:
    """One table: a model and a batch."""

    model: str
    rows: int
    scale: int
    budget: int


FULL = [
    *(Block(name, 32, 16, 2048) for name in ("qwen2", "lfm2", "bamba", "qwen3-next")),
    *(Block(name, 128, 8, 4096) for name in ("qwen2", "lfm2", "bamba", "qwen3-next")),
    Block("smollm2", 32, 16, 2048),
]


def parse(arguments: Sequence[str] | None, **defaults: Any) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["qwen2", "lfm2"], choices=models.NAMES)
    parser.add_argument("--full", action="store_true", help="all models, and 128 rows; long")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--scale", type=int, help="lengths are divided by this (rl: 16, else 1)")
    parser.add_argument("--budget", type=int, default=2048, help="most slots of a micro-batch")
    parser.add_argument("--micro-rows", type=int, default=4, help="rows of a micro-batch where no budget is used")
    parser.add_argument("--launch-cost", type=int, default=128, help="what a micro-batch costs, in slots")
    parser.add_argument(
        "--sweep", action="store_true", help=f"also plan for launch costs of {', '.join(map(str, SWEEP))}"
    )
    parser.add_argument("--lengths", default="rl", help="rl, gsm8k, or a CSV file of prompt and completion tokens")
    parser.add_argument("--longest", type=int, nargs=2, metavar=("PROMPT", "COMPLETION"), help="configured maximum")
    parser.add_argument("--seed", type=int, default=3, help="which rows are drawn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow-repeats", type=int, default=1, help="of padded batches and dense packing")
    parser.add_argument("--skip", nargs="+", default=[], help="leave out methods whose names begin so")
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu where other programs run too")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw speeds into this file")
    parser.set_defaults(**defaults)
    options = parser.parse_args(arguments)
    options.scale = options.scale or (16 if options.lengths == "rl" else 1)
    return options


def blocks_of(options: argparse.Namespace) -> list[Block]:
    """The tables that are asked for."""
    if options.full:
        return FULL
    return [Block(name, options.rows, options.scale, options.budget) for name in options.model]


def run(block: Block, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Times one block and prints its table."""
    model = models.build(block.model, options.hidden, options.layers, options.vocabulary)
    load = make_workload(block, options, model.config.vocab_size)
    leak = packing.leak(model, load.vocabulary)
    model = model.to(options.device, getattr(torch, options.dtype))
    rows = methods(load, model, leak, options.launch_cost, SWEEP if options.sweep else ())
    rows = [row for row in rows if row.name in COMPARED or not row.name.startswith(tuple(options.skip))]
    results = timing.measure(rows, model, reference_of(model), options.repeats, options.slow_repeats)
    facts = report.facts(results, load, options.clock)
    title = f"{block.model}, {block.rows} rows of {Path(options.lengths).stem} / {block.scale}, budget {block.budget:,}"
    console.print(report.table(facts, options.clock, title, leak))
    said = f"{load.real_tokens:,} real tokens. " + report.verdict(facts, results, options.clock)
    conditions = report.conditions(model, options.repeats)
    console.print(f"{said}\n{conditions}\n", highlight=False, soft_wrap=True)
    worst = max(row["gradient_difference"] or 0.0 for row in facts)
    return {
        "title": title,
        "conditions": conditions,
        "real_tokens": load.real_tokens,
        "leak": leak,
        "largest_gradient_difference": worst,
        "is_exact": worst <= TOLERANCE[getattr(torch, options.dtype)],
        "methods": facts,
    }


def make_workload(block: Block, options: argparse.Namespace, vocabulary: int) -> workload.Workload:
    """The batch of a block."""
    table = workload.read_lengths(workload.FILES.get(options.lengths, options.lengths))
    longest = options.longest or workload.CONFIGURED.get(options.lengths) or table.max(axis=0).tolist()
    lengths = workload.draw(table, block.rows, block.scale, options.seed)
    configured = tuple(max(1, length // block.scale) for length in longest)
    return workload.Workload(lengths, configured, options.micro_rows, block.budget, vocabulary, options.device)


def execute(options: argparse.Namespace) -> int:
    """All blocks; 0 if every gradient is that of the padded batch, else 1."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)
    console, done = Console(width=max(120, Console().width)), []  # in a log file too
    for block in blocks_of(options):
        done.append(run(block, options, console))
        if options.json:  # after each, so that a long run that is broken off leaves something
            options.json.write_text(json.dumps(done, indent=1))
    if options.plot:
        report.draw([(block["title"], block["methods"]) for block in done], options.clock, options.plot)
    wrong = [block for block in done if not block["is_exact"]]
    for block in wrong:
        print(f"{block['title']}: gradients differ by {block['largest_gradient_difference']:.1e}", file=sys.stderr)
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 0, or 1 if gradients differ."""
    return execute(parse(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
