"""Threads in place of ranks, for what they tell each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


class Ranks:
    """Threads in place of processes: an exchange that waits until all ranks have spoken."""

    def __init__(self, count: int) -> None:
        self.said: list[Sequence[int]] = [()] * count
        self.calls = [0] * count
        self.barrier = threading.Barrier(count, timeout=20)

    def exchange_of(self, rank: int) -> Callable[[Sequence[int]], NDArray[np.int64]]:
        def exchange(values: Sequence[int]) -> NDArray[np.int64]:
            self.said[rank] = list(values)
            self.calls[rank] += 1
            self.barrier.wait()
            table = np.array(self.said, dtype=np.int64)
            self.barrier.wait()
            return table

        return exchange


class ThreadBoard:
    """What ranks note for each other, where a rank that fails waits for nobody."""

    def __init__(self, notes: dict[tuple[int, int], list[int]], rank: int, world: int = 2) -> None:
        self.notes, self.rank, self.world, self.round = notes, rank, world, 0

    def post(self, values: Sequence[int]) -> None:
        self.notes[self.round, self.rank] = list(values)

    def read(self) -> NDArray[np.int64]:
        end = time.monotonic() + 20
        while not all((self.round, rank) in self.notes for rank in range(self.world)):
            assert time.monotonic() < end, "a rank has noted nothing"
            time.sleep(0.001)
        table = [self.notes[self.round, rank] for rank in range(self.world)]
        self.round += 1
        return np.array(table, dtype=np.int64)

    def wait_until_read(self, timeout: float) -> None:
        pass
