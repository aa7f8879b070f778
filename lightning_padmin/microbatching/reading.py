"""The first steps of the path: a batch is flattened, its entries are found out, its rows measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning_padmin.architectures import ArchitectureError
from lightning_padmin.batch import BatchSpec, FlatBatch, LossSpec, RowTable, Schema, row_table_of, schema_of


class Reader:
    """Reads one batch after the other, and remembers of each what tells entries of the next.

    Args:
        loss: how the training step reduces its loss.
        multiple: widths are multiples of this.
        declared: the schema of some batch, whose entries then count as declared.
        encoder_decoder: the model is one, so labels run along the decoder.
        before: called before each batch is read.
        row_limit: longest row that may be regrouped.
        other_masks: see `measure`.
    """

    def __init__(
        self,
        loss: LossSpec,
        multiple: int,
        declared: Schema | None,
        encoder_decoder: bool,
        before: Callable[[], None] | None,
        row_limit: int | None,
        other_masks: str | None,
    ) -> None:
        self._loss, self._multiple, self._declared, self._previous = loss, multiple, declared, declared
        self._encoder_decoder, self._before = encoder_decoder, before
        self._row_limit, self._other_masks = row_limit, other_masks

    def read(self, batch: Any, spec: BatchSpec) -> tuple[FlatBatch, Schema, RowTable]:
        """The batch (or `FlatBatch`), its schema and its row table; raises PadMinError where it is not understood."""
        if self._before is not None:
            self._before()
        if self._declared is not None:
            spec = spec.declared_by(self._declared)
        flat = FlatBatch.of(batch, spec.paths)
        schema = schema_of(flat, spec, encoder_decoder=self._encoder_decoder, previous=self._previous)
        self._previous = schema
        table = row_table_of(flat, schema, self._loss, self._other_masks)
        longest = math.ceil(int(table.length.max()) / self._multiple) * self._multiple
        if self._row_limit is not None and longest > self._row_limit:
            raise ArchitectureError(
                f"a row takes {longest} positions, and this model's rotary embedding depends on the longest row of the "
                f"call beyond {self._row_limit}: shorten rows to {self._row_limit}, use a fixed scaling (linear, yarn, "
                "llama3), or enabled=False"
            )
        return flat, schema, table
