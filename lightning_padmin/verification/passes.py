"""The small passes of the first-batch check, on parameters that each rank holds whole, or in shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_padmin.architectures import without_user_hooks
from lightning_padmin.batch import Schema
from lightning_padmin.distributed import Exchange, all_gather_floats
from lightning_padmin.errors import OnlyBackwardError
from lightning_padmin.microbatching import SlotMap
from lightning_padmin.runtime import (
    DATA_OF_TRAINERS,
    Draws,
    ModuleState,
    RandomState,
    without_autocast,
    without_dropout,
)
from lightning_padmin.verification.fingerprints import fingerprint
from lightning_padmin.verification.probe import Probe
from lightning_padmin.verification.sketch import (
    Sketches,
    combine,
    difference,
    no_gradient,
    scales,
    sizes,
    sketch,
    sketched_gradients,
)
from lightning_padmin.verification.writes import states

LossFunction = Callable[[Any], Tensor]
Context = Callable[[], AbstractContextManager[Any]]


class Passes(ABC):
    """Gradients of the rows of a probe, as sketches. Every pass finds the module and the holders in the same state.

    Attributes:
        drew: whether a pass has drawn random numbers.
        saw_half: whether a pass has computed in half precision.
        in_float32: further passes leave autocast out.
        parts: sketches of the two groups, or None where groups cannot be had apart.
        losses: keys of what kinds of loss the step has taken, see `fingerprint`.
        left: what the first pass un-split has left in places that it changed, frozen, by path; None before it.
        left_by_chunks: the same of the first pass in which the model ran in chunks.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        batch: Any,
        schema: Schema,
        module: nn.Module,
        probe: Probe,
        joint: Context | None,
        holders: Sequence[object] = (),
    ) -> None:
        self._loss_fn, self._batch, self._schema = loss_fn, batch, schema
        self._module, self._probe, self._joint, self._holders = module, probe, joint, holders
        self.drew = self.saw_half = self.in_float32 = self._by_backward = False
        self.parts: list[Sketches] | None = None
        self.losses: set[str] = set()
        self.left: dict[str, Any] | None = None
        self.left_by_chunks: dict[str, Any] | None = None
        self._state: ModuleState | None = None
        self._draws: Draws | None = None
        self._starts = np.zeros(0, np.int64)

    def with_draws(self, draws: Draws, starts: NDArray[np.int64]) -> None:
        """Further passes draw these in place of random numbers; `starts`: (B,) first column of each row."""
        self._draws, self._starts = draws, starts
        self.parts, self.drew = None, False

    def _drawing(self, slots: SlotMap) -> AbstractContextManager[None]:
        if self._draws is None:
            return nullcontext()
        return self._draws.of(
            slots.rows.tolist(), (self._starts[slots.rows] - slots.start[:, 0]).tolist(), slots.widths[0]
        )

    def came(self) -> Sketches:
        """Un-split, as the rows came."""
        return self._run([self._probe.came], keeps="left")

    def in_turn(self, slots: Sequence[SlotMap], look: Callable[[int, ModuleState], None]) -> list[Sketches]:
        """One pass after another, of which each finds what those before it have left, random numbers apart.

        Args:
            slots: of each pass.
            look: called with 0 before the first, and with 1, 2, ... after each.
        """
        found: list[Sketches] = []
        with self._watched():
            assert self._state is not None
            look(0, self._state)
            for k, each in enumerate(slots):
                self._state.restart()
                found.append(self._gradients([each], [1.0]))
                look(k + 1, self._state)
        return found

    def scaled(self, factor: float) -> Sketches:
        """`factor` times the gradient of the rows as they came: the loss is multiplied before it goes backward."""
        return self.of([self._probe.came], [factor])

    def whole(self) -> Sketches:
        """Un-split, rolled and trimmed."""
        return self._run([self._probe.whole])

    def through(self, context: Context) -> Sketches:
        """Un-split, as the rows came, inside of a context of the caller's."""
        return self._run([self._probe.came], within=context)

    @abstractmethod
    def of(self, slots: Sequence[SlotMap], weights: Sequence[float] = (1.0,)) -> Sketches:
        """The weighted sum over other slot maps, un-split each."""

    def read_as(self, batch: Any, schema: Schema) -> None:
        """Further passes are of this batch, read by this schema."""
        self._batch, self._schema = batch, schema

    def reading(self, batch: Any, schema: Schema, came: bool = False) -> Sketches:
        """Un-split, of another batch, or of this one read by another schema; rolled, or as it came."""
        before = self._batch, self._schema
        self.read_as(batch, schema)
        try:
            return self.came() if came else self.whole()
        finally:
            self.read_as(*before)

    @abstractmethod
    def split(self, weights: Sequence[float]) -> Sketches:
        """The weighted sum of the two groups; joint: un-split, with the model running in chunks."""

    @abstractmethod
    def difference(self, found: Sketches, wanted: Sketches, limit: float) -> tuple[float, str]:
        """The worst relative difference, see `sketch.scales`, and the parameter where it is."""

    @abstractmethod
    def largest(self, sketches: Sketches) -> float:
        """The largest absolute value."""

    @abstractmethod
    def _gradients(self, slot_maps: Sequence[SlotMap], weights: Sequence[float]) -> Sketches:
        """Of the weighted sum of these losses."""

    def _loss(self, batch: Any) -> Tensor:
        """The step's own, whose kind is noted."""
        value = self._loss_fn(batch)
        self.losses.add(fingerprint(value).key)
        return value

    def restore(self) -> None:
        """Leaves the module as it was before the first pass."""
        if self._state is not None:
            self._state.restore()

    def _run(
        self,
        slot_maps: Sequence[SlotMap],
        weights: Sequence[float] = (1.0,),
        within: Context = nullcontext,
        keeps: str = "",
    ) -> Sketches:
        if self._state is None:
            self._state = ModuleState(self._module, self._holders, DATA_OF_TRAINERS)
        try:
            with self._watched(keeps), within():
                return self._gradients(slot_maps, weights)
        except OnlyBackwardError:  # what the attempt wrote has been put back
            self._by_backward = True
            with self._watched(keeps), within():
                return self._gradients(slot_maps, weights)

    @contextmanager
    def _watched(self, keeps: str = "") -> Iterator[None]:
        """`keeps`: the attribute for what a pass has left, unless one before has."""
        assert self._state is not None
        try:
            no_hooks = without_user_hooks(self._module)
            cast = without_autocast() if self.in_float32 else nullcontext()
            with no_hooks, without_dropout(self._module) as watch, self._state.watching(), cast:
                before = RandomState()
                yield
            self.drew = self.drew or not before.is_as(RandomState())
            self.saw_half = self.saw_half or watch.saw_half
            if keeps and getattr(self, keeps) is None:
                setattr(self, keeps, states(self._state.changes()))
        finally:
            self._state.clear()

    def _taken(self, slots: SlotMap) -> Any:
        return self._batch if slots.is_identity else slots.take_batch(self._batch, self._schema)


