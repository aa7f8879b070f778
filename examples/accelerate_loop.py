"""A training loop written with Accelerate, whose padding is removed where the configuration says so.

    accelerate launch --config_file examples/accelerate/padmin_on.yaml examples/accelerate_loop.py
    accelerate launch --config_file examples/accelerate/padmin_off.yaml examples/accelerate_loop.py
    PADMIN_TOKEN_BUDGET=1024 python examples/accelerate_loop.py

The loop is the same on and off, and so are its losses. A tiny recurrent model learns to predict the next token of
made-up rows, whose lengths are those of GSM8K (`examples/data`). Only the completion of a row carries loss.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

from lightning_padmin.integrations.accelerate import PadMin

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


def made_up_rows(count: int) -> list[Row]:
    """Rows that count upwards by a step of their own, so that there is something to learn."""
    with LENGTHS.open(newline="") as lines:
        lengths = [(int(row["prompt_tokens"]), int(row["completion_tokens"])) for row in csv.DictReader(lines)]
    return [
        Row((torch.arange(prompt + completion) * (1 + index % 3) + index) % VOCABULARY, prompt)
        for index, (prompt, completion) in enumerate(lengths[:count])
    ]


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
    parser = argparse.ArgumentParser(description="An Accelerate loop with lightning-padmin.")
    parser.add_argument("--batches", type=int, default=8, help="batches over all processes")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--save", type=Path, help="file for the parameters after training")
    return parser.parse_args()


def main() -> None:
    """Trains, and prints loss and padding of every step."""
    options = arguments()
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    set_seed(0)
    model: Any = TinyModel()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=options.batches)
    loader: Any = torch.utils.data.DataLoader(
        made_up_rows(options.batches * options.rows), options.rows, shuffle=True, collate_fn=collate
    )
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    pad = PadMin(accelerator)

    start, total, step = time.perf_counter(), torch.zeros((), device=accelerator.device), 0
    for batch in loader:
        with accelerator.accumulate(model):
            for micro, weight in pad.micro_batches(batch, model):
                loss = model(**micro) * weight
                accelerator.backward(loss)
                total += loss.detach() / options.accumulate
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            metrics = pad.metrics()  # on every rank, since counts are added up
            accelerator.log(metrics, step)
            loss_of_step = float(accelerator.reduce(total, "mean"))
            accelerator.print(f"step {step}: loss {loss_of_step:.4f}", summary(metrics))
            total, step = torch.zeros_like(total), step + 1
    accelerator.print(f"{accelerator.num_processes} processes, {time.perf_counter() - start:.1f} s")
    if options.save is not None and accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), options.save)


def summary(metrics: dict[str, float | int]) -> str:
    """The metrics of one step in one line."""
    return " ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )


if __name__ == "__main__":
    main()
