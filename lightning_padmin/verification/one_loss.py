"""Exactly one loss per chunk, where a trainer's own step runs once for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_padmin.errors import TrainingStepError
from lightning_padmin.verification.sketch import sketch

_BY_VALUE = 4  # first chunks in which writes through `.data` are looked for too
_LIBRARIES = ("transformers", "trl", "lightning_padmin")


class OneLoss:
    """Counts the losses that a training step takes for one chunk.

    A step that takes two (adversarial training, R-Drop) or none (it calls the model itself) would train on something
    else than the whole batch: the second pass would start from a part of the gradient, and a loss that nobody asks for
    gets no weight. So would one that clips, scales or empties gradients, or writes weights, once for each chunk.

    Args:
        kind: the trainer's class.
        fix: how to have the step run on whole batches, as the end of a message.
    """

    def __init__(self, kind: type, fix: str) -> None:
        self._kind, self._fix = kind, fix
        self._taken, self._inside, self._watched = 0, False, 0
        self._is_own = step_of(*kind.__mro__) is not None  # else it is the library's, which is known

    @contextmanager
    def chunk(self, model: nn.Module, is_part: bool = False) -> Iterator[None]:
        """Around the step of a chunk.

        Args:
            model: what is trained, unwrapped.
            is_part: whether gradients are parts of a batch's, into which backward passes alone may write.

        Raises:
            TrainingStepError: the step took no loss, wrote into gradients or weights, or (from within) called the model
                outside of a loss.
        """
        watch = model.register_forward_pre_hook(self._called) if self._is_own else None
        written: _Written | None = None
        if self._is_own and is_part:
            self._watched += 1
            written = _Written(model, by_value=self._watched <= _BY_VALUE)
        try:
            yield
        finally:
            if watch is not None:
                watch.remove()
            if written is not None:
                written.leave()
        if not self._taken:
            self._refuse("did not call compute_loss")
        what = written.what if written is not None else None
        if what is not None:
            self._refuse(
                f"{what}, besides what its backward pass does,", "what acts on the gradient of the whole batch"
            )

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

    def _refuse(self, what: str, right: str = "exactly one call of compute_loss") -> None:
        name = step_of(*self._kind.__mro__) or f"{self._kind.__qualname__}.training_step"
        raise TrainingStepError(
            f"{name} {what} for a part of a batch, where {right} is right: the step runs once for each part. "
            f"{self._fix}"
        )


class _Written:
    """What is in gradients and weights after each backward pass, to be compared with what a step leaves.

    Args:
        model: what is trained.
        by_value: whether to look at values too; versions do not count writes through `.data`.
    """

    def __init__(self, model: nn.Module, by_value: bool) -> None:
        self._by_value = by_value
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._weights = [self._seen(p) for p in self._parameters]
        self._gradients: dict[Tensor, tuple[Tensor | None, int, Tensor | None]]
        self._gradients = {p: self._seen(p.grad) for p in self._parameters}
        self._emptied = False
        self._handles = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._parameters]  # type: ignore[no-untyped-call]

    def _seen(self, tensor: Tensor | None) -> tuple[Tensor | None, int, Tensor | None]:
        if tensor is None:
            return None, 0, None
        return tensor, tensor._version, sketch(tensor, 0).clone() if self._by_value and _is_plain(tensor) else None

    def _accumulated(self, p: Tensor) -> None:
        before = self._gradients[p][0]
        # Dense gradients are added to in place.
        self._emptied |= before is not None and p.grad is not before and not before.is_sparse
        self._gradients[p] = self._seen(p.grad)

    def leave(self) -> None:
        """Removes its hooks."""
        for handle in self._handles:
            handle.remove()

    @property
    def what(self) -> str | None:
        """What the step has written into, in words."""
        if self._emptied or any(not self._same(p.grad, self._gradients[p]) for p in self._parameters):
            return "writes into gradients"
        if any(not self._same(p, seen) for p, seen in zip(self._parameters, self._weights, strict=True)):
            return "writes into weights"
        return None

    def _same(self, now: Tensor | None, seen: tuple[Tensor | None, int, Tensor | None]) -> bool:
        before, version, values = seen
        if now is None or before is None:
            return now is before
        if now is not before or now._version != version:
            return False
        return values is None or torch.equal(values.nan_to_num(), sketch(now, 0).nan_to_num())


def _is_plain(tensor: Tensor) -> bool:
    return not tensor.is_sparse and not hasattr(tensor, "to_local")


def step_of(*kinds: type) -> str | None:
    """The first of these that is a user's class with a `training_step`, with the method's name; None: there is none."""
    for each in kinds:
        if "training_step" in vars(each) and each.__module__.split(".")[0] not in _LIBRARIES:
            return f"{each.__qualname__}.training_step"
    return None


def own_backward(*kinds: type) -> str | None:
    """As `step_of`, of a step that calls no other one, so that it sends its loss backward itself."""
    for each in kinds:
        name = step_of(each)
        code = getattr(vars(each).get("training_step"), "__code__", None)
        if name is not None and code is not None and "training_step" not in code.co_names:
            return name
    return None


__all__ = ["OneLoss", "own_backward", "step_of"]
