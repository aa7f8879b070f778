"""Whether the model computes a row in a chunk as it does alone: with other rows and padding behind it, or as it came.

Rows run through the trainer's own log-prob function, one or two at a time, never more slots than the budget. Each row
alone, unpadded, is the oracle: the left padding that stock puts before prompts is itself wrong for models that count
positions by column, and is gone here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_padmin.errors import GradientCheckError
from lightning_padmin.integrations.common import Isolated, Seen, Topology, added
from lightning_padmin.integrations.trl.images import joined
from lightning_padmin.integrations.trl.logprobs import StockFunction, first_tokens, score_chunk
from lightning_padmin.microbatching import MicroBatch, MicroBatches, SlotMap, pad_layout

Ints = NDArray[np.int64]
_OFF = "or use PadMinConfig(enabled=False)"


class Status(IntEnum):
    """The larger one holds where ranks differ."""

    CANNOT_TELL = 0
    SAME = 1
    ROLLED = 2
    FLIPS = 3
    COUPLES = 4
    PADDING = 5


@dataclass(frozen=True)
class Found:
    """What a check of the model has found, the status the same on all ranks.

    Attributes:
        status: of all ranks.
        own: of this rank.
        difference: max |difference| / max |alone| of this rank.
        where: where that is.
    """

    status: Status
    own: Status
    difference: float = 0.0
    where: str = ""

    def refuse(self, since: str = "") -> None:
        """Raises GradientCheckError for a model that depends on how rows are grouped.

        Args:
            since: the end of what it says.
        """
        if self.status < Status.COUPLES:
            return
        here = self.own == self.status
        differs = f" (relative difference {self.difference:.2g}, most in {self.where!r})" if here else ""
        if self.status == Status.PADDING:
            raise GradientCheckError(
                f"check of the model: a row with padding behind it has other log-probs or gradients than without"
                f"{differs}: the model reads padding (attention that looks ahead, a normalisation or a mean over all "
                f"columns, a mask that is not passed on). Have it leave out padding by the mask, {_OFF}{since}"
            )
        raise GradientCheckError(
            f"check of the model: rows that run together have other log-probs or gradients than each alone{differs}: "
            f"the model couples rows, which are regrouped here. Have it keep rows apart, {_OFF}{since}"
        )

    @property
    def words(self) -> str:
        """What the user should know of a model that is not refused; empty if nothing."""
        if self.own == Status.ROLLED:
            return (
                "left padding before prompts changes gradients of this model (relative difference "
                f"{self.difference:.2g}): it counts positions by column, or reads that padding. Here each row is "
                "trained as it is without padding"
            )
        if self.own == Status.FLIPS:
            return (
                f"gradients of a row alone and with others differ by {self.difference:.2g} in half precision, which "
                "may be tokens that rounding sends to other experts. Whether the model reads padding cannot be told: "
                "run the first steps in float32 once"
            )
        return ""


@dataclass(frozen=True, eq=False)
class _Probe:
    """One or two rows, the shortest first, and how wide that is with padding behind it."""

    rows: Ints
    width: int


def _of(status: Status, apart: tuple[float, str] = (0.0, "")) -> Found:
    return Found(status, status, *apart)


class ModelCheck:
    """One look at the model.

    Args:
        stock: the trainer's log-prob function.
        model: as it is called: unwrapped, or sharded as it is wrapped.
        batches: of the batch whose rows are tried.
        completion: columns T of completions.
        budget: most slots of a pass.
        passes: of the model.
        topology: of the processes.
    """

    def __init__(
        self,
        stock: StockFunction,
        model: nn.Module,
        batches: MicroBatches,
        completion: int,
        budget: int,
        passes: Isolated,
        topology: Topology,
    ) -> None:
        self._stock, self._model, self._batches, self._completion = stock, model, batches, completion
        self._budget, self._passes, self._exchange = budget, passes, topology.exchange
        self._prompts = first_tokens(batches.table, completion)

    def found(self) -> Found:
        """Runs the passes, equally many on every rank, and puts back what they wrote."""
        try:
            probe = self._agreed_probe()
            return _of(Status.CANNOT_TELL) if probe is None else self._found(probe)
        finally:
            self._passes.restore()

    def _found(self, probe: _Probe) -> Found:
        passes, table = self._passes, self._batches.table
        first = probe.rows[:1]
        alone = [self._seen(pad_layout(table, [row])) for row in probe.rows]
        single = self._seen(pad_layout(table, first, least_widths=[probe.width]))
        pair = self._seen(pad_layout(table, probe.rows)) if len(alone) > 1 else None
        padded = int(np.argmax(table.start[probe.rows, 0] > 0))
        came = self._seen(self._as_it_came(probe, padded), came=True)
        limit = passes.tolerance.limit
        by_padding, by_others = passes.apart(single, alone[0]), (0.0, "")
        if pair is not None:
            by_others = passes.apart(pair, added(*alone))
        by_roll = passes.apart(came, alone[padded])
        if passes.drew or not all(np.isfinite(passes.apart(each, each)[0]) for each in alone):
            own = _of(Status.CANNOT_TELL)
        elif not by_padding[0] <= limit:
            own = _of(Status.PADDING, by_padding)
        elif not by_others[0] <= limit:
            own = _of(Status.COUPLES, by_others)
        elif not by_roll[0] <= limit:
            own = _of(Status.ROLLED, by_roll)
        else:
            own = _of(Status.SAME if self._tells(probe) else Status.CANNOT_TELL, max(by_padding, by_others))
        if self._any(own.own >= Status.COUPLES):
            again = self._seen(pad_layout(table, first))  # on all ranks
            if passes.drew or not passes.apart(again, alone[0])[0] <= limit:
                own = _of(Status.CANNOT_TELL)
            elif own.own >= Status.COUPLES and passes.may_be_flips(own.difference):
                own = _of(Status.FLIPS, (own.difference, own.where))
        return replace(own, status=Status(int(self._exchange([own.own])[:, 0].max())))

    def _any(self, flag: bool) -> bool:
        return bool(self._exchange([int(flag)]).any())

    def _tells(self, probe: _Probe) -> bool:
        """Whether rows had padding behind them that chunks may have; where none has any, whether there were several."""
        table = self._batches.table
        lengths = table.length[:, 0]
        if (lengths < table.widths[0]).any():
            return bool(lengths[probe.rows[0]] < probe.width)
        return len(probe.rows) > 1

    # Rows, and how they are laid out.

    def _agreed_probe(self) -> _Probe | None:
        """The shortest row that is scored, and a long one where both fit the budget; as many on every rank."""
        table = self._batches.table
        length = table.length[:, 0]
        scored = np.flatnonzero((self._prompts >= 1) & (length > self._prompts))
        scored = scored[np.argsort(length[scored], kind="stable")]
        fitting = [row for row in scored[1:] if 2 * length[row] <= self._budget]
        rows = [*scored[:1], *fitting[-1:]]
        agreed = int(self._exchange([len(rows)]).min())
        if not agreed:
            return None
        chosen = np.array(rows[:agreed], dtype=np.int64)
        return _Probe(chosen, max(int(length[chosen[0]]), min(table.widths[0], self._budget)))

    def _as_it_came(self, probe: _Probe, which: int) -> SlotMap:
        """One row with padding on both sides, as much of it as the budget allows."""
        table, row = self._batches.table, probe.rows[which : which + 1]
        (start,), (length,), source = table.start[row, 0], table.length[row, 0], table.widths[0]
        width = max(int(length), min(source, self._budget))
        spare = width - int(length)
        left = min(int(start), max(spare // 2, spare - (source - int(start) - int(length))))
        ones = np.ones((1, 1), dtype=np.int64)
        first = int(start) - left
        return SlotMap(row, ones * first, ones * width, (width,), table.widths, len(table), table.units)

    def _seen(self, slots: SlotMap, *, came: bool = False) -> Seen:
        return self._passes.seen(partial(self._values, slots, came))

    def _values(self, slots: SlotMap, came: bool) -> Tensor:
        """Log-probs and entropies of all rows of the batch, (B, T), each with a factor of its own; 0 of other rows."""
        batch = slots.take_batch(self._batches.source, self._batches.schema)
        options = {"compute_entropy": True}
        if came:
            inputs = joined(batch)
            keep = slots.widths[0] - (slots.source_widths[0] - self._completion - int(slots.start[0, 0]))
            keep = min(keep, self._completion)
            outputs = self._stock(
                self._model, inputs.pop("input_ids"), inputs.pop("attention_mask"), keep, **inputs, **options
            )[:2]
            each = [None if e is None else nn.functional.pad(e, (0, self._completion - keep)) for e in outputs]
        else:
            micro = MicroBatch(batch, 1.0, slots.rows, 0, 1)
            each = list(score_chunk(self._stock, self._model, micro, slots, self._completion, options).per_token)
        tokens = (self._batches.table.length[slots.rows, 0] - self._prompts[slots.rows])[:, None]
        columns = np.arange(self._completion)
        factors = 1.0 + (columns + slots.rows[:, None]) % 3 / 3
        parts = []
        for value, weight in zip(each, (1.0, 0.1), strict=True):
            if value is not None:
                own = torch.as_tensor(weight * factors, dtype=value.dtype, device=value.device)
                parts.append((value * own).masked_fill(torch.as_tensor(columns >= tokens, device=value.device), 0))
        total = torch.stack(parts).sum(0)
        rows = torch.as_tensor(slots.rows, device=total.device)
        return total.new_zeros((len(self._prompts), self._completion)).index_copy(0, rows, total)


__all__ = ["Found", "ModelCheck", "Status"]
