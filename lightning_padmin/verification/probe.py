"""Which rows of a batch the first-batch check runs: few, telling, and within the token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_padmin.batch import (
    AXES,
    Field,
    RowTable,
    Schema,
    could_be_columns,
    holds_integers,
    iter_leaves,
    last_part,
)
from lightning_padmin.config import PadMinConfig
from lightning_padmin.microbatching import PackStyle, SlotMap, pack_layout, pad_layout

Ints = NDArray[np.int64]
_MOST_ROWS = 4
_COARSE = 0.05  # a limit for half precision
_NO_TOKENS = ("position_ids", "mask", "labels", "token_type_ids")


@dataclass(frozen=True, eq=False)
class Probe:
    """A few rows of a batch: as they came, rolled and trimmed, and in two groups, or all in one pack."""

    rows: Ints
    groups: tuple[Ints, ...]
    came: SlotMap
    whole: SlotMap
    parts: tuple[SlotMap, ...]


def probe_sizes(table: RowTable, config: PadMinConfig, limit: float) -> tuple[set[int], set[int]]:
    """How many rows a probe of this batch can have, two to four, and with how many it tells reductions apart.

    Ranks probe the same number of rows, since a training step may gather what they compute.
    """
    groups = {n: each for n in range(2, _MOST_ROWS + 1) if (each := _groups(table, config, n)) is not None}
    return set(groups), {n for n, each in groups.items() if tells_reductions(table, each, limit)}


def make_probe(
    batch: Any,
    schema: Schema,
    table: RowTable,
    config: PadMinConfig,
    n: int,
    packs: PackStyle | None = None,
    groups: tuple[Ints, Ints] | None = None,
) -> Probe:
    """`n` rows that carry loss, half with few and half with many loss tokens, within the budget if that can be.

    With `packs`, all of them in one pack that has these; with `groups`, these.
    """
    groups = _groups(table, config, n) if groups is None else groups
    assert groups is not None
    rows = np.sort(np.concatenate(groups))
    # Numbers of columns that nobody has declared would point elsewhere.
    may_crop = not masked_tokens_vary(batch, schema, table, rows) and not any(
        entry.kind == "column" or fits for _, entry, fits in maybe_columns(batch, schema, table)
    )
    came = _as_it_came(table, rows, _budget(table, config) if may_crop else None, config.pad_to_multiple_of)
    whole = _rolled(schema, table, rows, config)
    if packs is not None:
        return Probe(rows, (rows,), came, whole, (pack_layout(table, rows, packs),))
    return Probe(rows, groups, came, whole, tuple(_rolled(schema, table, each, config) for each in groups))


def first_label_groups(
    table: RowTable, config: PadMinConfig, limit: float, subtracts_lost: bool
) -> dict[int, tuple[Ints, Ints]]:
    """Rows that tell whether the loss takes labels on first tokens, by their number; empty where none do.

    Of two groups one holds such a label and the other does not, or less of it, so that their shares in a token mean
    differ between both cases by more than the limit. Where the loss is a sum from whose divisor lost targets are
    subtracted, a row that loses one tells.
    """
    spans = table.length.sum(axis=1)
    if not len(table.first_weight):
        return {}
    if subtracts_lost:
        carries = np.flatnonzero(_carries(table))
        lost = carries[table.behind[carries]]
        others = carries[np.argsort(spans[carries], kind="stable")]
        lost = lost[np.lexsort((spans[lost], table.loss_tokens[lost]))]
        others = others[others != lost[0]] if len(lost) else others[:0]
        return {2: (lost[:1], others[:1])} if len(others) else {}
    without = table.weight if table.shift >= 1 else table.weight - table.first_weight
    candidates = np.flatnonzero(without + table.first_weight > 0)
    candidates = candidates[_least_first(table, candidates, _budget(table, config) // 2)]
    if len(candidates) < 2:
        return {}
    without = without[candidates]
    with_first = without + table.first_weight[candidates]
    found: dict[int, tuple[Ints, Ints]] = {}
    loads = [(with_first, without)]
    if len(candidates) >= 3:  # a third row beside the first one, whose only label may be on its first token
        third = int(np.argmax(without > 0)) if (without > 0).any() else 0
        loads.append((with_first + with_first[third], without + without[third]))
    for extra, (own_with, own_without) in enumerate(loads):
        shares = [_pair_shares(own, other) for own, other in ((own_with, with_first), (own_without, without))]
        of_rows = (1 + extra) / (2 + extra)
        apart = np.abs(shares[0] - shares[1])
        # Best where no share is that of a mean over rows, which would have to be named as well.
        apart_from_all = np.minimum(apart, np.minimum(*(np.abs(share - of_rows) for share in shares)))
        useless = ~((own_without > 0)[:, None] & (without > 0)[None, :]) | np.eye(len(candidates), dtype=bool)
        if extra:
            useless[third, :] = useless[:, third] = True
        for each in (apart_from_all, apart):
            each[useless] = 0
            a, b = np.unravel_index(int(each.argmax()), each.shape)
            if each[a, b] > 1.5 * limit:
                first = [candidates[a], candidates[third]] if extra else [candidates[a]]
                found[2 + extra] = (np.array(first), candidates[[b]])
                break
    return found


def _pair_shares(own: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n, n) share of row i beside row j."""
    both = own[:, None] + other[None, :]
    shares: NDArray[np.float64] = own[:, None] / np.where(both > 0, both, 1)
    return shares


