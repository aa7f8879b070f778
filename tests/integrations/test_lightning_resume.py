"""Training that is stopped and resumed in the middle of an epoch, with the callback on or off before and after."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support import Memory, Module, Row, make_batch, padmin, quiet_trainer, relative
from torch import Tensor

BATCHES, EPOCHS, STEPS = 7, 3, 21
STOPS = {"in the first epoch": 3, "before its last batch": 6, "in the second epoch": 11}
WAYS = {(before, after): f"{before} then {after}" for before in ("on", "off") for after in ("on", "off")}


class Shuffled:
    """Batches in an order of their own in each epoch, fixed by epoch; goes on where it was, as stateful loaders do."""

    def __init__(self) -> None:
        lengths = [[24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [8, 4, 4], [19, 19, 7, 5, 5, 3, 2]]
        self.batches = [make_batch(lengths[k % 3], seed=k) for k in range(BATCHES)]
        self.epoch, self.position, self.start = -1, 0, None

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self.start is None:
            self.epoch, self.position = self.epoch + 1, 0
        else:
            (self.epoch, self.position), self.start = self.start, None
        order = torch.randperm(BATCHES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.position < BATCHES:
            self.position += 1
            yield self.batches[order[self.position - 1]]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["epoch"], state["position"]


class Scheduled(Module):
    """AdamW with a warm-up, and one value of each kind that has an epoch mean."""

    def __init__(self) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02))
        self.rates: list[float] = []
        self.seen: list[int] = []

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + step) / 8 if step < 8 else 8 / step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.log("tokens", batch["attention_mask"].sum().double(), reduce_fx="sum", on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen.append(int(batch["input_ids"].sum()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.rates.append(optimizer.param_groups[0]["lr"])


@dataclass
class Run:
    module: Scheduled
    trainer: pl.Trainer
    callback: Any
    rows: list[tuple[int | None, Row]]

    @property
    def parameters(self) -> Tensor:
        return support.flat_parameters(self.module)

    @property
    def optimizer_state(self) -> Tensor:
        """Moments and step counts of all parameters, one after the other."""
        state = self.trainer.optimizers[0].state_dict()["state"]
        return torch.cat([value.double().flatten() for each in state.values() for value in each.values()])

    def epoch_means(self) -> list[tuple[int | None, Row]]:
        return [(step, row) for step, row in self.rows if "loss_epoch" in row]

    def counts(self, name: str) -> list[tuple[int | None, float]]:
        return [(step, row[f"padmin/{name}"]) for step, row in self.rows if f"padmin/{name}" in row]


def run(way: str, *callbacks: pl.Callback, checkpoint: Path | None = None, **options: Any) -> Run:
    """`way`: "on", "off" (a callback that is switched off), or "without" one."""
    module, memory = Scheduled(), Memory()
    added = None if way == "without" else padmin(enabled=way == "on")
    defaults: dict[str, Any] = {"max_epochs": EPOCHS, "logger": memory, "log_every_n_steps": 1}
    trainer = quiet_trainer(*callbacks, *filter(None, [added]), **(defaults | options))
    trainer.fit(module, Shuffled(), ckpt_path=checkpoint)
    return Run(module, trainer, added, memory.rows)


@pytest.fixture(scope="module")
def unbroken() -> Run:
    """Without the callback, and without an interruption."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        return run("without")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of `step=N.ckpt`, written by runs that were stopped after the last of STOPS."""
    folders = {way: tmp_path_factory.mktemp(way) for way in ("on", "off", "without")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        for way, folder in folders.items():
            saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
            run(way, saver, enable_checkpointing=True, max_steps=max(STOPS.values()) + 1)
    return folders


@pytest.fixture(scope="module")
def resumed(checkpoints: dict[str, Path]) -> Any:
    """The run that goes on after `stop` steps; each is made once."""
    done: dict[tuple[str, str, int], Run] = {}

    def get(before: str, after: str, stop: int) -> Run:
        key = before, after, stop
        if key not in done:
            done[key] = run(after, checkpoint=checkpoints[before] / f"step={stop}.ckpt")
        return done[key]

    return get


@pytest.fixture(params=STOPS.values(), ids=STOPS)
def stop(request: pytest.FixtureRequest) -> int:
    return request.param


ANY_WAY = pytest.mark.parametrize(("before", "after"), WAYS, ids=WAYS.values())


@ANY_WAY
def test_parameters_and_optimizer_states(before: str, after: str, stop: int, resumed: Any, unbroken: Run) -> None:
    found = resumed(before, after, stop)
    assert relative(found.parameters, unbroken.parameters) <= 1e-12
    assert found.optimizer_state.shape == unbroken.optimizer_state.shape
    assert relative(found.optimizer_state, unbroken.optimizer_state) <= 1e-12
    for ours, theirs in zip(found.module.gradients, unbroken.module.gradients[stop:], strict=True):
        assert relative(ours, theirs) <= 1e-12


@ANY_WAY
def test_steps_schedule_and_order(before: str, after: str, stop: int, resumed: Any, unbroken: Run) -> None:
    found = resumed(before, after, stop)
    assert found.trainer.global_step == unbroken.trainer.global_step == STEPS
    assert found.trainer.current_epoch == unbroken.trainer.current_epoch == EPOCHS
    assert found.module.rates == unbroken.module.rates[stop:]
    assert found.module.seen == unbroken.module.seen[stop:]
    ours, theirs = (each.trainer.lr_scheduler_configs[0].scheduler.state_dict() for each in (found, unbroken))
    assert {name: ours[name] for name in ("last_epoch", "_last_lr")} == {
        name: theirs[name] for name in ("last_epoch", "_last_lr")
    }


@ANY_WAY
def test_logged_values(before: str, after: str, stop: int, resumed: Any, unbroken: Run) -> None:
    """At steps and of whole epochs those of an unbroken run; of a broken epoch what Lightning itself makes of it."""
    found = resumed(before, after, stop)
    stock = resumed("without", "without", stop)
    for kind in ("loss_step", "loss_epoch", "tokens_epoch"):
        ours, theirs = ([(step, row[kind]) for step, row in each.rows if kind in row] for each in (found, stock))
        assert [step for step, _ in ours] == [step for step, _ in theirs]
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], rel=1e-12, abs=0)
    whole = EPOCHS - math.ceil(stop / BATCHES)
    assert whole >= 1
    for (step, ours), (expected, theirs) in zip(
        found.epoch_means()[-whole:], unbroken.epoch_means()[-whole:], strict=True
    ):
        assert step == expected
        assert ours == pytest.approx(theirs, rel=1e-12, abs=0)


