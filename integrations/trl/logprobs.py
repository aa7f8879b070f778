"""Per-token log-probs of TRL's online trainers in chunks: rolled, trimmed, length-sorted, under the token budget.

The stock function scores the last `logits_to_keep` columns. Prompts are padded on the left, completions on the right,
so after the roll a completion begins right behind its prompt, at another column in each row: the function is asked
for all columns from the shortest prompt on, and what belongs to completions is put back where stock has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_padmin.batch import RowTable
from lightning_padmin.integrations.trl.images import joined
from lightning_padmin.microbatching import MemoryGuard, MicroBatch, MicroBatches, PackMap, SlotMap

Ints = NDArray[np.int64]
StockFunction = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Scores:
    """What the stock function returned for some rows.

    Attributes:
        per_token: log-probs and, if asked for, entropies, each (n, T), 0 where there is no completion token.
        rest: what it returned besides, such as the balance loss of experts; None where it returned None.
    """

    per_token: tuple[Tensor | None, ...]
    rest: tuple[Any, ...]


def score_chunk(
    stock: StockFunction, model: Any, micro: MicroBatch, slots: SlotMap, completion: int, options: Mapping[str, Any]
) -> Scores:
    """Log-probs of one micro-batch.

    Args:
        stock: the trainer's own function.
        model: the model, as stock passes it on.
        micro: entries `input_ids`, `attention_mask`, others by position, and images by row.
        slots: its index map.
        completion: columns T that completions take in the batch.
        options: further keyword arguments of the stock function.
    """
    width = slots.widths[0]
    source = slots.source_widths[0]
    if isinstance(slots, PackMap):
        return _score_pack(stock, model, micro, slots, completion, options)
    # A row's prompt ends where completions begin in the batch; a row without any prompt has nothing to predict from.
    prompts = (source - completion) - slots.start[:, 0]
    shortest = int(min(prompts.min(), width - 1))
    inputs = joined(micro.batch)
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    outputs = stock(model, ids, mask, width - shortest, **inputs, **options)
    return Scores(_in_place(outputs[:2], slots, shortest, completion), tuple(outputs[2:]))


def _score_pack(
    stock: StockFunction, model: Any, micro: MicroBatch, slots: PackMap, completion: int, options: Mapping[str, Any]
) -> Scores:
    """Log-probs of one pack: of its documents' completions, the stock function seeing one long row."""
    inputs = dict(micro.batch)
    ids = inputs.pop("input_ids")
    arguments = {name: inputs.pop(name) for name in slots.arguments(ids.device)}
    del inputs["attention_mask"]
    # What stock takes for the mask says here which tokens are scored: the completions', behind at least one token.
    prompts = (slots.source_widths[0] - completion) - slots.start[:, 0]
    scored = slots.positions >= np.repeat(np.maximum(prompts, 1), slots.length[:, 0])
    mask = torch.as_tensor(scored, device=ids.device)[None]
    with _called_with(model, arguments):
        outputs = stock(model, ids, mask.to(ids.dtype), ids.shape[1] - 1, **inputs, **options)
    scores = [None if each is None else each.masked_fill(~mask[:, 1:], 0) for each in outputs[:2]]
    return Scores(_in_place(scores, slots, 1, completion), tuple(outputs[2:]))


@contextmanager
def _called_with(model: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """While open, the model inside of all wrappers gets these arguments, and no mask."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner  # DistributedDataParallel and its like
    own, original = vars(model).get("forward"), model.forward

    @functools.wraps(original)
    def forward(*args: Any, **given: Any) -> Any:
        return original(*args, **{**given, "attention_mask": None, **arguments})

    forward.padmin_stands_for = own  # type: ignore[attr-defined]
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _in_place(
    scores: Sequence[Tensor | None], slots: SlotMap, first: int, completion: int
) -> tuple[Tensor | None, ...]:
    """(n, W - first) scores as (n, T), at the columns that completions have in the batch.

    Each by itself: stacked, an entropy that nobody derives would get a gradient of zeros, and the kernel would spend
    time and memory on it.
    """
    return tuple(None if each is None else slots.restore(each, first_column=first)[:, -completion:] for each in scores)


def score_all(
    stock: StockFunction,
    model: Any,
    batches: MicroBatches,
    completion: int,
    options: Mapping[str, Any],
    order: Sequence[int],
    guard: MemoryGuard,
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
) -> tuple[Any, ...]:
    """What the stock function returns for a whole batch, computed in chunks that keep one graph.

    Args:
        stock: see `score_chunk`; so are `model`, `completion` and `options`.
        model: the model.
        batches: micro-batches of `input_ids`, `attention_mask` (B, P + T), others by position, and images by row.
        completion: columns T.
        options: further keyword arguments.
        order: in which the micro-batches run.
        guard: names the budget where memory does not suffice.
        no_sync: entered for all forward passes but the last, where only that may arm the reducer.
    """
    scores: dict[int, Scores] = {}
    for k in order:
        with guard.around(k), nullcontext() if k == order[-1] or no_sync is None else no_sync():
            scores[k] = score_chunk(stock, model, batches[k], batches.slot_maps[k], completion, options)
    chunks = [scores[k] for k in range(len(batches))]
    per_token = (_join(batches, list(parts)) for parts in zip(*(chunk.per_token for chunk in chunks), strict=True))
    return *per_token, *chunks[-1].rest


def _join(batches: MicroBatches, parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    joined = batches.restore_rows(present)
    for dummy in present[len(batches.plan) :]:  # stays in the graph, since other ranks wait for its backward pass
        joined = joined + dummy.sum() * 0
    return joined


def zero_of(scores: Scores) -> Tensor:
    """A loss of 0 that reaches the model, for a dummy."""
    total = sum(each.sum() * 0 for each in scores.per_token if each is not None and each.requires_grad)
    assert isinstance(total, Tensor), "the model has no trainable parameters"
    return total


def first_tokens(table: RowTable, completion: int) -> Ints:
    """Tokens before the completion in each row: its prompt, where completions take the last columns of the batch."""
    return (table.widths[0] - completion) - table.start[:, 0]


class Given:
    """Log-probs and entropies that stand in for the model in one call of a trainer's loss.

    Attributes:
        asked: how often the loss asked for the log-probs of these rows under the model.
    """

    def __init__(self, model: Any, values: tuple[Any, ...]) -> None:
        self._model, self._values = model, values
        self.asked = 0

    def is_for(self, model: Any, input_ids: Tensor) -> bool:
        """Whether these are the log-probs asked for; not those of another model, nor of other rows."""
        return model is self._model and len(input_ids) == len(self._values[0])

    def take(self) -> tuple[Any, ...]:
        """What the stock function would return."""
        self.asked += 1
        return self._values
