"""What is read off a Trainer: where its processes lie, and which steps are the user's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support
import torch
from accelerate.utils import ParallelismConfig
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

from lightning_padmin import PadMinConfig
from lightning_padmin.architectures import HookWatch
from lightning_padmin.errors import ConfigError, GradientHookError
from lightning_padmin.integrations.accelerate import PadMin
from lightning_padmin.integrations.common import (
    backward_of_step,
    has_own_step,
    has_step_in_front,
    look_for_whole_steps,
    own_step,
    refuse_data_parallel,
    topology_of,
    untouched_trainer,
)
from lightning_padmin.integrations.transformers import PadMinTrainerMixin


def with_accelerator(kind: str, count: int = 2) -> Any:
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), process_index=1, num_processes=count)
    return SimpleNamespace(accelerator=accelerator)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NO", "single"), ("MULTI_GPU", "ddp"), ("MULTI_CPU", "ddp"), ("FSDP", "sharded"), ("DEEPSPEED", "engine")],
)
def test_topology(name: str, kind: str) -> None:
    found = topology_of(with_accelerator(name))
    assert (found.rank, found.world, found.kind) == (1, 2, kind)
    assert found.has_passes_of_its_own is (kind == "ddp")


def test_several_devices_are_refused() -> None:
    refuse_data_parallel(SimpleNamespace(args=SimpleNamespace(n_gpu=1)))
    refuse_data_parallel(SimpleNamespace(args=SimpleNamespace()))
    with pytest.raises(ConfigError, match=r"n_gpu=3: DataParallel splits batches by itself\. Start one process"):
        refuse_data_parallel(SimpleNamespace(args=SimpleNamespace(n_gpu=3)))


@pytest.mark.parametrize("name", ["tp_size", "cp_size"])
def test_processes_that_hold_one_batch_are_refused(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the loop of one's own and by the Trainer, when they are made; data-parallel processes are not."""
    config, sizes = PadMinConfig(token_budget=64), ParallelismConfig(dp_shard_size=2)

    class Placed(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            monkeypatch.setattr(self.accelerator.state, "parallelism_config", sizes)

    def trainer(*bases: type) -> Any:
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        kind = type("Ours", (*bases, Placed), {})
        return kind(support.TinyLM(), arguments, train_dataset=[{}], **({"padmin": config} if bases else {}))

    trainer(PadMinTrainerMixin)
    PadMin(trainer().accelerator, config)
    sizes = ParallelismConfig(**{name: 2})
    for begin in (lambda: PadMin(trainer().accelerator, config), lambda: trainer(PadMinTrainerMixin)):
        with pytest.raises(ConfigError, match=rf"parallelism_config with {name}=2: .*dp_shard_size.*enabled=False"):
            begin()


class Stock:
    def training_step(self, model: Any, inputs: Any) -> Any:
        return None


Stock.__module__ = "transformers.trainer"


class Mixin:
    def training_step(self, model: Any, inputs: Any) -> Any:
        return super().training_step(model, inputs)  # type: ignore[misc]


Mixin.__module__ = "lightning_padmin.integrations.transformers.mixin"


class Steps:
    def training_step(self, model: Any, inputs: Any) -> Any:
        loss = inputs
        loss.backward()
        return loss


class Plain(Mixin, Stock):
    pass


class InFront(Steps, Mixin, Stock):
    pass


class Behind(Mixin, Steps, Stock):
    pass


@pytest.mark.parametrize(
    ("kind", "own", "in_front", "sends"), [(Plain, 0, 0, 0), (InFront, 1, 1, 0), (Behind, 1, 0, 1)]
)
def test_steps_of_the_users_own(kind: type, own: int, in_front: int, sends: int) -> None:
    trainer: Any = kind()
    name = "Steps.training_step"
    assert own_step(trainer) == (name if own else None)
    assert (has_own_step(trainer), has_step_in_front(trainer)) == (bool(own), bool(in_front))
    assert backward_of_step(trainer) == (name if sends else None)
    trainer.training_step = lambda model, inputs: None  # put onto the object
    assert has_own_step(trainer)
    assert has_step_in_front(trainer)


@pytest.mark.parametrize("reenters", [False, True])
def test_hooks_on_parameters_matter_where_checkpoints_are_passes_of_their_own(reenters: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2))
    model.gradient_checkpointing = True
    model._gradient_checkpointing_func = partial(checkpoint, use_reentrant=reenters)
    model[0].weight._in_backward_optimizers = [torch.optim.SGD(model.parameters())]
    watch = HookWatch("Leave it out")
    if reenters:
        with pytest.raises(GradientHookError, match=r"takes an optimizer step \(SGD\) in the backward pass"):
            look_for_whole_steps(watch, model, [model])
    else:
        look_for_whole_steps(watch, model, [model])


def test_a_trainer_is_left_as_it_was() -> None:
    trainer = SimpleNamespace(seen=[], sum=torch.zeros(2))
    with untouched_trainer(trainer):
        trainer.seen.append(1)
        trainer.sum += 1
        trainer.new = 3
    assert vars(trainer).keys() == {"seen", "sum"}
    assert trainer.seen == []
    assert trainer.sum.tolist() == [0, 0]
