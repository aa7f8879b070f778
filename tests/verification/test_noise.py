"""Limits of the check in half precision: what rounding makes of a batch is let through, a smaller fault is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import ranks
import support
import torch
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.batch import infer_schema, measure
from lightning_padmin.errors import GradientCheckError
from lightning_padmin.runtime import without_autocast
from lightning_padmin.verification import Outcome, check_gradients
from lightning_padmin.verification.compare import DOUBT, HALF_FLOOR, HALF_LIMIT, Tolerance

LENGTHS = [5, 14, 9, 11, 7, 13]
BFLOAT16 = torch.bfloat16


class Model(nn.Module):
    """A causal mean over earlier tokens between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(support.VOCABULARY, 32)
        self.mix, self.head = nn.Linear(32, 32), nn.Linear(32, support.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.embedding(input_ids)
        count = torch.arange(1, states.shape[1] + 1, dtype=states.dtype)[:, None]
        return self.head(torch.tanh(self.mix(states + states.cumsum(1) / count)))


class Step:
    """A training step; `heavier` is what the fault does to the loss of the shorter rows' tokens."""

    def __init__(self, precision: str, heavier: float = 1.0, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model, self.heavier = Model().to(BFLOAT16 if precision == "true" else torch.float32), heavier
        self.casts, self.dtypes = precision == "mixed", list[torch.dtype]()

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", BFLOAT16) if self.casts else nullcontext():
            logits = self.model(batch["input_ids"])
        self.dtypes.append(logits.dtype)
        losses = support.token_losses(logits.float(), batch["labels"])
        weight = torch.where(batch["attention_mask"].sum(1) < 10, self.heavier, 1.0)
        return (losses * weight[:, None]).sum() / (batch["labels"][:, 1:] != -100).sum()


def check(step: Step, seed: int = 0, **options: Any) -> Outcome:
    config = PadMinConfig(loss_reduction=options.pop("loss_reduction", "token-mean"), token_budget=120)
    batch = support.make_batch(LENGTHS, seed=seed)
    schema = infer_schema(batch, config.fields, pad_token_id=0)
    table = measure(batch, schema, loss_reduction=config.loss_reduction, label_shift=config.label_shift)
    outcome = check_gradients(step, batch, schema, table, config, step.model, **options)
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("precision", ["true", "mixed"])
def test_rounding_is_no_fault(precision: str) -> None:
    for seed in range(2):
        step = Step(precision, seed=seed)
        outcome = check(step, seed, is_half=step.casts)
        assert outcome.told
        assert (step.dtypes[-1] is torch.float32) == (precision == "mixed")
        assert outcome.difference < (1e-5 if precision == "mixed" else HALF_LIMIT / 2)


class Halves(Step):
    """A loss that a part of the batch has otherwise than the whole: each row's is `heavier` times itself in a part."""

    most = 0  # rows that ever came together

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        self.most = max(self.most, len(batch["input_ids"]))
        weight = self.heavier if len(batch["input_ids"]) < self.most else 1.0
        self.heavier, heavier = 1.0, self.heavier
        try:
            return super().__call__(batch) * weight
        finally:
            self.heavier = heavier


@pytest.mark.parametrize(("precision", "fault"), [("true", 1.06), ("mixed", 1.002)])
def test_a_fault_far_below_the_widest_limit(precision: str, fault: float) -> None:
    """It passes with the limit that holds for all models, and with its own it does not."""
    assert check(Halves(precision, fault), tolerance=HALF_LIMIT).told
    with pytest.raises(GradientCheckError, match=r"gradients of \d rows differ"):
        check(Halves(precision, fault), is_half=precision == "mixed")


@pytest.mark.parametrize("precision", ["true", "mixed"])
def test_a_wrong_declaration_is_named(precision: str) -> None:
    for other in ("row-mean", "sum"):
        with pytest.raises(GradientCheckError, match="set loss_reduction='token-mean'"):
            check(Step(precision), loss_reduction=other)


class Stays(Step):
    """Casts by itself, so that no autocast has a say."""

    def __init__(self, fault: float = 1.0) -> None:
        super().__init__("mixed", fault)
        self.model.head.register_forward_pre_hook(lambda _, args: (args[0].bfloat16().float(),))


class Needs(Step):
    """A kernel that is there in half precision alone."""

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().__call__(batch)
        if self.dtypes[-1] is torch.float32:
            raise RuntimeError("only for half precision")
        return loss


@pytest.mark.parametrize("make", [Stays, lambda: Needs("mixed")])
def test_where_half_precision_cannot_be_left_out(make: Any) -> None:
    step = make()
    outcome = check(step, is_half=True)
    assert outcome.told
    assert step.dtypes[-1] is BFLOAT16
    assert torch.float32 in step.dtypes


def test_a_hint_where_nothing_shows_half_precision() -> None:
    assert check(Halves("32", 1.006), is_half=True).told
    with pytest.raises(GradientCheckError):
        check(Halves("32", 1.006))
    with pytest.raises(GradientCheckError):
        check(Halves("32", 1.02), is_half=True)


def test_two_ranks_have_one_limit() -> None:
    """On one of them a kernel knows half precision alone: both stay in it."""
    both, found = ranks.Ranks(2), {}
    steps: list[Step] = [Step("mixed"), Needs("mixed", seed=1)]

    def run(rank: int) -> None:
        found[rank] = check(steps[rank], rank, exchange=both.exchange_of(rank), is_half=True)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [replace(each, losses=frozenset(), rows=()) for each in found.values()] == [
        replace(found[0], losses=frozenset(), rows=())
    ] * 2
    assert [step.dtypes[-1] for step in steps] == [BFLOAT16, BFLOAT16]


@pytest.fixture
def entered() -> Iterator[None]:
    with torch.autocast("cpu", BFLOAT16):
        yield


@pytest.mark.usefixtures("entered")
def test_autocast_is_left_out_here_and_nowhere_else() -> None:
    now, one = torch.set_autocast_enabled, torch.ones(2, 2)
    seen: list[torch.dtype] = []

    def elsewhere() -> None:
        with torch.autocast("cpu", BFLOAT16):
            seen.append((one @ one).dtype)

    with without_autocast():
        assert (one @ one).dtype is torch.float32
        with torch.autocast("cpu", BFLOAT16), without_autocast():
            assert (one @ one).dtype is torch.float32
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert (one @ one).dtype is torch.float32
    assert seen == [BFLOAT16]
    assert (one @ one).dtype is BFLOAT16
    assert torch.set_autocast_enabled is now


def test_limits_of_half_precision() -> None:
    assert Tolerance(HALF_FLOOR).is_half
    assert not Tolerance(0.99 * HALF_FLOOR).is_half
    assert Tolerance(0.02).own_limit == pytest.approx(0.1)
    assert Tolerance(0.3).own_limit == 0.5


@pytest.mark.parametrize("fault", [1.0002, 1.0008])
def test_a_fault_in_float32_below_the_limit_for_all_models(fault: float) -> None:
    outcome = check(Halves("32", fault), tolerance=1e-3)
    assert outcome.told
    assert 5e-5 < outcome.difference < 1e-3
    with pytest.raises(GradientCheckError, match=r"gradients of \d rows differ.*limit [234]e-05"):
        check(Halves("32", fault))


class Cancels(Step):
    """What goes backward is what is left of numbers several hundred times as large, so that float32 rounds it more."""

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        losses = support.token_losses(self.model(batch["input_ids"]), batch["labels"])
        count = (batch["labels"][:, 1:] != -100).sum()
        return (losses * 301.0).sum() / count - (losses * 300.0).sum() / count


def test_a_loss_that_float32_rounds_more_is_no_fault() -> None:
    found = [check(Cancels("32", seed=seed), seed) for seed in range(6)]
    assert all(each.told for each in found)
    assert max(each.difference for each in found) > DOUBT
    assert all(each.difference < each.limit / 2 < 5e-4 for each in found)  # measured ones
