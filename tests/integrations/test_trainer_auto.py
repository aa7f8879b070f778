"""mode="auto" of PadMinTrainerMixin: split where that is exact, else joint where that is, else steps as they came.

Stock Trainers are the oracle, in float64: gradients at each step of the optimizer, weights, and all that is logged.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import joint_cases as cases
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import (
    BatchError,
    ConfigError,
    GradientCheckError,
    PadMinWarning,
    TrainingStepError,
)

EXACT = 1e-12
SLOTS = 240  # of the largest batch
AUTO = PadMinConfig(token_budget=SLOTS, launch_cost=4, pad_token_id=0)
SPLIT = replace(AUTO, mode="split")
JOINT, AS_IT_CAME = "model calls run in chunks", "batches run as they came"


def told_by(step: type | None, make: Any = cases.llama, padmin: Any = AUTO, **options: Any) -> tuple[list[str], Any]:
    """What is told of ways in a training whose gradients, parameters and logs are stock's."""
    stock = cases.train(step, make, None, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PadMinWarning)
        ours = cases.train(step, make, padmin, **options)
    assert cases.apart(ours, stock) <= EXACT
    assert float((ours.parameters - stock.parameters).abs().max()) <= EXACT
    words = [str(each.message) for each in caught if issubclass(each.category, PadMinWarning)]
    told = [each for each in words if "mode='auto'" in each]
    # What is logged of a window that was split is added up in float32.
    never_split = bool(told) and "from step 1 on" in told[0]
    assert cases.logs_apart(ours, stock) <= (EXACT if never_split else 1e-6)
    assert {"training_step", "compute_loss", "log"}.isdisjoint(vars(ours.trainer))
    assert "backward" not in vars(ours.trainer.accelerator)
    return told, ours


def way_of(ours: Any) -> str:
    way: str = ours.trainer._padmin._training.way
    return way


def halves(ours: Any) -> bool:
    """Whether at most half of the waste is left."""
    stats = ours.trainer.padding_stats
    return bool(stats.waste <= stats.waste_before / 2)


