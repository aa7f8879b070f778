"""Images, tiles and patches: how many belong to each row, and which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_padmin.batch.fields import Field, Schema
from lightning_padmin.batch.units import counting_entries, unit_index, units_per_row
from lightning_padmin.errors import BatchError

FIELDS = {
    "mask": Field("position"),
    "num_images": Field("row"),
    "grid": Field("unit", counts="num_images"),
    "pixels": Field("unit", counts="grid"),
}
SCHEMA = Schema(FIELDS, 3, (4,), "mask")
LEAVES: dict[str, Any] = {
    "num_images": torch.tensor([2, 0, 1]),
    "grid": torch.tensor([[1, 2, 2], [1, 1, 2], [1, 3, 1]]),
    "pixels": torch.zeros(9, 5),
}


def counted(leaves: dict[str, Any]) -> dict[str, list[int]]:
    found = counting_entries(leaves, SCHEMA)
    counts = units_per_row(leaves, SCHEMA, {name: each.double().numpy() for name, each in found.items()})
    return {path: each.tolist() for path, each in counts.items()}


def test_counts_through_other_units() -> None:
    assert set(counting_entries(LEAVES, SCHEMA)) == {"num_images", "grid"}
    assert counted(LEAVES) == {"grid": [2, 0, 1], "pixels": [6, 0, 3]}
    assert counted(LEAVES | {"num_images": [0, 1, 2]}) == {"grid": [0, 1, 2], "pixels": [0, 4, 5]}


def test_no_units_at_all() -> None:
    leaves = {"num_images": [0, 0, 0], "grid": torch.zeros(0, 3, dtype=torch.int64), "pixels": torch.zeros(0, 5)}
    assert counted(leaves) == {"grid": [0, 0, 0], "pixels": [0, 0, 0]}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"pixels": torch.zeros(8, 5)}, r"'pixels' has 8 units, but 'grid' counts"),
        ({"num_images": torch.tensor([2, 1, 1])}, r"'grid' has 3 units, but 'num_images' counts \[2, 1, 1\]"),
        ({"num_images": torch.tensor([4, -1, 0])}, "none may be negative"),
        ({"num_images": torch.tensor([2.0, 0.0, 1.0])}, "expected integers, .* but it is torch.float32"),
        ({"num_images": torch.tensor(3)}, r"of shape \(\)"),
        ({"num_images": ["two", "none", "one"]}, "'num_images' counts the units of 'grid', but it holds no numbers"),
    ],
)
def test_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(BatchError, match=words):
        counted(LEAVES | changed)


def test_units_of_rows_in_the_order_of_the_rows() -> None:
    counts = np.array([6, 0, 3, 1])
    assert unit_index(counts, np.array([2, 1, 0])).tolist() == [6, 7, 8, 0, 1, 2, 3, 4, 5]
    assert unit_index(counts, np.array([3])).tolist() == [9]
    empty = unit_index(counts, np.array([1]))
    assert (empty.tolist(), empty.dtype) == ([], np.int64)
