"""What rows and batches show."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_padmin.batch import Field, infer_schema, iter_leaves, measure
from lightning_padmin.verification import Values, batch_facets, model_facets, parts_of, plain_facets, row_facets
from lightning_padmin.verification.facets import MOST_VALUES


def batch_of(*lengths: int, **more: Any) -> dict[str, Any]:
    width = max(lengths)
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    ids = torch.arange(1, mask.numel() + 1).reshape(mask.shape) + 2000
    return {"input_ids": ids * mask, "attention_mask": mask} | more


def shown(batch: dict[str, Any], **options: Any) -> dict[str, list[int]]:
    """Facet -> rows."""
    schema = infer_schema(batch, **options)
    found = row_facets(dict(iter_leaves(batch, schema.fields)), schema, measure(batch, schema))
    return {name: np.flatnonzero(rows).tolist() for name, rows in found.items()}


def test_padding_and_rows_without_loss() -> None:
    labels = torch.full((3, 5), -100)
    labels[0, 1:5], labels[2, 1] = 2001, 2002
    found = shown(batch_of(5, 3, 2, labels=labels))
    assert found["padding behind rows"] == [1, 2]
    assert found["rows without loss"] == [1]
    assert "left padding" not in found
    assert not [name for name in found if "'labels'" in name]  # of a vocabulary


def test_left_padding() -> None:
    batch = batch_of(4, 2, labels=torch.full((2, 4), -100))
    batch = {name: each.flip(1) for name, each in batch.items()}
    batch["labels"][0, 2] = 2003
    assert shown(batch)["left padding"] == [1]


def test_values_of_row_entries() -> None:
    classes, weights = torch.tensor([0, 1, 1, 2]), torch.tensor([1.0, 1.0, 5.0, 0.0])
    found = shown(batch_of(6, 3, 2, 1, labels=classes, sample_weight=weights, lang=["en", "en", "de", "en"]))
    assert found["'labels' is 0"] == [0]
    assert found["'labels' is 1"] == [1, 2]
    assert found["'labels' is 2"] == [3]
    assert found["'sample_weight' is 0"] == [3]
    assert found["'sample_weight' varies, highest"] == [2]
    assert found["'lang' is de"] == [2]


def test_many_values_are_extremes() -> None:
    found = shown(batch_of(*[4] * 20, labels=torch.arange(20)))
    assert found["'labels' varies, highest"] == [19]
    assert not [name for name in found if name.startswith("'labels' is 7")]


def test_values_are_many_over_all_batches() -> None:
    """Numbers of rows are few in each batch: they are no facets, and what they have shown before is let go."""
    values = Values()

    def facets(first: int, last_class: int = 0) -> set[str]:
        labels, index = torch.tensor([0, 1, 2, 3, 4, last_class]), torch.arange(first, first + 6)
        batch = batch_of(*[4] * 6, labels=labels, index=index, file=[f"f{first}"] * 6)
        schema = infer_schema(batch)
        leaves = dict(iter_leaves(batch, schema.fields))
        return row_facets(leaves, schema, measure(batch, schema), values).keys() | batch_facets(leaves, schema, values)

    early = facets(0) | facets(6)
    assert {"'index' is 3", "'index' is 11", "'file' is f0"} <= early
    assert not values.dropped
    assert not [name for name in facets(12) if name.startswith("'index' is 1")]
    assert values.dropped >= {f"'index' is {k}" for k in range(12)}
    assert {name for name in facets(18) ^ facets(24) if "'file'" not in name} == set()
    # The control: classes stay, however many batches there are.
    for k in range(20):
        assert "'labels' is 1" in facets(30 + k, k % 5)
    assert not any("labels" in each for each in values.dropped)


def test_static_texts_that_differ_in_each_batch() -> None:
    values, found = Values(), set[str]()
    for k in range(40):
        batch = batch_of(4, 2, labels=torch.tensor([0, 1]), file=f"part {k}")
        schema = infer_schema(batch, static_keys=["file"])
        found |= batch_facets(dict(iter_leaves(batch, schema.fields)), schema, values)
        found |= plain_facets(batch, values)
    assert len([name for name in found if "'file'" in name]) == MOST_VALUES + 1
    assert "'file' varies" in found


def test_labels_of_tokens() -> None:
    labels = torch.tensor([[0, 1, 0], [0, 2, -100]])
    found = shown(batch_of(3, 2, labels=labels))
    assert found["'labels' has 1"] == [0]
    assert found["'labels' has 2"] == [1]


def test_weights_of_tokens() -> None:
    weights = torch.tensor([[0.0, 1.0, 1.0], [0.0, 2.5, 0.0]])
    found = shown(batch_of(3, 2, weights=weights), overrides={"weights": Field("position")}, loss_mask_key="weights")
    assert found["'weights' weighs tokens"] == [1]


def test_entries_and_static_values() -> None:
    batch = batch_of(4, 2, labels=torch.tensor([0, 1]), task="lm", rate=0.0)
    schema = infer_schema(batch, static_keys=["task", "rate"])
    leaves = dict(iter_leaves(batch, schema.fields))
    found = batch_facets(leaves, schema)
    assert {"'task' is 'lm'", "'rate' is 0", "'labels' is int64"} <= found
    other = batch_facets(leaves | {"task": "tag"}, schema)
    assert "'task' is 'tag'" in other
    assert "'task' is 'lm'" not in other


def test_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())

    def now() -> set[str]:
        return model_facets(list(model.modules()), list(model.parameters()))

    before = now()
    assert now() == before
    assert [set(each) for each in parts_of(model)] == [set(model.modules()), set(model.parameters())]
    model[1].eval()
    assert len(now() - before) == 1
    next(model.parameters()).requires_grad_(False)
    assert len(now() - before) == 2


def test_no_value_is_kept_alive_or_written() -> None:
    weights: Tensor = torch.tensor([1.0, float("nan")])
    found = shown(batch_of(3, 1, labels=torch.tensor([0, 1]), w=weights))
    assert found["'w' is no number"] == [1]
