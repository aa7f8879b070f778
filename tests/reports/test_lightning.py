"""Kinds of faults in training loops: what a callback cannot change, and what happens once per batch or window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support import Module, fit, fit_pair, flat_parameters, make_batch, padmin, ragged_batches, relative
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.config import environment
from lightning_padmin.integrations.accelerate import PadMin


class Decays(Module):
    """The rate falls from 1.0 by 0.1 with each step of the schedule."""

    def __init__(self) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        self.used = self.optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(self.used, lambda step: 1 - step / 10)
        return {"optimizer": self.used, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.rates.append(self.used.param_groups[0]["lr"])


@pytest.mark.parametrize(("count", "accumulate", "right"), [(1, 1, 0.9), (3, 1, 0.7), (4, 2, 0.8)])
def test_r43_the_schedule_advances_once_per_batch(count: int, accumulate: int, right: float) -> None:
    pair = fit_pair(Decays, ragged_batches(count), accumulate_grad_batches=accumulate)
    assert pair.split.rates[-1] == pytest.approx(right) == pair.plain.rates[-1]
    assert pair.split.rates == pair.plain.rates
    assert pair.split_trainer.global_step == pair.plain_trainer.global_step == count // accumulate
    passes = len(pair.split.shapes)
    assert passes >= 5 * count
    assert 1 - passes / 10 < right, "the fault: once per micro-batch"


def test_r43_max_steps_and_logging_steps_count_batches() -> None:
    module = Decays()
    memory = support.Memory()
    trainer = fit(module, ragged_batches(6), padmin(), max_steps=4, logger=memory, log_every_n_steps=2)
    assert trainer.global_step == 4 == len(module.gradients)
    assert [step for step, row in memory.of("") if "loss_step" in row] == [1, 3]
    assert len(module.shapes) >= 20, "the fault: so many steps, one per micro-batch"


@pytest.mark.parametrize(("batches", "accumulate", "last"), [(5, 4, 10), (5, 4, 4), (2, 4, 10), (7, 3, 2)])
def test_r45_the_last_window_is_what_it_is_without_the_callback(batches: int, accumulate: int, last: int) -> None:
    """Lightning divides a short window by a full one; the callback leaves that to Lightning."""
    data = [*ragged_batches(batches - 1), make_batch(support.LENGTHS[-last:], seed=9)]
    pair = fit_pair(Module, data, accumulate_grad_batches=accumulate)
    assert len(pair.split.gradients) == -(-batches // accumulate)
    assert pair.gradient <= 1e-12
    assert pair.parameters <= 1e-12
    assert batches % accumulate / accumulate < 1, "the fault: a window of that share of its gradient"


@dataclass
class Both:
    """A batch as a dataclass."""

    input_ids: Tensor
    attention_mask: Tensor


FORMS = {
    "dict": (lambda ids, mask: {"input_ids": ids, "attention_mask": mask}, lambda batch: batch["input_ids"], {}),
    "tuple": (
        lambda ids, mask: (ids, mask),
        lambda batch: batch[0],
        {"mask_key": "1", "batch_schema": {"0": "position"}},
    ),
    "dataclass": (Both, lambda batch: batch.input_ids, {}),
}


class Replaces(Callback):
    """The fault: another batch under the same name, which nobody sees."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch = None  # noqa: F841


