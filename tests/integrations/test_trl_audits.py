"""Windows of GRPO are looked at again when they show something new: losses and models that the first could not tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("trl")

import trl_cases as cases

from lightning_padmin import PadMinConfig, PadMinWarning
from lightning_padmin.errors import ConfigError, GradientCheckError
from lightning_padmin.integrations.common import Session
from lightning_padmin.integrations.trl.audits import Audits
from lightning_padmin.integrations.trl.facets import BEHIND, LEFT, token_facets, window_facets

PLAIN = {"loss_type": "dapo", "gradient_checkpointing": False, "max_steps": 4}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


class FullAtFirst:
    """The first generated batch has completions of full length."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **options: Any) -> Any:
        self.generated = getattr(self, "generated", 0) + 1
        self.long_share = 1.0 if self.generated == 1 else 0.1
        return super()._generate_single_turn(prompt_ids, *args, **options)


class Keeps:
    """Has the log-probs that its loss was made of; `later` from the fourth step on, where no look is due."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        outputs = super()._get_per_token_logps_and_entropies(*args, **options)
        if torch.is_grad_enabled():
            self.values = outputs[:2]
        return outputs

    @property
    def later(self) -> bool:
        return self.state.global_step >= 3

    def mean(self, inputs: Any, which: int = 0) -> Tensor:
        mask = inputs["completion_mask"]
        return (self.values[which] * mask).sum() / mask.sum().clamp(min=1)

    def term(self, inputs: Any) -> Any:
        raise NotImplementedError

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)
        return loss + self.term(inputs)


class ReadsPadding(Keeps):
    """Nothing masks the mean over columns."""

    def term(self, inputs: Any) -> Any:
        return 0.1 * self.values[0].mean()


class ReadsPaddingLater(Keeps):
    """The same, of entropies, as a term that comes later."""

    def term(self, inputs: Any) -> Any:
        return -0.1 * self.values[1].mean() if self.later else 0.0


class WarmsUp(Keeps):
    """A coupled term whose coefficient leaves 0."""

    def term(self, inputs: Any) -> Any:
        return 0.5 * float(self.later) * self.mean(inputs) ** 2


class Appears(Keeps):
    """A term that is there later, of entropies."""

    def term(self, inputs: Any) -> Any:
        return 0.5 * self.mean(inputs, 1) ** 2 if self.later else 0.0


class PenaltyLater(Keeps):
    """A part that has nothing to do with log-probs."""

    def term(self, inputs: Any) -> Any:
        return 1e-3 * sum(p.square().sum() for p in self.model.parameters()) if self.later else 0.0


class EqualAtFirst(Keeps):
    """A term without gradient as long as all advantages are equal."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        self.scored = getattr(self, "scored", 0) + 1
        if self.scored <= 2:
            output["advantages"] = torch.ones_like(output["advantages"])
        return output

    def term(self, inputs: Any) -> Any:
        mask, advantages = inputs["completion_mask"], inputs["advantages"]
        each = (self.values[0] * mask).sum(1) / mask.sum(1).clamp(min=1)
        return 0.5 * (each * (advantages - advantages.mean())).sum() ** 2


