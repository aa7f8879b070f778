"""Fine-tune SmolLM2-135M twice, with and without `PadMinCallback`, and compare cost and gradients.

    python examples/quickstart.py
    python examples/quickstart.py --data FILE.jsonl --prompt-field question --completion-field answer

Both runs start from the same weights and see the same batches in the same order, right-padded to the longest
row as usual. The callback is the only difference. The runs take turns, one step each, so that a machine that
becomes slower or faster meanwhile does so for both. In a script of your own it is simply

    trainer = L.Trainer(..., callbacks=[PadMinCallback(token_budget=2048)])
    trainer.fit(module, dataloader)
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from _quickstart import data, model, report
from _quickstart.arguments import BadInput, OneLineParser, at_least, layers
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_padmin import PadMinCallback


class FineTune(L.LightningModule):
    """An ordinary causal language model under automatic optimization. It knows nothing of the callback."""

    def __init__(self, language_model: torch.nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.language_model = language_model
        self.optimizer = torch.optim.AdamW(language_model.parameters(), lr=learning_rate)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss over all labelled tokens, which the callback calls `token-mean`."""
        loss = self.language_model(**batch, use_cache=False).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The same optimizer at every turn."""
        return self.optimizer


class Probe(L.Callback):
    """Notes what one run costs, and its first gradient."""

    def __init__(self) -> None:
        self.real_tokens = self.slots = 0
        self.step_seconds: list[float] = []
        self.losses: list[float] = []
        self.first_gradient: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the batch as it came, and start the clock."""
        self.real_tokens += int(batch["attention_mask"].sum())
        self.slots += batch["attention_mask"].numel()
        self._started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        """Keep a copy of the first gradient that an optimizer step sees."""
        if not self.first_gradient:
            self.first_gradient = {
                name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None
            }

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *rest: Any) -> None:
        """Stop the clock and keep the loss."""
        self.step_seconds.append(time.perf_counter() - self._started)
        self.losses.append(float(trainer.callback_metrics["loss"]))


class Run:
    """One of the two trainings; it can be taken a few steps at a time."""

    def __init__(self, name: str, module: FineTune, padmin: PadMinCallback | None = None) -> None:
        self.name, self.module, self.padmin, self.probe = name, module, padmin, Probe()

    def train(self, loader: DataLoader, seed: int) -> None:
        """One step for each batch."""
        L.seed_everything(seed, verbose=False)
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            callbacks=[self.probe] + ([self.padmin] if self.padmin else []),
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(self.module, loader)

    def result(self, other: Run | None = None) -> report.Result:
        """What the run cost; the first step was a warm-up and is not in the seconds."""
        probe = self.probe
        stats = self.padmin.stats if self.padmin else None
        return report.Result(
            name=self.name,
            real_tokens=stats.real_tokens if stats else probe.real_tokens,
            slots=stats.slots if stats else probe.slots,
            micro_batches=stats.micro_batches if stats else len(probe.losses),
            seconds=sum(probe.step_seconds[1:]),
            final_loss=probe.losses[-1],
            gradient_difference=other and relative_difference(probe.first_gradient, other.probe.first_gradient),
        )


def relative_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """max|difference| / max|gradient| over all parameters."""
    if ours.keys() != theirs.keys():
        return float("inf")
    difference = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    return difference / max(float(gradient.abs().max()) for gradient in theirs.values())


