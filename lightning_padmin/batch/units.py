"""Units: images, tiles and patches, which belong to rows in varying number.

    num_images      [2, 0, 1]                     row entry
    image_grid_thw  [[1,2,2], [1,1,2], [1,3,1]]   unit, counts="num_images":      rows have 2, 0, 1 of them
    pixel_values    (9, ...)                      unit, counts="image_grid_thw":  4 + 2, 0 and 3 patches

Units lie along the first dimension, in the order of the rows, so those of a row are one slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_padmin.batch.fields import Schema
from lightning_padmin.errors import BatchError


def counting_entries(leaves: Mapping[str, Any], schema: Schema) -> dict[str, Tensor]:
    """The entries that say how many units there are, by path.

    Raises:
        BatchError: one of them does not hold integers.
    """
    owners = {field.counts: path for path, field in schema.fields.items() if field.counts is not None}
    found = {}
    for owner, path in owners.items():
        try:
            found[owner] = torch.as_tensor(leaves[owner])
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchError(f"{owner!r} counts the units of {path!r}, but it holds no numbers ({error})") from error
        if found[owner].is_floating_point() or found[owner].ndim == 0:
            raise BatchError(
                f"{owner!r} counts the units of {path!r}: expected integers, one or several per row or unit, but it "
                f"is {found[owner].dtype} of shape {tuple(found[owner].shape)}"
            )
    return found


def units_per_row(
    leaves: Mapping[str, Any], schema: Schema, values: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.int64]]:
    """(B,) number of slices of each unit entry, by path.

    Args:
        leaves: the batch's leaves.
        schema: its schema.
        values: the counting entries, on the host.

    Raises:
        BatchError: counts are negative or do not sum to the number of units there are.
    """
    paths = [path for path, field in schema.fields.items() if field.kind == "unit"]
    return {path: _per_row(path, leaves, schema, values) for path in paths}


def _per_row(
    path: str, leaves: Mapping[str, Any], schema: Schema, values: Mapping[str, NDArray[np.float64]]
) -> NDArray[np.int64]:
    owner = str(schema.fields[path].counts)
    given = values[owner].astype(np.int64)
    counts: NDArray[np.int64] = given.prod(axis=tuple(range(1, given.ndim)))
    if (given < 0).any() or counts.sum() != len(leaves[path]):
        raise BatchError(
            f"{path!r} has {len(leaves[path])} units, but {owner!r} counts {given.tolist()}: none may be negative, "
            "and they must sum to it"
        )
    if schema.fields[owner].kind != "unit":
        return counts
    owned = _per_row(owner, leaves, schema, values)
    ends = np.cumsum(owned)
    before = np.concatenate([[0], np.cumsum(counts)])
    summed: NDArray[np.int64] = before[ends] - before[ends - owned]
    return summed


def unit_index(counts: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which units go with some rows, in the order of those rows.

    Args:
        counts: (B,) units of each row of the batch.
        rows: (n,) row indices.
    """
    ends = np.cumsum(counts)
    return np.concatenate([np.arange(ends[row] - counts[row], ends[row], dtype=np.int64) for row in rows])
