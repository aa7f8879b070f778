"""What a training step writes once per call, and so once per micro-batch where it is split.

Each pass of the check finds the state that the first one found, so a step that moves an average, a queue or a counter
has the gradients of the whole batch in all of them, and trains something else. A write counts if a second call on the
same rows, which finds what the first one has left, leaves something else again. So caches, masks and values that each
call writes anew do not count. Neither do sums over rows or tokens: called for each part of the rows in turn, the step
leaves what it leaves on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_padmin.microbatching import SlotMap
from lightning_padmin.runtime import Change, ModuleState, is_freed, is_library
from lightning_padmin.verification.sketch import Sketches, sketch

_MOST_ITEMS = 10_000  # of a value that is looked through
_SMALL = 4096  # entries of tensors that are compared one by one
_NAMED, _BYTES = 4, 240
# Relative to the largest entry; averages with a decay of 0.99999 still differ by more.
_LIMITS = {torch.float64: 1e-9, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
_LIMIT = 2e-6  # of Python's numbers: they may come from float32
_DOUBTFUL = 1e-3  # up to here a difference may be that of kernels whose sums come in any order
_CARRIES = 0.05  # of what was added to a number before a call, if that shows in what it leaves
_MOVES = 0.01  # of what a call moves a number by: the least that further calls move it by
_UNKNOWN = "unknown"

States = Mapping[str, Any]
"""Frozen values by path."""


@dataclass(frozen=True)
class Digest:
    """What is in a tensor, small; linear in it, but of other dtypes than floating ones.

    Attributes:
        dtype: of the tensor.
        shape: of the tensor.
        values: the entries, or a sketch of them.
    """

    dtype: torch.dtype
    shape: torch.Size
    values: Tensor


def freeze(value: Any) -> Any:
    """A value as it is now, with what is inside of it; what cannot be compared is the same as everything of its type.

    Of text the length: it may tell the time.
    """
    return _freeze(value, [_MOST_ITEMS], frozenset())


def _freeze(value: Any, left: list[int], above: Set[int]) -> Any:
    if isinstance(value, bool | int | float | complex | type(None)):
        return value
    if isinstance(value, np.generic):
        return _freeze(value.item(), left, above) if value.dtype.kind in "biufc" else _UNKNOWN
    if isinstance(value, Tensor):
        return _digest(value)
    if isinstance(value, np.ndarray):
        return _digest(torch.from_numpy(value.copy())) if value.dtype.kind in "biufc" else (value.shape, _UNKNOWN)
    if isinstance(value, str | bytes):
        return type(value), len(value)
    if id(value) in above or left[0] <= 0:
        return type(value)
    entries = _entries(value)
    if entries is None:
        return type(value)
    left[0] -= len(entries)
    return type(value), {key: _freeze(each, left, above | {id(value)}) for key, each in entries.items()}


def _entries(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, nn.Module):
        return dict(value.named_parameters()) | dict(value.named_buffers())
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, set | frozenset):
        return dict.fromkeys(range(len(value)))
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return dict(enumerate(value))
    attributes = getattr(value, "__dict__", None)
    if (
        type(attributes) is dict
        and not isinstance(value, type)
        and (not is_library(type(value)) or type(value).__name__ == "SimpleNamespace")
    ):
        return dict(attributes)
    return None


def _digest(tensor: Tensor) -> Any:
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    try:
        with torch.no_grad():
            values = torch.view_as_real(local) if local.is_complex() else local
            if local.layout is not torch.strided or local.device.type == "meta" or is_freed(local):
                return tensor.shape, _UNKNOWN
            if not values.is_floating_point():
                values = values.to(torch.float64)
            values = values.reshape(-1).clone() if values.numel() <= _SMALL else sketch(values, 0)
            return Digest(local.dtype, local.shape, values)
    except (RuntimeError, NotImplementedError, ValueError):  # without shape or data, or of an own kind
        return type(tensor), _UNKNOWN


def distance(first: Any, second: Any) -> float:
    """How far frozen values are apart, relative to the larger; infinity where they are of different kinds."""
    if isinstance(first, Digest) and isinstance(second, Digest):
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return np.inf
        a, b = (each.values.double().nan_to_num() for each in (first, second))
        if not a.numel() or torch.equal(a, b):
            return 0.0
        return float((a - b).abs().max() / torch.maximum(a.abs().max(), b.abs().max()))
    if _is_number(first) and _is_number(second):
        if first == second or (first != first and second != second):
            return 0.0
        return float(abs(first - second) / max(abs(first), abs(second)))
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second) == 2:
        (kind, inside), (other, found) = first, second
        if kind == other and isinstance(inside, dict) and isinstance(found, dict) and inside.keys() == found.keys():
            apart = ((distance(each, found[key]), _limit(each)) for key, each in inside.items())
            return max((value for value, limit in apart if value > limit), default=0.0)
    return 0.0 if first is second or (type(first) is type(second) and first == second) else np.inf


def same(first: Any, second: Any) -> bool:
    """Whether frozen values are the same up to rounding."""
    return distance(first, second) <= _limit(first)


def _limit(value: Any) -> float:
    if isinstance(value, Digest):
        return _LIMITS.get(value.dtype, 0.0)
    return _LIMIT if isinstance(value, float | complex) else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def states(changes: Sequence[Change]) -> dict[str, Any]:
    """What is at the places that have changed."""
    return {change.path: freeze(change.now) for change in changes}


def named(paths: Sequence[str]) -> str:
    """Paths as words, not more than a few, and not more than an exchange takes."""
    words = [repr(path) if "'" not in path else f'"{path}"' for path in paths]
    count = max(k for k in range(_NAMED + 1) if k <= 1 or len(", ".join(words[:k]).encode()) < _BYTES - 20)
    more = len(words) - min(count, len(words))
    return ", ".join(words[:count]) + (f" and {more} more" if more else "")


def as_integers(words: str) -> list[int]:
    """The first 240 bytes of a text, for an exchange."""
    data = words.encode()[:_BYTES].ljust(_BYTES, b"\0")
    return [int(each) for each in np.frombuffer(data, dtype=np.int64)]


def text_of(integers: NDArray[np.int64]) -> str:
    """The text."""
    return integers.astype(np.int64).tobytes().rstrip(b"\0").decode(errors="ignore")


class _Turns(Protocol):
    """Of `Passes` what is needed here."""

    left: dict[str, Any] | None
    parts: list[Sketches] | None

    def in_turn(self, slots: Sequence[SlotMap], look: Callable[[int, ModuleState], None]) -> list[Sketches]: ...

    def difference(self, found: Sketches, wanted: Sketches, limit: float) -> tuple[float, str]: ...


class WriteSearch:
    """Looks for writes in stages, which ranks take together; a later one only where some rank wants it.

    Args:
        passes: of the check; `left` is what the first one has left.
        parts: two groups of rows.

    Attributes:
        found: the paths of what is written into in each call.
    """

    def __init__(self, passes: _Turns, parts: Sequence[SlotMap]) -> None:
        self._passes, self._parts = passes, parts
        self.found: list[str] = []
        self._after: list[dict[str, Any]] = []
        self._open: dict[str, list[Tensor]] = {}

    def twice(self) -> None:
        """Two calls on the same rows."""
        seen: list[Change] = []

        def look(k: int, state: ModuleState) -> None:
            changes = state.changes()
            self._after.append(states(changes))
            if k == 2:
                seen.extend(changes)

        self._passes.in_turn([self._parts[-1]] * 2, look)
        _, first, second = self._after
        self.found = _differing(first, second)
        again = [c for c in seen if c.path in first and c.path not in self.found]
        movable = {c.path: list(_movable(c.before, frozenset())) for c in again}
        self._open = {path: tensors for path, tensors in movable.items() if tensors}

    @property
    def is_open(self) -> bool:
        """Whether something was written that is the same after both calls: an average of what it is equal to, say."""
        return bool(self._open)

    def from_elsewhere(self) -> None:
        """The same from other values of what was written: whoever writes them anew leaves the same twice."""
        after: list[dict[str, Any]] = []

        def look(k: int, state: ModuleState) -> None:
            if k == 0:
                for tensor in {id(each): each for tensors in self._open.values() for each in tensors}.values():
                    _move(tensor)
            else:
                after.append({path: each for path, each in states(state.changes()).items() if path in self._open})

        try:
            self._passes.in_turn([self._parts[-1]] * 2, look)
        except Exception:  # a step need not bear such values
            return
        # What two calls from the same values differ by is rounding.
        rounding = {path: distance(self._after[1][path], self._after[2][path]) for path in self._open}
        self.found += [path for path in _differing(*after) if not _apart(after, path) <= 3 * rounding[path]]

    @property
    def is_doubtful(self) -> bool:
        """Whether what was found may be the time, or rounding."""
        return any(path in self._numbers or path in self._close for path in self.found)

    @property
    def _numbers(self) -> list[str]:
        return [path for path, value in self._after[2].items() if _is_number(value)]

    @property
    def _close(self) -> list[str]:
        _, first, second = self._after
        told = [path for path in self.found if path not in self._open and isinstance(second.get(path), Digest)]
        return [path for path in told if distance(first.get(path), second[path]) <= _DOUBTFUL]

    def once_more(self) -> None:
        """Leaves out numbers that do not depend on what they were, and tensors that differ from one state already."""
        added: dict[str, float] = {}
        again: list[dict[str, Any]] = []
        numbers = set(self._numbers) & set(self.found)

        def look(k: int, state: ModuleState) -> None:
            changes = state.changes() if k else []
            again.append(states(changes))
            for change in changes if k == 1 else ():
                if change.path in numbers and change.put is not None and _is_number(change.now):
                    added[change.path] = abs(change.now)
                    change.put(change.now - 3 * max(abs(change.now), 1))

        try:
            self._passes.in_turn([self._parts[-1]] * 2, look)
        except Exception:
            return
        _, first, second = self._after
        for path in list(self.found):
            if path in added and _is_number(again[2].get(path)):
                carried = abs(again[2][path] - second.get(path, 0)) > _CARRIES * 3 * max(added[path], 1)
            elif path in self._close:
                carried = distance(first.get(path), second[path]) > 3 * distance(first.get(path), again[1].get(path))
            else:
                continue
            if not carried:
                self.found.remove(path)

    def in_parts(self, limit: float) -> None:
        """Leaves out what is the same once the parts have run in turn, if the second had the gradient it has alone.

        Args:
            limit: of gradients.
        """
        after: list[dict[str, Any]] = []

        def look(k: int, state: ModuleState) -> None:
            if k == 2:
                after.append(states(state.changes()))

        gradients, alone, whole = self._passes.in_turn(self._parts, look), self._passes.parts, self._passes.left
        if alone is None or whole is None or not self._passes.difference(gradients[1], alone[1], limit)[0] <= limit:
            return
        self.found = [
            path
            for path in self.found
            if path in self._open or path not in whole or not same(whole[path], after[0].get(path))
        ]


def _differing(first: States, second: States) -> list[str]:
    """Also what only one of them has: it is as it was in the other."""
    return [
        path
        for path in {**first, **second}
        if path not in first or path not in second or not same(first[path], second[path])
    ]


def may_have_advanced(whole: States, by_chunks: States) -> list[str]:
    """Places that a step has changed on its whole batch and in chunks, where it has not left the same.

    Only numbers, and tensors of one shape.
    """
    both = [path for path in whole if path in by_chunks and not same(whole[path], by_chunks[path])]
    return [path for path in both if distance(whole[path], by_chunks[path]) < np.inf]


def advanced(whole: States, by_chunks: States, twice: States) -> list[str]:
    """Of these, what a further call on the same rows moves on from what the first one has left.

    What each call writes anew stays. A number that the step itself moves once in both is apart by rounding, which is
    little of what one call moves it by.

    Args:
        whole: what a step has left on its whole batch.
        by_chunks: what it has left where models ran in chunks.
        twice: what a second step on the whole batch has left.
    """
    apart = [path for path in may_have_advanced(whole, by_chunks) if path in twice]
    moved_on = [path for path in apart if not same(whole[path], twice[path])]
    return [p for p in moved_on if distance(whole[p], by_chunks[p]) > _MOVES * distance(whole[p], twice[p])]


def _apart(after: Sequence[States], path: str) -> float:
    first, second = after
    return distance(first.get(path), second.get(path))


def _movable(value: Any, above: Set[int]) -> Iterator[Tensor]:
    """Floating tensors inside of a value that are not trained."""
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and value.device.type != "meta" and value.is_floating_point()
        if is_plain and not value.requires_grad and value.numel():
            yield value
    elif isinstance(value, list | tuple | dict) and id(value) not in above and len(value) <= _MOST_ITEMS:
        for each in (_entries(value) or {}).values():
            yield from _movable(each, above | {id(value)})


def _move(tensor: Tensor) -> None:
    """Puts other values of the same size into a tensor, none of them negative where none was."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    try:
        size = float(local.abs().max())
        if np.isfinite(size):
            local.neg_().add_(size or 1.0)
    except (RuntimeError, NotImplementedError, ValueError):  # memory that several entries share
        return
