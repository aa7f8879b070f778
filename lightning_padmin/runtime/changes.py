"""What differs now from what was kept, by name."""

from __future__ import annotations

import dis
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "MISSING"})()
"""In place of what is not there."""


@dataclass(frozen=True)
class Change:
    """One place that holds something else than it did, or into which somebody has written.

    Attributes:
        path: where it is: 'net.teacher.weight', "MyTrainer.kept['acc']".
        before: what was kept; the very object where one was written into.
        now: what is there.
        put: puts something else there; None where that is not offered.
    """

    path: str
    before: Any
    now: Any
    put: Callable[[Any], None] | None = None


Look = Callable[[], Iterator[Change]]
"""Tells what differs now."""


def below(path: str | None, name: object, is_attribute: bool = True) -> str | None:
    """The path of an attribute, or of an entry of a container; None of nothing that is named."""
    if path is None:
        return None
    if not is_attribute:
        return f"{path}[{_short(name)}]"
    return f"{path}.{name}" if path else str(name)


def _short(key: object) -> str:
    words = repr(key) if isinstance(key, str | int | float | bool | tuple) else type(key).__name__
    return words if len(words) <= 40 else f"{words[:37]}..."


def of_mapping(
    path: str,
    now: Mapping[Any, Any],
    kept: Mapping[Any, Any],
    put: Callable[[Any, Any], Any],
    leave: Collection[Any] = (),
    is_attribute: bool = True,
) -> Iterator[Change]:
    """Of attributes, or of a dictionary's entries, that are other objects than they were; `put` sets one."""
    for name in {**kept, **now}:
        before, found = kept.get(name, MISSING), now.get(name, MISSING)
        if found is not before and name not in leave:
            where = below(path, name, is_attribute)
            assert where is not None
            yield Change(where, before, found, partial(put, name))


def names_of(kind: type) -> Iterator[str]:
    """Attributes that a class, without its bases, has or gives to objects."""
    yield from vars(kind)
    yield from vars(kind).get("__annotations__", ())
    for function in vars(kind).values():
        function = getattr(function, "fget", None) or getattr(function, "__func__", function)
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            yield from _stored(code)


def _stored(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield str(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _stored(inner)
