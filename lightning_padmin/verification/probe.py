"""What a gradient check runs: a few rows of a batch, in several ways, within the token budget."""

from __future__ import annotations

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
from lightning_padmin.verification.rows import Choice, Ints, Shown, alone, carrying, choices, second_cut

_FEW_ROWS = 4  # as many may run though columns of padding cannot be cut away
_FEWEST_COUPLED = 8  # rows of a bounded probe, where short ones are there
_NO_TOKENS = ("position_ids", "mask", "labels", "token_type_ids")


@dataclass(frozen=True, eq=False)
class Probe:
    """A few rows of a batch: as they came, rolled and trimmed, and in two groups, or all in one pack.

    Attributes:
        rows: of the batch.
        groups: of these rows.
        came: all of them as they came.
        whole: rolled and trimmed.
        parts: the groups.
        alone: the finest partition of the rows, see `rows.alone`.
        second: two other groups of them, see `rows.second_cut`.
    """

    rows: Ints
    groups: tuple[Ints, ...]
    came: SlotMap
    whole: SlotMap
    parts: tuple[SlotMap, ...]
    alone: tuple[Ints, ...] = ()
    second: tuple[Ints, ...] = ()


def choose_rows(
    batch: Any, schema: Schema, table: RowTable, config: PadMinConfig, limit: float, shown: Shown | None = None
) -> dict[int, Choice]:
    """The rows that a probe can have, two to eight, by their number; more than four only where all passes are small.

    Ranks probe the same number of rows, since a training step may gather what they compute.

    Args:
        batch: the batch.
        schema: its schema.
        table: its row table.
        config: its budget.
        limit: of the comparison.
        shown: what rows show.
    """
    budget = _budget(table, config)
    found = _choices(table, config, limit, shown)
    most = max(found, default=0)
    if most <= _FEW_ROWS:
        return found
    may_crop = _may_crop(batch, schema, table, np.arange(len(table)))
    for n in range(_FEW_ROWS + 1, most + 1):
        if n in found:
            rows = np.sort(np.concatenate(found[n].groups))
            came = _as_it_came(table, rows, budget if may_crop else None, config.pad_to_multiple_of)
            if n * sum(came.widths) > budget:
                del found[n]
    return found


def make_probe(
    batch: Any,
    schema: Schema,
    table: RowTable,
    config: PadMinConfig,
    n: int,
    packs: PackStyle | None = None,
    groups: tuple[Ints, Ints] | None = None,
    *,
    limit: float = 1e-3,
    shown: Shown | None = None,
    riders: int | None = None,
) -> Probe:
    """`n` rows in two groups that tell, within the budget if that can be.

    With `packs`, all of them in one pack that has these; with `groups`, these; with `riders`, so many rows run beside
    another one where all others run alone, by default those that carry no loss.
    """
    groups = _choices(table, config, limit, shown)[n].groups if groups is None else groups
    rows = np.sort(np.concatenate(groups))
    may_crop = _may_crop(batch, schema, table, rows)
    came = _as_it_came(table, rows, _budget(table, config) if may_crop else None, config.pad_to_multiple_of)
    whole = rolled_rows(schema, table, rows, config)
    if packs is not None:
        return Probe(rows, (rows,), came, whole, (pack_layout(table, rows, packs),))
    parts = tuple(rolled_rows(schema, table, each, config) for each in groups)
    riders = int((~carrying(table)[rows]).sum()) if riders is None else riders
    return Probe(
        rows,
        groups,
        came,
        whole,
        parts,
        alone=alone(table, rows, riders),
        second=second_cut(table, groups, limit, shown),
    )


def _may_crop(batch: Any, schema: Schema, table: RowTable, rows: Ints) -> bool:
    """Not where numbers of columns that nobody has declared would point elsewhere, or what is cut may be prompts."""
    return not masked_tokens_vary(batch, schema, table, rows) and not any(
        entry.kind == "column" or fits for _, entry, fits in maybe_columns(batch, schema, table)
    )


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
        carries = np.flatnonzero(carrying(table))
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
    for candidates in (rows, np.flatnonzero(carrying(table))):
        padded = candidates[(table.length[candidates] < table.widths).any(axis=1)]
        if len(padded):
            return int(padded[spans[padded].argmin()])
    return None


def one_row(schema: Schema, table: RowTable, row: int, config: PadMinConfig, wide: bool) -> SlotMap:
    """One row by itself, rolled: trimmed, or as wide as the batch with all of its padding behind it."""
    limits = None if schema.can_widen else schema.widths
    least = table.widths if wide else None
    return pad_layout(table, np.array([row]), config.pad_to_multiple_of, limits, least)