def _least_first(table: RowTable, rows: Ints, longest: int) -> Ints:
    """At most 64 places among `rows`: those whose first token weighs most, and those where it weighs least."""
    short = np.flatnonzero(table.length[rows].sum(axis=1) <= longest)
    short = short if len(short) >= 2 else np.arange(len(rows))
    part = table.first_weight[rows[short]] / np.maximum(table.weight[rows[short]], 1)
    order = short[np.lexsort((table.length[rows[short]].sum(axis=1), -part))]
    return order if len(order) <= 64 else np.concatenate([order[:32], order[-32:]])


def padded_row(table: RowTable, rows: Ints) -> int | None:
    """A short row with loss that the batch pads, one of `rows` if there is one."""
    spans = table.length.sum(axis=1)
    for candidates in (rows, np.flatnonzero(_carries(table))):
        padded = candidates[(table.length[candidates] < table.widths).any(axis=1)]
        if len(padded):
            return int(padded[spans[padded].argmin()])
    return None


def one_row(schema: Schema, table: RowTable, row: int, config: PadMinConfig, wide: bool) -> SlotMap:
    """One row by itself, rolled: trimmed, or as wide as the batch with all of its padding behind it."""
    limits = None if schema.can_widen else schema.widths
    least = table.widths if wide else None
    return pad_layout(table, np.array([row]), config.pad_to_multiple_of, limits, least)


def whole_probe(schema: Schema, table: RowTable, config: PadMinConfig) -> Probe:
    """All rows of the batch, in no groups: for a loss that may need all of them."""
    rows = np.arange(len(table))
    came, whole = _as_it_came(table, rows, None, 1), _rolled(schema, table, rows, config)
    return Probe(rows, (rows, rows[:0]), came, whole, (whole, whole))


def _rolled(schema: Schema, table: RowTable, rows: Ints, config: PadMinConfig) -> SlotMap:
    return pad_layout(table, rows, config.pad_to_multiple_of, None if schema.can_widen else schema.widths)


def _budget(table: RowTable, config: PadMinConfig) -> int:
    return table.slots if config.token_budget is None else config.token_budget


