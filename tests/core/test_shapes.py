"""Entries that have, or have not, the shape that their fields claim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_padmin.batch.fields import Axis, Field
from lightning_padmin.batch.tree import DEEPEST, Paths
from lightning_padmin.batch.validate import check_plain, check_shape, with_owner
from lightning_padmin.errors import SchemaError

INPUT: dict[Axis, int | None] = {"input": 5, "decoder": None}
BOTH: dict[Axis, int | None] = {"input": 5, "decoder": 3}


@pytest.mark.parametrize(
    ("leaf", "field", "widths"),
    [
        (torch.zeros(2, 5), Field("position"), INPUT),
        (torch.zeros(2, 5, 7), Field("position"), INPUT),
        (torch.zeros(5, 2), Field("position", 1, (0,)), INPUT),
        (torch.zeros(2, 1, 5, 5), Field("position", 0, (2, 3)), INPUT),
        (torch.zeros(2, 3), Field("position", axis="decoder"), BOTH),
        (np.zeros((2, 5), bool), Field("position"), INPUT),
        (torch.zeros(2), Field("row"), INPUT),
        (torch.zeros(2), Field("row", axis="decoder"), INPUT),
        (["a", "b"], Field("row"), INPUT),
        ((1, 2), Field("column"), INPUT),
        (torch.zeros(2, 4, dtype=torch.int64), Field("column"), INPUT),
        (torch.zeros(9, 1), Field("unit", counts="n"), INPUT),
        ([1, 2, 3], Field("unit", counts="n"), INPUT),
        (object(), Field("static"), INPUT),
    ],
)
def test_as_claimed(leaf: Any, field: Field, widths: dict[Axis, int | None]) -> None:
    assert check_shape("x", leaf, field, 2, widths) is field


@pytest.mark.parametrize(
    ("leaf", "field", "words"),
    [
        (torch.zeros(2, 4), Field("position"), r"has shape \(2, 4\), expected width 5 in dimension 1"),
        (torch.zeros(3, 5), Field("position"), r"has shape \(3, 5\), expected 2 rows in dimension 0"),
        (torch.zeros(2, 5, 4), Field("position", 0, (1, 2)), "expected width 5 in dimension 2"),
        (torch.zeros(2), Field("position"), "expected width 5 in dimension 1"),
        (torch.tensor(1.0), Field("row"), "expected 2 rows in dimension 0"),
        (torch.tensor(1.0), Field("unit", counts="n"), "expected 2 rows in dimension 0"),
        (torch.zeros(2, 3), Field("position", axis="decoder"), "along the decoder axis, but no entry says"),
        (["a"], Field("row"), "'x' has 1 entries but the batch has 2 rows"),
        ([1, 2, 3], Field("column"), "'x' has 3 entries but the batch has 2 rows"),
        (["a", "b"], Field("position"), "'x' is list, expected a tensor"),
        (["a", "b"], Field("row", 1), "'x' is list, expected a tensor"),
        ("text", Field("row"), r"static_keys=\['x'\]"),
        (np.array([["a"] * 5] * 2), Field("position"), "an entry of kind 'position' holds numbers"),
        (torch.zeros(2), Field("column"), "'x' is torch.float32: an entry of kind 'column' holds integers"),
        (["a", "b"], Field("column"), "'x' is list: an entry of kind 'column' holds integers"),
        (torch.zeros(2).long(), Field("column", axis="decoder"), "the batch has no such axis to count columns on"),
    ],
)
def test_refused(leaf: Any, field: Field, words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        check_shape("x", leaf, field, 2, INPUT)


def test_plain_masks_and_labels() -> None:
    check_plain("mask", torch.zeros(2, 5), Field("position"), "input")
    check_plain("labels", torch.zeros(2, 3), Field("position", axis="decoder"), "decoder")
    for leaf, field, axis in [
        (torch.zeros(2, 5, 1), Field("position"), "input"),
        (torch.zeros(5, 2), Field("position", 1, (0,)), "input"),
        (torch.zeros(2, 5, 5), Field("position", 0, (1, 2)), "input"),
        (torch.zeros(2, 5), Field("position"), "decoder"),
        (torch.zeros(2, 5), Field("row"), "input"),
    ]:
        with pytest.raises(SchemaError, match="masks and labels are read that way"):
            check_plain("mask", leaf, field, axis)  # type: ignore[arg-type]


def owner(path: str, **fields: Field) -> Field:
    named = {f"data.{name}": field for name, field in fields.items()}
    return with_owner(f"data.{path}", named, Paths(named))


def test_units_name_their_owner_by_its_whole_path() -> None:
    count, image = Field("row"), Field("unit", counts="count")
    assert owner("image", count=count, image=image).counts == "data.count"
    patch = owner("patch", count=count, image=image, patch=Field("unit", counts="image"))
    assert patch == Field("unit", counts="data.image")
    assert owner("count", count=count) is count


def test_owners_that_count_nothing() -> None:
    unit = Field("unit", counts="count")
    with pytest.raises(SchemaError, match="counts='count': the batch has no such entry"):
        owner("image", image=unit)
    for wrong in (Field("static"), Field("position")):
        with pytest.raises(SchemaError, match="no entry of integers per row"):
            owner("image", image=unit, count=wrong)
    with pytest.raises(SchemaError, match="no entry of integers per row"):
        owner("image", image=unit, count=Field("unit", counts="image"))  # each other


def test_owners_behind_owners() -> None:
    def chain(length: int) -> dict[str, Field]:
        units = {f"u{k}": Field("unit", counts=f"u{k + 1}") for k in range(length)}
        return units | {f"u{length}": Field("row")}

    assert owner("u0", **chain(DEEPEST - 1)).counts == "data.u1"
    with pytest.raises(SchemaError, match=f"counts through more than {DEEPEST} other entries"):
        owner("u0", **chain(DEEPEST))
