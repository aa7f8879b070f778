"""Where outputs of any module have their rows and positions, and how those of chunks become those of the whole call.

Two small calls, of 2 rows and of 5, of other widths and other longest rows, leave each dimension one reading:

    sizes in the two calls        what it counts
    2, 5                          rows
    w, w - 1                      positions of the call's width
    w, w - 2                      positions of its longest row (what packed sequences come back as)
    equal                         neither
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_padmin.errors import AsItCame
from lightning_padmin.forward.arguments import leaves, rebuilt
from lightning_padmin.microbatching import MicroBatches, SlotMap
from lightning_padmin.runtime import is_padding_filled

LEAST_WIDTH = 3
ROWS = (2, 5)


def sizes(longest: int) -> list[tuple[int, int, int]]:
    """Rows, width and longest row of the small calls, for rows of up to `longest`, at least `LEAST_WIDTH`."""
    return [(ROWS[0], longest, longest), (ROWS[1], longest - 1, longest - 2)]


@dataclass(frozen=True)
class Place:
    """Of one tensor of the outputs.

    Attributes:
        row_dim: the dimension that counts rows.
        position_dims: those that count positions.
        to_longest: whether these end with the longest row, and not with the call's width.
        fill: what stands where rows have padding.
        is_constant: whether the module itself has that there; else it is zero by convention.
    """

    row_dim: int
    position_dims: tuple[int, ...] = ()
    to_longest: bool = False
    fill: float = 0.0
    is_constant: bool = False


Places = dict[str, Place | None]  # by path; None: the same in all calls


def places_of(outputs: Sequence[Any], calls: Sequence[tuple[int, int, int]]) -> Places:
    """What outputs of small calls show.

    Args:
        outputs: of each of them.
        calls: their rows, widths and longest rows.

    Raises:
        AsItCame: outputs that cannot be put together from those of chunks.
    """
    found = [leaves(each) for each in outputs]
    if any(list(each) != list(found[0]) for each in found):
        raise AsItCame("its outputs have other entries for other rows")
    places: Places = {}
    for path, first in found[0].items():
        parts = [each[path] for each in found]
        if isinstance(first, Tensor) and not all(part is first for part in parts):
            places[path] = _place(path, parts, calls)
        elif isinstance(first, PackedSequence) or not all(same(part, first) for part in parts):
            raise AsItCame(f"its output{_named(path)} is {type(first).__name__}, which cannot be put together")
        else:
            places[path] = None
    if not any(places.values()):
        raise AsItCame("its outputs have no rows")
    return places


def _named(path: str) -> str:
    return f" {path!r}" if path else ""


def _place(path: str, parts: Sequence[Any], calls: Sequence[tuple[int, int, int]]) -> Place:
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else None for part in parts]
    rows, widths, longest = (tuple(each) for each in zip(*calls, strict=True))
    by_row, along, ends = list[int](), list[int](), list[int]()
    if None in shapes or len({len(shape or ()) for shape in shapes}) > 1:
        raise AsItCame(f"its output{_named(path)} has shapes {shapes} for {calls} (rows, width, longest row)")
    for dim, counts in enumerate(zip(*(shape or () for shape in shapes), strict=True)):
        if counts == rows:
            by_row.append(dim)
        elif counts == widths:
            along.append(dim)
        elif counts == longest:
            ends.append(dim)
        elif len(set(counts)) > 1:
            raise AsItCame(f"its output{_named(path)} has shapes {shapes} for {calls} (rows, width, longest row)")
    if len(by_row) != 1 or (along and ends):
        what = "no rows" if not by_row else "rows twice" if len(by_row) > 1 else "two kinds of positions"
        raise AsItCame(
            f"its output{_named(path)} has {what}, in shapes {shapes} for {calls} (rows, width, longest row)"
        )
    return Place(by_row[0], tuple(along or ends), bool(ends))


def joined(places: Places, parts: Sequence[Any], batches: MicroBatches) -> Any:
    """The outputs of the whole call from those of its chunks.

    Raises:
        AsItCame: a chunk's outputs are not where places say.
    """
    found = [leaves(part) for part in parts]
    values: dict[str, Any] = {}
    if any(list(each) != list(places) for each in found):
        raise AsItCame("its outputs have other entries in each chunk")
    for path, place in places.items():
        own = [each[path] for each in found]
        if place is not None:
            values[path] = _whole(path, place, own, batches)
        elif all(same(part, own[0]) for part in own):
            values[path] = own[0]
        else:
            raise AsItCame(f"its output{_named(path)} is another one in each chunk")
    return rebuilt(parts[0], values)


def _whole(path: str, place: Place, parts: Sequence[Any], batches: MicroBatches) -> Tensor:
    for part, slots in zip(parts, batches.slot_maps, strict=True):
        _check(path, place, part, slots)
    whole = _restored(place, parts, batches)
    is_open = place.position_dims and not place.is_constant and whole.is_floating_point()
    if not (is_open and is_padding_filled()):
        return whole
    with torch.no_grad():  # while a check asks whether padding is read
        real = real_slots(place, parts, batches)
        values = whole[real]
        at = (~real).nonzero(as_tuple=True)
        taken = torch.arange(len(at[0]), device=whole.device) % max(len(values), 1)
    return whole.index_put(at, values[taken]) if len(values) else whole


def _check(path: str, place: Place, part: Any, slots: SlotMap) -> None:
    width = int(slots.length.max()) if place.to_longest else slots.widths[0]
    wanted = {place.row_dim: len(slots)} | dict.fromkeys(place.position_dims, width)
    if not isinstance(part, Tensor) or any(part.ndim <= dim or part.shape[dim] != n for dim, n in wanted.items()):
        shape = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
        raise AsItCame(f"its output{_named(path)} is {shape} in a chunk of {slots.shape} (rows, width)")


def row_alone(path: str, place: Place, part: Any, slots: SlotMap, whole: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of a call, at the width of the whole, and where it is real.

    Raises:
        AsItCame: it is not where the place says.
    """
    _check(path, place, part, slots)
    both = []
    for each in (part, torch.ones_like(part, dtype=torch.bool)):
        rows = _with_width(replace(place, fill=0.0), each, slots)
        for dim in place.position_dims:
            rows = rows.narrow(dim, 0, whole.shape[dim])
        both.append(rows.select(place.row_dim, 0))
    return both[0], both[1]


