"""Whether entries have the shapes that their fields claim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lightning_padmin.batch.columns import holds_integers
from lightning_padmin.batch.fields import Axis, Field
from lightning_padmin.batch.tree import DEEPEST, Paths, find_path
from lightning_padmin.errors import SchemaError


def check_shape(path: str, leaf: Any, entry: Field, rows: int, widths: Mapping[Axis, int | None]) -> Field:
    """The field, if the leaf has the shape that it claims.

    Args:
        path: the entry's path.
        leaf: its value.
        entry: its field, by name or declaration.
        rows: number of rows of the batch.
        widths: width of the batch per axis; None where there is no such axis.

    Raises:
        SchemaError: the leaf has another type, number of rows or width.
    """
    if entry.kind == "static":
        return entry
    if entry.kind == "column":
        _check_columns(path, leaf, entry, widths)
    if isinstance(leaf, list | tuple) and entry.kind in ("row", "column", "unit") and entry.row_dim == 0:
        if entry.kind != "unit" and len(leaf) != rows:
            raise SchemaError(f"{path!r} has {len(leaf)} entries but the batch has {rows} rows")
        return entry
    if not isinstance(leaf, torch.Tensor | np.ndarray):
        raise SchemaError(
            f"{path!r} is {type(leaf).__name__}, expected a tensor, since it is {entry.kind!r} by its name or by "
            f"declaration; if all rows share it: static_keys=[{path!r}]"
        )
    if isinstance(leaf, np.ndarray) and entry.kind == "position" and leaf.dtype.kind not in "biuf":
        raise SchemaError(f"{path!r} is an array of {leaf.dtype}: an entry of kind 'position' holds numbers")
    if entry.kind == "unit" and leaf.ndim > 0:
        return entry
    wanted = {entry.row_dim: rows}
    if entry.position_dims:
        width = widths[entry.axis]
        if width is None:
            raise SchemaError(f"{path!r} runs along the decoder axis, but no entry says how wide that is")
        wanted |= dict.fromkeys(entry.position_dims, width)
    for dim, size in wanted.items():
        if leaf.ndim <= dim or leaf.shape[dim] != size:
            where = f"{size} rows" if dim == entry.row_dim else f"width {size}"
            raise SchemaError(
                f"{path!r} has shape {tuple(leaf.shape)}, expected {where} in dimension {dim}, as the mask has. If it "
                f"lies otherwise, declare it: batch_schema={{{path!r}: Field(...)}}; if labels run along the decoder "
                "of an encoder-decoder model: Field('position', axis='decoder')"
            )
    return entry


def _check_columns(path: str, leaf: Any, entry: Field, widths: Mapping[Axis, int | None]) -> None:
    if not holds_integers(leaf):
        found = leaf.dtype if isinstance(leaf, torch.Tensor | np.ndarray) else type(leaf).__name__
        raise SchemaError(f"{path!r} is {found}: an entry of kind 'column' holds integers, the numbers of columns")
    if widths[entry.axis] is None:
        raise SchemaError(
            f"{path!r} is declared with axis={entry.axis!r}, but the batch has no such axis to count columns on"
        )


def check_plain(path: str, leaf: torch.Tensor, entry: Field, axis: Axis) -> None:
    """Raises SchemaError unless a mask, or labels with positions, are a plain (rows, width) entry of that axis."""
    dims = (entry.row_dim, entry.position_dims)
    if (entry.kind, entry.axis, *dims, leaf.ndim) != ("position", axis, 0, (1,), 2):
        raise SchemaError(
            f"{path!r} has shape {tuple(leaf.shape)} and is {entry.kind!r} on the {entry.axis} axis, expected "
            f"'position' on the {axis} axis, (rows, width): masks and labels are read that way (labels may also be "
            "declared 'row')"
        )


def with_owner(path: str, fields: Mapping[str, Field], paths: Paths) -> Field:
    """The field of a path; of a unit, with the whole path of the entry that counts it.

    Args:
        path: of one of the fields.
        fields: all of the batch.
        paths: theirs.

    Raises:
        SchemaError: that entry is absent, or does not count anything.
    """
    seen, entry = [path], fields[path]
    while fields[seen[-1]].kind == "unit":
        counts = str(fields[seen[-1]].counts)
        owner = find_path(counts, paths, "counts")
        if owner is None:
            raise SchemaError(f"{path!r} is declared with counts={counts!r}: the batch has no such entry")
        if owner in seen or fields[owner].kind not in ("row", "unit"):
            what = "no entry of integers per row, nor of other units"
            raise SchemaError(f"{path!r} is declared with counts={counts!r}, which is {what}")
        seen.append(owner)
        if len(seen) > DEEPEST:
            raise SchemaError(f"{path!r} counts through more than {DEEPEST} other entries: name a row entry in counts")
    return replace(entry, counts=seen[1]) if entry.kind == "unit" else entry
