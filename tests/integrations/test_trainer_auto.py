"""mode="auto" of PadMinTrainerMixin: split where that is exact, else joint where that is, else steps as they came.

Stock Trainers are the oracle, in float64: gradients at each step of the optimizer, weights, and all that is logged.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import joint_cases as cases
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import (
    BatchError,
    ConfigError,
    GradientCheckError,
    PadMinWarning,
    TrainingStepError,
)

EXACT = 1e-12
SLOTS = 240  # of the largest batch
UNDECLARED = PadMinConfig(token_budget=SLOTS, launch_cost=4, pad_token_id=0)
AUTO = replace(UNDECLARED, batch_schema={"kind": "row"})
SPLIT = replace(AUTO, mode="split")
JOINT, AS_IT_CAME = "model calls run in chunks", "batches run as they came"


def told_by(step: type | None, make: Any = cases.llama, padmin: Any = AUTO, **options: Any) -> tuple[list[str], Any]:
    """What is told of ways in a training whose gradients, parameters and logs are stock's."""
    stock = cases.train(step, make, None, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PadMinWarning)
        ours = cases.train(step, make, padmin, **options)
    assert cases.apart(ours, stock) <= EXACT
    assert float((ours.parameters - stock.parameters).abs().max()) <= EXACT
    words = [str(each.message) for each in caught if issubclass(each.category, PadMinWarning)]
    told = [each for each in words if "mode='auto'" in each]
    # What is logged of a window that was split is added up in float32.
    never_split = bool(told) and "from step 1 on" in told[0]
    assert cases.logs_apart(ours, stock) <= (EXACT if never_split else 1e-6)
    assert {"training_step", "compute_loss", "log"}.isdisjoint(vars(ours.trainer))
    assert "backward" not in vars(ours.trainer.accelerator)
    return told, ours


def way_of(ours: Any) -> str:
    way: str = ours.trainer._padmin._training.way
    return way


def halves(ours: Any) -> bool:
    """Whether at most half of the waste is left."""
    stats = ours.trainer.padding_stats
    return bool(stats.waste <= stats.waste_before / 2)


