"""A check leaves no trace: modules, hooks, attributes, figures of trainers, gradients and random state."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import offline_cases
import pytest
import support
import torch
import torchmetrics
import trl_cases
from architectures.cases import Case
from architectures.zoo import BY_NAME, quiet
from offline_cases import BUDGET, build
from torch import Tensor, nn
from traces import changed, seen_of
from transformers import TrainerCallback
from trl_cases import qwen2

from lightning_padmin.integrations.common import WholeSteps, trainers, training
from lightning_padmin.integrations.trl import online as trl_engine
from lightning_padmin.microbatching.batcher import MicroBatcher
from lightning_padmin.runtime.keeper import Keeper
from lightning_padmin.verification.gradient_check import check_gradients

QUICK = ("Qwen2", "Mixtral", "Qwen3-Next", "T5")
OTHERS = """Llama, Gemma3, GPT-2, OPT, Bloom, Falcon, gpt-oss, Llama4, JetMoe, Mamba2, RWKV, xLSTM, Zamba2, Jamba,
RecurrentGemma, LFM2, ModernBert, DeBERTa-v2, Electra, BART, Switch""".replace("\n", " ").split(", ")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_architectures_are_as_they_were(name: str) -> None:
    with quiet():
        case = Case(BY_NAME[name])
    model, config = case.model, case.config()
    model.requires_grad_(False)
    for p in list(model.parameters())[1::2]:
        p.requires_grad_()
    schema, table = MicroBatcher(config, encoder_decoder=case.seq2seq).read_together(case.batch("right"))
    states: list[int] = []

    def loss(batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        output = model(**inputs, **case.architecture.forward, output_hidden_states=True)
        states.append(
            len(getattr(output, "hidden_states", None) or getattr(output, "decoder_hidden_states", None) or ())
        )
        return case.token_mean(output.logits, batch["labels"])

    before = seen_of(model)
    check_gradients(loss, case.batch("right"), schema, table, config, model)
    assert changed(before, seen_of(model)) == []
    assert len(states) >= 3
    loss(case.batch("right"))
    assert len(set(states)) == 1
    # Negative control: without a check the same call does leave something behind, hooks at least.
    if any("_output_capturing_hooks_installed" in vars(child) for child in model.modules()):
        assert any("hooks" in place for place in changed(before, seen_of(model)))


class Meter:
    """As most people have one."""

    def __init__(self) -> None:
        self.total, self.count, self.history = 0.0, 0, [0.0]

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1
        self.history.append(value)


@dataclasses.dataclass
class Sums:
    tokens: int = 0
    rows: list[int] = dataclasses.field(default_factory=list)


class Slotted:
    __slots__ = ("calls", "seen")

    def __init__(self) -> None:
        self.calls, self.seen = 0, {0}


class Own(dict):
    """A container of the user's, with figures of its own."""

    def __init__(self) -> None:
        super().__init__(calls=0)
        self.meter = Meter()


class Keeps:
    """Figures of every kind, in whatever class it is mixed into, one of each call."""

    padmin_per_call = ("figures", "meter", "sums", "slotted", "own", "recent", "array", "names", "running", "pair")
    padmin_per_call += ("space",)

    def start(self) -> None:
        self.figures: dict[str, Any] = {"loss": {"all": [], "last": None}, "calls": 0}
        self.meter, self.sums, self.slotted, self.own = Meter(), Sums(), Slotted(), Own()
        self.recent: deque[float] = deque(maxlen=3)
        self.array, self.names, self.running = np.zeros(2), Counter(), torch.zeros(3)
        vars(self)["mean"] = torchmetrics.MeanMetric()  # not registered, as in a Trainer
        self.pair = (Meter(), [0])
        self.space = SimpleNamespace(calls=0, losses=[])

    def count(self, loss: float, rows: int) -> None:
        self.figures["loss"]["all"].append(loss)
        self.figures["loss"]["last"] = loss
        self.figures["calls"] += 1
        self.figures.setdefault("first", loss)
        self.meter.update(loss)
        self.sums.tokens += 7
        self.sums.rows.append(rows)
        self.slotted.calls += 1
        self.slotted.seen.add(self.slotted.calls)
        self.own["calls"] += 1
        self.own.meter.update(loss)
        self.recent.append(loss)
        self.array[1] += loss
        self.names.update(["step"])
        self.running[0] += 1
        vars(self)["mean"].update(loss)
        self.pair[0].update(loss)
        self.pair[1].append(1)
        self.space.calls += 1
        self.space.losses.append(loss)
        self.added = loss

    def calls(self) -> list[float]:
        """How often each of them has counted."""
        return [
            self.figures["calls"],
            len(self.figures["loss"]["all"]),
            self.meter.count,
            len(self.meter.history) - 1,
            self.sums.tokens / 7,
            len(self.sums.rows),
            self.slotted.calls,
            max(self.slotted.seen),
            self.own["calls"],
            self.own.meter.count,
            self.names["step"],
            float(self.running[0]),
            float(vars(self)["mean"]._update_count),
            self.pair[0].count,
            len(self.pair[1]) - 1,
            self.space.calls,
            len(self.space.losses),
        ]


