"""The micro-batches of one batch, gathered when asked for, and their outputs put back in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_padmin.batch import Axis, FlatBatch, RowTable, Schema
from lightning_padmin.errors import BatchError
from lightning_padmin.microbatching.padded_layout import SlotMap
from lightning_padmin.microbatching.timing import LaunchMeter
from lightning_padmin.planning import Plan
from lightning_padmin.stats import PaddingStats


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward and backward pass.

    Attributes:
        batch: of the caller's type, rolled and trimmed.
        weight: what its loss is multiplied by, so that gradients sum to those of the whole batch.
        rows: (n,) int64, rows of the batch, in the micro-batch's order.
        index: position in the sequence of micro-batches, 0 ... count - 1.
        count: number of micro-batches.
        is_dummy: a zero-weight copy of a row that only keeps this rank in step with others.
        has_loss: False in a batch without any loss token, over which a mean is 0/0.
    """

    batch: Any
    weight: float
    rows: NDArray[np.int64]
    index: int
    count: int
    is_dummy: bool = False
    has_loss: bool = True

    def __iter__(self) -> Iterator[Any]:
        """Unpacks as `micro, weight`."""
        return iter((self.batch, self.weight))

    @property
    def is_last(self) -> bool:
        """Whether gradients are to be synchronised after this one."""
        return self.index == self.count - 1


class MicroBatches(Sequence[MicroBatch]):
    """The micro-batches of one batch, gathered when asked for; can be gone through any number of times.

    Attributes:
        plan: which rows go together (dummies are not part of it).
        table: the batch's row table.
        stats: what this batch costs before and after, on this rank.
        slot_maps: one per micro-batch, dummies included.
        weights: (K,) float64, weight of each micro-batch's loss; shares of the rows where the batch has no loss tokens
            at all (zeros for a global mean to which other ranks have some).
        shares: (K,) float64, share of each micro-batch in a mean over the batch; sums to 1, 0 for dummies. Unlike
            the weights also for a summed loss and a global mean.
        grows: memory may not suffice: one of the first batches, or on some rank a micro-batch has more slots than any
            before it.
        lost_targets: targets of all ranks that the roll has taken, see `RowTable`.
    """

    def __init__(
        self,
        batch: FlatBatch,
        schema: Schema,
        table: RowTable,
        plan: Plan,
        slot_maps: Sequence[SlotMap],
        weights: NDArray[np.float64],
        shares: NDArray[np.float64],
        stats: PaddingStats,
        grows: bool = True,
        lost_targets: int = 0,
        meter: LaunchMeter | None = None,
    ) -> None:
        self._meter = meter
        self.grows, self.lost_targets = grows, lost_targets
        self._batch, self.schema = batch, schema
        self.table, self.plan, self.stats = table, plan, stats
        self.slot_maps, self.weights, self.shares = tuple(slot_maps), weights, shares

    def __len__(self) -> int:
        return len(self.slot_maps)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        k = range(len(self))[index]
        slots = self.slot_maps[k]
        if self._meter is not None:
            self._meter.gathered(len(slots), sum(slots.widths))
        batch = self.source if slots.is_identity else slots.take_batch(self._batch, self.schema)
        has_loss = self.table.has_loss
        return MicroBatch(batch, float(self.weights[k]), slots.rows, k, len(self), self.is_dummy(k), has_loss)

    def __iter__(self) -> Iterator[MicroBatch]:
        """One after the other. The inherited method would take an IndexError inside of a gather for the end."""
        return (self[k] for k in range(len(self)))

    @property
    def source(self) -> Any:
        """The batch that they are of; only read."""
        return self._batch.whole

    def is_dummy(self, k: int) -> bool:
        """Whether micro-batch k is a dummy; without gathering it."""
        return k >= len(self.plan)

    def restore_rows(self, outputs: Sequence[Tensor]) -> Tensor:
        """Per-row outputs (n_k, ...), one for each micro-batch (or each that is no dummy), as (B, ...).

        Raises:
            BatchError: an output is missing, or has another number of rows than its micro-batch.
        """
        pairs = self._without_dummies(outputs, [len(slots) for slots in self.slot_maps])
        rows = np.concatenate([slots.rows for slots, _ in pairs])
        joined = torch.cat([output for _, output in pairs])
        return joined.index_select(0, torch.as_tensor(np.argsort(rows), device=joined.device))

    def restore(
        self, outputs: Sequence[Tensor], first_column: int = 0, fill: float = 0, axis: Axis = "input"
    ) -> Tensor:
        """Per-position outputs (n_k, W_k, ...) as (B, L, ...) in the batch's own layout; padding slots get `fill`.

        Raises:
            BatchError: an output is missing, or does not fit its micro-batch.
        """
        pairs = self._without_dummies(outputs, [slots.shape[0] for slots in self.slot_maps])
        return self.restore_rows([slots.restore(part, first_column, fill, axis) for slots, part in pairs])

    def _without_dummies(self, outputs: Sequence[Tensor], rows: Sequence[int]) -> list[tuple[SlotMap, Tensor]]:
        maps = self.slot_maps[: len(self.plan)]
        wanted = list(rows[: len(maps)])
        sizes = [len(output) if output.ndim else 0 for output in outputs]
        if len(outputs) not in (len(maps), len(self)) or sizes[: len(maps)] != wanted:
            raise BatchError(
                f"outputs of {sizes} rows do not fit {len(maps)} micro-batches of {wanted} rows: pass the output of "
                "each, in order"
            )
        return list(zip(maps, outputs, strict=False))


def sync_on_last(
    micro_batches: Sequence[MicroBatch], no_sync: Callable[[], AbstractContextManager[Any]] | None
) -> Iterator[MicroBatch]:
    """Yields each micro-batch, all but the last inside of `no_sync()`, so that gradients are reduced once.

    Forward and backward pass must both run in the loop's body: DistributedDataParallel decides in the forward pass.
    """
    for micro in micro_batches:
        with nullcontext() if micro.is_last or no_sync is None else no_sync():
            yield micro
