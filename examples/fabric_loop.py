"""A training loop of Lightning Fabric whose batches are split under a token budget.

    python examples/fabric_loop.py
    python examples/fabric_loop.py --devices 2 --strategy ddp
    python examples/fabric_loop.py --budget 0        # batches as they come, to compare

A tiny recurrent model learns to predict the next token of made-up rows, whose lengths are those of GSM8K
(`examples/data`). Only the completion of a row carries loss, as in fine-tuning.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.fabric import FabricPadMin

LENGTHS = Path(__file__).with_name("data") / "gsm8k_token_lengths.csv"
VOCABULARY = 64


class Row(NamedTuple):
    """Tokens (length,), of which the first `prompt` carry no loss."""

    ids: Tensor
    prompt: int


class TinyModel(nn.Module):
    """Causal: what comes after a token does not change its prediction."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over the tokens of `labels`, all three (rows, width); rows are padded on the right."""
        logits = self.head(self.rnn(self.embedding(input_ids))[0])
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


class Rows(torch.utils.data.Dataset[Row]):
    """Rows that count upwards by a step of their own, so that there is something to learn."""

    def __init__(self, file: Path = LENGTHS) -> None:
        with file.open(newline="") as lines:
            self.lengths = [(int(row["prompt_tokens"]), int(row["completion_tokens"])) for row in csv.DictReader(lines)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        prompt, completion = self.lengths[index]
        return Row((torch.arange(prompt + completion) * (1 + index % 3) + index) % VOCABULARY, prompt)


def collate(rows: list[Row]) -> dict[str, Tensor]:
    """Right-padded to the longest row, as usual."""
    shape = len(rows), max(len(row.ids) for row in rows)
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.full(shape, -100),
    }
    for index, (ids, prompt) in enumerate(rows):
        batch["input_ids"][index, : len(ids)] = ids
        batch["attention_mask"][index, : len(ids)] = 1
        batch["labels"][index, prompt : len(ids)] = ids[prompt:]
    return batch


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A Fabric loop with lightning-padmin.")
    parser.add_argument("--devices", type=int, default=1, help="processes")
    parser.add_argument("--strategy", default="auto", help="ddp for several processes")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--budget", type=int, default=1536, help="slots of a micro-batch; 0: batches are not split")
    options = parser.parse_args()
    for name in ("devices", "steps", "rows", "accumulate"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.budget < 0:
        parser.error(f"--budget {options.budget}: must be at least 0")
    return options


def main() -> None:
    """Trains, and prints loss and padding of every step."""
    options = arguments()
    fabric = Fabric(accelerator=options.accelerator, devices=options.devices, strategy=options.strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = TinyModel()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    loader = torch.utils.data.DataLoader(Rows(), options.rows, shuffle=True, collate_fn=collate, drop_last=True)
    loader = fabric.setup_dataloaders(loader)
    pad = FabricPadMin(fabric, PadMinConfig(token_budget=options.budget or None, enabled=options.budget > 0))

    start, batches = time.perf_counter(), endless(loader)
    for step in range(options.steps):
        total = torch.zeros((), device=fabric.device)
        for index in range(options.accumulate):
            is_accumulating = index < options.accumulate - 1
            for micro, weight in pad.micro_batches(next(batches), model, is_accumulating=is_accumulating):
                loss = model(**micro) * weight / options.accumulate
                fabric.backward(loss)
                total += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics = pad.metrics()  # on every rank, since counts are added up
        fabric.log_dict(metrics, step)
        fabric.print(f"step {step}: loss {fabric.all_reduce(total, reduce_op='mean'):.4f}", summary(metrics))
    fabric.print(f"{time.perf_counter() - start:.1f} s")


def endless(loader: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def summary(metrics: dict[str, float | int]) -> str:
    """The metrics of one step in one line."""
    return " ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )


if __name__ == "__main__":
    main()
