"""Which release of a framework this is, and whether its private hooks are those that were checked."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from lightning_padmin.errors import ConfigError


def release(version: str) -> tuple[int, ...]:
    """(0, 19, 8) for "0.19.8+cu126" and (1, 16, 0) for "1.16.0.dev0"; a version that says nothing counts as old.

    A candidate counts as older than its release: (2, 5) for "2.5.2rc1".
    """
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in takewhile(str.isdecimal, parts))


def what_changed(owner: Any, name: str, expected: Sequence[str]) -> str | None:
    """In words, how a method differs from the one that was checked; None: it has these first parameters.

    Args:
        owner: a class, or a module with functions.
        name: of the method.
        expected: its first parameters, `self` included; more may follow. Empty: it only has to be there.
    """
    function = getattr(owner, name, None)
    if not callable(function):
        return f"{owner.__name__}.{name} is gone"
    found = list(inspect.signature(function).parameters)
    return None if found[: len(expected)] == list(expected) else f"{owner.__name__}.{name} takes {found}"


def check_hooks(
    hooks: Iterable[tuple[Any, str, Sequence[str]]],
    library: str,
    version: str,
    advice: str,
    error: type[Exception] = ConfigError,
) -> None:
    """Refuses a framework whose private hooks are not those that were checked.

    Args:
        hooks: owner, name and first parameters of each, see `what_changed`.
        library: the framework's name.
        version: of the framework.
        advice: what was checked, and what to do, as the end of the message.
        error: what is raised.

    Raises:
        ConfigError: or `error`; names version, hook, what was found and what was expected.
    """
    for owner, name, expected in hooks:
        changed = what_changed(owner, name, expected)
        if changed is not None:
            raise error(f"{library} {version}: {changed}, expected {list(expected)}. {advice}")
