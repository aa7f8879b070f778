"""Training in which something breaks: values that are not finite, loaders and steps that raise, callbacks that collide.

What stock makes of it is what is expected, each time; and afterwards the Trainer trains as if nothing had been there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import processes
import pytest
import support
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import (
    LENGTHS,
    Memory,
    Module,
    fit,
    flat_parameters,
    loader,
    padmin,
    quiet_trainer,
    ragged_batches,
    relative,
)
from torch import Tensor

from lightning_padmin.errors import GradientCheckError

EXACT = 1e-12
NAN = float("nan")
WORKER = Path(__file__).with_name("broken_worker.py")


# Values that are not finite


class Scaled(Module):
    """Each row's losses times a factor that the batch brings."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses = support.token_losses(self.model(batch["input_ids"]), batch["labels"]) * batch["scale"][:, None]
        return support.reduce_loss(losses, batch["labels"], self.how)


class Skips(Scaled):
    """Leaves out steps whose gradients are not finite, as many training scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: list[int] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        if not self.gradients[-1].isfinite().all():
            self.skipped.append(self.trainer.global_step)
            optimizer.zero_grad()


def poisoned(row: int, *at: int, count: int = 5, value: float = NAN) -> list[dict[str, Tensor]]:
    """In the batches `at`, one row's factor is no number."""
    batches = ragged_batches(count)
    for index, batch in enumerate(batches):
        batch["scale"] = torch.ones(len(LENGTHS), dtype=torch.float64)
        if index in at:
            batch["scale"][row] = value
    return batches


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The worst difference where both are finite; infinite if they are not so in the same places."""
    assert len(found) == len(wanted) > 0
    if not all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(found, wanted, strict=True)):
        return float("inf")
    finite = [(a[b.isfinite()], b[b.isfinite()]) for a, b in zip(found, wanted, strict=True)]
    return max([relative(a, b) for a, b in finite if len(a)], default=0.0)


# Row 0 is in the micro-batch of the longest row, row 9 in that of the shortest; batch 0 is the one that is checked.
@pytest.mark.parametrize("value", [NAN, float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("row", [0, 5, 9])
def test_gradients_are_as_little_finite_as_in_stock(row: int, at: int, value: float) -> None:
    pair = support.fit_pair(Scaled, poisoned(row, at, value=value))
    assert apart(pair.split.gradients, pair.plain.gradients) <= EXACT
    broken = [k for k, gradient in enumerate(pair.plain.gradients) if not gradient.isfinite().all()]
    assert broken == [0, 1, 2, 3, 4][at:]
    assert [bool(loss.isfinite()) for loss in pair.split.losses] == [
        bool(loss.isfinite()) for loss in pair.plain.losses
    ]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["each batch", "windows"])
@pytest.mark.parametrize("row", [0, 9])
def test_skipped_steps_are_those_of_stock(row: int, options: dict[str, Any]) -> None:
    memory = Memory()
    plain, split, callback = Skips(), Skips(), padmin()
    batches = poisoned(row, 1, 3)
    fit(plain, batches, **options)
    trainer = fit(split, batches, callback, logger=memory, log_every_n_steps=1, **options)
    assert split.skipped == plain.skipped == ([0, 1] if options else [1, 3])
    assert apart(split.gradients, plain.gradients) <= EXACT
    assert flat_parameters(split).isfinite().all()
    assert relative(flat_parameters(split), flat_parameters(plain)) <= EXACT
    assert callback.stats.micro_batches == 5 * callback.stats.batches == 25
    assert len(memory.of("padmin/")) == trainer.global_step == (3 if options else 5)
    assert all(value == value for _, row in memory.of("padmin/") for value in row.values())


def test_a_micro_batch_that_is_left_out_in_silence_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what is not finite is dropped before it counts, as if the row were not there."""
    plain, split = Skips(), Skips()
    fit(plain, poisoned(9, 1))
    stock = Scaled.loss
    monkeypatch.setattr(Scaled, "loss", lambda self, batch: stock(self, batch | {"scale": batch["scale"].nan_to_num()}))
    fit(split, poisoned(9, 1), padmin())
    assert plain.skipped == [1]
    assert apart(split.gradients, plain.gradients) == float("inf")


@pytest.mark.usefixtures("equal_weights")
def test_weights_of_one_over_k_are_far_off() -> None:
    """Negative control of the comparison where gradients are finite in part."""
    pair = support.fit_pair(Skips, poisoned(9, 1), {"check": "off"})
    assert 0.1 < apart(pair.split.gradients, pair.plain.gradients) < float("inf")


