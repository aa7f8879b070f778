"""What a model gives for some rows, run by itself: gradients where ranks hold all parameters, else values alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_padmin.architectures import has_experts, without_user_hooks
from lightning_padmin.errors import OnlyBackwardError
from lightning_padmin.integrations.common.two_ways import Way
from lightning_padmin.runtime import DATA_OF_TRAINERS, ModuleState, RandomState, holders_of, without_dropout
from lightning_padmin.verification import Sketches, Tolerance, difference, dtypes_of, scales, sizes, sketched_gradients

Seen: TypeAlias = Sketches
"""Sketches of gradients, or values, by name. Those of rows that run apart add up to those of all of them."""


class Isolated:
    """Passes of one model without dropout, of which nothing is left; `restore` at the end.

    Args:
        module: what is run. Where its parameters are sharded, as it is wrapped.
        trainer: whose attributes a pass may write into.
        without_trace: a context in which calls change nothing in the trainer.
        values_only: no backward passes: parameters are sharded, and these would reduce gradients.

    Attributes:
        drew: whether a pass has drawn random numbers.
        tolerance: for what the passes have computed so far.
    """

    def __init__(self, module: nn.Module, trainer: Any, without_trace: Way, *, values_only: bool) -> None:
        self._module, self._without_trace, self._values_only = module, without_trace, values_only
        self._state = ModuleState(module, holders_of(trainer), DATA_OF_TRAINERS)
        self._by_backward = self.drew = False
        self.tolerance = Tolerance.for_(dtypes_of(module))
        self.has_experts = has_experts(module)

    def seen(self, values: Callable[[], Tensor]) -> Seen:
        """What `values` shows: gradients of their sum, or they themselves.

        Args:
            values: runs the model.
        """
        try:
            return self._run(values)
        except OnlyBackwardError:  # what this attempt wrote has been put back
            self._by_backward = True
            return self._run(values)

    def _run(self, values: Callable[[], Tensor]) -> Seen:
        found: Seen
        try:
            no_hooks = without_user_hooks(self._module)
            with self._state.watching(), self._without_trace(), no_hooks, without_dropout(self._module) as watch:
                before = RandomState()
                if self._values_only:
                    with torch.no_grad():
                        found = {"log-probs": values().detach()}
                else:
                    found = sketched_gradients(
                        lambda: values().sum(), self._module, by_backward=self._by_backward, again=False
                    )
                self.drew = self.drew or not before.is_as(RandomState())
            self.tolerance = self.tolerance.if_half(watch.saw_half)
        finally:
            self._state.clear()
        return found

    def apart(self, found: Seen, wanted: Seen) -> tuple[float, str]:
        """The worst relative difference, and where it is; not a number where `wanted` is nothing to compare with."""
        size = max(sizes(wanted).values(), default=0.0)
        if not 0 < size < float("inf"):
            return float("nan"), ""
        return difference(found, wanted, scales(sizes(wanted), self.tolerance.limit))

    def may_be_flips(self, value: float) -> bool:
        """Whether it may come of tokens that rounding sends to other experts."""
        return self.has_experts and self.tolerance.may_be_flips(value)

    def restore(self) -> None:
        """Leaves everything as it was; may be called again."""
        self._state.restore()


def added(first: Seen, second: Seen) -> Seen:
    """Of rows that ran apart, what they show together."""
    return {name: first[name] + second[name] for name in first}


__all__ = ["Isolated", "Seen", "added"]