class Floods(Keeps):
    """Flooding, over a level that its loss comes below later."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super(Keeps, self).compute_loss(model, inputs, *args, **options)
        level = self.mean(inputs).detach() * 0 + (5.0 if self.later else -5.0)
        return (loss - level).abs() + level


class AtTheEnd(Keeps):
    """A term of the last micro-batch before an optimizer step alone, which separates over rows."""

    def term(self, inputs: Any) -> Any:
        mask = inputs["completion_mask"]
        return 0.05 * (self.values[0] * mask).sum(1).mean() if self.accelerator.sync_gradients else 0.0


def train(kind: type, padmin: PadMinConfig, **more: Any) -> cases.Record:
    return cases.run(cases.build(kind, PLAIN, padmin, **more))


@pytest.mark.parametrize(
    ("layers", "mode"),
    [
        ((WarmsUp,), "replay"),
        slow((Appears,), "replay"),
        slow((PenaltyLater,), "joint"),
        slow((EqualAtFirst,), "replay"),
        slow((FullAtFirst, WarmsUp), "replay"),
    ],
)
def test_auto_goes_over_to_what_is_exact_before_a_window_that_needs_it(layers: tuple[type, ...], mode: str) -> None:
    stock, ours = cases.trainers(outer=layers)
    trainer = cases.build(ours, PLAIN, cases.padmin())
    with pytest.warns(PadMinWarning) as warned:
        found = cases.run(trainer)
    (said,) = [str(each.message) for each in warned if issubclass(each.category, PadMinWarning)]
    assert f"mode={mode!r}: " in said
    assert "New in this window: " in said
    assert "the last look that passed was at window" in said
    assert trainer._padmin.mode == mode
    cases.same(found, cases.train(stock, PLAIN, None))


@pytest.mark.slow
def test_a_term_at_the_end_of_a_window_is_trained() -> None:
    stock, ours = cases.trainers(outer=(AtTheEnd,))
    with pytest.warns(PadMinWarning, match="mode='replay': "):
        found = train(ours, cases.padmin())
    wanted = cases.train(stock, PLAIN, None)
    cases.same(found, wanted)
    split = train(ours, cases.padmin("split", check="off"))
    assert cases.gradient_difference(split, wanted) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WarmsUp, Appears, PenaltyLater, EqualAtFirst])
def test_negative_control_one_look_is_not_enough(kind: type) -> None:
    stock, ours = cases.trainers(outer=(kind,))
    found, wanted = train(ours, cases.padmin(check="first-batch")), cases.train(stock, PLAIN, None)
    assert cases.gradient_difference(found, wanted) > 1e-3


@pytest.mark.parametrize(
    ("layers", "mode", "words"),
    [
        ((FullAtFirst, ReadsPadding), "auto", f"reads log-probs .* New in this window: .*{BEHIND}"),
        slow((FullAtFirst, ReadsPadding), "split", "reads log-probs where completions have no tokens"),
        slow((FullAtFirst, ReadsPadding), "replay", "reads log-probs where completions have no tokens"),
        slow((FullAtFirst, ReadsPadding), "joint", "reads log-probs where completions have no tokens"),
        slow((ReadsPaddingLater,), "auto", "reads log-probs where completions have no tokens"),
        slow((ReadsPaddingLater,), "replay", "reads log-probs where completions have no tokens"),
        slow((ReadsPaddingLater,), "joint", "reads log-probs where completions have no tokens"),
        slow((WarmsUp,), "split", r"mode='split': .* couples rows\. Set mode='replay' or mode='auto'\. New in this"),
        slow((PenaltyLater,), "replay", r"mode='replay': the loss has a part .* Set mode='joint' or mode='auto'"),
    ],
)
def test_a_window_that_would_train_something_else_is_refused(layers: tuple[type, ...], mode: str, words: str) -> None:
    trainer = cases.build(cases.trainers(outer=layers)[1], PLAIN, cases.padmin(mode))
    with pytest.raises(ConfigError, match=words):
        trainer.train()
    assert trainer.state.global_step in (1, 3)
    assert not {"compute_loss", "_prepare_inputs", "training_step"} & vars(trainer).keys()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "replay", "joint"])
def test_flooding_is_seen_when_it_begins(mode: str) -> None:
    stock, ours = cases.trainers(outer=(Floods,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PadMinWarning)
        found = train(ours, cases.padmin(mode))
    cases.same(found, cases.train(stock, PLAIN, None))


# Models.


def with_hook(hook: Callable[..., Tensor]) -> nn.Module:
    model = cases.qwen2()
    model.get_input_embeddings().register_forward_hook(hook)
    return model


def averaging() -> nn.Module:
    """Every position sees the mean over all columns."""
    return with_hook(lambda module, args, output: output + output.mean(1, keepdim=True))


def gated() -> nn.Module:
    """The same through a gate that is 0 at first: values are right, gradients are not."""
    model = cases.qwen2()
    embedding = model.get_input_embeddings()
    embedding.gate = nn.Parameter(torch.zeros(()))
    embedding.register_forward_hook(lambda m, args, output: output + m.gate * output.mean(1, keepdim=True))
    return model


def looking_ahead() -> nn.Module:
    """A position sees what comes two columns later, which behind a row is padding."""

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        return output + nn.functional.pad(output[:, 2:] + 1, (0, 0, 0, 2)) * 0.5

    return with_hook(hook)


def sharing() -> nn.Module:
    """Rows see the first token of each other."""
    return with_hook(lambda module, args, output: output + output[:, :1].mean(0, keepdim=True))


def counting() -> nn.Module:
    """Positions by column, which left padding before a prompt moves: alone they are right."""

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        columns = torch.arange(output.shape[1], dtype=output.dtype)[:, None]
        return output + torch.sin(columns * torch.arange(1, output.shape[2] + 1) / 7)

    return with_hook(hook)


@pytest.mark.parametrize(
    ("make", "mode", "words"),
    [
        (gated, "auto", "the model reads padding"),
        slow(averaging, "split", "the model reads padding"),
        slow(averaging, "replay", "the model reads padding"),
        slow(averaging, "joint", "the model reads padding"),
        slow(looking_ahead, "auto", "the model reads padding"),
        slow(sharing, "auto", "the model couples rows"),
        slow(sharing, "joint", "the model couples rows"),
    ],
)
def test_a_model_that_depends_on_how_rows_are_grouped_is_refused(make: Any, mode: str, words: str) -> None:
    trainer = cases.build(cases.OURS, PLAIN, cases.padmin(mode), make)
    before = cases.flat(trainer.model)
    with pytest.raises(GradientCheckError, match=words):
        trainer.train()
    assert torch.equal(cases.flat(trainer.model), before)


@pytest.mark.slow
def test_a_model_that_reads_padding_is_refused_at_the_first_window_that_has_some() -> None:
    class Full:
        """Prompts and completions without any padding, at first."""

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **options: Any) -> Any:
            self.generated = getattr(self, "generated", 0) + 1
            self.long_share = 1.0 if self.generated == 1 else 0.1
            return super()._generate_single_turn(prompt_ids, *args, **options)

    words = [" ".join(["w5"] * 6)] * 32
    data = cases.Dataset.from_dict({"prompt": words})
    trainer = cases.build(cases.trainers(outer=(Full,))[1], PLAIN, cases.padmin("split"), averaging, train_dataset=data)
    with pytest.raises(GradientCheckError, match=f"the model reads padding .* New in this window: .*{BEHIND}"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.slow
def test_positions_by_column_are_told_once_and_trained_as_rows_are_alone() -> None:
    with pytest.warns(PadMinWarning, match="left padding before prompts changes gradients of this model") as warned:
        found = train(cases.OURS, cases.padmin("split"), make=counting)
    assert len(found.gradients) == 4
    assert sum(issubclass(each.category, PadMinWarning) for each in warned) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split", "replay", "joint"])
def test_exact_models_pass_in_half_precision(mode: str) -> None:
    """Under autocast, with dropout and checkpointing: warnings are errors."""
    options = PLAIN | {"bf16": True, "gradient_checkpointing": True, "disable_dropout": False, "max_steps": 4}
    found = cases.run(cases.build(cases.OURS, options, cases.padmin(mode), lambda: cases.qwen2(attention_dropout=0.2)))
    audits = found.trainer._padmin._audits
    assert audits.ledger.audits >= 2
    assert audits.ledger.worst < 0.1


# What an audit leaves, and when it runs.


def test_audits_leave_nothing_and_are_few() -> None:
    """Gradients, metrics, and the random numbers that are drawn afterwards are those of a training without any."""
    options = PLAIN | {"max_steps": 6, "gradient_accumulation_steps": 1, "steps_per_generation": 1}
    drawn, found = {}, {}
    for check in ("audit", "off"):
        found[check] = cases.run(cases.build(cases.OURS, options, cases.padmin("split", check=check)))
        drawn[check] = torch.rand(3)
    assert torch.equal(drawn["audit"], drawn["off"])
    assert all(torch.equal(a, b) for a, b in zip(found["audit"].gradients, found["off"].gradients, strict=True))
    assert cases.metric_difference(found["audit"], found["off"])[0] == 0
    ledger = found["audit"].trainer._padmin._audits.ledger
    assert ledger.step == 6
    assert 2 <= ledger.audits <= 5
    assert ledger.worst < 1e-4


def test_a_late_fact_of_a_loss_is_looked_at_in_the_next_window() -> None:
    config = PadMinConfig(check="audit", audit_every=0)
    audits = Audits(config, Session("PadMinMixin", config).audits)
    leaf = torch.ones(3, requires_grad=True)
    plain, squared = audits.key_of(leaf.sum()), audits.key_of(leaf.mean() ** 2)

    def window(late: str) -> bool:
        audits.ask(lambda: {"'advantages': given"}, loss=True)
        due = audits.are_due(audits.wants())
        if due:
            audits.loss_is_open = False
            audits.passed(0.0, [late], loss=True, model=True)
        audits.heard(late)
        return due

    assert [window(key) for key in (plain, plain, plain, plain, squared, squared, squared)] == [
        True,  # step 1
        False,
        True,  # step 3
        False,
        False,  # its loss was not known before it ran
        True,
        False,
    ]


def test_what_padding_and_entries_show() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    assert token_facets(mask, 3) == {LEFT, BEHIND, "rows of several lengths"}
    assert token_facets(torch.ones(2, 5), 3) == set()
    inputs = {
        "prompt_ids": torch.zeros(2, 2, dtype=torch.long),
        "prompt_mask": mask[:, :2],
        "completion_ids": torch.zeros(2, 3, dtype=torch.long),
        "completion_mask": torch.tensor([[0, 0, 0], [1, 1, 1]]),
        "advantages": torch.tensor([0.0, -1.5]),
        "task": torch.tensor([3, 7]),
        "old_per_token_logps": None,
        "num_images": [0, 2],
    }
    assert window_facets([inputs]) == {
        LEFT,
        BEHIND,
        "rows of several lengths",
        "a row without completion tokens",
        "'advantages': given",
        "'advantages': a zero",
        "'advantages': a negative number",
        "'advantages': not all the same",
        "'task': 3",
        "'task': 7",
        "'num_images': none in a row",
        "'num_images': several in a row",
    }