class Quiet(cases.Own):
    """Logs nothing itself."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        names = ("input_ids", "attention_mask")
        outputs = model(**{name: inputs[name] for name in names}, output_hidden_states=True)
        return self.loss_of(outputs, inputs)

    def pairs(self, outputs: Any, inputs: Any) -> Tensor:
        rows = cases.pooled(outputs, inputs["attention_mask"])
        return cross_entropy(rows @ rows.T, torch.arange(len(rows)))


class WarmUp(Quiet):
    """A coupled term whose coefficient leaves 0 in the middle."""

    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        share = max(0, self.state.global_step - 2) / 4
        return self.token_loss(outputs, inputs) + share * self.pairs(outputs, inputs)


def test_it_takes_what_is_exact() -> None:
    """By itself, with a coupled loss, and with a model that reads padding; each is told once."""
    told, ours = told_by(None, gradient_accumulation_steps=2)
    assert (told, way_of(ours)) == ([], "split")
    [words], ours = told_by(cases.Contrastive)
    assert f"from step 1 on, {JOINT}" in words
    assert halves(ours)
    assert ours.trainer._padmin._session.audits.metrics("")["mode"] == 1
    kind, collator = cases.QUESTIONS
    told, ours = told_by(None, lambda: cases.bert(kind), collator=collator)
    assert AS_IT_CAME in told[-1]
    assert way_of(ours) == "as it came"


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_term_that_comes_later(window: int) -> None:
    """Its batch runs jointly from the beginning; in the middle of a window too, whose steps have its divisor."""
    [words], ours = told_by(WarmUp, behind=True, gradient_accumulation_steps=window, num_train_epochs=3)
    assert JOINT in words
    assert "audit of step" in words
    assert "had passed" in words
    assert way_of(ours) == "joint"


def test_what_does_not_fit_is_refused_before_it_is_trained_on() -> None:
    small, (kind, collator) = replace(UNDECLARED, token_budget=64), cases.QUESTIONS
    with pytest.raises(GradientCheckError, match=r"slots takes more memory than token_budget=64 allows: set token_bud"):
        cases.train(None, lambda: cases.bert(kind), padmin=small, collator=collator)
    with pytest.raises(GradientCheckError, match=r"Run the model in chunks with mode='joint'"):
        cases.train(cases.Flooding, padmin=SPLIT)


def refused(error: type[Exception], match: str, make: Any = cases.llama, **options: Any) -> None:
    """Before anything is trained on: weights are what they were, and there are no gradients."""
    kept: list[tuple[nn.Module, list[Tensor]]] = []

    def keep() -> nn.Module:
        model = make()
        kept.append((model, [p.detach().clone() for p in model.parameters()]))
        return model

    with pytest.raises(error, match=match):
        cases.train(make=keep, **options)
    [(model, weights)] = kept
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_too_large_a_batch_is_named_with_what_speaks_against_splitting_it() -> None:
    small, fix = replace(UNDECLARED, token_budget=64), r".*token_budget=64 allows: set token_budget=240 or None"
    kind, collator = cases.QUESTIONS
    of_questions: Any = {"make": lambda: cases.bert(kind), "collator": collator}
    refused(GradientCheckError, f"first-batch check.*{fix}", step=None, padmin=small, **of_questions)
    refused(ConfigError, f"neftune_noise_alpha=5{fix}", step=None, padmin=small, neftune_noise_alpha=5)

    class Grows:
        def get_batch_samples(self, *args: Any, **options: Any) -> Any:
            batches, count = super().get_batch_samples(*args, **options)  # type: ignore[misc]
            rows = 4 if self.state.global_step < 3 else 8  # type: ignore[attr-defined]
            return [{name: each[:rows] for name, each in batch.items()} for batch in batches], count

    later = r"as they came by now.*240 slots, and token_budget=120"
    with pytest.warns(PadMinWarning, match=AS_IT_CAME), pytest.raises(BatchError, match=later):
        cases.train(Grows, padmin=replace(UNDECLARED, token_budget=120), behind=True, **of_questions)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("step", [*cases.OWN, WarmUp])
def test_steps_of_ones_own(step: type, behind: bool) -> None:
    """Without a declaration of what stands in the batch."""
    [words], ours = told_by(step, padmin=UNDECLARED, behind=behind)
    assert JOINT in words
    assert halves(ours)


@pytest.mark.slow
@pytest.mark.parametrize("step", [*cases.OWN, WarmUp])
def test_split_is_another_training_or_is_refused(step: type) -> None:
    """The control."""
    try:
        found = cases.train(step, padmin=replace(SPLIT, check="off"), behind=True)
    except (TrainingStepError, ValueError, IndexError):
        return
    stock = cases.train(step, behind=True)
    assert cases.apart(found, stock) > 1e-3
    with pytest.raises(GradientCheckError):
        cases.train(step, padmin=SPLIT, behind=True)


@pytest.mark.slow
def test_windows() -> None:
    """The Trainer's number of targets goes to whole steps; a loss that is a mean of its own is divided as ever."""

    def coupled(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"][:, :-1].transpose(1, 2)
        weights = torch.linspace(0.1, 3, cases.VOCABULARY, dtype=logits.dtype)
        summed = cross_entropy(logits, labels[:, 1:], reduction="sum") / num_items_in_batch
        return summed + cross_entropy(logits, labels[:, 1:], weight=weights)

    for count in (2, 4):
        for step in (cases.Weighted, cases.Contrastive, cases.Adversarial):
            told, _ = told_by(step, gradient_accumulation_steps=count)
            assert [JOINT in words for words in told] == [True]
        assert told_by(None, gradient_accumulation_steps=count)[0] == []

    class Summed:
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, compute_loss_func=coupled)

    [words], ours = told_by(Summed, gradient_accumulation_steps=2, label_names=["labels"], collator=only_tokens)
    assert JOINT in words
    assert ours.trainer._padmin.pools is None


def only_tokens(samples: Any) -> dict[str, Tensor]:
    batch = cases.collate(samples)
    del batch["kind"]
    return batch


@pytest.mark.slow
def test_batches_that_no_schema_fits() -> None:
    undeclared = PadMinConfig(token_budget=None, launch_cost=4)
    for step, make, collator in (
        (None, lambda: cases.bert(cases.CHOICES[0]), cases.CHOICES[1]),
        (cases.Pairwise, cases.WithValues, cases.pairs),
        (cases.Masked, lambda: cases.bert(cases.QUESTIONS[0]), cases.QUESTIONS[1]),
    ):
        for window in (1, 2):
            told, ours = told_by(step, make, undeclared, collator=collator, gradient_accumulation_steps=window)
            assert [JOINT in words for words in told] == [True]
            assert halves(ours)