class KeepsInLoss(Keeps):
    def __init__(self, *args: Any, **options: Any) -> None:
        self.start()
        super().__init__(*args, **options)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)
        value = loss[0] if isinstance(loss, tuple) else loss
        self.count(float(value), len(next(iter(inputs.values()))))
        return loss


class Counts(TrainerCallback):
    """Of what `compute_loss` hands to it, and of what is logged."""

    padmin_per_call = ("calls",)

    def __init__(self) -> None:
        self.calls, self.logged = 0, [0]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logged[0] += "auxiliary" in logs


class KeepsBeside:
    """Figures in what belongs to a Trainer: its state, a callback; and its log."""

    padmin_per_call = ("calls",)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        self.state.calls = getattr(self.state, "calls", 0) + 1
        self.control.calls = getattr(self.control, "calls", 0) + 1
        next(each for each in self.callback_handler.callbacks if isinstance(each, Counts)).calls += 1
        self.log({"auxiliary": 1.0})
        return super().compute_loss(model, inputs, *args, **options)


def beside(kind: str) -> tuple[list[int], Any]:
    """How often each of them has counted, and the trainer."""
    trainer, counts = (
        build(kind, qwen2(), replace(BUDGET, mode="split") if kind == "trainer" else BUDGET, KeepsBeside),
        Counts(),
    )
    trainer.add_callback(counts)
    trainer.train()
    entries = sum("auxiliary" in each for each in trainer.state.log_history)
    return [trainer.state.calls, trainer.control.calls, counts.calls, counts.logged[0], entries], trainer


