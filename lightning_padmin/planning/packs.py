"""Which rows are packed together: as few packs as first-fit decreasing finds, none above the token budget.

A pack is one long row of whole documents behind each other. It has no padding, so how rows are grouped decides only how
many launches there are. First-fit decreasing (Johnson 1973) needs at most 11/9 of the fewest packs, plus one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.planning.search import Bools, Ints


def first_fit_decreasing(lengths: Ints, budget: int, max_rows: int, riders: Bools) -> list[Ints]:
    """Packs of row indices, the longest document of each first.

    Args:
        lengths: (B,) tokens of each row.
        budget: most tokens of a pack; a longer row is a pack by itself.
        max_rows: most documents of a pack.
        riders: (B,) bool, rows that may not make up a pack by themselves; all False where that rule is off.

    Returns:
        Packs in the order in which they were opened, so by falling length of the first document. Where riders need it,
        one may exceed the limits.
    """
    free: NDArray[np.int64] = np.zeros(len(lengths), np.int64)
    room: NDArray[np.int64] = np.zeros(len(lengths), np.int64)
    packs: list[list[int]] = []
    for row in np.lexsort((np.arange(len(lengths)), -lengths)).tolist():
        length = int(lengths[row])
        fits = (free[: len(packs)] >= length) & (room[: len(packs)] > 0)
        place = int(fits.argmax()) if fits.any() else len(packs)
        if place == len(packs):
            packs.append([])
            free[place], room[place] = budget, max_rows
        packs[place].append(row)
        free[place] -= length
        room[place] -= 1
    return [np.array(rows, np.int64) for rows in _with_carriers(packs, lengths, budget, max_rows, riders)]


def _with_carriers(packs: list[list[int]], lengths: Ints, budget: int, max_rows: int, riders: Bools) -> list[list[int]]:
    """Each pack of riders gets the shortest carrier that another can spare, or else joins the emptiest pack."""
    for taker in [rows for rows in packs if riders[rows].all() and riders.any()]:
        spare = [(int(lengths[row]), row, rows) for rows in packs for row in rows if _can_spare(rows, row, riders)]
        used = int(lengths[taker].sum())
        if spare and used + min(spare)[0] <= budget and len(taker) < max_rows:
            _, row, giver = min(spare)
            giver.remove(row)
            taker.append(row)
            taker.sort(key=lambda each: (-lengths[each], each))
            continue
        others = [rows for rows in packs if rows is not taker and not riders[rows].all()]
        host = min(others, key=lambda rows: int(lengths[rows].sum()))
        host.extend(taker)
        host.sort(key=lambda each: (-lengths[each], each))
        taker.clear()
    return [rows for rows in packs if rows]


def _can_spare(rows: list[int], row: int, riders: Bools) -> bool:
    return not riders[row] and int((~riders[rows]).sum()) > 1
