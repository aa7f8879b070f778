"""Numbers of columns and padding that is read: what the first-batch check says of left-padded batches, and does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import support
import torch
from support import Module, fit, padmin, relative
from torch import Tensor, nn

from lightning_padmin.errors import BatchError, GradientCheckError, PadMinWarning
from lightning_padmin.verification import gradient_check

LENGTHS = (18, 11, 15, 7, 12, 9)
BUDGET = 40
Entries = Callable[[list[int], list[int]], dict[str, Any]]


class Pointwise(nn.Module):
    """Each token by itself, so that padding changes nothing in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(support.VOCABULARY, 8)
        self.head = nn.Linear(8, support.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids))


class Spans(Module):
    """A mean over rows of a loss that looks at columns which the batch names."""

    def __init__(
        self, loss: Callable[[Tensor, dict[str, Any]], Tensor], make: Callable[[], nn.Module] = Pointwise
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = make().double()
        self.function = loss

    def loss(self, batch: dict[str, Any]) -> Tensor:
        logits, ids = self.model(batch["input_ids"]), batch["input_ids"]
        losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return self.function(nn.functional.pad(losses, (1, 0)), batch)  # (B, L), each at its target


def from_start(losses: Tensor, batch: dict[str, Any]) -> Tensor:
    columns = torch.arange(losses.shape[1])
    chosen = (columns >= batch["response_start"][:, None]) & (batch["attention_mask"] == 1)
    return ((losses * chosen).sum(1) / chosen.sum(1)).mean()


def inside_of_span(losses: Tensor, batch: dict[str, Any]) -> Tensor:
    columns = torch.arange(losses.shape[1])
    chosen = (columns >= batch["begin"][:, None]) & (columns < batch["end"][:, None])
    return ((losses * chosen).sum(1) / chosen.sum(1)).mean()


def at_positions(losses: Tensor, batch: dict[str, Any]) -> Tensor:
    at = batch["mask_pos"]
    return ((losses.gather(1, at.clamp(min=0)) * (at >= 0)).sum(1) / (at >= 0).sum(1)).mean()


KINDS: dict[str, tuple[Any, Entries, str]] = {
    "start": (from_start, lambda n, left: {"response_start": torch.tensor(left) + 4}, "'response_start': 'column'"),
    "span": (
        inside_of_span,
        lambda n, left: {
            "begin": torch.tensor(left) + 3,
            "end": torch.tensor([length + first for length, first in zip(n, left, strict=True)]),
            "topic": torch.arange(len(n)) % 3,  # no columns: outside of the rows
        },
        "'begin': 'column', 'end': 'column'",
    ),
    "positions": (
        at_positions,
        lambda n, left: {
            "mask_pos": torch.tensor([[f + 2, f + 5, -1 if k % 2 else f + 6] for k, f in enumerate(left)])
        },
        "'mask_pos': 'column'",
    ),
}


def batches_of(entries: Entries, side: str, count: int = 2) -> list[dict[str, Any]]:
    made = []
    for seed in range(count):
        left = [max(LENGTHS) - n if side == "left" else 0 for n in LENGTHS]
        batch = support.make_batch(LENGTHS, left=left, seed=seed)
        del batch["labels"]
        made.append(batch | entries(list(LENGTHS), left))
    return made


def declared(text: str) -> dict[str, str]:
    return {part.split("'")[1]: "column" for part in text.split(", ")}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("budget", [BUDGET, 200])
def test_columns_that_nobody_declared_are_named_and_declared_they_move(name: str, budget: int) -> None:
    loss, entries, advice = KINDS[name]
    left, right = batches_of(entries, "left"), batches_of(entries, "right")
    oracle, stock = Spans(loss), Spans(loss)
    fit(oracle, right)
    fit(stock, left)
    options = {"token_budget": budget, "loss_reduction": "row-mean"}
    with pytest.raises(GradientCheckError, match=r"declare batch_schema=\{" + advice):
        fit(Spans(loss), left, padmin(**options))
    ours = Spans(loss)
    fit(ours, left, padmin(**options, batch_schema=declared(advice)))
    fit(unmoved := Spans(loss), right, padmin(**options))
    for mine, theirs, other in zip(ours.gradients, stock.gradients, unmoved.gradients, strict=True):
        assert relative(mine, theirs) <= 1e-12
        assert relative(other, theirs) <= 1e-12
    assert relative(support.flat_parameters(ours), support.flat_parameters(oracle)) <= 1e-12


def test_left_where_they_are_they_would_train_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    loss, entries, _ = KINDS["start"]
    left = batches_of(entries, "left")
    stock, ours = Spans(loss), Spans(loss)
    fit(stock, left)
    fit(ours, left, padmin(token_budget=BUDGET, loss_reduction="row-mean", check="off"))
    assert not relative(ours.gradients[0], stock.gradients[0]) <= 0.3


def test_names_of_transformers_need_no_declaration() -> None:
    """Also those that do not mean columns: numbers that count from the row's first token."""

    def named(losses: Tensor, batch: dict[str, Any]) -> Tensor:
        return losses.gather(1, batch["cls_index"][:, None]).mean()

    def relative_to_row(losses: Tensor, batch: dict[str, Any]) -> Tensor:
        return named(losses, batch | {"cls_index": batch["cls_index"] + batch["attention_mask"].argmax(1)})

    at = batches_of(lambda n, left: {"cls_index": torch.tensor(left) + 5}, "left")
    stock, ours = Spans(named), Spans(named)
    fit(stock, at)
    fit(ours, at, padmin(token_budget=BUDGET, loss_reduction="row-mean"))
    assert relative(ours.gradients[1], stock.gradients[1]) <= 1e-12
    short = batches_of(lambda n, left: {"cls_index": torch.tensor([5] * len(n))}, "left")
    with pytest.raises(BatchError, match=r"'cls_index' of row 1 is 5.*batch_schema=\{'cls_index': 'row'\}"):
        fit(Spans(relative_to_row), short, padmin(token_budget=BUDGET, loss_reduction="row-mean"))
    inside = batches_of(lambda n, left: {"cls_index": torch.tensor([5] * len(n))}, "left")
    for batch in inside:  # rows of 14 to 18, so that 5 lies in each of them
        keep = [0, 2]
        batch.update({name: value[keep] for name, value in batch.items()})
    with pytest.raises(GradientCheckError, match=r"declare batch_schema=\{'cls_index': 'row'\}"):
        fit(Spans(relative_to_row), inside, padmin(token_budget=BUDGET, loss_reduction="row-mean"))
    stock, ours = Spans(relative_to_row), Spans(relative_to_row)
    fit(stock, short)
    options = {"token_budget": BUDGET, "loss_reduction": "row-mean", "batch_schema": {"cls_index": "row"}}
    fit(ours, short, padmin(**options))
    assert relative(ours.gradients[1], stock.gradients[1]) <= 1e-12


class Forward(nn.Module):
    """A recurrence: left padding changes rows, right padding does not."""

    def __init__(self, bidirectional: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(support.VOCABULARY, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(16 if bidirectional else 8, support.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(input_ids))[0])


class Group(nn.Module):
    """A normalisation over time, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(support.VOCABULARY, 8), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, support.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2))


def test_where_the_model_reads_padding_too_it_cannot_be_told_until_it_is_declared() -> None:
    loss, entries, advice = KINDS["start"]
    left, right = batches_of(entries, "left"), batches_of(entries, "right")
    options = {"token_budget": BUDGET, "loss_reduction": "row-mean"}
    with pytest.raises(GradientCheckError, match=r"cannot be told: they may be in 'response_start'\. Declare each"):
        fit(Spans(loss, Forward), left, padmin(**options))
    oracle, ours = Spans(loss, Forward), Spans(loss, Forward)
    fit(oracle, right)
    with pytest.warns(PadMinWarning, match="Rolled, each row is trained as it is without padding"):
        fit(ours, left, padmin(**options, batch_schema=declared(advice)))
    assert relative(ours.gradients[1], oracle.gradients[1]) <= 1e-12


class LastToken(Module):
    """Learns from each row's last tokens; the batch also says which sample of the data set a row is."""

    reads: bool = False

    def __init__(self) -> None:
        super().__init__("row-mean")
        self.model = Forward().double()
        self.sources = nn.Embedding(64, support.VOCABULARY, dtype=torch.float64)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"])
        if self.reads:
            logits = logits + self.sources(batch["sample"])[:, None]
        return support.reduce_loss(support.token_losses(logits, batch["labels"]), batch["labels"], "row-mean")


@pytest.mark.parametrize("shape", [(), (2,)])
def test_entries_that_nothing_reads_need_no_declaration(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, width = (8, 6, 7, 9, 5, 8), 12
    batches = []
    for k in range(2):
        batch = support.make_batch(lengths, seed=k, left=[width - n for n in lengths])
        batch["sample"] = torch.full((len(lengths), *shape), 9 + k)
        batches.append(batch)
    options = {"token_budget": 24, "loss_reduction": "row-mean"}
    ours, alone = LastToken(), LastToken()
    with pytest.warns(PadMinWarning, match="Rolled, each row is trained as it is without padding"):
        fit(ours, batches, padmin(**options))
    fit(alone, [support.make_batch(lengths, seed=k, width=width) for k in range(2)])
    assert relative(ours.gradients[0], alone.gradients[0]) <= 1e-12
    monkeypatch.setattr(LastToken, "reads", True)  # control: what is read cannot be told
    if not shape:
        with pytest.raises(GradientCheckError, match="cannot be told: they may be in 'sample'"):
            fit(LastToken(), batches, padmin(**options))


def over_mask(losses: Tensor, batch: dict[str, Any]) -> Tensor:
    mask = batch["attention_mask"].clone()
    mask[torch.arange(len(mask)), mask.argmax(1)] = 0
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def over_width(losses: Tensor, batch: dict[str, Any]) -> Tensor:
    return losses.mean()


READS = {
    "backward recurrence": (lambda: Forward(bidirectional=True), over_mask),
    "norm over time": (Group, over_mask),
    "mean over the width": (Pointwise, over_width),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize(("lengths", "side"), [(LENGTHS, "left"), (LENGTHS, "right"), ((6, 6, 6, 6, 18), "right")])
def test_padding_that_is_read_is_refused_by_name(name: str, lengths: tuple[int, ...], side: str) -> None:
    """Also where the few rows that are checked are all of one length, and the budget would leave their padding out."""
    make, loss = READS[name]
    left = [max(lengths) - n if side == "left" else 0 for n in lengths]
    batch = support.make_batch(lengths, left=left)
    del batch["labels"]
    with pytest.raises(GradientCheckError, match="the model or the loss reads padding"):
        fit(Spans(loss, make), [batch], padmin(token_budget=30, loss_reduction="row-mean"))


def test_the_budget_would_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the row that is run with its padding and without, nothing is found."""
    batch = support.make_batch((6, 6, 6, 6, 18))
    del batch["labels"]
    monkeypatch.setattr(gradient_check._Check, "_without_padding", lambda self, judged: judged)
    module, stock = (Spans(over_mask, Group) for _ in range(2))
    fit(module, [batch], padmin(token_budget=30, loss_reduction="row-mean"))
    fit(stock, [batch])
    assert relative(module.gradients[0], stock.gradients[0]) > 0.01


@pytest.mark.parametrize("make", [Pointwise, Forward])
@pytest.mark.parametrize("budget", [30, 60, 500])
def test_no_false_alarm(make: Callable[[], nn.Module], budget: int) -> None:
    """Integers of rows that are no columns, lists of them, and columns behind nothing but right padding."""
    for side in ("left", "right"):
        entries: Entries = lambda n, left: {"id": torch.arange(len(n)) + 1000, "label": [1] * len(n)}  # noqa: E731
        batches = batches_of(entries, side, 1)
        module = Spans(over_mask, make)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(module, batches, padmin(token_budget=budget, loss_reduction="row-mean"))
        told = [str(each.message) for each in caught if each.category is PadMinWarning]
        assert len([each for each in told if "rolling left padding" in each]) == int(make is Forward and side == "left")
        assert len(module.gradients) == 1
