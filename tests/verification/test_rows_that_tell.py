"""Losses that only some rows give away: the check runs these rows, in cuts that tell.

The oracle is the un-split batch's own gradient: what a step is refused for is shown to differ from it under the plan
that training would follow, and what is accepted is shown to be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import support
import torch
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.batch import infer_schema, measure
from lightning_padmin.errors import GradientCheckError
from lightning_padmin.microbatching import MicroBatcher
from lightning_padmin.verification import Outcome, check_gradients

Batch = dict[str, Any]
Loss = Callable[[nn.Module, Batch], Tensor]
LENGTHS = [21, 17, 9, 8, 7, 7, 6, 6, 5, 5, 4, 3]
BUDGET = 48
NONE = -100


class Model(nn.Module):
    """Token states of a causal model, and heads."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(support.VOCABULARY, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.head, self.classes = nn.Linear(hidden, support.VOCABULARY), nn.Linear(hidden, 3)
        self.double()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.rnn(self.embedding(input_ids))[0]

    def last(self, batch: Batch) -> Tensor:
        """(B, 3) from each row's last state."""
        hidden = self(batch["input_ids"])
        return self.classes(hidden[torch.arange(len(hidden)), batch["attention_mask"].sum(1) - 1])

    def losses(self, batch: Batch) -> Tensor:
        """(B, L - 1) of tokens."""
        return support.token_losses(self.head(self(batch["input_ids"])), batch["labels"])


def gradient(model: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    found = torch.autograd.grad(loss(model, batch), list(model.parameters()), allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]
    return torch.cat([each.flatten() for each in flat])


def split_is_off(loss: Loss, batch: Batch, **options: Any) -> float:
    """By how much gradients of the plan differ from those of the batch."""
    model, config = Model(), PadMinConfig(**({"token_budget": BUDGET} | options))
    whole = gradient(model, loss, batch)
    micros = MicroBatcher(config).prepare(batch)
    assert len(micros) > 1
    found = sum(micro.weight * gradient(model, loss, micro.batch) for micro in micros)
    assert isinstance(found, Tensor)
    return float((found - whole).abs().max() / whole.abs().max())


def check(loss: Loss, batch: Batch, *, more: dict[str, Any] | None = None, **options: Any) -> Outcome | None:
    config = PadMinConfig(**({"token_budget": BUDGET} | options))
    schema = infer_schema(batch, config.fields, pad_token_id=0)
    table = measure(batch, schema, loss_reduction=config.loss_reduction, label_shift=config.label_shift)
    model = Model()
    return check_gradients(lambda each: loss(model, each), batch, schema, table, config, model, **(more or {}))


def refused(loss: Loss, batch: Batch, match: str = "differ", **options: Any) -> None:
    assert split_is_off(loss, batch, **options) > 1e-3
    with pytest.raises(GradientCheckError, match=match):
        check(loss, batch, **options)


def accepted(loss: Loss, batch: Batch, **options: Any) -> Outcome:
    assert split_is_off(loss, batch, **options) < 1e-9
    outcome = check(loss, batch, **options)
    assert outcome is not None
    assert outcome.told, outcome.words
    return outcome


def rows_with(labels: list[int], lengths: list[int] = LENGTHS, seed: int = 0, **more: Any) -> Batch:
    """Rows with one label each."""
    return support.make_batch(lengths, seed=seed) | {"labels": torch.tensor(labels)} | more


def by_class(weights: list[float] | None) -> Loss:
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    return lambda model, batch: nn.functional.cross_entropy(model.last(batch), batch["labels"], weight=weight)


@pytest.mark.parametrize("rare", [2, 5, 7, 9])
def test_class_weights(rare: int) -> None:
    """One row of a rare class, wherever it is."""
    labels = [0] * 12
    labels[rare] = 1
    accepted(by_class(None), rows_with(labels))
    accepted(by_class([0.4, 0.4, 0.4]), rows_with(labels))
    refused(by_class([0.2, 0.8, 1.0]), rows_with(labels), "weighs rows|couples rows")


def test_class_weights_of_tokens() -> None:
    """Tagging: a mean over tokens that weigh what their class says, where one row has a rare one."""

    def tags(weights: list[float]) -> Loss:
        weight = torch.tensor(weights, dtype=torch.float64)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            logits = model.classes(model(batch["input_ids"]))
            return nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], weight=weight)

        return loss

    batch = support.make_batch(LENGTHS)
    batch["labels"] = torch.where(batch["attention_mask"] == 1, 0, NONE)
    batch["labels"][6, 2:4] = 2
    accepted(tags([1.0, 1.0, 1.0]), batch, label_shift=0)
    refused(tags([1.0, 1.0, 6.0]), batch, "weighs rows|couples rows", label_shift=0)


@pytest.mark.parametrize("rare", [3, 8])
@pytest.mark.parametrize("weight", [5.0, 0.0])
def test_sample_weights(rare: int, weight: float) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        w = batch["sample_weight"]
        each = model.losses(batch).sum(1) / (batch["labels"][:, 1:] != NONE).sum(1)
        return (w * each).sum() / w.sum()

    weights = torch.ones(12, dtype=torch.float64)
    batch = support.make_batch(LENGTHS, prompt=2) | {"sample_weight": weights}
    accepted(loss, batch, loss_reduction="row-mean")
    weights[rare] = weight
    refused(loss, batch, "weighs rows|couples rows", loss_reduction="row-mean")
    accepted(loss, batch, loss_reduction=lambda batch: batch["sample_weight"])


