"""Loops over micro-batches whose body is the user's: one at a time, each to its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from lightning_padmin.errors import BatchError
from lightning_padmin.microbatching.micro_batches import MicroBatch

Around = Callable[[MicroBatch], AbstractContextManager[object]]


class LoopGuard:
    """Notices a loop that was left before its end, whose gradients are those of a part of the batch.

    Attributes:
        never_started: whether there has been no loop yet.
    """

    def __init__(self) -> None:
        self.never_started = True
        self._loop: _Loop | None = None

    def start(
        self, micro_batches: Sequence[MicroBatch], around: Around, at_end: Callable[[], None]
    ) -> Iterator[MicroBatch]:
        """An iterator over the micro-batches.

        Args:
            micro_batches: what is gone through.
            around: the context in which the body runs, for each.
            at_end: called when the loop has run to its end.
        """
        self.never_started = False
        loop = self._loop = _Loop(len(micro_batches))
        steps = _steps(loop, micro_batches, around, at_end)
        loop.steps = weakref.ref(steps)
        return steps

    def refuse_unfinished(self) -> None:
        """Forgets the last loop.

        Raises:
            BatchError: it was left before its end.
        """
        loop = self._loop
        self.discard()
        if loop is not None and not loop.is_finished:
            raise BatchError(
                f"the loop over the previous batch was left after {loop.started} of {loop.count} micro-batches, so its "
                "gradients are incomplete: let it run to its end, or give it up with discard() and "
                "optimizer.zero_grad()"
            )

    def discard(self) -> None:
        """Forgets the last loop, and ends the context around its current micro-batch."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


@dataclass(eq=False)
class _Loop:
    """How far a loop over a batch has come. Holds no strong reference to it: one that is left must end by itself."""

    count: int
    started: int = 0
    is_finished: bool = False
    steps: weakref.ref[Generator[MicroBatch, None, None]] | None = None

    def close(self) -> None:
        steps = self.steps() if self.steps is not None else None
        if steps is not None:
            steps.close()


def _steps(
    loop: _Loop, micro_batches: Sequence[MicroBatch], around: Around, at_end: Callable[[], None]
) -> Generator[MicroBatch, None, None]:
    for micro in micro_batches:
        loop.started += 1
        with around(micro):
            yield micro
    loop.is_finished = True
    at_end()
