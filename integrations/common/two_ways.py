"""One loss of one batch in two ways, the stock one first: how far their gradients are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_padmin.architectures import without_user_hooks
from lightning_padmin.distributed import Exchange, all_gather_floats
from lightning_padmin.errors import OnlyBackwardError
from lightning_padmin.runtime import DATA_OF_TRAINERS, ModuleState, holders_of, without_dropout
from lightning_padmin.verification import (
    Sketches,
    Tolerance,
    difference,
    difference_over_ranks,
    dtypes_of,
    fingerprint,
    scales,
    sizes,
    sketched_gradients,
    sketched_shards,
)

Way: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""The context that makes it this way."""


@dataclass(frozen=True)
class Apart:
    """How far gradients are apart, relative to the largest.

    Attributes:
        value: on the rank where that is most; the same on all ranks.
        limit: up to which they are the same but for rounding.
        where: the parameter, as the end of a sentence.
        losses: keys of the kinds of loss on this rank, see `fingerprint`.
    """

    value: float
    limit: float
    where: str
    losses: frozenset[str] = frozenset()

    @property
    def is_too_far(self) -> bool:
        """Whether training would change; nan counts."""
        return not self.value <= self.limit


def apart(
    loss: Callable[[], Any],
    module: nn.Module,
    ways: Sequence[Way],
    *,
    trainer: Any,
    without_trace: Way,
    exchange: Exchange,
) -> Apart:
    """Gradients of a loss in two ways, each rank by itself; nothing is left of the passes.

    Args:
        loss: of a batch.
        module: what is trained, unwrapped.
        ways: two.
        trainer: whose loss it is.
        without_trace: a context in which calls of the loss change nothing in the trainer.
        exchange: the collective in which ranks tell each other what they found.
    """
    state = ModuleState(module, holders_of(trainer), DATA_OF_TRAINERS)
    by_backward = False
    heard = _Heard(loss)
    module.train()
    sketches: list[Sketches] = []
    tolerance = Tolerance.for_(dtypes_of(module))
    try:
        while len(sketches) < len(ways):
            within, no_hooks = ways[len(sketches)](), without_user_hooks(module)
            with state.watching(), without_trace(), no_hooks, without_dropout(module) as watch, within:
                try:
                    sketches.append(sketched_gradients(heard, module, by_backward=by_backward, again=False))
                except OnlyBackwardError:  # once more, when what this attempt wrote has been put back
                    by_backward = True
            tolerance = tolerance.if_half(watch.saw_half)
            state.clear()
    finally:
        state.restore()
    value, name = difference(sketches[1], sketches[0], scales(sizes(sketches[0]), tolerance.limit))
    worst = float(all_gather_floats([value], exchange).max())
    return Apart(worst, tolerance.limit, f"on this rank most in {name!r}", frozenset(heard.losses))


def apart_on_shards(
    loss: Callable[[], Any],
    model: nn.Module,
    ways: Sequence[Way],
    *,
    without_trace: Way,
    exchange: Exchange,
) -> Apart:
    """`apart` where parameters are sharded: each rank sketches its own shards, and passes are collective.

    Args:
        loss: of a batch.
        model: what is trained, as it is wrapped.
        ways: two.
        without_trace: see `apart`.
        exchange: the collective.
    """
    state = ModuleState(model)
    model.train()
    tolerance = Tolerance.for_(dtypes_of(model))
    sketches, heard = [], _Heard(loss)
    try:
        for way in ways:
            within, no_hooks = way(), without_user_hooks(model)
            with without_trace(), no_hooks, without_dropout(model) as watch, within:
                with torch.enable_grad():
                    value = heard()
                torch.autograd.backward(value)
                sketches.append(sketched_shards(model))
            tolerance = tolerance.if_half(watch.saw_half)
            state.clear()
    finally:
        state.restore()
    tolerance = tolerance.if_half(bool(exchange([tolerance.is_half]).any()))
    worst, name = difference_over_ranks(sketches[1], sketches[0], tolerance.limit, exchange)
    where = f"most in {name.replace('_fsdp_wrapped_module.', '')!r}"
    return Apart(worst, tolerance.limit, where, frozenset(heard.losses))


class _Heard:
    """A loss whose kinds are noted."""

    def __init__(self, loss: Callable[[], Any]) -> None:
        self._loss = loss
        self.losses: set[str] = set()

    def __call__(self) -> Any:
        value = self._loss()
        self.losses.add(fingerprint(value).key)
        return value


__all__ = ["Apart", "apart", "apart_on_shards"]
