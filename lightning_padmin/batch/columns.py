"""Numbers of columns: entries whose values say where in its row something is.

    columns of the batch   0 1 2 3 4 5                              slots of the micro-batch   0 1 2 3
    row a (start 2)        . . a b c .    answer at column 3   ->                              a b c .    at slot 1

Left padding is part of such a number, so it moves with its row: c -> c - start. Values below 0, and from the width of
the batch on, are no columns and stay; but where a row ends at the batch's width, that width may be the exclusive end
of a span.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_padmin.batch.tree import last_part

Ints = NDArray[np.int64]
# Models of transformers compare scores over columns with these, and ignore them from the width on.
_ANSWERS = ("start_positions", "end_positions")
# Their models take hidden states at these, or count questions by them.
KNOWN = (*_ANSWERS, "cls_index", "mc_token_ids", "question_positions")


def has_ends(path: str) -> bool:
    """Whether the batch's width can be the exclusive end of a row, and not a mark of no column."""
    return last_part(path) not in _ANSWERS


def holds_integers(leaf: Any) -> bool:
    """Whether the values of an entry can be columns: integers in a tensor, an array, or a list of one entry per row."""
    if isinstance(leaf, Tensor):
        return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool or leaf.is_quantized)
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "iu"
    if isinstance(leaf, list | tuple):
        filled = [item for item in leaf if not (isinstance(item, list | tuple) and not item)]  # rows may have none
        return bool(filled) and all(_is_integer(item) or holds_integers(item) for item in filled)
    return False


def _is_integer(item: object) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def as_table(leaf: Any, row_dim: int = 0) -> Tensor:
    """(B, k) int64, all values of each row; -1, which is no column, fills up rows of fewer."""
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(leaf.astype(np.int64))
    if isinstance(leaf, Tensor):
        return leaf.movedim(row_dim, 0).reshape(leaf.shape[row_dim], -1).long()
    rows = [_values(item) for item in leaf]
    longest = max(map(len, rows), default=0)
    return torch.tensor([row + [-1] * (longest - len(row)) for row in rows], dtype=torch.int64).reshape(len(rows), -1)


def _values(item: Any) -> list[int]:
    if isinstance(item, Tensor | np.ndarray):
        return [int(value) for value in item.reshape(-1).tolist()]
    return [value for each in item for value in _values(each)] if isinstance(item, list | tuple) else [int(item)]


def moved(values: Tensor, start: Tensor, length: Tensor, width: int, ends: bool) -> Tensor:
    """Columns of the rolled rows.

    Args:
        values: (n, ...) integers.
        start: (n,) first real column of each row.
        length: (n,) span of each row.
        width: of the batch that they are columns of.
        ends: see `has_ends`.
    """
    shape = (-1, *[1] * (values.ndim - 1))
    start, end = start.view(shape), (start + length).view(shape)
    columns = values.long()
    is_column = (columns >= 0) & (columns < width)
    if ends:
        is_column |= (columns == width) & (end == width)
    return torch.where(is_column, columns - start, columns).to(values.dtype)


def moved_item(item: Any, start: int, length: int, width: int, ends: bool) -> Any:
    """The same for the entry of one row in a list: a number, a list, a tensor or an array of them."""
    if isinstance(item, list | tuple):
        return type(item)([moved_item(each, start, length, width, ends) for each in item])
    values = torch.as_tensor(item)[None]
    found = moved(values, torch.tensor([start]), torch.tensor([length]), width, ends)[0]
    if isinstance(item, Tensor):
        return found.to(item.device)
    return found.numpy().astype(item.dtype) if isinstance(item, np.ndarray) else type(item)(int(found))


def in_front(table: Tensor, start: Tensor, width: int) -> Tensor:
    """(B,) the largest value of each row that is a column in front of the row's first real token; -1: none."""
    if not table.shape[1]:
        return torch.full_like(start, -1)
    start = start.to(table.device)
    wrong = (table >= 0) & (table < start[:, None]) & (table < width)
    return torch.where(wrong, table, -1).amax(dim=1)


def could_be_columns(leaf: Any, row_dim: int, start: Ints, length: Ints, width: int) -> bool | None:
    """Whether all values in left-padded rows are columns of these rows, or exclusive ends; None: there is no such row.

    Args:
        leaf: a row entry.
        row_dim: its dimension of rows.
        start: (B,) first real column of each row on one axis.
        length: (B,) spans on it.
        width: of the batch on that axis.
    """
    padded = np.flatnonzero(start > 0)
    if not len(padded):
        return None
    values = as_table(leaf, row_dim).cpu().numpy()[padded]
    first, end = start[padded, None], (start + length)[padded, None]
    is_column = (values >= 0) & (values <= width)
    inside = (values >= first) & (values <= end)
    return bool(is_column.any() and (inside | ~is_column).all())


def widened(values: Tensor, ends: Tensor | None, width: int, wider: int) -> Tensor:
    """Columns of a batch that becomes wider: what was no column, being at least the width, must not become one.

    Args:
        values: (B, ...) integers, rows first.
        ends: (B,) where each row ends, if the width can be an exclusive end.
        width: of the batch before.
        wider: of the batch after.
    """
    marks = (values >= width) & (values < wider)
    if ends is not None:
        marks &= ~((values == width) & (ends.to(values.device).view(-1, *[1] * (values.ndim - 1)) == width))
    return torch.where(marks, values + (wider - width), values).to(values.dtype)


def widened_item(item: Any, end: Tensor | None, width: int, wider: int) -> Any:
    """The same for the entry of one row in a list."""
    if isinstance(item, list | tuple):
        return type(item)([widened_item(each, end, width, wider) for each in item])
    found = widened(torch.as_tensor(item)[None], end, width, wider)[0]
    if isinstance(item, Tensor):
        return found
    return found.numpy().astype(item.dtype) if isinstance(item, np.ndarray) else type(item)(int(found))
