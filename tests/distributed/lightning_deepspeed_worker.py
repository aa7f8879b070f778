"""One rank of test_lightning_deepspeed.py: `python lightning_deepspeed_worker.py RESULT_FILE STAGE`.

Real Trainers with DeepSpeed's engine on two gloo processes. The rank comes from LOCAL_RANK.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed
import support
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_padmin import PadMinCallback
from lightning_padmin.integrations.lightning import loop as lightning_loop

RANK = int(os.environ["LOCAL_RANK"])
# Natural counts under BUDGET: five micro-batches on rank 0, one on rank 1.
BUDGET, FIVE, ONE = 24, [24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2]


class CpuDeepSpeed(DeepSpeedStrategy):
    """Lightning wants a GPU for it; the engine does not."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._process_group_backend = "gloo"
        self._set_node_environment_variables()
        deepspeed.init_distributed("gloo", verbose=False)

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)


class Sharded(support.Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def full(self) -> torch.Tensor:
        with deepspeed.zero.GatheredParameters([p for p in self.parameters() if hasattr(p, "ds_id")]):
            return support.flat_parameters(self.model).clone()

    def on_train_start(self) -> None:
        self.start = self.full()

    def on_train_end(self) -> None:
        self.final = self.full()


def batches(without_loss: bool) -> list[Any]:
    own = (FIVE, ONE)[RANK]
    made = [support.make_batch(own[k % len(own) :] + own[: k % len(own)], seed=7 * k + RANK) for k in range(4)]
    if without_loss and RANK == 1:
        made[1]["labels"].fill_(-100)
    return made


def fit(stage: int, accumulate: int, *callbacks: Any, how: str = "token-mean", without_loss: bool = False) -> Sharded:
    module = Sharded(how, dtype=torch.float32)
    config = {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": 10,
    }
    options = {"devices": 2, "plugins": [LightningEnvironment()], "use_distributed_sampler": False}
    strategy = CpuDeepSpeed(stage=stage, config=config)
    support.fit(
        module, batches(without_loss), *callbacks, strategy=strategy, accumulate_grad_batches=accumulate, **options
    )
    return module


def callback(**options: Any) -> PadMinCallback:
    return PadMinCallback(token_budget=BUDGET, launch_cost=4, **options)


def apart(split: Sharded, plain: Sharded) -> float:
    """Largest difference of the parameters, by the largest displacement."""
    return float((split.final - plain.final).abs().max() / (plain.final - plain.start).abs().max())


def refused(stage: int) -> str:
    try:
        fit(stage, 2, callback(), how="row-mean")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def scenarios(stage: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for accumulate in (1, 2):
        added = callback()
        results[f"accumulate {accumulate}"] = apart(fit(stage, accumulate, added), fit(stage, accumulate))
        results["micro_batches"] = added.stats.micro_batches
    one = PadMinCallback(token_budget=10_000, launch_cost=10_000, check="off")
    plain = fit(stage, 1, one, without_loss=True)
    results["no loss on one rank"] = apart(fit(stage, 1, callback(), without_loss=True), plain)
    results["refused"] = refused(stage)
    lightning_loop.accumulation_boundary = lambda engine, is_last: contextlib.nullcontext()
    results["without boundary"] = apart(fit(stage, 1, callback(check="off")), fit(stage, 1))
    return results


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.save(scenarios(int(sys.argv[2])), Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