def test_logged_values_are_nan_where_those_of_stock_are() -> None:
    logged = []
    for extra in ([], [padmin()]):
        rows = support.fitted(Skips(), poisoned(3, 1), *extra).of("")
        logged.append([(step, sorted(row), row.get("loss_step", row.get("loss_epoch"))) for step, row in rows])
    for (step, names, found), (wanted_step, wanted_names, wanted) in zip(*logged[::-1], strict=True):
        assert (step, names) == (wanted_step, wanted_names)
        assert found == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    assert [loss != loss for _, _, loss in logged[0]] == [False, True, False, False, False, True]


def test_early_stopping_on_what_is_not_finite() -> None:
    """Its `check_finite` stops both runs at the same step."""
    stops = []
    for extra in ([], [padmin()]):
        stopping = EarlyStopping("loss_step", check_finite=True, check_on_train_epoch_end=False, patience=99)

        class EachBatch(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, stopping: Any = stopping) -> None:
                stopping._run_early_stopping_check(trainer)

        module = Scaled()
        trainer = fit(module, poisoned(3, 2), EachBatch(), stopping, *extra, max_epochs=4)
        stops.append((trainer.global_step, len(module.gradients), stopping.stopping_reason_message))
    assert stops[0] == stops[1]
    assert stops[0][0] == 3
    assert "not finite" in stops[0][2]


# Loaders and steps that raise


class Broken(Exception):
    pass


class Breaks(torch.utils.data.Dataset):
    """Ready-made batches, of which one cannot be had."""

    def __init__(self, at: int, count: int = 5) -> None:
        self.at, self.batches = at, ragged_batches(count)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise Broken("no such batch")
        return self.batches[index]


def broken_loader(at: int, workers: int = 0) -> Any:
    return torch.utils.data.DataLoader(Breaks(at), batch_size=None, num_workers=workers)


class Raises(Module):
    """A step raises: in its first micro-batch, or after three of five."""

    padmin_per_call = ("calls",)

    def __init__(self, at: int, after: int = 0) -> None:
        super().__init__()
        self.at, self.after, self.calls = at, after, 0
        self.is_broken = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        first = len(self.shapes) if self.after and len(batch["labels"]) < len(LENGTHS) else self.after
        if self.is_broken and batch_idx == self.at and first % 5 == self.after:
            raise Broken("no such step")
        return super().training_step(batch, batch_idx)


def fails_then_fits(
    make: Callable[[], Any], data: Any, callbacks: list[pl.Callback], same_trainer: bool, **options: Any
) -> Module:
    """A fit that raises, then another of the same module over sound batches; gradients of both."""
    module, trainer = make(), quiet_trainer(*callbacks, **options)
    stock = trainer.fit_loop.epoch_loop.automatic_optimization
    with pytest.raises(Broken):
        trainer.fit(module, data)
    assert trainer.fit_loop.epoch_loop.automatic_optimization is stock
    assert type(stock) is _AutomaticOptimization
    module.is_broken = False
    again = trainer if same_trainer else quiet_trainer(*callbacks, **options)
    again.should_stop = False
    again.fit(module, loader(ragged_batches(5)))
    assert type(again.fit_loop.epoch_loop.automatic_optimization) is _AutomaticOptimization
    return module


FAILURES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "loader, first batch": (Module, lambda: broken_loader(0)),
    "loader, in a window": (Module, lambda: broken_loader(3)),
    "step, first micro-batch": (lambda: Raises(3), lambda: loader(ragged_batches(5))),
    "step, fourth micro-batch": (lambda: Raises(3, after=3), lambda: loader(ragged_batches(5))),
}


@pytest.mark.parametrize("same_trainer", [False, True], ids=["another Trainer", "the same Trainer"])
@pytest.mark.parametrize("name", [*FAILURES, pytest.param("loader with a worker", marks=pytest.mark.slow)])
def test_after_a_failure_the_next_fit_is_that_of_stock(name: str, same_trainer: bool) -> None:
    """With two batches to a window, so that gradients of a part of one are left over."""
    # Slow, since torch waits for seconds until such a worker is gone, with the callback or without.
    make, data = FAILURES.get(name, (Module, lambda: broken_loader(3, workers=1)))
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    callback = padmin()
    plain = fails_then_fits(make, data(), [], same_trainer, **options)
    split = fails_then_fits(make, data(), [callback], same_trainer, **options)
    assert len(split.gradients) == len(plain.gradients) > 3
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) <= EXACT
    assert relative(flat_parameters(split), flat_parameters(plain)) <= EXACT
    assert callback.stats.micro_batches > callback.stats.batches