@pytest.mark.parametrize(
    ("lengths", "width", "right"), [([9, 4, 9, 2], 16, (4, 9)), ([3, 1], 5, (2, 3)), ([6], 8, (1, 6))]
)
@pytest.mark.parametrize("form", FORMS)
def test_r46_training_step_gets_the_trimmed_batch(form: str, lengths: Any, width: int, right: Any) -> None:
    make, ids_of, options = FORMS[form]
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])

    class Sees(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.shapes.append(tuple(ids_of(batch).shape))
            kinds.append(type(batch))
            return self.model(ids_of(batch)).mean((1, 2)).mean()

    batch, seen, kinds = make(mask * 7, mask), [], []
    for callback in (
        padmin(token_budget=64, launch_cost=500, check="off", loss_reduction="row-mean", **options),
        Replaces(),
    ):
        module = Sees()
        fit(module, [batch], callback)
        seen += module.shapes
    assert seen == [right, (len(lengths), width)]
    assert kinds[0] is kinds[1]
    assert ids_of(batch).shape == (len(lengths), width), "the caller's batch is not changed"


class Stateful:
    """A loader that goes on where it was, as loaders do that keep a state."""

    def __init__(self) -> None:
        self.batches, self.position, self.resumed = ragged_batches(6), 0, False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.position, self.resumed = self.position if self.resumed else 0, False
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.resumed = state["position"], True


class Notes(Module):
    """Which batch was trained at which step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int, int]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.steps.append((self.global_step, batch_idx, int(batch["input_ids"].sum())))


def saved_at(step: int, folder: Path, *callbacks: Any) -> tuple[Notes, Path]:
    """A run of six batches that keeps a checkpoint from the end of a batch."""
    saving, module = ModelCheckpoint(folder, every_n_train_steps=step, save_top_k=-1, filename="{step}"), Notes()
    support.quiet_trainer(*callbacks, saving, enable_checkpointing=True).fit(module, Stateful())
    return module, folder / f"step={step}.ckpt"


def resumed(checkpoint: Path, *callbacks: Any) -> Notes:
    module = Notes()
    support.quiet_trainer(*callbacks).fit(module, Stateful(), ckpt_path=checkpoint, weights_only=False)
    return module


@pytest.mark.parametrize("step", [1, 3, 4])
def test_r65_a_checkpoint_at_the_end_of_a_batch_resumes_with_the_next(tmp_path: Path, step: int) -> None:
    counts = padmin(), padmin()
    plain, plain_file = saved_at(step, tmp_path / "plain")
    split, split_file = saved_at(step, tmp_path / "split", counts[0])
    plain_again, split_again = resumed(plain_file), resumed(split_file, counts[1])
    assert plain.steps == split.steps
    assert split_again.steps == split.steps[step:] == plain_again.steps
    assert relative(flat_parameters(split_again), flat_parameters(plain)) <= 1e-12
    assert counts[1].stats == counts[0].stats
    assert counts[1].stats.batches == 6
    repeated = [
        (at, batch_idx, ids) for at, (_, batch_idx, ids) in zip(range(step, 8), split.steps[step - 1 :], strict=False)
    ]
    assert repeated[0] != split_again.steps[0], "the fault: the last batch once more"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = support.TinyLM()

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return support.reduce_loss(support.token_losses(self.inner(input_ids), labels), labels, "token-mean")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(environment, "_said", set())
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield lambda **options: Accelerator(cpu=True, **options)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def loop(accelerator: Accelerator, config: PadMinConfig | None, batches: list[Any], fault: bool = False) -> Any:
    """The documented loop; with `fault` the schedule is stepped inside of the micro-batches."""
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, support.loader(batches))
    pad, rates, gradients = PadMin(accelerator, config or PadMinConfig(enabled=False)), [], []
    for batch in loader:
        with accelerator.accumulate(model):
            for micro, weight in pad.micro_batches(batch, model):
                accelerator.backward(model(**micro) * weight)
                if fault:
                    schedule.step()
            if accelerator.sync_gradients:
                gradients.append(support.flat_gradient(model))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    return rates, gradients


SPLIT = PadMinConfig(token_budget=support.BUDGET, launch_cost=4)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.parametrize(("count", "accumulate", "right"), [(1, 1, 0.99), (3, 1, 0.97), (4, 2, 0.98)])
def test_r43_the_schedule_of_an_accelerate_loop_advances_once_per_window(
    accelerator: Any, count: int, accumulate: int, right: float
) -> None:
    batches = ragged_batches(count)
    wanted = loop(accelerator(gradient_accumulation_steps=accumulate), None, batches)
    found = loop(accelerator(gradient_accumulation_steps=accumulate), SPLIT, batches)
    assert found[0] == wanted[0]
    assert found[0][-1] == pytest.approx(right)
    assert max(relative(a, b) for a, b in zip(found[1], wanted[1], strict=True)) <= 1e-12
    wrong = loop(accelerator(gradient_accumulation_steps=accumulate), SPLIT, batches, fault=True)
    assert wrong[0][-1] < right


@pytest.mark.parametrize("extra", [{"task": "qa"}, {"flag": True, "n": torch.tensor(2)}, {"extra": None}])
def test_r34_other_entries_come_through_an_accelerate_loop(accelerator: Any, extra: dict[str, Any]) -> None:
    batches = [batch | extra for batch in ragged_batches(2)]
    found, wanted = loop(accelerator(), SPLIT, batches), loop(accelerator(), None, batches)
    assert max(relative(a, b) for a, b in zip(found[1], wanted[1], strict=True)) <= 1e-12
    for value in extra.values():
        if value is not None:
            assert isinstance(value, str) or not hasattr(value, "__len__") or value.ndim == 0, "no row to be taken"


@pytest.mark.parametrize(("count", "accumulate"), [(5, 4), (2, 4), (7, 3)])
def test_r45_the_last_window_of_an_accelerate_loop(accelerator: Any, count: int, accumulate: int) -> None:
    batches = [*ragged_batches(count - 1), make_batch([9, 4, 4])]
    wanted = loop(accelerator(gradient_accumulation_steps=accumulate), None, batches)
    found = loop(accelerator(gradient_accumulation_steps=accumulate), SPLIT, batches)
    assert len(found[1]) == len(wanted[1]) == -(-count // accumulate)
    assert max(relative(a, b) for a, b in zip(found[1], wanted[1], strict=True)) <= 1e-12
    assert relative(found[1][-1] * accumulate / (count % accumulate), wanted[1][-1]) > 0.2, "another division"
