"""Whether a trainer's loss may be taken chunk by chunk: gradients at the log-probs, without a pass of the model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common import RandomState
from lightning_padmin.integrations.trl import hooks as trl_stock
from lightning_padmin.integrations.trl.passes import Passes, free, gradients_of, leaves_of
from lightning_padmin.integrations.trl.window import Entry

_TOLERANCE = 1e-4
_MOST_PARTS = 16
# While a chunk runs, rows that have not run yet hold other values than theirs. A loss couples rows if that matters to
# the gradient of the chunk's rows; where the others had their own values, every differentiable loss would pass.
_ELSEWHERE = (1.25, 0.75)  # log-probs stay negative, entropies positive
_ON_PADDING = (-0.7, 0.4)
READS_PADDING = (
    "the loss reads log-probs where completions have no tokens. Those are padding, which is removed here, so training "
    "would change. Mask them in the loss (loss_type='luspo' in releases before 1.16: set "
    "importance_sampling_level='sequence' and beta=0), or use PadMinConfig(enabled=False)"
)


class Verdict(IntEnum):
    """The larger one holds where ranks differ."""

    CANNOT_TELL = 0
    SEPARATES = 1
    COUPLES = 2
    NOT_OF_LOG_PROBS = 3
    READS_PADDING = 4


def separates(
    trainer: Any, model: Any, passes: Passes, need_rows: bool, listen: Callable[[Tensor], Any] | None = None
) -> tuple[Verdict, float]:
    """Whether the parts of a window's loss have the gradients of the whole.

    Args:
        trainer: of TRL.
        model: as the trainer wrapped it.
        passes: of the window; its buffers are filled for this and forgotten where a split follows.
        need_rows: whether rows have to separate too; else only that all gradients come through the log-probs.
        listen: gets the loss of each stock micro-batch, with its graph.

    Returns:
        The verdict, and max|parts - whole| / max|whole|.
    """
    passes.fill_buffers()
    verdict, difference = _verdict(trainer, model, passes, need_rows)
    if listen is not None and verdict <= Verdict.SEPARATES:
        _show(trainer, passes, listen)
    if need_rows or verdict != Verdict.SEPARATES:
        passes.forget_buffers()
    return verdict, difference


def _verdict(trainer: Any, model: Any, passes: Passes, need_rows: bool) -> tuple[Verdict, float]:
    if not _is_of_log_probs(trainer, model, passes):
        return Verdict.NOT_OF_LOG_PROBS, 0.0
    entries = passes.window.entries
    draw = RandomState()  # the same random numbers in every call of the loss
    wholes = [
        _gradients(trainer, passes, entry, torch.arange(len(entry.inputs["completion_ids"])), draw) for entry in entries
    ]
    scale = max(_largest(each) for whole in wholes for each in whole if each is not None)
    if not 0 < scale < float("inf"):
        return Verdict.CANNOT_TELL, 0.0
    if _draws(trainer, passes, entries[0], wholes[0], draw) > _TOLERANCE * scale:
        return Verdict.NOT_OF_LOG_PROBS, 0.0
    padding = max(
        _of_padding(trainer, passes, entry, whole, draw) for entry, whole in zip(entries, wholes, strict=True)
    )
    if padding > _TOLERANCE * scale:
        return Verdict.READS_PADDING, padding / scale
    if not need_rows:
        return Verdict.SEPARATES, 0.0
    worst = max(_difference(trainer, passes, entry, whole, draw) for entry, whole in zip(entries, wholes, strict=True))
    worst = max(worst, _of_calls(trainer, passes, entries[0], wholes[0], draw))
    worst = max(worst, _of_place(trainer, passes, entries[-1], wholes[-1], draw))
    return (Verdict.SEPARATES if worst <= _TOLERANCE * scale else Verdict.COUPLES), worst / scale


def _show(trainer: Any, passes: Passes, listen: Callable[[Tensor], Any]) -> None:
    draw, entries = RandomState(), passes.window.entries
    for index, entry in enumerate(entries):
        without, place = trl_stock.without_trace(trainer), trl_stock.as_if_synchronising
        with torch.enable_grad(), without, place(trainer, index == len(entries) - 1), draw.again():
            leaves = leaves_of(entry.buffers)
            loss, _ = passes.stock_loss(entry.inputs, leaves)
        listen(loss)  # outside, where nothing watches what the graph has saved
        free(loss, leaves)


def _is_of_log_probs(trainer: Any, model: Any, passes: Passes) -> bool:
    """Whether the loss asks once for log-probs, never runs the model, and has no gradient from elsewhere."""
    entry = passes.window.entries[0]
    with torch.enable_grad(), trl_stock.without_trace(trainer), _calls_of(trainer, model) as calls:
        loss, given = passes.stock_loss(entry.inputs, [None if b is None else b.detach() for b in entry.buffers])
    return not loss.requires_grad and given.asked == 1 and not calls


@contextmanager
def _calls_of(trainer: Any, model: Any) -> Iterator[list[None]]:
    calls: list[None] = []
    hook = trainer.accelerator.unwrap_model(model).register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        hook.remove()


def _draws(trainer: Any, passes: Passes, entry: Entry, whole: Sequence[Tensor | None], draw: RandomState) -> float:
    """How far gradients differ with other random numbers: each chunk would draw its own."""
    with draw.again():
        random.random()
        np.random.random_sample()
        torch.rand(101)
        torch.rand(101, device=entry.buffers[0].device if entry.buffers[0] is not None else None)
        other = RandomState()
    found = _gradients(trainer, passes, entry, torch.arange(len(entry.inputs["completion_ids"])), other)
    return max(_largest(f - w) for f, w in zip(found, whole, strict=True) if f is not None and w is not None)


def _of_calls(trainer: Any, passes: Passes, entry: Entry, whole: Sequence[Tensor | None], draw: RandomState) -> float:
    """How far gradients differ in a second call: a loss that counts its calls must be called once per micro-batch."""
    leaves = leaves_of(entry.buffers)
    with torch.enable_grad(), trl_stock.without_trace(trainer), draw.again():
        passes.stock_loss(entry.inputs, [None if leaf is None else leaf.detach() for leaf in leaves])
        draw.restore()
        loss, _ = passes.stock_loss(entry.inputs, leaves)
    pairs = zip(gradients_of(loss, leaves), whole, strict=True)
    return max(_largest(f - w) for f, w in pairs if f is not None and w is not None)


def _of_place(trainer: Any, passes: Passes, entry: Entry, whole: Sequence[Tensor | None], draw: RandomState) -> float:
    """How far gradients differ at the end of an accumulation window, where no chunk of a split stands by itself."""
    leaves = leaves_of(entry.buffers)
    # Over what `without_trace` has put there, whose collectives are of one process.
    without, place = trl_stock.without_trace(trainer), trl_stock.as_if_synchronising
    with torch.enable_grad(), without, place(trainer, True), draw.again():
        loss, _ = passes.stock_loss(entry.inputs, leaves)
    pairs = zip(gradients_of(loss, leaves), whole, strict=True)
    return max(_largest(f - w) for f, w in pairs if f is not None and w is not None)


def _of_padding(trainer: Any, passes: Passes, entry: Entry, whole: Sequence[Tensor | None], draw: RandomState) -> float:
    """The largest gradient where completions have no tokens, or change of one elsewhere by what stands there.

    What stands there for this is not zero, as in the log-probs of the reference model: a divergence between two equal
    values has no gradient.
    """
    padding = entry.inputs["completion_mask"] == 0
    leaves = leaves_of(entry.buffers)
    filled = [
        None if leaf is None else torch.where(padding.to(leaf.device), leaf + value, leaf)
        for leaf, value in zip(leaves, _ON_PADDING, strict=False)
    ]
    with torch.enable_grad(), trl_stock.without_trace(trainer), draw.again():
        loss, _ = passes.stock_loss(entry.inputs, filled)
    found = gradients_of(loss, leaves)
    pairs = [(f, w) for f, w in zip(found, whole, strict=True) if f is not None and w is not None]
    return max(_largest(torch.where(padding.to(f.device), f, f - w)) for f, w in pairs)


def refuse_readers_of_padding(values: Sequence[Tensor | None], padding: Tensor) -> list[Tensor | None]:
    """Values that no loss may notice are other ones than zero where there is padding.

    Args:
        values: log-probs and entropies (B, T), with a graph.
        padding: (B, T), true where completions have no tokens.

    Returns:
        The same, but on padding; a backward pass that brings gradients there raises ConfigError.
    """

    def look(gradient: Tensor) -> None:
        if _largest(gradient * padding) > _TOLERANCE * _largest(gradient):
            raise ConfigError(READS_PADDING)

    changed = []
    for value, on_padding in zip(values, _ON_PADDING, strict=True):
        if value is not None and value.requires_grad:
            value = value.masked_fill(padding, on_padding)
            value.register_hook(look)  # type: ignore[no-untyped-call]
        changed.append(value)
    return changed


def _difference(trainer: Any, passes: Passes, entry: Entry, whole: Sequence[Tensor | None], draw: RandomState) -> float:
    """Between the gradients of all rows at once and of some rows at a time, the largest."""
    rows = len(entry.inputs["completion_ids"])
    parts = min(rows, _MOST_PARTS)
    found = [_gradients(trainer, passes, entry, torch.arange(part, rows, parts), draw) for part in range(parts)]
    largest = 0.0
    for wanted, *each in zip(whole, *found, strict=True):
        if wanted is not None:
            largest = max(largest, _largest(sum(part for part in each if part is not None) - wanted))
    return largest


def _gradients(trainer: Any, passes: Passes, entry: Entry, rows: Tensor, draw: RandomState) -> list[Tensor | None]:
    """Of the stock loss at the buffers, where only these rows have run."""
    leaves = leaves_of(entry.buffers)
    live = [_only(leaf, rows, factor) for leaf, factor in zip(leaves, _ELSEWHERE, strict=False)]
    with torch.enable_grad(), trl_stock.without_trace(trainer), draw.again():
        loss, _ = passes.stock_loss(entry.inputs, live)
    return gradients_of(loss, leaves)


def _only(leaf: Tensor | None, rows: Tensor, factor: float) -> Tensor | None:
    if leaf is None:
        return None
    index = rows.to(leaf.device)
    return (leaf.detach() * factor).index_copy(0, index, leaf[index])


def _largest(values: Tensor) -> float:
    """Infinity where something is not a number, so that it is not lost in a maximum."""
    return float(values.abs().nan_to_num(nan=float("inf")).max())
