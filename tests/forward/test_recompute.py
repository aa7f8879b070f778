"""Calls whose activations are not kept."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_padmin.errors import TrainingStepError
from lightning_padmin.forward.recompute import recomputed


class Draws(nn.Module):
    """Draws from two generators, and notes how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.calls, self.body = list[int](), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()

    def forward(self, inputs: Tensor, *, more: dict[str, Any]) -> dict[str, Tensor]:
        self.calls.append(1)
        mask = torch.rand_like(inputs) > random.random() / 2
        return {"out": self.body(inputs * mask + more["shift"]).tanh(), "count": mask.sum()}


def gradients(function: Any, inputs: Tensor, shift: Tensor, *, between: bool = True) -> list[Tensor]:
    """Of a loss whose backward pass comes when the inputs have been written to, and numbers were drawn."""
    module, given = Draws(), (inputs.clone(), shift.clone().requires_grad_())
    torch.manual_seed(1)
    random.seed(1)
    found = function(module, module, [given[0]], {"more": {"shift": given[1]}})
    if between:
        torch.rand(3)
        given[0].zero_()
    drawn = torch.random.get_rng_state()
    found["out"].pow(2).sum().backward()
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert len(module.calls) == 1 + (function is recomputed)
    return [given[1].grad, *(p.grad for p in module.parameters())]


def test_gradients_are_those_of_the_first_call() -> None:
    inputs, shift = torch.randn(4, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    wanted = gradients(lambda module, _, args, named: module(*args, **named), inputs, shift, between=False)
    for found, each in zip(gradients(recomputed, inputs, shift), wanted, strict=True):
        torch.testing.assert_close(found, each, rtol=0, atol=0)


def test_without_a_gradient_it_is_one_call() -> None:
    module = Draws()
    with torch.no_grad():
        recomputed(module, module, [torch.zeros(2, 5).double()], {"more": {"shift": torch.zeros(5).double()}})
    assert module.calls == [1]


def test_a_function_that_changes_between_its_calls_is_an_error() -> None:
    module = nn.Linear(3, 3)

    def grows(inputs: Tensor) -> Tensor:
        grows.calls += 1  # type: ignore[attr-defined]
        return module(inputs.repeat(grows.calls, 1)).tanh()[:2]  # type: ignore[attr-defined]

    grows.calls = 0  # type: ignore[attr-defined]
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        recomputed(grows, module, [torch.randn(2, 3)], {}).sum().backward()


def test_the_second_call_finds_the_module_as_the_first_one_did() -> None:
    """Flags, an adapter that is active, counters, and which parameters are trained; and leaves it as it is."""

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.adapters, self.active = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("one", "two")}), "one"
            self.dropout = nn.Dropout(0.5)
            self.register_buffer("steps", torch.zeros(()))
            self.count = 0

        def switch(self, name: str) -> None:
            self.active = name
            for each, adapter in self.adapters.items():
                adapter.requires_grad_(each == name)

        def forward(self, inputs: Tensor) -> Tensor:
            self.count += 1
            self.steps += 1
            return self.dropout(self.adapters[self.active](inputs).tanh()).tanh() * self.count * float(self.steps)

    inputs, found = torch.randn(4, 3), []
    for function in (lambda call, module, args, named: call(*args), recomputed):
        module, total = Switched(), torch.zeros(())
        for name, training in (("one", True), ("two", False), ("one", False)):
            module.switch(name)
            module.train(training)
            torch.manual_seed(len(name))
            total = total + function(module, module, [inputs], {}).sum()
        module.train()
        total.backward()
        assert (module.count, float(module.steps), module.active, module.training) == (3, 3.0, "one", True)
        found.append([p.grad for p in module.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert [each is not None for each in found[0]] == [True, True, False, False]  # the one that is trained in the end


@pytest.mark.parametrize("verifies", [True, False])
def test_weights_that_change_between_the_two_calls(verifies: bool) -> None:
    """Are noticed where that is asked for, and train something else where it is not."""

    def slope(between: float, **options: Any) -> Tensor:
        torch.manual_seed(0)
        first, last = nn.Linear(3, 3), nn.Linear(3, 3)
        module, inputs = nn.Sequential(first, nn.Tanh(), last, nn.Tanh()), torch.randn(4, 3)
        value = recomputed(module, module, [inputs], {}, **options).sum()
        first.weight.data.mul_(between)
        value.backward()
        return last.weight.grad

    if verifies:
        with pytest.raises(TrainingStepError, match="weights of Sequential were written into between its forward pass"):
            slope(0.9, verifies=True)
        slope(1.0, verifies=True)
    else:
        assert not torch.allclose(slope(0.9), slope(1.0), rtol=1e-3)
