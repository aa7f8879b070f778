"""The row table: where each row's real tokens start and end, and what the row weighs in the loss.

Everything is computed on the batch's own device and comes to the host in one copy per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_padmin.errors import BatchError
from lightning_padmin.schema import Schema
from lightning_padmin.tree import iter_leaves


@dataclass(frozen=True)
class RowTable:
    """What planning needs to know of a batch. B rows; A axes: 1, or 2 for encoder-decoder rows.

    Attributes:
        start: (B, A) int64, column of each row's first real token.
        length: (B, A) int64, span from first to last real token, interior mask holes included; 1 for a row without
            any real token, which still needs a slot to stand in.
        real_tokens: (B,) int64, attended tokens, both axes.
        loss_tokens: (B,) int64, tokens that carry loss after the roll and the shift.
        weight: (B,) float64, the row's share u in a mean over the batch (see `measure`).
        widths: width of the batch per axis.
        counts_loss: whether the batch has labels or a loss mask, so that `loss_tokens` means something.
        lost_targets: rows whose first real token has a label that was predicted from a pad and is gone once rolled.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    real_tokens: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]
    weight: NDArray[np.float64]
    widths: tuple[int, ...]
    counts_loss: bool = True
    lost_targets: int = 0

    def __len__(self) -> int:
        return len(self.length)

    @property
    def has_loss(self) -> bool:
        """Whether any row carries loss; a mean over none would be 0/0."""
        return bool(self.weight.sum() > 0 and (self.loss_tokens.any() or not self.counts_loss))

    @property
    def slots(self) -> int:
        """Slots of the batch as it came: rows x width, both axes."""
        return len(self) * sum(self.widths)


def measure(
    batch: Any,
    schema: Schema,
    *,
    ignore_index: int = -100,
    label_shift: int | None = None,
    loss_reduction: str | Callable[[Any], Tensor] = "token-mean",
) -> RowTable:
    """The row table of a batch.

    Loss tokens are counted as the loss will see them after the roll: labels other than `ignore_index` (where the loss
    mask is nonzero, if there is one) at least `label_shift` columns after the row's first real token. The weight u of
    a row is its loss tokens (or the sum of its loss mask) for `"token-mean"`, 1 for `"row-mean"` and `"sum"`, and
    what a function returns otherwise; a micro-batch's mean counts `u[rows].sum() / u.sum()` in the batch's mean.

    Args:
        batch: the batch that `schema` was inferred from.
        schema: its schema.
        ignore_index: label without loss.
        label_shift: 1 if the loss shifts labels by one; None: 1 on the input axis, 0 on the decoder axis.
        loss_reduction: `"token-mean"`, `"row-mean"`, `"sum"`, or a function batch -> (B,) of non-negative weights.

    Raises:
        BatchError: a mask of zeros or with negative values, labels or loss mask outside of a row's span, no labels
            where tokens must be counted, or weights that are not (B,), finite and non-negative.
    """
    leaves = dict(iter_leaves(batch, schema.fields))
    shift = label_shift if label_shift is not None else int(schema.labels_axis == "input")
    spans = [_Span.of(leaves[schema.mask])]
    columns = spans[0].columns()
    if len(schema.widths) == 2:
        spans.append(_decoder_span(leaves, schema, ignore_index))
        columns |= spans[1].columns("decoder_")
    columns |= _loss_columns(leaves, schema, spans, ignore_index, shift)
    if not isinstance(loss_reduction, str):
        columns["weight"] = _user_weight(loss_reduction, batch, schema.rows).to(spans[0].real.device)
    table = _to_host(columns)
    _validate(table, schema, ignore_index, loss_reduction)
    axes = ["", "decoder_"][: len(spans)]
    loss_tokens = table["loss_tokens"].astype(np.int64)
    weight = {"token-mean": table["loss_weight"], "row-mean": np.ones(schema.rows), "sum": np.ones(schema.rows)}
    return RowTable(
        start=np.stack([table[axis + "start"] for axis in axes], axis=1).astype(np.int64),
        length=np.stack([table[axis + "length"] for axis in axes], axis=1).astype(np.int64),
        real_tokens=sum(table[axis + "real"] for axis in axes).astype(np.int64),  # type: ignore[union-attr]
        loss_tokens=loss_tokens,
        weight=table["weight"] if callable(loss_reduction) else weight[loss_reduction],
        widths=schema.widths,
        counts_loss=schema.labels is not None or schema.loss_mask is not None,
        lost_targets=int((table["lost"] > 0).sum()),
    )


@dataclass(frozen=True)
class _Span:
    """Span of each row on one axis, as (B,) tensors on the batch's device, and which slots lie inside (B, L)."""

    start: Tensor
    length: Tensor
    real: Tensor
    negative: Tensor
    inside: Tensor

    @staticmethod
    def of(mask: Tensor) -> _Span:
        real = mask != 0
        width = mask.shape[1]
        # argmax takes the first of equal values; flipped, the last. A row without real tokens gives start 0, span 1.
        start = real.int().argmax(dim=1)
        last = width - 1 - real.flip(1).int().argmax(dim=1)
        empty = ~real.any(dim=1)
        last = torch.where(empty, start, last)
        column = torch.arange(width, device=mask.device)
        inside = (column >= start[:, None]) & (column <= last[:, None])
        return _Span(start, last - start + 1, real.sum(dim=1), (mask < 0).any(dim=1), inside)

    @staticmethod
    def until_last(real: Tensor) -> _Span:
        """Spans that begin at column 0: leading slots without a label are a prompt, not padding."""
        span = _Span.of(real)
        last = span.start + span.length - 1
        inside = torch.arange(real.shape[1], device=real.device) <= last[:, None]
        zero = torch.zeros_like(last)
        return _Span(zero, last + 1, last + 1, zero.bool(), inside)

    def columns(self, prefix: str = "") -> dict[str, Tensor]:
        names = {"start": self.start, "length": self.length, "real": self.real, "negative": self.negative}
        return {prefix + name: value for name, value in names.items()}


