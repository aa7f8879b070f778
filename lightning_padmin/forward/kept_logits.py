"""`logits_to_keep=k` in a call that runs in chunks: the last k columns of the batch, not those of each chunk.

    columns of the batch   0 1 2 3 4 5        slots of the chunk   0 1 2 3        the last two columns
    row a (start 2)        . . a b c d   ->                        a b c d   ->   c d
    row b (start 3)        . . . e f g   ->                        e f g .   ->   f g

In a chunk, rows begin in slot 0 and end anywhere, so it is asked for as many of its last columns as its shortest row
needs, and each row's own are picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_padmin.errors import BatchError
from lightning_padmin.microbatching import MicroBatches, SlotMap
from lightning_padmin.runtime import layers, takes

_NAMES = ("logits_to_keep", "num_logits_to_keep")  # the second is what older models call it


@dataclass(frozen=True)
class KeptLogits:
    """What a call asks for.

    Attributes:
        name: of the argument.
        count: last columns of the batch.
    """

    name: str
    count: int

    @staticmethod
    def taken_from(inputs: dict[str, Any], model: Any, has_labels: bool) -> KeptLogits | None:
        """Takes the argument out of the inputs; None where all logits are kept.

        Raises:
            BatchError: what it asks for cannot be told apart in chunks.
        """
        given = [name for name in _NAMES if name in inputs]
        if not given or (isinstance(inputs[given[0]], int) and inputs[given[0]] == 0):
            return None
        name = given[0]
        count = inputs[name]
        if isinstance(count, Tensor) or not isinstance(count, int) or isinstance(count, bool) or count < 0:
            what = f"a tensor of shape {tuple(count.shape)}" if isinstance(count, Tensor) else repr(count)
            raise BatchError(
                f"{name} is {what}: columns of the batch are others in chunks, whose rows are rolled and trimmed. Give "
                f"the number of last columns, or leave {name} out and take those columns of the logits"
            )
        if has_labels:
            raise BatchError(
                f"{name}={count} is among the inputs next to labels, whose loss needs all logits: leave {name} out"
            )
        if not _honours(model, name):
            raise BatchError(
                f"{name}={count}: {type(model).__name__} does not say that it takes this, so what it returns is not "
                f"known: leave {name} out and take [:, -{count}:] of the logits"
            )
        del inputs[name]
        return KeptLogits(name, count)

    def check(self, mask: Any) -> None:
        """Raises BatchError for rows whose last columns are padding: their logits mean nothing."""
        if not isinstance(mask, Tensor) or mask.ndim != 2 or 0 in mask.shape:
            return  # whoever plans the batch says what is wrong
        real = mask != 0
        behind = (real.any(dim=1) & ~real[:, -1]).nonzero().flatten().tolist()
        if behind:
            raise BatchError(
                f"{self.name}={self.count} keeps the last columns, and {len(behind)} rows have padding there (first "
                f"row {behind[0]}): pad on the left, or leave {self.name} out and take [:, -{self.count}:] of the "
                "logits, where padding slots hold zeros"
            )

    def argument(self, slots: SlotMap, is_packed: bool) -> dict[str, int]:
        """What a chunk's call gets: as many last columns as any of its rows needs; all of a pack."""
        return {} if is_packed else {self.name: slots.widths[0] - int(self._slots(slots)[:, 0].clip(min=0).min())}

    def _slots(self, slots: SlotMap) -> Any:
        """(n, k) slot of each row's last columns; negative or beyond the row's length: padding."""
        count, source = min(self.count, slots.source_widths[0]), slots.source_widths[0]
        first = np.minimum(source - count - slots.start[:, :1], slots.widths[0] - 1)  # a row without real tokens
        return first + np.arange(count)

    def restore(self, batches: MicroBatches, parts: Sequence[Tensor]) -> Tensor:
        """Logits (B, k, ...) of those of the chunks.

        Raises:
            BatchError: a chunk has another number of columns than it was asked for.
        """
        if len(batches.schema.widths) > 1:
            raise BatchError(f"{self.name} is not known for rows of an encoder-decoder: leave it out")
        if batches.plan.is_packed:
            return batches.restore(parts)[:, -self.count :]
        rows = []
        for slots, part in zip(batches.slot_maps, parts, strict=True):
            asked = self.argument(slots, False)[self.name]
            if part.ndim < 2 or tuple(part.shape[:2]) != (len(slots), asked):
                raise BatchError(
                    f"{self.name}={asked} of a chunk gave logits of shape {tuple(part.shape)}: leave {self.name} out"
                )
            slot = self._slots(slots)
            row, column = np.nonzero((slot >= 0) & (slot < slots.length[:, :1]))
            taken = slot[row, column] - (slots.widths[0] - asked)
            place, source = (
                tuple(torch.as_tensor(index, device=part.device) for index in pair)
                for pair in ((row, column), (row, taken))
            )
            made = part.new_zeros((len(slots), slot.shape[1], *part.shape[2:]))
            rows.append(made.index_put(place, part[source]))
        return batches.restore_rows(rows)


def _honours(model: Any, name: str) -> bool:
    """Whether the model inside of wrappers has an argument of that name; one that takes all names may ignore it."""
    try:
        return any(takes(each, name, by_name=True) for each in layers(model))
    except (TypeError, ValueError):
        return False
