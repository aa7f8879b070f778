"""A training of each framework that ends at one place of one batch; for gone_worker.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))

import lightning.pytorch as pl
import support
import test_transformers_trainer as trainer_cases
import torch
import trl_cases
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.accelerate.loop import PadMin

TIMEOUT, BATCHES = 30, 26
LENGTHS = ([24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2])


class Ending:
    """Ends this process, or its training, at one place of one batch; `how` "short" is for loaders that are at an end.

    Args:
        how: "kill", "exit", "interrupt", "raise", "short"; "" never.
        place: where.
        batch: when, from 0; for "short" the number of batches.
        mark: a file for the time at which it ended.
    """

    def __init__(self, how: str, place: str, batch: int, mark: Path) -> None:
        self.how, self.place, self.batch, self.mark = how, place, batch, mark

    def come_to(self, place: str, batch: int) -> None:
        if self.how not in ("", "short") and (place, batch) == (self.place, self.batch):
            self.end()

    def end(self) -> None:
        self.now()
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exit":
            raise SystemExit(3)
        if self.how == "interrupt":
            raise KeyboardInterrupt
        raise RuntimeError("the roof is on fire")

    def now(self) -> None:
        self.mark.write_text(repr(time.monotonic()))

    @property
    def count(self) -> int:
        return self.batch if self.how == "short" else BATCHES


class Loader(torch.utils.data.IterableDataset):
    """A rank's own batches; ends while it makes one."""

    def __init__(self, rank: int, ending: Ending) -> None:
        own = LENGTHS[rank]
        turns = [k % len(own) for k in range(ending.count)]
        self.batches = [support.make_batch(own[turn:] + own[:turn], seed=k) for k, turn in enumerate(turns)]
        self.ending = ending

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            self.ending.come_to("loader", index)
            yield batch
        if self.ending.how == "short":
            self.ending.now()


class Module(support.Module):
    """Of Lightning."""

    def __init__(self, ending: Ending) -> None:
        super().__init__()
        self.ending = ending

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ending.come_to("batch_start", batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ending.come_to("forward", batch_idx)
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: self.ending.come_to("backward", batch_idx))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.ending.come_to("before_step", self.trainer.fit_loop.epoch_loop.batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **options: Any) -> None:
        self.ending.come_to("optimizer_step", batch_idx)
        super().optimizer_step(epoch, batch_idx, *args, **options)
        self.ending.come_to("after_step", batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ending.come_to("batch_end", batch_idx)


class Sharded(Module):
    """Under FSDP2."""

    def configure_model(self) -> None:
        if not isinstance(next(self.model.parameters()), DTensor):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.model.head, mesh=mesh)
            fully_shard(self.model, mesh=mesh)


def lightning(rank: int, ending: Ending, ours: bool, sharded: bool = False) -> None:
    gloo: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=TIMEOUT)}
    mesh = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    strategy: Any = ModelParallelStrategy(**mesh, **gloo) if sharded else DDPStrategy(**gloo)
    options: dict[str, Any] = {"strategy": strategy, "devices": 2, "plugins": [LightningEnvironment()]}
    callbacks: list[pl.Callback] = [support.padmin()] if ours else []
    trainer = support.quiet_trainer(*callbacks, use_distributed_sampler=False, **options)
    module = (Sharded if sharded else Module)(ending)
    trainer.fit(module, torch.utils.data.DataLoader(Loader(rank, ending), batch_size=None))


class Places(TrainerCallback):
    """The places of a Trainer of transformers, by optimizer step."""

    def __init__(self, ending: Ending, trainer: Any) -> None:
        self.ending, self.trainer = ending, trainer
        model, collate = trainer.accelerator.unwrap_model(trainer.model), trainer.data_collator
        model.register_forward_hook(self.forward)

        def collated(rows: Any) -> Any:
            self.come_to("loader")
            return collate(rows)

        trainer.data_collator = collated
        trainer.add_callback(self)

    def come_to(self, place: str) -> None:
        self.ending.come_to(place, self.trainer.state.global_step)

    def forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.come_to("forward")
            for each in outputs.values():  # not all of them need be in the loss
                if isinstance(each, Tensor) and each.requires_grad:
                    each.register_hook(lambda gradient: self.come_to("backward"))

    def on_train_begin(self, *_: Any, optimizer: Any = None, **more: Any) -> None:
        optimizer.optimizer.register_step_pre_hook(lambda *step: self.come_to("optimizer_step"))

    def on_step_begin(self, *_: Any, **more: Any) -> None:
        self.come_to("batch_start")

    def on_pre_optimizer_step(self, *_: Any, **more: Any) -> None:
        self.come_to("before_step")

    def on_optimizer_step(self, *_: Any, **more: Any) -> None:
        self.come_to("after_step")

    def on_step_end(self, *_: Any, **more: Any) -> None:
        self.ending.come_to("batch_end", self.trainer.state.global_step - 1)