def test_the_counters_go_on(stop: int, resumed: Any) -> None:
    """As if there had been no interruption; where the callback was off, only what it saw is counted."""
    whole = run("on").callback.stats
    assert whole.batches == STEPS
    assert resumed("on", "on", stop).callback.stats == whole
    late = resumed("off", "on", stop).callback.stats
    assert late.batches == STEPS - stop
    assert resumed("on", "off", stop).callback.state_dict() == {}


def test_metrics_go_on_at_the_same_steps(stop: int, resumed: Any) -> None:
    whole = run("on")
    for name in ("slots", "waste", "micro_batches"):
        assert resumed("on", "on", stop).counts(name) == whole.counts(name)[stop:]
    assert resumed("on", "off", stop).counts("slots") == []


@pytest.mark.parametrize(("before", "after"), [("on", "without"), ("without", "on")])
def test_a_checkpoint_needs_no_callback(before: str, after: str, stop: int, resumed: Any, unbroken: Run) -> None:
    found = resumed(before, after, stop)
    assert relative(found.parameters, unbroken.parameters) <= 1e-12
    assert relative(found.optimizer_state, unbroken.optimizer_state) <= 1e-12
    if after == "on":
        assert found.callback.stats.batches == STEPS - stop


def test_a_checkpoint_differs_by_the_counters_only(checkpoints: dict[str, Path], stop: int) -> None:
    on, off, without = (torch.load(folder / f"step={stop}.ckpt") for folder in checkpoints.values())
    assert set(on["callbacks"]) - set(without["callbacks"]) == {"PadMinCallback"}
    assert set(off["callbacks"]) == set(without["callbacks"])
    assert set(on) == set(off) == set(without)
    assert on["loops"] == off["loops"] == without["loops"]
    assert on["global_step"] == without["global_step"] == stop
    assert on["callbacks"]["PadMinCallback"]["stats"]["batches"] == stop


def test_weights_load_into_a_bare_module(checkpoints: dict[str, Path], unbroken: Run) -> None:
    module = Scheduled.load_from_checkpoint(checkpoints["on"] / "step=3.ckpt")
    stock = Scheduled.load_from_checkpoint(checkpoints["without"] / "step=3.ckpt")
    assert relative(support.flat_parameters(module), support.flat_parameters(stock)) <= 1e-12
    assert relative(support.flat_parameters(module), unbroken.parameters) > 1e-2


@pytest.mark.parametrize("lost", ["optimizer_states", "lr_schedulers", "order"])
def test_what_is_lost_would_show(lost: str, checkpoints: dict[str, Path], tmp_path: Path, unbroken: Run) -> None:
    """Negative controls: a checkpoint that is resumed from without one of its parts."""
    state, other = (torch.load(checkpoints["on"] / f"step={step}.ckpt") for step in (3, 1))
    if lost == "order":
        state["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["epoch"] = 5
    else:
        state[lost] = other[lost]
    torch.save(state, tmp_path / "changed.ckpt")
    found = run("on", checkpoint=tmp_path / "changed.ckpt")
    assert relative(found.parameters, unbroken.parameters) > 1e-4
