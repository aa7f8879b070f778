"""What the gradient property says of weights and rows that are wrong: that they are, in nearly every example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fuzz import model
from fuzz.amounts import Amount, amounts
from fuzz.cases import Case, sizes
from fuzz.test_batches import EXACT, batcher, check_gradient
from lightning_padmin import MicroBatches

pytestmark = pytest.mark.filterwarnings("ignore::lightning_padmin.errors.PadMinWarning")
Wrong = Callable[[Case, MicroBatches], list[Any] | None]


def equal_weights(case: Case, found: MicroBatches) -> list[Any] | None:
    """1/K; None where that is what the weights are anyway."""
    losses = [float(model.loss_of(case, model.view(case, micro.batch)).detach()) for micro in found]
    off = [abs(weight - 1 / len(found)) > 1e-9 for weight in found.weights]
    if case.how == "sum" or not any(loss and wrong for loss, wrong in zip(losses, off, strict=True)):
        return None
    return [SimpleNamespace(batch=micro.batch, weight=1 / len(found)) for micro in found]


def rolled_one_too_far(case: Case, found: MicroBatches) -> list[Any] | None:
    """Each row's first token falls behind its last; None where no row has two tokens and a loss."""
    rows = zip(case.spans[0], model.row_weights(case), model.token_weights(case), strict=True)
    counts = found.table.counts_loss
    if not any(length > 1 and weight and (tokens or not counts) for (_, length), weight, tokens in rows):
        return None
    made = []
    for slots, weight in zip(found.slot_maps, found.weights, strict=True):
        far = replace(slots, start=(slots.start + 1) % np.array(slots.source_widths))
        made.append(SimpleNamespace(batch=far.take_batch(case.batch, found.schema), weight=float(weight)))
    return made


@pytest.mark.parametrize("wrong", [equal_weights, rolled_one_too_far])
@amounts(250)
def test_the_gradient_property_fails_where_it_should(
    amount: Amount, wrong: Wrong, record_property: Callable[[str, Any], None]
) -> None:
    def check(case: Case) -> str:
        found = batcher(case).prepare(case.batch)
        made = wrong(case, found) if sum(model.row_weights(case)) else None
        if made is None:
            return "says nothing"
        check_gradient(case, found)
        split = model.gradient(model.split_loss(case, made))
        off = not bool(split.isfinite().all()) or model.difference(split, model.gradient(model.reference_loss(case)))
        return "violated" if off > 1e6 * EXACT else "kept"

    tally = amount.run(record_property, check, sizes().map(lambda size: size.make(how="token-mean")))
    assert tally["violated"] > tally["examples"] / 10
    assert tally["kept"] <= tally["violated"] / 50
