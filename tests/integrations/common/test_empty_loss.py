"""Losses of 0/0 in the graph."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_padmin.integrations.common import collected_outputs, defined, zero_of_parameters

Pair = namedtuple("Pair", ["logits", "other"])


@dataclass
class Outputs:
    logits: Tensor
    other: Any = None


class View(Mapping[str, Any]):
    """A mapping that cannot be made anew."""

    def __init__(self, logits: Tensor, secret: str) -> None:
        self.logits = logits

    def __getitem__(self, key: str) -> Any:
        return {"logits": self.logits}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["logits"])

    def __len__(self) -> int:
        return 1


def circular(logits: Tensor) -> list[Any]:
    outputs: list[Any] = [logits]
    outputs.append(outputs)
    return outputs


class Model(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.inner, self.wrap = nn.Linear(2, 3), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.inner(x))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: {"logits": t, "name": "x"},
        lambda t: (t.detach(), [t]),
        lambda t: Pair(t, None),
        lambda t: Outputs(t),
        lambda t: [Outputs({"a": t})],
        lambda t: View(t, "x"),
        circular,
    ],
)
def test_an_undefined_loss_is_a_zero_that_reaches_all_parameters(wrap: Any) -> None:
    model = Model(wrap)
    with collected_outputs([model]) as outputs:
        model(torch.ones(1, 2))
    assert len(outputs) == 1
    undefined = outputs[0].sum() * 0 / 0
    loss = defined(undefined, outputs)
    assert loss.item() == 0
    loss.backward(retain_graph=True)
    assert [p.grad.tolist() for p in model.parameters()] == [torch.zeros_like(p).tolist() for p in model.parameters()]
    model.zero_grad()
    undefined.backward()  # what it stands for
    assert all(p.grad.isnan().all() for p in model.parameters())


def test_a_defined_loss_is_passed_on() -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    assert defined(loss, [torch.zeros(1)]) is loss
    undefined = loss * torch.nan
    assert defined(undefined, []) is undefined


def test_only_finite_outputs_with_a_gradient_and_only_meanwhile() -> None:
    model = Model(lambda t: (t * torch.inf, t.detach(), t, object(), None))
    with collected_outputs([model, model.inner]) as outputs:
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert len(outputs) == 2  # the inner one's, and the third of the outer one's
    assert not model._forward_hooks


def test_hooks_go_after_an_error() -> None:
    model = Model(lambda t: t)
    with pytest.raises(KeyError), collected_outputs([model]):
        raise KeyError
    assert not model._forward_hooks


def test_a_zero_of_all_trained_parameters() -> None:
    model = Model(lambda t: t)
    model.inner.bias.requires_grad_(False)
    zero = zero_of_parameters(model.parameters(), torch.tensor(1.0, dtype=torch.float64))
    assert (zero.item(), zero.dtype) == (0.0, torch.float64)
    zero.backward()
    assert model.inner.weight.grad.tolist() == torch.zeros(3, 2).tolist()
    assert model.inner.bias.grad is None
