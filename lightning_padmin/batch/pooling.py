"""Several batches as one, so that their rows can be planned together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_padmin.batch.columns import has_ends, widened, widened_item
from lightning_padmin.batch.fields import AXES, Field, Schema
from lightning_padmin.batch.tree import FlatBatch
from lightning_padmin.errors import BatchError


def pool(batches: Sequence[FlatBatch], schemas: Sequence[Schema]) -> FlatBatch:
    """One batch with the rows of all, in order, as wide as the widest; of the first one's type.

    Args:
        batches: batches of one kind, flattened: the same entries; they are only read.
        schemas: their schemas.

    Raises:
        BatchError: entries differ in name or kind, a shared entry differs, or a narrower batch has an entry whose
            filler is not known; names the entry and the fix.
    """
    if len(batches) == 1:
        return batches[0]
    leaves = [batch.leaves for batch in batches]
    first, fields = leaves[0], schemas[0].fields
    for other, schema in zip(leaves[1:], schemas[1:], strict=True):
        odd = set(other) ^ set(first) | {path for path in fields if schema.fields.get(path) != fields[path]}
        if odd:
            raise BatchError(
                f"{min(odd)!r} is not the same kind of entry in all batches of an accumulation window, so their rows "
                "cannot be pooled: have the collate function always return the same entries"
            )
    widths = [max(schema.widths[k] for schema in schemas) for k in range(len(schemas[0].widths))]

    def joined(path: str) -> Any:
        parts = [each[path] for each in leaves]
        field = fields.get(path, Field("static"))
        if field.kind == "column":
            k = AXES.index(field.axis)
            pairs = zip(parts, leaves, schemas, strict=True)
            parts = [
                _columns(path, part, field, _ends(each, schema, k), schema.widths[k], widths[k])
                for part, each, schema in pairs
            ]
        return _joined(path, parts, field, widths)

    return batches[0].with_leaves({path: joined(path) for path in first})


def _joined(path: str, parts: list[Any], field: Field, widths: Sequence[int]) -> Any:
    if field.kind == "static":
        if not all(_same(part, parts[0]) for part in parts[1:]):
            raise BatchError(
                f"{path!r} is shared by all rows and differs between the batches of an accumulation window, so their "
                "rows cannot be pooled: make it one entry per row"
            )
        return parts[0]
    if isinstance(parts[0], Tensor):
        if field.kind == "position":
            parts = [_widened(path, part, field, widths[AXES.index(field.axis)]) for part in parts]
        return torch.cat(parts, dim=field.row_dim)
    if isinstance(parts[0], np.ndarray):
        if field.kind == "position":
            wide = [_widened(path, torch.from_numpy(p), field, widths[AXES.index(field.axis)]).numpy() for p in parts]
            return np.concatenate(wide, axis=field.row_dim)
        return np.concatenate(parts, axis=field.row_dim)
    return type(parts[0])([item for part in parts for item in part])


def _columns(path: str, leaf: Any, field: Field, ends: Tensor | None, width: int, wider: int) -> Any:
    """Columns of a batch among those of a wider one: marks of no column, which lie beyond its width, still do."""
    if width == wider:
        return leaf
    ends = ends if has_ends(path) else None
    if isinstance(leaf, Tensor):
        return widened(leaf.movedim(field.row_dim, 0), ends, width, wider).movedim(0, field.row_dim)
    if isinstance(leaf, np.ndarray):
        values = torch.from_numpy(leaf.astype(np.int64)).movedim(field.row_dim, 0)
        return widened(values, ends, width, wider).movedim(0, field.row_dim).numpy().astype(leaf.dtype)
    rows = zip(leaf, [None] * len(leaf) if ends is None else [ends[k : k + 1] for k in range(len(leaf))], strict=True)
    return type(leaf)([widened_item(item, end, width, wider) for item, end in rows])


def _ends(leaves: Mapping[str, Any], schema: Schema, k: int) -> Tensor | None:
    """(B,) where each row's last real token ends; None where no mask says so."""
    path = (schema.mask, schema.decoder_mask)[k]
    if path is None:
        return None
    real: Tensor = leaves[path] != 0
    return real.shape[1] - real.flip(1).int().argmax(dim=1)


def _widened(path: str, tensor: Tensor, field: Field, width: int) -> Tensor:
    for dim in field.position_dims:
        missing = width - tensor.shape[dim]
        if missing == 0:
            continue
        if field.fill is None:
            raise BatchError(
                f"{path!r} is {tensor.shape[dim]} wide in one batch of an accumulation window and {width} in another, "
                "and what fills it up is not known: set pad_token_id for token ids, or declare "
                f"batch_schema={{{path!r}: Field('position', fill=...)}}"
            )
        if field.fill == "continue":
            steps = torch.arange(1, missing + 1, device=tensor.device, dtype=tensor.dtype)
            shape = [1] * tensor.ndim
            shape[dim] = missing
            more = tensor.narrow(dim, tensor.shape[dim] - 1, 1) + steps.view(shape)
            tensor = torch.cat([tensor, more], dim=dim)
        else:
            pad = [0, 0] * (tensor.ndim - 1 - dim) + [0, missing]
            tensor = F.pad(tensor, pad, value=field.fill)
    return tensor


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(np.array_equal(first, second)) if isinstance(first, np.ndarray) else bool(first == second)
