"""Manual optimization: callback.micro_batches inside of training_step."""

from __future__ import annotations

from typing import Any

import pytest
import support
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import Module, fit, make_batch, padmin, ragged_batches, relative

from lightning_padmin import PadMinCallback, PadMinWarning
from lightning_padmin.errors import BatchError


class Manual(Module):
    """Steps after every `accumulate` batches, with clipping; un-split without a callback."""

    def __init__(self, callback: PadMinCallback | None = None, how: str = "token-mean", accumulate: int = 1) -> None:
        super().__init__(how)
        self.automatic_optimization = False
        self.callback, self.accumulate, self.totals = [callback], accumulate, []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        callback = self.callback[0]
        pairs = [(batch, 1.0)] if callback is None else callback.micro_batches(batch)
        total = 0.0
        for micro, weight in pairs:
            self.shapes.append(tuple(micro["input_ids"].shape))
            loss = self.loss(micro) * weight
            self.manual_backward(loss / self.accumulate)
            total += loss.item()
        self.totals.append(total)
        if (batch_idx + 1) % self.accumulate == 0:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            self.gradients.append(support.flat_gradient(self.model))
            optimizer.step()
            optimizer.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


@pytest.mark.parametrize("how", ["token-mean", "row-mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_those_of_the_whole_batch(how: str, accumulate: int) -> None:
    batches, callback = ragged_batches(4), padmin(loss_reduction=how)
    plain, split = Manual(None, how, accumulate), Manual(callback, how, accumulate)
    fit(plain, batches)
    trainer = fit(split, batches, callback)
    assert len(split.gradients) == 4 // accumulate
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) <= 1e-12
    assert relative(support.flat_parameters(split), support.flat_parameters(plain)) <= 1e-12
    assert split.totals == pytest.approx(plain.totals, rel=1e-12)
    assert len(split.shapes) == 20
    assert trainer.global_step == 4 // accumulate
    assert callback.stats.micro_batches == 20
    assert float(trainer.callback_metrics["padmin/micro_batches"]) == 20


@pytest.mark.usefixtures("equal_weights")
def test_weights_of_one_over_k_are_far_off() -> None:
    batches, callback = ragged_batches(1), padmin()
    plain, split = Manual(), Manual(callback)
    fit(plain, batches)
    fit(split, batches, callback)
    assert relative(split.gradients[0], plain.gradients[0]) > 0.1


def test_switched_off_it_hands_the_batch_on() -> None:
    seen: list[Any] = []

    class Keeps(Manual):
        def loss(self, batch: Any) -> Any:
            seen.append(batch)
            return super().loss(batch)

    batches, callback = ragged_batches(1), PadMinCallback(enabled=False)
    fit(Keeps(callback), batches, callback)
    assert len(seen) == 1
    assert seen[0]["input_ids"].data_ptr() == batches[0]["input_ids"].data_ptr()


def test_a_loop_that_is_left_is_refused_at_the_next_batch() -> None:
    class Leaves(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for micro, weight in self.callback[0].micro_batches(batch):
                self.manual_backward(self.loss(micro) * weight)
                if batch_idx == 0:
                    break

    callback = padmin()
    with pytest.raises(BatchError, match=r"left after 1 of 5 micro-batches.*discard\(\)"):
        fit(Leaves(callback), ragged_batches(2), callback)
    assert callback.stats.batches == 0


def test_a_loop_may_be_given_up() -> None:
    class GivesUp(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx > 0:
                return super().training_step(batch, batch_idx)
            for micro, weight in self.callback[0].micro_batches(batch):
                self.manual_backward(self.loss(micro) * weight)
                break
            self.callback[0].discard()
            self.optimizers().zero_grad()
            return None

    batches, callback = ragged_batches(2), padmin()
    plain, split = Manual(), GivesUp(callback)
    fit(plain, batches[1:])
    fit(split, batches, callback)
    assert relative(split.gradients[0], plain.gradients[0]) <= 1e-12
    assert callback.stats.batches == 1


def test_a_step_that_does_not_use_it_is_told() -> None:
    callback = padmin()
    with pytest.warns(PadMinWarning, match=r"did nothing for the first batch.*callback\.micro_batches\(batch\)"):
        fit(Manual(None), ragged_batches(2), callback)


def test_outside_of_its_place() -> None:
    callback, batch = padmin(check="off"), make_batch([3, 2])
    with pytest.raises(MisconfigurationException, match="automatic_optimization=False, while fit runs"):
        callback.micro_batches(batch)

    class Automatic(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            callback.micro_batches(batch)

    with pytest.raises(MisconfigurationException, match="automatic_optimization=False, while fit runs"):
        fit(Automatic(), ragged_batches(1), callback)


def test_the_budget_and_the_index_hold() -> None:
    seen: list[tuple[int, int]] = []

    class Watches(Manual):
        def loss(self, batch: Any) -> Any:
            seen.append((callback.micro_index, callback.micro_count))
            return super().loss(batch)

    callback = padmin()
    module = Watches(callback)
    fit(module, ragged_batches(1), callback)
    assert seen == [(k, 5) for k in range(5)]
    assert max(rows * width for rows, width in module.shapes) <= support.BUDGET
    assert torch.isfinite(module.gradients[0]).all()
