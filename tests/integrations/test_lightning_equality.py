"""Gradients and parameters of a split fit against those of the same fit un-split, in float64 and on one device.

Every scenario runs three times: un-split, split, and split with every micro-batch weighing 1/K, which must show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import support
import torch
from support import BUDGET, LENGTHS, Module, fit, fit_pair, make_batch, padmin, ragged_batches, relative
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_padmin import PadMinWarning

EXACT = 1e-12


class Checkpointed(Module):
    """Activations of the recurrent layer are computed again in the backward pass."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        model, labels = self.model, batch["labels"]
        states = model.embedding(batch["input_ids"])
        states = checkpoint(lambda x: model.rnn(x)[0], states, use_reentrant=False)
        return support.reduce_loss(support.token_losses(model.head(states), labels), labels, self.how)


class ShortRowHead(Module):
    """A parameter that only rows below four tokens use: none of them is in the first micro-batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model.bias = nn.Parameter(torch.zeros(support.VOCABULARY, dtype=torch.float64))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"])
        short = batch["attention_mask"].sum(1) < 4
        if short.any():
            logits = logits + short[:, None, None] * self.model.bias
        return support.reduce_loss(support.token_losses(logits, batch["labels"]), batch["labels"], self.how)


class BatchOnly(Module):
    """training_step without batch_idx."""

    def training_step(self, batch: dict[str, Tensor]) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


class TwiceClosed(Module):
    """Calls the closure twice, as sharpness-aware optimizers do."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class VectorLoss(Module):
    """A loss of shape (1,)."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch)[None]


class OwnDivisor(Module):
    """A sum over a number that comes with the batch, as trainers pass it that count a whole window's tokens."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return support.token_losses(self.model(batch["input_ids"]), batch["labels"]).sum() / batch["targets"]


