"""PadMinTrainerMixin and PadMinMixin with steps, hooks and noise of the user's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from lightning_padmin import PadMinConfig
from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.architectures.gradient_hooks import GradientHookError
from lightning_padmin.errors import ConfigError, TrainingStepError
from lightning_padmin.integrations.transformers import PadMinTrainerMixin, engine

BUDGET = PadMinConfig(mode="split", token_budget=64, launch_cost=4, pad_token_id=0)


class Ours(PadMinTrainerMixin, Trainer):
    pass


def llama() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes))


def rows() -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(1, 40) for _ in range(source.choice([3, 4, 5, 6, 8, 11, 14, 30]))] for _ in range(40)]


def collate(samples: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, samples))

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (width - len(values))

    return {
        "input_ids": torch.tensor([padded(row, 0) for row in samples]),
        "attention_mask": torch.tensor([padded([1] * len(row), 0) for row in samples]),
        "labels": torch.tensor([padded(row, -100) for row in samples]),
    }


class Record(TrainerCallback):
    trainer: Any

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradients.append(torch.cat([p.grad.detach().flatten() for p in model.parameters()]))


class FGM(Trainer):
    """A second loss at embeddings moved along their gradient."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        weight = model.get_input_embeddings().weight
        kept = weight.data.clone()
        weight.data.add_(0.5 * weight.grad / (weight.grad.norm() + 1e-12))
        super().training_step(model, inputs, num_items_in_batch)
        weight.data.copy_(kept)
        return loss


class CallsTheModel(Trainer):
    """Never asks for compute_loss."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        loss = model(**self._prepare_inputs(inputs)).loss
        self.accelerator.backward(loss)
        return loss.detach()


class SecondPassOfItsOwn(Trainer):
    """One compute_loss, and a pass of the model behind it."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        (0.1 * model(**self._prepare_inputs(inputs)).loss).backward()
        return loss


class TwoLosses(Trainer):
    """R-Drop as some write it."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        inputs = self._prepare_inputs(inputs)
        first = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        second = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss = (first + second) / 2
        self.accelerator.backward(loss)
        return loss.detach()


class Counts(Trainer):
    calls = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.calls += 1
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            model(input_ids=inputs["input_ids"][:1, :1])  # a pass inside of the loss
        return super().compute_loss(model, inputs, *args, **options)


def train(kind: type, tmp: Path, model: nn.Module | None = None, padmin: Any = None, **options: Any) -> Record:
    record = Record()
    defaults: dict[str, Any] = {
        "output_dir": str(tmp),
        "per_device_train_batch_size": 8,
        "max_steps": 3,
        "learning_rate": 0.1,
        "optim": "sgd",
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "max_grad_norm": 0.0,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    record.trainer = kind(
        model=llama().double() if model is None else model,
        args=TrainingArguments(**(defaults | options)),
        train_dataset=rows(),
        data_collator=collate,
        callbacks=[record],
        **({"padmin": padmin or BUDGET} if issubclass(kind, PadMinTrainerMixin) else {}),
    )
    record.trainer.train()
    return record


def difference(found: Record, wanted: Record) -> float:
    assert len(found.gradients) == len(wanted.gradients) > 0
    pairs = zip(found.gradients, wanted.gradients, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def behind(kind: type) -> type:
    return type("Behind", (PadMinTrainerMixin, kind), {})


def before(kind: type) -> type:
    return type("Before", (kind, PadMinTrainerMixin, Trainer), {})


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (FGM, "FGM.training_step called compute_loss more than once"),
        (TwoLosses, "TwoLosses.training_step called compute_loss more than once"),
        (CallsTheModel, "CallsTheModel.training_step called the model itself"),
        (SecondPassOfItsOwn, "SecondPassOfItsOwn.training_step called the model itself"),
    ],
)
def test_a_step_behind_the_mixin_takes_one_loss(kind: type, match: str, tmp_path: Path) -> None:
    ours, made = behind(kind), []
    stock = ours.__init__

    def keep(self: Any, *args: Any, **options: Any) -> None:
        made.append(self)
        stock(self, *args, **options)

    ours.__init__ = keep
    with pytest.raises(TrainingStepError, match=f"{match}.*in front of the mixin"):
        train(ours, tmp_path)
    (trainer,) = made
    assert "compute_loss" not in vars(trainer)
    assert not trainer.model._forward_pre_hooks
    assert all(p.grad is None for p in trainer.model.parameters())
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("kind", [FGM, SecondPassOfItsOwn])
def test_in_front_of_the_mixin_it_runs_once_per_batch(kind: type, tmp_path: Path) -> None:
    found = train(before(kind), tmp_path)
    assert difference(found, train(kind, tmp_path)) <= 1e-10
    assert found.trainer.padding_stats.micro_batches > found.trainer.padding_stats.batches


class Clips(Trainer):
    """Gradients, in place, after each batch."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return loss


