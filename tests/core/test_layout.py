"""From the batch to a micro-batch and back: the roll, the trim, the filler, rounding, and outputs put back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import strategies
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lightning_padmin import Field, PadMinConfig, compact, iter_micro_batches
from lightning_padmin.batch.row_table import RowTable
from lightning_padmin.errors import BatchError
from lightning_padmin.microbatching.batcher import MicroBatcher
from lightning_padmin.microbatching.padded_layout import SlotMap, pad_layout

POSITION = Field("position")


def table(start: Any, length: Any, widths: Any) -> RowTable:
    """A row table of these spans, (B,) or (B, A)."""
    start, length = (np.asarray(spans, np.int64).reshape(len(spans), -1) for spans in (start, length))
    ones = np.ones(len(start))
    widths = (widths,) if isinstance(widths, int) else widths
    return RowTable(start, length, length.sum(1), length.sum(1), ones, widths)


def layout(start: Any, length: Any, width: Any, rows: Any = None, **options: Any) -> SlotMap:
    return pad_layout(table(start, length, width), range(len(start)) if rows is None else rows, **options)


# --- The roll and the trim. ---


def test_the_picture_of_the_module() -> None:
    codes = torch.tensor([[ord(letter) for letter in row] for row in ("..abc.", "de.f..")])
    slots = layout([2, 0], [3, 4], 6)
    taken = slots.take(codes, POSITION)
    assert ["".join(map(chr, row)) for row in taken.tolist()] == ["abc.", "de.f"]
    back = slots.restore(taken, fill=ord("_"))
    assert ["".join(map(chr, row)) for row in back.tolist()] == ["__abc_", "de.f__"]


@pytest.mark.parametrize(
    ("ids", "mask", "rolled"),
    [
        ([[0, 0, 11, 12, 13, 14]], [[0, 0, 1, 0, 1, 1]], [[11, 12, 13, 14]]),  # a hole: not a shift by three
        ([[0, 0, 7, 8, 0], [4, 5, 6, 9, 3]], [[0, 0, 1, 1, 0], [1] * 5], [[7, 8, 0, 0, 0], [4, 5, 6, 9, 3]]),
        (
            [[5, 6, 7, 0, 0, 0], [1, 2, 3, 4, 5, 6]],
            [[1, 1, 1, 0, 0, 0], [1] * 6],
            [[5, 6, 7, 0, 0, 0], [1, 2, 3, 4, 5, 6]],
        ),
        ([[4, 5, 2, 2], [2, 2, 4, 5]], [[1, 1, 1, 0], [0, 1, 1, 1]], [[4, 5, 2], [2, 4, 5]]),  # padding equals a token
        ([[0, 1, 2, 0], [0, 3, 0, 0]], [[0, 1, 1, 0], [0, 1, 0, 0]], [[1, 2], [3, 0]]),
        ([[9, 9, 9], [0, 1, 2]], [[0, 0, 0], [0, 1, 1]], [[9, 9], [1, 2]]),  # a row that attends to nothing
    ],
)
def test_rolled_and_trimmed_by_hand(ids: Any, mask: Any, rolled: Any) -> None:
    batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    small = compact(batch)
    assert small.batch["input_ids"].tolist() == rolled
    keep = [[value != 0 for value in row] for row in mask]
    assert small.batch["attention_mask"].sum(1).tolist() == [sum(row) for row in keep]
    assert small.lengths.tolist() == [max(int(length), 1) for length in small.lengths]
    restored = small.restore(small.batch["input_ids"], fill=-1)
    assert restored.shape == (len(ids), len(ids[0]))
    for row, column in zip(*np.nonzero(np.array(mask)), strict=True):
        assert restored[row, column] == ids[row][column]


@st.composite
def cases(draw: st.DrawFn) -> tuple[SlotMap, Tensor, Field, NDArray[np.int64]]:
    """A slot map, a tensor of distinct values with its field, and the rows that are taken."""
    start, length, width = draw(strategies.spans())
    count = len(start)
    rows = np.array(draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)))
    multiple = draw(st.integers(1, 5))
    slots = pad_layout(table(start, length, width), rows, multiple, draw(st.sampled_from([None, (width,)])))
    row_dim, position_dim = draw(st.permutations([0, 1, 2]).map(lambda order: order[:2]))
    shape = [2, 2, 2]
    shape[row_dim], shape[position_dim] = count, width
    tensor = torch.arange(1, 1 + int(np.prod(shape))).view(shape)
    if draw(st.booleans()):
        tensor = tensor.transpose(0, 2).contiguous().transpose(0, 2)  # same values, other strides
    return slots, tensor, Field("position", row_dim, (position_dim,), fill=-7), rows


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_slot_holds_what_it_should(case: tuple[SlotMap, Tensor, Field, NDArray[np.int64]]) -> None:
    """Spans begin at slot 0; other slots hold padding of the row itself, and the fill beyond the batch's width."""
    slots, tensor, field, rows = case
    before, version = tensor.clone(), tensor._version
    taken = slots.take(tensor, field).movedim((field.row_dim, *field.position_dims), (0, 1))
    source = tensor.movedim((field.row_dim, *field.position_dims), (0, 1))
    width = source.shape[1]
    assert taken.shape == (len(rows), slots.widths[0], 2)
    assert slots.widths[0] >= slots.length.max()
    for slot_row, row in enumerate(rows):
        start, length = int(slots.start[slot_row, 0]), int(slots.length[slot_row, 0])
        assert torch.equal(taken[slot_row, :length], source[row, start : start + length])
        padding = [column for column in range(width) if not start <= column < start + length]
        own = {tuple(source[row, column].tolist()) for column in padding}
        found = [tuple(cell) for cell in taken[slot_row, length:width].tolist()]
        assert len(set(found)) == len(found)
        assert set(found) <= own
        assert (taken[slot_row, width:] == -7).all()
    assert torch.equal(tensor, before)
    assert tensor._version == version
    assert taken.data_ptr() != tensor.data_ptr()


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 3), st.sampled_from([(), (3,), (1, 2)]))
def test_restoring_what_was_taken_gives_the_spans_back(
    case: tuple[SlotMap, Tensor, Field, NDArray[np.int64]], first_column: int, extra: tuple[int, ...]
) -> None:
    slots, _, _, rows = case
    count, width = slots.source_rows, slots.source_widths[0]
    tensor = torch.arange(1.0, 1 + count * width * int(np.prod(extra))).view(count, width, *extra)
    taken = slots.take(tensor, Field("position", fill=0))
    first_column = min(first_column, taken.shape[1])
    restored = slots.restore(taken[:, first_column:], first_column, fill=-1)
    assert restored.shape == (len(rows), width, *extra)
    for slot_row, row in enumerate(rows):
        start, length = int(slots.start[slot_row, 0]), int(slots.length[slot_row, 0])
        inside = [start + first_column <= column < start + length for column in range(width)]
        for column in range(width):
            wanted = tensor[row, column] if inside[column] else torch.full(extra, -1.0)
            assert torch.equal(restored[slot_row, column], wanted)


