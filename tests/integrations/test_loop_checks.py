"""Losses in loops of one's own are checked by `pad.backward`, with Fabric and with Accelerate, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import support
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_padmin import PadMinConfig, PadMinWarning
from lightning_padmin.errors import ConfigError, GradientCheckError
from lightning_padmin.integrations.accelerate import PadMin
from lightning_padmin.integrations.common import Topology
from lightning_padmin.integrations.fabric import FabricPadMin, micro_batched_backward

Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]
CONFIG = PadMinConfig(token_budget=support.BUDGET, launch_cost=4)
STEPS = 6


class OfFabric:
    def __init__(self, model: nn.Module, config: PadMinConfig | None, window: int = 1) -> None:
        self.fabric, self.window = Fabric(accelerator="cpu", devices=1), window
        self.model, self.optimizer = self.fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.pad: Any = None if config is None else FabricPadMin(self.fabric, config)

    def batch(self, batch: Batch, index: int, loss: Loss) -> None:
        more = (index + 1) % self.window != 0
        if self.pad is None:
            self.fabric.backward(loss(self.model, batch) / self.window)
        else:
            self.pad.backward(
                batch, self.model, lambda micro: loss(self.model, micro) / self.window, is_accumulating=more
            )
        if not more:
            self.optimizer.step()
            self.optimizer.zero_grad()


class OfAccelerate:
    def __init__(self, model: nn.Module, config: PadMinConfig | None, window: int = 1) -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.pad: Any = None if config is None else PadMin(self.accelerator, config)

    def batch(self, batch: Batch, index: int, loss: Loss) -> None:
        with self.accelerator.accumulate(self.model):
            if self.pad is None:
                self.accelerator.backward(loss(self.model, batch))
            else:
                self.pad.backward(batch, self.model, lambda micro: loss(self.model, micro))
            self.optimizer.step()
            self.optimizer.zero_grad()


Made = Callable[..., Any]
MAKERS = [OfFabric, OfAccelerate]


class Net(nn.Module):
    """Counts its calls in a buffer, and drops states out."""

    padmin_per_call = ("calls", "called")

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.dropout = support.TinyLM().double(), nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))
        self.called = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        self.called += 1
        states = self.dropout(self.inner.rnn(self.inner.embedding(input_ids))[0])
        logits: Tensor = self.inner.head(states)
        return logits


def losses_of(model: Any, batch: Batch) -> Tensor:
    return support.token_losses(model(batch["input_ids"]), batch["labels"])


def token_mean(model: Any, batch: Batch) -> Tensor:
    return support.reduce_loss(losses_of(model, batch), batch["labels"], "token-mean")


def coupled(losses: Tensor) -> Tensor:
    return torch.logsumexp(losses.sum(1) / 10, 0)


def run(
    make: Made, loss: Callable[[int], Loss], config: PadMinConfig | None, batches: Sequence[Batch], **options: Any
) -> Any:
    """Trains; `loss` gives that of each step."""
    it = make(Net(options.pop("dropout", 0.0)), config, **options)
    it.before = []
    for index, batch in enumerate(batches):
        it.before.append(support.flat_parameters(it.model).clone())
        it.error = None
        try:
            it.batch(batch, index, loss(index))
        except GradientCheckError as error:
            it.error = str(error)
            break
    it.weights = support.flat_parameters(it.model)
    return it


def is_untouched(it: Any) -> bool:
    """Whether the refused batch has left nothing behind."""
    return torch.equal(it.weights, it.before[-1]) and all(p.grad is None for p in it.model.parameters())


def batches(count: int = STEPS) -> list[Batch]:
    return support.ragged_batches(count)


@pytest.mark.parametrize("make", MAKERS)
def test_a_wrong_reduction_is_refused_on_the_first_batch(make: Made) -> None:
    wrong = replace(CONFIG, loss_reduction="row-mean")
    found = run(make, lambda _: token_mean, wrong, batches(2))
    assert "set loss_reduction='token-mean'" in found.error
    assert len(found.before) == 1
    assert is_untouched(found)
    assert found.pad.stats.batches == 0
    with pytest.raises(GradientCheckError, match="loss_reduction='token-mean'"):  # however often it comes
        found.batch(batches()[1], 1, token_mean)
    off = run(make, lambda _: token_mean, replace(wrong, check="off"), batches(2))
    assert off.error is None
    assert support.relative(off.weights, run(make, lambda _: token_mean, None, batches(2)).weights) > 1e-3


@pytest.mark.parametrize("make", MAKERS)
def test_a_loss_that_couples_rows_is_refused_with_a_fix_for_loops(make: Made) -> None:
    found = run(make, lambda _: lambda model, batch: coupled(losses_of(model, batch)), CONFIG, batches(1))
    assert "PaddedForward in a loop over whole batches" in found.error
    assert "PadMinConfig(enabled=False)" in found.error
    assert is_untouched(found)


class Packs(nn.Module):
    """A recurrent model that is told lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.rnn = nn.Embedding(support.VOCABULARY, 8), nn.GRU(8, 8, batch_first=True)
        self.double()

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        embedded = self.embedding(input_ids)
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=input_ids.shape[1])
        return outputs + embedded


