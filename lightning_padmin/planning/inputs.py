"""What the planner is given, checked: every error names the option or row, its value and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.errors import PlanError
from lightning_padmin.planning.search import Bools, Ints, SlotCost, round_up

_MOST_SQUARED = 2**31  # longest row and multiple together, where they are squared
MOST = 2**50  # of one length or option, so that one rounded length stays far inside int64


def check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """The integer; raises PlanError for anything else, or one out of range."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise PlanError(f"{name}={value!r} must be an integer, at least {least}")
    if most is not None and value > most:
        raise PlanError(f"{name}={value!r} is too large, use at most {most}")
    return int(value)


def as_slot_cost(multiple: int, attention_width: int | None, rounded: Ints) -> SlotCost:
    """What the width of a row costs, for lengths that it can be computed of."""
    multiple = check_integer("cost_multiple_of", multiple, most=MOST)
    if attention_width is None:
        return SlotCost(multiple)
    width = check_integer("attention_width", attention_width, most=MOST)
    longest = int(rounded.max(initial=0))
    if longest + multiple > _MOST_SQUARED:
        raise PlanError(f"attention_width={attention_width}: the square of {longest} tokens is too large to plan with")
    return SlotCost(multiple, width)


def slots_of_all(name: str, widths: Ints) -> int:
    """Slots of all rows in one group, by (B, A) widths; refuses what would leave int64 no room."""
    slots = len(widths) * int(widths.max(axis=0, initial=0).sum())
    if slots >= 2**62:
        raise PlanError(f"{name}: {len(widths)} rows x longest = {slots} slots is above 2**62; plan fewer rows")
    return slots


def as_array(name: str, value: Any) -> NDArray[Any]:
    """The value as an array in host memory."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"{name} is no array in host memory ({error}); pass a flat list or .cpu()") from error


def as_lengths(lengths: Any) -> Ints:
    """(B, A) int64 from what the caller gave; refuses what would need a guess."""
    table = as_array("lengths", lengths)
    shape = table.shape
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or table.shape[1] not in (1, 2):
        raise PlanError(f"lengths has shape {shape}; pass (B,), or (B, 2) for encoder and decoder")
    if not len(table):
        return np.zeros(table.shape, np.int64)
    if table.dtype.kind not in "iu":
        odd = (table != np.floor(table)).any(axis=1) if table.dtype.kind == "f" else np.zeros(1)
        bad = int(np.argmax(odd))
        raise PlanError(f"lengths[{bad}]={table[bad].tolist()} is {table.dtype}; pass integers")
    wrong = np.argwhere((table < 1) | (table > MOST))
    if len(wrong):
        bad, axis = wrong[0].tolist()
        raise PlanError(f"lengths[{bad}]={table[bad, axis]} is not in 1 ... 2**50; leave out rows without tokens")
    return table.astype(np.int64)


def rounded_lengths(lengths: Ints, multiple: int, max_width: int | Sequence[int] | None) -> Ints:
    """Lengths (B, A) rounded up to the multiple, but not past the width of the batch."""
    rounded = round_up(lengths, multiple)
    if max_width is None:
        return rounded
    given = np.ravel(np.array(max_width, dtype=object))
    if len(given) not in (1, lengths.shape[1]):
        raise PlanError(f"max_width={max_width!r} must be an integer, or {lengths.shape[1]}: one per axis")
    caps = np.array([check_integer("max_width", cap, most=MOST) for cap in given], np.int64)
    above = np.argwhere(lengths > caps)
    if len(above):
        bad, axis = above[0].tolist()
        raise PlanError(f"lengths[{bad}]={lengths[bad, axis]} is above max_width={max_width!r}, the batch's width")
    return np.minimum(rounded, caps)


def as_riders(riders: Any, count: int) -> Bools:
    """(B,) bool; all False where the rule is off because no row, or every row, is a rider."""
    given = np.zeros(count, np.bool_) if riders is None else as_array("riders", riders)
    if given.shape != (count,) or (count and given.dtype != np.bool_):
        raise PlanError(f"riders has shape {given.shape} of {given.dtype}; pass one bool per row: ({count},)")
    return given.astype(np.bool_) & (not given.all())
