"""The collectives of the library, what ranks note for each other without one, and what is said of ended ranks.

Before the first forward pass of a batch every rank tells all others a few integers (see `microbatching.agreement`). So
all ranks run the same number of forward and backward passes, or all raise.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_padmin.distributed.peers import PeerWatch
from lightning_padmin.errors import PeerError, code_of, name_of_code

T = TypeVar("T")
Exchange: TypeAlias = Callable[[Sequence[int]], NDArray[np.int64]]
"""Takes this rank's integers, returns those of all ranks: (world, n), row r from rank r."""

_ends, _boards, _rings = itertools.count(), itertools.count(), itertools.count()


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
    if _watch is not None:
        _watch[1].begin_exchange()
    mine = torch.tensor(list(values), dtype=torch.int64, device=_collective_device(group))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    if _watch is not None:
        _watch[1].end_exchange()
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
    `timeout` seconds, nor for a rank that has ended or is heard to go on.

    Returns:
        (world, n) as `exchange_all` does, or None if not all ranks came here in time.
    """
    world = world_size()
    if world == 1:
        return exchange_alone(values)
    end = next(_ends)  # the same on every rank
    store, watch, until = dist.distributed_c10d._get_default_store(), peer_watch(), time.monotonic() + timeout
    keys = [f"padmin/end{end}/{rank}" for rank in range(world)]
    read = [f"{key}/read" for key in keys]
    watch.come_to_end()
    try:
        store.set(keys[dist.get_rank()], ",".join(map(str, values)))
        if not _come(store, keys, watch, until):
            return None
        table = [[int(value) for value in store.get(key).decode().split(",")] for key in keys]
        store.set(read[dist.get_rank()], "")
        if not _come(store, read, watch, until):  # the rank that holds the store must not leave before
            return None
    except RuntimeError:  # DistStoreError, DistNetworkError
        return None
    return np.array(table, dtype=np.int64)


def _come(store: Any, keys: list[str], watch: PeerWatch, until: float) -> bool:
    """Waits for the keys of all ranks; False as soon as it is known that one of them does not come."""
    began, waits = time.monotonic(), True
    while not store.check(keys):
        now = time.monotonic()
        if waits and watch.goes_on():
            waits, until = False, min(until, now + _GRACE)
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if watch.why(missing) or now > until:
            return bool(store.check(keys))  # what one wrote just before it ended may have come meanwhile
        time.sleep(min(max((now - began) / 8, 2e-4), 0.1))
    return True


class Board(Protocol):
    """Where every rank writes integers, round by round, and reads those of all; not a collective."""

    def post(self, values: Sequence[int]) -> None:
        """Writes this rank's integers of the current round; does not wait."""

    def read(self) -> NDArray[np.int64]:
        """Waits for those of all ranks, (world, n), and goes on to the next round.

        Raises:
            PeerError: a rank has ended without writing, or all of this takes longer than a collective would wait.
        """

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
        store = dist.distributed_c10d._get_default_store()
        self._weak = weakref.ref(store)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._name, self._round = f"padmin/board{next(_boards)}", 0  # the same on every rank
        # As long as a collective would wait.
        self._patience: timedelta = getattr(store, "timeout", timedelta(minutes=30))
        self._peers = peer_watch()

    @property
    def _store(self) -> Any:
        return _alive(self._weak)

    def _keys(self, what: str) -> list[str]:
        return [f"{self._name}/{self._round}/{what}/{rank}" for rank in range(self._world)]

    def post(self, values: Sequence[int]) -> None:
        with suppress(RuntimeError):  # the rank that holds the store is gone, which `read` tells
            self._store.set(self._keys("said")[self._rank], ",".join(map(str, values)))

    def read(self) -> NDArray[np.int64]:
        keys = self._keys("said")
        try:
            self._wait(keys)
            table = [[int(value) for value in self._store.get(key).decode().split(",")] for key in keys]
            self._store.set(self._keys("read")[self._rank], "")
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            gone = self._peers.wait(_LAST_WORDS)
            raise PeerError(f"{_ended(gone)} ({error})" if gone else f"another rank has left ({error})") from error
        self._round += 1
        return np.array(table, dtype=np.int64)

    def _wait(self, keys: Sequence[str]) -> None:
        """Until all keys are there. Not in one call of the store, which would not notice that nobody writes any more.

        Raises:
            PeerError: a rank has ended whose key is missing.
            RuntimeError: the store is gone.
        """
        began = time.monotonic()
        while not self._store.check(list(keys)):
            waited = time.monotonic() - began
            missing = [rank for rank, key in enumerate(keys) if rank != self._rank and not self._store.check([key])]
            gone = self._peers.why(missing)
            # What it wrote just before it ended may have come meanwhile.
            gone = {rank: why for rank, why in gone.items() if not self._store.check([keys[rank]])}
            if gone:
                raise PeerError(_ended(gone))
            if waited > self._patience.total_seconds():
                ranks = ", ".join(map(str, missing))
                raise PeerError(f"rank {ranks} did not come to this batch within {waited:.0f} s")
            # The store is one process's work: the longer it takes, the less often it is asked.
            time.sleep(min(max(waited / 8, 2e-4), 0.25))

    def wait_until_read(self, timeout: float) -> None:
        others = [key for rank, key in enumerate(self._keys("read")) if rank != self._rank]
        end = time.monotonic() + timeout
        with suppress(RuntimeError):
            while time.monotonic() < end and not self._store.check(others):
                if len(self._peers.why([rank for rank in range(self._world) if rank != self._rank])) == len(others):
                    return  # nobody is left who could read
                time.sleep(0.05)


