"""As `options_worker`, for TRL's trainers and Fabric: `python options_trl_worker.py OUTPUT ADAPTER:OPTION:RANK ...."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gone_cases import LightningEnvironment, support
from options_worker import LENGTHS, LIMIT, OTHERS, run

from lightning_padmin import PadMinConfig

# What every adapter here takes; the options of one rank are these, those of the other one differ in one.
OURS = PadMinConfig(token_budget=64, launch_cost=4)
TRL: dict[str, Any] = {"ddp_timeout": 20, "ddp_backend": "gloo", "max_steps": 1}


def places(rank: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")


def grpo(rank: int, config: PadMinConfig | None) -> None:
    places(rank)
    import trl_cases as cases

    stock, ours = cases.trainers()
    cases.train(stock if config is None else ours, TRL, config)
    print("GRADIENTS")


def offline(kind: str, rank: int, config: PadMinConfig | None) -> None:
    places(rank)
    import offline_cases
    import trl_cases as cases

    offline_cases.build(kind, cases.qwen2(), config, **TRL).train()
    print("GRADIENTS")


def fabric(rank: int, config: PadMinConfig | None) -> None:
    from datetime import timedelta

    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from lightning_padmin.integrations.fabric import FabricPadMin

    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=20))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[LightningEnvironment()])
    fabric.launch()
    model = fabric.setup_module(support.TinyLM().double())
    batch = support.make_batch(LENGTHS[rank])

    def loss(part: Any) -> Any:
        losses = support.token_losses(model(part["input_ids"]), part["labels"])
        return support.reduce_loss(losses, part["labels"], "token-mean")

    if config is None:
        fabric.backward(loss(batch))
    else:
        FabricPadMin(fabric, config).backward(batch, model, loss)
    print("GRADIENTS")


ADAPTERS: dict[str, Any] = {
    "grpo": grpo,
    "sft": partial(offline, "sft"),
    "dpo": partial(offline, "dpo"),
    "fabric": fabric,
}


def work(adapter: str, which: int, other: PadMinConfig | None, rank: int) -> None:
    """The rank `which` has its own options, or none."""
    try:
        ADAPTERS[adapter](rank, other if rank == which else OURS)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as where nobody catches it
        os._exit(1)


def main(output: str, *wanted: str) -> None:
    """Cases are `adapter:what:rank`; `what` is an option, `missing` or `same`."""
    found = {}
    if any(not case.startswith("fabric") for case in wanted):  # once, not in every process that is forked off
        places(0)
        import offline_cases  # noqa: F401
    for case in wanted:
        adapter, what, which = case.split(":")
        other = None if what == "missing" else OURS if what == "same" else replace(OURS, **{what: OTHERS[what]})
        # In a loop nothing says how far other ranks are: one that is missing is named after seconds, and waited for.
        limit = 80 if (adapter, what) == ("fabric", "missing") else LIMIT
        found[case] = run(partial(work, adapter, int(which), other), limit)
        Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(*sys.argv[1:])
