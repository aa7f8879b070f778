"""mode="auto": split where that is exact, else joint where that is, else batches as they came, else a refusal."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from architectures import zoo
from support import (
    LENGTHS,
    Memory,
    Module,
    fit,
    fitted,
    make_batch,
    padmin,
    ragged_batches,
    relative,
    token_losses,
)
from torch import Tensor, nn
from torchmetrics import MeanMetric
from whole_batches import EXACT, OwnLoss, llama, mixtral, worst

from lightning_padmin.errors import BatchError, GradientCheckError, PadMinError, PadMinWarning

SLOTS = 240  # of a batch


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with zoo.quiet(), zoo.default_dtype(torch.float64), zoo.upcasts_to(torch.float64):
        yield


class Step(Module):
    """A model of transformers, whose step logs its loss and keeps a metric of it."""

    rate = 0.05

    def __init__(self) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=self.rate))
        self.model, self.mean = llama(), MeanMetric()

    def pooled(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        return (hidden * mask).sum(1) / mask.sum(1)

    def pairs(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        rows = self.pooled(hidden, batch)
        return nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    def of(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        losses, labels = token_losses(outputs.logits, batch["labels"]), batch["labels"][:, 1:]
        return losses.sum() / (labels != -100).sum()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        found = self.of(self.model(**inputs, output_hidden_states=True), batch)
        self.mean.update(found.detach(), weight=(batch["labels"][:, 1:] != -100).sum())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return found


class ClassWeights(Step):
    def of(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        weight = torch.linspace(0.1, 3, logits.shape[-1])
        return nn.functional.cross_entropy(logits, labels, weight=weight, ignore_index=-100)


class Contrastive(Step):
    def of(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return super().of(outputs, batch) + 0.5 * self.pairs(outputs.hidden_states[-1], batch)


class Flooding(Step):
    def of(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return (super().of(outputs, batch) - 3.13).abs() + 3.13


class Queue(Step):
    """Keeps pooled rows of earlier batches as negatives, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, 16))
        self.calls = 0

    def of(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        rows = self.pooled(outputs.hidden_states[-1], batch)
        found = super().of(outputs, batch) + (rows @ self.queue.T).logsumexp(1).mean() * 0.9**self.calls
        self.calls += 1
        self.queue = torch.cat([rows.detach().mean(0, keepdim=True), self.queue[:-1]])
        return found


class Teacher(Step):
    """An average of weights that each step advances, run beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def of(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)
            wanted = self.teacher(batch["input_ids"], batch["attention_mask"]).logits
        apart = ((outputs.logits - wanted) ** 2).mean(-1) * batch["attention_mask"]
        return super().of(outputs, batch) + apart.sum() / batch["attention_mask"].sum()


class Adversarial(Step):
    """A second pass on inputs that the gradient of the first one has moved (as in FreeLB)."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        mask, embedded = batch["attention_mask"], self.model.get_input_embeddings()(batch["input_ids"])
        shift = torch.zeros_like(embedded, requires_grad=True)
        first = self.of(self.model(inputs_embeds=embedded + shift, attention_mask=mask), batch)
        (slope,) = torch.autograd.grad(first, shift, retain_graph=True)
        moved = embedded + 0.05 * slope / slope.norm() * mask.unsqueeze(-1)
        second = self.of(self.model(inputs_embeds=moved, attention_mask=mask), batch)
        self.log("adversarial", second.detach())
        return first + second


class Attacked(Step):
    """The same on the embedding's weights (as in FGM), which the second pass alone has."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        weight = self.model.get_input_embeddings().weight
        found = self.of(self.model(**inputs), batch)
        (slope,) = torch.autograd.grad(found, weight, retain_graph=True)
        moved = {"model.embed_tokens.weight": weight + 0.05 * slope / slope.norm()}
        return found + self.of(torch.func.functional_call(self.model, moved, kwargs=inputs), batch)


class Adversaries(Step):
    """A discriminator with an optimizer and a schedule of its own, which the step advances."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.judge = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
        self.of_judge = torch.optim.Adam(self.judge.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.of_judge, 0.5)

    def of(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        rows = self.pooled(outputs.hidden_states[-1], batch)
        true = torch.linspace(-1, 1, rows.numel()).view_as(rows)
        self.of_judge.zero_grad()
        told = (
            nn.functional.softplus(-self.judge(true)).mean() + nn.functional.softplus(self.judge(rows.detach())).mean()
        )
        told.backward()
        self.of_judge.step()
        self.schedule.step()
        self.log("judge", told.detach())
        return super().of(outputs, batch) + nn.functional.softplus(-self.judge(rows)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=self.rate)


class Clipped(Step):
    """A hook that clips the gradient of one parameter, so that it makes something else of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))


class OwnBackward(Step):
    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1e-3)


class SquaredInBackward(Step):
    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        (loss**2).backward()


class ScaledInBackward(Step):
    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        (3 * loss).backward()


class WarmedUp(Step):
    """A contrastive term that is 0 until the fourth batch."""

    begins = 3

    def of(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        found = super().of(outputs, batch)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx >= self.begins:
            found = found + 0.5 * self.pairs(outputs.hidden_states[-1], batch)
        return found


class ReadsPadding(Step):
    def of(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return super().of(outputs, batch) + outputs.hidden_states[-1].mean()


def values(memory: Memory) -> list[dict[str, float]]:
    rows = [{name: v for name, v in row.items() if not name.startswith("padmin")} for _, row in memory.rows]
    return [row for row in rows if row]


def modes(memory: Memory) -> list[float]:
    return [row["padmin/mode"] for _, row in memory.rows if "padmin/mode" in row]


def compare(kind: type[Step], said: str | None, count: int = 4, budget: int | None = SLOTS, **options: Any) -> Memory:
    batches = ragged_batches(count)
    stock, ours, callback = kind(), kind(), padmin(token_budget=budget)
    wanted = fitted(stock, batches, log_every_n_steps=1, **options)
    if said is None:
        found = fitted(ours, batches, callback, log_every_n_steps=1, **options)
    else:
        with pytest.warns(PadMinWarning, match=said) as told:
            found = fitted(ours, batches, callback, log_every_n_steps=1, **options)
        assert sum("mode='auto'" in str(each.message) for each in told) == 1
    assert worst(ours, stock) <= EXACT
    assert callback.stats.batches == count
    for mine, theirs in zip(values(found), values(wanted), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-11)
    return found


JOINT = "from step 1 on, model calls run in chunks"
CASES: dict[type[Step], tuple[str | None, float]] = {
    Step: (None, 0),
    ClassWeights: (JOINT, 1),
    Contrastive: (JOINT, 1),
    Flooding: (r"from step \d on, model calls run in chunks", 1),
    Queue: (JOINT, 1),
    Teacher: (JOINT, 1),
    Adversarial: (JOINT, 1),
    Adversaries: (JOINT, 1),
    Attacked: (JOINT, 1),
    Clipped: (JOINT, 1),
    OwnBackward: (JOINT, 1),
    SquaredInBackward: (JOINT, 1),
    ScaledInBackward: (None, 0),
    ReadsPadding: ("from step 1 on, batches run as they came", 3),
}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_it_takes_what_is_exact(kind: type[Step]) -> None:
    """Gradients and all that is logged as in stock, with the way that is told; controls below."""
    said, mode = CASES[kind]
    found = compare(kind, said)
    assert modes(found)[-1] == mode


@pytest.mark.parametrize("kind", [ClassWeights, Contrastive, ReadsPadding], ids=lambda kind: kind.__name__)
def test_an_explicit_way_raises(kind: type[Step]) -> None:
    """And forced, it trains something else: what `compare` would see."""
    batches = ragged_batches(2)
    mode: Any = "joint" if kind is ReadsPadding else "split"
    with pytest.raises(GradientCheckError):
        fit(kind(), batches, padmin(mode=mode, token_budget=SLOTS))
    stock, forced = kind(), kind()
    fit(stock, batches)
    fit(forced, batches, padmin(mode=mode, token_budget=48, check="off"))
    assert worst(forced, stock) > 1e-3


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("begins", [3, 4])
def test_a_term_that_comes_later(begins: int, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch in which it comes runs joint from its beginning, in the middle of a window too."""
    monkeypatch.setattr(WarmedUp, "begins", begins)
    said = rf"from step {begins + 1} on, model calls.*audit of step {begins + 1} .*step 3 had passed"
    found = compare(WarmedUp, said, 8, accumulate_grad_batches=accumulate)
    assert modes(found) == sorted(modes(found))
    assert {modes(found)[0], modes(found)[-1]} == {0, 1}


def test_what_does_not_fit_is_refused_before_it_is_trained_on() -> None:
    module = ReadsPadding()
    with pytest.raises(GradientCheckError, match=rf"one of {SLOTS} slots .*token_budget=48.*token_budget={SLOTS}"):
        fit(module, ragged_batches(2), padmin(token_budget=48))
    assert not module.gradients
    later = ReadsPadding()
    batches = [*ragged_batches(2), make_batch([30, *LENGTHS[1:]])]
    came = pytest.warns(PadMinWarning, match="as they came")
    with came, pytest.raises(BatchError, match="300 slots, and token_budget=240"):
        fit(later, batches, padmin(token_budget=SLOTS))
    assert len(later.gradients) == 2
    compare(ReadsPadding, "as they came", 2, budget=None)


@pytest.mark.slow
def test_a_term_that_comes_at_step_51_of_200() -> None:
    """With steps so small that stock on rows in another order ends where stock does, too."""
    said = r"from step 51 on, model calls.*audit of step 51 .*step 30 had passed.*20 steps since then are not undone"
    with mock.patch.multiple(WarmedUp, begins=50, rate=0.002):
        found = compare(WarmedUp, said, 200)
    assert modes(found) == [0] * 50 + [1] * 150


@pytest.mark.parametrize("kind", [Contrastive, Teacher, WarmedUp, Adversarial], ids=lambda kind: kind.__name__)
def test_larger_batches_are_replayed(kind: type[Step]) -> None:
    """They keep the activations of one chunk, so the budget bounds them."""
    found = compare(kind, r"from step \d on, model calls .* mode='replay' where a batch has more slots", 5, budget=48)
    assert modes(found)[-1] == 2
    assert set(modes(found)) <= {0, 2}


def test_a_model_that_is_another_one_by_the_backward_pass_is_not_replayed() -> None:
    """Chunks would run again with other weights."""
    with pytest.raises(GradientCheckError, match=r"joint gradients of 6 rows differ.*token_budget=48 allows"):
        fit(Attacked(), ragged_batches(1), padmin(token_budget=48))


def test_each_batch_decides_by_its_size() -> None:
    batches = [*ragged_batches(2), make_batch([30, *LENGTHS[1:]]), *ragged_batches(1)]
    stock, ours = Contrastive(), Contrastive()
    fit(stock, batches)
    with pytest.warns(PadMinWarning, match=JOINT):
        memory = fitted(ours, batches, padmin(token_budget=SLOTS), log_every_n_steps=1)
    assert worst(ours, stock) <= EXACT
    assert modes(memory) == [1, 1, 2, 1]


def test_a_call_that_cannot_be_replayed_is_refused() -> None:
    """In a batch that fits it runs as it came; in a larger one it would take the memory of all of it."""

    class Hooked(Contrastive):
        def __init__(self) -> None:
            super().__init__()
            self.model.model.layers[0].register_forward_hook(lambda *args: None)

    with pytest.raises(GradientCheckError, match=r"has a forward hook.*240 slots.*token_budget=48 allows: set"):
        fit(Hooked(), ragged_batches(1), padmin(token_budget=48))


def test_experts_begin_jointly() -> None:
    stock, ours = OwnLoss(mixtral), OwnLoss(mixtral)
    batches = ragged_batches(2)
    fit(stock, batches)
    with pytest.warns(PadMinWarning, match="from step .*since otherwise training would change: .*balance loss"):
        fit(ours, batches, padmin(token_budget=SLOTS))
    assert worst(ours, stock) <= EXACT


def test_a_wrong_declaration_is_an_error() -> None:
    with pytest.raises(GradientCheckError, match="set loss_reduction='token-mean'"):
        fit(Step(), ragged_batches(2), padmin(token_budget=SLOTS, loss_reduction="row-mean"))


def test_the_way_is_kept_with_the_callback() -> None:
    """A training that goes on begins where it was: its first batch is checked on that way."""
    batches, whole, first, second = ragged_batches(6), Contrastive(), Contrastive(), Contrastive()
    fit(whole, batches)
    callback, resumed = padmin(token_budget=SLOTS), padmin(token_budget=SLOTS)
    with pytest.warns(PadMinWarning, match=JOINT):
        fit(first, batches[:3], callback)
    state = callback.state_dict()
    assert [each["way"] for each in state["audits"]] == ["joint"]
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(state)
    fit(second, batches[3:], resumed)
    found = [*first.gradients, *second.gradients]
    assert max(relative(a, b) for a, b in zip(found, whole.gradients, strict=True)) <= EXACT
    assert resumed.stats.slots < 0.7 * resumed.stats.slots_before
    state["audits"][0]["way"] = "sideways"
    with pytest.raises(PadMinError, match="way='sideways': expected one of 'split'"):
        resumed.load_state_dict(state)


@pytest.mark.slow
def test_compiled_models_keep_the_way_of_the_first_batch() -> None:
    class Compiled(WarmedUp):
        def __init__(self) -> None:
            super().__init__()
            self.model.model.layers[0].compile(backend="eager")

    with pytest.raises(GradientCheckError, match=r"keeps the way of the first batch here \(\w+ is compiled\)"):
        fit(Compiled(), ragged_batches(5), padmin(token_budget=SLOTS))


def test_what_cannot_run_in_chunks_runs_as_it_came() -> None:
    """A module without a model of transformers."""

    class Plain(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            return torch.logsumexp(token_losses(self.model(batch["input_ids"]), batch["labels"]).sum(1) / 10, 0)

    stock, ours, callback = Plain(), Plain(), padmin(token_budget=SLOTS)
    fit(stock, ragged_batches(2))
    with pytest.warns(PadMinWarning, match="batches run as they came, padding and all"):
        fit(ours, ragged_batches(2), callback)
    assert worst(ours, stock) == 0
    assert callback.stats.slots == callback.stats.slots_before == 2 * SLOTS