class ClampsData(Trainer):
    """The same past the counters of versions."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        for p in model.parameters():
            p.grad.data.clamp_(-1e-3, 1e-3)
        return loss


class Empties(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.zero_grad()
        return super().training_step(model, inputs, num_items_in_batch)


class BoundsWeights(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        for p in model.parameters():
            p.data.clamp_(-0.03, 0.03)
        return loss


class Changes(Trainer):
    """Another batch, without an entry that is no argument of the model's and with fewer labels."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        labels = inputs["labels"].clone()
        labels[:, :3] = -100
        inputs = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels}
        return super().training_step(model, inputs, num_items_in_batch)


class WritesLabels(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        inputs["labels"][:, :3] = -100
        return super().training_step(model, inputs, num_items_in_batch)


class LeavesOut(Trainer):
    """Long batches."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if inputs["input_ids"].shape[1] > 25 and self.state.global_step == 0:
            return torch.tensor(0.0)
        return super().training_step(model, inputs, num_items_in_batch)


class DropsTheNumber(Trainer):
    """As written before there was one."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return super().training_step(model, inputs)


OF_BATCHES = (FGM, Clips, ClampsData, Empties, BoundsWeights, Changes, WritesLabels, LeavesOut, DropsTheNumber)


@pytest.mark.parametrize("kind", OF_BATCHES)
def test_in_front_with_accumulation(kind: type, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    found = train(before(kind), tmp_path, **options)
    assert difference(found, train(kind, tmp_path, **options)) <= 1e-6
    assert found.trainer.padding_stats.micro_batches > found.trainer.padding_stats.batches


def test_in_front_with_an_entry_that_only_the_step_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "collate", lambda samples, plain=collate: plain(samples) | {"source": torch.ones(8)})
    assert difference(train(before(Changes), tmp_path), train(Changes, tmp_path)) <= 1e-10
    with pytest.raises(TypeError, match="source"):
        train(Ours, tmp_path)


@pytest.mark.slow
def test_control_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with rows regrouped, these would train something else, or are refused."""
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    monkeypatch.setattr(engine, "has_step_in_front", lambda trainer: False)
    for kind, match in ((FGM, "came twice"), (Changes, "another batch came"), (WritesLabels, "was written into")):
        with pytest.raises(TrainingStepError, match=f"{match}, after rows of 2 batches.*in front of the mixin"):
            train(before(kind), tmp_path, **options)
    for kind in (Clips, LeavesOut):
        assert difference(train(before(kind), tmp_path, **options), train(kind, tmp_path, **options)) > 0.05


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Clips, "writes into gradients"),
        (ClampsData, "writes into gradients"),
        (Empties, "writes into gradients"),
        (BoundsWeights, "writes into weights"),
        (DropsTheNumber, "does not hand num_items_in_batch on"),
    ],
)
def test_behind_the_mixin_a_step_leaves_gradients_alone(kind: type, match: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingStepError, match=rf"{kind.__name__}.training_step {match}.*in front of the mixin"):
        train(behind(kind), tmp_path)


def test_behind_the_mixin_with_one_chunk(tmp_path: Path) -> None:
    whole = PadMinConfig(token_budget=10_000, launch_cost=10_000, pad_token_id=0)
    assert difference(train(behind(Clips), tmp_path, padmin=whole), train(Clips, tmp_path)) <= 1e-10


def test_control_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_padmin.verification.one_loss.OneLoss._refuse", lambda *_: None)
    for kind in (FGM, SecondPassOfItsOwn, Clips, ClampsData, BoundsWeights):
        assert difference(train(behind(kind), tmp_path), train(kind, tmp_path)) > 0.05


def test_one_loss_in_a_step_of_ones_own(tmp_path: Path) -> None:
    found = train(behind(Counts), tmp_path)
    assert difference(found, train(Counts, tmp_path)) <= 1e-10
    assert found.trainer.calls == found.trainer.padding_stats.micro_batches  # once per chunk, as documented


# Hooks


def layerwise(model: nn.Module) -> None:
    """As GaLore and its like do in `create_optimizer`."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def optimizer_hook(p: nn.Parameter) -> None:
        if p.grad is not None:
            optimizers[p].step()
            optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(optimizer_hook)


def clamps(model: nn.Module) -> None:
    model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def observes(model: nn.Module) -> None:
    model.lm_head.weight.register_hook(lambda gradient: print(end=f"{gradient.norm():.0f}"[:0]))


class MakesHooks(Ours):
    """Hooks that come with the optimizer."""

    hooks: Callable[[nn.Module], None]

    def create_optimizer(self, *args: Any, **options: Any) -> Any:
        type(self).hooks(self.model)
        return super().create_optimizer(*args, **options)


@pytest.mark.parametrize("hooks", [layerwise, clamps])
@pytest.mark.parametrize("later", [False, True])
def test_hooks_that_act_on_gradients_are_refused(
    hooks: Callable[[nn.Module], None], later: bool, tmp_path: Path
) -> None:
    model = llama()
    kind = Ours
    if later:
        kind = type("Later", (MakesHooks,), {"hooks": staticmethod(hooks)})
    else:
        hooks(model)
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(GradientHookError, match=r"has a hook.*on_pre_optimizer_step"):
        train(kind, tmp_path, model)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), weights, strict=True))


