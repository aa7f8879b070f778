"""A process group that is destroyed and made anew at the same place, with ranks that watch each other in each."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_padmin.distributed.collectives import board_of_all, heard_of_others


def main(rank: int, holds: bool) -> None:
    held: list[Any] = []
    for k in range(1 if holds else 2):  # with the store held, the second one may wait for ranks of the first
        time.sleep(1.0 if k and rank == 0 else 0.0)  # the other one comes first, and must wait
        dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=30))
        if rank == 1:
            time.sleep(0.3)  # the other one looks for it meanwhile
        board = board_of_all()
        store = dist.distributed_c10d._get_default_store()
        weak = weakref.ref(store)
        held += [store] if holds else []
        del store
        board.post([10 * k + rank])
        assert board.read().tolist() == [[10 * k], [10 * k + 1]]
        dist.barrier()
        time.sleep(0.2)
        print(f"round {k}: heard {heard_of_others()}", flush=True)
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        print(f"round {k}: the store is {'gone' if weak() is None else 'kept'}", flush=True)


if __name__ == "__main__":
    main(int(os.environ["LOCAL_RANK"]), sys.argv[1:] == ["holds"])
