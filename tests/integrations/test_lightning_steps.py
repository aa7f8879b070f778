"""What runs how often: hooks, schedulers, the batches `training_step` gets, what it returns, and what stays alive."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import support
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import LENGTHS, Module, fit, fit_pair, make_batch, padmin, ragged_batches, relative
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import BatchEncoding

from lightning_padmin import PadMinCallback, PadMinWarning

EACH_MICRO_BATCH = ("training_step", "on_before_backward", "on_after_backward")


class Events(pl.Callback):
    """The order of events."""

    def __init__(self) -> None:
        self.seen: list[str] = []


def _event(name: str) -> Callable[..., None]:
    return lambda self, *_, **__: self.seen.append(name)


for _hook in (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
):
    setattr(Events, _hook, _event(_hook))


class Stepping(Module):
    """Tells the callback about training_step, and has a schedule that moves once per optimizer step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for callback in self.trainer.callbacks:
            if isinstance(callback, Events):
                callback.seen.append("training_step")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def events(module: Module, batches: Any, *callbacks: pl.Callback, **options: Any) -> list[str]:
    recorder = Events()
    fit(module, batches, recorder, *callbacks, **options)
    return recorder.seen


def test_the_order_of_events() -> None:
    """zero_grad comes once, after the first forward pass and before the first backward pass, as in stock Lightning."""
    batch = [make_batch([10, 8, 3])]
    stock = events(Stepping(), batch)
    assert stock == [
        "on_train_batch_start",
        "training_step",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
    ]
    split = events(Stepping(), batch, padmin(token_budget=10))
    assert split == [*stock[:5], *EACH_MICRO_BATCH, *EACH_MICRO_BATCH, *stock[5:]]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_hooks_other_than_backward_fire_as_often(accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    stock = events(Stepping(), ragged_batches(5), **options)
    split = events(Stepping(), ragged_batches(5), padmin(), **options)
    once = [name for name in stock if name not in EACH_MICRO_BATCH]
    assert [name for name in split if name not in EACH_MICRO_BATCH] == once
    for name in EACH_MICRO_BATCH:
        assert (stock.count(name), split.count(name)) == (10, 50)


def test_the_schedule_moves_once_per_step() -> None:
    def rate(trainer: pl.Trainer) -> float:
        return trainer.optimizers[0].param_groups[0]["lr"]

    callback = padmin(token_budget=10)
    trainer = fit(Stepping(), [make_batch([10, 8, 3])], callback)
    assert callback.stats.micro_batches == 3
    assert rate(trainer) == pytest.approx(0.5 * 0.9, abs=1e-15)
    pair = fit_pair(Stepping, ragged_batches(5), accumulate_grad_batches=2)
    assert rate(pair.split_trainer) == rate(pair.plain_trainer) == pytest.approx(0.5 * 0.7, abs=1e-15)
    assert pair.split_trainer.global_step == 3
    assert pair.parameters <= 1e-12


@pytest.mark.parametrize("hook", ["on_before_backward", "on_after_backward"])
def test_backward_hooks_see_which_micro_batch_runs(hook: str) -> None:
    seen = []

    class Watching(pl.Callback):
        pass

    callback = padmin()
    setattr(Watching, hook, lambda self, *_: seen.append((callback.micro_index, callback.micro_count)))
    fit(Module(), [*ragged_batches(1), make_batch([4, 4])], Watching(), callback)
    assert seen == [(0, 5), (1, 5), (2, 5), (3, 5), (4, 5), (0, 1)]


def test_a_loss_hook_sees_the_weighted_loss() -> None:
    """What on_before_backward gets sums to the loss of the batch."""
    losses: list[Tensor] = []

    class Watching(pl.Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
            losses.append(loss.detach().clone())

    module = Module()
    fit(module, ragged_batches(1), Watching(), padmin())
    assert len(losses) == 5
    torch.testing.assert_close(torch.stack(losses).sum(), module.losses[0], rtol=1e-13, atol=0)


# Batches of all types


@dataclass
class Sample:
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    name: str = "batch"


class Named(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


def _keep(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


TYPES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], dict[str, Tensor]], dict[str, Any]]] = {
    # name: (from a dict, back to a dict, options)
    "dict": (_keep, _keep, {}),
    "BatchEncoding": (BatchEncoding, lambda batch: dict(batch), {}),
    "dataclass": (
        lambda batch: Sample(**batch),
        lambda batch: {k: v for k, v in vars(batch).items() if k != "name"},
        {},
    ),
    "NamedTuple": (lambda batch: Named(**batch), lambda batch: batch._asdict(), {}),
    "tuple": (
        lambda batch: tuple(batch.values()),
        lambda batch: dict(zip(("input_ids", "attention_mask", "labels"), batch, strict=True)),
        {"mask_key": "1", "labels_key": "2", "batch_schema": {"0": "position"}},
    ),
    "nested dict": (
        lambda batch: {"inputs": {k: batch[k] for k in ("input_ids", "attention_mask")}, "labels": batch["labels"]},
        lambda batch: batch["inputs"] | {"labels": batch["labels"]},
        {},
    ),
}


