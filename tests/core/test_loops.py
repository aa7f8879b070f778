"""Loops over micro-batches: run to their end, left, given up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_padmin.errors import BatchError
from lightning_padmin.microbatching.loop_guard import LoopGuard


class Loop:
    """A guard, and what happens around each micro-batch."""

    def __init__(self) -> None:
        self.guard, self.told = LoopGuard(), []

    @contextmanager
    def around(self, micro: Any) -> Iterator[None]:
        self.told.append(f"in {micro}")
        try:
            yield
        finally:
            self.told.append(f"out {micro}")

    def start(self, *micro_batches: str) -> Iterator[Any]:
        return self.guard.start(micro_batches, self.around, lambda: self.told.append("end"))  # type: ignore[arg-type]


def test_to_its_end() -> None:
    loop = Loop()
    assert loop.guard.never_started
    for micro in loop.start("a", "b"):
        loop.told.append(micro)
    assert not loop.guard.never_started
    assert loop.told == ["in a", "a", "out a", "in b", "b", "out b", "end"]
    loop.guard.refuse_unfinished()


def test_left() -> None:
    loop = Loop()
    steps = loop.start("a", "b", "c")
    assert loop.told == []
    next(steps), next(steps)
    with pytest.raises(BatchError, match="left after 2 of 3 micro-batches"):
        loop.guard.refuse_unfinished()
    assert loop.told == ["in a", "out a", "in b", "out b"], "the context has ended, and the end was not reached"
    loop.guard.refuse_unfinished()  # told once


def test_not_begun() -> None:
    loop = Loop()
    steps = loop.start("a")
    with pytest.raises(BatchError, match="left after 0 of 1"):
        loop.guard.refuse_unfinished()
    assert list(steps) == []


def test_given_up() -> None:
    loop = Loop()
    steps = loop.start("a", "b")
    next(steps)
    loop.guard.discard()
    assert loop.told == ["in a", "out a"]
    loop.guard.refuse_unfinished()
    loop.guard.discard()


def test_a_loop_that_nobody_holds_ends_by_itself() -> None:
    loop = Loop()
    next(loop.start("a", "b"))
    gc.collect()
    assert loop.told == ["in a", "out a"]
    with pytest.raises(BatchError, match="left after 1 of 2"):
        loop.guard.refuse_unfinished()
