"""The row table: spans, loss tokens as the loss will see them, and values that are refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import strategies
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_padmin.batch.row_table import RowTable, measure
from lightning_padmin.batch.schema import Field, infer_schema
from lightning_padmin.errors import BatchError


def table_of(mask: Any, labels: Any = None, declared: dict[str, Field] | None = None, **options: Any) -> RowTable:
    """The table of a batch with this mask and labels; tensors among the options are other entries of the batch."""
    batch = {"attention_mask": torch.as_tensor(mask)}
    if labels is not None:
        batch["labels"] = torch.as_tensor(labels)
    batch |= {name: options.pop(name) for name in list(options) if isinstance(options[name], Tensor)}
    for_schema = {name: options.pop(name) for name in ("loss_mask_key", "encoder_decoder") if name in options}
    schema = infer_schema(batch, declared, **for_schema)
    if labels is None and schema.loss_mask is None:
        options.setdefault("loss_reduction", "row-mean")
    return measure(batch, schema, **options)


@pytest.mark.parametrize(
    ("mask", "start", "length", "real"),
    [
        ([[1, 1, 1, 0], [1, 0, 0, 0]], [0, 0], [3, 1], [3, 1]),
        ([[0, 1, 1, 1], [0, 0, 0, 1]], [1, 3], [3, 1], [3, 1]),
        ([[0, 1, 1, 0], [0, 0, 1, 0]], [1, 2], [2, 1], [2, 1]),  # both sides
        ([[0, 0, 1, 0, 1, 1]], [2], [4], [3]),  # a hole is not padding
        ([[0, 1, 0, 0, 1, 0]], [1], [4], [2]),
        ([[1, 1, 1, 0], [0, 1, 1, 1]], [0, 1], [3, 3], [3, 3]),  # a final and a first token equal to the padding's
        ([[1, 1], [1, 1]], [0, 0], [2, 2], [2, 2]),
        ([[0, 0, 0], [0, 1, 1]], [0, 1], [1, 2], [0, 2]),  # a row without a token still needs a slot
        ([[2, 2, 3, 0]], [0], [3], [3]),  # numbers of packed documents
        ([[1]], [0], [1], [1]),
    ],
)
def test_spans(mask: Any, start: list[int], length: list[int], real: list[int]) -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.float16):
        table = table_of(torch.tensor(mask).to(dtype))
        assert (table.start.tolist(), table.length.tolist()) == ([[s] for s in start], [[n] for n in length])
        assert table.real_tokens.tolist() == real
        assert (len(table), table.slots) == (len(mask), len(mask) * len(mask[0]))
        assert table.start.dtype == table.length.dtype == table.real_tokens.dtype == np.int64


@settings(max_examples=60, deadline=None)
@given(strategies.batches(), st.sampled_from([0, 1, 2, None]))
def test_against_a_loop_over_rows_and_columns(batch: dict[str, Tensor], shift: int | None) -> None:
    table = measure(batch, infer_schema(batch), label_shift=shift)
    for row, (mask, labels) in enumerate(zip(batch["attention_mask"].tolist(), batch["labels"].tolist(), strict=True)):
        real = [column for column, value in enumerate(mask) if value]
        assert table.start[row] == real[0]
        assert table.length[row] == real[-1] - real[0] + 1
        assert table.real_tokens[row] == len(real)
        rolled = labels[real[0] : real[-1] + 1]
        counted = sum(label != -100 for label in rolled[1 if shift is None else shift :])
        assert table.loss_tokens[row] == table.weight[row] == counted


def test_transposed_and_expanded_masks() -> None:
    mask = torch.tensor([[0, 1], [0, 1], [1, 0]])
    assert table_of(mask.T).start.tolist() == [[2], [0]]
    assert table_of(torch.tensor([[0, 1, 1]]).expand(3, 3)).length.tolist() == [[2], [2], [2]]


# --- Loss tokens. ---


def test_targets_are_counted_after_the_shift_and_after_the_roll() -> None:
    right = table_of([[1, 1, 1], [1, 1, 0]], [[5, 6, 7], [8, 9, -100]])
    assert right.loss_tokens.tolist() == [2, 1]  # not 3 and 2: nothing predicts the first token
    assert right.lost_targets == 0
    left = table_of([[0, 0, 1, 1]], [[-100, -100, 5, 6]])
    assert left.loss_tokens.tolist() == [1]  # 5 was predicted from padding and has nothing before it once rolled
    assert left.lost_targets == 1
    assert table_of([[0, 0, 1, 1]], [[-100, -100, -100, 6]]).lost_targets == 0


@pytest.mark.parametrize(
    ("shift", "counted", "lost"), [(0, 3, 0), (1, 2, 1), (2, 1, 1), (3, 0, 1), (9, 0, 0), (None, 2, 1)]
)
def test_label_shift(shift: int | None, counted: int, lost: int) -> None:
    table = table_of([[0, 0, 0, 1, 1, 1]], [[-100, -100, -100, 5, 6, 7]], label_shift=shift)
    assert table.loss_tokens.tolist() == [counted]
    assert table.lost_targets == lost  # with a shift of 9 the un-rolled batch has no target either


def test_lost_targets_are_rows() -> None:
    mask = [[0, 1, 1, 1], [1, 1, 1, 0], [0, 0, 1, 1]]
    assert table_of(mask, [[-100, 1, 1, 1], [1, 1, 1, -100], [-100, -100, 1, 1]], label_shift=2).lost_targets == 2


def test_ignore_index() -> None:
    assert table_of([[1, 1, 1]], [[0, 0, 5]], ignore_index=0).loss_tokens.tolist() == [1]
    assert table_of([[1, 1, 1]], [[0, 0, 5]]).loss_tokens.tolist() == [2]
    with pytest.raises(BatchError, match=r"set them to 7, or fix the mask 'attention_mask'"):
        table_of([[1, 1, 0]], [[7, 5, 0]], ignore_index=7)


def test_labels_on_holes_count() -> None:
    assert table_of([[1, 0, 1, 0]], [[-100, 4, 5, -100]]).loss_tokens.tolist() == [2]


@pytest.mark.parametrize("labels", [[3, -100, 0], [1.5, -100.0, 0.0]])
def test_one_label_per_row(labels: Any) -> None:
    table = table_of([[1, 1], [1, 0], [0, 1]], labels)
    assert table.loss_tokens.tolist() == table.weight.tolist() == [1, 0, 1]
    assert table.lost_targets == 0


def test_several_labels_per_row() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0], [-100, -100, -100], [1, -100, 0]])
    table = table_of([[1, 1, 1], [1, 1, 0], [0, 1, 1]], scores, declared={"labels": Field("row")})
    assert table.loss_tokens.tolist() == table.weight.tolist() == [3, 0, 2]


def test_a_loss_mask_selects_and_weighs() -> None:
    mask = [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    labels = [[-100, 1, 2, -100, 3], [4, 5, -100, -100, -100]]
    loss_mask = torch.tensor([[0, 0.5, 0.25, 8, 0.125], [1, 0, 1, 0, 0]])
    both = table_of(mask, labels, loss_mask=loss_mask, loss_mask_key="loss_mask")
    assert both.loss_tokens.tolist() == [2, 0]  # the targets 2 and 3
    assert both.weight.tolist() == [0.375, 0]
    assert both.lost_targets == 1
    alone = table_of(mask, loss_mask=loss_mask, loss_mask_key="loss_mask")
    assert alone.loss_tokens.tolist() == [3, 1]
    assert alone.weight.tolist() == [8.375, 1]
    assert table_of(mask, loss_mask=loss_mask, loss_mask_key="loss_mask", label_shift=0).weight.tolist() == [8.875, 2]
    chosen = table_of(mask, loss_mask=loss_mask != 0, loss_mask_key="loss_mask")
    assert chosen.weight.tolist() == [3, 1]
    trained = loss_mask.clone().requires_grad_()  # weights that come out of a model
    assert table_of(mask, loss_mask=trained, loss_mask_key="loss_mask").weight.tolist() == [8.375, 1]


def test_a_loss_mask_beside_one_label_per_row() -> None:
    table = table_of(
        [[1, 1, 1], [1, 1, 0]], [1, 0], loss_mask=torch.tensor([[0, 1, 1], [0, 1, 0]]), loss_mask_key="loss_mask"
    )
    assert table.loss_tokens.tolist() == [2, 1]


def test_counts_are_exact_beyond_the_integers_of_float32() -> None:
    loss_mask = torch.tensor([[0.0, 2.0**24, 1.0], [0.0, 1.0, 0.0]])
    table = table_of([[1, 1, 1], [1, 1, 0]], loss_mask=loss_mask, loss_mask_key="loss_mask")
    assert table.weight.tolist() == [2**24 + 1, 1]
    assert float(loss_mask[0].sum()) != 2**24 + 1


# --- Two axes. ---


def test_a_decoder_mask_is_read_like_the_other() -> None:
    table = table_of(
        [[0, 1, 1], [1, 1, 1]],
        [[-100, 7, 8, -100], [9, -100, -100, -100]],
        decoder_attention_mask=torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]]),
    )
    assert table.start.tolist() == [[1, 1], [0, 0]]
    assert table.length.tolist() == [[2, 2], [3, 2]]
    assert table.real_tokens.tolist() == [4, 5]
    assert table.loss_tokens.tolist() == [2, 1]  # labels of a decoder are not shifted
    assert (table.widths, table.slots) == ((3, 4), 14)
    assert table.lost_targets == 0


def test_without_a_decoder_mask_the_last_label_ends_the_row() -> None:
    """A prompt without loss in front of the labels is no padding."""
    labels = [[-100, -100, 7, -100], [9, -100, 8, -100], [-100] * 4]
    table = table_of([[1, 1], [1, 0], [1, 1]], labels, encoder_decoder=True)
    assert table.start[:, 1].tolist() == [0, 0, 0]
    assert table.length[:, 1].tolist() == [3, 3, 1]
    assert table.loss_tokens.tolist() == [1, 2, 0]


# --- Weights. ---


def test_weights_by_reduction() -> None:
    mask, labels = [[1, 1, 1], [1, 1, 0]], [[-100, 6, 7], [8, 9, -100]]
    assert table_of(mask, labels).weight.tolist() == [2, 1]
    for how in ("row-mean", "sum"):
        assert table_of(mask, labels, loss_reduction=how).weight.tolist() == [1, 1]
        assert table_of(mask, loss_reduction=how).weight.tolist() == [1, 1]
    lengths = table_of(mask, labels, loss_reduction=lambda batch: batch["attention_mask"].sum(1))
    assert lengths.weight.tolist() == [3, 2]
    assert lengths.weight.dtype == np.float64
    parameter = torch.tensor([0.25, 0.5], requires_grad=True)
    assert table_of(mask, labels, loss_reduction=lambda batch: parameter * 2).weight.tolist() == [0.5, 1]


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (torch.ones(3), r"returned \(3,\), expected a tensor of shape \(2,\)"),
        (torch.ones(2, 1), r"returned \(2, 1\)"),
        (torch.tensor(1.0), r"returned \(\)"),
        ([1.0, 1.0], "returned list"),
        (torch.tensor([1.0, -1.0]), r"returned \[1.0, -1.0\]: expected finite weights >= 0"),
        (torch.tensor([1.0, float("nan")]), "finite"),
        (torch.tensor([1.0, float("inf")]), "finite"),
    ],
)
def test_bad_weights_are_refused(returned: Any, found: str) -> None:
    with pytest.raises(BatchError, match=f"the loss_reduction function {found}|the loss_reduction function.*{found}"):
        table_of([[1, 1], [1, 0]], loss_reduction=lambda batch: returned)


def test_token_mean_needs_labels() -> None:
    with pytest.raises(
        BatchError, match=r"no labels: name their entry in labels_key; if every attended token.*'attention_mask'"
    ):
        table_of([[1, 1]], loss_reduction="token-mean")


def test_whether_a_batch_has_loss() -> None:
    none, some = [[-100, -100], [-100, -100]], [[-100, -100], [-100, 5]]
    mask = [[1, 1], [1, 1]]
    for how in ("token-mean", "row-mean", "sum"):
        assert table_of(mask, some, loss_reduction=how).has_loss
        assert not table_of(mask, none, loss_reduction=how).has_loss
    assert not table_of(mask, [[4, -100], [4, -100]]).has_loss  # only first tokens
    assert table_of(mask, loss_reduction="row-mean").has_loss
    assert not table_of(mask, some, loss_reduction=lambda batch: torch.zeros(2)).has_loss


# --- Malformed values. ---


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ([[0, 0], [0, 0]], "'attention_mask' is all zero: no row of the batch has a real token"),
        ([[1, 1], [1, -1]], r"'attention_mask' has negative values \(row 1\).*not an additive one"),
        ([[0.0, -1e9], [0.0, 0.0]], r"'attention_mask' has negative values \(row 0\)"),
        ([[1.0, 1.0], [1.0, float("nan")]], r"'attention_mask' has negative values \(row 1\)"),
    ],
)
def test_a_mask_that_cannot_be_one(mask: Any, found: str) -> None:
    with pytest.raises(BatchError, match=found):
        table_of(mask)


def test_masks_of_the_decoder_are_checked_too() -> None:
    for bad, found in (([[0, 0], [0, 0]], "is all zero"), ([[1, 1], [1, -1]], "has negative values")):
        with pytest.raises(BatchError, match=f"'decoder_attention_mask' {found}"):
            table_of([[1, 1], [1, 1]], decoder_attention_mask=torch.tensor(bad))


@pytest.mark.parametrize(
    ("mask", "labels", "row", "count"),
    [
        ([[1, 1, 0]], [[-100, 5, 6]], 0, 1),
        ([[1, 1, 1], [0, 1, 1]], [[-100, 5, 6], [4, 5, 6]], 1, 1),
        ([[0, 1, 0], [1, 1, 0]], [[1, 5, 6], [1, 5, 6]], 0, 3),
        ([[1, 1, 1], [0, 0, 0]], [[-100, 5, 6], [4, -100, -100]], 1, 1),  # a row without a token has no span
    ],
)
def test_labels_on_padding_are_refused(mask: Any, labels: Any, row: int, count: int) -> None:
    found = (
        f"'labels' is set on {count} padding slots (first in row {row}), which trimming would drop: set them to -100"
    )
    for shift in (0, 1):
        with pytest.raises(BatchError, match=re.escape(found)):
            table_of(mask, labels, label_shift=shift)
    with pytest.raises(BatchError, match=re.escape(found.replace("labels", "loss_mask").replace("-100", "0"))):
        table_of(mask, loss_mask=torch.tensor(labels).ne(-100), loss_mask_key="loss_mask")


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_loss_mask_that_cannot_be_one(value: float) -> None:
    with pytest.raises(BatchError, match=r"'loss_mask' has values that are negative or not finite \(row 0\)"):
        table_of([[1, 1]], loss_mask=torch.tensor([[1.0, value]]), loss_mask_key="loss_mask")


def test_labels_outside_of_the_decoders_mask_name_that_mask() -> None:
    with pytest.raises(BatchError, match="fix the mask 'decoder_attention_mask'"):
        table_of([[1, 1]], [[1, 2, 3]], decoder_attention_mask=torch.tensor([[1, 1, 0]]))


def test_counts_of_a_small_batch() -> None:
    """Mask sums 3 and 5 in width 8, four labels."""
    batch = support.make_batch([3, 5], width=8)
    batch["labels"][1, 1:3] = -100
    table = measure(batch, infer_schema(batch))
    assert (table.real_tokens.sum(), table.loss_tokens.sum(), table.slots) == (8, 4, 16)


def test_a_batch_that_brings_its_divisor_must_be_declared_a_sum() -> None:
    batch = support.make_batch([3, 2]) | {"num_items_in_batch": torch.tensor(3)}
    schema = infer_schema(batch)
    with pytest.raises(BatchError, match="set loss_reduction='sum'"):
        measure(batch, schema)
    assert measure(batch, schema, loss_reduction="sum").weight.tolist() == [1, 1]