def test_the_properties_see_a_roll_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = SlotMap._gather

    def off_by_one(self: SlotMap, *arguments: Any) -> Tensor:
        return stock(replace(self, start=self.start + 1), *arguments)

    monkeypatch.setattr(SlotMap, "_gather", off_by_one)
    for test in (test_every_slot_holds_what_it_should, test_restoring_what_was_taken_gives_the_spans_back):
        with pytest.raises(AssertionError):
            test()


# --- Types of entries. ---


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 0, 0]]).to(dtype)
    for slots in (layout([2, 0], [3, 3], 5), layout([0, 0], [3, 3], 5)):
        taken = slots.take(values, POSITION)
        assert taken.dtype == dtype
        start = int(slots.start[0, 0])
        assert taken.tolist() == [values[0, start : start + 3].tolist(), values[1, :3].tolist()]
    assert slots.take(values[:, 0], Field("row")).dtype == dtype


def test_non_contiguous_inputs_give_contiguous_outputs() -> None:
    whole = torch.arange(60).view(5, 2, 6)
    for field, view in ((Field("position", 1, (0,)), whole[:, :, 3]), (Field("position", 1, (2,)), whole[::2])):
        for start in ([2, 0], [0, 0]):
            taken = layout(start, [2, 3], view.shape[field.position_dims[0]]).take(view, field)
            assert taken.is_contiguous()
            assert taken.shape[field.position_dims[0]] == 3