class Quiet(cases.Own):
    """Logs nothing itself."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        names = ("input_ids", "attention_mask")
        outputs = model(**{name: inputs[name] for name in names}, output_hidden_states=True)
        return self.loss_of(outputs, inputs)

    def pairs(self, outputs: Any, inputs: Any) -> Tensor:
        rows = cases.pooled(outputs, inputs["attention_mask"])
        return cross_entropy(rows @ rows.T, torch.arange(len(rows)))


class WarmUp(Quiet):
    """A coupled term whose coefficient leaves 0 in the middle."""

    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        share = max(0, self.state.global_step - 2) / 4
        return self.token_loss(outputs, inputs) + share * self.pairs(outputs, inputs)


def test_it_takes_what_is_exact() -> None:
    """By itself, with a coupled loss, and with a model that reads padding; each is told once."""
    told, ours = told_by(None, gradient_accumulation_steps=2, num_train_epochs=1)
    assert (told, way_of(ours)) == ([], "split")
    [words], ours = told_by(cases.Contrastive, num_train_epochs=1)
    assert f"from step 1 on, {JOINT}" in words
    assert halves(ours)
    assert ours.trainer._padmin._session.audits.metrics("")["mode"] == 1
    kind, collator = cases.QUESTIONS
    told, ours = told_by(None, lambda: cases.bert(kind), collator=collator, num_train_epochs=1)
    assert AS_IT_CAME in told[-1]
    assert way_of(ours) == "as it came"


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_term_that_comes_later(window: int) -> None:
    """Its batch runs jointly from the beginning; in the middle of a window too, whose steps have its divisor."""
    [words], ours = told_by(WarmUp, behind=True, gradient_accumulation_steps=window, num_train_epochs=3)
    assert JOINT in words
    assert "audit of step" in words
    assert "had passed" in words
    assert way_of(ours) == "joint"


def test_what_does_not_fit_is_refused_before_it_is_trained_on() -> None:
    small, (kind, collator) = replace(AUTO, token_budget=64), cases.QUESTIONS
    with pytest.raises(GradientCheckError, match=r"slots takes more memory than token_budget=64 allows: set token_bud"):
        cases.train(None, lambda: cases.bert(kind), padmin=small, collator=collator)
    with pytest.raises(GradientCheckError, match=r"Run the model in chunks with mode='joint'"):
        cases.train(cases.Flooding, padmin=SPLIT)


def refused(error: type[Exception], match: str, make: Any = cases.llama, **options: Any) -> None:
    """Before anything is trained on: weights are what they were, and there are no gradients."""
    kept: list[tuple[nn.Module, list[Tensor]]] = []

    def keep() -> nn.Module:
        model = make()
        kept.append((model, [p.detach().clone() for p in model.parameters()]))
        return model

    with pytest.raises(error, match=match):
        cases.train(make=keep, **options)
    [(model, weights)] = kept
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_too_large_a_batch_is_named_with_what_speaks_against_splitting_it() -> None:
    small, fix = replace(AUTO, token_budget=64), r".*token_budget=64 allows: set token_budget=240 or None"
    kind, collator = cases.QUESTIONS
    of_questions: Any = {"make": lambda: cases.bert(kind), "collator": collator}
    refused(GradientCheckError, f"first-batch check.*{fix}", step=None, padmin=small, **of_questions)
    refused(ConfigError, f"neftune_noise_alpha=5{fix}", step=None, padmin=small, neftune_noise_alpha=5)

    class Grows:
        def get_batch_samples(self, *args: Any, **options: Any) -> Any:
            batches, count = super().get_batch_samples(*args, **options)  # type: ignore[misc]
            rows = 4 if self.state.global_step < 3 else 8  # type: ignore[attr-defined]
            return [{name: each[:rows] for name, each in batch.items()} for batch in batches], count

    later = r"as they came by now.*240 slots, and token_budget=120"
    with pytest.warns(PadMinWarning, match=AS_IT_CAME), pytest.raises(BatchError, match=later):
        cases.train(Grows, padmin=replace(AUTO, token_budget=120), behind=True, **of_questions)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("step", [*cases.OWN, WarmUp])
def test_steps_of_ones_own(step: type, behind: bool) -> None:
    [words], ours = told_by(step, padmin=AUTO, behind=behind)
    assert JOINT in words
    assert halves(ours)


@pytest.mark.slow
@pytest.mark.parametrize("step", [*cases.OWN, WarmUp])
def test_split_is_another_training_or_is_refused(step: type) -> None:
    """The control."""
    try:
        found = cases.train(step, padmin=replace(SPLIT, check="off"), behind=True)
    except (TrainingStepError, ValueError, IndexError):
        return
    stock = cases.train(step, behind=True)
    assert cases.apart(found, stock) > 1e-3
    with pytest.raises(GradientCheckError):
        cases.train(step, padmin=SPLIT, behind=True)


@pytest.mark.slow
def test_windows() -> None:
    """The Trainer's number of targets goes to whole steps; a loss that is a mean of its own is divided as ever."""

    def coupled(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"][:, :-1].transpose(1, 2)
        weights = torch.linspace(0.1, 3, cases.VOCABULARY, dtype=logits.dtype)
        summed = cross_entropy(logits, labels[:, 1:], reduction="sum") / num_items_in_batch
        return summed + cross_entropy(logits, labels[:, 1:], weight=weights)

    for count in (2, 4):
        for step in (cases.Weighted, cases.Contrastive, cases.Adversarial):
            told, _ = told_by(step, gradient_accumulation_steps=count)
            assert [JOINT in words for words in told] == [True]
        assert told_by(None, gradient_accumulation_steps=count)[0] == []

    class Summed:
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, compute_loss_func=coupled)

    [words], ours = told_by(Summed, gradient_accumulation_steps=2, label_names=["labels"], collator=only_tokens)
    assert JOINT in words
    assert ours.trainer._padmin.pools is None


def only_tokens(samples: Any) -> dict[str, Tensor]:
    batch = cases.collate(samples)
    del batch["kind"]
    return batch


@pytest.mark.slow
def test_batches_that_no_schema_fits() -> None:
    undeclared = PadMinConfig(token_budget=None, launch_cost=4)
    for step, make, collator in (
        (None, lambda: cases.bert(cases.CHOICES[0]), cases.CHOICES[1]),
        (cases.Pairwise, cases.WithValues, cases.pairs),
        (cases.Masked, lambda: cases.bert(cases.QUESTIONS[0]), cases.QUESTIONS[1]),
    ):
        for window in (1, 2):
            told, ours = told_by(step, make, undeclared, collator=collator, gradient_accumulation_steps=window)
            assert [JOINT in words for words in told] == [True]
            assert halves(ours)
    kind, collator = cases.QUESTIONS
    told, ours = told_by(None, lambda: cases.bert(kind), replace(undeclared, check="off"), collator=collator)
    assert way_of(ours) == "as it came"  # since nothing would compare joint steps


