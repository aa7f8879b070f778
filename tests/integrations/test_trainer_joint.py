"""mode="joint" of PadMinTrainerMixin against the stock Trainer: gradients, logged values, parameters, in float64."""

from __future__ import annotations

from typing import Any

import joint_cases as cases
import pytest

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import GradientCheckError

EXACT = 1e-12


def check(step: type | None, make: Any = cases.llama, padmin: PadMinConfig = cases.JOINT, **options: Any) -> Any:
    """Stock's gradients, parameters and logs, from fewer slots; nothing of it stays in the trainer."""
    stock, ours = (cases.train(step, make, each, **options) for each in (None, padmin))
    assert cases.apart(ours, stock) <= EXACT
    assert float((ours.parameters - stock.parameters).abs().max()) <= EXACT
    assert cases.logs_apart(ours, stock) <= EXACT
    stats = ours.trainer.padding_stats
    assert stats.waste <= stats.waste_before / 2
    assert stats.micro_batches > stats.batches > 0
    assert {"training_step", "compute_loss", "log"}.isdisjoint(vars(ours.trainer))
    return ours


def test_steps_run_as_stock_on_whole_batches() -> None:
    """A window's divisor, and a step with a coupled loss and two passes, in front of the mixin."""
    check(None, gradient_accumulation_steps=2)
    check(cases.Adversarial)


def test_what_reads_padding_is_refused_by_name() -> None:
    """The loss of this model is a softmax over all columns, those of padding too."""
    kind, collator = cases.QUESTIONS
    with pytest.raises(GradientCheckError, match=r"with models in chunks differ from the stock ones.*mode='split'"):
        cases.train(None, lambda: cases.bert(kind), cases.JOINT, collator)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("step", cases.OWN)
def test_steps_that_need_their_whole_batch(step: type, behind: bool) -> None:
    check(step, behind=behind)


@pytest.mark.slow
@pytest.mark.parametrize("step", [cases.Weighted, cases.Flooding])
def test_split_is_another_training(step: type) -> None:
    """The control."""
    split = PadMinConfig(token_budget=64, launch_cost=4, pad_token_id=0, check="off", batch_schema={"kind": "row"})
    assert cases.apart(cases.train(step, padmin=split), cases.train(step)) > 1e-3
