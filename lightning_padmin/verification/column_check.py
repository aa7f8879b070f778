"""Whether numbers of columns that nobody has declared are behind what the roll changes."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_padmin.batch import Field, RowTable, Schema
from lightning_padmin.distributed import Exchange
from lightning_padmin.verification.passes import Passes, ShardedPasses
from lightning_padmin.verification.probe import maybe_columns
from lightning_padmin.verification.sketch import Sketches

# Entries that may hold columns: looked at, as bits of an int64, and tried one by one.
_MOST_ENTRIES, _MOST_SINGLES = 48, 6


class ColumnCheck:
    """Reads the batch with entries as what they may be in place of what they were taken for.

    Looked at first: rolled without them, a step may fail, or have no loss at all.

    Args:
        passes: of the probe.
        batch: the batch.
        schema: its schema.
        table: its row table.
        exchange: the collective.

    Attributes:
        alternatives: entries, each as what it may be besides; empty where nothing that is trained reads them.
    """

    def __init__(self, passes: Passes, batch: Any, schema: Schema, table: RowTable, exchange: Exchange) -> None:
        self._passes, self._batch, self._schema, self._table = passes, batch, schema, table
        self._exchange, self._limit = exchange, 0.0
        self.alternatives: list[tuple[str, Field]] = []

    def __call__(self, came: Sketches, limit: float) -> tuple[int, float, str] | None:
        """Entries that explain what the roll changes, as bits, the difference, and where it is; None elsewhere."""
        self._limit = limit
        self.alternatives = alternatives = self._agreed_alternatives()
        if not alternatives:  # on no rank, since they are agreed
            return None
        plain = self._attempt(self._schema)
        value, where = self._apart(plain, came)
        moves = not value <= self._limit and 0 < self._passes.largest(came) < np.inf
        if not self._any(moves):
            return None
        sets = [[k] for k in range(len(alternatives))] if len(alternatives) <= _MOST_SINGLES else []
        sets += [list(range(len(alternatives)))] if len(alternatives) != 1 else []
        matching = 0
        for chosen in sets:
            fields = dict(self._schema.fields) | dict(alternatives[k] for k in chosen)
            found = self._attempt(replace(self._schema, fields=fields))
            if self._apart(found, came)[0] <= self._limit and not (matching and len(chosen) > 1):
                matching |= sum(1 << k for k in chosen)
            same = self._apart(found, came if plain is None else plain)[0] <= self._limit and plain is not None
            if len(chosen) == len(alternatives) and not self._any(not same):
                self.alternatives = []  # nothing that is trained reads them
        if moves and (matching or not np.isfinite(value)):
            return matching, value, where
        return None

    def _attempt(self, schema: Schema) -> Sketches | None:
        """Un-split gradients, rolled, read by a schema that may be wrong; None where the step fails."""
        try:
            return self._passes.reading(self._batch, schema)
        except Exception:
            return None

    def _apart(self, found: Sketches | None, came: Sketches) -> tuple[float, str]:
        failed = self._any(found is None)
        if found is None or (failed and isinstance(self._passes, ShardedPasses)):
            return np.inf, ""
        return self._passes.difference(found, came, self._limit)

    def _agreed_alternatives(self) -> list[tuple[str, Field]]:
        """Entries that nobody declared, each as what it may be in place of what it was taken for; as on all ranks."""
        entries = maybe_columns(self._batch, self._schema, self._table)[:_MOST_ENTRIES]
        options = [
            (path, Field("row", field.row_dim) if field.kind == "column" else replace(field, kind="column"))
            for path, field, _ in entries
        ]
        fits = [each is not False for _, _, each in entries]
        moves = [each is True for _, _, each in entries]
        digest = zlib.crc32("\n".join(f"{path} {field.axis}" for path, field in options).encode())
        bits = [sum(1 << k for k, flag in enumerate(flags) if flag) for flags in (fits, moves)]
        agreed = self._exchange([digest, *bits])
        if (agreed[:, 0] != agreed[0, 0]).any():
            return []
        both = int(np.bitwise_and.reduce(agreed[:, 1])) & int(np.bitwise_or.reduce(agreed[:, 2]))
        return [option for k, option in enumerate(options) if both >> k & 1]

    def _any(self, flag: bool) -> bool:
        return bool((self._exchange([int(flag)])[:, 0] != 0).any())


__all__ = ["ColumnCheck"]
