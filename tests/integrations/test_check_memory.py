"""What a check costs in memory: frozen weights are not copied, in any adapter."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from offline_cases import build
from support import Module
from torch import Tensor, nn
from trl_cases import qwen2

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import GradientCheckError
from lightning_padmin.runtime.isolation import ModuleState

MIB = 2**20
ADAPTERS = ("lightning", "trainer", "sft")


class Adapted(nn.Module):
    """A layer with frozen weights of this size, and a small one that is trained."""

    def __init__(self, inner: nn.Module, mib: int) -> None:
        super().__init__()
        self.inner = inner
        width = inner.in_features
        # Made by hand, so that it takes no more memory than it has.
        self.base = nn.ParameterList(
            nn.Parameter(torch.full((MIB // 4 // width, width), 1e-3), requires_grad=False) for _ in range(mib)
        )

    def forward(self, x: Tensor) -> Tensor:
        # Every frozen weight takes part, with a few of its rows.
        return self.inner(x) + sum((x @ p[:4].T).mean(-1, keepdim=True) for p in self.base)


class Lit(Module):
    def __init__(self, mib: int) -> None:
        super().__init__(dtype=torch.float32)
        self.model.head = Adapted(self.model.head, mib)


def prepared(adapter: str, mib: int, check: str | None, *outer: type) -> Callable[[], Any]:
    """A short training; `check` None is stock."""
    if adapter == "lightning":
        module = Lit(mib)
        callbacks = [] if check is None else [support.padmin(check=check)]
        return lambda: support.fit(module, support.ragged_batches(1), *callbacks)
    model = qwen2()
    for layer in model.model.layers:
        layer.mlp.up_proj = Adapted(layer.mlp.up_proj, mib // 2)
    config = None if check is None else PadMinConfig(token_budget=64, launch_cost=4, check=check)
    options: dict[str, Any] = {"gradient_checkpointing": False} if adapter == "sft" else {}
    return build(adapter, model, config, max_steps=1, **options).train


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_is_copied_is_next_to_nothing(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    restore = ModuleState.restore
    monkeypatch.setattr(ModuleState, "restore", lambda self: (copied.append(self.copied), restore(self)))
    prepared(adapter, 64, "first-batch")()
    assert copied
    assert max(copied) <= MIB


def test_a_step_that_writes_into_a_frozen_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: that one is copied, and as it was."""

    class Writes(Lit):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            torch._foreach_mul_([p.data for p in list(self.model.head.base)[:5]], 1.5)
            return super().loss(batch)

    copied: list[int] = []
    found: list[float] = []
    module, restore = Writes(64), ModuleState.restore

    def noted(self: ModuleState) -> None:
        copied.append(self.copied)
        restore(self)
        found.append(float(module.model.head.base[0][0, 0]))

    monkeypatch.setattr(ModuleState, "restore", noted)
    with pytest.raises(GradientCheckError, match=r"writes into .model\.head\.base\.0."):
        support.fit(module, support.ragged_batches(1), support.padmin())
    assert 5 * MIB <= max(copied) <= 6 * MIB
    assert found[0] == pytest.approx(1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_peak_with_and_without(adapter: str) -> None:
    peaks = {check: _peak(adapter, check) for check in ("stock", "off", "first-batch")}
    assert peaks["stock"] > 1024 * MIB
    assert peaks["first-batch"] <= 1.03 * peaks["stock"], peaks
    assert peaks["first-batch"] <= 1.03 * peaks["off"], peaks


def _peak(adapter: str, check: str) -> int:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    command = [sys.executable, __file__, adapter, check]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
    return int(done.stdout.split()[-1])


if __name__ == "__main__":
    prepared(sys.argv[1], 1024, None if sys.argv[2] == "stock" else sys.argv[2])()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
