"""Switched off, checkpoints and resuming, several fits, validation and friends, copies of the callback."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import LENGTHS, Module, fit, loader, make_batch, padmin, quiet_trainer, ragged_batches, relative

from lightning_padmin import PaddingStats, PadMinCallback, PadMinConfig

# Switched off


class Loops(Module):
    """Which loop object runs each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.loops.append(self.trainer.fit_loop.epoch_loop.automatic_optimization)


@pytest.mark.parametrize("options", [{"enabled": False}, {"config": PadMinConfig(enabled=False, token_budget=24)}])
def test_switched_off_leaves_no_trace(options: dict[str, Any], tmp_path: Path) -> None:
    callback, module, plain = PadMinCallback(**options), Loops(), Loops()
    trainer = quiet_trainer(callback, ModelCheckpoint(tmp_path, save_last=True), enable_checkpointing=True)
    stock = trainer.fit_loop.epoch_loop.automatic_optimization
    trainer.fit(module, loader(ragged_batches(3)))
    fit(plain, ragged_batches(3))
    assert all(loop is stock for loop in module.loops)
    assert module.shapes == plain.shapes
    assert callback.state_dict() == {}
    assert callback.stats == PaddingStats()
    assert not any(name.startswith("padmin/") for name in trainer.callback_metrics)
    assert torch.equal(support.flat_parameters(module), support.flat_parameters(plain))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert not any("PadMin" in key for key in saved["callbacks"])


def test_switched_on_leaves_a_trace() -> None:
    """The control of the test above."""
    callback, module = padmin(), Loops()
    trainer = quiet_trainer(callback)
    stock = trainer.fit_loop.epoch_loop.automatic_optimization
    trainer.fit(module, loader(ragged_batches(3)))
    assert not any(loop is stock for loop in module.loops)
    assert all(isinstance(loop, _AutomaticOptimization) for loop in module.loops)
    assert all(vars(loop) is vars(stock) for loop in module.loops), "progress would be lost"
    assert trainer.fit_loop.epoch_loop.automatic_optimization is stock
    assert callback.state_dict()["stats"]["micro_batches"] == 15
    assert "padmin/waste" in trainer.callback_metrics


def test_switched_off_refuses_nothing() -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.shapes.append(tuple(batch["labels"].shape))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            pass

    module = Manual()
    fit(module, ragged_batches(2), PadMinCallback(enabled=False))
    assert module.shapes == [(10, 24)] * 2


# Checkpoints


class Resumable:
    """A loader that goes on where it was, as stateful loaders do."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.position, self.start = batches, 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.position, self.start = self.start, 0
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


OPTIONS: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2}


def trained(callbacks: list[pl.Callback], checkpoint: Path | None = None, **options: Any) -> tuple[Module, pl.Trainer]:
    module = Module(optimizer=adamw)
    trainer = quiet_trainer(*callbacks, **(OPTIONS | options))
    trainer.fit(module, Resumable(ragged_batches(7)), ckpt_path=checkpoint)
    return module, trainer


@pytest.fixture(scope="module")
def unbroken() -> Module:
    """Without the callback and without an interruption."""
    return trained([])[0]


@pytest.mark.parametrize("stop", [2, 5], ids=["in the first epoch", "in the second epoch"])
@pytest.mark.parametrize("before", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("after", [True, False], ids=["then on", "then off"])
def test_resume_in_the_middle_of_an_epoch(
    before: bool, after: bool, stop: int, tmp_path: Path, unbroken: Module
) -> None:
    """Saved after optimizer step 2 or 5 of 8."""
    first = padmin(enabled=before)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trained([first, saver], enable_checkpointing=True, max_steps=stop + 1)
    second = padmin(enabled=after)
    module, trainer = trained([second], tmp_path / f"step={stop}.ckpt")
    assert trainer.global_step == 8
    assert relative(support.flat_parameters(module), support.flat_parameters(unbroken)) <= 1e-12
    # Gradients of the remaining steps, too: the parameters could agree though counters and windows did not.
    assert len(module.gradients) == 8 - stop
    for ours, theirs in zip(module.gradients, unbroken.gradients[stop:], strict=True):
        assert relative(ours, theirs) <= 1e-12
    batches = {2: 4, 5: 9}[stop]
    if before and after:
        assert second.stats.batches == 14
        assert second.stats.micro_batches == 70
    elif after:
        assert second.stats.batches == 14 - batches


def test_resuming_elsewhere_would_show(tmp_path: Path, unbroken: Module) -> None:
    """Negative control: resumed from another step, the end is another."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trained([padmin(), saver], enable_checkpointing=True, max_steps=3)
    state = torch.load(tmp_path / "step=2.ckpt", weights_only=False)
    state["state_dict"] = torch.load(tmp_path / "step=1.ckpt", weights_only=False)["state_dict"]
    torch.save(state, tmp_path / "mixed.ckpt")
    module, _ = trained([padmin()], tmp_path / "mixed.ckpt")
    assert relative(support.flat_parameters(module), support.flat_parameters(unbroken)) > 1e-3


def test_counters_are_plain_numbers_in_the_checkpoint(tmp_path: Path) -> None:
    """So that it loads with weights_only=True."""
    callback = padmin()
    trained([callback, ModelCheckpoint(tmp_path, save_last=True)], enable_checkpointing=True, max_steps=3)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert state["callbacks"]["PadMinCallback"]["stats"] == callback.state_dict()["stats"]
    assert callback.state_dict()["stats"]["batches"] == 6