def test_embeddings_and_their_gradient() -> None:
    embeddings = torch.arange(2 * 4 * 3.0).view(2, 4, 3).requires_grad_()
    slots = layout([1, 0], [3, 2], 4)
    taken = slots.take(embeddings, POSITION)
    assert torch.equal(taken[0], embeddings[0, 1:4])
    taken[:, :2].sum().backward()
    assert embeddings.grad is not None
    assert embeddings.grad[..., 0].tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]


def test_static_entries_are_passed_on_as_they_are() -> None:
    tensor = torch.ones(7)
    assert layout([1], [2], 4).take(tensor, Field("static")) is tensor


def test_arrays_are_read_whatever_their_memory_looks_like() -> None:
    values = np.arange(12).reshape(2, 6)
    frozen = values.copy()
    frozen.setflags(write=False)
    base = support.make_batch([4, 3], left=[2, 1])
    for array in (values, values[:, ::-1], np.asfortranarray(values), frozen, values.astype(np.float16)):
        entry = compact(base | {"extra": array}, PadMinConfig(batch_schema={"extra": "position"})).batch["extra"]
        assert isinstance(entry, np.ndarray)
        assert entry.dtype == array.dtype
        assert entry[0].tolist() == array[0, 2:].tolist()
        assert entry[1, :3].tolist() == array[1, 1:4].tolist()


# --- Rounding and filling. ---


WIDTHS = [(10, 12, 1, None, 10), (10, 12, 4, None, 12), (10, 12, 8, None, 16), (10, 12, 64, (12,), 12)]
WIDTHS += [(10, 12, 64, None, 64), (12, 12, 8, (12,), 12), (9, 30, 8, (30,), 16), (10, 30, 5, (30,), 10)]


@pytest.mark.parametrize(("longest", "width", "multiple", "limit", "rounded"), WIDTHS)
def test_rounded_widths(longest: int, width: int, multiple: int, limit: Any, rounded: int) -> None:
    slots = layout([0, 0], [3, longest], width, multiple=multiple, max_widths=limit)
    assert (slots.widths, slots.slots) == ((rounded,), 2 * rounded)


def test_two_axes_are_rounded_and_rolled_apart() -> None:
    slots = layout([[1, 0], [0, 2]], [[3, 2], [4, 1]], (6, 5), multiple=3, max_widths=(5, 5))
    assert slots.widths == (5, 3)
    values = torch.arange(10).view(2, 5)
    assert slots.take(values, Field("position", axis="decoder")).tolist() == [[0, 1, 2], [7, 8, 9]]
    assert slots.restore(torch.ones(2, 3), axis="decoder").tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 0, 0]]
    assert slots.restore(torch.ones(2, 5)).tolist() == [[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]]


def test_without_a_known_filler_widths_stop_at_the_batchs_own() -> None:
    batch = support.make_batch([3, 5, 7], width=10)
    for config in (
        PadMinConfig(pad_to_multiple_of=64, pad_token_id=None),
        PadMinConfig(pad_to_multiple_of=64, pad_token_id=3),
    ):
        small = compact(batch, config)
        wanted = 10 if config.pad_token_id is None else 64
        assert {name: entry.shape for name, entry in small.batch.items()} == dict.fromkeys(batch, (3, wanted))
    undeclared = batch | {"extra": torch.ones(3, 10)}
    schema = {"extra": "position"}
    assert compact(undeclared, PadMinConfig(pad_to_multiple_of=64, pad_token_id=3, batch_schema=schema)).batch[
        "extra"
    ].shape == (3, 10)
    with pytest.raises(BatchError, match="width 12 is beyond the batch's own 10 and the entry has no fill value"):
        layout([0], [10], 10, multiple=12).take(torch.ones(1, 10), POSITION)