def group_store() -> tuple[Any, int, int]:
    """The key-value store of the process group, this rank and the number of ranks; (None, 0, 1) where there is none."""
    if world_size() == 1:
        return None, 0, 1
    return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()


_LAST_WORDS = 1.0  # seconds to wait for why others have ended, once it is clear that some have
_GRACE = 1.0  # for a rank that meant to go on, as one does that a callback is about to stop
# A store that is held lives on when its process group is destroyed, and takes those for its own that meet at the same
# port later. So nothing here holds one.
_watch: tuple[weakref.ref[Any], PeerWatch] | None = None


def _alive(store: weakref.ref[Any]) -> Any:
    found = store()
    if found is None:
        raise RuntimeError("the process group has been destroyed")
    return found


def peer_watch() -> PeerWatch:
    """This process's place on the ring of ranks (see `peers`), joined at the first call; to be called on every rank."""
    global _watch
    store = dist.distributed_c10d._get_default_store()
    if _watch is None or _watch[0]() is not store:
        if _watch is not None:
            _watch[1].close()
        # The same on every rank. A store may outlive its process group, and what was written there with it.
        prefix, weak = f"padmin/peers{next(_rings)}", weakref.ref(store)

        def look_up(key: str) -> str | None:
            name, now = f"{prefix}/{key}", _alive(weak)
            return now.get(name).decode() if now.check([name]) else None

        def publish(key: str, value: str) -> None:
            _alive(weak).set(f"{prefix}/{key}", value)

        _tell_of_uncaught_errors()
        towards = os.environ.get("MASTER_ADDR")
        _watch = weak, PeerWatch(dist.get_rank(), dist.get_world_size(), publish, look_up, towards)
    return _watch[1]


def heard_of_others() -> str | None:
    """Which ranks have ended and why, None where nothing is known."""
    gone = _watch[1].wait(0.0) if _watch is not None and world_size() > 1 else {}
    return _ended(gone) if gone else None


def go_on() -> None:
    """To be called behind a batch by a rank that has another one; ranks that are at an end need not wait for it."""
    if _watch is not None:
        _watch[1].go_on()


def forget_last_words() -> None:
    """To be called at the beginning of a training, by processes that may have survived an earlier one's error."""
    if _watch is not None:
        _watch[1].forget()


def last_words(error: BaseException) -> str | None:
    """For a rank that an error ends: tells the others, and returns what is known of others that ended before.

    Args:
        error: what ends this rank. One that other ranks have caused is not passed on.

    Returns:
        Which ranks have ended and why, None where nothing is known.
    """
    if world_size() == 1 or _watch is None:
        return None
    watch = _watch[1]
    comes_from_others = isinstance(error, PeerError) or is_broken_connection(error)
    if not comes_from_others:
        watch.say(f"{type(error).__name__}: {_first_line(error)}")
        return None
    gone = watch.wait(_LAST_WORDS)
    return _ended(gone) if gone else None


