"""One rank of test_broken_training.py: `python broken_worker.py RESULT_FILE SCENARIO`, rank from LOCAL_RANK.

The loader of rank 1 raises in the middle of an epoch.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

RANK = int(os.environ["LOCAL_RANK"])


class Broken(Exception):
    pass


def loader() -> None:
    """Lightning, two batches to a window, in the second batch of the second one."""
    import ddp_worker
    import support

    class Breaks(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if RANK == 1 and index == 3:
                raise Broken("rank 1 has no such batch")
            return super().__getitem__(index)

    class Data(support.Batches):
        def __init__(self, batches: Sequence[Any]) -> None:
            self.batches = Breaks(batches)

    support.Batches = Data
    ddp_worker.fit(support.Module(), ddp_worker.batches(count=5), ddp_worker.callback(), accumulate_grad_batches=2)


def trainer_loader() -> None:
    """The Trainer of transformers, in the second batch of its third window."""
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": "2"}
    import test_transformers_trainer as cases

    calls = [0]

    def collate(samples: Any) -> Any:
        calls[0] += 1
        if RANK == 1 and calls[0] == 6:
            raise Broken("rank 1 has no such batch")
        return cases.collate(samples)

    cases.train(cases.Ours, padmin=cases.BUDGET, collator=collate, ddp_backend="gloo", gradient_accumulation_steps=2)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    globals()[sys.argv[2]]()
    print(f"rank {RANK} has come through")
