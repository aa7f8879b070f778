"""Rows packed end to end, as the limit of what can be had: it needs a model that keeps packed rows apart."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


def packed_rows(lengths: Iterable[int], context: int) -> int:
    """How many rows of `context` slots hold all lengths, by best-fit decreasing.

    Args:
        lengths: of rows, in tokens; one above `context` is cut into pieces, as packing does.
        context: slots of a packed row.

    Example:
        >>> packed_rows([120, 90, 300, 40, 55, 30, 210, 65], 512)
        2
    """
    whole, rests = 0, []
    for length in lengths:
        whole += length // context
        if length % context:
            rests.append(length % context)
    free: list[int] = []  # space left in each row, least first
    opened = 0
    for length in sorted(rests, reverse=True):
        at = bisect_left(free, length)
        if at == len(free):
            opened += 1
            left = context - length
        else:
            left = free.pop(at) - length
        if left:
            insort(free, left)
    return whole + opened
