"""Checkpoints that run a graph of their own are exact, and not refused, in every adapter that checks gradients."""

from __future__ import annotations

from typing import Any

import offline_cases
import pytest
import support
import torch
from offline_cases import BUDGET, trained
from peft import LoraConfig, get_peft_model
from support import Module, TinyLM, fit_pair, ragged_batches, token_losses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trl_cases import gradient_difference, metric_difference, qwen2

from lightning_padmin.errors import GradientCheckError
from lightning_padmin.verification import sketch as sketches

CHECKPOINTS = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


def lora() -> nn.Module:
    torch.manual_seed(0)
    model = get_peft_model(qwen2(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.enable_input_require_grads()
    return model


def partly() -> nn.Module:
    """One layer of two; switched on by hand, so the Trainer knows nothing of it."""
    model = qwen2()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.base_model.layers[1].gradient_checkpointing = False
    return model


CASES: list[Any] = [
    ("sft", qwen2, CHECKPOINTS),
    ("dpo", qwen2, CHECKPOINTS),
    ("trainer", lora, CHECKPOINTS),
    pytest.param("trainer", qwen2, CHECKPOINTS, marks=pytest.mark.slow),
    pytest.param("trainer", partly, {}, marks=pytest.mark.slow),
    pytest.param("sft", partly, {"gradient_checkpointing": False}, marks=pytest.mark.slow),
    pytest.param("sft", lora, CHECKPOINTS, marks=pytest.mark.slow),
    pytest.param("kto", qwen2, CHECKPOINTS, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "make", "options"), CASES)
def test_gradients_and_metrics_are_the_stock_ones(kind: str, make: Any, options: dict[str, Any]) -> None:
    stock, ours = trained(kind, make(), None, **options), trained(kind, make(), BUDGET, **options)
    assert gradient_difference(ours, stock) <= 1e-5
    assert metric_difference(ours, stock)[0] <= 1e-5
    assert ours.trainer.padding_stats.slots < 0.8 * ours.trainer.padding_stats.slots_before


def test_the_last_part_of_a_gradient_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(sketches, "_add", dict.__setitem__)
    with pytest.raises(GradientCheckError, match="differ from the stock ones"):
        trained("sft", qwen2(), BUDGET, **CHECKPOINTS)


class Direct(Module):
    """A LightningModule that calls checkpoints itself: one layer twice, the head not at all."""

    def __init__(self, how: str = "token-mean") -> None:
        super().__init__(how)
        torch.manual_seed(2)
        self.mix = nn.Linear(12, 12).double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        model: TinyLM = self.model
        x = model.embedding(batch["input_ids"])
        for _ in range(2):
            x = checkpoint(lambda x: x + torch.tanh(self.mix(x)), x, use_reentrant=True)
        x = checkpoint(lambda x: model.rnn(x)[0], x, use_reentrant=True)
        losses = token_losses(model.head(self.mix(x)), batch["labels"])
        return support.reduce_loss(losses, batch["labels"], self.how)


def test_a_module_that_calls_checkpoints_itself() -> None:
    pair = fit_pair(Direct, ragged_batches())
    assert pair.gradient <= 1e-9
    with pytest.raises(GradientCheckError, match="set loss_reduction='row-mean'"):
        support.fit(Direct("row-mean"), ragged_batches(1), support.padmin())


def test_kinds_are_those_of_the_adapters() -> None:
    assert {kind for kind, *_ in (getattr(case, "values", case) for case in CASES)} == set(offline_cases.KINDS)
