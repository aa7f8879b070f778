"""Weights of micro-batches, against the definition in exact fractions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import support
from support import make_batch

from lightning_padmin import MicroBatcher, PadMinConfig
from lightning_padmin.batch import RowTable
from lightning_padmin.microbatching.weights import dummy_row, weights

GROUPS = [np.array([0]), np.array([1, 2]), np.array([3])]


def table_of(
    weight: Sequence[float], length: Sequence[int] = (4, 3, 2, 1), loss: Sequence[int] | None = None
) -> RowTable:
    rows = len(weight)
    lengths = np.array(length, np.int64)[:, None]
    tokens = np.array(loss if loss is not None else [int(each > 0) for each in weight], np.int64)
    return RowTable(
        start=np.zeros((rows, 1), np.int64),
        length=lengths,
        real_tokens=lengths[:, 0],
        loss_tokens=tokens,
        weight=np.array(weight, np.float64),
        widths=(max(length),),
    )


def test_a_mean_on_this_rank() -> None:
    found, shares = weights(table_of([3, 1, 2, 2]), GROUPS, 3)
    assert found.tolist() == shares.tolist() == [3 / 8, 3 / 8, 2 / 8]


def test_dummies_weigh_nothing() -> None:
    found, shares = weights(table_of([3, 1, 2, 2]), [*GROUPS, np.array([3])], 3)
    assert found.tolist() == shares.tolist() == [3 / 8, 3 / 8, 2 / 8, 0]


def test_a_summed_loss_counts_once_each() -> None:
    found, shares = weights(table_of([1, 1, 1, 1]), [*GROUPS, np.array([3])], 3, "sum")
    assert found.tolist() == [1, 1, 1, 0]
    assert shares.tolist() == [1 / 4, 2 / 4, 1 / 4, 0]


def test_a_mean_over_all_ranks_is_divided_by_the_mean_of_their_totals() -> None:
    """Ranks are averaged afterwards: their weights together are as many as there are ranks."""
    mine, other = table_of([3, 1, 2, 2]), table_of([1, 0, 0, 1])
    totals = np.array([8.0, 2.0])
    found = [weights(table, GROUPS, 3, "token-mean", totals)[0] for table in (mine, other)]
    assert [Fraction(value).limit_denominator(1000) for value in found[0]] == [Fraction(k, 5) for k in (3, 3, 2)]
    assert sum(each.sum() for each in found) == pytest.approx(2)


def test_without_any_loss_rows_count_unless_other_ranks_have_some() -> None:
    nothing = table_of([0, 0, 0, 0])
    assert weights(nothing, GROUPS, 3)[0].tolist() == [1 / 4, 2 / 4, 1 / 4]
    assert weights(nothing, GROUPS, 3, totals=np.array([0.0, 0.0]))[0].tolist() == [1 / 4, 2 / 4, 1 / 4]
    found, shares = weights(nothing, GROUPS, 3, totals=np.array([0.0, 5.0]))
    assert found.tolist() == [0, 0, 0]
    assert shares.tolist() == [1 / 4, 2 / 4, 1 / 4]


@pytest.mark.parametrize(
    ("weight", "loss", "wanted"),
    [
        ([1, 1, 1, 0], [1, 1, 1, 0], 2),  # the shortest that carries loss
        ([0, 2, 0, 0], [1, 0, 1, 1], 1),  # that weighs
        ([0, 0, 0, 0], [1, 1, 0, 0], 1),  # that has loss tokens
        ([0, 0, 0, 0], [0, 0, 0, 0], 3),  # that has tokens
    ],
)
def test_the_row_of_dummies(weight: list[float], loss: list[int], wanted: int) -> None:
    assert dummy_row(table_of(weight, loss=loss)).tolist() == [wanted]


def test_the_batcher_asks_here() -> None:
    """So that a control in one place reaches every adapter."""
    batch = make_batch([9, 2, 2])
    config = PadMinConfig(max_rows=1, launch_cost=0)
    right = MicroBatcher(config).prepare(batch)
    with support.equal_weights():
        wrong = MicroBatcher(config).prepare(batch)
    assert wrong.weights.tolist() == [1 / 3] * 3
    assert right.weights.tolist() == [8 / 10, 1 / 10, 1 / 10]
    assert MicroBatcher(config).prepare(batch).weights.tolist() == right.weights.tolist()
