"""Rows as documents behind each other in one long row, through one index map.

    columns of the batch   0 1 2 3 4 5        one pack          0 1 2 3 4 5
    row a (start 2)        . . a b c .   ->   tokens            a b c d e f
    row b (start 0)        d e f . . .        position ids      0 1 2 0 1 2

Nothing is padding and there is no mask: a model keeps documents apart by their restarting positions, if it can (see
`verification.leak`). The first label of a document would be predicted from the document before it, so it carries no
loss, as the first token of a row carries none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_padmin.batch import Axis, Field, FlatBatch, RowTable, Schema, child_of, last_part
from lightning_padmin.errors import BatchError
from lightning_padmin.microbatching.padded_layout import SlotMap, readable

POSITIONS = "position_ids"


@dataclass(frozen=True)
class PackStyle:
    """What a pack has besides its tokens.

    Attributes:
        ignore_index: label without loss.
        shift: how many labels at the beginning of a document are predicted from before it.
        borders: whether it has `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` for attention kernels.
        seq_idx: whether it has `seq_idx` (1, T), the number of each token's document, for kernels of mixers.
        no_cache: whether it has `use_cache=False`; with a cache transformers does not look for restarts.
    """

    ignore_index: int = -100
    shift: int = 1
    borders: bool = False
    seq_idx: bool = False
    no_cache: bool = False


@dataclass(frozen=True, eq=False)
class PackMap(SlotMap):
    """A `SlotMap` of n documents in one row of `widths[0]` tokens, the sum of their lengths.

    Attributes:
        offsets: (n + 1,) int64, where each document begins, and the end of the last.
        style: how losses and kernels look at it.
    """

    offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    style: PackStyle = field(default_factory=lambda: PackStyle())

    @property
    def slots(self) -> int:
        """Tokens of all documents."""
        return self.widths[0]

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """What a model gets besides the tokens, so that it keeps documents apart."""
        made: dict[str, Any] = {POSITIONS: torch.as_tensor(self.positions, device=device)[None]}
        if self.style.borders:
            borders = torch.as_tensor(self.offsets, dtype=torch.int32, device=device)
            longest = int(self.length.max())
            made |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
            made |= {"max_length_q": longest, "max_length_k": longest}
        if self.style.seq_idx:
            document = np.repeat(np.arange(len(self), dtype=np.int32), self.length[:, 0])
            made["seq_idx"] = torch.as_tensor(document, device=device)[None]
        if self.style.no_cache:
            made["use_cache"] = False
        return made

    def take_batch(self, batch: Any, schema: Schema) -> Any:
        """The pack: of the caller's type, with None in place of the mask, and with `arguments`.

        Raises:
            BatchError: the batch is no mapping, so that there is no place for `position_ids`.
        """
        first = self.positions < self.style.shift
        masks: list[torch.device] = []

        def take(path: str, leaf: Any) -> Any:
            entry = schema.fields.get(path, Field("static"))
            if path == schema.mask:
                masks.append(leaf.device)
                return None
            if entry.kind == "static":
                return leaf
            if entry.kind == "row":
                return type(leaf)([leaf[k] for k in self.rows])
            if isinstance(leaf, np.ndarray):
                return self.take(readable(leaf), entry).numpy().astype(leaf.dtype, copy=False)
            taken = self.take(leaf, entry)
            if path in (schema.labels, schema.loss_mask) and first.any():
                where = torch.as_tensor(first, device=taken.device)[None]
                taken = taken.masked_fill(where, self.style.ignore_index if path == schema.labels else 0)
            return taken

        made = FlatBatch.of(batch, schema.fields).map(take)
        return _with(made, schema, self.arguments(masks[0]))

    @property
    def shape(self) -> tuple[int, int]:
        """(1, tokens): what a model gets."""
        return 1, self.widths[0]

    @cached_property
    def is_identity(self) -> bool:
        """Never: a pack has position ids and no mask."""
        return False

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """(T,) position of each token in its document."""
        return np.arange(self.widths[0]) - np.repeat(self.offsets[:-1], self.length[:, 0])

    @cached_property
    def _source(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(T,) row of the batch and column in it of each token."""
        n = self.length[:, 0]
        return np.repeat(self.rows, n), np.repeat(self.start[:, 0], n) + self.positions

    def take(self, tensor: Tensor, field: Field) -> Tensor:
        """The pack's part of a position entry, (1, T, ...) in place of (B, L, ...); a static entry as it is."""
        if field.kind == "static":
            return tensor
        row, column = (torch.as_tensor(index, device=tensor.device) for index in self._source)
        dims = (field.row_dim, field.position_dims[0])
        front = tensor.movedim(dims, (0, 1))
        return front[row, column].unsqueeze(0).movedim((0, 1), dims).contiguous()

    def restore(self, tensor: Tensor, first_column: int = 0, fill: float = 0, axis: Axis = "input") -> Tensor:
        """An output (1, T', ...) of the pack in the batch's layout (n, L, ...), its documents in `rows`' order.

        Args:
            tensor: column j belongs to token `first_column + j`.
            first_column: nonzero for models that return only their last columns.
            fill: value of slots that are padding in the batch.
            axis: the input axis, the only one.

        Raises:
            BatchError: the output is no tensor (1, positions, ...), or has positions that there are no tokens for.
        """
        width, source = self.widths[0], self.source_widths[0]
        fits = isinstance(tensor, Tensor) and tensor.ndim >= 2 and len(tensor) == 1
        if not fits or not 0 <= first_column <= width - tensor.shape[1]:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise BatchError(
                f"an output {found} with first_column={first_column} does not fit a pack of {width} tokens: restore "
                "takes (1, positions, ...)"
            )
        token = np.arange(first_column, first_column + tensor.shape[1])
        document = np.searchsorted(self.offsets, token, side="right") - 1
        column = torch.as_tensor(self._source[1][token], device=tensor.device)
        place = torch.as_tensor(document, device=tensor.device)
        restored = tensor.new_full((len(self), source, *tensor.shape[2:]), fill)
        return restored.index_put((place, column), tensor[0])


