"""The one collective of the library, and the only file that touches `torch.distributed`.

Before the first forward pass of a batch every rank tells all others a few integers: whether it refused its batch and
why, how many micro-batches it wants, and how many loss tokens it holds. So all ranks run the same number of forward
and backward passes, or all raise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_padmin.errors import PadMinError, PeerError

Exchange: TypeAlias = Callable[[Sequence[int]], NDArray[np.int64]]
"""Takes this rank's integers, returns those of all ranks: (world, n), row r from rank r."""

_ends = itertools.count()


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
        names = {kind.code: kind.__name__ for kind in PadMinError.__subclasses__()}
        reason = names.get(int(codes[failed[0]]), "an error")
        ranks = ", ".join(map(str, failed))
        raise PeerError(f"rank {ranks} refused its batch ({reason}); its message stands in that rank's log")


def world_size(group: Any = None) -> int:
    """Number of ranks; 1 where no process group is initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
