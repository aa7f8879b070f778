"""A Lightning training on several devices whose batches are split under a token budget.

    python examples/lightning_multi_gpu.py --devices 2 --strategy ddp
    python examples/lightning_multi_gpu.py --devices 2 --strategy fsdp2
    python examples/lightning_multi_gpu.py --devices 2 --strategy ddp --budget 0      # batches as they come, to compare

A small causal transformer learns to predict the next token of made-up rows, whose lengths are those of GSM8K
(`examples/data`). Only the completion of a row carries loss, as in fine-tuning. Without a GPU devices are processes.
"""

from __future__ import annotations

import argparse
import csv
import logging
import statistics
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_padmin import PaddingStats, PadMinCallback

LENGTHS = Path(__file__).with_name("data") / "gsm8k_token_lengths.csv"
VOCABULARY, HEADS, POSITIONS = 512, 4, 1024
IGNORED = -100  # the label of a token that carries no loss


class Row(NamedTuple):
    """Tokens (length,), of which the first `prompt` carry no loss."""

    ids: Tensor
    prompt: int


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
        "labels": torch.full(shape, IGNORED),
    }
    for index, (ids, prompt) in enumerate(rows):
        batch["input_ids"][index, : len(ids)] = ids
        batch["attention_mask"][index, : len(ids)] = 1
        batch["labels"][index, prompt : len(ids)] = ids[prompt:]
    return batch


class TorchTransformer(nn.Module):
    """Stands in where transformers is not installed."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(POSITIONS, width)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, **options) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (rows, width, vocabulary). Padding comes after a row, where a causal model does not look."""
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.tokens(input_ids) + self.positions(columns)
        future = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], device=input_ids.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=future, is_causal=True)
        return self.head(hidden)


def make_model(layers: int, width: int) -> tuple[nn.Module, list[nn.Module]]:
    """A causal model, and those of its parts that are sharded one by one."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        plain = TorchTransformer(layers, width)
        return plain, list(plain.layers)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=POSITIONS,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    return model, list(model.model.layers)


class LanguageModel(pl.LightningModule):
    """An ordinary module: nothing in it knows of micro-batches.

    Args:
        layers: number of blocks.
        width: size of a token's state.
        sharded: shard parameters over ranks, as `ModelParallelStrategy` leaves to the module.
    """

    def __init__(self, layers: int, width: int, sharded: bool = False) -> None:
        super().__init__()
        self.model, self.blocks = make_model(layers, width)
        self.sharded = sharded

    def configure_model(self) -> None:
        """Block by block, so that one at a time is whole."""
        if self.sharded:
            mesh = self.device_mesh["data_parallel"]
            for part in (*self.blocks, self.model):
                fully_shard(part, mesh=mesh)
            self.sharded = False  # Lightning may call this hook again

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean loss over the tokens of `labels`."""
        output = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        logits = output if isinstance(output, Tensor) else output.logits
        targets = batch["labels"][:, 1:]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Record(pl.Callback):
    """Counts slots and takes the time, with PadMinCallback or without; put it behind that."""

    def __init__(self, pad: PadMinCallback | None) -> None:
        self.pad = pad
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self.batches: list[PaddingStats] = []
        self.start = 0.0
        self.loss_by_step: list[float] = []
        self.ranks: list[PaddingStats] = []
        self.slowest: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        """Starts the clock."""
        self.start = now(module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """Stops it, and counts a batch that came as it is."""
        self.seconds.append(now(module.device) - self.start)
        self.losses.append(outputs["loss"].detach())
        if self.pad is None:
            self.batches.append(as_it_came(batch))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Brings the ranks' numbers together."""
        losses, seconds = torch.stack(self.losses), torch.tensor(self.seconds, device=module.device)
        self.loss_by_step = of_all_ranks(module, losses).mean(0).tolist()
        self.slowest = of_all_ranks(module, seconds).max(0).values.tolist()
        if self.pad is not None:
            counts = of_all_ranks(module, torch.tensor(self.pad.stats.as_counts(), device=module.device))
            self.ranks = [PaddingStats.from_counts(row) for row in counts.tolist()]
        else:
            table = torch.tensor([each.as_counts() for each in self.batches], device=module.device)
            self.ranks = with_waiting(of_all_ranks(module, table).cpu().numpy())

    @property
    def seconds_per_step(self) -> float:
        """A middle one of the slowest rank, the first left out: it holds the first-batch check, and warms up."""
        return statistics.median(self.slowest[1:] or self.slowest)


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def of_all_ranks(module: pl.LightningModule, values: Tensor) -> Tensor:
    """(ranks, ...) from (...); one device has no dimension of ranks."""
    return module.all_gather(values).reshape(-1, *values.shape)


def as_it_came(batch: dict[str, Tensor]) -> PaddingStats:
    """The counts of one batch that runs whole."""
    real, labels = batch["attention_mask"], batch["labels"]
    return PaddingStats(
        batches=1,
        rows=len(real),
        real_tokens=int(real.sum()),
        loss_tokens=int((labels[:, 1:] != IGNORED).sum()),
        slots_before=real.numel(),
        slots=real.numel(),
        micro_batches=1,
        longest_row=int(real.sum(1).max()),
    )


def with_waiting(table: np.ndarray) -> list[PaddingStats]:
    """One per rank from counts (ranks, steps, counts): in each step all wait for the rank with most slots."""
    ranks = []
    for counts in table:
        batches = [PaddingStats.from_counts(row) for row in counts]
        most = [max(PaddingStats.from_counts(row).slots for row in step) for step in table.swapaxes(0, 1)]
        waiting = sum(most) - sum(batch.slots for batch in batches)
        ranks.append(replace(PaddingStats.merge_ranks(counts), wait_slots=waiting))
    return ranks


def make_strategy(name: str, devices: int, blocks: set[type[nn.Module]]) -> str | Strategy:
    """Lightning's strategy of this name."""
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
    if name == "fsdp":
        return FSDPStrategy(auto_wrap_policy=ModuleWrapPolicy(blocks), use_orig_params=True)
    return "ddp" if name == "ddp" else "auto"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A Lightning training on several devices with lightning-padmin.")
    parser.add_argument("--strategy", choices=["single", "ddp", "fsdp2", "fsdp"], default="single")
    parser.add_argument("--devices", type=int, default=1, help="GPUs, or processes on the CPU")
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="auto: a GPU if there is")
    parser.add_argument("--budget", type=int, default=1536, help="slots of a micro-batch; 0: without PadMinCallback")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch, on each device")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help=f"a multiple of {2 * HEADS}")
    options = parser.parse_args()
    problem = wrong(options)
    if problem:
        parser.error(problem)
    return options