class Twice:
    """A second loss at embeddings that were moved along the gradient of the first."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        weight = self.model.get_input_embeddings().weight
        kept = weight.data.clone()
        weight.data.add_(0.5 * weight.grad / weight.grad.norm())
        super().training_step(model, inputs, num_items_in_batch)
        weight.data.copy_(kept)
        return loss


class Clips:
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return loss


class Empties:
    """So that a window has the gradient of its last batch; told in its second one."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.zero_grad()
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss


class Bounds:
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        for p in model.parameters():
            p.data.clamp_(-0.03, 0.03)
        return loss


class Drops:
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = super().training_step(model, inputs)
        return loss


class Sends:
    """Its loss backward, past the accelerator: nothing can be compared."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        names = ("input_ids", "attention_mask", "labels")
        loss = model(**{name: each for name, each in inputs.items() if name in names}).loss
        loss = loss / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()


class Counts:
    calls = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.calls += 1
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("step", [Twice, Clips, Empties, Bounds, Drops, Sends, Counts])
def test_steps_that_act_on_gradients_behind_the_mixin(step: type, window: int) -> None:
    """The first of them is taken back, with what it has written, and runs whole; one that only counts is split."""
    told, ours = told_by(step, behind=True, collator=only_tokens, gradient_accumulation_steps=window)
    wanted = {Sends: "as it came", Counts: "split"}.get(step, "joint")
    if step is Empties and window == 1:  # nothing is there to be emptied, but by the parts before
        wanted = "joint"
    assert way_of(ours) == wanted
    assert len(told) == (wanted != "split")
    if wanted == "joint":
        with pytest.raises(TrainingStepError, match="in front of the mixin"):
            cases.train(step, padmin=SPLIT, behind=True, collator=only_tokens, gradient_accumulation_steps=window)


class Later(Quiet):
    """From the third step on."""

    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        loss = self.token_loss(outputs, inputs)
        return self.later(loss, inputs) if self.state.global_step > 2 else loss

    def later(self, loss: Tensor, inputs: Any) -> Tensor:
        raise NotImplementedError


class LogsLater(Later):
    def later(self, loss: Tensor, inputs: Any) -> Tensor:
        self.log({"seen": float(loss.detach())})
        return loss


class FailsLater(Later):
    def later(self, loss: Tensor, inputs: Any) -> Tensor:
        if len(inputs["input_ids"]) != self.args.per_device_train_batch_size:
            raise RuntimeError("a part of a batch")
        return loss


class FloodsLater(Later):
    def later(self, loss: Tensor, inputs: Any) -> Tensor:
        return (loss - 3.6).abs() + 3.6


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("step", [LogsLater, FailsLater, FloodsLater])
def test_what_begins_in_the_middle(step: type, window: int) -> None:
    [words], ours = told_by(step, behind=True, gradient_accumulation_steps=window, num_train_epochs=3)
    assert "from step 1 on" not in words
    assert way_of(ours) == "joint"
    if step is LogsLater:  # the control: once per part
        split = cases.train(step, padmin=SPLIT, behind=True, gradient_accumulation_steps=window, num_train_epochs=3)
        assert sum("seen" in each for each in split.logs) > sum("seen" in each for each in ours.logs) > 0


@pytest.mark.slow
def test_what_was_refused_by_name() -> None:
    """Hooks, noise by the width of a call, batch statistics, a balance loss, positions scaled by the longest row."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inner, self.norm, self.head = cases.llama(), nn.BatchNorm1d(16), nn.Linear(16, 3)
            self.double()

        def forward(self, input_ids: Tensor, attention_mask: Tensor, kind: Tensor, labels: Any = None) -> Any:
            outputs = self.inner(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
            return {"loss": cross_entropy(self.head(self.norm(cases.pooled(outputs, attention_mask))), kind)}

    def hooked() -> nn.Module:
        model = cases.llama()
        model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return model

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for make, options, way in (
        (hooked, {"collator": only_tokens}, "joint"),
        (cases.llama, {"collator": only_tokens, "neftune_noise_alpha": 5.0}, "as it came"),
        (Normalised, {}, "joint"),
        (lambda: cases.llama(rope_parameters=rope, max_position_embeddings=8), {"collator": only_tokens}, None),
    ):
        told, ours = told_by(None, make, **options)
        assert len(told) == 1
        assert way is None or way_of(ours) == way
        assert way != "joint" or halves(ours)


class ReadsLater(Quiet):
    """A coupled loss, and from the fifth step on what stands at padding."""

    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        loss = self.pairs(outputs, inputs)
        return loss + 0.1 * outputs.logits.mean() if self.state.global_step > 3 else loss


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2])
def test_what_reads_padding_later_runs_as_it_came_from_there(window: int) -> None:
    """The loss is looked at before it is sent backward, and taken once more; not where it leaves something behind."""
    told, ours = told_by(ReadsLater, num_train_epochs=4, gradient_accumulation_steps=window)
    assert [JOINT in told[0], AS_IT_CAME in told[1], len(told)] == [True, True, 2]
    assert way_of(ours) == "as it came"

    class Counts(ReadsLater):
        seen = 0

        def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
            self.seen += 1
            return super().loss_of(outputs, inputs)

    with pytest.warns(PadMinWarning, match=JOINT), pytest.raises(GradientCheckError, match="audit of step"):
        cases.train(Counts, padmin=AUTO, num_train_epochs=4, gradient_accumulation_steps=window)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2])
