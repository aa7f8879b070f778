"""Gradients of one loss in two ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_padmin.distributed import exchange_alone
from lightning_padmin.integrations.common import apart


class Model(nn.Module):
    """Ways differ in what the input is multiplied by."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 1, dtype=dtype)
        self.dropout, self.factor, self.calls = nn.Dropout(0.5), 1.0, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return self.second(self.dropout(self.first(x)).tanh() * self.factor)  # type: ignore[no-any-return]


def compare(model: Model, factor: float, exchange: Any = exchange_alone) -> Any:
    x = torch.linspace(-1, 1, 12).view(4, 3).to(model.first.weight.dtype)

    @contextmanager
    def other() -> Iterator[None]:
        model.factor = factor
        try:
            yield
        finally:
            model.factor = 1.0

    return apart(
        lambda: model(x).square().sum(),
        model,
        [nullcontext, other],
        trainer=SimpleNamespace(),
        without_trace=nullcontext,
        exchange=exchange,
    )


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-3), (torch.bfloat16, 0.1)])
def test_the_same_in_both_ways(dtype: torch.dtype, limit: float) -> None:
    """Dropout draws nothing in either; nothing is left of the passes."""
    model = Model(dtype)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before, state = torch.get_rng_state(), {name: each.clone() for name, each in model.state_dict().items()}
    found = compare(model, 1.0)
    assert (found.value, found.limit, found.is_too_far) == (0, limit, False)
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight))
    assert all(torch.equal(state[name], each) for name, each in model.state_dict().items())


@pytest.mark.parametrize(
    ("factor", "is_too_far"), [(1.00001, False), (1.0001, True), (1.01, True), (float("nan"), True)]
)
def test_another_way(factor: float, is_too_far: bool) -> None:
    found = compare(Model(), factor)
    assert found.is_too_far is is_too_far
    assert found.value != 0
    assert found.where.startswith("on this rank most in '")


def test_ranks_take_the_worst() -> None:
    def exchange(values: Any) -> Any:
        other = np.float64(0.25).view(np.int64)
        return np.array([values, [other]], dtype=np.int64)

    found = compare(Model(), 1.0, exchange)
    assert found.value == 0.25
    assert found.is_too_far
