"""Joint mode: losses and logged values that depend on outputs where rows have padding are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import support
import torch
from torch import Tensor, nn

from lightning_padmin import PaddedForward, PadMinConfig
from lightning_padmin.batch import infer_schema, measure
from lightning_padmin.errors import GradientCheckError
from lightning_padmin.forward import chunked
from lightning_padmin.runtime import padding_filled
from lightning_padmin.verification import Outcome, check_gradients

LENGTHS = [3, 9, 5, 7]
SMALL = 1e-4  # so little of a term that no gradient shows it by the limit


class Model(nn.Module):
    """Hidden states and logits, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = support.TinyLM()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.inner.rnn(self.inner.embedding(input_ids))[0]
        return {"last_hidden_state": hidden, "logits": self.inner.head(hidden)}


class Step:
    """Token losses, and a further use of outputs: of those of real tokens, or of all."""

    def __init__(self, use: str = "nothing", is_masked: bool = True) -> None:
        torch.manual_seed(0)
        self.model, self.use, self.is_masked = nn.ModuleDict({"lm": Model()}).double(), use, is_masked
        self.logged: dict[str, Any] = {}
        self.count = 0

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        self.count += 1
        mask = batch["attention_mask"]
        outputs = self.model["lm"](input_ids=batch["input_ids"], attention_mask=mask)
        logits, weight = outputs["logits"], mask.double() if self.is_masked else torch.ones_like(mask).double()
        loss = support.reduce_loss(support.token_losses(logits, batch["labels"]), batch["labels"], "token-mean")
        if self.use == "z-loss":
            loss = loss + SMALL * (logits.logsumexp(-1).square() * weight).sum() / weight.sum()
        if self.use == "pooled":
            hidden = (outputs["last_hidden_state"] * weight[..., None]).sum(1) / weight.sum(1)[:, None]
            loss = loss + SMALL * hidden.square().mean()
        if self.use == "accuracy":
            hits = (logits.argmax(-1) == batch["input_ids"]).double()
            self.logged = {"accuracy": (hits * weight).sum() / weight.sum(), "words": "no number"}
        if self.use == "random":
            loss = loss * torch.rand(())
        return loss


def check(step: Step, lengths: list[int] = LENGTHS, left: list[int] | None = None, **options: Any) -> Outcome:
    config = PadMinConfig(token_budget=10, **options)
    batch = support.make_batch(lengths, left=left)
    schema = infer_schema(batch, config.fields, pad_token_id=0)
    table = measure(batch, schema)
    joint: Callable[[], AbstractContextManager[Any]] = partial(chunked, dict(step.model.items()), config)
    outcome = check_gradients(step, batch, schema, table, config, step.model, joint=joint, logged=lambda: step.logged)
    assert outcome is not None
    return outcome


@pytest.mark.parametrize(("use", "names"), [("z-loss", "the loss"), ("pooled", "the loss"), ("accuracy", "'accuracy'")])
def test_what_reads_outputs_of_padding_is_named(use: str, names: str) -> None:
    for left in (None, [0, 2, 1, 3]):
        if left is None:  # a recurrent model takes left padding in, which is another finding
            outcome = check(Step(use), left=left)
            assert outcome.told
            assert outcome.difference < 1e-9
        with pytest.raises(GradientCheckError, match=f"{names}.* of the step depends on outputs where rows have"):
            check(Step(use, is_masked=False), left=left)


def test_a_batch_without_padding_needs_no_further_pass() -> None:
    step, padded = Step("z-loss", is_masked=False), Step("z-loss")
    assert check(step, [9] * 4).told
    assert check(padded).told
    assert padded.count == step.count + 1


def test_what_moves_by_itself_is_not_taken_for_padding() -> None:
    assert check(Step("random")).told  # random numbers are the same in each pass


def test_what_stands_at_padding() -> None:
    """Values of real tokens, finite, without a gradient; and zeros as soon as nobody asks."""
    model = Model().double()
    padded = PaddedForward(model, PadMinConfig(token_budget=10))
    batch = support.make_batch(LENGTHS, left=[1, 0, 0, 2])
    inputs, real = {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["attention_mask"] != 0
    plain = padded(**inputs)
    with padding_filled():
        filled = padded(**inputs)
    for name, wanted in plain.items():
        assert torch.equal(filled[name][real], wanted[real])
        assert (wanted[~real] == 0).all()
        rows = {tuple(row) for row in wanted[real].tolist()}
        assert {tuple(row) for row in filled[name][~real].tolist()} <= rows
    head = model.inner.head.weight
    (gradient,) = torch.autograd.grad((filled["logits"] * ~real[..., None]).sum(), [head])
    assert (gradient == 0).all()
    assert (padded(**inputs)["logits"][~real] == 0).all()
