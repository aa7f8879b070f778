"""What runs how often: hooks, schedulers, the batches `training_step` gets, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import support
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import LENGTHS, Module, fit, fit_pair, make_batch, padmin, ragged_batches, relative
from torch import Tensor
from transformers import BatchEncoding

EACH_MICRO_BATCH = ("training_step", "on_before_backward")


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
    """zero_grad comes once, after the first forward pass and before the first backward pass, as in stock Lightning.

    on_after_backward comes once too, behind the last backward pass, where gradients are whole.
    """
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
    split = events(Stepping(), batch, padmin(token_budget=10, check="off"))
    assert split == [*stock[:4], *EACH_MICRO_BATCH, *EACH_MICRO_BATCH, *stock[4:]]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_hooks_other_than_that_before_backward_fire_as_often(accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    stock = events(Stepping(), ragged_batches(5), **options)
    split = events(Stepping(), ragged_batches(5), padmin(check="off"), **options)
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


@pytest.mark.parametrize(("hook", "first"), [("on_before_backward", 0), ("on_after_backward", 4)])
def test_backward_hooks_see_which_micro_batch_runs(hook: str, first: int) -> None:
    seen = []

    class Watching(pl.Callback):
        pass

    callback = padmin()
    setattr(Watching, hook, lambda self, *_: seen.append((callback.micro_index, callback.micro_count)))
    fit(Module(), [*ragged_batches(1), make_batch([4, 4])], Watching(), callback)
    assert seen == [*((index, 5) for index in range(first, 5)), (0, 1)]


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

    fit(Reads(), [batch], padmin(check="off"))
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
    callback = padmin(check="off")

    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if callback.micro_index == which else loss

    module = Skips()
    before = support.flat_parameters(module)
    with pytest.raises(MisconfigurationException, match="returned None for 1 of 5 micro-batches of one batch"):
        fit(module, ragged_batches(2), callback)
    assert torch.equal(support.flat_parameters(module), before)
