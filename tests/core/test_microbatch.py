"""Micro-batches: gradients of the un-split batch, budgets, one copy to the host, and what a training loop calls."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import strategies
import support
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import TinyLM, make_batch, relative
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_padmin import (
    Field,
    MicroBatch,
    MicroBatcher,
    PadMinConfig,
    PadMinWarning,
    compact,
    iter_micro_batches,
    sync_on_last,
)
from lightning_padmin.errors import BatchError, ConfigError, SchemaError
from lightning_padmin.microbatching.padded_layout import SlotMap

EXACT = 1e-9  # float64, relative to the largest gradient
Batch = dict[str, Tensor]


# --- Gradients. ---


class Bigram(nn.Module):
    """Linear in its parameters: the logits of a token are a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(support.VOCABULARY, support.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def batch_loss(model: nn.Module, batch: Batch, how: str) -> Tensor:
    losses = support.token_losses(model(batch["input_ids"]), batch["labels"])
    if how == "function":
        return (batch["u"] * losses.sum(1)).sum() / batch["u"].sum()
    return support.reduce_loss(losses, batch["labels"], how)


def gradient(model: nn.Module, batches: Sequence[tuple[Batch, float]], how: str) -> Tensor:
    """Of the sum of the weighted losses."""
    model.zero_grad()
    for batch, weight in batches:
        (batch_loss(model, batch, how) * weight).backward()
    return support.flat_gradient(model)


def rows_alone(batch: Batch) -> list[Batch]:
    """Each row without any padding, cut by hand."""
    alone = []
    for row, mask in enumerate(batch["attention_mask"].tolist()):
        real = [column for column, value in enumerate(mask) if value]
        part = {name: batch[name][[row], real[0] : real[-1] + 1] for name in ("input_ids", "labels")}
        alone.append(part | ({"u": batch["u"][[row]]} if "u" in batch else {}))
    return alone


def gradient_of_rows_alone(model: nn.Module, batch: Batch, how: str) -> Tensor:
    """The batch's loss written out over rows that were never padded."""
    alone = rows_alone(batch)
    tokens = [float((part["labels"][:, 1:] != -100).sum()) for part in alone]
    weights = {"token-mean": tokens, "row-mean": [1.0] * len(alone), "sum": [1.0] * len(alone)}
    if how == "function":
        weights["function"] = batch["u"].tolist()
    shares = [weight / (1 if how == "sum" else sum(weights[how])) for weight in weights[how]]
    return gradient(model, [(part, share) for part, share in zip(alone, shares, strict=True) if share], how)


def config_of(how: str, **options: Any) -> PadMinConfig:
    reduction = (lambda batch: batch["u"]) if how == "function" else how
    return PadMinConfig(loss_reduction=reduction, batch_schema={"u": "row"}, **options)


@pytest.mark.parametrize("how", ["token-mean", "row-mean", "sum", "function"])
@pytest.mark.parametrize("kind", [TinyLM, Bigram])
def test_weighted_gradients_sum_to_those_of_the_whole_batch(how: str, kind: type[nn.Module]) -> None:
    model, splits = model_of(kind), []

    @settings(max_examples=50, deadline=None)
    @given(strategies.batches(), st.integers(1, 30), st.integers(0, 20), st.integers(1, 3), st.data())
    def check(batch: Batch, budget: int, launch_cost: int, multiple: int, data: st.DataObject) -> None:
        rows = len(batch["labels"])
        batch["u"] = torch.tensor(
            data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=rows, max_size=rows))
        )
        assume((batch["labels"] != -100).any() and batch["u"].sum() > 0)
        config = config_of(how, token_budget=budget, launch_cost=launch_cost, pad_to_multiple_of=multiple)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PadMinWarning)  # rows over budget
            micro_batches = MicroBatcher(config).prepare(batch)
        splits.append(len(micro_batches))
        split = gradient(model, [tuple(micro) for micro in micro_batches], how)
        whole = gradient(model, [(compact(batch, config_of(how)).batch, 1.0)], how)
        alone = gradient_of_rows_alone(model, batch, how)
        scale = alone.abs().max()
        assert torch.isfinite(split).all()
        assert (whole - alone).abs().max() <= EXACT * scale + 1e-15
        assert (split - alone).abs().max() <= EXACT * scale + 1e-15
        assert micro_batches.shares.sum() == pytest.approx(1, abs=1e-12)
        assert micro_batches.weights.sum() == pytest.approx(len(micro_batches) if how == "sum" else 1, abs=1e-12)

    check()
    assert max(splits) >= 3, "nothing was split, so nothing was tested"


