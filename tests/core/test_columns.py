"""Numbers of columns: they move with their rows, whatever they are held in, and no mark becomes a column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_padmin import Field, MicroBatcher, PadMinConfig, iter_micro_batches
from lightning_padmin.errors import BatchError, ConfigError, SchemaError
from lightning_padmin.microbatching import compact

LEFT = [3, 0, 5, 1]
LENGTHS = [4, 9, 2, 6]  # width 9; the last but one row ends before it


def batch_with(**entries: Any) -> dict[str, Any]:
    return support.make_batch(LENGTHS, left=LEFT, width=9) | entries


def columns_of(config: PadMinConfig, batch: Any, name: str = "at") -> dict[int, Any]:
    """What each row gets, by row."""
    found: dict[int, Any] = {}
    for micro in MicroBatcher(config).prepare(batch):
        found |= dict(zip(micro.rows.tolist(), micro.batch[name], strict=True))
    return found


def config_of(**options: Any) -> PadMinConfig:
    return PadMinConfig(token_budget=10, launch_cost=0, **options)


@pytest.mark.parametrize("kind", ["tensor", "int32", "array", "list", "tuple"])
def test_columns_move_with_their_rows(kind: str) -> None:
    made: Any = torch.tensor([3, 8, 6, 7])
    made = {
        "int32": lambda: made.int(),
        "array": lambda: made.numpy().astype(np.int16),
        "list": lambda: made.tolist(),
        "tuple": lambda: tuple(made.tolist()),
    }.get(kind, lambda: made)()
    before = list(made)
    found = columns_of(config_of(batch_schema={"at": "column"}), batch_with(at=made))
    assert {row: int(value) for row, value in found.items()} == {0: 0, 1: 8, 2: 1, 3: 6}
    assert list(made) == before, "the caller's"
    assert type(compact(batch_with(at=made), config_of(batch_schema={"at": "column"})).batch["at"]) is type(made)


def test_without_the_declaration_they_stay_where_they_are() -> None:
    """The control."""
    found = columns_of(config_of(), batch_with(at=torch.tensor([3, 8, 6, 7])))
    assert {row: int(value) for row, value in found.items()} == {0: 3, 1: 8, 2: 6, 3: 7}


def test_several_per_row_with_marks_and_ragged_lists() -> None:
    table = torch.tensor([[3, 6, -1], [0, 8, 8], [5, -100, 99], [1, 6, 99]])
    wanted = [[0, 3, -1], [0, 8, 8], [0, -100, 99], [0, 5, 99]]
    found = columns_of(config_of(batch_schema={"at": "column"}), batch_with(at=table))
    assert [found[row].tolist() for row in range(4)] == wanted
    ragged = [[3, 6], [], [[5], 6], torch.tensor([1, 6])]
    ours = columns_of(config_of(batch_schema={"at": "column"}), batch_with(at=ragged))
    assert (ours[0], ours[1], ours[2], ours[3].tolist()) == ([0, 3], [], [[0], 1], [0, 5])
    micros = list(
        iter_micro_batches(batch_with(at=table.T), config_of(batch_schema={"at": Field("column", row_dim=1)}))
    )
    joined = {row: micro.batch["at"][:, k].tolist() for micro in micros for k, row in enumerate(micro.rows.tolist())}
    assert [joined[row] for row in range(4)] == wanted


def test_the_end_of_a_span_may_be_the_width_but_not_where_transformers_ignores_it() -> None:
    """Rows 0 and 1 end at the width: 3 + 4 = 7 does not, so a batch of rows that do."""
    batch = support.make_batch([4, 9, 2], left=[5, 0, 6], width=9)  # the last one ends at 8
    ends = torch.tensor([9, 9, 9])
    ours = columns_of(config_of(batch_schema={"at": "column"}), batch | {"at": ends})
    assert [int(ours[row]) for row in range(3)] == [4, 9, 9]
    ours = columns_of(config_of(), batch | {"end_positions": ends}, "end_positions")
    assert [int(ours[row]) for row in range(3)] == [9, 9, 9]


@pytest.mark.parametrize(
    "name", ["start_positions", "end_positions", "cls_index", "question_positions", "mc_token_ids"]
)
def test_names_of_transformers_are_known(name: str) -> None:
    found = columns_of(config_of(), batch_with(**{name: torch.tensor([[3], [8], [6], [7]])}), name)
    assert {row: int(value) for row, value in found.items()} == {0: 0, 1: 8, 2: 1, 3: 6}
    declared = columns_of(config_of(batch_schema={name: "row"}), batch_with(**{name: torch.tensor([3, 8, 6, 7])}), name)
    assert {row: int(value) for row, value in declared.items()} == {0: 3, 1: 8, 2: 6, 3: 7}
    times = batch_with(**{name: torch.tensor([0.5, 1.0, 2.0, 3.0])})  # seconds, say
    assert columns_of(config_of(), times, name)[2] == 2.0


def test_what_points_at_padding_in_front_of_a_row_is_named() -> None:
    with pytest.raises(BatchError, match=r"'start_positions' of row 2 is 4, and that row begins at column 5"):
        compact(batch_with(start_positions=torch.tensor([3, 0, 4, 1])))
    with pytest.raises(BatchError, match=r"'at' of row 0 is 2.*batch_schema=\{'at': 'row'\}"):
        compact(batch_with(at=[[3, 2], [0], [5], [1]]), PadMinConfig(batch_schema={"at": "column"}))
    compact(batch_with(at=[2, 0, 4, 0]), PadMinConfig(batch_schema={"at": "row"}))


def test_what_holds_no_columns_is_refused() -> None:
    for wrong in (torch.tensor([0.5] * 4), torch.ones(4, dtype=torch.bool), ["a"] * 4, np.zeros(4)):
        with pytest.raises(SchemaError, match=r"'at' is .*kind 'column' holds integers"):
            compact(batch_with(at=wrong), PadMinConfig(batch_schema={"at": "column"}))
    with pytest.raises(SchemaError, match=r"'at'.*expected 4 rows|'at' has 3 entries but the batch has 4 rows"):
        compact(batch_with(at=[1, 2, 3]), PadMinConfig(batch_schema={"at": "column"}))
    with pytest.raises(SchemaError, match="no such axis"):
        compact(
            batch_with(at=torch.zeros(4).long()), PadMinConfig(batch_schema={"at": Field("column", axis="decoder")})
        )
    with pytest.raises(ConfigError, match="only 'position' has position_dims"):
        Field("column", position_dims=(1,))


def test_the_decoder_axis_has_columns_of_its_own() -> None:
    decoder = support.make_batch([2, 5, 3, 1], left=[3, 0, 2, 1], width=5)
    batch = batch_with(decoder_input_ids=decoder["input_ids"], decoder_attention_mask=decoder["attention_mask"])
    batch["labels"] = decoder["labels"]
    config = PadMinConfig(token_budget=20, launch_cost=0, batch_schema={"at": Field("column", axis="decoder")})
    found = columns_of(config, batch | {"at": torch.tensor([4, 0, 2, 2])})
    assert {row: int(value) for row, value in found.items()} == {0: 1, 1: 0, 2: 0, 3: 1}
    with pytest.raises(BatchError, match=r"'at' of row 2 is 1, and that row begins at column 2"):
        compact(batch | {"at": torch.tensor([4, 0, 1, 2])}, config)


def test_packs_have_other_columns() -> None:
    from lightning_padmin.microbatching.packed_layout import refuse_unpackable

    batch = batch_with(at=[3, 0, 5, 1])
    config = config_of(batch_schema={"at": "column"})
    schema, table = MicroBatcher(config).read(batch)
    with pytest.raises(BatchError, match="'at' holds numbers of columns, and a pack has other columns"):
        refuse_unpackable(batch, schema, table)


def picks(batch: dict[str, Tensor], name: str = "at") -> Tensor:
    """The token at each column; -1 for what is no column."""
    ids, at = batch["input_ids"], torch.as_tensor(batch[name]).reshape(len(batch["input_ids"]), -1)
    valid = (at >= 0) & (at < ids.shape[1])
    return torch.where(valid, ids.gather(1, at.clamp(0, ids.shape[1] - 1)), -1)


@pytest.mark.filterwarnings("ignore:a batch has no loss tokens", "ignore:.*left-padded rows of a batch have a label")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_same_tokens_are_meant_in_windows_of_different_widths(data: st.DataObject) -> None:
    """Against the batches by themselves; values that are no columns stay none in the wider batch."""
    batches = []
    for seed in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=4))
        width = max(sum(row) for row in rows) + data.draw(st.integers(0, 3))
        batch = support.make_batch([n for n, _ in rows], left=[k for _, k in rows], width=width, seed=seed)
        at = [
            [data.draw(st.one_of(st.integers(left, left + n - 1), st.just(-1), st.integers(width + 1, width + 9)))] * 2
            for n, left in rows
        ]
        batches.append(batch | {"at": torch.tensor(at)})
    config = PadMinConfig(
        token_budget=12, launch_cost=0, pad_token_id=0, loss_reduction="row-mean", batch_schema={"at": "column"}
    )
    alone = torch.cat([picks(batch) for batch in batches])
    window = MicroBatcher(config).prepare_window(batches)
    assert window.restore_rows([picks(micro.batch) for micro in window]).tolist() == alone.tolist()


def test_marks_would_become_columns_if_pooled_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: 4 is no column of a batch that is 4 wide, but one of its window's."""
    narrow = support.make_batch([4, 2], left=[0, 2]) | {"start_positions": torch.tensor([4, 4])}
    wide = support.make_batch([9, 2]) | {"start_positions": torch.tensor([0, 1])}
    config = PadMinConfig(token_budget=1000, launch_cost=10**6, pad_token_id=0, loss_reduction="row-mean")

    def marked() -> list[bool]:
        window = MicroBatcher(config).prepare_window([narrow, wide])
        at = window.restore_rows([picks(micro.batch, "start_positions") for micro in window])
        return (at[:, 0] == -1).tolist()

    assert marked() == [True, True, False, False]
    monkeypatch.setattr("lightning_padmin.batch.pooling.widened", lambda values, *_: values)
    assert marked() == [False, False, False, False]
