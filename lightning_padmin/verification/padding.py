"""Whether a step reads outputs where rows have padding.

A model that runs in chunks does not compute these slots: zeros stand there, where the un-split model has left numbers.
What a loss or a logged value makes of them is not what stock makes of them, and often no gradient of it flows. So the
step runs once more with other numbers there (those of real tokens, so that whatever is defined stays so): nothing may
move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_padmin.runtime import padding_filled
from lightning_padmin.verification.compare import relative_difference

# What may move between two passes over the same numbers: gradients, relative to the largest, and values.
STILL = 1e-5
_STILL = {torch.float64: 1e-12}
_STILL_ELSE = 1e-6
GRADIENTS, _LOSS = "gradients", "the loss"
_MOST_NAMES = 40  # they travel as bits
Logged = Callable[[], Mapping[str, Any]]


class Heard:
    """A step's loss, which is listened to: its value, and what has been logged by the time it is there.

    Args:
        loss_fn: the loss of a batch.
        logged: what the last call has logged, by name.
    """

    def __init__(self, loss_fn: Callable[[Any], Tensor], logged: Logged | None) -> None:
        self._loss_fn, self._logged = loss_fn, logged
        self.values: dict[str, Tensor] = {}

    def __call__(self, batch: Any) -> Tensor:
        """The loss."""
        value = self._loss_fn(batch)
        said = {} if self._logged is None else dict(self._logged())
        self.values = {repr(name): made for name, each in said.items() if (made := _as_tensor(each)) is not None}
        self.values[_LOSS] = value.detach().clone()
        return value

    def take(self) -> dict[str, Tensor]:
        """Those of the last call."""
        taken, self.values = self.values, {}
        return taken


def moved(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """By how much each value has moved, relative to itself, where it has; nan to nan has not."""
    apart = {name: _apart(value, wanted[name]) for name, value in found.items() if name in wanted}
    return {name: value for name, value in apart.items() if not value <= _STILL.get(found[name].dtype, _STILL_ELSE)}


def named(values: Mapping[str, Tensor]) -> list[str]:
    """What may move, in the order in which ranks speak of it."""
    return [_LOSS, GRADIENTS, *sorted(set(values) - {_LOSS})[:_MOST_NAMES]]


def _apart(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return math.inf
    if not found.numel() or torch.equal(torch.nan_to_num(found), torch.nan_to_num(wanted)):
        return 0.0
    return relative_difference(found, wanted)


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, bool | int | float):
        return torch.tensor(float(value), dtype=torch.float64)
    return value.detach().clone() if isinstance(value, Tensor) else None


def filled(joint: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
    """That context, with numbers of real tokens in the place of zeros."""

    @contextmanager
    def both() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(joint())
            stack.enter_context(padding_filled())
            yield

    return both


__all__ = ["GRADIENTS", "STILL", "Heard", "Logged", "filled", "moved", "named"]
