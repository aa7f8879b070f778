"""Reduced precision: as near to the float64 gradient as un-split training is, and the same decisions of the scaler."""

from __future__ import annotations

from typing import Any

import pytest
import support
import torch
from lightning.pytorch.plugins import MixedPrecision
from support import Module, fit, fit_pair, ragged_batches, relative
from torch import Tensor, nn
from torch.amp import GradScaler


class FeedForward(Module):
    """In place of the GRU, which has no half precision on the CPU, a causal mean over earlier tokens."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype=dtype)
        self.model.rnn = nn.Linear(12, 12).to(dtype)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        states = self.model.embedding(batch["input_ids"])
        count = torch.arange(1, states.shape[1] + 1, dtype=states.dtype)[:, None]
        logits = self.model.head(torch.tanh(self.model.rnn(states + states.cumsum(1) / count)))
        losses = support.token_losses(logits.to(states.dtype), batch["labels"])
        return support.reduce_loss(losses, batch["labels"], self.how)


@pytest.fixture(scope="module")
def truth() -> Tensor:
    """The first gradient in float64."""
    module = FeedForward(torch.float64)
    fit(module, ragged_batches(1))
    return module.gradients[0]


@pytest.mark.parametrize(
    ("precision", "floor"), [("32-true", 1e-8), ("bf16-mixed", 1e-4), ("bf16-true", 1e-4), ("16-true", 1e-5)]
)
def test_as_near_to_float64_as_un_split(precision: str, floor: float, truth: Tensor) -> None:
    pair = fit_pair(FeedForward, ragged_batches(1), precision=precision)
    split, plain = relative(pair.split.gradients[0], truth), relative(pair.plain.gradients[0], truth)
    assert plain > floor, "this precision is not what it says"
    assert split <= 2 * plain


@pytest.mark.usefixtures("equal_weights")
def test_weights_of_one_over_k_are_far_from_float64(truth: Tensor) -> None:
    pair = fit_pair(FeedForward, ragged_batches(1), precision="bf16-mixed")
    assert relative(pair.split.gradients[0], truth) > 10 * relative(pair.plain.gradients[0], truth)


class Scales(FeedForward):
    """The loss scale after each batch, and whether the batch left the parameters as they were.

    A batch whose rows are marked as poisoned has an infinite gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[float, bool]] = []
        self.before = torch.zeros(0)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) * (torch.inf if batch["poisoned"].any() else 1.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = support.flat_parameters(self.model)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        scaler = self.trainer.precision_plugin.scaler
        self.history.append((scaler.get_scale(), torch.equal(self.before, support.flat_parameters(self.model))))


# Row 9, two tokens long, is in the last micro-batch; row 0, the longest, in the first.
@pytest.mark.parametrize("row", [0, 9])
def test_the_scaler_of_half_precision_decides_the_same(row: int) -> None:
    batches = [support.make_batch(support.LENGTHS, seed=seed) for seed in range(10)]
    for index, batch in enumerate(batches):
        batch["poisoned"] = torch.zeros(10, dtype=torch.bool)
        batch["poisoned"][row] = index in (2, 7)

    def fitted(*callbacks: Any) -> Scales:
        module = Scales()
        scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        fit(module, batches, *callbacks, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], gradient_clip_val=1.0)
        return module

    callback = support.padmin()
    plain, split = fitted(), fitted(callback)
    assert callback.stats.micro_batches == 50
    assert split.history == plain.history
    assert [index for index, (_, skipped) in enumerate(split.history) if skipped] == [2, 7]
    assert [scale / 2**8 for scale, _ in split.history] == [1, 2, 1, 1, 2, 2, 4, 2, 2, 4]
    differences = [relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True) if b.isfinite().all()]
    assert len(differences) == 8
    assert max(differences) < 0.01


def test_half_precision_in_an_accumulation_window() -> None:
    """Two batches to a step; the first and the third window are skipped, un-split and split."""
    batches = [batch | {"poisoned": torch.zeros(10, dtype=torch.bool)} for batch in ragged_batches(6)]
    for index in (1, 4):
        batches[index]["poisoned"][5] = True

    def fitted(*callbacks: Any) -> Scales:
        module = Scales()
        plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**8))
        fit(module, batches, *callbacks, plugins=[plugin], accumulate_grad_batches=2)
        return module

    plain, split = fitted(), fitted(support.padmin())
    assert split.history == plain.history
    assert [skipped for _, skipped in split.history] == [True, True, True, False, True, True]
    assert split.zero_grads == plain.zero_grads == 3
    assert relative(split.gradients[1], plain.gradients[1]) < 0.01