def uneven(kind: type, rank: int, ending: Ending) -> type:
    """A trainer whose ranks have loaders of their own, of different length."""

    def get_train_dataloader(self: Any) -> Any:
        stock = super(made, self).get_train_dataloader()
        return Short(stock, ending) if ending.how == "short" else stock

    made = type(kind.__name__, (kind,), {"get_train_dataloader": get_train_dataloader})
    return made


class Short:
    """A loader with fewer batches."""

    def __init__(self, stock: Any, ending: Ending) -> None:
        self.stock, self.ending = stock, ending

    def __len__(self) -> int:
        return 2 * self.ending.count

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.stock)
        for _ in range(len(self)):
            yield next(batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)


def on_two_ranks(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")


def transformers(rank: int, ending: Ending, ours: bool) -> None:
    """The Trainer, whose default of the store's patience is half an hour."""
    on_two_ranks(rank)
    options = {"ddp_backend": "gloo", "ddp_timeout": TIMEOUT, "gradient_accumulation_steps": 2}
    data = trainer_cases.rows(BATCHES * 16)

    class Ends(uneven(trainer_cases.Ours if ours else Trainer, rank, ending)):  # type: ignore[misc]
        def train(self) -> Any:
            assert self.accelerator.num_processes == 2
            Places(ending, self)
            found = super().train()
            if ending.how == "short":
                ending.now()
            return found

    config = trainer_cases.BUDGET if ours else None
    trainer_cases.train(Ends, trainer_cases.llama, config, data, num_train_epochs=1, **options)


def grpo(rank: int, ending: Ending, ours: bool) -> None:
    on_two_ranks(rank)
    stock, mixed = trl_cases.trainers()
    kind = uneven(mixed if ours else stock, rank, ending)

    class Ends(kind):  # type: ignore[misc, valid-type]
        def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
            ending.come_to("generate", self.state.global_step)
            return super()._generate_single_turn(*args, **options)

    options = {"max_steps": BATCHES, "ddp_timeout": TIMEOUT, "ddp_backend": "gloo", "loss_type": "dapo"}
    if ending.how == "short":
        options["max_steps"] = ending.count
    trainer = trl_cases.build(Ends, options, trl_cases.padmin("split") if ours else None)
    assert trainer.accelerator.num_processes == 2
    Places(ending, trainer)
    trainer.train()
    if ending.how == "short":
        ending.now()


class Model(nn.Module):
    """Its loss is a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = support.TinyLM()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        return support.reduce_loss(support.token_losses(self.inner(input_ids), labels), labels, "token-mean")


def accelerate(rank: int, ending: Ending, ours: bool) -> None:
    on_two_ranks(rank)
    patience = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=TIMEOUT))
    accelerator = Accelerator(kwargs_handlers=[patience])
    assert accelerator.num_processes == 2
    model: Any = Model().double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    pad = PadMin(accelerator, PadMinConfig(token_budget=24, launch_cost=4, enabled=ours))
    for index, batch in enumerate(torch.utils.data.DataLoader(Loader(rank, ending), batch_size=None)):
        ending.come_to("batch_start", index)
        with accelerator.accumulate(model):
            for micro, weight in pad.micro_batches(batch, model) if ours else [(batch, 1.0)]:
                ending.come_to("forward", index)
                loss = model(**micro) * weight
                loss.register_hook(lambda gradient, index=index: ending.come_to("backward", index))
                accelerator.backward(loss)
            ending.come_to("before_step", index)
            optimizer.step()
            ending.come_to("after_step", index)
            optimizer.zero_grad()
        ending.come_to("batch_end", index)


Training = Callable[[int, Ending, bool], None]
LIGHTNING = ("loader", "batch_start", "forward", "backward", "optimizer_step", "before_step", "after_step", "batch_end")
CASES: dict[str, tuple[Training, tuple[str, ...]]] = {
    "lightning": (lightning, LIGHTNING),
    "fsdp2": (partial(lightning, sharded=True), LIGHTNING),
    "trainer": (transformers, LIGHTNING),
    "grpo": (grpo, ("generate", *LIGHTNING)),
    "accelerate": (accelerate, tuple(place for place in LIGHTNING if place != "optimizer_step")),
}
