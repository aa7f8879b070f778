"""Which rows of a batch tell: they show as much of it as few rows can, and differ in loss tokens.

Pure functions of the row table and of what rows show. Rows that carry no loss are never alone in a group, in training
too, so a few of them ride along with others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.batch import RowTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MOST_ROWS = 8
_MOST_RIDERS = 2
_COARSE = 0.05  # a limit for half precision
_APART = 0.1  # of shares of loss tokens and of rows, where the limit is fine
_ENOUGH = 0.75  # loss tokens, of the most that some number of rows has: more rows tell more
_WANTED, _PREFERRED = 1000.0, 50.0
# Which padding a row has depends on the rows beside it: no reason to take fewer rows.
_OF_PADDING = ("padding behind rows", "rows without padding")


@dataclass(frozen=True, eq=False)
class Shown:
    """What the rows of a batch show, and what of it is to be seen first.

    Attributes:
        masks: (F, B) bool, which rows show what.
        worth: (F,) float64, what it is worth to see each.
        counts: (F,) bool, whether more of it is worth fewer rows.
        preferred: (B,) bool, rows to take where there is a choice.
    """

    masks: NDArray[np.bool_]
    worth: Floats
    counts: NDArray[np.bool_]
    preferred: NDArray[np.bool_]

    @staticmethod
    def of(
        facets: Mapping[str, NDArray[np.bool_]],
        rows: int,
        wanted: Collection[str] = (),
        prefer: NDArray[np.int64] | Sequence[int] | None = None,
    ) -> Shown:
        """Of facets by name; rare ones before common ones, and before all those that are `wanted`."""
        names = [name for name, mask in facets.items() if mask.any()]
        masks = np.array([facets[name] for name in names], dtype=bool).reshape(len(names), rows)
        is_wanted = np.array([name in wanted for name in names], dtype=bool)
        worth = np.where(is_wanted, _WANTED, 1.0) + 1 / (1 + masks.sum(axis=1))
        counts = np.array([name not in _OF_PADDING for name in names], dtype=bool)
        preferred = np.zeros(rows, dtype=bool)
        preferred[np.asarray([] if prefer is None else prefer, dtype=np.int64)] = True
        return Shown(masks, worth, counts, preferred)


@dataclass(frozen=True, eq=False)
class Choice:
    """Rows in two groups, the one with more loss tokens first.

    Attributes:
        groups: of them.
        tells: whether they tell reductions apart.
        worth: of what they show.
        tokens: how many carry loss.
        riders: how many rows carry no loss.
    """

    groups: tuple[Ints, Ints]
    tells: bool
    worth: float
    tokens: int
    riders: int


def choices(
    table: RowTable, budget: int, limit: float, shown: Shown | None = None, multiple: int = 1
) -> dict[int, Choice]:
    """The best rows of each number, two to eight, by that number.

    Args:
        table: of the batch.
        budget: most slots of a pass; two rows may have more, where no two are short enough.
        limit: of the comparison.
        shown: what rows show.
        multiple: what widths are rounded to.
    """
    shown = Shown.of({}, len(table)) if shown is None else shown
    carries, spans = carrying(table), (-(-table.length // multiple) * multiple).sum(axis=1)
    found: dict[int, Choice] = {}
    for n in range(2, min(MOST_ROWS, len(table)) + 1):
        fits = spans <= budget // n
        if n == 2 and (fits & carries).sum() < 2:  # above the budget: the two shortest all the same
            fits = np.zeros(len(table), dtype=bool)
            candidates = np.flatnonzero(carries)
            fits[candidates[np.argsort(spans[candidates], kind="stable")[:2]]] = True
        rows = _chosen(table, n, fits, limit, shown)
        if rows is not None:
            found[n] = _choice(table, rows, limit, shown)
    return found


def best_numbers(found: Mapping[int, Choice]) -> set[int]:
    """Of how many rows they show most, and carry not much fewer loss tokens than any of these."""
    if not found:
        return set()
    worth = max(each.worth for each in found.values())
    most = [n for n, each in found.items() if each.worth >= worth - 1e-6]
    tokens = max(found[n].tokens for n in most)
    return {n for n in most if found[n].tokens >= _ENOUGH * tokens}


def carrying(table: RowTable) -> NDArray[np.bool_]:
    """(B,) whether each row carries loss."""
    carries = table.weight > 0
    return carries & (table.loss_tokens > 0) if table.counts_loss else carries


def _chosen(table: RowTable, n: int, fits: NDArray[np.bool_], limit: float, shown: Shown) -> Ints | None:
    """`n` rows among those that fit; None where there are not so many."""
    carries = carrying(table)
    most_riders = min(_MOST_RIDERS, n - 2 if n != 3 else 1, int((fits & ~carries).sum()))
    if n - int((fits & carries).sum()) > most_riders:
        return None
    open_ = fits & (carries | (most_riders > 0))
    chosen: list[int] = []

    def take(row: int) -> None:
        chosen.append(row)
        open_[row] = False
        if (~carries[chosen]).sum() >= most_riders:
            open_[~carries] = False

    unseen = np.ones(len(shown.worth), dtype=bool)
    tokens: Floats = (table.loss_tokens if table.counts_loss else table.length.sum(axis=1)).astype(np.float64)
    most = n - 2 if n >= 4 and _twin(shown, chosen, open_) is not None else n - 1  # one place for a twin
    while len(chosen) < most and open_.any():
        worth = _gain(shown, unseen)
        best = np.where(open_, worth, -1).max()
        if best <= 0:
            break
        row = int(np.where(open_ & (worth >= best - 1e-9), tokens, -1).argmax())
        take(row)
        unseen &= ~shown.masks[:, row]
    if most < n - 1 and (twin := _twin(shown, chosen, open_)) is not None:
        take(twin)
    while len(chosen) < n - 1:
        take(int(np.where(open_ & carries, tokens, -1).argmax() if (open_ & carries).any() else open_.argmax()))
    gain = _gain(shown, unseen)
    last = _last(chosen, open_, carries, tokens, gain, limit if table.by_token else None)
    return np.sort(np.array([*chosen, last]))


def _gain(shown: Shown, unseen: NDArray[np.bool_]) -> Floats:
    gain: Floats = ((shown.worth * unseen) @ shown.masks + _PREFERRED * shown.preferred).astype(np.float64)
    return gain


def _twin(shown: Shown, chosen: Sequence[int], open_: NDArray[np.bool_]) -> int | None:
    """A row that shares with one of the chosen what few others show: some losses compare such rows.

    While none is chosen, any row that shares something with another.
    """
    counts = shown.masks.sum(axis=1)
    seen = shown.masks[:, list(chosen)].sum(axis=1) if chosen else (shown.masks & open_).sum(axis=1) - 1
    lonely = np.flatnonzero(_is_shared(shown) & (seen == 1 if chosen else seen >= 1))
    for facet in lonely[np.argsort(counts[lonely], kind="stable")]:
        rows = np.flatnonzero(shown.masks[facet] & open_)
        if len(rows):
            return int(rows[0])
    return None


def _is_shared(shown: Shown) -> NDArray[np.bool_]:
    """(F,) what two rows or more show, and not most of them."""
    counts = shown.masks.sum(axis=1)
    shared: NDArray[np.bool_] = (counts >= 2) & (2 * counts <= shown.masks.shape[1]) & shown.counts
    return shared


def _last(
    chosen: Sequence[int],
    open_: NDArray[np.bool_],
    carries: NDArray[np.bool_],
    tokens: Floats,
    gain: Floats,
    limit: float | None,
) -> int:
    """The last row: one that shows what is wanted, spreads loss tokens unevenly (a limit), or else has many of them."""
    rows = np.flatnonzero(open_)
    if carries[chosen].sum() < 2 and (open_ & carries).any():  # each of two groups needs one
        rows = np.flatnonzero(open_ & carries)
    together = np.sort(np.concatenate([np.tile(tokens[list(chosen)], (len(rows), 1)), tokens[rows, None]], axis=1))
    n = together.shape[1]
    few = n // 2
    apart = (n - few) / n - together[:, few:].sum(axis=1) / np.maximum(together.sum(axis=1), 1)
    apart = np.abs(apart)
    is_apart = apart >= (0.0 if limit is None else _APART if limit < _COARSE else 0.9 * apart.max())
    by = (tokens[rows], gain[rows], np.where(is_apart, 0, apart), is_apart, gain[rows] >= _WANTED)
    order = np.lexsort(by)
    return int(rows[order[-1]])


def _choice(table: RowTable, rows: Ints, limit: float, shown: Shown) -> Choice:
    carries = carrying(table)
    groups = max(_cuts(rows, carries), key=lambda each: _score(table, each, limit, shown))
    first, second = sorted(groups, key=lambda each: -int(table.loss_tokens[each].sum()))
    if len(first) < len(second):  # equally many rows on all ranks
        first, second = second, first
    seen = shown.masks[:, rows].sum(axis=1)
    worth = float(shown.worth[(seen > 0) & shown.counts].sum()) + _PREFERRED * int(shown.preferred[rows].sum())
    worth += bool((_is_shared(shown) & (seen >= 2)).any())
    tokens = int(table.loss_tokens[rows].sum())
    return Choice(
        (first, second), tells_reductions(table, (first, second), limit), worth, tokens, int((~carries[rows]).sum())
    )


def second_cut(table: RowTable, groups: Sequence[Ints], limit: float, shown: Shown | None = None) -> tuple[Ints, ...]:
    """Another two groups of the same rows, as large as these, where half of each was in the other; none of three rows.

    What couples pairs of rows may by chance have found each pair in one group.
    """
    rows = np.sort(np.concatenate(groups))
    if len(rows) < 4:
        return ()
    shown = Shown.of({}, len(table)) if shown is None else shown
    half = len(groups[0]) // 2

    def key(cut: tuple[Ints, ...]) -> tuple[int, float]:
        return -abs(len(np.intersect1d(cut[0], groups[0])) - half), _score(table, cut, limit, shown)[1]

    cuts: list[tuple[Ints, ...]] = list(_cuts(rows, carrying(table), len(groups[0])))
    return () if not cuts else max(cuts, key=key)


def alone(table: RowTable, rows: Ints, riders: int) -> tuple[Ints, ...]:
    """The finest partition: one row in each part, but for `riders` beside a short one, which carry no loss if any do.

    Ranks that have fewer such rows than others take others in their place, since a step may gather what rows give.
    """
    carries, spans = carrying(table), table.length.sum(axis=1)
    order = rows[np.lexsort((spans[rows], carries[rows]))]
    rest = order[riders:]
    first = rest[carries[rest].argmax()]
    return np.sort(np.append(order[:riders], first)), *(np.array([row]) for row in rest if row != first)


def _cuts(rows: Ints, carries: NDArray[np.bool_], size: int | None = None) -> Iterator[tuple[Ints, Ints]]:
    """All ways to cut rows into two groups of these sizes, each with a row that carries loss."""
    size = len(rows) - len(rows) // 2 if size is None else size
    for chosen in combinations(range(len(rows)), size):
        inside = np.zeros(len(rows), dtype=bool)
        inside[list(chosen)] = True
        if carries[rows[inside]].any() and carries[rows[~inside]].any():
            yield rows[inside], rows[~inside]


def _score(table: RowTable, groups: Sequence[Ints], limit: float, shown: Shown) -> tuple[bool, float]:
    """How unevenly groups share what rows show, against what they weigh, and loss tokens against rows."""
    first = groups[0]
    both = np.concatenate(groups)
    weight = table.weight[first].sum() / max(table.weight[both].sum(), 1e-12)
    counts = shown.masks[:, both].sum(axis=1)
    varies = (counts > 0) & (counts < len(both))
    shares = shown.masks[:, first].sum(axis=1)[varies] / counts[varies]
    uneven = float(np.minimum(np.abs(shares - weight), 0.2).mean()) if varies.any() else 0.0
    tokens = table.loss_tokens[first].sum() / max(table.loss_tokens[both].sum(), 1)
    apart = min(abs(float(tokens) - len(first) / len(both)), 0.5)
    return tells_reductions(table, groups, limit), round(2 * uneven + apart, 9)


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


def _shares(groups: Sequence[Ints], counts: Ints) -> Floats:
    sums = np.array([counts[group].sum() for group in groups], dtype=np.float64)
    shares: Floats = sums / max(sums.sum(), 1.0)
    return shares


__all__ = [
    "MOST_ROWS",
    "Choice",
    "Shown",
    "alone",
    "best_numbers",
    "carrying",
    "choices",
    "second_cut",
    "tells_reductions",
]