@pytest.mark.parametrize("kind", TYPES)
def test_training_step_gets_smaller_batches_of_the_same_type(kind: str) -> None:
    make, back, options = TYPES[kind]

    class Typed(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert type(batch) is type(make(make_batch([2])))
            assert kind != "dataclass" or batch.name == "batch"
            plain = back(batch)
            assert {key: value.shape for key, value in plain.items()} == dict.fromkeys(plain, plain["labels"].shape)
            assert plain["attention_mask"][:, -1].any(), "a column of padding is left"
            return super().training_step(plain, batch_idx)

    plain, split = Typed(), Typed()
    for module, callbacks in ((plain, []), (split, [padmin(**options)])):
        batches = support.Batches([make(batch) for batch in ragged_batches(2)])
        loader = torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
        support.quiet_trainer(*callbacks).fit(module, loader)
    assert plain.shapes == [(10, 24)] * 2
    assert split.shapes == [(1, 24), (1, 20), (2, 12), (4, 6), (2, 3)] * 2
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) <= 1e-12


def test_lists_and_row_entries_go_with_their_rows() -> None:
    batch = make_batch(LENGTHS) | {"ids": [f"row {i}" for i in range(10)], "index": torch.arange(10)}
    seen: list[list[str]] = []

    class Reads(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert batch["ids"] == [f"row {i}" for i in batch["index"]]
            seen.append(batch["ids"])
            return super().training_step(batch, batch_idx)

    fit(Reads(), [batch], padmin())
    assert seen == [["row 0"], ["row 1"], ["row 2", "row 3"], [f"row {i}" for i in range(4, 8)], ["row 8", "row 9"]]


# What training_step returns


def _everything(batch: dict[str, Any], loss: Tensor) -> dict[str, Any]:
    length = batch["attention_mask"].sum(1)
    return {
        "loss": loss,
        "length": length,
        "first": batch["input_ids"][:, :1].double().requires_grad_() * 2,
        "names": [f"{int(n)} tokens" for n in length],
        "token_mean": loss * 3,
        "flags": batch["input_ids"] > 10,
        "count": len(length),
        "text": "constant",
    }


class Keeps(Module):
    def __init__(self) -> None:
        super().__init__(output=_everything)
        self.outputs: list[dict[str, Any]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.outputs.append(outputs)


def test_dictionary_outputs_come_back_in_the_batchs_order() -> None:
    batches = ragged_batches(2)
    pair = fit_pair(Keeps, batches)
    for split, plain, batch in zip(pair.split.outputs, pair.plain.outputs, batches, strict=True):
        assert list(split) == list(plain)
        assert torch.equal(split["length"], batch["attention_mask"].sum(1))
        assert torch.equal(split["first"], plain["first"])
        assert not split["first"].requires_grad
        assert split["names"] == plain["names"]
        assert len(set(split["names"])) == 6
        torch.testing.assert_close(split["token_mean"], plain["token_mean"].detach(), rtol=1e-12, atol=0)
        assert [flags.shape for flags in split["flags"]] == [(1, 24), (1, 20), (2, 12), (4, 6), (2, 3)]
        assert split["count"] == [1, 1, 2, 4, 2]
        assert split["text"] == ["constant"] * 5


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_loss_from_training_step_is_skipped_as_in_stock() -> None:
    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.model.head.weight.grad is not None:
                super().on_before_optimizer_step(optimizer)

    pair = fit_pair(Skips, ragged_batches(3))
    assert [bool(loss.isnan()) for loss in pair.split.losses] == [False, True, False]
    assert pair.split_trainer.global_step == pair.plain_trainer.global_step
    assert pair.split.zero_grads == pair.plain.zero_grads == 3
    assert len(pair.split.gradients) == len(pair.plain.gradients) == 2
    assert pair.parameters <= 1e-12


@pytest.mark.parametrize("which", [0, 3])
def test_a_part_of_a_batch_cannot_be_skipped(which: int) -> None:
    callback = padmin()

    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if callback.micro_index == which else loss

    module = Skips()
    before = support.flat_parameters(module)
    with pytest.raises(MisconfigurationException, match="returned None for 1 of 5 micro-batches of one batch"):
        fit(module, ragged_batches(2), callback)
    assert torch.equal(support.flat_parameters(module), before)


# Batches without loss tokens


class Masked(Module):
    """A mean over tokens whose gradient, like the loss, is 0/0 where there are none."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"])[:, :-1]
        targets, valid = batch["labels"][:, 1:], batch["labels"][:, 1:] != -100
        losses = -logits.log_softmax(-1).gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0] * valid
        if self.how == "token-mean":
            return losses.sum() / valid.sum()
        return (losses.sum(1) / valid.sum(1)).mean() if self.how == "row-mean" else losses.sum()


def without_loss(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"labels": torch.full_like(batch["labels"], -100)}


@pytest.mark.parametrize("how", ["token-mean", "row-mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_without_labels_moves_nothing(how: str, accumulate: int) -> None:
    first, second, third, fourth = ragged_batches(4)
    module, plain = Masked(how), Masked(how)
    batches = [first, without_loss(second), third, without_loss(fourth)]
    with pytest.warns(PadMinWarning) as caught:
        fit(module, batches, padmin(loss_reduction=how), accumulate_grad_batches=accumulate)
    told = [str(warning.message) for warning in caught if warning.category is PadMinWarning]
    assert told == ["a batch has no loss tokens at all: its loss is 0 and it moves nothing"]
    fit(plain, [first, third])
    assert support.flat_parameters(module).isfinite().all()
    if accumulate == 1:
        zeros = torch.zeros_like(module.gradients[0])
        assert torch.equal(module.gradients[1], zeros)
        assert torch.equal(module.gradients[3], zeros)
        assert [float(loss) for loss in module.losses][1::2] == [0.0, 0.0]
        assert relative(support.flat_parameters(module), support.flat_parameters(plain)) <= 1e-12
    else:
        assert relative(module.gradients[0], plain.gradients[0] / 2) <= 1e-12


def test_without_us_such_a_batch_ruins_the_parameters() -> None:
    first, second, third = ragged_batches(3)
    module = Masked()
    fit(module, [first, without_loss(second), third])
    assert support.flat_parameters(module.model.head).isnan().all()


def test_rows_without_labels_ride_along() -> None:
    """None of them makes up a micro-batch of its own, whose mean would be 0/0."""
    batches = [make_batch(LENGTHS, seed=seed, without_loss=(3, 4, 8)) for seed in range(2)]
    pair = fit_pair(Masked, batches)
    assert pair.gradient <= 1e-12
    assert all(loss.isfinite() for loss in pair.split.losses)


@pytest.mark.usefixtures("equal_weights")
def test_rows_without_labels_would_count_if_weights_were_equal() -> None:
    batches = [make_batch(LENGTHS, seed=seed, without_loss=(3, 4, 8)) for seed in range(2)]
    assert fit_pair(Masked, batches).gradient > 0.1


# Memory


class Live:
    """Bytes that autograd keeps for the backward pass."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        class Saved:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor = tensor.detach()  # an output that saves itself would be a cycle

        def pack(tensor: Tensor) -> Saved:
            saved, size = Saved(tensor), tensor.nbytes
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(saved, self._freed, size)
            return saved

        with saved_tensors_hooks(pack, lambda saved: saved.tensor):
            yield

    def _freed(self, size: int) -> None:
        self.now -= size


def peak(batches: Any, *callbacks: pl.Callback, output: Any = None) -> int:
    live = Live()

    class Measured(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with live.watch():
                return super().training_step(batch, batch_idx)

    fit(Measured(output=output), batches, *callbacks)
    assert live.now == 0
    return live.peak


@pytest.mark.parametrize("output", [None, lambda batch, loss: {"loss": loss, "per_row": loss.exp().expand(1)}])
def test_one_micro_batch_is_alive_at_a_time(output: Any) -> None:
    lengths = [64] * 4 + [32] * 16
    whole = peak([make_batch(lengths)], output=output)
    split = peak([make_batch(lengths)], padmin(token_budget=128), output=output)
    largest = peak([make_batch([64, 64])], output=output)
    assert split <= 1.05 * largest
    assert whole > 4 * largest


def test_an_output_that_was_not_part_of_the_loss_is_not_kept_alive() -> None:
    """Its graph is never freed by a backward pass."""
    lengths = [16] * 8

    def output(batch: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
        weight = torch.ones(batch["labels"].shape[0], 50_000, requires_grad=True)
        return {"loss": loss, "extra": (weight * 2.0 * weight).exp().sum(1)}

    split = peak([make_batch(lengths)], padmin(token_budget=32), output=output)
    largest = peak([make_batch([16, 16])], output=output)
    assert split <= 1.05 * largest


def test_state_of_the_callback_between_batches() -> None:
    """Nothing of a batch is kept."""
    held: list[weakref.ref[Tensor]] = []

    class Once(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            for seed in range(4):
                batch = make_batch(LENGTHS, seed=seed)
                held.append(weakref.ref(batch["labels"]))
                yield batch

    class Watching(pl.Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            alive.append(sum(ref() is not None for ref in held))

    alive: list[int] = []
    trainer = support.quiet_trainer(padmin(), Watching())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(), torch.utils.data.DataLoader(Once(), batch_size=None))
    assert isinstance(trainer.callbacks[0], PadMinCallback)
    assert max(alive) <= 2  # the batch itself, and the one that is fetched ahead
