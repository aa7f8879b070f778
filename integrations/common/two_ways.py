"""One loss of one batch in two ways, the stock one first: how far their gradients are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_padmin.architectures import has_experts, without_user_hooks
from lightning_padmin.distributed import Exchange, all_gather_floats
from lightning_padmin.errors import OnlyBackwardError
from lightning_padmin.runtime import DATA_OF_TRAINERS, Draws, ModuleState, RandomState, holders_of, without_dropout
from lightning_padmin.verification import (
    FACTOR,
    GRADIENTS,
    STILL,
    Heard,
    Logged,
    Sketches,
    States,
    Tolerance,
    advanced,
    difference,
    difference_over_ranks,
    dtypes_of,
    filled,
    fingerprint,
    is_doubtful,
    largest,
    may_have_advanced,
    moved,
    named_paths,
    narrowed_limit,
    scales,
    sizes,
    sketched_gradients,
    sketched_shards,
    states,
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
        told: whether there was something to compare on some rank; not so where stock gradients are zero or not finite,
            or where the loss is another function at each call.
        is_random: whether that is why, on some rank.
        moved: what moves with numbers that stand where rows have padding, on this rank.
        reads_padding: whether something does, on some rank.
        writes: whether a pass has written into what the module or the trainer keep, on this rank.
        advanced: of that what calls of a model move on, once per chunk, in words, on this rank.
        advances: whether there is something of that on some rank.
    """

    value: float
    limit: float
    where: str
    losses: frozenset[str] = frozenset()
    told: bool = True
    is_random: bool = False
    moved: tuple[str, ...] = ()
    reads_padding: bool = False
    writes: bool = False
    advanced: str = ""
    advances: bool = False

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
    logged: Logged | None = None,
    settled: bool = False,
    is_sharded: bool = False,
) -> Apart:
    """Gradients of a loss in two ways, each rank by itself; nothing is left of the passes.

    Where parameters are sharded passes are collective; each rank sketches its own shards, and differences are taken
    over all ranks.

    Args:
        loss: of a batch. All ranks take equally many, so that it may hold collectives.
        module: what is trained, unwrapped; as it is wrapped where parameters are sharded.
        ways: the stock one, and the one that runs models in chunks.
        trainer: whose loss it is.
        without_trace: a context in which calls of the loss change nothing in the trainer.
        exchange: the collective in which ranks tell each other what they found.
        logged: what the last call of `loss` has logged, by name; then it is also looked at whether loss, gradients and
            these move with what stands in outputs where rows have padding.
        settled: a check before this one has passed, and this rank's batch shows nothing new: a pass less then.
        is_sharded: whether parameters are sharded over ranks.
    """
    passes = (_PassesOnShards if is_sharded else _Passes)(loss, module, ways, trainer, without_trace, exchange, logged)
    try:
        return passes.compared(settled)
    finally:
        passes.state.restore()