def train_in_turns(runs: Sequence[Run], batches: Sequence[Sequence[data.Row]], pad_token_id: int, seed: int) -> None:
    """Take both runs through the same batches, one step each in turn, behind a progress bar."""
    bar = (
        TextColumn("{task.description:6}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    terminal = sys.stdout.isatty()
    with Progress(*bar, disable=not terminal, transient=True) as progress:
        task = progress.add_task("", total=len(batches) * len(runs))
        for step, rows in enumerate(batches, start=1):
            loader = DataLoader(rows, batch_size=len(rows), collate_fn=data.right_pad(pad_token_id))
            for run in runs:
                progress.update(task, description=run.name)
                run.train(loader, seed)
                progress.advance(task)
                if not terminal:  # a log file shows no bar, but should show that something happens
                    print(f"step {step} of {len(batches)}: {run.name}", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Raises `BadInput`."""
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])

    def option(name: str, kind: Callable[[str], Any], default: Any, help: str) -> None:
        parser.add_argument(name, type=kind, default=default, help=help + ("" if default is None else " (%(default)s)"))

    option("--model", str, None, "folder or hub id of another causal model (SmolLM2-135M, without network)")
    option("--layers", layers, 8, "how many of its first layers to use, or 'all'")
    option("--data", Path, None, "JSON-lines file (arithmetic problems, written on the spot)")
    option("--prompt-field", str, "prompt", "field of --data with the prompt")
    option("--completion-field", str, "completion", "field of --data with the completion")
    option("--steps", at_least(2), 4, "optimizer steps; the first is a warm-up and not timed")
    option("--batch-size", at_least(1), 16, "rows in a batch")
    option("--token-budget", at_least(1), 2048, "most slots in one micro-batch")
    option("--learning-rate", float, 1e-4, "of AdamW")
    option("--seed", at_least(0), 0, "decides the rows and their order")
    option("--threads", at_least(1), None, "CPU threads (what torch takes by itself)")
    option("--out", Path, Path("runs/quickstart"), "folder for the picture")
    return parser.parse_args(arguments)


def quieten_lightning() -> None:
    """Two trainers per step would each say what hardware they found, and suggest more loader workers."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.(pytorch|fabric)")


def compare(options: argparse.Namespace, console: Console) -> bool:
    """Run both trainings and report. True if the gradients are the same."""
    _make_folder(options.out)
    count = options.steps * options.batch_size
    pairs = None
    if options.data:
        pairs = data.read_pairs(options.data, options.prompt_field, options.completion_field)
        pairs = data.draw(pairs, count, options.seed)
    language_model, tokenizer = model.load(options.model, options.layers)
    rows = data.make_rows(pairs or data.written_pairs(tokenizer, count, options.seed), tokenizer)
    batches = [rows[first : first + options.batch_size] for first in range(0, count, options.batch_size)]

    # Every step is a fit of its own here, whose first batch would be audited, as few batches of a training are.
    padmin = PadMinCallback(token_budget=options.token_budget, check="first-batch")
    runs = (
        Run("plain", FineTune(copy.deepcopy(language_model), options.learning_rate)),
        Run("padmin", FineTune(language_model, options.learning_rate), padmin),
    )
    train_in_turns(runs, batches, tokenizer.pad_token_id, options.seed)

    plain, split = runs[0].result(), runs[1].result(other=runs[0])
    picture = options.out / "lengths.png"
    lengths = [[len(row["input_ids"]) for row in batch] for batch in batches]
    report.draw_batch(report.typical(lengths), options.token_budget, picture)
    console.print(f"{options.steps} steps of {options.batch_size} rows, {conditions()}", highlight=False)
    console.print(report.table([plain, split]))
    console.print(f"Picture: {picture}\n{report.verdict(plain, split)}", soft_wrap=True, highlight=False, markup=False)
    return split.gradient_difference <= report.GRADIENT_TARGET


def conditions() -> str:
    """What the seconds depend on. A load beyond the threads means that other programs slowed the runs down."""
    load = f" at load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' if threads > 1 else ''}{load}; seconds without the first step"


def _make_folder(folder: Path) -> None:
    """Now, and not after minutes of training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {folder}: {error.strerror}; name a folder that can be written.") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 if the gradients differ, or 2 for bad input."""
    try:
        options = parse(arguments)
        quieten_lightning()
        if options.threads:
            torch.set_num_threads(options.threads)
        return 0 if compare(options, Console()) else 1
    except BadInput as error:
        print(f"quickstart.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
