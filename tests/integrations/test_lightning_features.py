"""Beside other features of Lightning: each of these fits is equal to the same fit without the callback."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import (
    LENGTHS,
    Memory,
    Module,
    fit,
    fit_pair,
    loader,
    make_batch,
    padmin,
    quiet_trainer,
    ragged_batches,
    relative,
)

EXACT = 1e-12
NO_OUTPUT: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
)


class StopsItself(pl.Callback):
    """After the third batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        trainer.should_stop = trainer.fit_loop.batch_idx == 2


class Finetuning(pl.callbacks.BaseFinetuning):
    """The embedding joins in the second epoch."""

    def freeze_before_training(self, module: pl.LightningModule) -> None:
        self.freeze(module.model.embedding)

    def finetune_function(self, module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.model.embedding, optimizer, lr=0.5)


FEATURES: dict[str, tuple[Callable[[], Sequence[pl.Callback]], dict[str, Any]]] = {
    "accumulation schedule": (lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})], {"max_epochs": 3}),
    "weight averaging": (lambda: [StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)], {"max_epochs": 3}),
    "finetuning": (lambda: [Finetuning()], {"max_epochs": 2}),
    "early stopping": (lambda: [EarlyStopping("loss_epoch", patience=1, min_delta=10.0)], {"max_epochs": 9}),
    "should_stop": (lambda: [StopsItself()], {"max_epochs": 9}),
    "barebones": (tuple, {"barebones": True} | NO_OUTPUT),
    "fast_dev_run": (tuple, {"fast_dev_run": 3}),
    "max_steps within a window": (tuple, {"max_epochs": -1, "max_steps": 3, "accumulate_grad_batches": 2}),
    "max_time": (tuple, {"max_time": "00:00:10:00"}),
    "limit_train_batches": (tuple, {"limit_train_batches": 2, "accumulate_grad_batches": 3, "max_epochs": 2}),
    "overfit_batches": (tuple, {"overfit_batches": 2, "max_epochs": 2}),
    "reloaded loaders": (tuple, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}),
    "simple profiler": (tuple, {"profiler": "simple"}),
    "detect_anomaly": (tuple, {"detect_anomaly": True}),
    "deterministic": (tuple, {"deterministic": True}),
    "inference_mode off": (tuple, {"inference_mode": False}),
}


@pytest.mark.filterwarnings("ignore:`use_deterministic_algorithms")
@pytest.mark.parametrize("name", FEATURES)
def test_equal(name: str) -> None:
    callbacks, options = FEATURES[name]
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        pair = fit_pair(Module, ragged_batches(5), callbacks=callbacks, **options)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert pair.gradient <= EXACT
    assert pair.parameters <= EXACT
    assert pair.split_trainer.global_step == pair.plain_trainer.global_step
    assert pair.split_trainer.current_epoch == pair.plain_trainer.current_epoch
    assert pair.split.zero_grads == pair.plain.zero_grads


@pytest.mark.usefixtures("equal_weights")
def test_weights_of_one_over_k_are_far_off() -> None:
    """Negative control of the test above."""
    assert fit_pair(Module, ragged_batches(5), callbacks=FEATURES["weight averaging"][0], max_epochs=3).gradient > 0.1


def test_exponential_averages() -> None:
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    results = []
    for extra in ([padmin()], []):
        callback, module = averaging.EMAWeightAveraging(decay=0.5), Module()
        fit(module, ragged_batches(4), callback, *extra, max_epochs=2)
        results.append((support.flat_parameters(module), module.gradients))
    assert relative(results[0][0], results[1][0]) <= EXACT
    assert max(relative(a, b) for a, b in zip(results[0][1], results[1][1], strict=True)) <= EXACT


def test_barebones_and_the_others_do_what_they_say() -> None:
    """That the features of the table were on."""
    stopped = fit_pair(Module, ragged_batches(5), callbacks=FEATURES["should_stop"][0], max_epochs=9)
    assert len(stopped.split.gradients) == 3
    early = fit_pair(Module, ragged_batches(2), callbacks=FEATURES["early stopping"][0], max_epochs=9)
    assert early.split_trainer.current_epoch == 2
    limited = fit_pair(Module, ragged_batches(5), **FEATURES["limit_train_batches"][1])
    assert len(limited.split.gradients) == 2


class Quiet(Module):
    """Without calls of self.log, which a compiled training_step does not survive in every version."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_modules(dynamic: bool) -> None:
    def compiled() -> Any:
        torch._dynamo.reset()
        return torch.compile(Quiet(), backend="eager", dynamic=dynamic)

    split, plain, callback = compiled(), compiled(), padmin()
    fit(plain, ragged_batches(2))
    fit(split, ragged_batches(2), callback)
    assert callback.stats.micro_batches == 10
    gradients = zip(split._orig_mod.gradients, plain._orig_mod.gradients, strict=True)
    assert max(relative(a, b) for a, b in gradients) <= EXACT


def test_a_compiled_model_inside() -> None:
    class Compiled(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model.forward = torch.compile(self.model.forward, backend="eager", dynamic=True)

    assert fit_pair(Compiled, ragged_batches(2)).gradient <= EXACT


class IgnoresClosure(torch.optim.SGD):
    """Steps with whatever gradients there are."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.parametrize("how", ["optimizer", "hook"])