class _Passes:
    """Passes of one loss, each of which finds everything as the first one did."""

    _place = "on this rank most in"

    def __init__(
        self,
        loss: Callable[[], Any],
        module: nn.Module,
        ways: Sequence[Way],
        trainer: Any,
        without_trace: Way,
        exchange: Exchange,
        logged: Logged | None,
    ) -> None:
        self._heard, self._module, self._without_trace = _Heard(loss), module, without_trace
        (self._stock, self._chunked), self._exchange = ways, exchange
        self.state = ModuleState(module, holders_of(trainer), DATA_OF_TRAINERS)
        self._values = Heard(lambda _: self._heard(), None if logged is None else self._all_logged)
        self._logged, self._by_backward, self._drew, self._wrote = logged, False, False, False
        self._tolerance, self._factor = Tolerance.for_(dtypes_of(module)), 1.0
        self._left: list[States] = []  # what each pass has left
        module.train()

    def compared(self, settled: bool) -> Apart:
        """All ranks run the same passes."""
        came, of_came = self._run(self._stock)
        found, values = self._run(self._chunked)
        whole, by_chunks = self._left[-2:]
        size, of_chunks = self._largest(came), self._largest(found)
        value, name = self._difference(found, came)
        if self._narrows(value, came):
            value, name = self._difference(found, came)
        limit = self._tolerance.limit
        told, is_random, drew = 0 < size < math.inf, False, self._of_all(self._drew)
        if not told:  # nothing to compare with, unless chunks have a gradient where there is none
            told = size == 0 and limit / 100 < of_chunks < math.inf and not drew
            value = math.inf if told else 0.0
        if self._any(not value <= limit and drew):
            value, name = self._with_constants(value, name)
        if self._any(not value <= limit):
            again, _ = self._run(self._stock)
            repeats = self._difference(again, came)[0] <= limit
            if not value <= limit and size and not repeats:
                value, told, is_random = 0.0, False, True
        names: tuple[str, ...] = ()
        if self._logged is not None and not self._any(not value <= limit):
            names = self._of_padding(found, values, (came, of_came), settled)
        moves = self._advanced(whole, by_chunks)
        worst = float(all_gather_floats([value], self._exchange).max())
        told, is_random, reads = self._any(told), self._any(is_random), self._any(bool(names))
        where = f"{self._place} {name!r}"
        losses = frozenset(self._heard.losses)
        of_calls = named_paths(moves), self._any(bool(moves))
        return Apart(worst, limit, where, losses, told, is_random, names, reads, self._wrote, *of_calls)

    def _narrows(self, value: float, came: Sketches) -> bool:
        """Whether the limit has been measured, since a difference on some rank lies between rounding and it."""
        if not self._any(is_doubtful(value, self._tolerance) and not has_experts(self._module)):
            return False
        self._factor = FACTOR
        try:
            again, _ = self._run(self._stock)
        finally:
            self._factor = 1.0
        spread = self._difference({name: each / FACTOR for name, each in again.items()}, came)[0]
        self._tolerance = Tolerance(narrowed_limit(spread, self._tolerance.limit, self._exchange))
        return True

    def _advanced(self, whole: States, by_chunks: States) -> list[str]:
        """What calls of a model have written once per chunk."""
        if not self._any(not self._drew and bool(may_have_advanced(whole, by_chunks))):
            return []
        self._run(self._stock, times=2)
        return [] if self._drew else advanced(whole, by_chunks, self._left[-1])

    def _run(self, way: Way, draws: Way = nullcontext, times: int = 1) -> tuple[Sketches, Mapping[str, Tensor]]:
        try:
            found = self._once(way, draws, times)
        except OnlyBackwardError:  # once more, when what this attempt wrote has been put back
            self._by_backward = True
            found = self._once(way, draws, times)
        return found, self._values.take()

    def _once(self, way: Way, draws: Way, times: int) -> Sketches:
        state, within, no_hooks = self.state, way(), without_user_hooks(self._module)
        try:
            with state.watching(), self._without_trace(), no_hooks, without_dropout(self._module) as watch, within:
                before = RandomState()
                with draws():
                    for k in range(times):
                        if k:
                            state.restart()
                        found = self._sketched()
                self._drew = self._drew or not before.is_as(RandomState())
            self._tolerance = self._tolerance.if_half(self._of_all(watch.saw_half))
            changes = state.changes()
            self._wrote = self._wrote or bool(changes)
            self._left.append(states(changes))
        finally:
            state.clear()
        return found

    def _sketched(self) -> Sketches:
        return sketched_gradients(self._loss, self._module, by_backward=self._by_backward, again=False)

    def _loss(self) -> Tensor:
        value = self._values(None)
        return value if self._factor == 1 else value * self._factor

    def _with_constants(self, value: float, name: str) -> tuple[float, str]:
        """The difference where random numbers are constants, if that can be had."""
        pair = [self._run(way, lambda: Draws().of([], [], 0))[0] for way in (self._stock, self._chunked)]
        size, constant = self._largest(pair[0]), self._difference(pair[1], pair[0])
        can = self._of_all(self._drew) and 0 < size < math.inf
        return constant if can else (value, name)

    def _of_padding(
        self,
        found: Sketches,
        values: Mapping[str, Tensor],
        un_split: tuple[Sketches, Mapping[str, Tensor]],
        settled: bool,
    ) -> tuple[str, ...]:
        """What moves with what stands in slots of padding.

        What the un-split model leaves there is one filling. Where another one was tried before, it is enough that
        nothing has moved from that to zeros.
        """
        if not self._any(not settled):
            came, of_came = un_split
            stays = self._difference(found, came)[0] <= STILL
            if not self._any(not stays or bool(moved(values, of_came))):
                return ()
        names = self._moved(filled(self._chunked), found, values)
        if self._any(bool(names)):
            anyway = self._moved(self._chunked, found, values)
            names = [name for name in names if name not in anyway]  # what moves by itself is left
        return tuple(names)

    def _moved(self, way: Way, found: Sketches, values: Mapping[str, Tensor]) -> list[str]:
        again, of_again = self._run(way)
        size, value = self._largest(found), self._difference(again, found)[0]
        stays = not 0 < size < math.inf or value <= STILL
        return [*moved(of_again, values), *(() if stays else (GRADIENTS,))]

    def _difference(self, found: Sketches, wanted: Sketches) -> tuple[float, str]:
        return difference(found, wanted, scales(sizes(wanted), self._tolerance.limit))

    def _largest(self, sketches: Sketches) -> float:
        return largest(sketches)

    def _any(self, flag: bool) -> bool:
        return bool(self._exchange([int(flag)]).any())

    def _of_all(self, flag: bool) -> bool:
        """What ranks that do not compare by themselves must know of each other."""
        return flag

    def _all_logged(self) -> Mapping[str, Any]:
        """And numbers that the pass has written down somewhere."""
        assert self._logged is not None
        written = {change.path: change.now for change in self.state.changes() if _is_number(change.now)}
        return written | dict(self._logged())


class _PassesOnShards(_Passes):
    """Of parameters that are sharded: all ranks come to the same branches."""

    _place = "most in"

    def _sketched(self) -> Sketches:
        with torch.enable_grad():
            value = self._loss()
        torch.autograd.backward(value)
        return sketched_shards(self._module)

    def _difference(self, found: Sketches, wanted: Sketches) -> tuple[float, str]:
        value, name = difference_over_ranks(found, wanted, self._tolerance.limit, self._exchange)
        return value, name.replace("_fsdp_wrapped_module.", "")

    def _largest(self, sketches: Sketches) -> float:
        return float(all_gather_floats([largest(sketches)], self._exchange).max())

    def _of_all(self, flag: bool) -> bool:
        return self._any(flag)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


class _Heard:
    """A loss whose kinds are noted."""

    def __init__(self, loss: Callable[[], Any]) -> None:
        self._loss = loss
        self.losses: set[str] = set()

    def __call__(self) -> Any:
        value = self._loss()
        self.losses.add(fingerprint(value).key)
        return value


__all__ = ["Apart", "apart"]