def test_what_a_loss_logs_itself(window: int) -> None:
    """Once for each batch, as ever, of a sum over the targets of a window; split, once per part."""

    class Logs:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            found = super().compute_loss(model, inputs, return_outputs, **options)
            self.log({"seen": float((found[0] if return_outputs else found).detach())})
            return found

    options = {"collator": only_tokens, "gradient_accumulation_steps": window}
    [words], ours = told_by(Logs, **options)
    assert "the loss logs 'seen' itself" in words
    [words], replayed = told_by(Logs, padmin=replace(AUTO, token_budget=64), **options)
    assert "mode='replay' where a batch has more slots" in words
    split = cases.train(Logs, padmin=replace(SPLIT, token_budget=64), **options)
    assert len(split.logs) > len(ours.logs) == len(replayed.logs)


class Pooled(nn.Module):
    """An encoder of one's own, packed, whose rows are compared with each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = Recurrent()
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, kind: Any = None, labels: Any = None) -> Any:
        return {"loss": cases.contrast(self.encoder(input_ids, attention_mask.sum(1)))}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(cases.VOCABULARY, 12), nn.GRU(12, 12, batch_first=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.cells(packed)
        hidden: Tensor = last[-1]
        return hidden


@pytest.mark.slow
def test_an_encoder_that_is_no_model_of_transformers() -> None:
    told, ours = told_by(None, Pooled)
    assert [JOINT in words for words in told] == [True]
    assert halves(ours)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["joint", "as it came"])
def test_a_checkpoint_keeps_the_way(way: str, tmp_path: Path) -> None:
    step, make, collator = (cases.Weighted, cases.llama, cases.collate)
    if way == "as it came":
        step, make, collator = None, lambda: cases.bert(cases.QUESTIONS[0]), cases.QUESTIONS[1]
    options = {"collator": collator, "save_strategy": "steps", "save_steps": 4, "output_dir": str(tmp_path)}
    with pytest.warns(PadMinWarning, match=JOINT if way == "joint" else AS_IT_CAME):
        whole = cases.train(step, make, AUTO, **options)
    saved = str(tmp_path / "checkpoint-4")
    # Nothing is told once more; and where batches have become too large meanwhile, they are replayed, or refused.
    again = cases.train(step, make, AUTO, resume=saved, **options)
    assert way_of(again) == way
    assert float((again.parameters - whole.parameters).abs().max()) <= EXACT
    assert again.trainer.state.log_history[-2]["padmin/mode"] == (1 if way == "joint" else 3)
    small = replace(AUTO, token_budget=64)
    if way == "joint":
        replayed = cases.train(step, make, small, resume=saved, **options)
        assert float((replayed.parameters - whole.parameters).abs().max()) <= EXACT
        return
    with pytest.raises(BatchError, match="token_budget=64"):
        cases.train(step, make, small, resume=saved, **options)
