"""The row table: where each row's real tokens start and end, and what the row weighs in the loss.

There is no padding side: a row has a start and a length, and padding in front is a start above 0. Everything is
computed on the batch's own device and comes to the host in one copy per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_padmin.batch.columns import as_table, in_front
from lightning_padmin.batch.fields import AXES, Schema
from lightning_padmin.batch.spec import LossSpec
from lightning_padmin.batch.tree import FlatBatch, last_part
from lightning_padmin.batch.units import counting_entries, units_per_row
from lightning_padmin.errors import BatchError


@dataclass(frozen=True, eq=False)
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
        by_token: whether loss tokens are positions, so that a mean over them is another than one over rows.
        lost_targets: rows whose first real token has a label that was predicted from a pad and is gone once rolled.
        units: path of each unit entry -> (B,) int64, how many of its slices each row has.
        first_weight: (B,) float64, what a label on each row's first real token weighs in the loss, whatever the shift;
            0 where there is none. Only a loss that does not shift labels takes it.
        behind: (B,) bool, rows whose first real token has such a label and stands behind padding: a loss that shifts
            labels loses it by the roll.
        shift: how many labels at the beginning of a row are predicted from before it.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    real_tokens: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]
    weight: NDArray[np.float64]
    widths: tuple[int, ...]
    counts_loss: bool = True
    by_token: bool = True
    lost_targets: int = 0
    units: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    first_weight: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    behind: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    shift: int = 1

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
    other_masks: str | None = "",
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
        other_masks: what a user can do about the mask of another sequence, besides declaring it `"row"`; None: such
            masks may lie as they like, since nothing is trimmed.

    Raises:
        BatchError: a mask of zeros or with negative values, labels or loss mask outside of a row's span, no labels
            where tokens must be counted, weights that are not (B,), finite and non-negative, columns of padding in
            front of a row, or units whose number is not what the batch says.
    """
    loss = LossSpec(reduction=loss_reduction, shift=label_shift, ignore_index=ignore_index)
    return row_table_of(FlatBatch.of(batch, schema.fields), schema, loss, other_masks)


@torch.no_grad()
def row_table_of(batch: FlatBatch, schema: Schema, loss: LossSpec, other_masks: str | None = "") -> RowTable:
    """`measure` of a batch that has been flattened."""
    leaves, ignore_index, loss_reduction = batch.leaves, loss.ignore_index, loss.reduction
    shift = loss.shift if loss.shift is not None else int(schema.labels_axis == "input")
    axes = AXES[: len(schema.widths)]
    spans = [_Span.of(leaves[schema.mask])]
    if len(axes) == 2:
        spans.append(_decoder_span(leaves, schema, ignore_index))
    columns: dict[str, Tensor] = {}
    for axis, span in zip(axes, spans, strict=True):
        columns |= {f"{axis}_start": span.start, f"{axis}_length": span.length, f"{axis}_real": span.real}
        columns[f"{axis}_malformed"] = span.malformed
    columns |= _loss_columns(leaves, schema, spans[AXES.index(schema.labels_axis)], ignore_index, shift)
    columns |= _other_masks_outside(leaves, schema, spans[0])
    for path, entry in schema.fields.items():
        if entry.kind == "column":
            k = AXES.index(entry.axis)
            columns[f"column {path}"] = in_front(
                as_table(leaves[path], entry.row_dim), spans[k].start, schema.widths[k]
            )
    if not isinstance(loss_reduction, str):
        columns["weight"] = _user_weight(loss_reduction, batch.whole, schema.rows)
    table, counting = _to_host(leaves[schema.mask].device, columns, counting_entries(leaves, schema))
    _validate(table, schema, ignore_index, loss_reduction, other_masks)
    ones = np.ones(schema.rows)
    weights = {"token-mean": table["loss_weight"], "row-mean": ones, "sum": ones}
    return RowTable(
        start=np.stack([table[f"{axis}_start"] for axis in axes], axis=1).astype(np.int64),
        length=np.stack([table[f"{axis}_length"] for axis in axes], axis=1).astype(np.int64),
        real_tokens=np.stack([table[f"{axis}_real"] for axis in axes]).sum(axis=0).astype(np.int64),
        loss_tokens=table["loss_tokens"].astype(np.int64),
        weight=weights[loss_reduction] if isinstance(loss_reduction, str) else table["weight"],
        widths=schema.widths,
        counts_loss=schema.labels is not None or schema.loss_mask is not None,
        by_token=schema.loss_mask is not None or (schema.labels is not None and _along_positions(schema)),
        lost_targets=int((table["lost"] > 0).sum()),
        units=units_per_row(leaves, schema, counting),
        first_weight=table["first_weight"],
        behind=table["behind"] > 0,
        shift=shift,
    )


_NEVER_NEGATIVE = (torch.bool, torch.uint8)


