"""How a mode is chosen, what the check finds, what is left behind, and what a mode costs."""

from __future__ import annotations

import random
import re
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

pytest.importorskip("trl")

import trl_cases as cases
from accelerate import Accelerator

from lightning_padmin import PadMinConfig, PadMinWarning
from lightning_padmin.errors import ConfigError, PadMinError
from lightning_padmin.integrations.trl import PadMinMixin
from lightning_padmin.integrations.trl import passes as trl_passes
from lightning_padmin.microbatching.memory import OutOfMemoryError

PLAIN = {"loss_type": "dapo", "gradient_checkpointing": False}
# The threshold makes the loss ask for a mask, which `Coupled` gives; stock's own keeps all rows at this one.
MASKED = PLAIN | {"off_policy_mask_threshold": 100.0}


def slow(mode: str) -> Any:
    return pytest.param(mode, marks=pytest.mark.slow)


class Coupled:
    """A factor for all rows that depends on all of them."""

    def get_off_policy_mask(self, per_token_logps: Any, mask: Any, **_: Any) -> Any:
        factor = (per_token_logps.detach() * mask).sum().abs() / mask.sum().clamp(min=1)
        return factor.expand(len(mask), 1)


class Penalised:
    """A part of the loss that has nothing to do with log-probs."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)
        return loss + 1e-3 * sum(p.square().sum() for p in model.parameters())


class RunsTheModel:
    """A part that calls the model itself."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)
        logits = model(input_ids=inputs["prompt_ids"], attention_mask=inputs["prompt_mask"]).logits
        return loss + 1e-3 * logits.square().mean()


class AsksTwice:
    """A part that asks for log-probs again."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        completion = inputs["completion_ids"].shape[1]
        values = self._get_per_token_logps_and_entropies(model, ids, mask, completion)[0]
        return loss + 1e-2 * (values * inputs["completion_mask"]).square().mean()


@contextmanager
def told(words: str) -> Iterator[None]:
    """Warned of exactly once."""
    with pytest.warns(PadMinWarning) as warned:
        yield
    assert [words in str(each.message) for each in warned if issubclass(each.category, PadMinWarning)] == [True]


@pytest.mark.parametrize("where", ["inner", "outer"])
@pytest.mark.parametrize(
    ("kind", "mode", "words"),
    [
        (Coupled, "replay", "mode='replay': gradients of the loss at the log-probs change by"),
        (Penalised, "joint", "mode='joint': the loss has a part that does not come from"),
        (RunsTheModel, "joint", "mode='joint': the loss has a part that does not come from"),
        (AsksTwice, "joint", "mode='joint': the loss has a part that does not come from"),
    ],
)
def test_auto_takes_what_is_exact_for_a_loss_of_ones_own(kind: type, mode: str, words: str, where: str) -> None:
    layers: dict[str, Any] = {"outer": (kind,)} if where == "outer" else {}
    stock, ours = cases.trainers(cases.GRPOTrainer, *(() if layers else (kind,)), **layers)
    trainer = cases.build(ours, MASKED, cases.padmin())
    with told(words):
        found = cases.run(trainer)
    assert trainer._padmin.mode == mode
    wanted = cases.train(stock, MASKED, None)
    cases.same(found, wanted)
    assert cases.gradient_difference(wanted, cases.stock(MASKED)) > 1e-3


@pytest.mark.parametrize(
    ("kind", "mode", "words"),
    [
        (Coupled, "split", r"mode='split': gradients .* couples rows\. Set mode='replay' or mode='auto'"),
        (Penalised, "split", r"mode='split': the loss has a part .* Set mode='joint' or mode='auto'"),
        (Penalised, "replay", r"mode='replay': the loss has a part .* Set mode='joint' or mode='auto'"),
    ],
)
def test_a_mode_that_would_train_something_else_is_refused(kind: type, mode: str, words: str) -> None:
    trainer = cases.build(cases.trainers(outer=(kind,))[1], MASKED, cases.padmin(mode))
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(ConfigError, match=words):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


class ReadsPadding:
    """Nothing masks the mean over columns."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        outputs = super()._get_per_token_logps_and_entropies(*args, **options)
        if torch.is_grad_enabled():
            self.last = outputs[0]
        return outputs

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **options) + 0.1 * self.last.mean()


class Draws:
    """Leaves rows out at random."""

    def get_off_policy_mask(self, per_token_logps: Any, **_: Any) -> Any:
        return (torch.rand(len(per_token_logps), 1) > 0.3).float()


class DrawsFromPython:
    """The same, with numbers that are not torch's."""

    def get_off_policy_mask(self, per_token_logps: Any, **_: Any) -> Any:
        return torch.tensor([[float(random.random() > 0.3)] for _ in per_token_logps])


