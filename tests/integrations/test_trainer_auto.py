"""mode="auto" of PadMinTrainerMixin: split where that is exact, else joint where that is, else steps as they came."""

from __future__ import annotations

import warnings
from typing import Any

import joint_cases as cases
import pytest
from torch import Tensor

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import GradientCheckError, PadMinWarning

EXACT = 1e-12
SLOTS = 240  # of the largest batch
AUTO = PadMinConfig(token_budget=SLOTS, launch_cost=4, pad_token_id=0, batch_schema={"kind": "row"})
JOINT, AS_IT_CAME = "model calls run in chunks", "batches run as they came"


def told_by(step: type | None, make: Any = cases.llama, padmin: Any = AUTO, **options: Any) -> tuple[list[str], Any]:
    """What is told of ways in a training whose gradients, parameters and logs are stock's."""
    stock = cases.train(step, make, None, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PadMinWarning)
        ours = cases.train(step, make, padmin, **options)
    assert cases.apart(ours, stock) <= EXACT
    assert float((ours.parameters - stock.parameters).abs().max()) <= EXACT
    assert cases.logs_apart(ours, stock) <= EXACT
    assert {"training_step", "compute_loss", "log"}.isdisjoint(vars(ours.trainer))
    words = [str(each.message) for each in caught if issubclass(each.category, PadMinWarning)]
    return [each for each in words if "mode='auto'" in each], ours


def test_it_takes_what_is_exact() -> None:
    """By itself, with a coupled loss, and with a model that reads padding; each is told once."""
    told, ours = told_by(None)
    assert (told, ours.trainer._padmin._training.way) == ([], "split")
    [words], ours = told_by(cases.Contrastive)
    assert f"from step 1 on, {JOINT}" in words
    assert ours.trainer.padding_stats.waste <= ours.trainer.padding_stats.waste_before / 2
    kind, collator = cases.QUESTIONS
    [words], ours = told_by(None, lambda: cases.bert(kind), collator=collator)
    assert AS_IT_CAME in words
    assert ours.trainer._padmin._training.way == "as it came"


@pytest.mark.parametrize("window", [1, 2])
def test_a_term_that_comes_later(window: int) -> None:
    """Its batch runs jointly from the beginning; in the middle of a window too, whose steps have its divisor."""
    [words], ours = told_by(cases.WarmUp, behind=True, gradient_accumulation_steps=window, num_train_epochs=3)
    assert JOINT in words
    assert "audit of step" in words
    assert ours.trainer._padmin._training.way == "joint"


def test_what_does_not_fit_is_refused_before_it_is_trained_on() -> None:
    with pytest.raises(GradientCheckError, match=r"slots takes more memory than token_budget=64 allows"):
        cases.train(cases.Contrastive, padmin=PadMinConfig(token_budget=64, batch_schema={"kind": "row"}))
    with pytest.raises(GradientCheckError, match=r"Run the model in chunks with mode='joint'"):
        split = PadMinConfig(mode="split", token_budget=SLOTS, batch_schema={"kind": "row"})
        cases.train(cases.Contrastive, padmin=split)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("step", cases.OWN)
def test_steps_of_ones_own(step: type, behind: bool) -> None:
    """Without a declaration of what stands in the batch."""
    told, _ = told_by(step, padmin=PadMinConfig(token_budget=SLOTS, launch_cost=4, pad_token_id=0), behind=behind)
    assert [JOINT in words for words in told] == [True]


@pytest.mark.slow
def test_batches_that_no_schema_fits() -> None:
    undeclared = PadMinConfig(token_budget=None, launch_cost=4)
    for step, make, collator in (
        (None, lambda: cases.bert(cases.CHOICES[0]), cases.CHOICES[1]),
        (cases.Pairwise, cases.WithValues, cases.pairs),
        (cases.Masked, lambda: cases.bert(cases.QUESTIONS[0]), cases.QUESTIONS[1]),
    ):
        told, ours = told_by(step, make, undeclared, collator=collator)
        assert [JOINT in words for words in told] == [True]
        assert ours.trainer.padding_stats.waste <= ours.trainer.padding_stats.waste_before / 2


@pytest.mark.slow
def test_what_reads_padding_later_runs_as_it_came_from_there() -> None:
    class Late(cases.Own):
        def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
            loss = cases.contrast(cases.pooled(outputs, inputs["attention_mask"]))
            return loss + 0.1 * outputs.hidden_states[-1].mean() if inputs["input_ids"].shape[1] < 30 else loss

    told, ours = told_by(Late)
    assert [JOINT in told[0], AS_IT_CAME in told[-1]] == [True, True]
    assert ours.trainer._padmin._training.way == "as it came"
