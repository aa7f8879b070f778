"""Checks in the middle of a training: what the first batch cannot show is found before it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from support import Module, fit, flat_parameters, make_batch, padmin, ragged_batches, relative, token_losses
from torch import Tensor, nn

from lightning_padmin.errors import GradientCheckError

LENGTHS = (24, 20, 12, 12, 6, 6, 6, 6, 3, 2)
Check = Literal["audit", "first-batch", "off"]


class Weighted(Module):
    """Class weights per row; the first batches have one class alone."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        valid = batch["attention_mask"]
        hidden = (self.model(batch["input_ids"]) * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
        weight = torch.tensor([0.2, 0.8], dtype=hidden.dtype)
        return nn.functional.cross_entropy(hidden[:, :2], batch["labels"], weight=weight)


class WarmedUp(Module):
    """A term that couples rows, from step 4 on; its factor is 0 before."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"])
        pooled = logits.mean(1)
        coupled = nn.functional.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))
        losses = token_losses(logits, batch["labels"])
        mean = losses.sum() / (batch["labels"][:, 1:] != -100).sum()
        return mean + max(0.0, self.global_step - 3) * coupled


class PooledOverPadding(Module):
    """A mean over all columns, which is one over tokens as long as nothing is padded."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch["input_ids"]).mean(1), batch["labels"])


class OwnLossWithoutLabels(Module):
    """Rows without labels have a loss of their own; the first batches have none."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.model(batch["input_ids"])[:, 0], batch["labels"]
        loss = logits.sum() * 0
        if (labels >= 0).any():
            loss = loss + nn.functional.cross_entropy(logits[labels >= 0], labels[labels >= 0])
        if (labels < 0).any():
            loss = loss + logits[labels < 0].softmax(-1).pow(2).sum(-1).mean()
        return loss


def classes(*per_batch: list[int], lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Tensor]]:
    found = []
    for k, each in enumerate(per_batch):
        batch = make_batch(lengths, seed=k)
        batch["labels"] = torch.tensor(each)
        found.append(batch)
    return found


CASES: dict[str, tuple[type[Module], Callable[[], list[dict[str, Tensor]]], int, str]] = {
    "class": (Weighted, lambda: classes(*[[0] * 10] * 4, [0, 1, 0, 0, 1, 0, 1, 0, 0, 1]), 5, "'labels' is 1"),
    "warm-up": (WarmedUp, lambda: ragged_batches(7), 5, "a factor .* that was 0"),
    "padding": (
        PooledOverPadding,
        lambda: (
            classes(*[[k % 5 for k in range(10)]] * 4, lengths=(12,) * 10)
            + classes([k % 5 for k in range(10)], lengths=LENGTHS)
        ),
        5,
        "padding behind rows",
    ),
    "rows without loss": (
        OwnLossWithoutLabels,
        lambda: classes(*[[k % 3 for k in range(10)]] * 4, [0, 1, -100, 2, -100, 0, 1, -100, 2, 0]),
        5,
        "rows without loss",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_comes_later_is_refused_before_it_is_trained_on(name: str) -> None:
    kind, batches, step, facet = CASES[name]
    reduction = "token-mean" if name in ("warm-up", "rows without loss") else "row-mean"
    plain = kind()
    fit(plain, batches())
    module = kind()
    with pytest.raises(GradientCheckError, match=rf"audit of step {step} \(the first with .*{facet}") as caught:
        fit(module, batches(), padmin(loss_reduction=reduction))
    assert "not undone" in str(caught.value) or f"step {step - 1} had passed" in str(caught.value)
    assert len(module.gradients) == step - 1  # steps before were stock's, this one was not taken
    assert all(relative(a, b) < 1e-10 for a, b in zip(module.gradients, plain.gradients, strict=False))
    # The control: looked at once, it trains something else.
    silent = kind()
    fit(silent, batches(), padmin(loss_reduction=reduction, check="first-batch"))
    assert relative(silent.gradients[step - 1], plain.gradients[step - 1]) > 1e-3


def test_numbers_of_rows_leave_room_for_what_tells() -> None:
    """Each batch has other values of an entry, as few as classes are; a rare class comes when there were many."""
    rows, count = 12, 9
    batches = classes(*[[0] * rows] * count, [0, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0], lengths=(*LENGTHS, 2, 2))
    for k, batch in enumerate(batches):
        batch["index"] = torch.arange(k * rows, (k + 1) * rows)
    module, callback = Weighted(), padmin(loss_reduction="row-mean")
    with pytest.raises(GradientCheckError, match=rf"audit of step {count + 1} \(the first with 'labels' is 1"):
        fit(module, batches, callback)
    assert len(module.gradients) == count
    assert callback.state_dict()["audits"][-1]["audits"] <= 5  # numbers of rows cause two or three at most


def test_another_loss_in_a_second_fit_is_found() -> None:
    callback, batches = padmin(), ragged_batches(2)
    module = Module()
    fit(module, batches, callback)
    module.how = "row-mean"
    with pytest.raises(GradientCheckError, match="loss_reduction='row-mean'"):
        fit(module, batches, callback)


@pytest.mark.parametrize("check", ["audit", "off"])
def test_audits_leave_no_trace(check: Check) -> None:
    """Dropout, gradients over several batches, clipping: to the bit as without any check."""

    calls = [0]

    class Dropping(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            calls[0] += 1
            logits = nn.functional.dropout(self.model(batch["input_ids"]), 0.2)
            valid = (batch["labels"][:, 1:] != -100).sum()
            return token_losses(logits, batch["labels"]).sum() / valid

    def parameters(how: Check) -> tuple[Tensor, int]:
        module = Dropping()
        calls[0] = 0
        torch.manual_seed(5)
        callback = padmin(check=how, audit_every=1)
        options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        fit(module, ragged_batches(6), callback, **options)
        return flat_parameters(module), calls[0]

    (found, several), (wanted, least) = parameters(check), parameters("off")
    assert torch.equal(found, wanted)
    assert (several > least) is (check == "audit")
