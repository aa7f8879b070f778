"""Which kind of loss: the same for every batch of a training, another when the training changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_padmin.verification import fingerprint, what_changed

HIDDEN, CLASSES = 8, 11


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


class Net(nn.Module):
    """A body and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES), nn.Linear(HIDDEN, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, rows: int = 4, width: int = 6) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, (N, C) shifted logits, (N,) labels with some of -100."""
        hidden = self.body(torch.randn(rows, width, HIDDEN)).tanh()
        labels = torch.randint(0, CLASSES, (rows, width))
        labels[torch.rand(rows, width) < 0.2] = -100
        labels[:, 1] = 1
        return hidden, self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def ce(net: Net, rows: int, width: int, **options: Any) -> Tensor:
    _, logits, labels = net(rows, width)
    return F.cross_entropy(logits, labels, **options)


def pairs(net: Net, rows: int, width: int) -> Tensor:
    pooled = F.normalize(net(rows, width)[0].mean(1), dim=-1)
    return F.cross_entropy(pooled @ pooled.T * net.scale, torch.arange(rows))


def rows_of(net: Net, rows: int, width: int) -> Tensor:
    _, logits, labels = net(rows, width)
    return F.cross_entropy(logits, labels, reduction="none")


Loss = Callable[[Net, int, int], Tensor]


def flooding(level: float) -> Loss:
    return lambda net, rows, width: (ce(net, rows, width) - level).abs() + level


def hard_tokens(most: int) -> Loss:
    def loss(net: Net, rows: int, width: int) -> Tensor:
        losses = rows_of(net, rows, width)
        return losses.topk(min(most, len(losses))).values.mean()

    return loss


def focal(gamma: float | Tensor) -> Loss:
    def loss(net: Net, rows: int, width: int) -> Tensor:
        losses = rows_of(net, rows, width)
        return ((1 - (-losses).exp()) ** gamma * losses).mean()

    return loss


def terms(net: Net, count: int, factor: float = 1.0) -> Tensor:
    return torch.stack([ce(net, 3, 4) * factor for _ in range(count)]).sum()


def policy(clip: bool = True, beta: float = 0.0, delta: float | None = None) -> Loss:
    def loss(net: Net, rows: int, width: int) -> Tensor:
        logps = -rows_of(net, rows, width).view(rows, -1)
        ratio = (logps - logps.detach()).exp()
        if delta is not None:
            ratio = ratio.clamp(max=delta)
        advantages = torch.randn(rows, 1)
        objective = ratio * advantages
        if clip:
            objective = torch.min(objective, ratio.clamp(0.8, 1.2) * advantages)
        mask = (torch.rand_like(logps) < 0.8).float()
        per_token = -objective
        if beta:
            reference = logps.detach() + 0.1
            per_token = per_token + beta * ((reference - logps).exp() - (reference - logps) - 1)
        return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()

    return loss


COEFFICIENT = torch.tensor([0.0])
SAME: dict[str, Loss] = {
    "cross entropy": ce,
    "label smoothing": lambda *a: ce(*a, label_smoothing=0.1),
    "pairs": pairs,
    "with pairs": lambda *a: ce(*a) + 0.1 * pairs(*a),
    "annealing": lambda *a: ce(*a) + random.choice([0.1, 0.2, 1.0, 3.0]) * pairs(*a),
    "annealing, a tensor": lambda *a: ce(*a) + torch.rand(()).add(0.1) * pairs(*a),
    "flooding": flooding(0.1),
    "hard tokens": hard_tokens(3),
    "focal": lambda *a: focal(random.choice([0.5, 2.0, 3.0]))(*a),
    "policy": policy(beta=0.1, delta=2.0),
    "rows in a loop": lambda net, rows, width: sum((ce(net, 2, width) for _ in range(rows)), start=torch.zeros(())),
    "stacked rows": lambda net, rows, width: terms(net, rows + 30 * (width % 2)),
    "divided by tokens": lambda net, rows, width: rows_of(net, rows, width).sum() / torch.tensor(rows * width),
    "per row": lambda net, rows, width: (rows_of(net, rows, width) * torch.randint(0, 2, (rows * (width - 1),))).mean(),
    "penalty": lambda *a: ce(*a) + 0.01 * sum(p.pow(2).sum() for p in a[0].parameters()),
}


def keys(loss: Loss, net: Net, batches: Iterable[tuple[int, int]]) -> set[str]:
    return {fingerprint(loss(net, *batch)).key for batch in batches}


@pytest.mark.parametrize("name", SAME)
def test_another_batch_is_the_same_loss(name: str) -> None:
    batches = [(random.randint(2, 9), random.randint(3, 12)) for _ in range(12 if name == "stacked rows" else 100)]
    assert len(keys(SAME[name], Net(), batches)) == 1


def test_kinds_differ_from_each_other() -> None:
    net, same = Net(), {("with pairs", "annealing"), ("with pairs", "annealing, a tensor")}
    found = {name: fingerprint(loss(net, 4, 6)).key for name, loss in SAME.items()}
    assert len(set(found.values())) >= len(found) - len(same) - 1


CHANGES: dict[str, tuple[Loss, Loss, str]] = {
    "a coefficient leaves 0": (
        lambda *a: ce(*a) + 0.0 * pairs(*a),
        lambda *a: ce(*a) + 0.1 * pairs(*a),
        "MulBackward0 of NllLossBackward0 with a factor (other) that was 0",
    ),
    "one in a tensor": (
        lambda *a: ce(*a) + torch.tensor(0.0) * pairs(*a),
        lambda *a: ce(*a) + torch.tensor(0.1) * pairs(*a),
        "that was 0",
    ),
    "one in a tensor of one entry": (
        lambda *a: (ce(*a) + torch.zeros(1) * pairs(*a)).sum(),
        lambda *a: (ce(*a) + torch.ones(1) * pairs(*a)).sum(),
        "that was 0",
    ),
    "one that is yes or no": (
        lambda *a: ce(*a) + torch.tensor(False) * pairs(*a),
        lambda *a: ce(*a) + torch.tensor(True) * pairs(*a),
        "that was 0",
    ),
    "in torch.add": (
        lambda *a: torch.add(ce(*a), pairs(*a), alpha=0.0),
        lambda *a: torch.add(ce(*a), pairs(*a), alpha=0.3),
        "that was 0",
    ),
    "in torch.lerp": (
        lambda *a: torch.lerp(ce(*a), pairs(*a), 0.0),
        lambda *a: torch.lerp(ce(*a), pairs(*a), 0.3),
        "that was 0",
    ),
    "a term appears": (ce, lambda *a: ce(*a) + pairs(*a), "AddBackward0"),
    "a term in torch.where": (
        lambda *a: ce(*a) + torch.where(torch.tensor(False), pairs(*a), 0.0),
        lambda *a: ce(*a) + torch.where(torch.tensor(True), pairs(*a), 0.0),
        "WhereBackward0 of NllLossBackward0 with a factor (condition) that was 0",
    ),
    "flooding turns": (flooding(0.1), flooding(50.0), "AbsBackward0 of a negative number"),
    "flooding by relu": (
        lambda *a: F.relu(ce(*a) - 0.1),
        lambda *a: F.relu(ce(*a) - 50.0),
        "ReluBackward0 of SubBackward0 with a factor (result) that is 0",
    ),
    "a clamp takes hold": (
        lambda *a: ce(*a).clamp(max=50.0),
        lambda *a: ce(*a).clamp(max=0.1),
        "ClampBackward1 of a positive number minus its max",
    ),
    "a maximum changes sides": (
        lambda *a: torch.maximum(ce(*a), torch.tensor(0.1)),
        lambda *a: torch.maximum(ce(*a), torch.tensor(50.0)),
        "MaximumBackward0 of a negative number minus its other",
    ),
    "hard tokens begin to choose": (hard_tokens(64), hard_tokens(8), "TopkBackward0 that leaves entries out"),
    "a mask begins to choose": (
        lambda *a: rows_of(*a)[torch.ones(a[1] * (a[2] - 1), dtype=torch.bool)].mean(),
        lambda *a: rows_of(*a)[torch.arange(a[1] * (a[2] - 1)) > 2].mean(),
        "IndexBackward0 that leaves entries out",
    ),
    "masked_select": (
        lambda *a: rows_of(*a).masked_select(torch.ones(a[1] * (a[2] - 1), dtype=torch.bool)).mean(),
        lambda *a: rows_of(*a).masked_select(torch.arange(a[1] * (a[2] - 1)) > 2).mean(),
        "MaskedSelectBackward0 that leaves entries out",
    ),
    "columns beyond a limit": (
        lambda net, rows, width: rows_of(net, rows, width).view(rows, -1)[:, :100].mean(),
        lambda net, rows, width: rows_of(net, rows, width).view(rows, -1)[:, :3].mean(),
        "SliceBackward0 with cut=the part beyond a limit of dimension 1",
    ),
    "mean, sum": (ce, lambda *a: ce(*a, reduction="sum"), "NllLossBackward0 with reduction='sum'"),
    "class weights": (ce, lambda *a: ce(*a, weight=torch.rand(CLASSES)), "NllLossBackward0 with weight=given"),
    "another ignored label": (
        ce,
        lambda *a: F.cross_entropy(a[0](*a[1:])[1], torch.ones(a[1] * (a[2] - 1)).long(), ignore_index=3),
        "NllLossBackward0 with ignore_index=3",
    ),
    "label smoothing": (ce, lambda *a: ce(*a, label_smoothing=0.1), "AddBackward0"),
    "focal from 0": (focal(0.0), focal(2.0), "PowBackward0 of RsubBackward1 with a factor (exponent) that was 0"),
    "focal from 0, a tensor": (focal(torch.tensor(0.0)), focal(torch.tensor(2.0)), "that was 0"),
    "a mean is squared": (
        lambda *a: ce(*a) ** 1.0,
        lambda *a: ce(*a) ** 2.0,
        "PowBackward0 of NllLossBackward0 with a factor (exponent) that is not 0",
    ),
    "tasks in turn by their factors": (
        lambda *a: 1.0 * ce(*a) + 0.0 * rows_of(*a).mean(),
        lambda *a: 0.0 * ce(*a) + 1.0 * rows_of(*a).mean(),
        "MulBackward0 of MeanBackward0 with a factor (other) that was 0",
    ),
    "terms of one kind come in one by one": (
        lambda *a: sum(factor * ce(*a) for factor in (1.0, 0.0, 0.0)),
        lambda *a: sum(factor * ce(*a) for factor in (1.0, 0.5, 0.0)),
        "MulBackward0 of NllLossBackward0 with a factor (other) that was 0",
    ),
    "a policy with a reference": (policy(), policy(beta=0.1), "AddBackward0"),
    "a ratio with a limit": (policy(clip=False), policy(clip=False, delta=2.0), "ClampBackward1"),
    "a penalty": (ce, lambda *a: ce(*a) + 0.1 * a[0].head.weight.pow(2).sum(), "PowBackward0"),
    "another head": (
        ce,
        lambda net, rows, width: F.cross_entropy(
            net.other(net(rows, width)[0]).flatten(0, 1), torch.ones(rows * width).long()
        ),
        "AddmmBackward0 with outputs=3",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_another_loss_and_said(name: str) -> None:
    before, after, said = CHANGES[name]
    net = Net()
    old, new = fingerprint(before(net, 4, 6)), fingerprint(after(net, 5, 7))
    assert old.key != new.key
    assert said in what_changed(old, new)
    for loss, found in ((before, old), (after, new)):  # the control: without the change, other batches are the same
        assert keys(loss, net, [(4, 8), (3, 6), (7, 9)]) == {found.key}


def test_tasks_in_turn_are_two_losses() -> None:
    net = Net()

    def step(number: int) -> Tensor:
        return pairs(net, 3 + number % 4, 5) if number % 2 else ce(net, 3 + number % 4, 5)

    assert len({fingerprint(step(number)).key for number in range(12)}) == 2
    assert "no longer AddBackward0" in what_changed(fingerprint(step(0) + step(2)), fingerprint(step(0)))
    assert what_changed(fingerprint(step(0)), fingerprint(step(2))) == ""
