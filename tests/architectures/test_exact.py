"""Rolled, trimmed, regrouped: each row gets the logits, and the model the gradients, of rows that ran alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from architectures.cases import PADDINGS, Case, Padding
from architectures.zoo import BY_NAME, TABLE, Architecture
from support import relative

from lightning_padmin import MicroBatcher
from lightning_padmin.forward.padded_forward import PaddedForward

Record = Callable[..., None]


def _parameter(architecture: Architecture) -> object:
    marks = [pytest.mark.slow] if architecture.slow else []
    return pytest.param(architecture, id=architecture.name.replace(" ", "-").replace(",", ""), marks=marks)


@pytest.fixture(scope="module", params=[_parameter(architecture) for architecture in TABLE])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.mark.parametrize("padding", PADDINGS)
def test_micro_batches(case: Case, padding: Padding, record: Record) -> None:
    """Logits of each micro-batch, and the weighted sum of gradients, against rows alone."""
    bound = case.architecture.bound
    batches = MicroBatcher(case.config(loss_reduction="token-mean")).prepare(case.batch(padding))
    assert len(batches) >= 3
    assert any(len(set(slots.length[:, 0])) > 1 for slots in batches.slot_maps)
    weighted, unweighted, differences = 0.0, 0.0, []
    for micro in batches:
        logits = case.logits(micro.batch)
        differences.append(case.logit_difference(logits, micro.rows, [0] * len(micro.rows)))
        gradient = case.gradient(case.token_mean(logits, micro.batch["labels"]))
        weighted, unweighted = weighted + micro.weight * gradient, unweighted + gradient / len(batches)
    logit_difference = float(torch.tensor(differences, dtype=torch.float64).max())  # NaN, if there is one
    gradient_difference = relative(weighted, case.truth.token_mean)
    wrong_weights = relative(unweighted, case.truth.token_mean)
    record(
        case.architecture.name,
        micro_logits=logit_difference,
        micro_gradients=gradient_difference,
        wrong_weights=wrong_weights,
    )
    assert logit_difference <= bound
    assert gradient_difference <= bound
    assert wrong_weights > 1e-2, "weights of 1/K would pass too, so this case tests nothing"


def test_joint(case: Case, record: Record) -> None:
    bound, batch = case.architecture.bound, case.batch("two-sided")
    labels = batch.pop("labels")
    forward = PaddedForward(case.model, case.config())
    logits = forward(**batch, **case.architecture.forward).logits
    assert len(forward.micro_batches) >= 3
    logit_difference = case.logit_difference(logits, range(len(case.rows)), case.starts("two-sided")[case.seq2seq])
    gradient_difference = relative(case.gradient(case.coupled(logits, labels)), case.truth.coupled)
    record(case.architecture.name, joint_logits=logit_difference, joint_gradients=gradient_difference)
    assert logit_difference <= bound
    assert gradient_difference <= bound
    if not case.by_row:
        padding = batch["decoder_attention_mask" if case.seq2seq else "attention_mask"] == 0
        assert not logits[padding].any(), "padding slots hold zeros"


def test_replay(case: Case, record: Record) -> None:
    batch = case.batch("two-sided")
    labels = batch.pop("labels")
    forward = PaddedForward(case.model, case.config(), mode="replay")
    case.model.zero_grad()
    case.coupled(forward(**batch, **case.architecture.forward).logits, labels).backward()
    forward.backward_pending()
    gradient = case.collected_gradient()
    case.model.zero_grad()
    difference = relative(gradient, case.truth.coupled)
    record(case.architecture.name, replay_gradients=difference)
    assert difference <= case.architecture.bound


def test_stock_left_padding(case: Case, record: Record) -> None:
    """What transformers gives for a left-padded batch with its mask: a fact of the table, not of this library."""
    with torch.no_grad():
        logits = case.logits(case.batch("left"))
    difference = case.logit_difference(logits, range(len(case.rows)), case.starts("left")[case.seq2seq])
    record(case.architecture.name, stock_logits=difference)
    if case.architecture.stock == "exact":
        assert difference <= case.architecture.bound
    else:
        assert difference > 1e-6, "stock left padding is exact now: say so in the table"


@pytest.mark.parametrize(
    "name", ["Llama", "GPT-2", "gpt-oss", "Mamba2", "Jamba", "Falcon-H1", "Qwen3-Next", "LFM2", "ModernBert", "T5"]
)
def test_float32(name: str) -> None:
    """Models as they are, with their own casts: nothing but rounding is left."""
    case = Case(replace(BY_NAME[name], dtype=torch.float32))
    weighted = 0.0
    for micro in MicroBatcher(case.config()).prepare(case.batch("left")):
        logits = case.logits(micro.batch)
        assert logits.dtype == torch.float32
        assert case.logit_difference(logits, micro.rows, [0] * len(micro.rows)) <= 1e-5
        weighted = weighted + micro.weight * case.gradient(case.token_mean(logits, micro.batch["labels"]))
    assert relative(weighted, case.truth.token_mean) <= 1e-5
