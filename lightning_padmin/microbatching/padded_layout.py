"""From the caller's batch to a micro-batch and back, through one index map.

    columns of the batch   0 1 2 3 4 5        slots of the micro-batch   0 1 2 3
    row a (start 2)        . . a b c .   ->                              a b c .
    row b (start 0)        d e . f . .   ->                              d e . f      (an interior hole stays)

Slot (i, j) takes column `(start[i] + j) mod L` of row `rows[i]`: leading padding moves behind the row (the roll),
columns beyond the longest row are not taken (the trim), and what fills a slot is the row's own padding. Each entry
is gathered from the caller's tensor directly; nothing is rolled or copied first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_padmin.batch import (
    AXES,
    Axis,
    Field,
    FlatBatch,
    RowTable,
    Schema,
    has_ends,
    moved,
    moved_item,
    unit_index,
)
from lightning_padmin.errors import BatchError


@dataclass(frozen=True, eq=False)
class SlotMap:
    """Which row and column each slot of one micro-batch takes. n rows; widths W per axis.

    Attributes:
        rows: (n,) int64, rows of the batch, in the micro-batch's order.
        start: (n, A) int64, first real column of each row.
        length: (n, A) int64, span of each row.
        widths: width W of the micro-batch per axis.
        source_widths: width L of the batch per axis.
        source_rows: rows B of the batch.
        units: path of each unit entry -> (B,) int64, how many of its slices each row of the batch has.
    """

    rows: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    widths: tuple[int, ...]
    source_widths: tuple[int, ...]
    source_rows: int
    units: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    _places: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def slots(self) -> int:
        """Rows x width, both axes."""
        return len(self) * sum(self.widths)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width of the micro-batch's entries."""
        return len(self), self.widths[0]

    @cached_property
    def is_identity(self) -> bool:
        """Whether the micro-batch is the batch as it is, so that the batch itself can be passed on.

        Not so for one row with padding behind it, whose position ids have to continue.
        """
        in_place = self.widths == self.source_widths and not self.start.any()
        in_place = in_place and (len(self) > 1 or bool((self.length == self.widths).all()))
        return in_place and np.array_equal(self.rows, np.arange(self.source_rows))

    def _axis(self, axis: Axis) -> tuple[NDArray[np.int64], NDArray[np.int64], int, int]:
        k = AXES.index(axis)
        return self.start[:, k], self.length[:, k], self.widths[k], self.source_widths[k]

    def take(self, tensor: Tensor, field: Field) -> Tensor:
        """The micro-batch's part of a row or position entry.

        Args:
            tensor: the caller's tensor, rows in `field.row_dim`; it is only read.
            field: kind `"row"`, `"position"`, `"column"` or `"static"`.

        Returns:
            n in place of B, W in place of L; the tensor itself for a static entry.

        Raises:
            BatchError: the width goes beyond the batch's own and the field has no fill.
        """
        return self._take(tensor, field, {})

    def _take(self, tensor: Tensor, field: Field, indices: dict[Any, Tensor]) -> Tensor:
        """`take`, with indices that entries of one batch share."""
        if field.kind == "static":
            return tensor
        rows = _kept(indices, ("rows", tensor.device), lambda: torch.as_tensor(self.rows, device=tensor.device))
        if field.kind == "row":
            return _select(tensor, field.row_dim, rows)
        if field.kind == "column":
            return self._columns(_select(tensor, field.row_dim, rows), field)
        start, _, width, source = self._axis(field.axis)
        if not start.any() and width <= source:
            for dim in field.position_dims:
                tensor = tensor.narrow(dim, 0, width)
            return self._continued(_select(tensor, field.row_dim, rows), field)
        if width > source and field.fill is None:
            raise BatchError(f"width {width} is beyond the batch's own {source} and the entry has no fill value")
        taken = self._gather(tensor, field, rows, indices)
        if width > source and not isinstance(field.fill, str | None):
            for dim in field.position_dims:
                taken.narrow(dim, source, width - source).fill_(field.fill)
        return self._continued(taken, field)

    def _columns(self, values: Tensor, field: Field, ends: bool = True) -> Tensor:
        """Numbers of columns of the rows taken; see `columns`."""
        start, length, _, source = self._axis(field.axis)
        if not start.any():
            return values
        first, span = (torch.as_tensor(each, device=values.device) for each in (start, length))
        return moved(values.movedim(field.row_dim, 0), first, span, source, ends).movedim(0, field.row_dim).contiguous()

    def _gather(self, tensor: Tensor, field: Field, rows: Tensor, indices: dict[Any, Tensor]) -> Tensor:
        start, _, width, source = self._axis(field.axis)

        def make_columns() -> Tensor:
            own = torch.as_tensor(start, device=tensor.device)[:, None]
            return (own + torch.arange(width, device=tensor.device)) % source

        columns = _kept(indices, (field.axis, tensor.device), make_columns)
        if (field.row_dim, field.position_dims) == (0, (1,)) and tensor.is_contiguous():
            key = (field.axis, "flat", tensor.device)
            flat = _kept(indices, key, lambda: (columns + rows[:, None] * source).flatten())
            return tensor.flatten(0, 1)[flat].view(*columns.shape, *tensor.shape[2:])
        dims = (field.row_dim, *field.position_dims)
        front = tensor.movedim(dims, tuple(range(len(dims))))
        n = len(self)
        index = [rows.view(n, *[1] * len(field.position_dims))]
        for k in range(len(field.position_dims)):
            shape = [n] + [1] * len(field.position_dims)
            shape[1 + k] = width
            index.append(columns.view(shape))
        return front[tuple(index)].movedim(tuple(range(len(dims))), dims).contiguous()

    def _continued(self, taken: Tensor, field: Field) -> Tensor:
        """Position ids beyond a row's end count on upward.

        In a micro-batch of one row (models read a restart there as a second, packed document), and beyond the batch's
        own width, where there is nothing to take.
        """
        if field.fill != "continue":
            return taken
        _, length, width, source = self._axis(field.axis)
        end = length if len(self) == 1 else np.full(len(self), source)
        beyond = np.arange(width) - (end[:, None] - 1)
        if not (beyond > 0).any():
            return taken
        dim = field.position_dims[0]
        dtype = taken.dtype
        front = taken.movedim((field.row_dim, dim), (0, 1)).to(torch.int64 if not dtype.is_floating_point else dtype)
        steps = torch.as_tensor(beyond, device=taken.device).view(*beyond.shape, *[1] * (front.ndim - 2))
        last = torch.as_tensor(np.minimum(end, width) - 1, device=taken.device)
        anchor = front[torch.arange(len(self), device=taken.device), last].unsqueeze(1)
        filled = torch.where(steps > 0, anchor + steps.to(front.dtype), front).to(dtype)
        return filled.movedim((0, 1), (field.row_dim, dim)).contiguous()

    def take_batch(self, batch: Any, schema: Schema) -> Any:
        """The micro-batch: same container types, each entry by its field. The batch (or `FlatBatch`) is only read."""
        indices: dict[Any, Tensor] = {}

        def take(path: str, leaf: Any) -> Any:
            field = schema.fields.get(path, Field("static"))  # an optional entry that is None has no field
            if field.kind == "static":
                return leaf
            if field.kind == "unit":
                return _take_items(leaf, unit_index(self.units[path], self.rows))
            if field.kind == "column":
                return self._take_columns(path, leaf, field)
            if isinstance(leaf, Tensor):
                return self._take(leaf, field, indices)
            if field.kind == "row":
                return _take_items(leaf, self.rows, field.row_dim)
            return self._take(readable(leaf), field, indices).numpy().astype(leaf.dtype, copy=False)

        return FlatBatch.of(batch, schema.fields).map(take)

    def _take_columns(self, path: str, leaf: Any, field: Field) -> Any:
        taken = _take_items(leaf, self.rows, field.row_dim)
        if isinstance(taken, Tensor):
            return self._columns(taken, field, has_ends(path))
        if isinstance(taken, np.ndarray):
            return self._columns(readable(taken), field, has_ends(path)).numpy().astype(taken.dtype, copy=False)
        start, length, _, source = self._axis(field.axis)
        rows = zip(taken, start.tolist(), length.tolist(), strict=True)
        return type(leaf)([moved_item(item, first, span, source, has_ends(path)) for item, first, span in rows])

    def restore(self, tensor: Tensor, first_column: int = 0, fill: float = 0, axis: Axis = "input") -> Tensor:
        """An output (n, W', ...) of the micro-batch in the batch's layout (n, L, ...), its rows in `rows`' order.

        Args:
            tensor: column j belongs to slot `first_column + j`.
            first_column: nonzero for models that return only their last columns.
            fill: value of slots that are padding in the batch.
            axis: which axis the positions run along.

        Raises:
            BatchError: the output has other rows than the micro-batch, or positions that it has no slots for.
        """
        start, length, width, source = self._axis(axis)
        if not isinstance(tensor, Tensor):
            raise BatchError(
                f"restore takes one tensor (rows, positions, ...), not {type(tensor).__name__}: pass .logits"
            )
        if tensor.ndim < 2 or len(tensor) != len(self) or not 0 <= first_column <= width - tensor.shape[1]:
            raise BatchError(
                f"an output of shape {tuple(tensor.shape)} with first_column={first_column} does not fit a micro-batch "
                f"of {len(self)} rows and width {width}: restore takes (rows, positions, ...)"
            )
        key = (axis, first_column, tensor.shape[1], tensor.device)
        if key not in self._places:  # the next output may have the same
            slot = np.arange(first_column, first_column + tensor.shape[1])
            row, column = np.nonzero(slot[None, :] < length[:, None])
            indices = (row, start[row] + slot[column], column)
            self._places[key] = tuple(torch.as_tensor(index, device=tensor.device) for index in indices)
        rows, target, columns = self._places[key]
        restored = tensor.new_full((len(self), source, *tensor.shape[2:]), fill)
        return restored.index_put((rows, target), tensor[rows, columns])


