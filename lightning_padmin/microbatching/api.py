"""Micro-batches of one batch as functions: `iter_micro_batches`, and `compact` for the whole batch as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_padmin.batch import AXES, Axis, FlatBatch, row_table_of, schema_of
from lightning_padmin.config import PadMinConfig, as_config
from lightning_padmin.errors import ConfigError
from lightning_padmin.microbatching.batcher import MicroBatcher
from lightning_padmin.microbatching.micro_batches import MicroBatch
from lightning_padmin.microbatching.padded_layout import SlotMap, pad_layout


def iter_micro_batches(batch: Any, config: PadMinConfig | None = None) -> Iterator[MicroBatch]:
    """The micro-batches of one batch in one process; unpack each as `micro, weight`.

    A mean loss over a batch without any loss token is 0/0, with or without this library: the weights are shares of its
    rows then (`micro.has_loss` is False), and a loss that is not finite is best skipped.

    Example:
        >>> for micro, weight in iter_micro_batches(batch, PadMinConfig(token_budget=8192)):
        ...     (model(**micro).loss * weight).backward()

    Raises:
        PadMinError: before the first micro-batch, for a batch that cannot be planned.
    """
    config = as_config(config)
    if config.shape_buckets is not None or config.launch_cost == "measured":
        name = "shape_buckets" if config.shape_buckets is not None else "launch_cost"
        raise ConfigError(
            f"{name}={getattr(config, name)!r} takes more than one batch to find out: keep one MicroBatcher(config), "
            "and loop over what its prepare(batch) returns"
        )
    return iter(MicroBatcher(config).prepare(batch))


@dataclass(frozen=True, eq=False)
class CompactBatch:
    """A whole batch, rolled and trimmed.

    Attributes:
        batch: of the caller's type.
        lengths: (B,) int64 spans, or (B, 2) for encoder-decoder rows.
        slots: the index map.
    """

    batch: Any
    lengths: NDArray[np.int64]
    slots: SlotMap

    def restore(self, tensor: Tensor, first_column: int = 0, fill: float = 0, axis: Axis = "input") -> Tensor:
        """A per-position output (B, W, ...) in the layout of the caller's batch, (B, L, ...)."""
        return self.slots.restore(tensor, first_column, fill, axis)


def compact(batch: Any, config: PadMinConfig | None = None) -> CompactBatch:
    """Rolls left padding to the right and trims columns that are padding in every row; rows keep their order.

    Args:
        batch: anything `infer_schema` understands; it is only read. Labels are not needed.
        config: the options; those about rounding, keys and schema count here.

    Raises:
        PadMinError: the batch's layout is ambiguous or its values are malformed.
    """
    config = as_config(config)
    spec = config.batch
    flat = FlatBatch.of(batch, spec.paths)
    schema = schema_of(flat, spec)
    table = row_table_of(flat, schema, config.loss.unasked())
    limits = None if schema.can_widen else schema.widths
    slots = pad_layout(table, np.arange(len(table)), config.pad_to_multiple_of, limits)
    lengths = table.length if table.length.shape[1] == len(AXES) else table.length[:, 0]
    return CompactBatch(batch if slots.is_identity else slots.take_batch(flat, schema), lengths, slots)