def pairs(model: Any, batch: Batch) -> Tensor:
    outputs, lengths = model(batch["input_ids"], batch["attention_mask"].sum(1)), batch["attention_mask"].sum(1)
    rows = (outputs * batch["attention_mask"].unsqueeze(-1)).sum(1) / lengths[:, None]
    return nn.functional.cross_entropy(10 * rows @ rows.T, torch.arange(len(rows)))


def reading(model: Any, batch: Batch) -> Tensor:
    """Compares rows, and takes what stands in padding into account."""
    return pairs(model, batch) + model(batch["input_ids"], batch["attention_mask"].sum(1)).sigmoid().mean()


@pytest.mark.parametrize("make", MAKERS)
def test_auto_goes_over_to_what_is_exact(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Net", lambda dropout: Packs())
    fits = replace(CONFIG, token_budget=240)
    for loss, mode in ((pairs, 1), (reading, 3)):
        stock = run(make, lambda _, loss=loss: loss, None, batches(3))
        said = "from step 1 on, model calls run in chunks" if mode == 1 else "batches run as they came"
        with pytest.warns(PadMinWarning, match=said):
            found = run(make, lambda _, loss=loss: loss, fits, batches(3))
        assert found.error is None
        assert support.relative(found.weights, stock.weights) <= 1e-12
        assert found.pad.metrics()["padmin/mode"] == mode
        stats = found.pad.stats
        assert (stats.batches, stats.rows, stats.slots_before) == (3, 30, 3 * 240)
        assert stats.slots < 400 if mode == 1 else stats.slots == 720
        if mode == 1:
            with pytest.warns(PadMinWarning, match="mode='replay' where a batch has more slots"):
                replayed = run(make, lambda _, loss=loss: loss, CONFIG, batches(3))
            assert replayed.error is None
            assert support.relative(replayed.weights, stock.weights) <= 1e-12
            assert replayed.pad.metrics()["padmin/mode"] == 2
        else:
            refused = run(make, lambda _, loss=loss: loss, CONFIG, batches(3))
            assert "one of 240 slots takes more memory" in refused.error
            assert is_untouched(refused)
        split = run(make, lambda _, loss=loss: loss, replace(CONFIG, check="off"), batches(3))
        assert support.relative(split.weights, stock.weights) > 1e-3


@pytest.mark.parametrize("make", MAKERS)
def test_checks_leave_nothing_behind(make: Made) -> None:
    """With dropout, a buffer, and figures in variables: as with check="off", to the last bit."""
    ends = []
    for check in ("audit", "off"):
        last, figures = 0.0, {"last": 0.0}

        def loss(model: Any, batch: Batch) -> Tensor:
            nonlocal last
            value = token_mean(model, batch)
            last = figures["last"] = float(value.detach())  # noqa: B023
            return value

        torch.manual_seed(5)
        it = run(make, lambda _, loss=loss: loss, replace(CONFIG, check=check), batches(), window=2, dropout=0.2)
        assert it.error is None
        inner = next(module for module in it.model.modules() if isinstance(module, Net))
        ends.append((it.weights, torch.get_rng_state(), inner.calls, it.pad.stats.state_dict()))
        ends[-1] += (last, figures, inner.called)
        ledger = it.pad._training(it.model).ledger
        assert {each.step for each in ledger.record} == {1, 3} if check == "audit" else ledger is None
    for mine, theirs in zip(*ends, strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs


@pytest.mark.parametrize("make", MAKERS)
def test_exact_losses_are_trained_as_stock(make: Made) -> None:
    data = [batch | {"kind": torch.tensor([k % 3] * 10)} for k, batch in enumerate(batches(8))]  # facets that come late

    def loss(index: int) -> Loss:
        if index == 6:  # another kind of loss, as exact as the first
            return lambda model, batch: 2 * token_mean(model, batch) + 0
        return token_mean

    stock, found = (run(make, loss, config, data, window=2) for config in (None, CONFIG))
    assert found.error is None
    assert support.relative(found.weights, stock.weights) <= 1e-12
    ledger = found.pad._training(found.model).ledger
    assert {each.step for each in ledger.record} == {1, 2, 3, 7}
    assert ledger.audits <= 7
    assert found.pad.stats.batches == 8
    with support.equal_weights():
        wrong = run(make, loss, replace(CONFIG, check="off"), data, window=2)
    assert support.relative(wrong.weights, stock.weights) > 1e-3


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", ["appears", "leaves 0"])
def test_a_term_that_comes_later_is_refused_before_the_optimizer_steps(make: Made, kind: str) -> None:
    def loss(index: int) -> Loss:
        def value(model: Any, batch: Batch) -> Tensor:
            losses = losses_of(model, batch)
            mean = support.reduce_loss(losses, batch["labels"], "token-mean")
            if kind == "appears":
                return mean + coupled(losses) if index >= 4 else mean
            return mean + (0.0 if index < 4 else 0.5) * coupled(losses)

        return value

    found = run(make, loss, CONFIG, batches())
    assert found.error.startswith("audit of step 5 (the first with another kind of loss")
    assert "step 3 had passed; 1 step since then is not undone" in found.error
    assert is_untouched(found)
    assert found.pad.stats.batches == 4
    found.batch(batches()[0], 5, token_mean)  # a loop that goes on with another loss is not in the way
    control = run(make, loss, replace(CONFIG, check="first-batch"), batches())
    assert control.error is None
    assert support.relative(control.weights, run(make, loss, None, batches()).weights) > 1e-3


@pytest.mark.parametrize("make", MAKERS)
def test_a_rare_class_that_comes_later_is_refused_before_its_batch(make: Made) -> None:
    data = [batch | {"kind": torch.zeros(10, dtype=torch.long)} for batch in batches()]
    data[4]["kind"][[3, 7]] = 2

    def loss(model: Any, batch: Batch) -> Tensor:
        weight = torch.tensor([1.0, 1.0, 20.0], dtype=torch.float64)[batch["kind"]][:, None]
        weight = weight * (batch["labels"][:, 1:] != -100)
        return (losses_of(model, batch) * weight).sum() / weight.sum()

    found = run(make, lambda _: loss, CONFIG, data)
    assert found.error.startswith("audit of step 5 (the first with 'kind' is 2")
    assert is_untouched(found)
    control = run(make, lambda _: loss, replace(CONFIG, check="first-batch"), data)
    assert control.error is None
    assert support.relative(control.weights, run(make, lambda _: loss, None, data).weights) > 1e-3


def test_each_loss_function_is_checked_on_its_first_batch() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup_module(Net())
    pad, data = FabricPadMin(fabric, CONFIG), batches(3)
    pad.backward(data[0], model, lambda micro: token_mean(model, micro))
    gradient = support.flat_gradient(model).clone()
    with pytest.raises(GradientCheckError, match=r"audit of step 2 \(the first with the loss of .*<lambda>.*line"):
        pad.backward(data[1], model, lambda micro: coupled(losses_of(model, micro)))
    # What had been accumulated before it stays.
    assert torch.equal(support.flat_gradient(model), gradient)
    pad.backward(data[2], model, lambda micro: token_mean(model, micro))


def test_loops_without_a_function_are_not_checked() -> None:
    """`micro_batches`, and calls that remember nothing."""
    fabric = Fabric(accelerator="cpu", devices=1)
    model, wrong = fabric.setup_module(Net()), replace(CONFIG, loss_reduction="row-mean")
    pad = FabricPadMin(fabric, wrong)
    for micro, weight in pad.micro_batches(batches()[0], model):
        fabric.backward(token_mean(model, micro) * weight)
    assert not pad._training(model).audit_is_due
    micro_batched_backward(fabric, model, batches()[0], lambda micro: token_mean(model, micro), wrong)
    with pytest.raises(GradientCheckError):
        pad.backward(batches()[0], model, lambda micro: token_mean(model, micro))


def test_accelerate_backward_switched_off_and_without_loss() -> None:
    it = OfAccelerate(Net(), PadMinConfig(enabled=False))
    batch = batches()[0]
    value = it.pad.backward(batch, it.model, lambda micro: token_mean(it.model, micro))
    stock = OfAccelerate(Net(), None)
    loss = token_mean(stock.model, batch)
    stock.accelerator.backward(loss)
    assert value == loss
    assert torch.equal(support.flat_gradient(it.model), support.flat_gradient(stock.model))
    it = OfAccelerate(Net(), CONFIG)
    empty = batch | {"labels": torch.full_like(batch["labels"], -100)}
    with pytest.warns(UserWarning, match="no loss tokens at all"):
        it.pad.backward(empty, it.model, lambda micro: token_mean(it.model, micro))
    assert (support.flat_gradient(it.model) == 0).all()
    with pytest.raises(ConfigError, match="loss_fn returned a"):
        it.pad.backward(batch, it.model, lambda micro: 1.0)


def test_where_an_engine_runs_backward_passes_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PadMin, "_topology", Topology(kind="engine"))
    it = OfAccelerate(Net(), replace(CONFIG, loss_reduction="row-mean"))
    first, second = batches(2)
    with pytest.warns(PadMinWarning, match=r"DeepSpeed.*not checked.*verify_equivalence"):
        it.batch(first, 0, token_mean)
    it.batch(second, 1, token_mean)  # a warning is an error here
