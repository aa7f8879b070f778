"""Exactly one loss per chunk, where a trainer's own step runs once for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_padmin.errors import TrainingStepError

_LIBRARIES = ("transformers", "trl", "lightning_padmin")


class OneLoss:
    """Counts the losses that a training step takes for one chunk.

    A step that takes two (adversarial training, R-Drop) or none (it calls the model itself) would train on something
    else than the whole batch: the second pass would start from a part of the gradient, and a loss that nobody asks for
    gets no weight.

    Args:
        kind: the trainer's class.
        fix: how to have the step run on whole batches, as the end of a message.
    """

    def __init__(self, kind: type, fix: str) -> None:
        self._kind, self._fix = kind, fix
        self._taken, self._inside = 0, False
        self._is_own = step_of(kind) is not None  # else it is the library's, which is known

    @contextmanager
    def chunk(self, model: nn.Module) -> Iterator[None]:
        """Around the step of a chunk.

        Args:
            model: what is trained, unwrapped.

        Raises:
            TrainingStepError: the step took no loss, or (from within) called the model outside of one.
        """
        watch = model.register_forward_pre_hook(self._called) if self._is_own else None
        try:
            yield
        finally:
            if watch is not None:
                watch.remove()
        if not self._taken:
            self._refuse("did not call compute_loss")

    def _called(self, model: nn.Module, arguments: Any) -> None:
        if not self._inside and torch.is_grad_enabled():
            self._refuse("called the model itself, past compute_loss,")

    def of(
        self, loss: Callable[..., Any], finish: Callable[..., Any] = lambda result, *_, **__: result
    ) -> Callable[..., Any]:
        """`loss`, to be called once, for the chunk that comes next; `finish` gets what it returns, and its arguments.

        The function raises TrainingStepError in place of a second loss, before anything is sent backward for it.
        """
        self._taken, self._inside = 0, False

        def compute_loss(*args: Any, **options: Any) -> Any:
            if self._inside:  # a compute_loss that calls itself
                return loss(*args, **options)
            self._taken += 1
            if self._taken > 1:
                self._refuse("called compute_loss more than once")
            self._inside = True
            try:
                return finish(loss(*args, **options), *args, **options)
            finally:
                self._inside = False

        return compute_loss

    def _refuse(self, what: str) -> None:
        name = step_of(self._kind) or f"{self._kind.__qualname__}.training_step"
        raise TrainingStepError(
            f"{name} {what} for a part of a batch, where exactly one call of compute_loss is right: the step runs once "
            f"for each part. {self._fix}"
        )


def step_of(kind: type) -> str | None:
    """The user's class whose own `training_step` runs, with the method's name; None where it is the library's."""
    for each in kind.__mro__:
        if "training_step" in vars(each) and each.__module__.split(".")[0] not in _LIBRARIES:
            return f"{each.__qualname__}.training_step"
    return None


__all__ = ["OneLoss", "step_of"]
