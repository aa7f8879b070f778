"""What the ways of a batch cost in Lightning: peak memory of a step, and its time, stock, split, joint and replayed.

    python examples/benchmarks/ways.py --threads 1 --clock cpu

A decoder of random weights and ragged rows. `tokens` is a token mean over the vocabulary, for which all ways are exact;
`pairs` is a contrastive loss of pooled rows, which couples them, so that splitting is no way. Ways take turns. Memory
is what a step allocates above what is there before, gradients included; "a chunk" is a stock step on the largest chunk
alone. Exits with 1 if a bound of memory is not kept: joint at most stock's and 2%, replay at most a chunk's, gradients
that are there from the chunks before it, and three times the outputs that the loss is taken of (its chunks, all of them
put together, and their gradient).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from _frameworks.memory import peak
from _speed import models, workload
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_padmin import PadMinCallback, PadMinConfig
from lightning_padmin.microbatching import MicroBatcher

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
WAYS = {"tokens": ("stock", "split", "joint", "replay"), "pairs": ("stock", "joint", "replay")}
Batch = dict[str, Tensor]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=32, help="of a batch")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--scale", type=int, default=16, help="lengths of the data are divided by it")
    parser.add_argument("--data", default="rl", choices=sorted(workload.FILES))
    parser.add_argument("--chunks", type=int, default=4, help="the budget is a batch's slots over this number")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS), help="cpu where other programs run too")
    parser.add_argument("--threads", type=int)
    return parser.parse_args(arguments)


class Lit(pl.LightningModule):
    """A decoder with one of the two losses."""

    def __init__(self, model: Any, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss of a batch."""
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        if self.kind == "tokens":
            logits = self.model(**inputs).logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        mask = batch["attention_mask"][..., None]
        rows = (self.model.base_model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
        rows, half = F.normalize(rows, dim=-1), max(1, len(rows) // 2)
        return F.cross_entropy(rows[:half] @ rows[-half:].T * 20, torch.arange(half))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Small steps, so that all batches are of one model."""
        return torch.optim.SGD(self.parameters(), 1e-6)


def step(module: Lit, batch: Batch, way: str, budget: int, around: Callable[[Callable[[], None]], None]) -> None:
    """The second of two training steps; the first one makes whatever is made once."""
    options: Any = {"token_budget": budget, "mode": way, "check": "off"}
    if module.kind == "pairs":
        options["loss_reduction"] = "row-mean"
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[] if way == "stock" else [PadMinCallback(**options)],
        logger=DummyLogger(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loop: Any = trainer.fit_loop.epoch_loop
    advance, count = loop.advance, 0

    def advanced(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == 1:
            advance(*args)
        else:
            around(lambda: advance(*args))

    loop.advance = advanced
    trainer.fit(module, DataLoader([batch] * 2, batch_size=None))  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the bounds of memory are kept."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    lengths = workload.draw(workload.read_lengths(workload.FILES[options.data]), options.rows, options.scale, 0)
    batch = workload.Workload(lengths, (0, 0), 0, 0, options.vocabulary).batch()
    slots = batch["input_ids"].numel()
    budget = slots // options.chunks
    plan = MicroBatcher(PadMinConfig(token_budget=budget)).prepare(batch)
    largest = max((micro.batch for micro in plan), key=lambda micro: micro["input_ids"].numel())
    print(
        f"{options.data} lengths / {options.scale}, {options.rows} rows: {slots:,} slots, {plan.stats.slots:,} in "
        f"{len(plan)} chunks of at most {budget:,}; hidden size {options.hidden}, {options.layers} layers, vocabulary "
        f"{options.vocabulary}, {torch.get_num_threads()} threads; medians of {options.repeats} turns, {options.clock} "
        "time"
    )
    fine = True
    for kind, ways in WAYS.items():
        module = Lit(models.build("qwen2", options.hidden, options.layers, options.vocabulary), kind)
        found = measured(options, module, batch, ways, budget)
        of_chunk: list[int] = []
        step(module, largest, "stock", budget, lambda work, found=of_chunk: found.append(peak(work, nn.Module())))
        width = options.vocabulary if kind == "tokens" else options.hidden
        outputs, gradients = 4 * slots * width, 4 * sum(p.numel() for p in module.parameters())
        print(
            f"{kind}: a chunk {of_chunk[0] / 1e6:.0f} MB, gradients {gradients / 1e6:.0f} MB, outputs "
            f"{outputs / 1e6:.0f} MB"
        )
        print(f"{'':10} {'peak MB':>9} {'of stock':>9} {'seconds':>9} {'as fast as stock':>17}")
        for way, (memory, seconds) in found.items():
            speed = statistics.median(a / b for a, b in zip(found["stock"][1], seconds, strict=True))
            share = memory / found["stock"][0]
            print(f"{way:10} {memory / 1e6:9.0f} {share:9.2f} {statistics.median(seconds):9.2f} {speed:17.2f}")
        joint, replay = found["joint"][0] / found["stock"][0], found["replay"][0]
        fine &= joint <= 1.02 and replay <= of_chunk[0] + gradients + 3 * outputs
    return 0 if fine else 1


def measured(
    options: argparse.Namespace, module: Lit, batch: Batch, ways: Sequence[str], budget: int
) -> dict[str, tuple[int, list[float]]]:
    """Peak and times of a step, by way."""
    clock, seconds, peaks = CLOCKS[options.clock], {way: list[float]() for way in ways}, dict[str, int]()
    for turn in range(options.repeats):
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:

            def timed(work: Callable[[], None], way: str = way) -> None:
                begin = clock()
                work()
                seconds[way].append(clock() - begin)

            step(module, batch, way, budget, timed)
    for way in ways:

        def weighed(work: Callable[[], None], way: str = way) -> None:
            peaks[way] = peak(work, nn.Module())

        step(module, batch, way, budget, weighed)
    return {way: (peaks[way], seconds[way]) for way in ways}


if __name__ == "__main__":
    sys.exit(main())