def _decoder_span(leaves: Mapping[str, Any], schema: Schema, ignore_index: int) -> _Span:
    if schema.decoder_mask is not None:
        return _Span.of(leaves[schema.decoder_mask])
    labels = leaves[str(schema.labels)]
    return _Span.until_last(labels != ignore_index)


def _loss_columns(
    leaves: Mapping[str, Any], schema: Schema, spans: list[_Span], ignore_index: int, shift: int
) -> dict[str, Tensor]:
    """Loss tokens, their weight, and what would be lost or is misplaced, (B,) each."""
    nothing = torch.zeros(schema.rows, dtype=torch.int64, device=spans[0].real.device)
    names = ("loss_tokens", "loss_weight", "lost", "labels_outside", "loss_mask_outside", "loss_mask_negative")
    columns = dict.fromkeys(names, nothing)
    labels = leaves[schema.labels] if schema.labels is not None else None
    loss_mask = leaves[schema.loss_mask] if schema.loss_mask is not None else None
    if labels is not None and labels.ndim == 1:  # one label per row
        valid = (labels != ignore_index).long()
        return columns | {"loss_tokens": valid, "loss_weight": valid}
    if labels is None and loss_mask is None:
        return columns
    span = (
        spans[-1] if "decoder" in (schema.fields[p].axis for p in (schema.labels, schema.loss_mask) if p) else spans[0]
    )
    selected = torch.ones_like(span.inside)
    if labels is not None:
        selected = labels != ignore_index
        columns["labels_outside"] = (selected & ~span.inside).sum(dim=1)
    if loss_mask is not None:
        columns["loss_mask_outside"] = ((loss_mask != 0) & ~span.inside).sum(dim=1)
        columns["loss_mask_negative"] = (loss_mask < 0).sum(dim=1)
        selected = selected & (loss_mask != 0)
    column = torch.arange(selected.shape[1], device=selected.device)
    early = column < (span.start + shift)[:, None]
    counted = selected & span.inside & ~early
    columns["loss_tokens"] = counted.sum(dim=1)
    columns["loss_weight"] = columns["loss_tokens"]
    if loss_mask is not None:
        columns["loss_weight"] = (loss_mask.to(_host_dtype(loss_mask.device)) * counted).sum(dim=1)
    # A target in the first column of the batch was never trained; one behind leading pads was, from a pad.
    columns["lost"] = (selected & span.inside & early & (column >= shift)).sum(dim=1)
    return columns


def _user_weight(function: Callable[[Any], Tensor], batch: Any, rows: int) -> Tensor:
    weight = function(batch)
    if not isinstance(weight, Tensor) or weight.shape != (rows,):
        found = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise BatchError(f"the loss_reduction function returned {found}, expected a tensor of shape ({rows},)")
    return weight.detach()


def _to_host(columns: Mapping[str, Tensor]) -> dict[str, NDArray[np.float64]]:
    """One device-to-host copy of all columns."""
    dtype = _host_dtype(next(iter(columns.values())).device)
    host = torch.stack([column.to(dtype) for column in columns.values()]).cpu().numpy().astype(np.float64)
    return dict(zip(columns, host, strict=True))


def _host_dtype(device: torch.device) -> torch.dtype:
    """Counts are exact in float64; MPS has none, and float32 is exact up to 2^24 tokens a row."""
    return torch.float32 if device.type == "mps" else torch.float64


def _validate(
    table: Mapping[str, NDArray[np.float64]], schema: Schema, ignore_index: int, loss_reduction: object
) -> None:
    """Raises BatchError for values that cannot be right."""
    for prefix, path in (("", schema.mask), ("decoder_", schema.decoder_mask)):
        if path is None:
            continue
        if table[prefix + "negative"].any():
            raise BatchError(
                f"{path!r} has negative values (row {_first(table[prefix + 'negative'])}): expected a mask that is "
                "nonzero on real tokens, not an additive one"
            )
        if not table[prefix + "real"].any():
            raise BatchError(f"{path!r} is all zero: no row of the batch has a real token. Fix the collate function")
    for flag, path in (("labels_outside", schema.labels), ("loss_mask_outside", schema.loss_mask)):
        if path is not None and table[flag].any():
            row = _first(table[flag])
            raise BatchError(
                f"{path!r} carries loss on {int(table[flag].sum())} padding slots (first in row {row}), which "
                f"trimming would drop: set them to {ignore_index if flag == 'outside' else 0}, or fix the mask "
                f"{schema.decoder_mask or schema.mask!r}"
            )
    if table["loss_mask_negative"].any():
        raise BatchError(f"{schema.loss_mask!r} has negative values (row {_first(table['loss_mask_negative'])})")
    if loss_reduction == "token-mean" and schema.labels is None and schema.loss_mask is None:
        raise BatchError(
            "loss_reduction='token-mean' counts loss tokens, but the batch has no labels: name their entry in "
            "labels_key (or loss_mask_key), or set loss_reduction to 'row-mean', 'sum' or a function batch -> weights"
        )
    if "weight" in table and not (np.isfinite(table["weight"]).all() and (table["weight"] >= 0).all()):
        raise BatchError(
            f"the loss_reduction function returned {table['weight'].tolist()}: expected finite weights >= 0"
        )


def _first(flags: NDArray[np.float64]) -> int:
    return int(np.flatnonzero(flags)[0])
