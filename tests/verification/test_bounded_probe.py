"""Rows of a check in joint mode where a pass of the whole batch may be too large."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import support
import torch
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.batch import infer_schema, iter_leaves, measure
from lightning_padmin.errors import GradientCheckError
from lightning_padmin.verification import Outcome, check_gradients, row_facets
from lightning_padmin.verification.agreed_probe import agreed_probe
from lightning_padmin.verification.probe import Probe
from lightning_padmin.verification.rows import Shown

BUDGET = 48


def probe(
    lengths: list[int], left: bool = False, others: list[list[int]] | None = None, wanted: tuple[str, ...] = ()
) -> Probe:
    """Of a batch of these rows; `others`: what other ranks say."""
    width = max(lengths)
    batch = support.make_batch(lengths, left=[width - n if left else 0 for n in lengths])
    batch["kind"] = torch.arange(len(lengths)) % 5
    config = PadMinConfig(token_budget=BUDGET, batch_schema={"kind": "row"})
    schema = infer_schema(batch, config.fields, pad_token_id=0)
    leaves = dict(iter_leaves(batch, schema.fields))
    table = measure(batch, schema)
    shown = Shown.of(row_facets(leaves, schema, table), len(lengths), wanted)

    def exchange(values: Any) -> Any:
        return np.array([list(values), *(others or [])], dtype=np.int64)

    found = agreed_probe(batch, schema, table, config, exchange, 1e-3, True, False, None, shown, is_bounded=True)
    assert found is not None
    return found


def slots(found: Probe) -> int:
    return len(found.came.rows) * sum(found.came.widths)


def padded(found: Probe, lengths: list[int]) -> int:
    """How many of its rows have padding."""
    return int((found.came.length[:, 0] > np.array(lengths)[found.came.rows]).sum())


@pytest.mark.parametrize("left", [False, True])
def test_as_many_rows_as_the_budget_holds(left: bool) -> None:
    lengths = [24, 3, 20, 5, 4, 6, 2, 6, 5, 4, 24]
    found = probe(lengths, left)
    assert len(found.rows) == 8  # short ones, whose further columns are left out
    assert slots(found) <= BUDGET
    assert {int(np.argmin(lengths)), 5} <= set(found.rows.tolist())  # the shortest, and one of the longest that fit
    assert padded(found, lengths) > 0
    assert len(probe([24, 12, 24, 12, 12, 12], left).rows) == 4
    assert len(probe([24, 24, 24, 24, 24, 20], left).rows) == 2
    assert len(probe([4, 3, 2, 4], left).rows) == 4  # all


@pytest.mark.parametrize("left", [False, True])
def test_there_is_padding_where_the_batch_has_some(left: bool) -> None:
    """Of rows of one length a column of padding stays, or nobody would see who reads it."""
    lengths = [24, 6, 6, 6, 6, 6, 6, 6, 6]
    found = probe(lengths, left)
    assert set(np.array(lengths)[found.rows]) == {6}
    assert padded(found, lengths) == len(found.rows)
    assert found.came.widths == (7,)


def test_rows_show_what_is_wanted() -> None:
    lengths = [6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 24, 24]
    wanted = "'kind' is 4"
    assert any(row % 5 == 4 for row in probe(lengths, wanted=(wanted,)).rows)


def test_ranks_have_as_many_rows() -> None:
    """A loss may gather what they give; one whose batch fits goes by the smallest number, too."""
    assert len(probe([24, 3, 20, 5, 4, 6, 2, 6, 5, 24], others=[[1, 4]]).rows) == 4
    assert len(probe([24, 3, 20, 5, 4, 6, 2, 6, 5, 24], others=[[0, 2]]).rows) == 2


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(support.VOCABULARY, 4).double()

    def loss(self, batch: dict[str, Tensor], reads: bool) -> Tensor:
        states = self.embedding(batch["input_ids"]).tanh()
        if self.in_chunks:
            states = states * batch["attention_mask"][..., None]
        mask = batch["attention_mask"][..., None]
        rows = (states if reads else states * mask).sum(1) / mask.sum(1)
        return (rows @ rows.T).logsumexp(1).mean()

    in_chunks = False


@pytest.mark.parametrize("lengths", [[24, 6, 6, 6, 6, 6, 6, 6, 6], [24, 3, 20, 5, 4, 6, 2, 6, 5, 24]])
def test_who_reads_padding_is_seen(lengths: list[int]) -> None:
    """As joint mode gives it: zeros where rows have padding."""
    batch, module, config = support.make_batch(lengths), Reads(), PadMinConfig(token_budget=BUDGET)

    def joint() -> AbstractContextManager[Any]:
        class Chunks(nullcontext[None]):
            def __enter__(self) -> None:
                module.in_chunks = True

            def __exit__(self, *_: object) -> None:
                module.in_chunks = False

        return Chunks()

    schema = infer_schema(batch, config.fields, pad_token_id=0)
    read: Any = (batch, schema, measure(batch, schema), config, module)

    def check(reads: bool) -> Outcome | None:
        return check_gradients(lambda each: module.loss(each, reads), *read, joint=joint, is_bounded=True)

    found = check(False)
    assert found is not None
    assert found.told
    with pytest.raises(GradientCheckError, match=r"gradients of \d rows differ"):
        check(True)