def with_divisor(batches: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [batch | {"targets": torch.tensor(200.0 + index)} for index, batch in enumerate(batches)]


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


@dataclass(frozen=True)
class Scenario:
    make: Callable[[], Module] = Module
    batches: Callable[[], Sequence[Any]] = ragged_batches
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    tolerance: float = EXACT


WINDOW = {"batches": partial(ragged_batches, 5)}
# More of them, the same on every adapter: `tests/adapters/contract.py`.
SCENARIOS: dict[str, Scenario] = {
    "several batches, two epochs": Scenario(**WINDOW, trainer={"max_epochs": 2}),
    "accumulate 2, ragged tail": Scenario(**WINDOW, trainer={"accumulate_grad_batches": 2}),
    "epoch shorter than the window": Scenario(trainer={"accumulate_grad_batches": 7}),
    "clip norm, AdamW": Scenario(partial(Module, optimizer=adamw), trainer={"gradient_clip_val": 0.05}),
    "clip value, AdamW": Scenario(
        partial(Module, optimizer=adamw),
        trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
    ),
    "LBFGS": Scenario(partial(Module, optimizer=lbfgs), tolerance=1e-10),
    "closure called twice": Scenario(TwiceClosed),
    "sequence-mean": Scenario(partial(Module, "row-mean"), options={"loss_reduction": "sequence-mean"}),
    "sum, accumulate 2": Scenario(
        partial(Module, "sum"), options={"loss_reduction": "sum"}, trainer={"accumulate_grad_batches": 2}
    ),
    "sum over a given divisor": Scenario(
        OwnDivisor, lambda: with_divisor(ragged_batches()), options={"loss_reduction": "sum"}
    ),
    "normalize global, one rank": Scenario(options={"normalize": "global"}),
    "prompts of four tokens": Scenario(batches=partial(ragged_batches, prompt=4)),
    "checkpointed activations": Scenario(Checkpointed),
    "parameter outside of micro-batch 0": Scenario(ShortRowHead),
    "the same, AdamW, accumulate 2": Scenario(
        partial(ShortRowHead, optimizer=adamw), **WINDOW, trainer={"accumulate_grad_batches": 2}
    ),
    "training_step(batch)": Scenario(BatchOnly),
    "loss of shape (1,)": Scenario(VectorLoss),
    "dictionary output": Scenario(partial(Module, output=lambda batch, loss: {"loss": loss})),
    "64-true": Scenario(partial(Module, dtype=torch.float32), trainer={"precision": "64-true"}),
}


def run(scenario: Scenario) -> support.Pair:
    return fit_pair(scenario.make, scenario.batches(), scenario.options, **scenario.trainer)


@pytest.mark.parametrize("name", SCENARIOS)
def test_equal(name: str) -> None:
    pair = run(SCENARIOS[name])
    assert pair.gradient <= SCENARIOS[name].tolerance
    assert pair.parameters <= SCENARIOS[name].tolerance
    assert [loss.shape for loss in pair.split.losses] == [loss.shape for loss in pair.plain.losses]
    torch.testing.assert_close(torch.stack(pair.split.losses), torch.stack(pair.plain.losses), rtol=1e-10, atol=0)
    assert pair.split_trainer.global_step == pair.plain_trainer.global_step
    assert pair.split.zero_grads == pair.plain.zero_grads


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.usefixtures("equal_weights")
def test_weights_of_one_over_k_are_far_off(name: str) -> None:
    assert run(SCENARIOS[name]).gradient > 0.1


@pytest.mark.parametrize(
    ("loss", "declared"), [("token-mean", "row-mean"), ("row-mean", "token-mean"), ("sum", "row-mean")]
)
def test_a_wrong_declaration_is_far_off(loss: str, declared: str) -> None:
    pair = fit_pair(partial(Module, loss), ragged_batches(1), {"loss_reduction": declared, "check": "off"})
    assert pair.gradient > 0.1


def test_single_precision() -> None:
    """The order of additions differs, and nothing else."""
    pair = fit_pair(partial(Module, dtype=torch.float32), ragged_batches(5), accumulate_grad_batches=2)
    assert pair.split.model.head.weight.dtype == torch.float32
    assert 0 < pair.gradient <= 5e-6


def gradient_of_rows_alone(batches: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """The truth for left padding, for SGD steps over the batches: each row run alone, without any padding."""
    module = Module()
    optimizer = module.configure_optimizers()
    gradients = []
    for batch in batches:
        losses, targets = [], 0
        for ids, mask, labels in zip(*(batch[key] for key in ("input_ids", "attention_mask", "labels")), strict=True):
            real = mask.bool()
            losses.append(support.token_losses(module.model(ids[None, real]), labels[None, real]).sum())
            targets += int((labels[real][1:] != -100).sum())
        optimizer.zero_grad()
        (torch.stack(losses).sum() / targets).backward()
        gradients.append(support.flat_gradient(module.model))
        optimizer.step()
    return gradients


@pytest.mark.parametrize("padding", ["left", "both sides"])
def test_left_padding_gives_what_each_row_gives_alone(padding: str) -> None:
    batches = []
    for batch in ragged_batches():
        lengths = batch["attention_mask"].sum(1).tolist()
        left = [24 - length if padding == "left" else (24 - length) // 2 for length in lengths]
        batches.append(make_batch(lengths, left=left, width=24, seed=len(batches)))
    truth = gradient_of_rows_alone(batches)
    split, stock = Module(), Module()
    with pytest.warns(PadMinWarning, match="each row is trained as it is without padding"):
        fit(split, batches, padmin())
    fit(stock, batches)
    assert max(relative(a, b) for a, b in zip(split.gradients, truth, strict=True)) <= EXACT
    assert relative(stock.gradients[0], truth[0]) > 0.1, "the model does not see left padding, so nothing was tested"


def test_a_label_on_the_first_real_token_has_nothing_to_be_predicted_from() -> None:
    left = [24 - length for length in LENGTHS]
    batches = [make_batch(LENGTHS, left=left, width=24, prompt=0)]
    split = Module()
    with pytest.warns(PadMinWarning, match="have a label on their first real token"):
        fit(split, batches, padmin(check="off"))
    truth = gradient_of_rows_alone(batches)
    assert relative(split.gradients[0], truth[0]) <= EXACT


def test_without_a_budget_the_batch_is_trimmed_only() -> None:
    """One micro-batch, through the stock closure, if a second one costs more than it saves."""
    batches = [make_batch(LENGTHS, width=40, seed=seed) for seed in range(3)]
    plain, split, callback = Module(), Module(), padmin(token_budget=None, launch_cost=1000)
    fit(plain, batches)
    fit(split, batches, callback)
    assert split.shapes == [(10, 24)] * 3
    assert plain.shapes == [(10, 40)] * 3
    assert (callback.stats.micro_batches, callback.stats.slots_before, callback.stats.slots) == (3, 1200, 720)
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) <= EXACT


def test_batches_within_the_budget_are_passed_on_untouched() -> None:
    batches, seen = [make_batch([6, 6, 6], seed=seed) for seed in range(2)], []

    class Keeps(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch["input_ids"].data_ptr())
            return super().training_step(batch, batch_idx)

    fit(Keeps(), batches, padmin(check="off"))
    assert seen == [batch["input_ids"].data_ptr() for batch in batches]


def test_the_budget_holds() -> None:
    module = Module()
    fit(module, ragged_batches(), padmin())
    assert len(module.shapes) == 15
    assert max(rows * width for rows, width in module.shapes) <= BUDGET
    assert module.shapes[:5] == [(1, 24), (1, 20), (2, 12), (4, 6), (2, 3)]


def test_a_batch_is_planned_once_however_often_its_closure_runs() -> None:
    module, callback = Module(optimizer=lbfgs), padmin()
    fit(module, ragged_batches(2), callback)
    assert len(module.shapes) > 2 * 5 * 2, "the closure ran once only"
    assert (callback.stats.batches, callback.stats.micro_batches) == (2, 10)


def test_the_callers_batch_is_not_changed() -> None:
    batches = ragged_batches()
    copies = [{key: value.clone() for key, value in batch.items()} for batch in batches]
    fit(Module(), batches, padmin())
    assert all(torch.equal(batch[key], copy[key]) for batch, copy in zip(batches, copies, strict=True) for key in copy)