class Counts:
    """Weighs rows by how often it has been asked, which it keeps in a tensor of its own."""

    def get_off_policy_mask(self, per_token_logps: Any, **_: Any) -> Any:
        if not hasattr(self, "asked"):
            self.asked = torch.zeros(1)
        self.asked.add_(1.0)
        return torch.ones(len(per_token_logps), 1) / (1 + 0.1 * self.asked)


@pytest.mark.parametrize(("kind", "mode"), [(Draws, "joint"), (DrawsFromPython, "joint"), (Counts, "replay")])
def test_a_loss_whose_calls_differ(kind: type, mode: str) -> None:
    stock, ours = cases.trainers(outer=(kind,))
    options = {"off_policy_mask_threshold": 100.0, "beta": 0.1, "max_steps": 2}
    torch.manual_seed(0)
    wanted = cases.train(stock, options, None)
    torch.manual_seed(0)
    with told(f"mode='{mode}'"):
        found = cases.train(ours, options, cases.padmin())
    cases.same(found, wanted)


class Diverges(ReadsPadding):
    """From other log-probs, which are zero on padding too: there the gradient of this is zero."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        mask = inputs["completion_mask"]
        loss = super(ReadsPadding, self).compute_loss(model, inputs, *args, **options)
        return loss + 0.1 * ((self.last - (self.last.detach() - 0.5) * mask) ** 2).mean()


@pytest.mark.parametrize("mode", ["auto", slow("split"), slow("replay"), "joint"])
@pytest.mark.parametrize("kind", [ReadsPadding, Diverges])
def test_a_loss_that_reads_padding_is_refused(kind: type, mode: str) -> None:
    trainer = cases.build(cases.trainers(outer=(kind,))[1], PLAIN, cases.padmin(mode))
    with pytest.raises(ConfigError, match="reads log-probs where completions have no tokens"):
        trainer.train()


@pytest.mark.skipif(cases.RELEASE >= (1, 16), reason="masks its divergence since")
@pytest.mark.parametrize("mode", ["auto", "joint"])
@pytest.mark.parametrize("options", [{"beta": 0.0}, {"beta": 0.2, "importance_sampling_level": "sequence"}])
def test_luspo_of_older_releases_reads_padding(options: dict[str, Any], mode: str) -> None:
    chosen = {"loss_type": "luspo", "num_iterations": 2, "max_steps": 3} | options
    with pytest.raises(
        ConfigError, match=r"releases before 1\.16: set importance_sampling_level='sequence' and beta=0"
    ):
        cases.train(cases.OURS, chosen, cases.padmin(mode))


@pytest.mark.parametrize("kind", [Coupled, Penalised])
def test_negative_control_without_the_check(kind: type) -> None:
    stock, ours = cases.trainers(outer=(kind,))
    found = cases.train(ours, MASKED, cases.padmin("split", check="off"))
    assert cases.gradient_difference(found, cases.train(stock, MASKED, None)) > 1e-3


def test_a_window_that_cannot_tell_puts_the_check_off() -> None:
    """Without advantages there is no gradient to compare."""

    class FlatAtFirst(Coupled):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            self.generations = getattr(self, "generations", 0) + 1
            if self.generations == 1:
                output["advantages"] = output["advantages"] * 0
            return output

    stock, ours = cases.trainers(outer=(FlatAtFirst,))
    with told("mode='replay'"):
        found = cases.train(ours, MASKED, cases.padmin())
    wanted = cases.train(stock, MASKED, None)
    assert not found.gradients[0].any()
    for mine, theirs in zip(found.gradients[1:], wanted.gradients[1:], strict=True):
        assert float((mine - theirs).abs().max() / theirs.abs().max()) <= 1e-5


@pytest.mark.slow
def test_what_the_loss_keeps_in_lists_is_kept_once_per_stock_micro_batch() -> None:
    class Keeping:
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **options)
            self.__dict__.setdefault("kept", []).append(float(loss.detach()))
            self.calls = getattr(self, "calls", 0) + 1
            return loss

    stock, ours = cases.trainers(outer=(Keeping,))
    wanted = cases.train(stock, PLAIN, None).trainer
    for mode in ("split", "replay", "joint"):
        trainer = cases.train(ours, PLAIN, cases.padmin(mode)).trainer
        assert trainer.calls == wanted.calls == len(wanted.kept)
        assert trainer.kept == pytest.approx(wanted.kept, abs=1e-5)


def test_switched_off_it_is_stock_to_the_bit() -> None:
    wanted = cases.stock(PLAIN)
    found = cases.train(cases.OURS, PLAIN, PadMinConfig(enabled=False))
    assert torch.equal(found.parameters, wanted.parameters)
    assert [logs.keys() for logs in found.logs] == [logs.keys() for logs in wanted.logs]
    assert found.trainer.padding_stats.batches == 0


def with_dropout() -> nn.Module:
    return cases.qwen2(attention_dropout=0.3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_replay_draws_the_dropout_of_its_first_pass(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split draws the same numbers in the same order, so both must come to the same gradients."""
    options = PLAIN | {"disable_dropout": False, "max_steps": 2, "gradient_checkpointing": checkpointing}
    split = cases.train(cases.OURS, options, cases.padmin("split"), with_dropout)
    replay = cases.train(cases.OURS, options, cases.padmin("replay"), with_dropout)
    assert cases.gradient_difference(split, cases.train(cases.OURS, options, cases.padmin("split"))) > 0.05
    assert cases.gradient_difference(replay, split) <= 1e-5

    @contextmanager
    def others(self: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(trl_passes.RandomState, "again", others)
    broken = cases.train(cases.OURS, options, cases.padmin("replay"), with_dropout)
    assert cases.gradient_difference(broken, split) > 0.05


@pytest.mark.parametrize("mode", ["split", "replay", "joint"])
def test_counts_that_are_logged(mode: str) -> None:
    options = PLAIN | {"steps_per_generation": 4, "gradient_accumulation_steps": 4, "logging_steps": 2, "max_steps": 4}
    found = cases.train(cases.OURS, options, cases.padmin(mode))
    logged = [logs for logs in found.logs if "padmin/slots" in logs]
    stats = found.trainer.padding_stats
    assert len(logged) == 2
    assert (stats.batches, stats.rows) == (16, 64)
    for name in ("slots", "real_tokens", "loss_tokens", "micro_batches"):
        assert sum(logs[f"padmin/{name}"] for logs in logged) == getattr(stats, name) > 0
    assert sum(logs["completions/mean_length"] for logs in logged) / 2 * 64 == pytest.approx(stats.loss_tokens)
    for logs in logged:
        assert 0 < logs["padmin/waste"] < logs["padmin/waste_before"] < 1
    assert stats.dummies == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split", slow("joint"), slow("replay")])
def test_step_time_covers_all_of_a_step(mode: str) -> None:
    class Slow:
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            time.sleep(0.3)
            return super()._generate_and_score_completions(inputs)

        def compute_loss(self, *args: Any, **options: Any) -> Any:
            time.sleep(0.1)
            return super().compute_loss(*args, **options)

    found = cases.train(cases.trainers(outer=(Slow,))[1], PLAIN | {"max_steps": 1}, cases.padmin(mode))
    (logged,) = (logs["step_time"] for logs in found.logs if "step_time" in logs)
    assert 0.5 <= logged <= found.logs[-1]["train_runtime"]


@pytest.mark.slow
def test_without_a_budget_of_its_own_no_pass_is_larger_than_a_stock_micro_batch() -> None:
    found = cases.train(cases.OURS, PLAIN, cases.padmin(token_budget=None))
    wanted = cases.stock(PLAIN)
    cases.same(found, wanted)
    assert found.largest <= wanted.largest


class Live:
    """Peak number of elements that graphs keep."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        held = Held(tensor)
        self.now += tensor.numel()
        self.peak = max(self.peak, self.now)
        weakref.finalize(held, self.free, tensor.numel())
        return held

    def free(self, size: int) -> None:
        self.now -= size


class Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.slow
def test_split_and_replay_keep_the_graph_of_one_chunk() -> None:
    options = PLAIN | {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16, "max_steps": 2}
    peaks = {}
    for mode in ("joint", "split", "replay"):
        live = Live()
        trainer = cases.build(cases.OURS, options, cases.padmin(mode, token_budget=64))
        with torch.autograd.graph.saved_tensors_hooks(live.pack, lambda held: held.tensor):
            cases.run(trainer)
        peaks[mode] = live.peak
        assert live.now <= 1000  # nothing stays behind
    assert peaks["split"] < 0.4 * peaks["joint"]
    assert peaks["replay"] < 0.4 * peaks["joint"]


class Fails:
    """In the second call of the loss."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        Fails.calls += 1
        if Fails.calls == 2:
            raise RuntimeError("out of luck")
        return super().compute_loss(model, inputs, *args, **options)


class FailsBetween:
    """Between two steps of a window."""

    failed = False

    def _prepare_inputs(self, inputs: Any) -> Any:
        if self._step == 1 and not self.failed:
            self.failed = True
            raise RuntimeError("out of luck")
        return super()._prepare_inputs(inputs)


class FailsOutside:
    """After a step, where no hook of the mixin sees it."""

    failed = False

    def training_step(self, *args: Any, **options: Any) -> Any:
        loss = super().training_step(*args, **options)
        if self._step == 1 and not self.failed:
            self.failed = True
            raise RuntimeError("out of luck")
        return loss


LONG = PLAIN | {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "max_steps": 2}


def fail_and_train_again(kind: type, padmin: PadMinConfig | None) -> cases.Record:
    trainer = cases.build(kind, LONG, padmin)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    assert isinstance(trainer.accelerator, Accelerator)
    assert not {"compute_loss", "_prepare_inputs", "training_step"} & vars(trainer).keys()
    return cases.run(trainer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*your class has its own _prepare_inputs:lightning_padmin.PadMinWarning")
@pytest.mark.parametrize("mode", ["split", slow("replay"), slow("joint")])
@pytest.mark.parametrize("kind", [FailsBetween, FailsOutside])
def test_after_a_failure_training_goes_on_as_stock_does(kind: type, mode: str) -> None:
    stock, ours = cases.trainers(outer=(kind,))
    found, wanted = fail_and_train_again(ours, cases.padmin(mode)), fail_and_train_again(stock, None)
    assert cases.gradient_difference(found, wanted) <= 1e-5


@pytest.mark.parametrize("mode", ["split", slow("replay"), slow("joint"), slow("auto")])
def test_a_failure_in_the_loss_leaves_the_trainer_usable(mode: str) -> None:
    Fails.calls = 0
    found = fail_and_train_again(cases.trainers(outer=(Fails,))[1], cases.padmin(mode))
    assert len(found.gradients) == 2
    assert all(gradient.isfinite().all() and gradient.any() for gradient in found.gradients)


def small(most: int) -> nn.Module:
    """A model that has no memory for training passes of more slots than `most`."""
    model = cases.qwen2()

    def check(module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and kwargs["input_ids"].numel() > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.register_forward_pre_hook(check, with_kwargs=True)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split", "replay"])
def test_out_of_memory_names_the_next_budget_and_that_fits(mode: str) -> None:
    trainer = cases.build(cases.OURS, PLAIN, cases.padmin(mode), lambda: small(70))
    before = cases.flat(trainer.model)
    message = r"micro-batch \d of \d: \d x \d+ = [7-9]\d slots\. Set token_budget=\d+ \("
    with pytest.raises(OutOfMemoryError, match=message) as caught:
        trainer.train()
    assert torch.equal(cases.flat(trainer.model), before)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    budget = int(re.findall(r"token_budget=(\d+)", str(caught.value))[0])
    found = cases.train(cases.OURS, PLAIN, cases.padmin(mode, token_budget=budget), lambda: small(70))
    cases.same(found, cases.stock(PLAIN))


def test_a_batch_that_is_replaced_in_the_middle_of_a_window_is_refused() -> None:
    class Regenerating(TrainerCallback):
        def on_substep_end(self, *args: Any, **options: Any) -> None:
            trainer._buffered_inputs = [dict(inputs) for inputs in trainer._buffered_inputs]

    trainer = cases.build(cases.OURS, PLAIN, cases.padmin("split"), callbacks=[Regenerating()])
    with pytest.raises(PadMinError, match="replaced in the middle of an accumulation window"):
        trainer.train()


def test_a_step_of_ones_own_may_replace_it() -> None:
    class Regenerating:
        def training_step(self, *args: Any, **options: Any) -> Any:
            if self._step == 1:
                self._buffered_inputs = [dict(inputs) for inputs in self._buffered_inputs]
            return super().training_step(*args, **options)

    stock, ours = cases.trainers(outer=(Regenerating,))
    cases.same(cases.train(ours, PLAIN, cases.padmin("split")), cases.train(stock, PLAIN, None))


@pytest.mark.skipif(cases.RELEASE < (1, 4), reason="fails on an empty prompt by itself")
def test_an_empty_prompt_is_told() -> None:
    trainer = cases.build(cases.OURS, PLAIN, cases.padmin())
    ids, mask = torch.full((2, 8), 5), torch.ones(2, 8, dtype=torch.long)
    mask[1, :4] = 0
    with torch.no_grad(), told("a row has an empty prompt"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 4)
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 4)


def test_a_row_over_the_budget_is_told_once() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        cases.train(cases.OURS, PLAIN, cases.padmin(token_budget=20))
    assert sum(issubclass(each.category, PadMinWarning) for each in warned) <= 2  # one for no-grad passes


def test_only_one_attribute_is_added() -> None:
    stock, ours = cases.build(cases.STOCK, PLAIN, None), cases.build(cases.OURS, PLAIN, cases.padmin())
    assert vars(ours).keys() - vars(stock).keys() == {"_padmin"}
    assert {name for name in vars(PadMinMixin) if not name.startswith("__")} == {
        "_padmin",
        "get_batch_samples",
        "padding_stats",
        "train",
        "training_step",
        "_get_per_token_logps_and_entropies",
        "log",
    }