class LocalPasses(Passes):
    """Every rank holds all parameters, and none takes part in another's passes."""

    def of(self, slots: Sequence[SlotMap], weights: Sequence[float] = (1.0,)) -> Sketches:
        """See `Passes.of`."""
        return combine([self._run([each], [w]) for each, w in zip(slots, weights, strict=True)], [1.0] * len(slots))

    def weighted(self, weights: Sequence[float]) -> Sketches:
        """As `split`, each group's loss times its weight before it is sent backward; takes passes of its own.

        The same, but where the step bends gradients on the way (a clamp on those of hidden states).
        """
        return self.of(self._probe.parts, weights)

    def split(self, weights: Sequence[float]) -> Sketches:
        """See `Passes.split`; other weights need no other pass."""
        if self._joint is not None:
            return self._run([self._probe.came], within=self._joint, keeps="left_by_chunks")
        if self.parts is None:
            self.parts = [self._run([part]) for part in self._probe.parts]
        return combine(self.parts, weights)

    def difference(self, found: Sketches, wanted: Sketches, limit: float) -> tuple[float, str]:
        """See `Passes.difference`."""
        return difference(found, wanted, scales(sizes(wanted), limit))

    def largest(self, sketches: Sketches) -> float:
        """See `Passes.largest`."""
        return float(np.max(list(sizes(sketches).values()), initial=0.0))

    def _gradients(self, slot_maps: Sequence[SlotMap], weights: Sequence[float]) -> Sketches:
        (slots,), (weight,) = slot_maps, weights
        batch = self._taken(slots)

        def loss() -> Tensor:
            value = self._loss(batch)
            return value if weight == 1 else value * weight

        with self._drawing(slots):
            return sketched_gradients(loss, self._module, by_backward=self._by_backward, again=False)