@pytest.mark.parametrize("left", [[0, 0], [1, 3]])
def test_every_entry_is_filled_with_its_own_value(left: list[int]) -> None:
    width = 6
    batch: dict[str, Any] = support.make_batch([5, 3], left=left, width=width)
    batch |= {
        name: torch.full((2, width), 9) for name in ("token_type_ids", "special_tokens_mask", "position_ids", "extra")
    }
    batch |= {"flags": torch.ones(2, width, dtype=torch.bool), "embedded": torch.full((2, width, 3), 9.0).bfloat16()}
    schema = {
        "extra": Field("position", fill=-0.5),
        "flags": Field("position", fill=0),
        "embedded": Field("position", fill=2),
    }
    small = compact(
        batch | {"extra": torch.full((2, width), 9.0)},
        PadMinConfig(pad_to_multiple_of=4, pad_token_id=7, batch_schema=schema),
    ).batch
    assert {name: entry[:, width:].unique().tolist() for name, entry in small.items()} == {
        "input_ids": [7],
        "attention_mask": [0],
        "labels": [-100],
        "token_type_ids": [0],
        "special_tokens_mask": [1],
        "position_ids": [10, 11],
        "extra": [-0.5],
        "flags": [False],
        "embedded": [2],
    }
    assert {entry.shape[:2] for entry in small.values()} == {(2, 8)}


# --- Position ids. ---


def positions_of(ids: Any, mask: Any, **options: Any) -> list[Any]:
    batch = {"input_ids": torch.ones(torch.tensor(mask).shape, dtype=torch.int64), "attention_mask": torch.tensor(mask)}
    batch["position_ids"] = torch.tensor(ids)
    config = PadMinConfig(loss_reduction="row-mean", launch_cost=1, **options)
    return [micro.batch["position_ids"].tolist() for micro in iter_micro_batches(batch, config)]


@pytest.mark.parametrize("tail", [[0, 0], [2, 2], [1, 1]])
@pytest.mark.parametrize("multiple", [1, 5, 8])
def test_positions_of_a_single_row_go_on_upward(tail: list[int], multiple: int) -> None:
    """A restart in the padding of a one-row batch would look like a second, packed document."""
    ids, mask = [[0, 1, 2, *tail]], [[1, 1, 1, 0, 0]]
    wanted = list(range({1: 3, 5: 5, 8: 8}[multiple]))
    assert positions_of(ids, mask, pad_to_multiple_of=multiple, pad_token_id=0) == [[wanted]]
    left = [[*tail, 0, 1, 2]]
    assert positions_of(left, [[0, 0, 1, 1, 1]], pad_to_multiple_of=multiple, pad_token_id=0) == [[wanted]]


def test_packed_rows_are_left_as_they_are() -> None:
    assert positions_of([[0, 1, 2, 0, 1]], [[1] * 5]) == [[[0, 1, 2, 0, 1]]]
    assert positions_of([[0, 1, 2, 0, 1, 0]], [[1] * 5 + [0]], pad_to_multiple_of=3) == [[[0, 1, 2, 0, 1, 2]]]


def test_positions_of_several_rows_are_only_rolled() -> None:
    ids, mask = [[1, 1, 0, 1], [0, 1, 2, 3], [0, 1, 0, 0]], [[0, 0, 1, 1], [1] * 4, [1, 1, 0, 0]]
    assert positions_of(ids, mask, max_rows=2) == [[[0, 1, 2, 3]], [[0, 1], [0, 1]]]
    together = compact({"attention_mask": torch.tensor(mask), "position_ids": torch.tensor(ids)}).batch["position_ids"]
    assert together.tolist() == [[0, 1, 1, 1], [0, 1, 2, 3], [0, 1, 0, 0]]