def pack_layout(table: RowTable, rows: Sequence[int] | NDArray[np.int64], style: PackStyle | None = None) -> PackMap:
    """The packed layout of some rows, in their order: no slot is padding."""
    index = np.asarray(rows, dtype=np.int64)
    lengths = table.length[index]
    offsets = np.concatenate([[0], np.cumsum(lengths[:, 0])])
    source = (table.widths, len(table), table.units)
    widths = (int(offsets[-1]),)
    return PackMap(index, table.start[index], lengths, widths, *source, offsets=offsets, style=style or PackStyle())


def refuse_holes(schema: Schema, table: RowTable) -> None:
    """Raises BatchError for rows that are not one stretch of tokens."""
    fix = "use layout='pad'"
    if len(schema.widths) > 1:
        raise BatchError(f"layout='pack': rows of an encoder-decoder cannot be packed: {fix}")
    real = table.real_tokens
    holes = np.flatnonzero((real > 0) & (real < table.length[:, 0]))
    if len(holes):
        raise BatchError(
            f"layout='pack': {schema.mask!r} has holes inside of {len(holes)} rows (first in row {holes[0]}), and a "
            f"pack has no mask that would leave them out: {fix}"
        )


def refuse_unpackable(batch: Any, schema: Schema, table: RowTable) -> None:
    """Raises BatchError for a batch whose rows cannot be documents of a pack; names the entry and the fix."""
    refuse_holes(schema, table)
    fix = "use layout='pad'"
    for path, entry in schema.fields.items():
        if entry.kind == "unit" or (entry.kind == "position" and len(entry.position_dims) > 1):
            raise BatchError(f"layout='pack': {path!r} cannot be packed ({entry.kind}): {fix}")
    for path, leaf in FlatBatch.of(batch, schema.fields).leaves.items():
        kind = schema.fields.get(path, Field("static")).kind
        if kind == "column":
            raise BatchError(
                f"layout='pack': {path!r} holds numbers of columns, and a pack has other columns than the batch: {fix}"
            )
        row = kind == "row"
        if row and isinstance(leaf, Tensor | np.ndarray):
            raise BatchError(
                f"layout='pack': {path!r} has one value per row, and a pack has one row of many documents: give it one "
                f"value per token (declared as 'position'), or {fix}"
            )
        if last_part(path) == POSITIONS and leaf is not None:
            _refuse_other_positions(path, leaf, table, fix)


def _refuse_other_positions(path: str, leaf: Any, table: RowTable, fix: str) -> None:
    column = np.arange(table.widths[0]) - table.start[:, :1]
    inside = torch.as_tensor((column >= 0) & (column < table.length[:, :1]))
    given = torch.as_tensor(leaf).cpu()
    if given.shape != inside.shape or not torch.equal(given[inside].long(), torch.as_tensor(column)[inside]):
        raise BatchError(
            f"layout='pack': {path!r} do not count every row from 0, and a restart is all that tells documents of a "
            f"pack apart: leave them out, or {fix}"
        )


def _with(made: Any, schema: Schema, more: Mapping[str, Any]) -> Any:
    """Further entries beside the mask."""
    parent, names = made, schema.mask.split(".")
    for name in names[:-1]:
        parent = child_of(parent, name)
    if not isinstance(parent, Mapping) or not hasattr(parent, "__setitem__"):
        raise BatchError(
            f"layout='pack': a batch of type {type(made).__name__} has no place for {POSITIONS!r} beside "
            f"{schema.mask!r}: have the collate function return a dictionary, or use layout='pad'"
        )
    for name, value in more.items():
        parent[name] = value
    return made


__all__ = ["PackMap", "PackStyle", "pack_layout", "refuse_unpackable"]