class ShardedPasses(Passes):
    """Parameters are sharded over ranks: each pass is one of all ranks, and gradients are means over them.

    So a group's gradient cannot be had apart from the weights that other ranks give theirs, and every set of weights
    needs a pass. Sketches are of this rank's shards; differences are taken over all ranks, the same on each.
    """

    def __init__(self, *arguments: Any, exchange: Exchange) -> None:
        super().__init__(*arguments)
        self._exchange = exchange

    def of(self, slots: Sequence[SlotMap], weights: Sequence[float] = (1.0,)) -> Sketches:
        """See `Passes.of`."""
        return self._run(slots, weights)

    def split(self, weights: Sequence[float]) -> Sketches:
        """See `Passes.split`."""
        if self._joint is not None:
            return self._run([self._probe.came], within=self._joint, keeps="left_by_chunks")
        return self._run(self._probe.parts, weights)

    def difference(self, found: Sketches, wanted: Sketches, limit: float) -> tuple[float, str]:
        """See `Passes.difference`."""
        return difference_over_ranks(found, wanted, limit, self._exchange)

    def largest(self, sketches: Sketches) -> float:
        """See `Passes.largest`."""
        return max(_largest_over_ranks(list(sizes(sketches).values()), self._exchange), default=0.0)

    def _gradients(self, slot_maps: Sequence[SlotMap], weights: Sequence[float]) -> Sketches:
        for slots, weight in zip(slot_maps, weights, strict=True):
            batch = self._taken(slots)
            with self._drawing(slots):
                torch.autograd.backward(self._loss(batch) * weight)
        return sketched_shards(self._module)


def sketched_shards(module: nn.Module) -> Sketches:
    """Sketch of this rank's shard of each trained parameter's gradient, by name; zeros where there is none."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return {
        name: no_gradient(_local(p)) if p.grad is None else sketch(_local(p.grad), index)
        for index, (name, p) in enumerate(named)
    }


def difference_over_ranks(found: Sketches, wanted: Sketches, limit: float, exchange: Exchange) -> tuple[float, str]:
    """See `Passes.difference`, of shards: a collective, the same on all ranks."""
    names = list(wanted)
    own = sizes({name: found[name] - wanted[name] for name in names}) | {"": 0.0}
    sent = [own[name] for name in names] + [sizes(wanted)[name] for name in names]
    worst = _largest_over_ranks(sent, exchange)
    differences, largest = worst[: len(names)], dict(zip(names, worst[len(names) :], strict=True))
    relative = {name: value / scales(largest, limit)[name] for name, value in zip(names, differences, strict=True)}
    name = max(names, key=lambda each: np.inf if np.isnan(relative[each]) else relative[each], default="")
    return (relative[name], name) if name else (0.0, "")


def _largest_over_ranks(values: Sequence[float], exchange: Exchange) -> list[float]:
    return [float(each) for each in all_gather_floats(values, exchange).max(axis=0)]


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
