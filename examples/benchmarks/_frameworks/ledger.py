"""Whose time it is: each moment of a step belongs to the innermost function that is being watched."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

FRAMEWORK = "framework and model"
PAUSED = "not of the step"  # what the benchmark itself does, and generation
CHECK = "first-batch check"
LOSS = "TRL's loss"
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_FROZEN = (PAUSED, CHECK)  # whatever runs inside belongs to them
# What no part of a step's time is overhead of; TRL's loss only as far as it exceeds that of the stock trainer.
NOT_OURS = (FRAMEWORK, PAUSED, CHECK, LOSS)


class Target(NamedTuple):
    """A function to watch.

    Attributes:
        owner: the module or class that has it.
        name: how it is called there.
        part: what its time counts as, without that of other watched functions inside of it.
        kind: "call"; "maker", whose result is the function to watch; "iterator", where each step of the result is
            watched too.
    """

    owner: Any
    name: str
    part: str
    kind: str = "call"


class Ledger:
    """Adds up the time of a step by part. Outside of steps nothing is counted.

    Args:
        clock: "wall", or "cpu" for that of this process.

    Attributes:
        steps: part -> seconds, of each step since they were last taken.
    """

    def __init__(self, clock: str) -> None:
        self._now = _CLOCKS[clock]
        self._stack: list[str] = []
        self._spent: dict[str, float] = {}
        self._last = 0.0
        self.steps: list[dict[str, float]] = []

    def begin(self) -> None:
        """A step begins, unless one is under way."""
        if not self._stack:
            _finish()
            self._stack, self._spent, self._last = [FRAMEWORK], defaultdict(float), self._now()

    def end(self) -> None:
        """The step ends, if one is under way."""
        if self._stack:
            _finish()
            self._book()
            self._stack = []
            self.steps.append(dict(self._spent))

    def drop(self) -> None:
        """Forgets the step that is under way."""
        self._stack = []

    def take(self) -> list[dict[str, float]]:
        """The steps since the last call."""
        taken, self.steps = self.steps, []
        return taken

    def _book(self) -> None:
        now = self._now()
        self._spent[self._stack[-1]] += now - self._last
        self._last = now

    def enter(self, part: str) -> None:
        """From here on it is the time of this part."""
        if self._stack:
            self._book()
            self._stack.append(self._stack[-1] if self._stack[-1] in _FROZEN else part)

    def leave(self) -> None:
        """It is the time again of what was there before."""
        if len(self._stack) > 1:
            self._book()
            self._stack.pop()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """`enter` and `leave`."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def watched(self, function: Callable[..., Any], part: str, kind: str = "call") -> Callable[..., Any]:
        """The function, whose time is counted; see `Target`."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            self.enter(part)
            try:
                result = function(*args, **options)
            finally:
                self.leave()
            return self._each(result, part) if kind == "iterator" else result

        @functools.wraps(function)
        def make(*args: Any, **options: Any) -> Any:
            made = function(*args, **options)
            return None if made is None else self.watched(made, part)

        return make if kind == "maker" else call

    def _each(self, items: Iterator[Any], part: str) -> Iterator[Any]:
        while True:
            self.enter(part)
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.leave()
            yield item

    @contextmanager
    def watching(self, targets: Iterable[Target]) -> Iterator[None]:
        """Functions are replaced by watched ones inside."""
        before = [(owner, name, vars(owner)[name]) for owner, name, *_ in targets]
        for owner, name, part, kind in targets:
            setattr(owner, name, self.watched(vars(owner)[name], part, kind))
        try:
            yield
        finally:
            for owner, name, original in before:
                setattr(owner, name, original)


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
