"""The small passes of the first-batch check, on parameters that each rank holds whole, or in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lightning_padmin.distributed import Exchange
from lightning_padmin.fields import Schema
from lightning_padmin.isolation import NoDropout, random_states, same_random_states, untouched
from lightning_padmin.layout import SlotMap, take_batch
from lightning_padmin.probe import Probe
from lightning_padmin.sketch import Sketches, combine, difference, largest, sketch, sketched_gradients

LossFunction = Callable[[Any], Tensor]
Context = Callable[[], AbstractContextManager[Any]]


class Passes(Protocol):
    """Gradients of the rows of a probe, as sketches.

    Attributes:
        drew: whether a pass has drawn random numbers.
        parts: those of the two groups, or None where groups cannot be had apart.
    """

    drew: bool
    parts: list[Sketches] | None

    def came(self) -> Sketches:
        """Un-split, as the rows came."""

    def whole(self) -> Sketches:
        """Un-split, rolled and trimmed."""

    def split(self, weights: Sequence[float]) -> Sketches:
        """The weighted sum of the two groups; joint: un-split, with the model running in chunks."""

    def difference(self, found: Sketches, wanted: Sketches) -> tuple[float, str]:
        """The largest |found - wanted| over the largest |wanted|, and the parameter where it is."""

    def largest(self, sketches: Sketches) -> float:
        """The largest absolute value."""


class LocalPasses:
    """Every rank holds all parameters, and none takes part in another's passes. See `Passes`."""

    def __init__(
        self, loss_fn: LossFunction, batch: Any, schema: Schema, module: nn.Module, probe: Probe, joint: Context | None
    ) -> None:
        self._loss_fn, self._batch, self._schema = loss_fn, batch, schema
        self._module, self._probe, self._joint = module, probe, joint
        self.drew = False
        self.parts: list[Sketches] | None = None

    def came(self) -> Sketches:
        """Un-split, as the rows came."""
        return self._sketch(self._probe.came)

    def whole(self) -> Sketches:
        """Un-split, rolled and trimmed."""
        return self._sketch(self._probe.whole)

    def split(self, weights: Sequence[float]) -> Sketches:
        """The weighted sum of the two groups, or the joint gradient."""
        if self._joint is not None:
            return self._sketch(self._probe.came, self._joint)
        if self.parts is None:  # other weights need no other pass
            self.parts = [self._sketch(part) for part in self._probe.parts]
        return combine(self.parts, weights)

    def difference(self, found: Sketches, wanted: Sketches) -> tuple[float, str]:
        """See `Passes.difference`."""
        return difference(found, wanted)

    def largest(self, sketches: Sketches) -> float:
        """See `Passes.largest`."""
        return largest(sketches)

    def _sketch(self, slots: SlotMap, within: Context = nullcontext) -> Sketches:
        batch = take_batch(self._batch, self._schema, slots)
        with untouched(self._module), NoDropout(), torch.compiler.set_stance("force_eager"), within():
            before = random_states()
            sketches = sketched_gradients(lambda: self._loss_fn(batch), self._module)
            self.drew = self.drew or not same_random_states(before, random_states())
        return sketches


class ShardedPasses:
    """Parameters are sharded over ranks: each pass is one of all ranks, and gradients are means over them.

    So a group's gradient cannot be had apart from the weights that other ranks give theirs, and every set of weights
    needs a pass. Sketches are of this rank's shards; differences are taken over all ranks, the same on each.
    """

    parts: list[Sketches] | None = None

    def __init__(
        self,
        loss_fn: LossFunction,
        batch: Any,
        schema: Schema,
        module: nn.Module,
        probe: Probe,
        joint: Context | None,
        exchange: Exchange,
    ) -> None:
        self._loss_fn, self._batch, self._schema = loss_fn, batch, schema
        self._module, self._probe, self._joint = module, probe, joint
        self._exchange, self.drew = exchange, False

    def came(self) -> Sketches:
        """Un-split, as the rows came."""
        return self._accumulate([self._probe.came], [1.0])

    def whole(self) -> Sketches:
        """Un-split, rolled and trimmed."""
        return self._accumulate([self._probe.whole], [1.0])

    def split(self, weights: Sequence[float]) -> Sketches:
        """The weighted sum of the two groups, or the joint gradient."""
        if self._joint is not None:
            return self._accumulate([self._probe.came], [1.0], self._joint)
        return self._accumulate(self._probe.parts, weights)

    def difference(self, found: Sketches, wanted: Sketches) -> tuple[float, str]:
        """See `Passes.difference`."""
        own, name = difference(found, wanted)
        own *= largest(wanted) or 1.0
        table = self._exchange([_bits(own), _bits(largest(wanted))]).view(np.float64)
        scale = float(table[:, 1].max()) or 1.0  # a rank's own shards may have gradients that are all but zero
        return float(table[:, 0].max()) / scale, name

    def largest(self, sketches: Sketches) -> float:
        """See `Passes.largest`."""
        return float(self._exchange([_bits(largest(sketches))]).view(np.float64).max())

    def _accumulate(
        self, slot_maps: Sequence[SlotMap], weights: Sequence[float], within: Context = nullcontext
    ) -> Sketches:
        with untouched(self._module), NoDropout(), torch.compiler.set_stance("force_eager"), within():
            before = random_states()
            for slots, weight in zip(slot_maps, weights, strict=True):
                loss = self._loss_fn(take_batch(self._batch, self._schema, slots))
                torch.autograd.backward(loss * weight)
            self.drew = self.drew or not same_random_states(before, random_states())
            named = [(name, p) for name, p in self._module.named_parameters() if p.requires_grad]
            return {name: sketch(_local(p), index) for index, (name, p) in enumerate(named)}


def _local(parameter: nn.Parameter) -> Tensor:
    """This rank's shard of the gradient, zeros where there is none."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))
