"""Kinds of faults in the shape of micro-batches: widths, few shapes, and rows without a token."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from ranks import Ranks
from support import TinyLM, flat_gradient, make_batch, reduce_loss, token_losses
from torch import Tensor

from lightning_padmin import MicroBatcher, PadMinConfig

WIDTHS = [
    # real width, width of the batch, multiple, pad id known, right width
    (10, 16, 4, False, 12),
    (10, 16, math.lcm(2, 4) * 2, False, 16),
    (10, 12, 64, False, 12),
    (10, 12, 64, True, 64),
    (10, 10, 4, True, 12),
    (7, 9, 4, False, 8),
]


@pytest.mark.parametrize(("real", "width", "multiple", "known", "right"), WIDTHS)
def test_r55_widths_are_rounded_up_and_filled_by_kind(
    real: int, width: int, multiple: int, known: bool, right: int
) -> None:
    config = PadMinConfig(pad_to_multiple_of=multiple, pad_token_id=9 if known else None, launch_cost=10**6)
    (micro,) = MicroBatcher(config).prepare(make_batch([real, 3], width=width))
    batch = micro.batch
    assert batch["input_ids"].shape == (2, right)
    assert right % multiple == 0 or right == width, "without a filler rounding stops at the batch's own width"
    assert batch["attention_mask"].sum(dim=1).tolist() == [real, 3]
    assert (batch["labels"][:, real:] == -100).all()
    assert (batch["attention_mask"][:, real:] == 0).all()
    assert (batch["input_ids"][:, width:] == 9).all()
    assert real % multiple, "the fault: the trimmed width"
    assert real // multiple * multiple < real, "the fault: rounded down, real tokens cut"


@pytest.mark.parametrize(
    ("lengths", "right"), [([9, 11, 14, 15, 18], {16, 24}), ([2, 7, 8, 9], {8, 16}), ([30, 31, 33], {32, 40})]
)
def test_r56_rounding_leaves_few_shapes(lengths: list[int], right: set[int]) -> None:
    batcher = MicroBatcher(PadMinConfig(pad_to_multiple_of=8, pad_token_id=0))
    prepared = [batcher.prepare(make_batch([n])) for n in lengths]
    assert {micro.batch["input_ids"].shape[1] for parts in prepared for micro in parts} == right
    assert {slots.widths[0] for parts in prepared for slots in parts.slot_maps} == right, (
        "shapes are there to be counted"
    )
    bare = [MicroBatcher(PadMinConfig()).prepare(make_batch([n]))[0].batch["input_ids"].shape[1] for n in lengths]
    assert len(set(bare)) == len(lengths) > len(right), "the fault: a shape for each batch"


def attention(mask: Tensor) -> Tensor:
    """What a causal softmax makes of values 1 under a mask (B, L): NaN where there is nothing to attend to."""
    width = mask.shape[1]
    allowed = torch.ones(width, width).tril().bool() & (mask[:, None, :] != 0)
    scores = torch.zeros(len(mask), width, width).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).sum(-1)


LEFT = [([2], 4), ([4, 2], 4), ([3, 3, 2], 6)]


@pytest.mark.parametrize(("lengths", "width"), LEFT)
def test_r07_rolled_rows_attend_to_something_everywhere(lengths: list[int], width: int) -> None:
    batch = make_batch(lengths, left=[width - n for n in lengths])
    for micro in MicroBatcher(PadMinConfig(max_rows=1)).prepare(batch):
        assert attention(micro.batch["attention_mask"]).isfinite().all()
    came = attention(batch["attention_mask"])
    assert came.isnan().any()
    assert (came * 0).sum().isnan(), "the fault: zero times NaN"


@pytest.mark.parametrize(("lengths", "other"), [([3], [8, 8]), ([2, 3], [8] * 4), ([1, 4], [8, 8, 5])])
def test_r07_dummies_are_real_rows(lengths: list[int], other: list[int]) -> None:
    ranks, found = Ranks(2), {}

    def run(rank: int, own: list[int]) -> None:
        batcher = MicroBatcher(PadMinConfig(token_budget=8, launch_cost=0), exchange=ranks.exchange_of(rank))
        found[rank] = batcher.prepare(make_batch(own))

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((lengths, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    dummies = [micro for micro in found[0] if micro.is_dummy]
    assert dummies
    for dummy in dummies:
        assert dummy.weight == 0
        assert int(dummy.batch["attention_mask"].sum()) > 0
        model = TinyLM().double()
        loss = reduce_loss(
            token_losses(model(dummy.batch["input_ids"]), dummy.batch["labels"]), dummy.batch["labels"], "token-mean"
        )
        (loss * dummy.weight).backward()
        assert not flat_gradient(model).any()
        assert flat_gradient(model).isfinite().all()
    blank = attention(torch.zeros(1, 4)) * 0
    assert blank.isnan().all(), "the fault: a dummy without a token"


@pytest.mark.parametrize("empty", [[0], [2], [0, 1]])
def test_r07_a_row_without_a_token_has_a_slot_and_rides_along(empty: list[int]) -> None:
    batch = make_batch([5, 4, 3])
    for row in empty:
        batch["attention_mask"][row], batch["labels"][row] = 0, -100
    parts = MicroBatcher(PadMinConfig(token_budget=10, launch_cost=0)).prepare(batch)
    assert parts.table.length[empty, 0].tolist() == [1] * len(empty)
    assert int(batch["attention_mask"].sum(dim=1)[empty[0]]) == 0, "the fault: a length of 0"
    assert sorted(row for micro in parts for row in micro.rows) == [0, 1, 2]
    assert all(int(micro.batch["attention_mask"].sum()) for micro in parts), "no micro-batch has only such rows"
    assert sum(parts.weights) == pytest.approx(1)
