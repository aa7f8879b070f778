"""Random generators put back; and a model that draws from any of them, in the two passes of replay."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support import TinyLM, flat_gradient, make_batch, relative
from torch import Tensor, nn

from lightning_padmin import PaddedForward, PadMinConfig
from lightning_padmin.forward import padded_forward
from lightning_padmin.runtime import RandomState

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": np.random.rand,
    "torch": lambda: float(torch.rand(())),
}


def drawn() -> list[float]:
    return [float(draw()) for draw in DRAWS.values()]


@pytest.mark.parametrize("kind", DRAWS)
def test_a_single_draw_is_noticed_and_taken_back(kind: str) -> None:
    before = RandomState()
    assert before.is_as(RandomState())
    first = DRAWS[kind]()
    assert not before.is_as(RandomState())
    before.restore()
    assert before.is_as(RandomState())
    assert DRAWS[kind]() == first


def test_the_same_numbers_again_do_not_disturb_those_to_come() -> None:
    state = RandomState()
    first, second = drawn(), drawn()
    state.restore()
    assert drawn() == first
    with contextlib.suppress(KeyError), state.again():
        assert drawn() == first
        raise KeyError
    assert drawn() == second


class Noisy(nn.Module):
    """Scales what it does by a random number, as dropped layers do."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.model, self.draw = TinyLM(), draw

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids) * float(self.draw())


class _Forgets:
    """Puts nothing back."""

    def restore(self) -> None: ...


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", DRAWS)
def test_replay_draws_the_same_in_both_passes(kind: str, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not keeps:
        monkeypatch.setattr(padded_forward, "RandomState", _Forgets)
    batch = make_batch([9, 5, 3])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    gradients = []
    for mode in ("joint", "replay"):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        model = Noisy(DRAWS[kind])
        call = PaddedForward(model, PadMinConfig(token_budget=9, launch_cost=0), mode=mode)
        call(**inputs).square().sum().backward()
        assert len(call.micro_batches) > 1
        if mode == "replay":
            call.backward_pending()
        gradients.append(flat_gradient(model))
    assert (relative(*gradients) < 1e-6) == keeps