def test_no_positions_are_invented() -> None:
    batch = support.make_batch([2, 5, 3], left=[3, 0, 1])
    assert all(micro.batch.keys() == batch.keys() for micro in iter_micro_batches(batch, PadMinConfig(token_budget=5)))


@pytest.mark.parametrize("rows", [1, 3])
def test_three_dimensional_positions_of_a_single_row(rows: int) -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]])[:rows]
    ids = torch.arange(3 * rows * 4).view(3, rows, 4) * 10
    config = PadMinConfig(loss_reduction="row-mean", max_rows=1, launch_cost=0, pad_to_multiple_of=4)
    parts = list(iter_micro_batches({"attention_mask": mask, "position_ids": ids}, config))
    micro = next(micro for micro in parts if micro.rows[0] == 0)
    last = ids[:, 0, 2]
    assert micro.batch["position_ids"].shape == (3, 1, 4)
    assert torch.equal(micro.batch["position_ids"][:, 0, :2], ids[:, 0, 1:3])
    assert torch.equal(micro.batch["position_ids"][:, 0, 2:], last[:, None] + torch.tensor([1, 2]))


# --- Outputs. ---


def test_last_columns_only() -> None:
    """Completions of two rows in other columns once rolled: a model that returns its last two columns."""
    batch = {
        "input_ids": torch.tensor([[0, 0, 7, 8, 0], [4, 5, 6, 9, 3]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 0], [1] * 5]),
    }
    small = compact(batch)
    outputs = small.batch["input_ids"] * 10
    assert small.restore(outputs[:, 3:], first_column=3).tolist() == [[0] * 5, [0, 0, 0, 90, 30]]
    assert small.restore(outputs[:, 1:], first_column=1).tolist() == [[0, 0, 0, 80, 0], [0, 50, 60, 90, 30]]
    assert small.restore(outputs[:, :-1]).tolist() == [[0, 0, 70, 80, 0], [40, 50, 60, 90, 0]]


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (2, 5), (2,), ()])
def test_outputs_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    slots = layout([1, 0], [3, 4], 6)
    with pytest.raises(BatchError, match=r"does not fit a micro-batch of 2 rows and width 4"):
        slots.restore(torch.ones(shape))
    for first_column in (1, -1):
        with pytest.raises(BatchError, match=f"first_column={first_column} does not fit"):
            slots.restore(torch.ones(2, 4), first_column)


