"""What each micro-batch counts, so that weighted losses add up to the batch's own: pure functions of the row table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.batch import RowTable


def weights(
    table: RowTable,
    groups: Sequence[NDArray[np.int64]],
    real: int,
    reduction: object = "token-mean",
    totals: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weight and share of each micro-batch, (K,) each; see `MicroBatches`.

    Args:
        table: of the batch.
        groups: rows of each micro-batch.
        real: how many of them are no dummies, which come last.
        reduction: how the loss is reduced, see `LossSpec`.
        totals: (ranks,) what the rows of each rank weigh, where the mean is one over all ranks.
    """
    is_real = np.arange(len(groups)) < real
    total = table.weight.sum()
    if total == 0:  # what else the loss holds (a penalty) counts, as rows of the batch do
        rows = np.array([len(group) for group in groups]) * is_real
        shares = rows / rows.sum()
        others = totals is not None and bool(totals.any())
        return (np.zeros(len(groups)) if others else shares), shares
    own = np.array([table.weight[group].sum() for group in groups]) * is_real
    shares = own / total
    if reduction == "sum":
        return is_real.astype(np.float64), shares
    if totals is not None:
        # Ranks are averaged afterwards, hence the mean over ranks of their totals.
        return own / totals.mean(), shares
    return shares, shares


def dummy_row(table: RowTable) -> NDArray[np.int64]:
    """(1,) the shortest row that carries loss, else one with a real token: others may have a loss of 0/0."""
    carries_loss = table.loss_tokens > 0 if table.counts_loss else table.real_tokens > 0
    weighs = table.weight > 0
    for wanted in (weighs & carries_loss, weighs, carries_loss, table.real_tokens > 0):
        if wanted.any():
            break
    candidates = np.flatnonzero(wanted)
    return candidates[[np.argmin(table.length.sum(axis=1)[candidates])]]