@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_figures_beside_a_trainer_are_those_of_its_training(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, trainer = beside(kind)
    assert "log" not in vars(trainer)
    assert set(found) == {trainer.padding_stats.micro_batches if kind == "trainer" else trainer.state.global_step}
    # Negative control: only the trainer is looked at.
    monkeypatch.setattr("lightning_padmin.runtime.isolation._BESIDE_TRAINERS", ())
    found, trainer = beside(kind)
    ran = trainer.padding_stats.micro_batches if kind == "trainer" else trainer.state.global_step
    assert min(found[:3]) > ran


Checked = list[list[str]]


def watched(check: Callable[..., Any], roots: Callable[..., tuple[object, ...]], found: Checked) -> Callable[..., Any]:
    """The check, with what it changed written down."""

    def around(*args: Any, **options: Any) -> Any:
        seen = roots(*args)
        before = seen_of(*seen)
        result = check(*args, **options)
        found.append(changed(before, seen_of(*seen)))
        return result

    return around


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checked:
    """What each check of a training changed."""
    found: Checked = []
    for place in (training, trainers):

        def roots(loss: Any, batch: Any, schema: Any, table: Any, config: Any, module: Any, place: Any = place) -> Any:
            trainer = [cell.cell_contents for cell in loss.__closure__ if isinstance(cell.cell_contents, KeepsInLoss)]
            return (module, *trainer)

        monkeypatch.setattr(place, "check_gradients", watched(place.check_gradients, roots, found))
    whole = watched(WholeSteps._check, lambda self, *_: (self._trainer,), found)
    monkeypatch.setattr(WholeSteps, "_check", whole)
    separates = watched(trl_engine.separates, lambda trainer, *_: (trainer,), found)
    monkeypatch.setattr(trl_engine, "separates", separates)
    return found


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: what is inside of users' own objects and of containers is not looked at."""
    monkeypatch.setattr(Keeper, "_later", lambda self, *_, **__: None)


KINDS = ("trainer", "sft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "kto")))


def prepared(kind: str, padmin: Any = BUDGET) -> Any:
    return build(kind, qwen2(), padmin, KeepsInLoss)


@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_a_trainer_are_those_of_its_training(kind: str, checks: Checked) -> None:
    ours = prepared(kind)
    ours.train()
    assert checks
    assert not any(checks), checks
    stock = prepared(kind, None)
    stock.train()
    assert len(set(stock.calls())) == 1
    # A Trainer computes the loss once for each chunk, TRL's once for each batch.
    wanted = ours.padding_stats.micro_batches if kind == "trainer" else stock.calls()[0]
    assert ours.calls() == [wanted] * len(stock.calls())


@pytest.mark.slow
def test_figures_of_a_trainer_in_joint_mode(checks: Checked) -> None:
    ours, stock = prepared("trainer", replace(BUDGET, mode="joint")), prepared("trainer", None)
    ours.train()
    assert checks
    assert not any(checks), checks
    stock.train()
    assert ours.calls() == stock.calls()


@pytest.mark.parametrize("kind", ["trainer", pytest.param("sft", marks=pytest.mark.slow)])
def test_a_check_that_forgets_objects_is_found(kind: str, checks: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    forgetful(monkeypatch)
    ours = prepared(kind)
    ours.train()
    assert any("meter.count" in place for place in checks[0])
    assert any("['loss']['all']" in place for place in checks[0])
    ran = ours.padding_stats.micro_batches if kind == "trainer" else ours.state.global_step
    assert ours.calls()[2] > ran


def test_figures_of_a_trainer_that_generates(checks: Checked) -> None:
    stock, ours = trl_cases.trainers(outer=(KeepsInLoss,))
    with_padmin = trl_cases.build(ours, {"max_steps": 2}, trl_cases.padmin())
    trl_cases.run(with_padmin)
    assert checks
    assert not any(checks), checks
    without = trl_cases.build(stock, {"max_steps": 2}, None)
    trl_cases.run(without)
    assert with_padmin.calls() == without.calls()
    assert with_padmin.calls()[0] >= 2


class Lit(Keeps, support.Module):
    """A LightningModule that keeps figures, and reads hidden states of a model of transformers."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.model = qwen2()
        self.start()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        output = self.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True
        )
        assert len(output.hidden_states) == 3
        logits = self.model.lm_head(output.hidden_states[-2]) + output.logits
        loss = support.reduce_loss(support.token_losses(logits, batch["labels"]), batch["labels"], self.how)
        self.count(float(loss), len(batch["labels"]))
        return loss


def test_a_lightning_module_is_as_it_was(checks: Checked) -> None:
    pair = support.fit_pair(Lit, support.ragged_batches(2))
    assert pair.gradient < 1e-5
    assert checks
    assert not any(checks), checks
    assert pair.split.calls() == [pair.callback.stats.micro_batches] * len(pair.split.calls())


def test_a_lightning_module_whose_check_forgets(checks: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    forgetful(monkeypatch)
    support.fit(Lit(), support.ragged_batches(1), support.padmin())
    assert any("meter.count" in place for place in checks[0])


def test_kinds_are_those_of_the_adapters() -> None:
    assert {getattr(kind, "values", [kind])[0] for kind in KINDS} == set(offline_cases.KINDS)


def test_a_plain_module_shows_what_is_looked_at() -> None:
    """The table sees what tests rely on."""
    module = nn.BatchNorm1d(2)
    before = seen_of(module)
    module.register_forward_hook(lambda *_: None)
    module(torch.ones(2, 2))
    torch.rand(1)
    places = " ".join(changed(before, seen_of(module)))
    assert all(word in places for word in ("_forward_hooks", "running_mean", "num_batches_tracked", "random/torch"))