@pytest.mark.parametrize("how", ["token-mean", "row-mean"])
def test_equal_weights_for_micro_batches_train_something_else(how: str) -> None:
    """The control of the test above: with 1/K in place of the weights it fails by far."""
    model, batch = model_of(TinyLM), make_batch([24, 4, 3, 3, 2, 2], prompt=1)
    micro_batches = MicroBatcher(config_of(how, token_budget=24, launch_cost=0)).prepare(batch)
    truth = gradient_of_rows_alone(model, batch, how)
    assert relative(gradient(model, [tuple(micro) for micro in micro_batches], how), truth) <= EXACT
    equal = [(micro.batch, 1 / len(micro_batches)) for micro in micro_batches]
    assert len(equal) > 1
    assert relative(gradient(model, equal, how), truth) > 0.1


def test_left_padding_is_taken_away_and_would_have_mattered() -> None:
    lengths = [9, 3, 5, 2, 7]
    batch = make_batch(lengths, left=[9 - length for length in lengths])
    model = model_of(TinyLM)
    truth = gradient_of_rows_alone(model, batch, "token-mean")
    for budget in (9, 20, 1000):
        micro_batches = iter_micro_batches(batch, PadMinConfig(token_budget=budget, launch_cost=0))
        assert relative(gradient(model, [tuple(micro) for micro in micro_batches], "token-mean"), truth) <= EXACT
    stock = gradient(model, [(batch, 1.0)], "token-mean")
    assert relative(stock, truth) > 0.1, "the model does not see left padding, so nothing was tested"


