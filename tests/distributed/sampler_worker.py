"""One rank of test_sampler_processes.py: `python sampler_worker.py RESULT_FILE`, rank from LOCAL_RANK.

The bucket sampler under Lightning's DDP and under Accelerate: which rows each rank gets in each epoch.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": "2"}
os.environ["ACCELERATE_USE_CPU"] = "true"
sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning.pytorch as pl
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from support import quiet_trainer

from lightning_padmin import LengthBucketBatchSampler

RANK = int(os.environ["LOCAL_RANK"])
LENGTHS = [3 + 7 * k % 40 for k in range(101)]


class Rows(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return len(LENGTHS)


class Keeps(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.epochs = torch.nn.Linear(1, 1), [[], [], []]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.epochs[self.current_epoch].append(batch.tolist())
        return self.layer(batch[:, None].float()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(**options: Any) -> list[list[list[int]]]:
    module = Keeps()
    loader = torch.utils.data.DataLoader(Rows(), batch_sampler=LengthBucketBatchSampler(LENGTHS, 120))
    trainer = quiet_trainer(
        strategy=DDPStrategy(process_group_backend="gloo"),
        devices=2,
        max_epochs=3,
        plugins=[LightningEnvironment()],
        **({"use_distributed_sampler": False} | options),
    )
    trainer.fit(module, loader)
    return module.epochs


def lightning() -> Any:
    try:
        fit(use_distributed_sampler=True)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    else:
        refused = "not refused"
    return fit(), refused


def accelerate() -> Any:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    assert accelerator.num_processes == 2
    sampler = LengthBucketBatchSampler(LENGTHS, 120, rank=0, world_size=1, count_multiple_of=2)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Rows(), batch_sampler=sampler))
    epochs = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
    return epochs


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    results = {"lightning": lightning(), "accelerate": accelerate()}
    torch.save(results, Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
