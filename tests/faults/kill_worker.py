"""Runs that are killed from outside: `python kill_worker.py FOLDER SEED`, and the same runs unbroken or resumed.

Every run of `places` is forked off, comes to a place that the seed draws, says so with its process id, and waits there
for its end. The next one starts when it is dead.
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))

import support
import test_transformers_trainer as trainers
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from transformers import Trainer

Where = Callable[[str, int, int], None]
BATCHES, EPOCHS, WINDOW, STEPS = 6, 2, 2, 6


def nowhere(kind: str, batch: int, micro: int) -> None:
    """A run that nobody kills."""


class Loader:
    """Batches in an order of its own in each epoch; goes on where it was, as stateful loaders do."""

    def __init__(self) -> None:
        self.batches = support.ragged_batches(BATCHES)
        self.epoch, self.position, self.start = -1, 0, None

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self.start is None:
            self.epoch, self.position = self.epoch + 1, 0
        else:
            (self.epoch, self.position), self.start = self.start, None
        order = torch.randperm(BATCHES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.position < BATCHES:
            self.position += 1
            yield self.batches[order[self.position - 1]]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["epoch"], state["position"]


class Module(support.Module):
    """AdamW, and a report at every place where a run may be killed."""

    def __init__(self, where: Where, callback: Any) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05))
        self.where, self.batch, self.callback = where, -1, [callback]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch = self.trainer.current_epoch * BATCHES + batch_idx
        self.where("batch", self.batch, 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.where("micro", self.batch, self.callback[0].micro_index)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.where("step", self.batch, 0)


class HalfWritten(TorchCheckpointIO):
    """Has half of a checkpoint in its place when it says where it is."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        whole = Path(path).read_bytes()
        Path(path).write_bytes(whole[: len(whole) // 2])
        self.module.where("write", self.module.batch, 0)
        Path(path).write_bytes(whole)


def lightning(
    folder: Path | None, where: Where = nowhere, checkpoint: Path | None = None, every: int = 1, enabled: bool = True
) -> Any:
    """A fit with the callback; `folder` gets `step=N.ckpt` and `last.ckpt`."""
    callback, saving = support.padmin(enabled=enabled), []
    module = Module(where, callback)
    options: dict[str, Any] = {"max_epochs": EPOCHS, "accumulate_grad_batches": WINDOW}
    if folder is not None:
        saver = ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, save_last=True, filename="{step}")
        saving, options = [saver], options | {"enable_checkpointing": True, "plugins": [HalfWritten(module)]}
    trainer = support.quiet_trainer(callback, *saving, **options)
    trainer.fit(module, Loader(), ckpt_path=checkpoint)
    return module, callback


def dropping() -> nn.Module:
    """With dropout, so that a run which resumes with another random state ends elsewhere."""
    return trainers.llama(attention_dropout=0.3)


def dropping_mean() -> nn.Module:
    model = trainers.MeanLoss()
    model.inner.config.attention_dropout = 0.3
    for layer in model.inner.model.layers:
        layer.self_attn.attention_dropout = 0.3
    return model


class Placed(trainers.Ours):
    """Says where it is: in which window, at which chunk of it, and while it saves."""

    where: Where = staticmethod(nowhere)
    chunk = 0
    padmin_per_call = ("chunk",)

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        if self.padding_stats.batches:  # not in the check of the first batch
            type(self).where("micro", self.state.global_step, self.chunk)
            self.chunk += 1
        return super().compute_loss(*args, **options)

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        self.chunk = 0
        return super().get_batch_samples(*args, **options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        type(self).where("write", self.state.global_step, 0)
        super()._save_optimizer_and_scheduler(output_dir)


TRAINERS = {
    "sums": (dropping, trainers.BUDGET),
    "means": (dropping_mean, trainers.PadMinConfig(token_budget=64, launch_cost=4)),
}


def transformers(
    way: str, folder: Path, where: Where = nowhere, checkpoint: Path | None = None, kind: type = Placed
) -> Any:
    """Eight optimizer steps, a checkpoint after every second one."""
    make, config = TRAINERS[way]
    Placed.where = staticmethod(where)
    stock = Trainer.train
    Trainer.train = lambda self: stock(self, resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    options = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01}
    try:
        return trainers.train(kind, make, config if kind is Placed else None, output_dir=str(folder), **options)
    finally:
        Trainer.train = stock


# What is killed: name -> (run, place). Places are drawn from those behind the first checkpoint. None has the last batch
# of an epoch for its last checkpoint: Lightning itself ends at once when it resumes from there with such a loader.
def places(seed: int) -> dict[str, tuple[Callable[[Path, Where], Any], tuple[str, int, int]]]:
    draw = random.Random(seed)
    batch, micro = draw.choice([3, 4, 5, 8, 9, 10, 11]), draw.randrange(1, 5)
    window, chunk = draw.choice([2, 4, 5, 6]), draw.randrange(1, 4)
    return {
        "in a micro-batch": (lightning, ("micro", batch, micro)),
        "in a window": (lightning, ("batch", draw.choice([5, 9, 11]), 0)),
        "before the step": (lightning, ("step", draw.choice([5, 9, 11]), 0)),
        "rare checkpoints": (
            lambda folder, where: lightning(folder, where, every=2),
            ("micro", draw.choice([6, 7, 10, 11]), draw.randrange(1, 5)),
        ),
        "while it writes": (lightning, ("write", draw.choice([5, 9, 11]), 0)),
        "in a chunk, sums": (lambda folder, where: transformers("sums", folder, where), ("micro", window, chunk)),
        "in a chunk, means": (lambda folder, where: transformers("means", folder, where), ("micro", window, chunk)),
        "while the Trainer saves": (
            lambda folder, where: transformers("sums", folder, where),
            ("write", draw.choice([4, 6]), 0),
        ),
    }


def main(root: Path, seed: int) -> None:
    for name, (run, place) in places(seed).items():
        child = os.fork()
        if not child:

            def where(*found: Any, name: str = name, place: Any = place) -> None:
                if found == place:
                    print(f"held|{name}|{os.getpid()}", flush=True)
                    time.sleep(60)
                    os._exit(3)

            try:
                run(root / name, where)
            finally:
                os._exit(4)  # it has not come to its place
        status = os.waitpid(child, 0)[1]
        print(f"ended|{name}|{os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