def readable(array: NDArray[Any]) -> Tensor:
    """An array as torch reads it: neither negative strides, nor a foreign byte order, nor read-only."""
    fits = array.dtype.isnative and array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if fits else np.array(array, array.dtype.newbyteorder("="), order="C"))


def _kept(indices: dict[Any, Tensor], key: Any, make: Callable[[], Tensor]) -> Tensor:
    if key not in indices:
        indices[key] = make()
    return indices[key]


def pad_layout(
    table: RowTable,
    rows: Sequence[int] | NDArray[np.int64],
    multiple: int = 1,
    max_widths: Sequence[int] | None = None,
    least_widths: Sequence[int] | None = None,
) -> SlotMap:
    """The padded layout of some rows: as wide as the longest of them, rounded up.

    Args:
        table: the batch's row table.
        rows: row indices, in the order wanted.
        multiple: widths become multiples of this ...
        max_widths: ... but no wider than this per axis (default: no limit).
        least_widths: ... and at least as wide as this.
    """
    index = np.asarray(rows, dtype=np.int64)
    longest = table.length[index].max(axis=0)
    widths = [math.ceil(int(width) / multiple) * multiple for width in longest]
    if max_widths is not None:
        widths = [
            max(min(width, limit), int(need)) for width, limit, need in zip(widths, max_widths, longest, strict=True)
        ]
    if least_widths is not None:
        widths = [max(width, int(least)) for width, least in zip(widths, least_widths, strict=True)]
    source = (table.widths, len(table), table.units)
    return SlotMap(index, table.start[index], table.length[index], tuple(widths), *source)


def _take_items(leaf: Any, index: NDArray[np.int64], dim: int = 0) -> Any:
    if isinstance(leaf, Tensor):
        return _select(leaf, dim, torch.as_tensor(index, device=leaf.device))
    return leaf.take(index, axis=dim) if isinstance(leaf, np.ndarray) else type(leaf)([leaf[k] for k in index])


def _select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """As `index_select`, which is slower on a trimmed view and does not take every dtype."""
    return tensor[(slice(None),) * dim + (index,)].contiguous()