@dataclass(frozen=True, eq=False)
class _Span:
    """Span of each row on one axis, as (B,) tensors on the batch's device, and which slots lie inside (B, L)."""

    start: Tensor
    length: Tensor
    real: Tensor
    malformed: Tensor
    inside: Tensor

    @staticmethod
    def of(mask: Tensor) -> _Span:
        real = mask != 0
        width = mask.shape[1]
        # argmax takes the first of equal values; flipped, the last. A row without real tokens gets start 0, length 1,
        # and no slot inside.
        start = real.int().argmax(dim=1)
        count = real.sum(dim=1)
        some = count > 0
        last = torch.where(some, width - 1 - real.flip(1).int().argmax(dim=1), start)
        column = torch.arange(width, device=mask.device)
        inside = (column >= start[:, None]) & (column <= torch.where(some, last, -1)[:, None])
        malformed = ~some & some if mask.dtype in _NEVER_NEGATIVE else ~(mask.amin(dim=1) >= 0)  # nan is malformed
        return _Span(start, last - start + 1, count, malformed, inside)

    @staticmethod
    def until_last(real: Tensor) -> _Span:
        """Spans that begin at column 0: leading slots without a label are a prompt, not padding."""
        span = _Span.of(real)
        length = span.start + span.length
        inside = torch.arange(real.shape[1], device=real.device) < length[:, None]
        return _Span(torch.zeros_like(length), length, length, torch.zeros_like(span.malformed), inside)


def _decoder_span(leaves: Mapping[str, Any], schema: Schema, ignore_index: int) -> _Span:
    if schema.decoder_mask is not None:
        return _Span.of(leaves[schema.decoder_mask])
    return _Span.until_last(_carries(leaves[str(schema.labels)], ignore_index))


def _other_masks_outside(leaves: Mapping[str, Any], schema: Schema, span: _Span) -> dict[str, Tensor]:
    """(B,) tokens that each other `attention_mask` of the batch attends to but the trim would drop."""
    outside = {}
    for path in _other_masks(schema):
        mask = leaves[path]
        if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point():  # others may be additive
            outside[f"other {path}"] = ((mask != 0) & ~span.inside).sum(dim=1)
    return outside


def _other_masks(schema: Schema) -> list[str]:
    roles = (schema.mask, schema.decoder_mask, schema.loss_mask)
    named = [path for path in schema.fields if last_part(path) == "attention_mask" and path not in roles]
    return [path for path in named if (schema.fields[path].kind, schema.fields[path].axis) == ("position", "input")]


def _loss_columns(
    leaves: Mapping[str, Any], schema: Schema, span: _Span, ignore_index: int, shift: int
) -> dict[str, Tensor]:
    """Loss tokens, their weight, and what would be lost or is misplaced, (B,) each."""
    names = [*("loss_tokens", "loss_weight", "lost", "first_weight", "behind")]
    names += ["labels_outside", "loss_mask_outside", "loss_mask_malformed"]
    columns = dict.fromkeys(names, torch.zeros_like(span.start))
    labels = leaves[schema.labels] if schema.labels is not None else None
    loss_mask = leaves[schema.loss_mask] if schema.loss_mask is not None else None
    if labels is not None and not _along_positions(schema):  # classification: targets per row
        if loss_mask is None:
            by_row = labels.movedim(schema.fields[str(schema.labels)].row_dim, 0).reshape(schema.rows, -1)
            columns["loss_tokens"] = columns["loss_weight"] = _carries(by_row, ignore_index).sum(dim=1)
            return columns
        labels = None
    if labels is None and loss_mask is None:
        return columns
    selected = span.inside
    if labels is not None:
        carries = _carries(labels, ignore_index)
        selected = selected & carries
        columns["labels_outside"] = carries.sum(dim=1) - selected.sum(dim=1)
    if loss_mask is not None:
        weighs = loss_mask != 0
        columns["loss_mask_outside"] = (weighs & ~span.inside).sum(dim=1)
        columns["loss_mask_malformed"] = (~(loss_mask >= 0) | loss_mask.isinf()).any(dim=1)
        selected = selected & weighs
    # The first labels of a row are predicted from before it; there are `shift` of them, so only these are looked at.
    width = selected.shape[1]
    first = span.start[:, None] + torch.arange(min(shift, width), device=selected.device)
    early = selected.gather(1, first.clamp(max=width - 1)) & (first < width)
    columns["loss_tokens"] = columns["loss_weight"] = selected.sum(dim=1) - early.sum(dim=1)
    columns["first_weight"] = selected.gather(1, span.start[:, None])[:, 0]
    if loss_mask is not None:
        of_first = loss_mask.gather(1, span.start[:, None])[:, 0]
        columns["first_weight"] = columns["first_weight"] * of_first.to(_host_dtype(loss_mask.device))
        counted = selected.scatter(1, first.clamp(max=width - 1), False) if shift else selected
        columns["loss_weight"] = (loss_mask.to(_host_dtype(loss_mask.device)) * counted).sum(dim=1)
    columns["behind"] = (columns["first_weight"] > 0) & (span.start > 0)
    # A target in the first column of the batch was never trained; one behind leading pads was, from a pad.
    columns["lost"] = (early & (first >= shift)).sum(dim=1)
    return columns


def _along_positions(schema: Schema) -> bool:
    return schema.fields[str(schema.labels)].kind == "position"


