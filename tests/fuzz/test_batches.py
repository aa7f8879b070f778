"""Any batch that must be understood: a partition within the budget, the caller's rows, and the un-split gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fuzz import model, reference
from fuzz.amounts import Amount, amounts
from fuzz.cases import Case, cases
from lightning_padmin import MicroBatcher, MicroBatches

EXACT = 1e-12  # float64, relative to the largest component of loss and gradient
Record = Callable[[str, Any], None]
pytestmark = pytest.mark.filterwarnings("ignore::lightning_padmin.errors.PadMinWarning")


def batcher(case: Case) -> MicroBatcher:
    return MicroBatcher(case.config, encoder_decoder=case.encoder_decoder)


def same_plan(one: MicroBatches, other: MicroBatches) -> None:
    assert len(one) == len(other)
    assert np.array_equal(one.weights, other.weights)
    for a, b in zip(one.slot_maps, other.slot_maps, strict=True):
        assert a.widths == b.widths
        assert np.array_equal(a.rows, b.rows)


def check_gradient(case: Case, found: MicroBatches) -> None:
    """The weighted losses and their gradients sum to those of each row alone."""
    assert found.table.weight.tolist() == pytest.approx(model.row_weights(case), abs=1e-12)
    if sum(model.row_weights(case)) == 0:
        assert found.weights.tolist() == found.shares.tolist()  # as many rows as it has
        return
    truth = model.gradient(model.reference_loss(case))
    split = model.gradient(model.split_loss(case, found))
    assert torch.isfinite(split).all()
    assert model.difference(split, truth) <= EXACT


@amounts(1400)
def test_a_batch_that_is_understood(amount: Amount, record_property: Record) -> None:
    def check(case: Case) -> Counter[str]:
        before, planner = reference.snapshot(case), batcher(case)
        found = planner.prepare(case.batch)
        reference.check_micro_batches(case, found)
        check_gradient(case, found)
        reference.check_restored(case, found)
        if not case.encoder_decoder:
            reference.check_compact(case)
        again = planner if case.dice("again").random() < 0.5 else batcher(case)
        same_plan(found, again.prepare(case.batch))
        reference.check_unchanged(case, before)
        return reference.what(case, found)

    tally = amount.run(record_property, check, cases())
    assert all(tally[name] > tally["examples"] / 40 for name in ("split", "rolled", "widened", "units", "over budget"))
