"""Batches put together: rows in order, the widest width, and what cannot be pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_padmin.batch.fields import Field, Schema
from lightning_padmin.batch.pooling import pool as pool_flat
from lightning_padmin.batch.tree import FlatBatch
from lightning_padmin.errors import BatchError


def pool(batches: Sequence[Any], schemas: Sequence[Schema]) -> Any:
    return pool_flat([FlatBatch.of(batch, FIELDS) for batch in batches], schemas).whole


FIELDS = {
    "ids": Field("position", fill=7),
    "mask": Field("position", fill=0),
    "positions": Field("position", fill="continue"),
    "score": Field("row"),
    "names": Field("row"),
    "span_end": Field("column"),
    "end_positions": Field("column"),
    "shared": Field("static"),
}
# The second row ends where the batch does.
NARROW: dict[str, Any] = {
    "ids": [[1, 2, 0], [0, 3, 4]],
    "mask": [[1, 1, 0], [0, 1, 1]],
    "positions": [[0, 1, 2], [0, 0, 1]],
    "score": [1.0, 2.0],
    "span_end": [3, 3],
    "end_positions": [3, 3],
    "shared": [5, 6],
}
WIDE: dict[str, Any] = {
    "ids": [[5, 6, 7, 8, 9]],
    "mask": [[1, 1, 1, 1, 1]],
    "positions": [[0, 1, 2, 3, 4]],
    "score": [3.0],
    "span_end": [5],
    "end_positions": [-1],
    "shared": [5, 6],
}
EXPECTED = {
    "ids": [[1, 2, 0, 7, 7], [0, 3, 4, 7, 7], [5, 6, 7, 8, 9]],
    "mask": [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "positions": [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]],
    "score": [1.0, 2.0, 3.0],
    # 3 is beyond the first row, so it marks no column and must not become one; of the second row it is the end.
    "span_end": [5, 3, 5],
    "end_positions": [5, 5, -1],
    "shared": [5, 6],
}


def batches(make: Any = torch.tensor) -> tuple[list[dict[str, Any]], list[Schema]]:
    made = [{key: make(value) for key, value in batch.items()} for batch in (NARROW, WIDE)]
    made[0]["names"], made[1]["names"] = ["a", "b"], ["c"]
    return made, [Schema(FIELDS, 2, (3,), "mask"), Schema(FIELDS, 1, (5,), "mask")]


def test_tensors() -> None:
    made, schemas = batches()
    before = {key: value.clone() for key, value in made[0].items() if key != "names"}
    pooled = pool(made, schemas)
    assert {key: value.tolist() for key, value in pooled.items() if key != "names"} == EXPECTED
    assert pooled["names"] == ["a", "b", "c"]
    assert all(torch.equal(made[0][key], value) for key, value in before.items()), "batches are only read"
    backward = pool(made[::-1], schemas[::-1])
    assert backward["ids"].tolist() == [EXPECTED["ids"][k] for k in (2, 0, 1)]


def test_arrays() -> None:
    made, schemas = batches(np.array)
    for batch in made:
        batch["mask"] = torch.from_numpy(batch["mask"])
    pooled = pool(made, schemas)
    assert {key: value.tolist() for key, value in pooled.items() if key != "names"} == EXPECTED
    assert type(pooled["ids"]) is type(pooled["score"]) is type(pooled["span_end"]) is np.ndarray


def test_lists_of_columns() -> None:
    made, schemas = batches()
    for batch in made:
        batch["span_end"], batch["end_positions"] = batch["span_end"].tolist(), tuple(batch["end_positions"].tolist())
    pooled = pool(made, schemas)
    assert (pooled["span_end"], pooled["end_positions"]) == ([5, 3, 5], (5, 5, -1))


def test_other_dimensions() -> None:
    fields = {"mask": Field("position", fill=0), "bias": Field("position", 1, (0, 2), fill=-1)}
    made = [
        {"mask": torch.ones(1, 2), "bias": torch.ones(2, 1, 2)},
        {"mask": torch.ones(2, 3), "bias": torch.full((3, 2, 3), 2.0)},
    ]
    pooled = pool(made, [Schema(fields, 1, (2,), "mask"), Schema(fields, 2, (3,), "mask")])
    assert pooled["bias"].shape == (3, 3, 3)
    assert pooled["bias"][:, 0].tolist() == [[1, 1, -1], [1, 1, -1], [-1, -1, -1]]
    assert (pooled["bias"][:, 1:] == 2).all()


def test_decoder_columns_follow_the_decoder() -> None:
    fields = {
        "mask": Field("position", fill=0),
        "decoder_mask": Field("position", axis="decoder", fill=0),
        "answer": Field("column", axis="decoder"),
    }
    made = [
        {"mask": torch.ones(1, 4), "decoder_mask": torch.tensor([[1, 0]]), "answer": torch.tensor([2])},
        {"mask": torch.ones(1, 4), "decoder_mask": torch.ones(1, 3).long(), "answer": torch.tensor([2])},
    ]
    schemas = [Schema(fields, 1, (4, width), "mask", "decoder_mask") for width in (2, 3)]
    pooled = pool(made, schemas)
    assert pooled["answer"].tolist() == [3, 2]
    assert (pooled["mask"].shape, pooled["decoder_mask"].shape) == ((2, 4), (2, 3))


def test_one_batch_is_itself() -> None:
    made, schemas = batches()
    assert pool(made[:1], schemas[:1]) is made[0]


@pytest.mark.parametrize("make", [torch.tensor, np.array, list])
def test_shared_entries_must_be_equal(make: Any) -> None:
    fields = {"mask": Field("position", fill=0), "shared": Field("static")}
    schema = Schema(fields, 1, (1,), "mask")
    made = [{"mask": torch.ones(1, 1), "shared": make([k, 2])} for k in (1, 1, 3)]
    assert list(pool(made[:2], [schema] * 2)["shared"]) == [1, 2]
    for different in (made, made[1:]):
        with pytest.raises(BatchError, match="'shared' is shared by all rows and differs"):
            pool(different, [schema] * len(different))


def test_entries_of_other_kinds() -> None:
    made, schemas = batches()
    with pytest.raises(BatchError, match="'score' is not the same kind of entry"):
        pool(made, [schemas[0], replace(schemas[1], fields=FIELDS | {"score": Field("static")})])
    del made[1]["names"]
    with pytest.raises(BatchError, match="'names' is not the same kind of entry"):
        pool(made, schemas)


def test_unknown_filler() -> None:
    made, schemas = batches()
    fields = FIELDS | {"ids": Field("position")}
    with pytest.raises(BatchError, match="'ids' is 3 wide in one batch of an accumulation window and 5 in another"):
        pool(made, [replace(schema, fields=fields) for schema in schemas])
    same = [made[0], made[0]]
    assert pool(same, [replace(schemas[0], fields=fields)] * 2)["ids"].tolist() == 2 * NARROW["ids"]
