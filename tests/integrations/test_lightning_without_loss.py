"""Batches and rows without any loss token: a mean over none is 0/0."""

from __future__ import annotations

import pytest
import support
import torch
from support import LENGTHS, Module, fit, fit_pair, make_batch, padmin, ragged_batches, relative
from torch import Tensor

from lightning_padmin import PadMinWarning


class Masked(Module):
    """A mean over tokens whose gradient, like the loss, is 0/0 where there are none."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"])[:, :-1]
        targets, valid = batch["labels"][:, 1:], batch["labels"][:, 1:] != -100
        losses = -logits.log_softmax(-1).gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0] * valid
        if self.how == "token-mean":
            return losses.sum() / valid.sum()
        return (losses.sum(1) / valid.sum(1)).mean() if self.how == "row-mean" else losses.sum()


def without_loss(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"labels": torch.full_like(batch["labels"], -100)}


@pytest.mark.parametrize("how", ["token-mean", "row-mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_without_labels_moves_nothing(how: str, accumulate: int) -> None:
    first, second, third, fourth = ragged_batches(4)
    module, plain = Masked(how), Masked(how)
    batches = [first, without_loss(second), third, without_loss(fourth)]
    with pytest.warns(PadMinWarning) as caught:
        fit(module, batches, padmin(loss_reduction=how), accumulate_grad_batches=accumulate)
    told = [str(warning.message) for warning in caught if warning.category is PadMinWarning]
    assert told == ["a batch has no loss tokens at all: its loss is 0 and it moves nothing"]
    fit(plain, [first, third])
    assert support.flat_parameters(module).isfinite().all()
    if accumulate == 1:
        zeros = torch.zeros_like(module.gradients[0])
        assert torch.equal(module.gradients[1], zeros)
        assert torch.equal(module.gradients[3], zeros)
        assert [float(loss) for loss in module.losses][1::2] == [0.0, 0.0]
        assert relative(support.flat_parameters(module), support.flat_parameters(plain)) <= 1e-12
    else:
        assert relative(module.gradients[0], plain.gradients[0] / 2) <= 1e-12


def test_without_us_such_a_batch_ruins_the_parameters() -> None:
    first, second, third = ragged_batches(3)
    module = Masked()
    fit(module, [first, without_loss(second), third])
    assert support.flat_parameters(module.model.head).isnan().all()


def test_rows_without_labels_ride_along() -> None:
    """None of them makes up a micro-batch of its own, whose mean would be 0/0."""
    batches = [make_batch(LENGTHS, seed=seed, without_loss=(3, 4, 8)) for seed in range(2)]
    pair = fit_pair(Masked, batches)
    assert pair.gradient <= 1e-12
    assert all(loss.isfinite() for loss in pair.split.losses)


@pytest.mark.usefixtures("equal_weights")
def test_rows_without_labels_would_count_if_weights_were_equal() -> None:
    batches = [make_batch(LENGTHS, seed=seed, without_loss=(3, 4, 8)) for seed in range(2)]
    assert fit_pair(Masked, batches).gradient > 0.1
