"""Other planners, written from their descriptions, to compare with; and the true optimum of few rows.

Each takes lengths and a budget of slots (rows x longest row) and returns groups of row indices, with no group over the
budget unless it is a single row.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from .workload import Ints

Groups: TypeAlias = list[list[int]]


def cost(groups: Groups, lengths: Ints, launch_cost: int) -> int:
    """Slots of all padded rectangles, plus the launches."""
    return sum(len(group) * int(lengths[group].max()) for group in groups) + launch_cost * len(groups)


def fits(groups: Groups, lengths: Ints, budget: int) -> bool:
    """Whether every group is within the budget, or a single row."""
    return all(len(group) == 1 or len(group) * int(lengths[group].max()) <= budget for group in groups)


def balanced(lengths: Ints, budget: int) -> Groups:
    """Groups of nearly equal token counts (largest differencing method), as few as keep their rectangles in budget.

    The count starts where the tokens would fit without padding, as planners of reinforcement learning do that balance
    tokens, and rises until the padded groups fit.
    """
    return _fewest(lengths, budget, _largest_differences)


def strided(lengths: Ints, budget: int) -> Groups:
    """Sorted rows dealt in turn, as few groups as fit: alike in tokens and each as wide as the longest rows."""
    order = np.argsort(-lengths, kind="stable")
    return _fewest(lengths, budget, lambda _, count: [order[k::count].tolist() for k in range(count)])


def in_order(lengths: Ints, budget: int) -> Groups:
    """Rows as they come, as many at a time as fit however long they are: what rolling and trimming alone leaves."""
    most = max(1, budget // int(lengths.max()))
    return [list(range(start, min(start + most, len(lengths)))) for start in range(0, len(lengths), most)]


def first_fit(lengths: Ints, budget: int) -> Groups:
    """Falling lengths, each row into the first group whose rectangle has room for one more."""
    groups: Groups = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        for group in groups:
            if (len(group) + 1) * lengths[group[0]] <= budget:
                group.append(row)
                break
        else:
            groups.append([row])
    return groups


def exhaustive(lengths: Ints, budget: int, launch_cost: int) -> int:
    """Least cost of all partitions; for up to some ten rows."""
    return min(
        cost(groups, lengths, launch_cost)
        for groups in _partitions(list(range(len(lengths))))
        if fits(groups, lengths, budget)
    )


def _fewest(lengths: Ints, budget: int, split: Callable[[Ints, int], Groups]) -> Groups:
    least = max(1, -(-int(lengths.sum()) // max(budget, int(lengths.max()))))
    for count in range(least, len(lengths)):
        groups = split(lengths, count)
        if fits(groups, lengths, budget):
            return groups
    return [[row] for row in range(len(lengths))]


def _largest_differences(lengths: Ints, count: int) -> Groups:
    """Karmarkar and Karp: join the two least balanced partial solutions, full groups with empty ones, to the end."""
    serial = itertools.count()
    heap = []
    for row, length in enumerate(lengths.tolist()):
        sums = [length, *[0] * (count - 1)]
        heap.append((-length, next(serial), sums, [[row], *([] for _ in range(count - 1))]))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, sums, groups), (_, _, other_sums, other_groups) = heapq.heappop(heap), heapq.heappop(heap)
        joined = sorted(
            ((a + b, g + h) for a, b, g, h in zip(sums, other_sums[::-1], groups, other_groups[::-1], strict=True)),
            key=lambda pair: -pair[0],
        )
        totals, members = [pair[0] for pair in joined], [pair[1] for pair in joined]
        heapq.heappush(heap, (totals[-1] - totals[0], next(serial), totals, members))
    return [group for group in heap[0][3] if group]


def _partitions(rows: list[int]) -> Iterator[Groups]:
    """All ways to put rows into groups."""
    if not rows:
        yield []
        return
    first, rest = rows[0], rows[1:]
    for smaller in _partitions(rest):
        yield [[first], *smaller]
        for k, group in enumerate(smaller):
            yield [*smaller[:k], [first, *group], *smaller[k + 1 :]]