# Several fits, and the other entry points


def test_one_callback_for_two_fits() -> None:
    callback, together = padmin(), Module()
    for _ in range(2):
        fit(together, ragged_batches(2), callback)
    plain = Module()
    for _ in range(2):
        fit(plain, ragged_batches(2))
    assert relative(support.flat_parameters(together), support.flat_parameters(plain)) <= 1e-12
    assert callback.stats.batches == 4


def test_one_trainer_for_two_fits() -> None:
    modules = []
    for callbacks in ([padmin()], []):
        trainer, module = quiet_trainer(*callbacks), Module()
        trainer.fit(module, loader(ragged_batches(2)))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader(ragged_batches(3)))
        modules.append(module)
    split, plain = modules
    assert len(split.gradients) == len(plain.gradients) == 8
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) <= 1e-12


def test_a_callback_that_the_module_brings_along() -> None:
    class Brings(Module):
        def configure_callbacks(self) -> Any:
            return [padmin()]

    module = Brings()
    trainer = fit(module, ragged_batches(1))
    assert len(module.shapes) == 5
    assert type(trainer.fit_loop.epoch_loop.automatic_optimization) is _AutomaticOptimization


class Evaluated(Module):
    def __init__(self) -> None:
        super().__init__()
        self.evaluated: list[tuple[str, tuple[int, ...]]] = []

    def _evaluate(self, what: str, batch: Any) -> torch.Tensor:
        self.evaluated.append((what, tuple(batch["labels"].shape)))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation_loss", self._evaluate("validate", batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._evaluate("test", batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._evaluate("predict", batch)


def test_validate_test_and_predict_are_not_touched() -> None:
    data, callback = loader([make_batch(LENGTHS, width=30)]), padmin()
    results = []
    for callbacks in ([callback], []):
        module, trainer = Evaluated(), quiet_trainer(*callbacks)
        stock = trainer.fit_loop.epoch_loop.automatic_optimization
        validated = trainer.validate(module, data, verbose=False)
        tested = trainer.test(module, data, verbose=False)
        results.append((validated, tested, trainer.predict(module, data)))
        assert module.evaluated == [("validate", (10, 30)), ("test", (10, 30)), ("predict", (10, 30))]
        assert trainer.fit_loop.epoch_loop.automatic_optimization is stock
    assert results[0] == results[1]
    assert callback.stats == PaddingStats()


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"num_sanity_val_steps": 0}])
def test_validation_inside_of_fit_is_not_touched(options: dict[str, Any]) -> None:
    modules, values = [], []
    for callbacks in ([padmin()], []):
        module, trainer = Evaluated(), quiet_trainer(*callbacks, max_epochs=2, **options)
        trainer.fit(module, loader(ragged_batches(4)), loader([make_batch(LENGTHS, width=30)] * 2))
        modules.append(module)
        values.append(float(trainer.callback_metrics["validation_loss"]))
    split, plain = modules
    assert split.evaluated == plain.evaluated
    assert set(split.evaluated) == {("validate", (10, 30))}
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    assert relative(support.flat_parameters(split), support.flat_parameters(plain)) <= 1e-12
    assert len(split.shapes) == 5 * len(plain.shapes)


# Copies


def weights(batch: Any) -> torch.Tensor:
    return batch["attention_mask"].sum(1)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_copies(duplicate: Any) -> None:
    original = padmin(loss_reduction=weights, log_reduce={"rows": "sum"}, batch_schema={"images": "row"})
    fresh = duplicate(original)
    assert fresh.config == original.config
    assert fresh.stats == PaddingStats()
    used = padmin()
    fit(Module(), ragged_batches(1), used)
    second = duplicate(used)
    assert second.stats == used.stats
    module = Module()
    fit(module, ragged_batches(1), second)
    assert len(module.shapes) == 5
    assert second.stats.batches == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_copy_made_during_a_fit_is_no_part_of_it(duplicate: Any) -> None:
    copies: list[PadMinCallback] = []

    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
            copies.append(duplicate(trainer.callbacks[1]))
            copies[-1].teardown(trainer, arguments[0], "fit")

    callback, module = padmin(), Module()
    fit(module, ragged_batches(2), Copies(), callback)
    assert len(module.shapes) == 10, "the copy took the loop out"
    assert [each.stats.batches for each in copies] == [1, 2]
    assert callback.stats.batches == 2


def test_a_fit_inside_of_a_fit_needs_a_callback_of_its_own() -> None:
    """The outer fit goes on split."""
    callback, refused = support.padmin(), []

    class Outer(support.Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            if not refused:
                with pytest.raises(MisconfigurationException, match="in the middle of another Trainer's fit") as error:
                    support.fit(support.Module(), support.ragged_batches(1), callback)
                refused.append(error)

    module, alone = Outer(), support.Module()
    support.fit(module, support.ragged_batches(3), callback)
    support.fit(alone, support.ragged_batches(3))
    assert refused
    assert module.shapes[-1][0] < 10, "the outer fit is no longer split"
    assert max(support.relative(a, b) for a, b in zip(module.gradients, alone.gradients, strict=True)) <= 1e-12
