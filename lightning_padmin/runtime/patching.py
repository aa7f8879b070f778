"""Attributes of other people's objects, replaced for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
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


class Shared:
    """A change to what is the process's: the first of several threads makes it, the last one takes it back.

    Each thread putting back what it found would leave the change in place where threads overlap.

    Args:
        change: makes the context manager of the change. Called and entered under a lock.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        self._change = change
        self._lock, self._users, self._undo = threading.Lock(), 0, ExitStack()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, the change is made; may be entered again."""
        with self._lock:
            if not self._users:
                self._undo.enter_context(self._change())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._undo.close()
