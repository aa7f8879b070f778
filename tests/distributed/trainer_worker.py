"""One rank of test_trainer_processes.py: `python trainer_worker.py RESULT_FILE`, rank from LOCAL_RANK.

Real Trainers of transformers under DistributedDataParallel with gloo.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": "2"}
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))

import test_transformers_trainer as cases
import torch
from support import equal_weights
from transformers import Trainer

from lightning_padmin import PadMinConfig

RANK = int(os.environ["LOCAL_RANK"])


def train(kind: type, make: Any, config: PadMinConfig | None) -> dict[str, Any]:
    record = cases.train(kind, make, config, ddp_backend="gloo", gradient_accumulation_steps=2, num_train_epochs=1)
    assert record.trainer.accelerator.num_processes == 2
    return {
        "gradients": record.gradients,
        "parameters": record.parameters,
        "losses": cases.losses(record),
        "slots": slots_of(record),
        "logged": [log.get("padmin/micro_batches") for log in record.logs],
    }


def slots_of(record: cases.Record) -> int:
    """Of the model's calls; in joint mode these are whole, and what runs inside of them is counted."""
    counted = record.trainer.padding_stats.slots if isinstance(record.trainer, cases.Ours) else 0
    came = sum(n * width for n, width in record.shapes)
    return min(came, counted) if counted else came


def pair(make: Any, config: PadMinConfig) -> dict[str, Any]:
    return {"stock": train(Trainer, make, None), "ours": train(cases.Ours, make, config)}


def outcome(make: Any, config: PadMinConfig, **options: Any) -> str:
    try:
        cases.train(cases.Ours, make, config, ddp_backend="gloo", **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def broken(samples: Any) -> Any:
    """Rank 1's labels are set on padding."""
    batch = cases.collate(samples)
    return batch | {"labels": torch.ones_like(batch["labels"])} if RANK else batch


def limited(make: Any, most: int, rank: int) -> Any:
    """A model that has no memory for more slots than `most` on one rank."""

    def made() -> Any:
        model = make()

        def check(module: Any, args: Any, kwargs: Any) -> None:
            if rank == RANK and kwargs["input_ids"].numel() > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        model.register_forward_pre_hook(check, with_kwargs=True)
        return model

    return made


def main() -> dict[str, Any]:
    means = PadMinConfig(token_budget=64, launch_cost=4)
    results = {
        "sums": pair(cases.llama, cases.BUDGET),
        "means": pair(cases.MeanLoss, means),
        "joint": pair(cases.llama, replace(means, mode="joint")),
        "refused": outcome(cases.MeanLoss, PadMinConfig(token_budget=64, loss_reduction="sum")),
        "malformed": outcome(cases.llama, cases.BUDGET, collator=broken),
        "out of memory": outcome(limited(cases.llama, 50, 1), replace(cases.BUDGET, check="off")),
        "out of memory, means": outcome(limited(cases.MeanLoss, 25, 0), replace(means, check="off")),
        "the budget that is named": outcome(limited(cases.llama, 50, 1), replace(cases.BUDGET, token_budget=30)),
    }
    with equal_weights():
        results["equal_weights"] = pair(cases.llama, PadMinConfig(token_budget=64, pad_token_id=0, check="off"))
    return results


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.save(main(), Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