def wrong(options: argparse.Namespace) -> str | None:
    """What cannot be run, and what can; also turns the accelerator "auto" into the one that there is."""
    for name, smallest in {"devices": 1, "steps": 1, "rows": 1, "layers": 1, "width": 1, "budget": 0}.items():
        if getattr(options, name) < smallest:
            return f"--{name} {getattr(options, name)}: must be at least {smallest}"
    if options.width % (2 * HEADS):
        return f"--width {options.width}: must be a multiple of {2 * HEADS}"
    if options.strategy == "single" and options.devices > 1:
        return f"--devices {options.devices}: --strategy single has one; take --strategy ddp, fsdp2 or fsdp"
    if options.devices * options.rows > len(Rows()):
        return f"--devices {options.devices} --rows {options.rows}: there are {len(Rows())} rows; take fewer"
    gpus = torch.cuda.device_count()
    if options.accelerator == "auto":
        options.accelerator = "gpu" if gpus else "cpu"
    if options.accelerator == "gpu" and options.devices > gpus:
        return f"--accelerator gpu --devices {options.devices}: there are {gpus} GPUs; take --accelerator cpu"
    if options.strategy == "fsdp" and options.accelerator == "cpu":
        return "--strategy fsdp (FSDP1) needs a GPU, since Lightning gives it no CPU; take --strategy fsdp2"
    return None


def train(options: argparse.Namespace) -> tuple[Record, pl.Trainer]:
    """One run, with the callback unless the budget is 0."""
    pl.seed_everything(0, verbose=False)
    module = LanguageModel(options.layers, options.width, sharded=options.strategy == "fsdp2")
    # Lightning puts a DistributedSampler in the place of the loader's own, with the seed from above.
    generator = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(
        Rows(), options.rows, shuffle=True, collate_fn=collate, drop_last=True, generator=generator
    )
    pad = PadMinCallback(token_budget=options.budget) if options.budget else None
    record = Record(pad)
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=make_strategy(options.strategy, options.devices, {type(block) for block in module.blocks}),
        callbacks=[pad, record] if pad else [record],
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return record, trainer


def table(options: argparse.Namespace, record: Record) -> Table:
    """A line for each rank, and one for all; idle is the share of slots spent waiting for the rank with most."""
    how = f"budget {options.budget:,}" if options.budget else "without PadMinCallback"
    title = f"{options.strategy}, {options.devices} x {options.accelerator}, {how}"
    drawn = Table("rank", title=title, caption=f"{options.steps} steps of {options.rows} rows per rank")
    for column in ("slots", "waste", "micro-\nbatches", "idle", "seconds\nper step", "final\nloss"):
        drawn.add_column(column, justify="right")
    for rank, stats in enumerate(record.ranks):
        drawn.add_row(str(rank), *counts(stats), "", "", end_section=rank == len(record.ranks) - 1)
    whole = PaddingStats.merge_ranks([stats.as_counts() for stats in record.ranks])
    drawn.add_row("all", *counts(whole), f"{record.seconds_per_step:.2f}", f"{record.loss_by_step[-1]:.6f}")
    return drawn


def counts(stats: PaddingStats) -> list[str]:
    """Cells of the table."""
    return [f"{stats.slots:,}", f"{stats.waste:.1%}", str(stats.micro_batches), f"{stats.idle:.1%}"]


def main() -> None:
    """Trains, and prints what it cost and where it ended."""
    options = arguments()
    warnings.filterwarnings("ignore", module=r"lightning\.")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    record, trainer = train(options)
    if trainer.is_global_zero:
        console = Console()
        console.print(table(options, record))
        console.print("loss by step:", " ".join(f"{loss:.6f}" for loss in record.loss_by_step), highlight=False)


if __name__ == "__main__":
    main()
