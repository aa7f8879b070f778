"""layout="pack" in the Trainer of transformers, and where loops of one's own refuse it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lightning_padmin import PadMinConfig
from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.errors import ConfigError, GradientCheckError
from lightning_padmin.integrations.accelerate import PadMin
from lightning_padmin.integrations.fabric import FabricPadMin
from lightning_padmin.integrations.transformers import PadMinTrainerMixin

VOCABULARY = 40
PACK = PadMinConfig(token_budget=48, layout="pack", pad_token_id=0)


class Ours(PadMinTrainerMixin, Trainer):
    pass


def llama() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def opt() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.0}
    return OPTForCausalLM(OPTConfig(vocab_size=VOCABULARY, word_embed_proj_dim=16, **sizes))


class MeanLoss(nn.Module):
    """A model that knows nothing of num_items_in_batch."""

    def __init__(self, hands_on: bool = True) -> None:
        super().__init__()
        self.inner, self.hands_on = llama(), hands_on
        self.config = self.inner.config

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **more: Any) -> Any:
        kept = more if self.hands_on else {}
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask, **kept).logits
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def rows(count: int = 32) -> list[dict[str, list[int]]]:
    source = random.Random(0)
    made = []
    for _ in range(count):
        ids = [source.randrange(1, VOCABULARY) for _ in range(source.choice([3, 4, 5, 6, 8, 11, 14, 30]))]
        made.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
    return made


def collate(samples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    width = max(len(sample["input_ids"]) for sample in samples)
    fill = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.tensor([sample[name] + [value] * (width - len(sample[name])) for sample in samples])
        for name, value in fill.items()
    }
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    return batch | {"attention_mask": (torch.arange(width) < lengths[:, None]).long()}


class Record(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.losses: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradients.append(torch.cat([p.grad.detach().double().flatten() for p in model.parameters()]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def train(kind: type, make: Callable[[], nn.Module], padmin: PadMinConfig | None = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 0.05,
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    record, more = Record(), {} if padmin is None else {"padmin": padmin}
    trainer = kind(
        model=make(),
        args=TrainingArguments(**(defaults | options)),
        train_dataset=rows(),
        data_collator=collate,
        callbacks=[record],
        **more,
    )
    trainer.train()
    return trainer, record


def apart(found: Record, wanted: Record) -> float:
    assert len(found.gradients) == len(wanted.gradients) > 1
    pairs = zip(found.gradients, wanted.gradients, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("make", [llama, MeanLoss])
def test_gradients_and_losses_are_the_stock_ones(make: Callable[[], nn.Module]) -> None:
    _, stock = train(Trainer, make)
    trainer, ours = train(Ours, make, PACK)
    assert apart(ours, stock) <= 1e-5
    assert ours.losses == pytest.approx(stock.losses, abs=1e-5)
    stats = trainer.padding_stats
    assert stats.slots == stats.real_tokens < stats.slots_before


@pytest.mark.parametrize("rows_at_once", [1, 2])
@pytest.mark.parametrize("layout", ["pack", "pad"])
def test_small_batches_are_pooled_and_checked(layout: Any, rows_at_once: int) -> None:
    """The window has the rows that one batch has not."""
    options = {"per_device_train_batch_size": rows_at_once, "gradient_accumulation_steps": 8}
    config = replace(PACK, layout=layout)
    _, stock = train(Trainer, llama, **options)
    trainer, ours = train(Ours, llama, config, **options)
    assert apart(ours, stock) <= 1e-5
    assert trainer.padding_stats.batches == 32 // rows_at_once
    assert trainer.padding_stats.waste == 0 or layout == "pad"

    class Forgetful(Ours):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            kept = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
            return super().compute_loss(model, kept, *args, **options)

    if layout == "pack":
        with pytest.raises(GradientCheckError, match="Rows were packed"):
            train(Forgetful, llama, config, **options)


def test_a_model_that_leaks_is_refused() -> None:
    with pytest.raises(ArchitectureError, match=r"layout='pack': model \(OPTForCausalLM.*outputs change by"):
        train(Ours, opt, PACK)


def test_a_model_that_drops_positions_on_the_way_is_refused() -> None:
    with pytest.raises((ArchitectureError, GradientCheckError), match="layout='pack'"):
        train(Ours, lambda: MeanLoss(hands_on=False), PACK)


def test_a_loss_that_drops_positions_is_refused() -> None:
    """The model is fine; the Trainer's loss is not."""

    class Forgetful(Ours):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            kept = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
            return super().compute_loss(model, kept, *args, **options)

    with pytest.raises(GradientCheckError, match="Rows were packed"):
        train(Forgetful, llama, PACK)


@pytest.mark.parametrize(
    ("options", "trainer", "message"),
    [
        ({"check": "off"}, {}, "check='off' would leave unproven"),
        ({"loss_reduction": "row-mean"}, {}, "a pack is one row of many documents"),
        ({}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    ],
)
def test_what_is_refused_at_the_start(options: dict[str, Any], trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(Ours, llama, replace(PACK, **options), **trainer)


def test_loops_of_ones_own() -> None:
    with pytest.raises(ConfigError, match=r"PadMin\.micro_batches hands position ids on"):
        PadMin(Accelerator(cpu=True), PACK)
    with pytest.raises(ConfigError, match=r"FabricPadMin\.micro_batches hands position ids on"):
        FabricPadMin(Fabric(accelerator="cpu", devices=1), PACK)
