"""Labels on first tokens that only later batches have: whether the loss takes them is checked in time."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import support
import torch
from support import Module, fit, padmin, relative, token_losses
from torch import Tensor, nn

from lightning_padmin import MicroBatcher, PadMinConfig
from lightning_padmin.errors import GradientCheckError
from lightning_padmin.integrations.common import first_batch

LENGTHS = (14, 9, 4, 11, 6, 3, 8, 5)


def batch_of(seed: int, first: float, *, left: bool = False, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """A third of the tokens have labels; the first ones of rows in this share, too."""
    generator = torch.Generator().manual_seed(seed)
    sides = [max(lengths) - n if left else 0 for n in lengths]
    batch = support.make_batch(lengths, seed=seed, left=sides)
    labels, ids = torch.full_like(batch["labels"], -100), batch["input_ids"]
    for row, (n, start) in enumerate(zip(lengths, sides, strict=True)):
        chosen = {start + 1 + int(torch.randint(n - 1, (1,), generator=generator)) for _ in range(max(1, n // 3))}
        if row < first * len(lengths):
            chosen.add(start)
        for column in chosen:
            labels[row, column] = ids[row, column]
    return batch | {"labels": labels}


class Aligned(Module):
    """Labels line up with logits, as in masked language models and taggers."""

    shift = 0

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.model(batch["input_ids"]), batch["labels"]
        if self.shift:
            losses = token_losses(logits, labels)
            return losses.sum() / (labels[:, 1:] != -100).sum()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Shifted(Aligned):
    shift = 1


def later(count: int = 2, **options: Any) -> list[dict[str, Tensor]]:
    return [batch_of(k, 0.0, **options) for k in range(count)] + [batch_of(9 + k, 0.5, **options) for k in range(2)]


@pytest.mark.parametrize(("kind", "wrong", "right"), [(Aligned, None, 0), (Aligned, 1, 0), (Shifted, 0, 1)])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("most", [100, 1])
def test_the_batch_that_shows_them_is_checked_before_it_is_trained(
    kind: type[Aligned], wrong: int | None, right: int, left: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the last batch that is checked for anything else."""
    monkeypatch.setattr(first_batch, "MOST_BATCHES", most)
    batches = [batch_of(3, 0.0, lengths=(6,) * 8), *later(left=left)] if most == 1 else later(left=left)
    module = kind()
    options = {"token_budget": 30}
    with without_warnings(), pytest.raises(GradientCheckError, match=f"set label_shift={right}"):
        fit(module, batches, padmin(**options, label_shift=wrong))
    assert len(module.gradients) == len(batches) - 2
    stock, ours = kind(), kind()
    if left:
        batches = [_turned(batch) for batch in batches]  # left padding is wrong for a recurrence
    with without_warnings():
        fit(ours, batches, padmin(**options, label_shift=right))
    fit(stock, batches)
    assert relative(ours.gradients[-1], stock.gradients[-1]) <= 1e-11


@contextmanager
def without_warnings() -> Iterator[None]:
    """Rows over the budget and left padding are told of; of no concern here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _turned(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    start = batch["attention_mask"].argmax(1)
    width = batch["attention_mask"].shape[1]
    index = (start[:, None] + torch.arange(width)) % width
    return {name: value.gather(1, index) for name, value in batch.items()}


@pytest.mark.parametrize("left", [False, True])
def test_off_is_off_and_then_it_trains_something_else(left: bool) -> None:
    """The control, and what `check="off"` leaves to its user."""
    batches = later()
    stock, ours = Aligned(), Aligned()
    fit(stock, batches)
    fit(ours, batches, padmin(token_budget=30, check="off"))
    assert relative(ours.gradients[1], stock.gradients[1]) <= 1e-11
    assert relative(ours.gradients[2], stock.gradients[2]) > 0.05


class Counts(Shifted):
    forwards = 0

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        type(self).forwards += 1
        return super().loss(batch)


def test_told_once_and_not_again() -> None:
    """Every token of a causal model has a label: the first batch tells, and no other is checked for that."""
    kind = type("Kind", (Counts,), {"forwards": 0})
    batches = [support.make_batch(LENGTHS, seed=k, prompt=0) for k in range(4)]
    fit(kind(), batches, callback := padmin(token_budget=30, check="first-batch"))
    once = kind.forwards - callback.stats.micro_batches
    kind.forwards = 0
    fit(kind(), batches[:1], callback := padmin(token_budget=30, check="first-batch"))
    assert kind.forwards - callback.stats.micro_batches == once


def test_where_both_are_equal_nothing_is_said() -> None:
    """Rows of one length with as many labels each: no shares differ, whatever the loss does with the first one."""
    batches = [batch_of(0, 0.0)] + [support.make_batch([6] * 8, seed=k, prompt=0) for k in range(3)]
    for kind in (Shifted, Aligned):
        module, stock = kind(), kind()
        fit(module, batches, padmin(token_budget=30))
        fit(stock, batches)
        assert relative(module.gradients[-1], stock.gradients[-1]) <= 1e-11


def test_row_means_and_sums_do_not_depend_on_it() -> None:
    class Rows(Aligned):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            logits, labels = self.model(batch["input_ids"]), batch["labels"]
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
            rows = losses.sum(1) / (labels != -100).sum(1)
            return rows.mean() if self.how == "row-mean" else losses.sum()

    for how in ("row-mean", "sum"):
        module, stock = Rows(how), Rows(how)
        fit(module, later(), padmin(token_budget=30, loss_reduction=how))
        fit(stock, later())
        assert relative(module.gradients[-1], stock.gradients[-1]) <= 1e-11


def test_a_later_fit_of_the_same_module_is_checked_too() -> None:
    module, callback = Aligned(), padmin(token_budget=30)
    fit(module, [batch_of(k, 0.0) for k in range(2)], callback)
    with pytest.raises(GradientCheckError, match="set label_shift=0"):
        fit(module, later(), callback)


def test_all_ranks_hear_of_it_in_the_exchange_that_they_have_anyway() -> None:
    """One rank has such rows: both say so, in as many exchanges as without."""
    from ranks import Ranks

    ranks, shown = Ranks(2), [[], []]  # type: ignore[var-annotated]
    batches = [[batch_of(0, 0.0), batch_of(1, 0.0)], [batch_of(2, 0.0), batch_of(3, 0.5)]]

    def run(rank: int) -> None:
        batcher = MicroBatcher(PadMinConfig(token_budget=30), exchange=ranks.exchange_of(rank))
        for batch in batches[rank]:
            batcher.prepare(batch)
            shown[rank].append(batcher.shows_first)
            batcher.read_together(batch)
            shown[rank].append(batcher.shows_first)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert shown == [[False, False, True, True]] * 2
    assert ranks.calls == [4, 4]


def test_the_table_knows_labels_on_first_tokens_whatever_the_shift() -> None:
    batch = batch_of(1, 0.5, left=True)
    for shift in (0, 1):
        _, table = MicroBatcher(PadMinConfig(label_shift=shift)).read(batch)
        assert table.first_weight.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
        assert table.behind.tolist() == [False, True, True, True, False, False, False, False]
        assert (table.weight + shift * table.first_weight).tolist() == (batch["labels"] != -100).sum(1).tolist()
    weighed = batch | {"w": (batch["labels"] != -100) * 0.5}
    _, table = MicroBatcher(PadMinConfig(loss_mask_key="w")).read(weighed)
    assert table.first_weight.tolist() == [0.5] * 4 + [0] * 4
    assert np.array_equal(MicroBatcher(PadMinConfig()).read(batch_of(1, 0.0))[1].first_weight, np.zeros(8))
