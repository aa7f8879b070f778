"""Which rows of a batch the first-batch check runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import support
import torch
from torch import Tensor

from lightning_padmin import PadMinConfig
from lightning_padmin.batch.fields import Field, Schema
from lightning_padmin.batch.row_table import RowTable, measure
from lightning_padmin.batch.schema import infer_schema
from lightning_padmin.microbatching.packed_layout import PackStyle
from lightning_padmin.verification.probe import (
    choose_rows,
    first_label_groups,
    make_probe,
    masked_tokens_vary,
    maybe_columns,
    one_row,
    padded_row,
    whole_probe,
)
from lightning_padmin.verification.rows import choices, tells_reductions

CONFIG = PadMinConfig(token_budget=24)


def read(batch: dict[str, Tensor], **options: Any) -> tuple[Schema, RowTable]:
    schema = infer_schema(batch, pad_token_id=0)
    return schema, measure(batch, schema, **options)


def test_rows_with_many_and_with_few_loss_tokens() -> None:
    batch = support.make_batch([2, 4, 6, 6, 10, 12])
    schema, table = read(batch)
    probe = make_probe(batch, schema, table, CONFIG, 2)
    # Of two rows each may have 12 tokens; the other has as many as tell reductions apart.
    assert [each.tolist() for each in probe.groups] == [[5], [3]]
    assert probe.rows.tolist() == [3, 5]
    assert [part.widths for part in probe.parts] == [(12,), (6,)]
    coarse = make_probe(batch, schema, table, CONFIG, 2, limit=0.1)
    assert [each.tolist() for each in coarse.groups] == [[5], [0]], "in half precision as few as can be"
    three, four = (make_probe(batch, schema, table, CONFIG, n) for n in (3, 4))
    assert [each.tolist() for each in three.groups] == [[2, 3], [1]], "8 tokens each"
    assert [each.tolist() for each in four.groups] == [[2, 3], [0, 1]]
    assert [each.tolist() for each in four.alone] == [[0], [1], [2], [3]]
    assert [len({*each.tolist()} & {2, 3}) for each in four.second] == [1, 1], "the other way round"


@pytest.mark.parametrize(
    ("lengths", "budget", "possible"),
    [
        ([2, 4, 6, 6, 10, 12], 24, {2, 3, 4}),
        ([6, 6, 8, 8], 24, {2, 3}),
        ([7, 12, 12, 12], 24, {2}),
        ([20, 20, 20, 20], 24, {2}),  # above the budget: the two shortest all the same
        ([20], 24, set()),
        ([6, 6, 6, 6], None, {2, 3, 4}),
    ],
)
def test_how_many_rows(lengths: list[int], budget: int | None, possible: set[int]) -> None:
    _, table = read(support.make_batch(lengths))
    found = choices(table, 1000 if budget is None else budget, 1e-3)
    assert set(found) == possible
    assert any(each.tells for each in found.values()) == (len(set(lengths)) > 1)


def test_rows_without_loss_ride_along() -> None:
    batch = support.make_batch([3, 4, 5, 6], without_loss=[0, 3])
    schema, table = read(batch)
    found = choose_rows(batch, schema, table, CONFIG, 1e-3)
    assert set(found) == {2, 3, 4}
    assert [found[n].riders for n in (2, 3, 4)] == [0, 1, 2]
    assert make_probe(batch, schema, table, CONFIG, 2).rows.tolist() == [1, 2]
    four = make_probe(batch, schema, table, CONFIG, 4)
    assert all(set(group.tolist()) & {1, 2} for group in four.groups), "no group of these alone"
    assert [each.tolist() for each in four.alone] == [[0, 1, 3], [2]]
    few = make_probe(batch, schema, table, CONFIG, 3, riders=2)  # another rank has two
    assert sorted(map(len, few.alone)) == [3]


def test_as_it_came_only_keeps_the_budget() -> None:
    batch = support.make_batch([3, 4, 12], left=[2, 1, 0])
    schema, table = read(batch)
    wide = make_probe(batch, schema, table, PadMinConfig(token_budget=24), 2)
    assert (wide.came.widths, wide.came.start.tolist()) == ((12,), [[0], [0]])
    small = make_probe(batch, schema, table, PadMinConfig(token_budget=20, pad_to_multiple_of=2), 2)
    # Columns that are padding in both rows are gone, 1 ... 4; one more for the multiple.
    assert small.rows.tolist() == [0, 1]
    assert (small.came.widths, small.came.start.tolist()) == ((4,), [[1], [1]])
    assert (small.whole.widths, small.whole.start.tolist()) == ((4,), [[2], [1]])
    taken = small.came.take_batch(batch, schema)
    assert torch.equal(taken["input_ids"], batch["input_ids"][:2, 1:5])


def test_columns_stay_where_numbers_may_count_them() -> None:
    batch = support.make_batch([3, 4, 12], left=[2, 1, 0]) | {"where": torch.tensor([3, 2, 1])}
    schema, table = read(batch)
    assert make_probe(batch, schema, table, PadMinConfig(token_budget=20), 2).came.widths == (12,)


def test_groups_that_are_given_and_packs() -> None:
    batch = support.make_batch([3, 4, 5, 6])
    schema, table = read(batch)
    groups = np.array([3, 0]), np.array([2])
    probe = make_probe(batch, schema, table, CONFIG, 3, groups=groups)
    assert probe.rows.tolist() == [0, 2, 3]
    assert [part.rows.tolist() for part in probe.parts] == [[3, 0], [2]]
    packed = make_probe(batch, schema, table, CONFIG, 2, PackStyle())
    assert len(packed.parts) == len(packed.groups) == 1
    assert packed.parts[0].widths == (int(table.length[packed.rows].sum()),)


def test_the_whole_batch() -> None:
    batch = support.make_batch([3, 5], left=[1, 0])
    schema, table = read(batch)
    probe = whole_probe(schema, table, PadMinConfig(token_budget=4))
    assert probe.rows.tolist() == [0, 1]
    assert (probe.came.widths, probe.came.start.tolist()) == ((5,), [[0], [0]])
    assert (probe.whole.widths, probe.whole.start.tolist()) == ((5,), [[1], [0]])


def test_one_row() -> None:
    batch = support.make_batch([3, 7], left=[2, 0])
    schema, table = read(batch)
    config = PadMinConfig(pad_to_multiple_of=4)
    trimmed, wide = (one_row(schema, table, 0, config, each) for each in (False, True))
    assert (trimmed.widths, trimmed.start.tolist(), trimmed.rows.tolist()) == ((4,), [[2]], [0])
    assert wide.widths[0] >= 7


def test_a_padded_row() -> None:
    _, table = read(support.make_batch([7, 5, 3, 4, 2], without_loss=[4]))
    assert padded_row(table, np.array([0, 1, 3])) == 3, "the shortest of these"
    assert padded_row(table, np.array([0])) == 2, "or else of all with loss"
    _, full = read(support.make_batch([7, 7]))
    assert padded_row(full, np.array([0, 1])) is None


def test_reductions_that_rows_tell_apart() -> None:
    groups = [np.array([0]), np.array([1])]

    def tells(lengths: list[int], limit: float = 1e-3, prompt: int = 1, reduction: str = "token-mean") -> bool:
        _, table = read(support.make_batch(lengths, prompt=prompt), loss_reduction=reduction)
        return tells_reductions(table, groups, limit)

    assert tells([9, 3])
    assert not tells([6, 6])
    assert not tells([101, 98])
    assert not tells([9, 7], limit=0.1)
    assert tells([9, 3], limit=0.1)
    # A third of each row is prompt: a mean over all tokens gives the same shares.
    batch = support.make_batch([9, 3])
    batch["labels"][:] = -100
    batch["labels"][0, 3:9], batch["labels"][1, 1:3] = 1, 1
    _, table = read(batch)
    assert table.loss_tokens.tolist() == [6, 2]
    assert not tells_reductions(table, groups, 1e-3)
    by_rows = replace(table, by_token=False)
    assert tells_reductions(by_rows, groups, 1e-3)


def test_labels_on_first_tokens() -> None:
    batch = support.make_batch([6, 6, 6])
    batch["labels"][:2, :3] = -100
    batch["labels"][0, 0] = 1  # of three rows one has such a label; 4, 3 and 5 loss tokens but for it
    batch["labels"][2, 0] = -100
    _, table = read(batch)
    assert table.first_weight.tolist() == [1, 0, 0]
    found = first_label_groups(table, CONFIG, 1e-3, subtracts_lost=False)
    assert set(found) == {2, 3}
    assert found[2][0].tolist() == [0]
    assert 0 in found[3][0]
    assert len(found[3][0]) == 2
    assert not set(found[3][0]) & set(found[3][1])
    assert first_label_groups(table, CONFIG, 10.0, subtracts_lost=False) == {}
    _, none = read(support.make_batch([6, 6, 6]))
    assert first_label_groups(none, CONFIG, 1e-3, subtracts_lost=False) == {}
    assert first_label_groups(replace(none, first_weight=np.zeros(0)), CONFIG, 1e-3, False) == {}


def test_labels_on_first_tokens_in_rows_that_fit() -> None:
    batch = support.make_batch([6, 6, 20])
    batch["labels"][0, 0], batch["labels"][0, 2:] = 1, -100
    _, table = read(batch)
    found = first_label_groups(table, CONFIG, 1e-3, subtracts_lost=False)
    assert {n: sorted(np.concatenate(groups).tolist()) for n, groups in found.items()} == {2: [0, 1]}


def test_a_row_whose_only_label_is_on_its_first_token_has_another_beside_it() -> None:
    batch = support.make_batch([6, 6, 6])
    batch["labels"][0], batch["labels"][1, 4:] = -100, -100
    batch["labels"][0, 0] = 1
    _, table = read(batch)
    found = first_label_groups(table, CONFIG, 1e-3, subtracts_lost=False)
    assert set(found) == {3}, "alone it would have no loss"
    first, other = found[3]
    assert first[0] == 0
    assert sorted([*first, *other]) == [0, 1, 2]


def test_labels_that_the_roll_takes() -> None:
    batch = support.make_batch([6, 4, 3, 5], left=[0, 2, 2, 0], prompt=1)
    for row, column in ((1, 2), (2, 2)):
        batch["labels"][row, column] = 1
    _, table = read(batch)
    assert table.behind.tolist() == [False, True, True, False]
    ((lost, other),) = first_label_groups(table, CONFIG, 1e-3, subtracts_lost=True).values()
    assert (lost.tolist(), other.tolist()) == ([2], [1]), "the fewest loss tokens, and the shortest of the others"
    _, without = read(support.make_batch([6, 4]))
    assert first_label_groups(without, CONFIG, 1e-3, subtracts_lost=True) == {}


def test_numbers_that_may_be_columns() -> None:
    batch = support.make_batch([3, 5], left=[2, 0])
    batch |= {"inside": torch.tensor([3, 0]), "outside": torch.tensor([1, 0]), "real": torch.tensor([1.0, 2.0])}
    schema, table = read(batch)
    assert [(path, field.kind, fits) for path, field, fits in maybe_columns(batch, schema, table)] == [
        ("inside", "row", True),
        ("outside", "row", False),
    ]
    batch = support.make_batch([3, 5]) | {"inside": torch.tensor([3, 0])}
    schema, table = read(batch)
    assert [fits for *_, fits in maybe_columns(batch, schema, table)] == [None]
    declared = infer_schema(batch, {"inside": Field("row")})
    assert maybe_columns(batch, declared, measure(batch, declared)) == []


def test_prompts_that_a_mask_leaves_out() -> None:
    batch = support.make_batch([3, 5], left=[2, 0])
    schema, table = read(batch)
    rows = np.array([0, 1])
    assert not masked_tokens_vary(batch, schema, table, rows)
    batch["input_ids"][0, :2] = 4
    assert not masked_tokens_vary(batch, schema, table, rows), "one token is a filler"
    batch["input_ids"][0, 1] = 5
    assert masked_tokens_vary(batch, schema, table, rows)
    assert not masked_tokens_vary(batch, schema, table, np.array([1]))
    batch["position_ids"] = torch.arange(5).expand(2, 5).clone()
    batch["input_ids"][0, 1] = 4
    schema, table = read(batch)
    assert not masked_tokens_vary(batch, schema, table, rows), "positions are no tokens"
