"""Attributes of other people's objects, replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """These in place of an object's own inside; afterwards its own are back, or what its class has shows again.

    They go straight into the object's `__dict__`, past `__setattr__`, so that a module does not register them.

    Args:
        owner: an instance or a module of Python; not a class.
        attributes: new values by name.

    Raises:
        AttributeError: the object has no such attribute, so that nobody would use the new value.
    """
    for name in attributes:
        getattr(owner, name)
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)