def test_rows_without_loss_that_have_a_loss_of_their_own() -> None:
    def loss(model: nn.Module, batch: Batch, share: float = 1.0) -> Tensor:
        logits, labels = model.last(batch), batch["labels"]
        has = labels >= 0
        found = logits.sum() * 0
        if has.any():
            found = found + nn.functional.cross_entropy(logits[has], labels[has])
        if (~has).any():
            found = found - share * (logits[~has].softmax(-1) * logits[~has].log_softmax(-1)).sum(-1).mean()
        return found

    for labels in ([0, NONE, 1, NONE, NONE, 2, NONE, 1, 0, 0, 1, 2], [0, 1, 1, 2, 0, 2, NONE, 1, 0, 0, 1, 2]):
        batch = rows_with(labels)
        refused(loss, batch, "couples rows|weighs rows")
        accepted(lambda model, batch: loss(model, batch, 0.0), batch)


@pytest.mark.parametrize("empty", [[1, 4, 5], [9]])
def test_means_over_rows_that_have_tokens(empty: list[int]) -> None:
    def loss(model: nn.Module, batch: Batch, all_rows: bool = False) -> Tensor:
        tokens = (batch["labels"][:, 1:] != NONE).sum(1)
        each = model.losses(batch).sum(1) / tokens.clamp(min=1)
        return each.mean() if all_rows else each.sum() / (tokens > 0).sum().clamp(min=1)

    batch = support.make_batch(LENGTHS, prompt=2, without_loss=empty)
    refused(loss, batch, "weighs rows|couples rows", loss_reduction="row-mean")
    accepted(lambda model, batch: loss(model, batch, True), batch, loss_reduction="row-mean")


def test_rows_that_are_compared_and_happen_to_be_in_one_group() -> None:
    """Rows 2i and 2i + 1, by their places and by a number that they share; and in-batch negatives."""

    def by_place(model: nn.Module, batch: Batch) -> Tensor:
        scores = model.losses(batch).sum(1)
        pairs = len(scores) // 2
        return (scores[0 : 2 * pairs : 2] - scores[1 : 2 * pairs : 2]).square().sum() / len(scores) + scores.mean()

    def by_number(model: nn.Module, batch: Batch) -> Tensor:
        scores, pair = model.losses(batch).sum(1), batch["pair"]
        same = (pair[:, None] == pair[None, :]).double()
        return (same * (scores[:, None] - scores[None, :]).square()).sum() / len(scores) + scores.mean()

    def negatives(model: nn.Module, batch: Batch) -> Tensor:
        z = model.last(batch)
        return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))

    pairs = torch.arange(10) // 2
    shuffled = support.make_batch([7, 3, 8, 5, 4, 9, 6, 5, 7, 6], prompt=2)
    refused(by_place, shuffled, "couples rows|weighs rows", loss_reduction="row-mean")
    for order in (pairs, pairs.flip(0), torch.arange(10) % 5):
        refused(by_number, shuffled | {"pair": order}, "couples rows|weighs rows", loss_reduction="row-mean")
    accepted(by_number, shuffled | {"pair": torch.arange(10)}, loss_reduction="row-mean")
    refused(negatives, shuffled, loss_reduction="row-mean")


def test_a_model_that_reads_padding_where_short_rows_have_none() -> None:
    """The shortest rows are of one length; it is longer ones that the batch pads otherwise."""

    def reads(model: nn.Module, batch: Batch) -> Tensor:
        hidden = model(batch["input_ids"])
        hidden = hidden / hidden.square().mean((1, 2), keepdim=True).sqrt()  # over all columns
        losses = support.token_losses(model.head(hidden), batch["labels"])
        return losses.sum() / (batch["labels"][:, 1:] != NONE).sum()

    for lengths in ([12, 12, 5, 5, 5, 5], [9, 9, 9, 9, 10, 9, 9, 9]):
        refused(reads, support.make_batch(lengths), token_budget=24)
        causal = lambda model, batch: model.losses(batch).sum() / (batch["labels"][:, 1:] != NONE).sum()  # noqa: E731
        accepted(causal, support.make_batch(lengths), token_budget=24)


@pytest.mark.parametrize("seed", range(3))
def test_the_hardest_tokens(seed: int) -> None:
    """More than a few rows with few tokens have."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        losses = model.losses(batch)[batch["labels"][:, 1:] != NONE]
        return losses.topk(min(24, len(losses))).values.mean()

    lengths = torch.randint(3, 18, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    refused(loss, support.make_batch(lengths, prompt=2))


def test_what_is_wanted_is_run() -> None:
    labels = [0] * 12
    labels[4] = labels[8] = 1
    batch = rows_with(labels)
    outcome = accepted(by_class(None), batch)
    assert set(outcome.rows) & {4, 8}
    assert len(outcome.rows) >= 2
    for row in (3, 9, 11):
        outcome = check(by_class(None), batch, more={"prefer": np.array([row])})
        assert outcome is not None
        assert row in outcome.rows
    batch = support.make_batch(LENGTHS, prompt=2)
    batch["kind"] = torch.arange(12)
    for kind in (5, 10):
        outcome = check(
            lambda model, batch: model.losses(batch).sum() / (batch["labels"][:, 1:] != NONE).sum(),
            batch,
            more={"wanted": [f"'kind' is {kind}"]},
            token_budget=36,
        )
        assert outcome is not None
        assert kind in outcome.rows