def test_gradients_flow_through_restore() -> None:
    slots = layout([1, 0], [3, 2], 5, rows=[1, 0])
    outputs = torch.rand(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(slots.restore, (outputs,))
    slots.restore(outputs, fill=9).sum().backward()
    assert outputs.grad is not None
    assert outputs.grad[..., 0].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_gradients_flow_through_take() -> None:
    tensor = torch.rand(2, 5, dtype=torch.float64, requires_grad=True)
    for start, length in (([1, 0], [3, 2]), ([0, 0], [3, 2])):
        slots = layout(start, length, 5)
        assert torch.autograd.gradcheck(lambda t, s=slots: s.take(t, POSITION), (tensor,))


@pytest.mark.filterwarnings("ignore:a batch has no loss tokens")
@settings(max_examples=40, deadline=None)
@given(strategies.batches(), st.integers(1, 40), st.integers(1, 4))
def test_outputs_of_all_micro_batches_go_back_in_order(batch: dict[str, Tensor], budget: int, multiple: int) -> None:
    config = PadMinConfig(
        token_budget=max(budget, 7 * multiple), launch_cost=0, pad_to_multiple_of=multiple, loss_reduction="row-mean"
    )
    micro_batches = MicroBatcher(config).prepare(batch)
    outputs = [torch.stack([micro.batch["input_ids"], -micro.batch["input_ids"]], -1) for micro in micro_batches]
    restored = micro_batches.restore(outputs, fill=99)
    wanted = torch.full((*batch["input_ids"].shape, 2), 99)
    spans = zip(micro_batches.table.start[:, 0], micro_batches.table.length[:, 0], strict=True)
    for row, (start, length) in enumerate(spans):
        wanted[row, start : start + length] = batch["input_ids"][row, start : start + length, None] * torch.tensor(
            [1, -1]
        )
    assert torch.equal(restored, wanted)
    sums = micro_batches.restore_rows(
        [(m.batch["input_ids"] * m.batch["attention_mask"]).sum(1) for m in micro_batches]
    )
    assert torch.equal(sums, (batch["input_ids"] * batch["attention_mask"]).sum(1))
    assert (
        sum(slots.slots for slots in micro_batches.slot_maps) == micro_batches.plan.slots == micro_batches.stats.slots
    )
    everywhere = np.concatenate([micro.rows for micro in micro_batches])
    assert sorted(everywhere.tolist()) == list(range(len(batch["labels"])))


def test_a_missing_output_is_refused() -> None:
    micro_batches = MicroBatcher(PadMinConfig(token_budget=6, launch_cost=1)).prepare(support.make_batch([6, 5, 2, 3]))
    outputs = [micro.batch["labels"] for micro in micro_batches]
    assert [tuple(output.shape) for output in outputs] == [(1, 6), (1, 5), (2, 3)]
    for wrong in (outputs[:-1], [*outputs, outputs[0]], outputs[::-1], [*outputs[:-1], outputs[-1][:0]]):
        with pytest.raises(BatchError, match=r"rows do not fit 3 micro-batches of \[1, 1, 2\] rows"):
            micro_batches.restore(wrong)
    for wrong in (outputs[:-1], [*outputs, outputs[0]], [*outputs[:-1], outputs[-1].sum()]):
        with pytest.raises(BatchError, match="rows do not fit 3 micro-batches"):
            micro_batches.restore_rows(wrong)


# --- The batch itself. ---


def test_an_untouched_batch_is_passed_on_and_nothing_else_is() -> None:
    full = support.make_batch([4, 4, 2])
    (micro,) = iter_micro_batches(full, PadMinConfig(token_budget=100, launch_cost=100))
    assert micro.batch is full
    assert compact(full).batch is full
    assert compact(support.make_batch([4, 3], width=5)).batch is not full
    parts = list(iter_micro_batches(full, PadMinConfig(token_budget=4)))
    assert [len(part.batch["labels"]) for part in parts] == [1, 1, 1]  # the first is as wide as the batch
    left = support.make_batch([4, 3], left=[0, 1])
    assert compact(left).batch is not left


@settings(max_examples=100, deadline=None)
@given(strategies.spans(), st.data())
def test_identity_means_identity(case: Any, data: st.DataObject) -> None:
    start, length, width = case
    rows = data.draw(
        st.permutations(range(len(start))).flatmap(lambda order: st.integers(1, len(order)).map(lambda n: order[:n]))
    )
    slots = layout(start, length, width, rows, multiple=3, max_widths=(width,))
    whole = torch.arange(len(start) * width).view(len(start), width)
    if slots.is_identity:
        assert torch.equal(slots.take(whole, POSITION), whole)
        assert torch.equal(slots.take(whole, Field("position", fill="continue")), whole)
    elif slots.widths == (width,) and len(rows) == len(start) > 1 and not start.any():
        assert list(rows) != sorted(rows)


@pytest.mark.parametrize(
    ("length", "is_identity"), [([3, 2], True), ([3, 3], True), ([3], True), ([2], False)], ids=str
)
def test_what_is_passed_on_as_it_is(length: list[int], is_identity: bool) -> None:
    """Not one row with padding behind it: its position ids have to continue."""
    start = np.zeros(len(length), dtype=np.int64)
    assert layout(start, np.array(length), 3, range(len(length))).is_identity is is_identity
