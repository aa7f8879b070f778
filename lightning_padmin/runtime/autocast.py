"""Autocast left out, wherever it is entered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from lightning_padmin.runtime.patching import Shared, replaced


class _Off:
    """The function by which `torch.autocast` goes on. It is the process's; threads that do not ask keep their own."""

    def __init__(self) -> None:
        self._function = Shared(self._replaced)
        self._here = threading.local()

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._function.on():
            self._here.depth = getattr(self._here, "depth", 0) + 1
            try:
                yield
            finally:
                self._here.depth -= 1

    def _replaced(self) -> AbstractContextManager[None]:
        return replaced(torch, set_autocast_enabled=partial(self._set, torch.set_autocast_enabled))

    def _set(self, function: Any, *arguments: Any, **named: Any) -> None:
        if getattr(self._here, "depth", 0):
            arguments = (*arguments[:-1], False) if not named else arguments
            named = {name: False if name == "enabled" else value for name, value in named.items()}
        function(*arguments, **named)


_autocast = _Off()


@contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast inside, neither one that is on nor one that a framework or the step itself enters.

    Compiled code that enters one is not reached, nor is what casts by itself.
    """
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] + ([accelerator.type] if accelerator is not None else [])
    with ExitStack() as stack:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_autocast.off())
        yield


__all__ = ["without_autocast"]