@contextmanager
def telling_others() -> Iterator[None]:
    """Around a training: what ends it on this rank, others hear; what ended it elsewhere is said beside the error.

    To be entered on every rank.
    """
    forget_last_words()
    if world_size() > 1:
        peer_watch()
    try:
        yield
    except BaseException as error:
        explain(error)
        raise
    if _watch is not None:
        _watch[1].come_to_end()


def explain(error: BaseException) -> None:
    """`last_words`; what is known of other ranks becomes a note of the error, and is printed."""
    if getattr(error, "_padmin_explained", False):
        return
    with suppress(Exception):
        error._padmin_explained = True  # type: ignore[attr-defined]
        known = last_words(error)
        if known is not None and known not in str(error):
            error.add_note(known)
            print(f"lightning-padmin: {known}", file=sys.stderr, flush=True)


@functools.cache
def _tell_of_uncaught_errors() -> None:
    """Training loops of users' own have no place where an error passes by, but the end of the process."""
    before = sys.excepthook
    atexit.register(_tell_of_the_end)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain(error)
        before(kind, error, trace)

    sys.excepthook = hook


def _tell_of_the_end() -> None:
    """Neither an exit nor the end of a script passes by as an error."""
    if _watch is not None:
        _watch[1].leave("its process has come to its end: by an exit, or with no more batches than that")


_BROKEN = ("connection closed by peer", "connection reset", "broken pipe", "socket closed", "timed out waiting")


def is_broken_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank has left."""
    kinds = tuple(kind for name in ("DistNetworkError", "DistStoreError") if (kind := getattr(dist, name, None)))
    return isinstance(error, kinds) or any(word in str(error).lower() for word in _BROKEN)


def _ended(gone: Mapping[int, str]) -> str:
    """`rank 1 has ended: <why>`."""
    return "; ".join(f"rank {rank} has ended ({why})" for rank, why in sorted(gone.items()))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:500]


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
        reason = name_of_code(int(codes[failed[0]])) or "an error"
        ranks = ", ".join(map(str, failed))
        raise PeerError(f"rank {ranks} refused its batch ({reason}); its message stands in that rank's log")


def together(function: Callable[[], T], exchange: Exchange) -> T:
    """What a function returns on this rank; where it raises on one rank, all raise.

    To be called on every rank. The function must not take part in a collective that others would then wait in.

    Raises:
        Exception: the function's own, whatever it is; on ranks where it raised none, PeerError.
    """
    return agree(function, exchange)[0]


def agree(
    function: Callable[[], T],
    exchange: Exchange,
    says: Callable[[T], Sequence[int]] = lambda result: (),
    count: int = 0,
) -> tuple[T, NDArray[np.int64]]:
    """`together`, with what each rank says of its result in the same exchange.

    Args:
        function: gives this rank's result.
        exchange: the collective.
        says: integers of a result; what it raises, all ranks hear of too.
        count: of these.

    Returns:
        This rank's result, and the integers of all ranks, (world, count).
    """
    error: Exception | None = None
    result: Any = None
    said: Sequence[int] = [0] * count
    try:
        result = function()
        said = says(result)
    except Exception as caught:  # whatever it is, the other ranks must hear of it before this one raises
        error = caught
    table = exchange([code_of(error), *said])
    raise_together(error, table[:, 0])
    return cast("T", result), table[:, 1:]


def all_gather_floats(values: Sequence[float], exchange: Exchange) -> NDArray[np.float64]:
    """Floats of all ranks, (world, n), to the bit: the same on every rank, NaN included."""
    return as_floats(exchange([as_integer(value) for value in values]))


def as_integer(value: float) -> int:
    """A float64's bits, for an exchange of integers."""
    return int(np.float64(value).view(np.int64))


def as_floats(integers: NDArray[np.int64]) -> NDArray[np.float64]:
    """The inverse, of an array or some columns of one."""
    return np.ascontiguousarray(integers, dtype=np.int64).view(np.float64)


def world_size(group: Any = None) -> int:
    """Number of ranks; 1 where no process group is initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
