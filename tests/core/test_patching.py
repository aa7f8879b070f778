"""Changes to what is the process's are taken back, however checks of several threads overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.nn import functional as F

from lightning_padmin.runtime.autocast import without_autocast
from lightning_padmin.runtime.isolation import without_dropout
from lightning_padmin.runtime.patching import Shared, replaced
from lightning_padmin.runtime.writes import Writes


@contextmanager
def watching() -> Iterator[None]:
    writes = Writes()
    writes.protect(torch.zeros(1))
    with writes.watching():
        yield


CHANGES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], object]]] = {
    "dropout": (lambda: without_dropout(nn.Linear(1, 1)), lambda: (F.dropout, F.scaled_dot_product_attention)),
    "autocast": (without_autocast, lambda: torch.set_autocast_enabled),
    "the compiler's stance": (watching, lambda: eval_frame._stance.stance),
}


def overlap(change: Callable[[], AbstractContextManager[Any]], now: Callable[[], object], first_in: bool) -> list[Any]:
    """What is there after each of: one thread enters, another enters, one leaves, the other leaves."""
    turns, done = ([threading.Event() for _ in range(4)] for _ in range(2))

    def check(enters: int, leaves: int) -> None:
        turns[enters].wait(10)
        with change():
            done[enters].set()
            turns[leaves].wait(10)
        done[leaves].set()

    order = ((0, 2), (1, 3)) if first_in else ((0, 3), (1, 2))  # turns in which each enters and leaves
    threads = [threading.Thread(target=check, args=each) for each in order]
    for thread in threads:
        thread.start()
    found = []
    for turn, is_done in zip(turns, done, strict=True):
        turn.set()
        assert is_done.wait(10)
        found.append(now())
    for thread in threads:
        thread.join(10)
    return found


@pytest.mark.parametrize("first_in", [True, False], ids=["first in, first out", "first in, last out"])
@pytest.mark.parametrize("name", CHANGES)
def test_the_last_of_overlapping_threads_takes_it_back(name: str, first_in: bool) -> None:
    change, now = CHANGES[name]
    before = now()
    found = overlap(change, now, first_in)
    assert [each == before for each in found] == [False, False, False, True]


def test_threads_that_put_back_what_they_found_leave_the_change() -> None:
    """What `Shared` is there for."""
    place = SimpleNamespace(value=0)
    found = overlap(lambda: replaced(place, value=place.value + 1), lambda: place.value, first_in=True)
    assert found[-1] != 0
    place.value = 0
    shared = Shared(lambda: replaced(place, value=place.value + 1))
    assert overlap(shared.on, lambda: place.value, first_in=True) == [1, 1, 1, 0]


def test_a_change_that_fails_is_not_counted() -> None:
    place = SimpleNamespace(value=0)

    @contextmanager
    def change() -> Iterator[None]:
        if place.value:
            raise OSError("not now")
        with replaced(place, value=2):
            yield

    shared = Shared(change)
    place.value = 1
    with pytest.raises(OSError, match="not now"), shared.on():
        pass
    place.value = 0
    with shared.on(), shared.on():
        assert place.value == 2
    assert place.value == 0