def _carries(labels: Tensor, ignore_index: int) -> Tensor:
    """Which labels carry loss; an unsigned one must not wrap around to the index."""
    return (labels if labels.is_floating_point() else labels.long()) != ignore_index


def _user_weight(function: Callable[[Any], Tensor], batch: Any, rows: int) -> Tensor:
    weight = function(batch)
    if not isinstance(weight, Tensor) or weight.shape != (rows,):
        found = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise BatchError(f"the loss_reduction function returned {found}, expected a tensor of shape ({rows},)")
    return weight


def _to_host(device: torch.device, *groups: Mapping[str, Tensor]) -> list[dict[str, NDArray[np.float64]]]:
    """One device-to-host copy of tensors of any shapes; they come back in their groups."""
    tensors = [tensor for group in groups for tensor in group.values()]
    dtype = _host_dtype(device)
    joined = torch.cat([tensor.to(dtype).to(device).reshape(-1) for tensor in tensors]).cpu().numpy()
    parts = np.split(joined.astype(np.float64), np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    arrays = iter(part.reshape(tuple(tensor.shape)) for part, tensor in zip(parts, tensors, strict=True))
    return [{name: next(arrays) for name in group} for group in groups]


def _host_dtype(device: torch.device) -> torch.dtype:
    """Counts are exact in float64; MPS has none, and float32 is exact up to 2^24 tokens a row."""
    return torch.float32 if device.type == "mps" else torch.float64


def _validate(
    table: Mapping[str, NDArray[np.float64]],
    schema: Schema,
    ignore_index: int,
    loss_reduction: object,
    other_masks: str | None,
) -> None:
    """Raises BatchError for values that cannot be right."""
    for axis, path in (("input", schema.mask), ("decoder", schema.decoder_mask)):
        if path is None:
            continue
        if table[f"{axis}_malformed"].any():
            raise BatchError.undeclared(
                f"{path!r} has negative values (row {_first(table[f'{axis}_malformed'])}): expected a mask that is "
                "nonzero on real tokens, not an additive one"
            )
        if not table[f"{axis}_real"].any():
            raise BatchError(f"{path!r} is all zero: no row of the batch has a real token. Fix the collate function")
    spanning = schema.decoder_mask if schema.labels_axis == "decoder" else schema.mask
    for flag, path, mask, fix in (
        ("labels_outside", schema.labels, spanning, f"set them to {ignore_index}"),
        ("loss_mask_outside", schema.loss_mask, spanning, "set them to 0"),
    ):
        if table[flag].any():
            raise BatchError(
                f"{path!r} is set on {int(table[flag].sum())} padding slots (first in row {_first(table[flag])}), "
                f"which trimming would drop: {fix}, or fix the mask {mask!r}"
            )
    for path in _other_masks(schema) if other_masks is not None else ():
        flags = table.get(f"other {path}")
        if flags is not None and flags.any():
            raise BatchError.undeclared(
                f"{path!r} is set on {int(flags.sum())} slots that are padding by {schema.mask!r} (first in row "
                f"{_first(flags)}), and trimming would drop them. It looks like the mask of another sequence: declare "
                f"batch_schema={{{(path.rpartition('.')[0] or path)!r}: 'row'}}, so that it goes with its rows as it is"
                f"{other_masks}. If both are masks of one sequence, mend the one that is wrong"
            )
    if table["loss_mask_malformed"].any():
        row = _first(table["loss_mask_malformed"])
        raise BatchError(f"{schema.loss_mask!r} has values that are negative or not finite (row {row})")
    divisor = next((path for path in schema.fields if last_part(path) == "num_items_in_batch"), None)
    if divisor is not None and loss_reduction != "sum":
        raise BatchError(
            f"the batch brings its own divisor {divisor!r}, so its loss is a sum over that number: set "
            "loss_reduction='sum'"
        )
    if loss_reduction == "token-mean" and schema.labels is None and schema.loss_mask is None:
        raise BatchError.undeclared(
            "loss_reduction='token-mean' counts loss tokens, but the batch has no labels: name their entry in "
            f"labels_key; if every attended token carries loss, set loss_mask_key={schema.mask!r}. Change "
            "loss_reduction only if the loss is reduced that way ('row-mean', 'sum' or a function batch -> weights)"
        )
    for path, entry in schema.fields.items():
        if entry.kind == "column" and (table[f"column {path}"] >= 0).any():
            row = int(np.flatnonzero(table[f"column {path}"] >= 0)[0])
            raise BatchError.undeclared(
                f"{path!r} of row {row} is {int(table[f'column {path}'][row])}, and that row begins at column "
                f"{int(table[f'{entry.axis}_start'][row])}: it points at padding, which is removed. Give columns of "
                f"the padded batch; if its values are no columns, declare batch_schema={{{path!r}: 'row'}}"
            )
    if "weight" in table and not (np.isfinite(table["weight"]).all() and (table["weight"] >= 0).all()):
        raise BatchError(
            f"the loss_reduction function returned {table['weight'].tolist()}: expected finite weights >= 0"
        )


def _first(flags: NDArray[np.float64]) -> int:
    return int(np.flatnonzero(flags)[0])