def test_hooks_that_look_are_left_alone(tmp_path: Path) -> None:
    models = [llama().double(), llama().double()]
    for model in models:
        observes(model)
    assert difference(train(Ours, tmp_path, models[0]), train(Trainer, tmp_path, models[1])) <= 1e-10


@pytest.mark.parametrize("name", ["galore_adamw_layerwise", "apollo_adamw_layerwise", "lomo"])
def test_optimizers_that_step_in_the_backward_pass(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"optim='{name}' takes its steps in the backward pass"):
        train(Ours, tmp_path, padmin=replace(BUDGET, mode="split"), optim=name)


# Noise


def test_neftune(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neftune_noise_alpha=5.0.*width of the call"):
        train(Ours, tmp_path, neftune_noise_alpha=5.0)
    model = llama()
    model.config.neftune_noise_alpha = 5.0
    with pytest.raises(ArchitectureError, match=r"neftune_noise_alpha=5.0"):
        train(Ours, tmp_path, model)
    train(Ours, tmp_path, neftune_noise_alpha=None, max_steps=1)


# TRL

pytest.importorskip("trl")
trl_cases = pytest.importorskip("trl_cases")
ONCE = {"loss_type": "dapo", "gradient_checkpointing": False, "max_steps": 1}


class Twice:
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        super().training_step(model, inputs, num_items_in_batch)
        return loss


class ClipsSteps:
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return loss


class Triples:
    """Sends its loss backward itself."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = 3 * self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        self._step += 1
        return loss.detach()


TWO_STEPS = ONCE | {"gradient_accumulation_steps": 2}


@pytest.mark.slow
def test_trl_steps_that_act_on_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"behind": trl_cases.trainers(trl_cases.GRPOTrainer, ClipsSteps)}
    kinds["front"] = trl_cases.trainers(outer=(ClipsSteps,))
    stock = trl_cases.train(kinds["behind"][0], TWO_STEPS, None)
    for _, ours in kinds.values():
        found = trl_cases.train(ours, TWO_STEPS, trl_cases.padmin("split", token_budget=40, launch_cost=1))
        trl_cases.same(found, stock)
        assert found.trainer.padding_stats.micro_batches > 2
    monkeypatch.setattr("lightning_padmin.integrations.trl.hooks.has_own_step", lambda *_: False)
    for _, ours in kinds.values():  # negative control: rows of both micro-batches regrouped
        found = trl_cases.train(ours, TWO_STEPS, trl_cases.padmin("split", token_budget=40, launch_cost=1))
        assert trl_cases.gradient_difference(found, stock) > 0.05


@pytest.mark.slow
def test_trl_steps_that_send_their_loss_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, ours = trl_cases.trainers(trl_cases.GRPOTrainer, Triples)
    wanted = trl_cases.train(stock, ONCE, None)
    with pytest.warns(UserWarning, match=r"mode='joint': Triples.training_step sends its loss backward itself"):
        found = trl_cases.train(ours, ONCE, trl_cases.padmin("auto", token_budget=40))
    trl_cases.same(found, wanted)
    with pytest.raises(ConfigError, match=r"mode='split': Triples.training_step .*Set mode='joint'"):
        trl_cases.build(ours, ONCE, trl_cases.padmin("split", token_budget=40, launch_cost=1))
    monkeypatch.setattr("lightning_padmin.integrations.trl.support.backward_of_step", lambda *_: None)
    found = trl_cases.train(ours, ONCE, trl_cases.padmin("split", token_budget=40, launch_cost=1))  # negative control
    assert trl_cases.gradient_difference(found, wanted) > 0.05


@pytest.fixture
def hooked() -> Callable[..., nn.Module]:
    def make(hooks: Callable[[nn.Module], None] = clamps) -> nn.Module:
        model = trl_cases.qwen2()
        hooks(model)
        return model

    return make


def test_trl_takes_one_loss_per_chunk() -> None:
    _, ours = trl_cases.trainers(trl_cases.GRPOTrainer, Twice)
    trainer = trl_cases.build(ours, ONCE, trl_cases.padmin("split"))
    with pytest.raises(TrainingStepError, match=r"Twice.training_step called compute_loss more.*mode='joint'"):
        trainer.train()
    assert all(p.grad is None for p in trainer.model.parameters())
    assert "compute_loss" not in vars(trainer)


@pytest.mark.parametrize("mode", ["split", "replay"])
def test_trl_refuses_hooks(mode: str, hooked: Callable[..., nn.Module]) -> None:
    trainer = trl_cases.build(trl_cases.OURS, ONCE, trl_cases.padmin(mode), hooked)
    with pytest.raises(GradientHookError, match=r"'lm_head.weight' has a hook.*mode='joint'"):
        trainer.train()


def test_trl_runs_them_in_joint_mode(hooked: Callable[..., nn.Module]) -> None:
    with pytest.warns(UserWarning, match="mode='joint': 'lm_head.weight' has a hook"):
        found = trl_cases.train(trl_cases.OURS, ONCE, trl_cases.padmin("auto"), hooked)
    assert found.trainer._padmin.mode == "joint"
    trl_cases.same(found, trl_cases.train(trl_cases.STOCK, ONCE, None, hooked))


def test_trl_refuses_noise() -> None:
    with pytest.raises(ConfigError, match=r"GRPOConfig has neftune_noise_alpha=5"):
        trl_cases.build(trl_cases.OURS, ONCE | {"neftune_noise_alpha": 5}, PadMinConfig())
