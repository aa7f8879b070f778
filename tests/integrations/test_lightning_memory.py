"""What stays alive: one micro-batch at a time, and nothing between batches."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
from support import LENGTHS, Module, fit, make_batch, padmin
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


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


def test_nothing_of_a_batch_is_kept() -> None:
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
    assert max(alive) <= 2  # the batch itself, and the one that is fetched ahead