def _groups(table: RowTable, config: PadMinConfig, n: int) -> tuple[Ints, Ints] | None:
    """Rows with many and rows with few loss tokens, `n` together; None if there are not so many."""
    candidates = np.flatnonzero(_carries(table))
    groups = _few_and_many(table, candidates, n, _budget(table, config) // n)
    return _few_and_many(table, candidates, n, None) if groups is None and n == 2 else groups


def _carries(table: RowTable) -> NDArray[np.bool_]:
    carries = table.weight > 0
    return carries & (table.loss_tokens > 0) if table.counts_loss else carries


def _few_and_many(table: RowTable, candidates: Ints, n: int, longest: int | None) -> tuple[Ints, Ints] | None:
    """The rows with most and those with fewest loss tokens, `n` together, none longer than `longest` (None: any)."""
    spans = table.length.sum(axis=1)
    if longest is None:
        candidates = candidates[np.argsort(spans[candidates], kind="stable")[:n]]
    else:
        candidates = candidates[spans[candidates] <= longest]
    if len(candidates) < n:
        return None
    order = candidates[np.lexsort((spans[candidates], table.loss_tokens[candidates]))]
    return order[len(order) - (n - n // 2) :], order[: n // 2]


def maybe_columns(batch: Any, schema: Schema, table: RowTable) -> list[tuple[str, Field, bool | None]]:
    """Entries that nobody declared and that may hold numbers of columns, or may not though their names say so.

    Each with its field, which is of the axis that the columns would be of, and whether its values in left-padded rows
    are columns of these rows; None where there is no such row. The same entries for every batch of one kind.
    """
    leaves = dict(iter_leaves(batch, schema.fields))
    found: list[tuple[str, Field, bool | None]] = []
    for path in sorted(schema.guessed):
        entry = schema.fields[path]
        if entry.kind == "column":
            found.append((path, entry, True if table.start.any() else None))
            continue
        for k, axis in enumerate(AXES[: len(schema.widths)] if holds_integers(leaves[path]) else ()):
            spans = table.start[:, k], table.length[:, k]
            fits = could_be_columns(leaves[path], entry.row_dim, *spans, schema.widths[k])
            found.append((path, replace(entry, axis=axis), fits))
    return found


def _as_it_came(table: RowTable, rows: Ints, budget: int | None, multiple: int) -> SlotMap:
    """The rows with their padding; columns that are padding in all of them are left out only to keep a budget."""
    start, end = table.start[rows], table.start[rows] + table.length[rows]
    limits = np.array(table.widths)
    first, widths = np.zeros(len(limits), dtype=np.int64), limits
    if budget is not None and len(rows) * widths.sum() > budget:
        first = start.min(axis=0)
        widths = np.minimum(-(-(end.max(axis=0) - first) // multiple) * multiple, limits)
        first = np.minimum(first, limits - widths)
    starts, spans = np.broadcast_to(first, start.shape).copy(), np.broadcast_to(widths, start.shape).copy()
    return SlotMap(rows, starts, spans, tuple(map(int, widths)), table.widths, len(table), table.units)


def tells_reductions(table: RowTable, groups: Sequence[Ints], limit: float) -> bool:
    """Whether means over loss tokens, over rows and over all tokens differ on these groups by more than rounding."""
    if not table.by_token:  # the first two are the same
        return True
    tokens = _shares(groups, table.loss_tokens)
    rows = np.array([len(group) for group in groups]) / sum(map(len, groups))
    tells_rows = float(np.abs(tokens - rows).max()) > max(0.02, 1.5 * limit)
    spans = table.length.sum(axis=1)
    without = (spans - table.loss_tokens)[table.loss_tokens > 0]
    if limit >= _COARSE or without.max() <= 1:  # too fine a difference, or every token carries loss
        return tells_rows
    # A loss that counts prompts too, shifted or not, would pass where groups happen to hold the same part of both.
    others = (_shares(groups, spans), _shares(groups, spans - 1))
    return tells_rows and min(float(np.abs(tokens - other).max()) for other in others) > max(0.005, 1.5 * limit)


def _shares(groups: Sequence[Ints], counts: Ints) -> NDArray[np.float64]:
    sums = np.array([counts[group].sum() for group in groups], dtype=np.float64)
    shares: NDArray[np.float64] = sums / max(sums.sum(), 1.0)
    return shares


def masked_tokens_vary(batch: Any, schema: Schema, table: RowTable, rows: Ints) -> bool:
    """Whether slots in front of rows hold more than one token, as prompts do and padding does not."""
    front = np.arange(table.widths[0]) < table.start[rows, :1]
    for path, leaf in iter_leaves(batch, schema.fields):
        field = schema.fields.get(path)
        is_tokens = field is not None and field.kind == "position" and field.row_dim == 0 and field.axis == "input"
        is_tokens = is_tokens and path not in (schema.mask, schema.labels, schema.loss_mask)
        is_tokens = is_tokens and not last_part(path).endswith(_NO_TOKENS)
        if is_tokens and isinstance(leaf, Tensor) and leaf.ndim == 2 and not leaf.is_floating_point():
            tokens = leaf[torch.as_tensor(rows, device=leaf.device)].cpu().numpy()[front]
            if len(np.unique(tokens)) > 1:
                return True
    return False
