"""Probes of equally many rows on all ranks, since a training step may gather what its rows give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_padmin.batch import RowTable, Schema
from lightning_padmin.config import PadMinConfig
from lightning_padmin.distributed import Exchange
from lightning_padmin.microbatching import PackStyle
from lightning_padmin.verification.probe import (
    Probe,
    bounded_probe,
    choose_rows,
    first_label_groups,
    make_probe,
    number_within,
    padded_row,
    probe_of_one,
    whole_probe,
)
from lightning_padmin.verification.rows import Shown, best_numbers, carrying


def agreed_probe(
    batch: Any,
    schema: Schema,
    table: RowTable,
    config: PadMinConfig,
    exchange: Exchange,
    limit: float,
    is_joint: bool,
    more_than_told: bool,
    packs: PackStyle | None,
    shown: Shown,
    may_be_one: bool = True,
    is_bounded: bool = False,
) -> Probe | None:
    """A probe of equally many rows on all ranks, or None on all; of one row, which tells nothing of reductions, too."""
    if is_joint:  # coupled losses may need their whole batch, and it is what training is going to run
        return _of_coupled(batch, schema, table, config, exchange, shown, is_bounded)
    found = choose_rows(batch, schema, table, config, limit, shown)
    telling = {n for n, each in found.items() if each.tells or packs is not None}  # of packs the reduction is not asked
    # Of each number how many rows without loss ride along, in two bits.
    riders = sum(each.riders << 2 * n for n, each in found.items())
    said = exchange([_bits(found), _bits(telling), _bits(best_numbers(found)), riders])
    everywhere = int(np.bitwise_and.reduce(said[:, 0]))
    somewhere, best = (int(np.bitwise_or.reduce(said[:, k])) for k in (1, 2))
    # Beside ranks that have several, one row of each would count for what it cannot tell.
    is_of_one = everywhere == 0 and not said[:, 0].any()
    if is_of_one and packs is None and may_be_one and not more_than_told:
        return _one_row(schema, table, config, exchange)
    if everywhere == 0 or (more_than_told and not everywhere & somewhere):
        return None
    chosen = everywhere & somewhere & best or everywhere & somewhere or everywhere & best or everywhere
    n = chosen.bit_length() - 1
    most_riders = max(int(each) >> 2 * n & 3 for each in said[:, 3])
    return make_probe(
        batch, schema, table, config, n, packs, found[n].groups, limit=limit, shown=shown, riders=most_riders
    )


def _one_row(schema: Schema, table: RowTable, config: PadMinConfig, exchange: Exchange) -> Probe | None:
    """Where no two rows are to be had everywhere: one on each rank, if padding is there that the split takes away."""
    rows = np.flatnonzero(carrying(table))
    padded = padded_row(table, rows)
    said = exchange([int(len(rows) > 0), int(padded is not None)])
    if not said[:, 0].all() or not said[:, 1].any():
        return None
    return probe_of_one(schema, table, int(rows[0]) if padded is None else padded, config)


def _of_coupled(
    batch: Any,
    schema: Schema,
    table: RowTable,
    config: PadMinConfig,
    exchange: Exchange,
    shown: Shown,
    is_bounded: bool,
) -> Probe:
    """The whole batch; where that may be too large on some rank, as many rows on each."""
    number = number_within(batch, schema, table, config) if is_bounded else len(table)
    said = exchange([int(is_bounded), number])
    if not said[:, 0].any():
        return whole_probe(schema, table, config)
    return bounded_probe(batch, schema, table, config, shown, int(said[:, 1].min()))


def halved(config: PadMinConfig, table: RowTable) -> PadMinConfig:
    """With half the budget."""
    budget = table.slots if config.token_budget is None else config.token_budget
    return replace(config, token_budget=max(1, budget // 2))


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << n for n in numbers)


def agreed_first_labels(
    batch: Any,
    schema: Schema,
    table: RowTable,
    config: PadMinConfig,
    exchange: Exchange,
    limit: float,
    subtracts_lost: bool,
) -> Probe | None:
    """A probe that tells on some rank whether the loss takes labels on first tokens, of equally many rows on all."""
    asked = subtracts_lost or config.loss_reduction == "token-mean"
    telling = first_label_groups(table, config, limit, subtracts_lost) if asked else {}
    possible = set(choose_rows(batch, schema, table, config, limit)) | set(telling)
    agreed = exchange([_bits(possible), _bits(telling)])
    best = int(np.bitwise_and.reduce(agreed[:, 0])) & int(np.bitwise_or.reduce(agreed[:, 1]))
    if best == 0:
        return None
    n = min(k for k in range(best.bit_length()) if best >> k & 1)
    return make_probe(batch, schema, table, config, n, groups=telling.get(n), limit=limit, riders=0)


__all__ = ["agreed_first_labels", "agreed_probe", "halved"]
