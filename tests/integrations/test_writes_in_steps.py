"""Steps that advance state once per call: refused by name where they are split, as stock's where they are not."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from support import Module, fit, padmin, ragged_batches
from torch import Tensor, nn
from transformers import Trainer

from lightning_padmin.errors import GradientCheckError
from lightning_padmin.integrations.transformers import PadMinTrainerMixin

sys.path.insert(0, str(Path(__file__).parent))
import test_transformers_trainer as cases


class Teacher(Module):
    """Distils from an average of its own weights, with a weight that grows; keeps its losses."""

    def __init__(self, at_end: bool) -> None:
        super().__init__()
        self.at_end, self.count, self.outs = at_end, 0, []
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if not self.at_end:
            self.advance()
        loss = super().training_step(batch, batch_idx)
        if not self.at_end:
            self.outs.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.at_end:
            self.outs.append(outputs["loss"].detach())
            self.advance()

    def advance(self) -> None:
        self.count += 1
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        apart = (self.model(batch["input_ids"]) - 2 * self.teacher(batch["input_ids"]))[:, :-1].square().mean(-1)
        real = batch["labels"][:, 1:] != -100
        return super().loss(batch) + min(1.0, self.count / 4) * (apart * real).sum() / real.sum()


def test_lightning() -> None:
    batches = ragged_batches(4)
    with pytest.raises(GradientCheckError, match=r"into 'count', 'outs', 'teacher\.embedding\.weight'") as caught:
        fit(Teacher(at_end=False), batches, padmin())
    assert "on_train_batch_end or on_before_optimizer_step" in str(caught.value)
    stock, ours = Teacher(at_end=True), Teacher(at_end=True)
    fit(stock, batches), fit(ours, batches, padmin())
    # Negative control: without the check it is another training.
    split, as_it_came = Teacher(at_end=False), Teacher(at_end=False)
    fit(split, batches, padmin(check="off")), fit(as_it_came, batches)
    assert support.relative(split.gradients[-1], as_it_came.gradients[-1]) > 0.01
    assert ours.count == stock.count == 4
    for mine, theirs in zip(ours.gradients + ours.outs, stock.gradients + stock.outs, strict=True):
        assert support.relative(mine, theirs) < 1e-9


def test_spectral_norm_of_old() -> None:
    class Old(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model.head = nn.utils.spectral_norm(self.model.head)

    with pytest.raises(GradientCheckError, match=r"writes into .*model.head.weight_[uv]'"):
        fit(Old(), ragged_batches(1), padmin())


class Figures:
    """Keeps figures of its own, and one among those of the library."""

    keeps_means = False

    def __init__(self, *args: Any, **options: Any) -> None:
        self.kept: dict[str, Any] = {"tokens": 0, "means": []}
        super().__init__(*args, **options)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        self.kept["tokens"] += int((inputs["labels"] != -100).sum())
        self.state.total_flos += 1
        loss = super().compute_loss(model, inputs, *args, **options)
        if self.keeps_means:
            self.kept["means"].append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        return loss


class Stock(Figures, Trainer):
    pass


class Ours(Figures, PadMinTrainerMixin, Trainer):
    pass


class KeepsMeans(Ours):
    keeps_means = True


def test_trainer() -> None:
    with pytest.raises(GradientCheckError, match=r"writes into \"KeepsMeans.kept\['means'\]\" whenever") as caught:
        cases.train(KeepsMeans, padmin=replace(cases.BUDGET, mode="split"), num_train_epochs=1)
    assert "on_step_end of a TrainerCallback" in str(caught.value)
    stock, ours = cases.train(Stock, num_train_epochs=1), cases.train(Ours, padmin=cases.BUDGET, num_train_epochs=1)
    assert stock.trainer.kept == ours.trainer.kept
    assert stock.trainer.kept["tokens"] > 0
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        assert support.relative(mine, theirs) < 1e-4