def test_gradients_that_are_left_over_would_show() -> None:
    """Negative control: the second fit begins with what the failed micro-batches have left behind.

    Lightning itself clears that before it trains, so it is put back here.
    """

    class Keeps(Raises):
        left: Any = None

        def on_fit_start(self) -> None:
            self.left = [None if p.grad is None else p.grad.clone() for p in self.parameters()]

        def optimizer_zero_grad(self, *arguments: Any) -> None:
            super().optimizer_zero_grad(*arguments)
            if not self.is_broken and self.left is not None:
                for p, grad in zip(self.parameters(), self.left, strict=True):
                    p.grad = grad
            self.left = None

    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    data = loader(ragged_batches(5))
    plain = fails_then_fits(lambda: Raises(3), data, [], False, **options)
    split = fails_then_fits(lambda: Keeps(3, after=3), data, [padmin()], False, **options)
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) > 1e-3


def test_a_failure_in_a_micro_batch_is_no_batch_that_was_counted_twice() -> None:
    """The counters hold the batch that failed, since it was planned, and go on."""
    callback, module = padmin(), Raises(1, after=2)
    with pytest.raises(Broken):
        fit(module, ragged_batches(3), callback)
    assert (callback.stats.batches, callback.stats.micro_batches) == (2, 10)
    assert len(module.shapes) == 5 + 2
    fit(Module(), ragged_batches(3), callback)
    assert callback.stats.batches == 5


# Other callbacks


class Other(_AutomaticOptimization):
    """Somebody else's loop."""


class Puts(pl.Callback):
    """Puts another loop in the place of whichever is there, and the former back at the end."""

    def __init__(self, hook: str) -> None:
        self.loop, self.former = None, None
        setattr(self, hook, self.put)

    def put(self, trainer: pl.Trainer, *_: Any) -> None:
        epoch_loop = trainer.fit_loop.epoch_loop
        self.former, self.loop = epoch_loop.automatic_optimization, Other(trainer)
        epoch_loop.automatic_optimization = self.loop

    def teardown(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        trainer.fit_loop.epoch_loop.automatic_optimization = self.former


def test_another_callback_that_has_replaced_the_loop_is_refused_by_name() -> None:
    with pytest.raises(MisconfigurationException, match="optimization loop is a Other"):
        fit(Module(), ragged_batches(2), Puts("on_fit_start"), padmin())
    module = Module()
    fit(module, ragged_batches(2), padmin())
    assert len(module.shapes) == 10


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_another_callback_that_replaces_our_loop_trains_as_it_would_without_us(hook: str) -> None:
    """Ours is out then; what remains is theirs, and is left to them at the end."""
    plain, split, other = Module(), Module(), Puts(hook)
    fit(plain, ragged_batches(3), Puts(hook))
    trainer = fit(split, ragged_batches(3), padmin(), other)
    assert split.shapes == plain.shapes
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) <= EXACT
    assert other.loop is not None
    assert trainer.fit_loop.epoch_loop.automatic_optimization is not other.loop


@pytest.mark.parametrize("failing", [False, True], ids=["the first ends", "the first fails"])
def test_one_callback_in_two_trainers_with_models_of_their_own(failing: bool) -> None:
    """The second model is checked anew, and trains as with a callback that has seen nothing before."""
    callback, first, second, plain = padmin(), Raises(1, after=2), Module(), Module()
    first.is_broken = failing
    try:
        fit(first, ragged_batches(2), callback)
    except Broken:
        assert failing
    with pytest.raises(GradientCheckError, match="set loss_reduction='row-mean'"):
        fit(Module("row-mean"), ragged_batches(2), callback)
    fit(second, ragged_batches(2), callback)
    fit(plain, ragged_batches(2))
    assert len(second.shapes) == 10
    assert relative(flat_parameters(second), flat_parameters(plain)) <= EXACT


# Two ranks


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["loader", "trainer_loader"])
def test_both_ranks_end_when_the_loader_of_one_raises(scenario: str, tmp_path: Path) -> None:
    """In the middle of an epoch; the other rank waits in its next exchange until the connection is gone."""
    (code_0, text_0), (code_1, text_1) = processes.finish(
        processes.start(WORKER, tmp_path / "result.out", scenario, fresh=True), timeout=55
    )
    assert code_0 != 0
    assert code_1 != 0
    assert "Broken: rank 1 has no such batch" in text_1
    assert "rank 1 has come through" not in text_1
    assert "Connection closed by peer" in text_0 or "PeerError" in text_0
