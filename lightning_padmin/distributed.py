"""The one collective of the library, and the only file that touches `torch.distributed`.

Before the first forward pass of a batch every rank tells all others a few integers: whether it refused its batch and
why, how many micro-batches it wants, and how many loss tokens it holds. So all ranks run the same number of forward
and backward passes, or all raise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_padmin.errors import PadMinError, PeerError

Exchange: TypeAlias = Callable[[Sequence[int]], NDArray[np.int64]]
"""Takes this rank's integers, returns those of all ranks: (world, n), row r from rank r."""

_ends, _boards = itertools.count(), itertools.count()


def exchange_alone(values: Sequence[int]) -> NDArray[np.int64]:
    """The exchange of one process: (1, n), no collective."""
    return np.asarray([list(values)], dtype=np.int64)


def exchange_all(values: Sequence[int], group: Any = None) -> NDArray[np.int64]:
    """All-gathers integers over a process group; (1, n) where none is initialised.

    Args:
        values: n integers, the same n on every rank, each within int64.
        group: the process group; default: the world.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return exchange_alone(values)
    mine = torch.tensor(list(values), dtype=torch.int64, device=_collective_device(group))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return torch.stack(gathered).cpu().numpy()


def _collective_device(group: Any) -> torch.device:
    """A device that the group's backend moves tensors of; CPU where it can, since nothing has to wait for it."""
    backend = str(dist.get_backend_config(group))
    if "cpu:" in backend or backend in ("gloo", "mpi"):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type)  # the current one of the type


def exchange_at_end(values: Sequence[int], timeout: float = 10.0) -> NDArray[np.int64] | None:
    """The exchange for the end of a training, which some ranks may reach while others still have batches.

    A collective would then meet another one, and all ranks would wait for the timeout of the process group, half an
    hour by default. So the integers go through the key-value store of the process group, and nobody waits longer than
    `timeout` seconds.

    Returns:
        (world, n) as `exchange_all` does, or None if not all ranks came here in time.
    """
    world = world_size()
    if world == 1:
        return exchange_alone(values)
    end = next(_ends)  # the same on every rank
    store = dist.distributed_c10d._get_default_store()
    keys = [f"padmin/end{end}/{rank}" for rank in range(world)]
    read = [f"{key}/read" for key in keys]
    wait = timedelta(seconds=timeout)
    try:
        store.set(keys[dist.get_rank()], ",".join(map(str, values)))
        store.wait(keys, wait)
        table = [[int(value) for value in store.get(key).decode().split(",")] for key in keys]
        store.set(read[dist.get_rank()], "")
        store.wait(read, wait)  # the rank that holds the store must not leave before
    except RuntimeError:  # DistStoreError, DistNetworkError
        return None
    return np.array(table, dtype=np.int64)


class Board(Protocol):
    """Where every rank writes integers, round by round, and reads those of all; not a collective."""

    def post(self, values: Sequence[int]) -> None:
        """Writes this rank's integers of the current round; does not wait."""

    def read(self) -> NDArray[np.int64]:
        """Waits for those of all ranks, (world, n), and goes on to the next round."""

    def wait_until_read(self, timeout: float) -> None:
        """Waits until all other ranks have read the current round, at most `timeout` seconds."""


class _Alone:
    def __init__(self) -> None:
        self._values: Sequence[int] = ()

    def post(self, values: Sequence[int]) -> None:
        self._values = values

    def read(self) -> NDArray[np.int64]:
        return exchange_alone(self._values)

    def wait_until_read(self, timeout: float) -> None:
        pass


class _StoreBoard:
    """In the key-value store of the process group."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._name, self._round = f"padmin/board{next(_boards)}", 0  # the same on every rank
        # As long as a collective would wait.
        self._patience: timedelta = getattr(self._store, "timeout", timedelta(minutes=30))

    def _keys(self, what: str) -> list[str]:
        return [f"{self._name}/{self._round}/{what}/{rank}" for rank in range(self._world)]

    def post(self, values: Sequence[int]) -> None:
        self._store.set(self._keys("said")[self._rank], ",".join(map(str, values)))

    def read(self) -> NDArray[np.int64]:
        keys = self._keys("said")
        try:
            self._store.wait(keys, self._patience)
            table = [[int(value) for value in self._store.get(key).decode().split(",")] for key in keys]
            self._store.set(self._keys("read")[self._rank], "")
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            raise PeerError(f"another rank has left, or answers no longer ({error})") from error
        self._round += 1
        return np.array(table, dtype=np.int64)

    def wait_until_read(self, timeout: float) -> None:
        others = [key for rank, key in enumerate(self._keys("read")) if rank != self._rank]
        with suppress(RuntimeError):
            self._store.wait(others, timedelta(seconds=timeout))


board_alone: Board = _Alone()


def board_of_all() -> Board:
    """A board of all ranks, to be made equally often on each; of this process alone where no group is initialised."""
    return board_alone if world_size() == 1 else _StoreBoard()


def raise_together(error: Exception | None, codes: NDArray[np.int64]) -> None:
    """Raises this rank's own error, or PeerError when only other ranks have one.

    Args:
        error: what this rank wants to raise, or None.
        codes: (world,) error codes of all ranks, 0 for none.
    """
    if error is not None:
        raise error
    failed = np.flatnonzero(codes)
    if len(failed):
        # Those with a code of their own: others are sent as the base class.
        names = {kind.code: kind.__name__ for kind in PadMinError.__subclasses__() if "code" in vars(kind)}
        reason = names.get(int(codes[failed[0]]), "an error")
        ranks = ", ".join(map(str, failed))
        raise PeerError(f"rank {ranks} refused its batch ({reason}); its message stands in that rank's log")


def world_size(group: Any = None) -> int:
    """Number of ranks; 1 where no process group is initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
