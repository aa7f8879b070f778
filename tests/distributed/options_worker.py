"""Two ranks with options of their own: `python options_worker.py OUTPUT`; every option of the configuration in turn.

Forked off this process as in `gone_worker`. Written as JSON: per case and rank exit code, seconds, and what it printed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gone_cases import DDPStrategy, LightningEnvironment, support, timedelta
from gone_worker import LIMIT
from gone_worker import run as run_with_mark

from lightning_padmin import PadMinCallback, PadMinConfig

LENGTHS = ([24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2])
# option -> another value than that of `support.padmin()`
OTHERS: dict[str, Any] = {
    "enabled": False,
    "token_budget": 48,
    "mode": "split",
    "layout": "auto",
    "check": "off",
    "loss_reduction": "row-mean",
    "normalize": "global",
    "label_shift": 1,
    "ignore_index": -1,
    "pad_token_id": 0,
    "mask_key": "mask",
    "labels_key": "targets",
    "decoder_mask_key": "decoder_mask",
    "loss_mask_key": "weights",
    "batch_schema": {"x": "row"},
    "call_masks": {"model": "off"},
    "static_keys": ["x"],
    "pad_to_multiple_of": 2,
    "shape_buckets": 4,
    "max_rows": 3,
    "cost_multiple_of": 2,
    "attention_width": 512,
    "audit_every": 100,
    "launch_cost": 5,
    "method": "greedy",
    "log_prefix": "pad/",
    "log_reduce": {"loss": "sum"},
}


def run(work: Callable[[int], None], limit: float = LIMIT) -> list[dict[str, Any]]:
    """Both ranks of a case."""
    return run_with_mark(lambda rank, mark: work(rank), limit)


def fit(rank: int, callback: PadMinCallback | None, **options: Any) -> None:
    own = LENGTHS[rank]
    data = [support.make_batch(own[k:] + own[:k], seed=k) for k in range(3)]
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=20))
    trainer = support.quiet_trainer(
        *([callback] if callback is not None else []),
        strategy=strategy,
        devices=2,
        plugins=[LightningEnvironment()],
        use_distributed_sampler=False,
        **options,
    )
    module = support.Module()
    trainer.fit(module, support.loader(data))
    print("GRADIENTS", float(module.gradients[0].abs().sum()))


def train(rank: int, config: PadMinConfig | None) -> None:
    """The Trainer of transformers; None: without the mixin."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
    import test_transformers_trainer as cases
    from transformers import Trainer

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    kind = Trainer if config is None else cases.Ours
    cases.train(kind, cases.llama, config, ddp_backend="gloo", ddp_timeout=20, max_steps=2)
    print("GRADIENTS")


def loop(rank: int, config: PadMinConfig) -> None:
    """A loop with Accelerate."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    from accelerate import Accelerator

    from lightning_padmin.integrations.accelerate import PadMin

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(support.TinyLM().double())
    pad = PadMin(accelerator, config)
    for micro, weight in pad.micro_batches(support.make_batch(LENGTHS[rank]), model):
        losses = support.token_losses(model(micro["input_ids"]), micro["labels"])
        accelerator.backward(support.reduce_loss(losses, micro["labels"], "token-mean") * weight)
    print("GRADIENTS")


def main(output: str) -> None:
    found = {}
    for name, value in OTHERS.items():

        def differs(rank: int) -> None:
            fit(rank, support.padmin(**({name: value} if rank == 1 else {})))  # noqa: B023

        found[name] = run(differs)
    found["missing"] = run(lambda rank: fit(rank, support.padmin() if rank == 0 else None))
    found["same"] = run(
        lambda rank: fit(rank, support.padmin(loss_reduction=lambda batch: batch["labels"].ne(-100).sum(1)))
    )
    found["log_every_n_steps"] = run(lambda rank: fit(rank, support.padmin(), log_every_n_steps=1 + rank))
    ours, other = PadMinConfig(token_budget=64, launch_cost=4, pad_token_id=0), PadMinConfig(enabled=False)
    for name, work in (("trainer", train), ("loop", loop)):
        found[f"{name}-same"] = run(partial(work, config=ours))
        found[f"{name}-differs"] = run(lambda rank: work(rank, ours if rank else other))  # noqa: B023
    found["trainer-missing"] = run(lambda rank: train(rank, ours if rank else None))
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(*sys.argv[1:])
