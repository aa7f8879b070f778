"""Gradients of models whose checkpoints run a graph of their own: a parameter's gradient comes in parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import GradientCheckError
from lightning_padmin.microbatching.batcher import MicroBatcher
from lightning_padmin.verification import sketch as sketches
from lightning_padmin.verification.gradient_check import Outcome, check_gradients
from lightning_padmin.verification.sketch import sketch, sketched_gradients


class Recomputing(torch.autograd.Function):
    """A checkpoint that does not ask how it was called, as some memory savers have them."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class Picky(Recomputing):
    """One that does, and whose name does not say what it is."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("Checkpointing is not compatible with .grad(), please use .backward() if possible")
        return Recomputing.backward(ctx, gradient)


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "torch": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "does not ask": lambda run, x: Recomputing.apply(run, x),
    "asks": lambda run, x: Picky.apply(run, x),
}


class Net(nn.Module):
    """Layers in checkpoints, one of them twice, one of them not; the head is tied to the embedding."""

    def __init__(self, way: str, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(23, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.outside = nn.Linear(8, 8)
        self.way = (lambda run, x: run(x)) if plain else WAYS[way]
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in (self.layers[0], self.layers[1], self.layers[0]):
            x = x + self.way(lambda x, layer=layer: torch.tanh(layer(x)) @ self.embedding.weight[:8], x)
        x = self.frozen(self.layers[2](self.layers[0](x)))
        return self.outside(x) @ self.embedding.weight.T


def loss_of(net: nn.Module) -> Tensor:
    ids = torch.tensor([[1, 2, 3, 4], [5, 2, 9, 9]])
    return nn.functional.cross_entropy(net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def worst(found: dict[str, Tensor], net: Net) -> float:
    """Against gradients of plain `backward`."""
    net.zero_grad()
    loss_of(net).backward()
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    assert set(found) == {name for name, _ in named}
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in named]
    wanted = {name: sketch(grad, index) for index, ((name, _), grad) in enumerate(zip(named, grads, strict=True))}
    return max(float((found[name] - wanted[name]).abs().max()) for name in found)


@pytest.mark.parametrize("way", WAYS)
def test_sketches_are_those_of_all_parts(way: str) -> None:
    net = Net(way)
    kept = net.layers[0].weight.grad = torch.ones_like(net.layers[0].weight)
    found = sketched_gradients(lambda: loss_of(net), net)
    assert net.layers[0].weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert all(p.grad is None for name, p in net.named_parameters() if name != "layers.0.weight")
    assert worst(found, net) < 1e-12
    assert worst(found, Net(way, plain=True)) < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_the_last_part_alone_is_far_off(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(sketches, "_add", dict.__setitem__)
    net = Net(way)
    assert worst(sketched_gradients(lambda: loss_of(net), net), net) > 1e-3


def test_leaves_outside_of_the_module_are_left_alone() -> None:
    net, scale = Net("torch"), torch.ones((), dtype=torch.float64, requires_grad=True)
    scale.grad = kept = torch.tensor(3.0, dtype=torch.float64)
    found = sketched_gradients(lambda: loss_of(net) * scale, net)
    assert scale.grad is kept
    assert float(kept) == 3
    assert worst(found, net) < 1e-12


class Counting(Net):
    """A step that counts its calls and draws numbers; both decide over the loss."""

    padmin_per_call = ("calls", "seen")

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.calls = 0
        self.seen: list[int] = []

    def training_loss(self, batch: dict[str, Tensor], how: str = "token-mean") -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        scale = self.calls + float(torch.rand(())) + random.random()
        logits, labels = self(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        if how == "row-mean":
            return scale * (losses.sum(1) / (labels != -100).sum(1)).mean()
        return scale * losses.sum() / (labels != -100).sum()


def batch() -> dict[str, Tensor]:
    lengths, width = (12, 3, 9, 4, 2, 7), 12
    source = torch.Generator().manual_seed(3)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, 23, mask.shape, generator=source) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def checked(net: Counting, how: str = "token-mean") -> Outcome | None:
    config = PadMinConfig(token_budget=24, loss_reduction="token-mean")
    schema, table = MicroBatcher(config).read_together(batch())
    return check_gradients(lambda inputs: net.training_loss(inputs, how), batch(), schema, table, config, net)


@pytest.mark.parametrize("way", WAYS)
def test_every_pass_of_a_check_finds_the_step_as_it_was(way: str) -> None:
    net = Counting(way)
    torch.manual_seed(5), random.seed(5)
    drawn = torch.get_rng_state(), random.getstate()
    outcome = checked(net)
    assert outcome is not None
    assert outcome.difference < 1e-9
    assert (net.calls, net.seen) == (0, [])
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(GradientCheckError, match="set loss_reduction='row-mean'"):
        checked(Counting(way), "row-mean")
