"""Out of memory: which micro-batch it was, and the next budget to try, told on every rank.

Micro-batches run longest first, so that memory which does not suffice shows in the first pass. Ranks that did not run
out would wait for the one that did until the timeout of the process group. Where a batch has a larger micro-batch than
any before it, on any rank, all ranks therefore tell each other how it went: before the last micro-batch, whose forward
pass may be collective, and behind its forward pass. Later batches cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_padmin.distributed import Exchange, exchange_alone
from lightning_padmin.errors import PadMinError, PeerError
from lightning_padmin.layout import SlotMap
from lightning_padmin.sequence import MicroBatches

_WORDS = ("out of memory", "can't allocate memory", "not enough memory")
_FINE, _FAILED, _OUT_OF_MEMORY = range(3)


class OutOfMemoryError(PadMinError, torch.OutOfMemoryError):
    """A micro-batch did not fit in memory; the message names rank, shape and the next budget to try."""

    code = 10


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator raised it, of an accelerator or of the CPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


class MemoryGuard:
    """Around the passes of one batch.

    Args:
        micro_batches: of the batch.
        exchange: the collective of the ranks whose passes are not collective but for the last one of a batch; by
            default this rank tells nobody.
        rank: of this process.
        last: the index of the micro-batch that runs last; default: the last one.

    Example:
        >>> guard = MemoryGuard(micro_batches, exchange_all, rank)
        >>> for micro in micro_batches:
        ...     with guard.around(micro.index):
        ...         loss = model(**micro.batch).loss * micro.weight
        ...         guard.forward_is_done(micro.index)
        ...         loss.backward()
    """

    def __init__(
        self, micro_batches: MicroBatches, exchange: Exchange = exchange_alone, rank: int = 0, last: int | None = None
    ) -> None:
        self._maps, self._exchange, self._rank = micro_batches.slot_maps, exchange, rank
        self._last = len(self._maps) - 1 if last is None else last
        self._tells = micro_batches.grows
        self._is_over = False  # all ranks know

    @contextmanager
    def around(self, index: int) -> Iterator[None]:
        """Forward and backward pass of a micro-batch.

        Raises:
            OutOfMemoryError: on every rank, where one has run out of memory; elsewhere on that rank.
            PeerError: another rank has raised another error.
        """
        try:
            if index == self._last and len(self._maps) > 1:
                self._agree([_FINE])
            yield
        except Exception as error:
            if self._is_over:
                raise
            out = is_out_of_memory(error)
            message = [_OUT_OF_MEMORY, index, *_shape(self._maps[index])] if out else [_FAILED]
            self._tell(message)
            if out:
                raise OutOfMemoryError(self._words(self._rank, message)) from error
            raise

    def forward_is_done(self, index: int) -> None:
        """To be called between forward and backward pass."""
        if index == self._last:
            self._agree([_FINE])
            self._tells = False

    def _agree(self, message: Sequence[int]) -> None:
        found = self._tell(message)
        failed = np.flatnonzero(found[:, 0])
        if not len(failed):
            return
        self._is_over = True
        # A rank that has run out of memory says more than one that has raised something else.
        rank = int(failed[np.argmax(found[failed, 0])])
        if found[rank, 0] == _OUT_OF_MEMORY:
            raise OutOfMemoryError(self._words(rank, found[rank].tolist()))
        raise PeerError(f"rank {rank} raised an error in training; its message stands in that rank's log")

    def _tell(self, message: Sequence[int]) -> Any:
        if not self._tells:
            return np.zeros((1, 5), dtype=np.int64)
        return self._exchange([*message, *[0] * (5 - len(message))])

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
    rows, width = len(slots), sum(slots.widths)
    return rows, width, max(rows * width // 2, width) if rows > 1 else 0


__all__ = ["MemoryGuard", "OutOfMemoryError", "is_out_of_memory"]
