"""One rank of the scenarios in test_deepspeed.py: `python deepspeed_worker.py RESULT_FILE STAGE ...`.

The rank comes from LOCAL_RANK. Real DeepSpeed engines on CPU, two gloo processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Read when DeepSpeed is imported, and by its launcher's scripts; without them it looks for an accelerator and for MPI.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["RANK"] = os.environ["LOCAL_RANK"]
os.environ["WORLD_SIZE"] = os.environ["LOCAL_SIZE"] = "2"
sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed
import support
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from lightning_padmin import MicroBatcher, PadMinConfig
from lightning_padmin.distributed.collectives import exchange_all
from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common.deepspeed import accumulation_boundary, find_engine

RANK = int(os.environ["LOCAL_RANK"])
# Natural counts under the budget: five micro-batches on rank 0, one on rank 1.
LENGTHS = ([24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2])
CONFIG = PadMinConfig(token_budget=24, launch_cost=4)
BATCHES = 4
WITHOUT_LOSS = 2  # rank 1's batch of that index
Record = dict[str, Any]


def batches() -> list[dict[str, Tensor]]:
    own = LENGTHS[RANK]
    made = [support.make_batch(own[k:] + own[:k], seed=7 * k + RANK) for k in range(BATCHES)]
    if RANK == 1:
        made[WITHOUT_LOSS]["labels"].fill_(-100)
    return made


def make_engine(stage: int, window: int, **options: Any) -> Any:
    torch.manual_seed(1)
    model = support.TinyLM()
    zero = {"stage": stage} | options.pop("zero", {})
    config = {
        "train_micro_batch_size_per_gpu": len(LENGTHS[0]),
        "gradient_accumulation_steps": window,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own would be compiled first
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config | options, dist_init_required=False)[0]


def loss_of(engine: Any, batch: dict[str, Tensor]) -> Tensor:
    losses = support.token_losses(engine(batch["input_ids"]), batch["labels"])
    return losses.sum() / (batch["labels"][:, 1:] != -100).sum().clamp(min=1)


def parameters(model: nn.Module) -> Tensor:
    with deepspeed.zero.GatheredParameters([p for p in model.parameters() if hasattr(p, "ds_id")]):
        return support.flat_parameters(model)


def gradient(model: nn.Module) -> Tensor:
    """What the next step will use; safe_get_full_grad knows ZeRO optimizers only."""
    values = [p.grad if p.grad is not None else safe_get_full_grad(p) for p in model.parameters()]
    return torch.cat([value.detach().double().flatten() for value in values])


def boundary(engine: Any) -> tuple[Any, Any]:
    """What the engine and its optimizer have noted."""
    mirrored = getattr(engine.optimizer, "is_gradient_accumulation_boundary", None)
    return engine._is_gradient_accumulation_boundary, mirrored() if callable(mirrored) else mirrored


def train(engine: Any, passes: Any, has_gradient: bool = True) -> Record:
    """Runs all batches; `passes` yields, for each of one batch, a context, a batch and a weight."""
    start, gradients, counts = parameters(engine.module), [], []
    for batch in batches():
        count = 0
        for context, part, weight in passes(engine, batch):
            with context:
                engine.backward(loss_of(engine, part) * weight)
            count += 1
        counts.append(count)
        if has_gradient and engine.is_gradient_accumulation_boundary():
            gradients.append(gradient(engine.module))
        engine.step()
    end = parameters(engine.module)
    steps = (engine.global_steps, engine.micro_steps, engine.global_samples)
    return {"start": start, "end": end, "gradients": gradients, "counts": counts, "steps": steps}


def whole(engine: Any, batch: Any) -> Iterator[tuple[AbstractContextManager[Any], Any, float]]:
    yield nullcontext(), batch, 1.0


def split(engine: Any, batch: Any) -> Iterator[tuple[AbstractContextManager[Any], Any, float]]:
    found = find_engine(engine)
    for micro in MicroBatcher(CONFIG, exchange=exchange_all).prepare(batch):
        yield accumulation_boundary(found, is_last=micro.is_last), micro.batch, micro.weight


def unaware(engine: Any, batch: Any) -> Iterator[tuple[AbstractContextManager[Any], Any, float]]:
    for micro in MicroBatcher(CONFIG, exchange=exchange_all).prepare(batch):
        yield nullcontext(), micro.batch, micro.weight


def pair(stage: int, window: int, has_gradient: bool = True, **options: Any) -> Record:
    return {
        "plain": train(make_engine(stage, window, **options), whole, has_gradient),
        "split": train(make_engine(stage, window, **options), split, has_gradient),
    }


def without_boundary(stage: int) -> Record:
    """Negative control."""
    return {"plain": train(make_engine(stage, 1), whole), "split": train(make_engine(stage, 1), unaware)}


def raising(stage: int, window: int) -> Record:
    """Rank 1 fails in its second micro-batch, rank 0 in its last, before either waits for the other."""
    engine = make_engine(stage, window)
    before, inside, left = boundary(engine), [], ""
    fails_at = (4, 1)[RANK]
    try:
        for k, (context, part, weight) in enumerate(split(engine, batches()[0])):
            with context:
                loss = loss_of(engine, part) * weight
                inside.append(boundary(engine)[0])
                if k == fails_at:
                    raise RuntimeError("the user's own")
                engine.backward(loss)
    except RuntimeError as error:
        left = str(error)
    return {"before": before, "after": boundary(engine), "inside": inside, "error": left}


def found(stage: int) -> Record:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    engine, strategy = make_engine(stage, 1), DeepSpeedStrategy()
    try:
        early = find_engine(strategy)
    except ConfigError as error:
        early = str(error)
    strategy.model = engine
    holders = (engine, strategy, SimpleNamespace(_forward_module=engine), SimpleNamespace(engine=engine))
    return {
        "early": early,
        "same": [find_engine(holder) is engine for holder in holders],
        "none": find_engine(nn.Linear(1, 1)),
    }


def has_unmanaged() -> bool:
    return hasattr(deepspeed.DeepSpeedEngine, "managed_gradient_accumulation")


def scenarios(stage: int) -> Record:
    done: Record = {
        "window1": pair(stage, 1),
        "window2": pair(stage, 2),
        "clipped": pair(stage, 1, gradient_clipping=0.05),
        "without_boundary": without_boundary(stage),
    }
    if has_unmanaged():
        done["unmanaged"] = pair(stage, 1, has_gradient=False, managed_gradient_accumulation=False)
    if stage == 1:
        done |= {"overlapped": pair(stage, 2, zero={"overlap_comm": True})}
    if stage < 2:
        done |= {"raising1": raising(stage, 1), "raising2": raising(stage, 2)}
    if stage >= 2:
        for window in (1, 2):
            zero = {"offload_optimizer": {"device": "cpu"}}
            done[f"offloaded{window}"] = pair(stage, window, has_gradient=False, zero=zero)
    return done | {"found": found(stage)}


if __name__ == "__main__":
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for inference only
    deepspeed.init_distributed("gloo", verbose=False)
    results = {int(stage): scenarios(int(stage)) for stage in sys.argv[2:]}
    torch.save(results, Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
