"""An accumulation window of an online trainer: the rows of several stock micro-batches, pooled and regrouped.

The loss stays the trainer's own. Each chunk's log-probs are put into detached buffers of the shape that stock has, and
stock `compute_loss` is called with these in place of a forward pass: every mask and every normaliser is that of the
stock micro-batch, gradients flow to the chunk's rows alone, and there is no formula per loss type here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_padmin.integrations.trl.hooks import tokens_of
from lightning_padmin.integrations.trl.images import in_order, pooled_by_row
from lightning_padmin.integrations.trl.logprobs import Scores
from lightning_padmin.microbatching import MicroBatches
from lightning_padmin.stats import PaddingStats

Ints = NDArray[np.int64]
Values: TypeAlias = Sequence[Tensor | None]
"""Log-probs and entropies (B, T)."""


@dataclass(eq=False)
class Entry:
    """One stock micro-batch of the window.

    Attributes:
        inputs: what stock `compute_loss` gets.
        buffers: detached log-probs and entropies (B, T), filled chunk by chunk.
        gradients: replay: of the loss with respect to the buffers.
    """

    inputs: Mapping[str, Any]
    buffers: list[Tensor | None] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)


class Window:
    """The rows of W stock micro-batches, regrouped into at least W chunks, dealt over the same W steps.

    Args:
        entries: the prepared inputs of the stock micro-batches, all of one shape.
        prepare: `Training.prepare_made`, of whoever plans the rows.
        token_budget: most slots of a chunk.

    Attributes:
        batches: the chunks.
        order: in which they run.
        step: the stock micro-batch whose share of chunks is next.
    """

    def __init__(
        self, entries: Sequence[Mapping[str, Any]], prepare: Callable[..., MicroBatches], token_budget: int
    ) -> None:
        self.entries = [Entry(inputs) for inputs in entries]
        self.completion = int(entries[0]["completion_ids"].shape[1])
        self._rows = len(entries[0]["prompt_ids"])
        self._images: list[int] | None = None
        self.batches = prepare(self._pool, token_budget=token_budget, min_micro_batches=len(entries))
        self.order = in_order(self.batches.slot_maps, self._images)
        self.step = 0
        self._seen: set[int] = set()
        self._places: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}

    def _pool(self) -> dict[str, Any]:
        """The rows of all entries that are worth running."""
        tokens = [tokens_of(entry.inputs) for entry in self.entries]
        pooled = {name: torch.cat([each[name] for each in tokens]) for name in tokens[0]}
        images = pooled_by_row([entry.inputs for entry in self.entries])
        self._pooled = self._worth_running(pooled, images.get("num_images"))
        index = torch.as_tensor(self._pooled, device=pooled["input_ids"].device)
        rows: dict[str, Any] = {name: each[index] for name, each in pooled.items()}
        rows |= {name: [items[k] for k in self._pooled] for name, items in images.items()}
        self._images = rows.get("num_images")
        return rows

    def _worth_running(self, pooled: Mapping[str, Tensor], images: Sequence[int] | None) -> Ints:
        """Rows with completion tokens: others have no gradient. Shortest of the others where a step would have none.

        One with images among them if there is any, see `in_order`.
        """
        mask = pooled["attention_mask"]
        scored = mask[:, -self.completion :].sum(1).cpu().numpy()
        rows, others = np.flatnonzero(scored), np.flatnonzero(scored == 0)
        missing = len(self.entries) - len(rows)
        if missing > 0:
            lengths = mask.sum(1).cpu().numpy()[others]
            rows = np.concatenate([rows, others[np.argsort(lengths, kind="stable")[:missing]]])
        seeing = np.flatnonzero(images) if images is not None else rows[:0]
        if len(seeing) and not np.isin(seeing, rows).any():
            rows = np.append(rows, seeing[:1])
        return np.sort(rows)

    @property
    def stats(self) -> PaddingStats:
        """Counts of the window: its stock micro-batches as batches, rows that are left out among the rows."""
        left_out = len(self.entries) * self._rows - len(self._pooled)
        stats = self.batches.stats
        return replace(
            stats,
            batches=len(self.entries),
            rows=stats.rows + left_out,
            slots_before=stats.slots_before + left_out * self.batches.table.widths[0],
            loss_tokens=sum(int(entry.inputs["completion_mask"].sum()) for entry in self.entries),
        )

    def chunks(self) -> list[int]:
        """Indices of the micro-batches that belong to the current stock step."""
        count, steps = len(self.order), len(self.entries)
        return self.order[self.step * count // steps : (self.step + 1) * count // steps]

    def places(self, chunk: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Entry -> rows of the chunk that belong to it, and their rows in it."""
        if chunk not in self._places:
            self._places[chunk] = self._find_places(chunk)
        return self._places[chunk]

    def _find_places(self, chunk: int) -> dict[int, tuple[Tensor, Tensor]]:
        rows = self._pooled[self.batches.slot_maps[chunk].rows]
        entry, row = rows // self._rows, rows % self._rows
        return {
            int(e): (torch.as_tensor(np.flatnonzero(entry == e)), torch.as_tensor(row[entry == e]))
            for e in np.unique(entry)
        }

    def start_buffers(self, scores: Scores) -> None:
        """Buffers for entries that have none: what the old policy says, or zeros, until a chunk has run."""
        for entry in self.entries:
            if not entry.buffers:
                entry.buffers = [
                    None if values is None else _start(values, entry.inputs, (self._rows, self.completion), k == 0)
                    for k, values in enumerate(scores.per_token)
                ]

    def forget(self) -> None:
        """As if no chunk had run."""
        self._seen.clear()
        for entry in self.entries:
            entry.buffers = []

    def with_live_rows(self, chunk: int, scores: Scores) -> dict[int, list[Tensor | None]]:
        """Entry -> its buffers with the chunk's rows live, for every entry that the chunk has rows of."""
        live: dict[int, list[Tensor | None]] = {}
        for e, (own, rows) in self.places(chunk).items():
            pairs = zip(self.entries[e].buffers, scores.per_token, strict=True)
            live[e] = [
                None if buffer is None or values is None else buffer.index_copy(0, *_on(values, rows, own))
                for buffer, values in pairs
            ]
        return live

    def store(self, chunk: int, scores: Scores) -> None:
        """Keeps the chunk's values."""
        for e, (own, rows) in self.places(chunk).items():
            self._seen.update((e * self._rows + rows).tolist())
            for buffer, values in zip(self.entries[e].buffers, scores.per_token, strict=True):
                if buffer is not None and values is not None:
                    index, source = _on(values.detach(), rows, own)
                    buffer[index] = source

    def clear_unseen(self) -> None:
        """Zeros for rows that no chunk has run, as stock gives rows without completion tokens after masking."""
        for e, entry in enumerate(self.entries):
            unseen = [row for row in range(self._rows) if e * self._rows + row not in self._seen]
            for buffer in entry.buffers:
                if buffer is not None and unseen:
                    buffer[torch.as_tensor(unseen, device=buffer.device)] = 0

    def pull(self, chunk: int, scores: Scores) -> Tensor:
        """Replay: the loss whose gradient is the chunk's part of that of the whole window."""
        total = scores.per_token[0].new_zeros(())  # type: ignore[union-attr]
        for e, (own, rows) in self.places(chunk).items():
            for values, gradient in zip(scores.per_token, self.entries[e].gradients, strict=True):
                if values is not None and gradient is not None:
                    own_index, row_index = own.to(values.device), rows.to(values.device)
                    total = total + (values[own_index] * gradient[row_index]).sum()
        return total


def _start(values: Tensor, inputs: Mapping[str, Any], shape: tuple[int, int], of_log_probs: bool) -> Tensor:
    """A buffer whose ratios to the old policy are 1, so that rows that have not run yet overflow nothing."""
    buffer = values.detach().new_zeros(shape)
    if of_log_probs and inputs.get("old_per_token_logps") is not None:
        buffer.copy_(inputs["old_per_token_logps"])
    elif of_log_probs and inputs.get("old_logps") is not None:  # RLOO: sums over rows
        buffer[:, 0] = inputs["old_logps"]
    return buffer


def _on(values: Tensor, rows: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    return rows.to(values.device), values[own.to(values.device)]