def rolled_rows(schema: Schema, table: RowTable, rows: Ints, config: PadMinConfig) -> SlotMap:
    """Rows together, rolled and trimmed."""
    return pad_layout(table, rows, config.pad_to_multiple_of, None if schema.can_widen else schema.widths)


def probe_of_one(schema: Schema, table: RowTable, row: int, config: PadMinConfig) -> Probe:
    """One row, as it came and trimmed: all that can be told of batches of one row."""
    rows = np.array([row])
    came, whole = _as_it_came(table, rows, None, 1), rolled_rows(schema, table, rows, config)
    return Probe(rows, (rows,), came, whole, (whole,), (rows,))


def whole_probe(schema: Schema, table: RowTable, config: PadMinConfig) -> Probe:
    """All rows of the batch, in no groups: for a loss that may need all of them."""
    return _in_no_groups(schema, table, config, np.arange(len(table)), None)


def bounded_probe(
    batch: Any, schema: Schema, table: RowTable, config: PadMinConfig, shown: Shown, number: int
) -> Probe:
    """So many rows that show much, in no groups: where a pass of the whole batch may be too large.

    Args:
        batch: the batch.
        schema: its schema.
        table: its row table.
        config: the options.
        shown: what rows show.
        number: at most what `number_within` gives.
    """
    budget, length = _budget(table, config), table.length.sum(axis=1)
    among = np.flatnonzero(number * (length if number * sum(table.widths) > budget else 0 * length) <= budget)
    if len(among) < number:
        among = np.sort(np.argsort(length, kind="stable")[:number])
    by_length = among[np.argsort(length[among], kind="stable")]
    rows = [int(each) for each in dict.fromkeys((by_length[0], by_length[-1]))][:number]  # so that there is padding
    left = ~shown.masks[:, rows].any(axis=1)
    while left.any() and len(rows) < number:
        best = int(among[np.argmax((shown.worth * left) @ shown.masks[:, among])])
        if not (shown.masks[:, best] & left).any():
            break
        rows.append(best)
        left &= ~shown.masks[:, best]
    others = np.setdiff1d(among, rows)
    more = others[np.linspace(0, len(others) - 1, number - len(rows)).round().astype(np.int64)]
    chosen = np.sort(np.concatenate([np.array(rows, dtype=np.int64), more]))
    return _in_no_groups(schema, table, config, chosen, budget if _may_crop(batch, schema, table, chosen) else None)


def number_within(batch: Any, schema: Schema, table: RowTable, config: PadMinConfig) -> int:
    """How many rows a pass under the budget holds as they came: an even number, since they may be pairs.

    At least eight if there are short ones, whose further columns can be left out; at least two.
    """
    budget, count, length = _budget(table, config), len(table), table.length.sum(axis=1)
    most = budget // sum(table.widths)
    if most >= count:
        return count
    number = max(min(2, count), most - most % 2)
    if number < _FEWEST_COUPLED and _may_crop(batch, schema, table, np.arange(count)):
        for n in range(min(_FEWEST_COUPLED, count - count % 2), number, -2):
            if (n * length <= budget).sum() >= n:
                return n
    return number


def _in_no_groups(schema: Schema, table: RowTable, config: PadMinConfig, rows: Ints, budget: int | None) -> Probe:
    came, whole = _as_it_came(table, rows, budget, 1), rolled_rows(schema, table, rows, config)
    if budget is not None:
        came = _with_padding(came, table)
    return Probe(rows, (rows, rows[:0]), came, whole, (whole, whole))


def _with_padding(came: SlotMap, table: RowTable) -> SlotMap:
    """A column more where none of these rows has padding any more, though they have in the batch."""
    start, length = table.start[came.rows], table.length[came.rows]
    if (came.start != start).any() or (came.length != length).any():
        return came
    limits = np.array(table.widths)
    widths = np.minimum(np.array(came.widths) + 1, limits)
    first = np.minimum(came.start, limits - widths)
    spans = np.broadcast_to(widths, first.shape).copy()
    return replace(came, start=first, length=spans, widths=tuple(map(int, widths)))


def _choices(table: RowTable, config: PadMinConfig, limit: float, shown: Shown | None) -> dict[int, Choice]:
    return choices(table, _budget(table, config), limit, shown, config.pad_to_multiple_of)


def _budget(table: RowTable, config: PadMinConfig) -> int:
    return table.slots if config.token_budget is None else config.token_budget


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