def real_slots(place: Place, parts: Sequence[Tensor], batches: MicroBatches) -> Tensor:
    """(shape of the whole) bool: where neither row nor column is padding."""
    ones = [torch.ones_like(part, dtype=torch.bool) for part in parts]
    return _restored(replace(place, fill=0.0), ones, batches)


def _restored(place: Place, parts: Sequence[Tensor], batches: MicroBatches) -> Tensor:
    rows = [_with_width(place, part, slots) for part, slots in zip(parts, batches.slot_maps, strict=True)]
    whole = batches.restore_rows([part.movedim(place.row_dim, 0) for part in rows]).movedim(0, place.row_dim)
    if place.to_longest:
        end = int((batches.table.start + batches.table.length).max())
        for dim in place.position_dims:
            whole = whole.narrow(dim, 0, end)
    return whole.contiguous()


def _with_width(place: Place, part: Tensor, slots: SlotMap) -> Tensor:
    """The rows of a chunk at the width of the whole call."""
    for dim in place.position_dims:
        front = part.movedim((place.row_dim, dim), (0, 1))
        part = slots.restore(front, fill=place.fill).movedim((0, 1), (place.row_dim, dim))
    return part


def with_fill(place: Place, whole: Tensor, real: Tensor) -> Place:
    """The place with what stands at padding in a whole call, where that is one value; a flag must be.

    Raises:
        AsItCame: flags of padding differ.
    """
    values = whole[~real]
    least = 4 if values.is_floating_point() else 1  # a few numbers may agree by chance
    if values.numel() < least or values.is_complex() or not bool((values == values[0]).all()):
        if values.numel() and values.dtype == torch.bool:
            raise AsItCame("its output of flags differs between slots of padding")
        return place
    return replace(place, fill=float(values[0]), is_constant=True)


def same(one: Any, other: Any) -> bool:
    """Whether two leaves are the same one, or equal as values."""
    if one is other:
        return True
    try:
        return not isinstance(one, Tensor) and bool(one == other)
    except (ValueError, RuntimeError, TypeError):
        return False


__all__ = [
    "LEAST_WIDTH",
    "Place",
    "Places",
    "joined",
    "places_of",
    "real_slots",
    "row_alone",
    "same",
    "sizes",
    "with_fill",
]