def test_a_closure_that_is_never_called_fails_as_in_stock(how: str) -> None:
    class Never(Module):
        def optimizer_step(self, *arguments: Any, **options: Any) -> None:
            if how == "optimizer":
                super().optimizer_step(*arguments, **options)

    for callbacks in ([], [padmin()]):
        module = Never(optimizer=lambda parameters: IgnoresClosure(parameters, lr=0.1))
        with pytest.raises(MisconfigurationException, match="The closure hasn't been executed"):
            fit(module, ragged_batches(1), *callbacks)


def test_an_optimizer_that_steps_less_often() -> None:
    """The hook calls the closure itself and steps every second batch."""

    class EverySecond(Module):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 2:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            else:
                optimizer_closure()

    pair = fit_pair(EverySecond, ragged_batches(5))
    assert pair.gradient <= EXACT
    assert len(pair.split.gradients) == 2


def test_own_backward_and_clipping() -> None:
    class Own(Module):
        def backward(self, loss: torch.Tensor) -> None:
            loss.backward(retain_graph=False)

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, 0.01, "norm")

    pair = fit_pair(Own, ragged_batches(3))
    assert pair.gradient <= EXACT
    assert pair.parameters <= EXACT


def test_training_mode_and_transfer_hooks() -> None:
    """Batches that a hook makes; the callback sees what training_step would."""

    class Transfers(Module):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {key: value[:6] for key, value in batch.items()}

    pair = fit_pair(Transfers, ragged_batches(3))
    assert pair.plain.shapes == [(6, 24)] * 3
    assert pair.gradient <= EXACT


def test_endless_loaders() -> None:
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            seed = 0
            while True:
                yield make_batch(LENGTHS, seed=seed)
                seed += 1

    modules = []
    for callbacks in ([padmin()], []):
        module = Module()
        trainer = quiet_trainer(*callbacks, max_epochs=-1, max_steps=5)
        trainer.fit(module, torch.utils.data.DataLoader(Endless(), batch_size=None))
        modules.append(module)
    assert max(relative(a, b) for a, b in zip(modules[0].gradients, modules[1].gradients, strict=True)) <= EXACT


def test_collated_batches_and_workers() -> None:
    """A loader that collates rows itself, in other processes."""
    rows = [{key: value[0] for key, value in make_batch([length], width=24).items()} for length in LENGTHS * 2]
    modules = []
    for callbacks in ([padmin()], []):
        module = Module()
        data = torch.utils.data.DataLoader(support.Batches(rows), batch_size=10, num_workers=1)
        quiet_trainer(*callbacks).fit(module, data)
        modules.append(module)
    split, plain = modules
    assert (len(split.shapes), len(plain.shapes)) == (10, 2)
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) <= EXACT


def test_a_data_module() -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(ragged_batches(2))

    module = Module()
    quiet_trainer(padmin()).fit(module, datamodule=Data())
    assert len(module.shapes) == 10


def test_the_learning_rate_finder(tmp_path: Path) -> None:
    """It trains inside of its on_fit_start, before ours, and puts everything back."""
    results = []
    for extra in ([padmin()], []):
        module, memory = Module(), Memory()
        module.lr = 0.5
        finder = LearningRateFinder(num_training_steps=20, min_lr=1e-3, update_attr=False)
        trainer = quiet_trainer(*extra, finder, default_root_dir=tmp_path, logger=memory, log_every_n_steps=1)
        stock = trainer.fit_loop.epoch_loop.automatic_optimization
        trainer.fit(module, loader(ragged_batches(25)))
        assert trainer.fit_loop.epoch_loop.automatic_optimization is stock
        results.append((finder.optimal_lr.results["loss"], module.gradients))
        for callback in extra:  # what the finder ran does not count
            rows = [row["padmin/real_tokens"] for _, row in memory.of("padmin/")]
            assert rows == [97.0] * callback.stats.batches
            assert 0 < len(rows) <= 25
    (split_losses, split), (plain_losses, plain) = results
    assert split_losses == pytest.approx(plain_losses, rel=1e-9)
    assert max(relative(a, b) for a, b in zip(split, plain, strict=True)) <= EXACT


class Sized(pl.LightningDataModule):
    """Rows, and a batch size that the finder may change."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        rows = [{key: value[0] for key, value in make_batch([length], width=24).items()} for length in LENGTHS * 4]
        return torch.utils.data.DataLoader(support.Batches(rows), batch_size=self.batch_size)


@pytest.mark.slow
def test_the_batch_size_finder(tmp_path: Path) -> None:
    sizes = []
    for extra in ([padmin()], []):
        data, finder = Sized(), BatchSizeFinder(max_trials=2, steps_per_trial=2)
        trainer = quiet_trainer(*extra, finder, default_root_dir=tmp_path)
        stock = trainer.fit_loop.epoch_loop.automatic_optimization
        trainer.fit(Module(), datamodule=data)
        assert trainer.fit_loop.epoch_loop.automatic_optimization is stock
        assert all(callback.stats.rows == 40 for callback in extra)
        sizes.append(data.batch_size)
    assert sizes[0] == sizes[1] > 2


def test_monitors() -> None:
    rows = []
    for extra in ([padmin()], []):
        memory = Memory()
        throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch["labels"]), window_size=3)
        fit(
            Module(),
            ragged_batches(4),
            LearningRateMonitor(),
            throughput,
            *extra,
            logger=memory,
            log_every_n_steps=1,
        )
        rows.append([(step, sorted(row)) for step, row in memory.of("")])
    assert rows[0] == rows[1]
    assert any("lr-SGD" in names for _, names in rows[0])


def test_no_warning_of_our_own_in_an_ordinary_fit() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(padmin()).fit(Module(), loader(ragged_batches(2)))
    assert [str(each.message) for each in caught if "padmin" in each.filename] == []
