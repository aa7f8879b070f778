"""Out of memory: which micro-batch it was, and the next budget to try, told on every rank.

Micro-batches run longest first, so that memory which does not suffice shows in the first passes. Ranks that did not run
out would wait for the one that did until the timeout of the process group. So in the first batches, and in each that
has a larger micro-batch than any before it on any rank, all ranks note how it went: before the last micro-batch, whose
backward pass is collective, and behind its forward pass. They do so in the key-value store of the process group, which
mixes with no collective, and a rank that fails does not wait for an answer before its error is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_padmin.distributed import Board, board_alone
from lightning_padmin.errors import OutOfMemoryError, PeerError
from lightning_padmin.microbatching.micro_batches import MicroBatches
from lightning_padmin.microbatching.padded_layout import SlotMap

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")
_FINE, _FAILED, _OUT_OF_MEMORY = range(3)
_NUMBERS = 5
_PATIENCE = 60.0
_FIRST = 20  # batches


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator raised it, of an accelerator or of the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


class Growth:
    """Whether memory may not suffice for a batch, by what has run before it."""

    def __init__(self) -> None:
        self._batches = 0
        self._largest: NDArray[np.int64] | None = None  # micro-batch so far, in slots, by rank

    def with_batch(self, largest: NDArray[np.int64]) -> bool:
        """Of a batch whose largest micro-batch has so many slots, by rank; it counts as run from then on.

        The first batches too: gradients and the optimizer's states take memory only after a step or two.
        """
        grows = self._batches < _FIRST or self._largest is None or bool((largest > self._largest).any())
        self._batches += 1
        self._largest = largest if self._largest is None else np.maximum(largest, self._largest)
        return grows


class MemoryGuard:
    """Around the passes of one batch; to be made once for it, on every rank.

    Args:
        micro_batches: of the batch.
        board: where ranks note how it went; for ranks whose passes are not collective but for the last one of a batch.
            By default this rank tells nobody.
        rank: of this process.
        last: the index of the micro-batch that runs last; default: the last one.

    Example:
        >>> guard = MemoryGuard(micro_batches, board_of_all(), rank)
        >>> for k in range(len(micro_batches)):
        ...     with guard.around(k):
        ...         micro = micro_batches[k]
        ...         loss = model(**micro.batch).loss * micro.weight
        ...         guard.forward_is_done(k)
        ...         loss.backward()
    """

    def __init__(
        self, micro_batches: MicroBatches, board: Board = board_alone, rank: int = 0, last: int | None = None
    ) -> None:
        self._maps, self._board, self._rank = micro_batches.slot_maps, board, rank
        self._last = len(self._maps) - 1 if last is None else last
        self._tells = micro_batches.grows

    @contextmanager
    def around(self, index: int) -> Iterator[None]:
        """Gathering, forward and backward pass of a micro-batch.

        Raises:
            OutOfMemoryError: on every rank, where one has run out of memory; elsewhere on that rank.
            PeerError: another rank has raised another error.
        """
        try:
            if index == self._last and len(self._maps) > 1:
                self._agree()
            yield
        except BaseException as error:  # an interrupt and an exit too: whatever ends this rank, others wait for it
            if isinstance(error, OutOfMemoryError | PeerError):
                raise
            if not is_out_of_memory(error):
                self._post([_FAILED])
                raise
            message = [_OUT_OF_MEMORY, index, *_shape(self._maps[index])]
            words = f"{self._words(self._rank, message)} ({_first_line(error)})"
            if self._post(message) and self._board is not board_alone:
                print(f"lightning-padmin: {words}", file=sys.stderr, flush=True)
                self._board.wait_until_read(_PATIENCE)  # the rank that holds the store must not leave before
            raise OutOfMemoryError(words) from error

    def give_up(self) -> None:
        """Something outside of a pass has ended this rank's batch: whoever waits for its passes is told."""
        self._post([_FAILED])
        self._tells = False

    def alone(self, index: int) -> AbstractContextManager[None]:
        """`around` for passes that the other ranks need not hear of."""
        self._tells = False
        return self.around(index)

    def forward_is_done(self, index: int) -> None:
        """To be called between forward and backward pass."""
        if index == self._last:
            self._agree()
            self._tells = False

    def _agree(self) -> None:
        if not self._tells:
            return
        self._post([_FINE])
        found = self._board.read()
        failed = np.flatnonzero(found[:, 0])
        if not len(failed):
            return
        self._tells = False
        # A rank that has run out of memory says more than one that has raised something else.
        rank = int(failed[np.argmax(found[failed, 0])])
        if found[rank, 0] == _OUT_OF_MEMORY:
            raise OutOfMemoryError(f"{self._words(rank, found[rank].tolist())} (that rank is out of memory.)")
        raise PeerError(f"rank {rank} raised an error in training; its message stands in that rank's log")

    def _post(self, message: Sequence[int]) -> bool:
        if self._tells:
            self._board.post([*message, *[0] * (_NUMBERS - len(message))])
        return self._tells

    def _words(self, rank: int, message: Sequence[int]) -> str:
        _, index, rows, width, budget = message
        what = (
            f"out of memory on rank {rank} in micro-batch {index + 1} of {len(self._maps)}: "
            f"{rows} x {width:,} = {rows * width:,} slots"
        )
        if budget:
            return f"{what}. Set token_budget={budget}"
        return (
            f"{what}. One row alone does not fit, whatever the token_budget: shorten rows to fewer than {width:,} "
            "tokens, use activation checkpointing, or train on more memory"
        )


def _shape(slots: SlotMap) -> tuple[int, int, int]:
    """Rows, width (both axes together), and half of the slots, but at least a row's; 0 for a single row."""
    rows, width = (len(slots), sum(slots.widths)) if len(slots.widths) > 1 else slots.shape
    longest = int(slots.length.sum(axis=1).max()) if slots.shape[0] < len(slots) else width  # a pack: of its documents
    return rows, width, max(rows * width // 2, longest) if len(slots) > 1 else 0


def _first_line(error: BaseException) -> str:
    """With the words that others look for in it."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line if " out of memory." in line else f"{line}: out of memory."


__all__ = ["Growth", "MemoryGuard", "OutOfMemoryError", "is_out_of_memory"]