def test_a_recurrent_state_takes_in_no_padding() -> None:
    """h = h / 2 + x with 1 as the padding: two pads, then 2 and 4, end in 5.375 instead of 5."""

    def states(ids: Tensor) -> list[float]:
        state, found = torch.zeros(len(ids)), []
        for column in ids.T:
            state = state / 2 + column
            found.append(state[0].item())
        return found

    batch = {"input_ids": torch.tensor([[1, 1, 2, 4]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    assert states(batch["input_ids"])[2:] == [2.75, 5.375]
    assert states(compact(batch).batch["input_ids"]) == [2.0, 5.0]


def test_learned_positions_are_those_of_the_row_alone() -> None:
    """A model that numbers its columns itself: left padding moves every token, the roll moves it back."""

    class Positioned(Bigram):
        def forward(self, input_ids: Tensor) -> Tensor:
            return self.table(input_ids) + self.table.weight[: input_ids.shape[1]]

    batch, model = make_batch([2, 4, 3], left=[2, 0, 1]), model_of(Positioned)
    truth = gradient_of_rows_alone(model, batch, "token-mean")
    micro_batches = iter_micro_batches(batch, PadMinConfig(token_budget=4, launch_cost=0))
    assert relative(gradient(model, [tuple(micro) for micro in micro_batches], "token-mean"), truth) <= EXACT
    assert relative(gradient(model, [(batch, 1.0)], "token-mean"), truth) > 0.1


def test_a_mean_over_rows_of_unequal_micro_batches() -> None:
    """Losses 0.3, 0.6, 0.9 in one micro-batch and 2.0 in another: 3.8 / 4, not the mean of the two means."""
    losses = torch.tensor([0.3, 0.6, 2.0, 0.9], dtype=torch.float64)
    batch = make_batch([2, 3, 9, 3]) | {"loss": losses}
    micro_batches = MicroBatcher(PadMinConfig(token_budget=9, launch_cost=4, loss_reduction="row-mean")).prepare(batch)
    assert [micro.rows.tolist() for micro in micro_batches] == [[2], [1, 3, 0]]
    assert sum(micro["loss"].mean() * weight for micro, weight in micro_batches) == pytest.approx(0.95)
    assert sum(micro["loss"].mean() / 2 for micro, _ in micro_batches) == pytest.approx(1.3)


def test_labels_that_are_shifted_already() -> None:
    model = model_of(TinyLM)

    def loss(batch: Batch) -> Tensor:
        logits = model(batch["input_ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    batch = make_batch([7, 3, 3, 5, 4])
    shifted = torch.full_like(batch["labels"], -100)
    shifted[:, :-1] = batch["labels"][:, 1:]
    truth = gradient_of_rows_alone(model, batch, "token-mean")
    for shift, exact in ((0, True), (1, False)):
        model.zero_grad()
        for micro, weight in iter_micro_batches(
            batch | {"labels": shifted}, PadMinConfig(token_budget=7, label_shift=shift)
        ):
            (loss(micro) * weight).backward()
        assert (relative(support.flat_gradient(model), truth) <= EXACT) is exact


def test_a_weighted_loss_mask() -> None:
    model = model_of(TinyLM)

    def loss(batch: Batch) -> Tensor:
        losses = support.token_losses(model(batch["input_ids"]), batch["labels"])
        return (losses * batch["w"][:, 1:]).sum() / batch["w"][:, 1:].sum()

    batch = make_batch([7, 2, 3, 5, 2], left=[0, 1, 0, 2, 5], prompt=1)
    batch["w"] = batch["labels"].ne(-100) * torch.rand(batch["labels"].shape).double()
    whole = compact(batch, PadMinConfig(loss_mask_key="w")).batch
    truth = torch.autograd.grad(loss(whole), list(model.parameters()))
    model.zero_grad()
    for micro, weight in iter_micro_batches(batch, PadMinConfig(token_budget=7, launch_cost=0, loss_mask_key="w")):
        (loss(micro) * weight).backward()
    assert relative(support.flat_gradient(model), torch.cat([g.flatten() for g in truth])) <= EXACT


def test_an_encoder_decoder_batch() -> None:
    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = TinyLM(), TinyLM()

        def forward(self, batch: Batch) -> Tensor:
            """The encoder's states at real tokens are summed, so padding does not matter."""
            states = (self.encoder(batch["input_ids"]) * batch["attention_mask"][..., None]).sum(1, keepdim=True)
            inputs = nn.functional.pad(batch["labels"].clamp(min=0), (1, -1))
            logits = self.decoder(inputs) + states
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    model = Seq2Seq().double()
    batch = make_batch([9, 3, 5, 2])
    labels = make_batch([2, 6, 1, 5], seed=1)["labels"]
    labels = torch.where(make_batch([2, 6, 1, 5])["attention_mask"] != 0, labels.clamp(min=1), -100)
    batch["labels"] = labels
    truth = torch.cat([g.flatten() for g in torch.autograd.grad(model(batch), list(model.parameters()))])
    micro_batches = MicroBatcher(PadMinConfig(token_budget=15, launch_cost=0), encoder_decoder=True).prepare(batch)
    assert len(micro_batches) >= 3
    for micro, weight in micro_batches:
        (model(micro) * weight).backward()
    assert relative(support.flat_gradient(model), truth) <= EXACT
    assert micro_batches.stats.longest_row == 11
    assert micro_batches.stats.slots_before == 4 * (9 + 6)


def test_gradients_of_inputs_reach_the_callers_tensor() -> None:
    """Embeddings that a frozen front end computed for the whole batch."""
    base = make_batch([5, 2, 3], left=[0, 3, 1])
    embeddings = torch.rand(3, 5, 4, dtype=torch.float64, requires_grad=True)
    batch = {"attention_mask": base["attention_mask"], "labels": base["labels"], "inputs_embeds": embeddings}
    for micro, weight in iter_micro_batches(batch, PadMinConfig(token_budget=5, launch_cost=0)):
        ((micro["inputs_embeds"] * micro["attention_mask"][..., None]).sum() * weight).backward()
    assert embeddings.grad is not None
    per_row = {0: 4 / 7, 1: 1 / 7, 2: 2 / 7}
    wanted = torch.stack([base["attention_mask"][row] * share for row, share in per_row.items()])
    assert torch.allclose(embeddings.grad, wanted[..., None].expand(-1, -1, 4).double())


# --- Batches without loss. ---


def test_rows_without_loss_ride_along() -> None:
    batch = make_batch([8, 8, 8, 2, 2, 2], without_loss=[0, 1, 4])
    micro_batches = MicroBatcher(PadMinConfig(token_budget=24, launch_cost=0)).prepare(batch)
    assert len(micro_batches) > 1
    assert (micro_batches.weights > 0).all()
    for micro in micro_batches:
        assert (micro.batch["labels"][:, 1:] != -100).any()


@pytest.mark.parametrize("how", ["token-mean", "row-mean", "sum"])
def test_a_whole_batch_without_loss(how: str) -> None:
    batcher = MicroBatcher(PadMinConfig(token_budget=6, launch_cost=0, loss_reduction=how))
    empty = make_batch([6, 3, 3], without_loss=range(3))
    with pytest.warns(PadMinWarning, match="a batch has no loss tokens at all"):
        micro_batches = batcher.prepare(empty)
    assert not micro_batches.table.has_loss
    assert micro_batches.shares.tolist() == pytest.approx([1 / 3, 2 / 3])
    weights = {"token-mean": [1 / 3, 2 / 3], "row-mean": [1 / 3, 2 / 3], "sum": [1, 1]}[how]
    assert micro_batches.weights.tolist() == pytest.approx(weights)
    batcher.prepare(empty)  # told once: a second warning would be an error here


def test_weights_of_tiny_and_huge_totals() -> None:
    for scale in (1e-300, 1e300):
        batch = make_batch([4, 3, 2]) | {"u": torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64) * scale}
        config = config_of("function", token_budget=4, launch_cost=0)
        assert MicroBatcher(config).prepare(batch).weights.tolist() == [0.25, 0.5, 0.25]


# --- Budgets. ---


@pytest.mark.filterwarnings("ignore:a batch has no loss tokens")
@settings(max_examples=60, deadline=None)
@given(strategies.batches(), st.integers(1, 5), st.sampled_from([None, 0]), st.integers(0, 10))
def test_without_a_budget_nothing_takes_more_than_the_batch_did(
    batch: Batch, multiple: int, pad_token_id: int | None, launch_cost: int
) -> None:
    options = {"pad_to_multiple_of": multiple, "pad_token_id": pad_token_id, "launch_cost": launch_cost}
    micro_batches = MicroBatcher(PadMinConfig(token_budget=None, loss_reduction="row-mean", **options)).prepare(batch)
    rows, width = batch["labels"].shape
    width = width if pad_token_id is None else -(-width // multiple) * multiple
    slots = [micro.batch["labels"].numel() for micro in micro_batches]
    assert max(slots) <= rows * width
    assert sum(slots) <= rows * width
    assert sum(slots) == micro_batches.stats.slots == micro_batches.plan.slots
    assert micro_batches.stats.over_budget_rows == 0


def test_without_a_budget_slots_fall() -> None:
    for options in ({}, {"pad_to_multiple_of": 8}, {"pad_to_multiple_of": 8, "pad_token_id": 0}):
        micro_batches = MicroBatcher(PadMinConfig(token_budget=None, launch_cost=8, **options)).prepare(
            make_batch([40, 3, 3, 2])
        )
        assert micro_batches.stats.slots_before == 160
        assert micro_batches.stats.slots <= 64
        assert len(micro_batches) == 2


def test_the_widest_micro_batch_runs_first_and_all_keep_to_the_budget() -> None:
    micro_batches = list(
        iter_micro_batches(make_batch([3, 17, 9, 4, 11, 2]), PadMinConfig(token_budget=20, launch_cost=0))
    )
    widths = [micro.batch["labels"].shape[1] for micro in micro_batches]
    assert widths == sorted(widths, reverse=True)
    assert all(micro.batch["labels"].numel() <= 20 for micro in micro_batches)


def test_a_row_over_the_budget_runs_alone_with_one_warning() -> None:
    with pytest.warns(PadMinWarning) as caught:
        micro_batches = list(iter_micro_batches(make_batch([30, 4, 4]), PadMinConfig(token_budget=16, launch_cost=1)))
    assert len(caught) == 1
    assert [micro.rows.tolist() for micro in micro_batches] == [[0], [1, 2]]
    list(iter_micro_batches(make_batch([16, 4, 4]), PadMinConfig(token_budget=16)))  # fits: a warning would be an error


def test_one_long_row_does_not_widen_the_others() -> None:
    """48 real tokens in 160 slots; in two micro-batches 49."""
    stats = MicroBatcher(PadMinConfig(token_budget=40, launch_cost=5)).prepare(make_batch([2, 3, 3, 40])).stats
    assert (stats.slots_before, stats.slots, stats.real_tokens, stats.micro_batches) == (160, 49, 48, 2)


# --- The device. ---


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for the device: copies to the host, and shapes that depend on values."""

    names = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "item", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in self.names or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def host_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the calls that copy from the device or wait for it (on a CPU they cost nothing, but are the same)."""
    with monkeypatch.context() as patch, Waits() as waits:
        for name in ("cpu", "tolist", "item", "numpy"):
            stock = getattr(Tensor, name)

            def counted(tensor: Tensor, *args: Any, _stock: Any = stock, _name: str = name, **kwargs: Any) -> Any:
                if _name != "numpy":  # of a tensor that is on the host already
                    waits.found.append(_name)
                return _stock(tensor, *args, **kwargs)

            patch.setattr(Tensor, name, counted)
        yield waits.found


def full_batch() -> dict[str, Any]:
    """Two axes, every kind of entry."""
    return make_batch([9, 3, 5, 2], left=[0, 2, 4, 7]) | {
        "decoder_attention_mask": torch.ones(4, 5, dtype=torch.int64),
        "labels": torch.ones(4, 5, dtype=torch.int64),
        "loss_mask": torch.ones(4, 5),
        "position_ids": torch.arange(9).expand(3, 4, 9).clone(),
        "names": ["a", "b", "c", "d"],
        "num_images": torch.tensor([1, 0, 2, 1]),
        "grid": torch.tensor([[1, 2], [2, 2], [1, 1], [3, 1]]),
        "pixels": torch.rand(10, 3),
    }


def test_one_copy_to_the_host_per_batch_and_none_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    units = {"grid": Field("unit", counts="num_images"), "pixels": Field("unit", counts="grid")}
    options: dict[str, Any] = {"token_budget": 14, "launch_cost": 0, "batch_schema": units}
    for how in ("token-mean", lambda batch: batch["loss_mask"].sum(1)):
        config = PadMinConfig(loss_mask_key="loss_mask", loss_reduction=how, **options)
        batch = full_batch()
        with host_copies(monkeypatch) as found:
            micro_batches = MicroBatcher(config).prepare(batch)
            assert found == ["cpu"]
            assert len(list(micro_batches)) >= 3
            outputs = [micro.batch["attention_mask"][..., None].float() for micro in micro_batches]
            micro_batches.restore(outputs)
            micro_batches.restore_rows([output.sum(1) for output in outputs])
            assert found == ["cpu"]


def test_the_counter_of_copies_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.tensor([1, 0, 2])
    calls: list[Callable[[], Any]] = [
        lambda: tensor.sum().item(),
        lambda: tensor.tolist(),
        lambda: tensor.cpu(),
        lambda: bool(tensor.any()),
        lambda: int(tensor[0]),
        lambda: tensor[tensor > 0],
        lambda: tensor.nonzero(),
    ]
    for call in calls:
        with host_copies(monkeypatch) as found:
            call()
        assert found
    with host_copies(monkeypatch) as found:
        (tensor + tensor[[2, 0, 1]]).numpy()
    assert not found


# --- A sequence of micro-batches. ---


def test_it_is_a_sequence() -> None:
    batch = make_batch([6, 5, 2, 3])
    micro_batches = MicroBatcher(PadMinConfig(token_budget=6, launch_cost=1)).prepare(batch)
    assert [micro.rows.tolist() for micro in micro_batches] == [[0], [1], [3, 2]]
    assert (len(micro_batches), micro_batches[-1].rows.tolist()) == (3, [3, 2])
    assert [(micro.index, micro.count, micro.is_last, micro.is_dummy) for micro in micro_batches[1:]] == [
        (1, 3, False, False),
        (2, 3, True, False),
    ]
    with pytest.raises(IndexError):
        micro_batches[3]
    again = [[micro.batch["input_ids"].tolist() for micro in micro_batches] for _ in range(2)]
    assert again[0] == again[1]
    inputs, weight = micro_batches[0]
    assert (inputs["input_ids"].shape, weight) == ((1, 6), 5 / 12)
    assert micro_batches[0] != micro_batches[0]  # compared as objects, not tensor by tensor
    assert micro_batches.stats.rows == 4


def test_an_error_inside_of_a_gather_does_not_end_the_iteration_silently() -> None:
    class Row(list):
        def __getitem__(self, index: Any) -> Any:
            raise IndexError("from inside")

    batch = make_batch([6, 5, 2, 3]) | {"rows": Row("abcd")}
    with pytest.raises(IndexError, match="from inside"):
        list(iter_micro_batches(batch, PadMinConfig(token_budget=6)))


def test_iter_micro_batches_refuses_before_the_first() -> None:
    batch = make_batch([3, 2])
    with pytest.raises(SchemaError):
        iter_micro_batches({"labels": batch["labels"]})
    with pytest.raises(BatchError):
        iter_micro_batches(batch | {"attention_mask": torch.zeros_like(batch["labels"])})
    parts = list(iter_micro_batches(batch))
    assert [type(part) for part in parts] == [MicroBatch]
    assert sum(len(part.rows) for part in iter_micro_batches(make_batch([5] * 9), PadMinConfig(token_budget=10))) == 9


@pytest.mark.parametrize("rows", range(1, 51, 7))
def test_every_row_is_in_exactly_one_micro_batch(rows: int) -> None:
    lengths = [1 + (7 * row) % 13 for row in range(rows)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PadMinWarning)
        micro_batches = MicroBatcher(
            PadMinConfig(token_budget=13, launch_cost=0, max_rows=3, loss_reduction="row-mean")
        ).prepare(make_batch(lengths))
    everywhere = np.concatenate([micro.rows for micro in micro_batches])
    assert sorted(everywhere.tolist()) == list(range(rows))
    assert micro_batches.weights.sum() == pytest.approx(1)


def test_lost_targets_are_told_once() -> None:
    batcher = MicroBatcher(PadMinConfig())
    with pytest.warns(PadMinWarning, match="2 left-padded rows of a batch have a label on their first real token"):
        batcher.prepare(make_batch([2, 4, 3], left=[2, 0, 1], prompt=0))
    batcher.prepare(make_batch([4, 2], left=[0, 2], prompt=0))  # another number, but nothing new
    with pytest.warns(PadMinWarning) as caught:
        MicroBatcher(PadMinConfig()).prepare(make_batch([4, 2], left=[0, 2], prompt=0))
    assert caught[0].filename == __file__


def test_the_stats_of_a_batch() -> None:
    """Mask sums 3 and 5 in width 8, targets 2 and 4."""
    stats = MicroBatcher(PadMinConfig(token_budget=5, launch_cost=0)).prepare(make_batch([3, 5], width=8)).stats
    assert (stats.batches, stats.rows, stats.micro_batches, stats.dummies) == (1, 2, 2, 0)
    assert (stats.real_tokens, stats.loss_tokens, stats.slots_before, stats.slots) == (8, 6, 16, 8)
    assert (stats.waste_before, stats.waste, stats.longest_row, stats.wait_slots) == (0.5, 0.0, 5, 0)


def test_configs_are_not_changed_by_use() -> None:
    config = PadMinConfig(token_budget=6, batch_schema={"a": "row"})
    before = copy.deepcopy(config)
    list(iter_micro_batches(make_batch([6, 3]), config))
    compact(make_batch([6, 3]), config)
    assert config == before


# --- compact. ---


def test_compact_rolls_and_trims_in_the_callers_order() -> None:
    batch = make_batch([2, 4, 3], left=[4, 1, 0], width=7)
    small = compact(batch)
    assert small.lengths.tolist() == [2, 4, 3]
    assert small.batch["input_ids"].shape == (3, 4)
    for row, (left, length) in enumerate(((4, 2), (1, 4), (0, 3))):
        assert torch.equal(small.batch["input_ids"][row, :length], batch["input_ids"][row, left : left + length])
    restored = small.restore(small.batch["input_ids"])
    assert torch.equal(restored, batch["input_ids"])  # padding is 0 in both
    labels = small.restore(small.batch["labels"], fill=-100)
    assert torch.equal(labels, batch["labels"])


def test_compact_needs_no_labels_and_keeps_the_rest_of_the_config() -> None:
    batch = make_batch([2, 4], left=[2, 0])
    del batch["labels"]
    assert compact(batch, PadMinConfig(loss_reduction="token-mean")).batch["input_ids"].shape == (2, 4)
    renamed = {"mask": batch["attention_mask"], "ids": batch["input_ids"]}
    config = PadMinConfig(mask_key="mask", batch_schema={"ids": Field("position", fill=0)}, pad_to_multiple_of=6)
    assert compact(renamed, config).batch["ids"].shape == (2, 6)


def test_compact_of_two_axes() -> None:
    batch = make_batch([2, 4], left=[2, 0]) | {"labels": torch.tensor([[5, -100, -100], [6, 7, -100]])}
    small = compact(batch, PadMinConfig(batch_schema={"labels": Field("position", axis="decoder")}))
    assert small.lengths.tolist() == [[2, 1], [4, 2]]
    assert small.batch["labels"].tolist() == [[5, -100], [6, 7]]
    assert small.restore(small.batch["labels"], fill=-100, axis="decoder").tolist() == batch["labels"].tolist()


# --- sync_on_last. ---


class NoSync:
    def __init__(self) -> None:
        self.entered = self.left = 0
        self.inside = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.entered += 1
        self.inside = True
        try:
            yield
        finally:
            self.left += 1
            self.inside = False


def test_gradients_are_reduced_with_the_last_micro_batch_only() -> None:
    micro_batches = MicroBatcher(PadMinConfig(token_budget=6, launch_cost=0)).prepare(make_batch([6, 5, 4, 3]))
    no_sync = NoSync()
    seen = [no_sync.inside for _ in sync_on_last(micro_batches, no_sync)]
    assert seen == [True, True, True, False]
    assert (no_sync.entered, no_sync.left) == (3, 3)
    assert [micro.index for micro in sync_on_last(micro_batches, None)] == [0, 1, 2, 3]
    one = NoSync()
    assert [one.inside for _ in sync_on_last(MicroBatcher(PadMinConfig()).prepare(make_batch([3])), one)] == [False]
    assert one.entered == 0


def test_no_sync_is_left_when_the_loop_ends_early() -> None:
    micro_batches = MicroBatcher(PadMinConfig(token_budget=6, launch_cost=0)).prepare(make_batch([6, 5, 4, 3]))
    no_sync = NoSync()

    def train() -> None:
        for micro in sync_on_last(micro_batches, no_sync):
            assert no_sync.inside
            if micro.index == 1:
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train()
    assert (no_sync.entered, no_sync.left, no_sync.inside) == (2, 2, False)
    for _ in sync_on_last(micro_batches, no_sync):
        break
    assert no_sync.entered == no_sync.left == 3


def test_forward_and_backward_run_inside_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gather as well, since a model may be compiled around it; nothing runs between contexts."""
    no_sync, gathered = NoSync(), []
    stock = SlotMap._take
    monkeypatch.setattr(SlotMap, "_take", lambda self, *args: gathered.append(no_sync.inside) or stock(self, *args))
    micro_batches = MicroBatcher(PadMinConfig(token_budget=6, launch_cost=0)).prepare(make_batch([6, 5, 4]))
    assert not gathered, "something was gathered while planning"
    list(sync_on_last(micro_batches, no_sync))
    assert len(gathered) == 9


@pytest.mark.parametrize("wrong", [96, {"token_budget": 96}])
@pytest.mark.parametrize(
    "function", [compact, lambda b, c: list(iter_micro_batches(b, c)), lambda b, c: MicroBatcher(c)]
)
def test_what_is_no_config_is_named(function: Any, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="expected a PadMinConfig"):
        function(support.make_batch([3, 2]), wrong)


def test_restoring_a_whole_output_object_names_the_fix() -> None:
    batch = compact(support.make_batch([3, 2]))
    with pytest.raises(BatchError, match=r"pass \.logits"):
        batch.restore({"logits": batch.batch["input_ids"]})  # type: ignore[arg-type]


def test_a_named_labels_entry_must_exist() -> None:
    with pytest.raises(SchemaError, match="labels_key='targets': the batch has no such entry"):
        MicroBatcher(PadMinConfig(labels_key="targets")).prepare(support.make_batch([3, 2]))
