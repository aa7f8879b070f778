"""One rank of the scenarios in test_sharded.py: `python sharded_worker.py RESULT_FILE STRATEGY SCENARIO ...`.

The rank comes from LOCAL_RANK. Real Trainers, whose strategies shard parameters over two gloo processes.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import cpu_fsdp
import support
import torch
from architectures import zoo
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_padmin import PadMinCallback
from lightning_padmin.integrations.lightning import check as lightning_check
from lightning_padmin.integrations.lightning import loop as lightning_loop

RANK = int(os.environ["LOCAL_RANK"])
BUDGET = 24
# Natural counts under BUDGET: five micro-batches on rank 0, one on rank 1.
FIVE, ONE = [24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2]
GLOO: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=60)}
STRATEGY = ""


class CpuFSDP(FSDPStrategy):
    """Lightning gives FSDP an index of a device, and a CPU has none."""

    def _setup_model(self, module: nn.Module) -> nn.Module:
        return cpu_fsdp.wrapped(module, LlamaDecoderLayer if hasattr(module.model, "config") else nn.Linear)


class Sharded(support.Module):
    """Records full gradients and parameters, the same on every rank."""

    def configure_model(self) -> None:
        if STRATEGY == "fsdp2" and not isinstance(next(self.model.parameters()), DTensor):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.model.head, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def full(self, gradient: bool) -> Tensor:
        if STRATEGY == "fsdp1":
            with FullyShardedDataParallel.summon_full_params(self.trainer.strategy.model, with_grads=gradient):
                return (support.flat_gradient if gradient else support.flat_parameters)(self.model).clone()
        values = [p.grad if gradient else p for p in self.model.parameters()]
        whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
        return torch.cat([value.detach().flatten().clone() for value in whole])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(self.full(gradient=True))

    def on_train_end(self) -> None:
        self.final = self.full(gradient=False)


class Unsharded(support.Module):
    def configure_model(self) -> None:
        pass


def strategy() -> Any:
    if STRATEGY == "fsdp1":
        return CpuFSDP(**GLOO)
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **GLOO)


def batches(count: int = 4, lengths: Any = (FIVE, ONE)) -> list[dict[str, Tensor]]:
    own = list(lengths[RANK])
    turns = [k % len(own) for k in range(count)]
    return [support.make_batch(own[t:] + own[:t], seed=7 * k + RANK) for k, t in enumerate(turns)]


def callback(**options: Any) -> PadMinCallback:
    return PadMinCallback(**({"token_budget": BUDGET, "launch_cost": 4} | options))


def fit(module: support.Module, data: Any, *callbacks: Any, **options: Any) -> Any:
    plugins: list[Any] = [LightningEnvironment()] + ([cpu_fsdp.float64(FSDPPrecision)] if STRATEGY == "fsdp1" else [])
    defaults = {"strategy": strategy(), "devices": 2, "plugins": plugins, "use_distributed_sampler": False}
    return support.fit(module, data, *callbacks, **(defaults | options))


def record(module: Sharded) -> dict[str, Any]:
    return {"gradients": module.gradients, "parameters": module.final, "losses": module.losses}


def pair(data: Any, options: dict[str, Any] | None = None, make: Callable[[], Sharded] = Sharded, **fit_options: Any):  # type: ignore[no-untyped-def]
    plain, split, added = make(), make(), callback(**(options or {}))
    fit(plain, data, **fit_options)
    trainer = fit(split, data, added, **fit_options)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("padmin/")}
    return {"plain": record(plain), "split": record(split), "stats": added.stats.state_dict(), "logged": logged}


def by_hand(data: list[dict[str, Tensor]]) -> Tensor:
    """The mean over ranks of the gradient of the un-split batches, on a model that is nobody's."""
    module = support.Module()
    for batch in data:
        (module.loss(batch) / len(data)).backward()
    gradient = support.flat_gradient(module.model) if data else torch.zeros_like(support.flat_parameters(module.model))
    torch.distributed.all_reduce(gradient)
    return gradient / 2


def uneven() -> Any:
    data = batches()
    result = pair(data, accumulate_grad_batches=2)
    return result | {"hand": by_hand(data[:2])}


def audited() -> Any:
    """From batch 3 on rank 1 alone has another class: weighed like the first one, and otherwise."""

    class Weighted(Sharded):
        weights = (1.0, 1.0)

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            logits = self.model(batch["input_ids"])[:, 0, :2]
            weight = torch.tensor(self.weights, dtype=logits.dtype)
            return nn.functional.cross_entropy(logits, batch["classes"], weight=weight)

    def steps(weights: tuple[float, float], **options: Any) -> Any:
        module, data = Weighted(), batches(lengths=(FIVE, FIVE))
        options |= {"labels_key": "classes", "loss_reduction": "row-mean", "batch_schema": {"labels": "position"}}
        module.weights = weights
        for k, batch in enumerate(data):
            batch["classes"] = torch.zeros(len(FIVE), dtype=torch.int64)
            batch["classes"][::3] = int(RANK == 1 and k >= 3)
        try:
            fit(module, data, callback(**options))
        except Exception as error:
            return str(error), len(module.gradients)
        return module.final, len(module.gradients)

    return {"right": [steps((1.0, 1.0)), steps((1.0, 1.0), check="off")], "wrong": steps((0.2, 0.8))}


def adamw() -> Any:
    return pair(batches(), make=lambda: Sharded(optimizer=lambda p: torch.optim.AdamW(p, lr=0.05)))


def clipped() -> Any:
    how = "value" if STRATEGY == "fsdp1" else "norm"  # Lightning refuses the norm under FSDP1
    return pair(batches(), gradient_clip_val=0.05 if how == "norm" else 0.002, gradient_clip_algorithm=how)


def equal_weights() -> Any:
    """Negative control: every micro-batch weighs 1/K."""
    with support.equal_weights():
        return pair(batches(2))


def outcome(module: Sharded, data: Any, **options: Any) -> str:
    try:
        fit(module, data, callback(**options))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def checked() -> Any:
    one_tells = ([6] * 8, FIVE)
    return {
        "row-mean": outcome(Sharded("row-mean"), batches()),
        "one_tells": outcome(Sharded("row-mean"), batches(lengths=one_tells)),
        "sum": outcome(Sharded("sum"), batches()),
        "right": [outcome(Sharded(how), batches(), loss_reduction=how) for how in ("token-mean", "row-mean", "sum")],
    }


def malformed() -> Any:
    data = batches(1)
    if RANK == 1:
        data[0]["attention_mask"].zero_()
    return outcome(Sharded(), data)


def no_loss_on_one_rank() -> Any:
    data = batches(1)
    if RANK == 1:
        data[0]["labels"].fill_(-100)
    module = Sharded()
    fit(module, data, callback())
    expected = by_hand(data) if RANK == 0 else by_hand([])
    return {"found": module.gradients, "expected": expected, "losses": module.losses}


def tensor_parallel() -> Any:
    """Two ranks that share each batch; it counts once."""
    own = support.make_batch(FIVE)
    added = callback()
    plugins = [LightningEnvironment()]
    shared = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, **GLOO)
    options = {"strategy": shared, "devices": 2, "plugins": plugins, "use_distributed_sampler": False}
    trainer = support.fit(Unsharded(), [own], added, **options)
    return {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("padmin/")}


class Joint(Sharded):
    """A small Llama, and a loss that couples rows."""

    def __init__(self, own_loss: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.own_loss, self.calls, sizes = own_loss, 0, {"hidden_size": 16, "intermediate_size": 24}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=support.VOCABULARY, **sizes, **heads, attn_implementation="eager")
        self.model = LlamaForCausalLM(config).double()
        self.model.model.layers[0].register_forward_pre_hook(self.count)

    padmin_per_call = ("calls",)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def configure_model(self) -> None:
        if STRATEGY == "fsdp2" and not isinstance(next(self.model.parameters()), DTensor):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.own_loss:
            return self.model(**batch).loss
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return torch.logsumexp(support.token_losses(logits, batch["labels"]).sum(1) / 10, 0)


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Models of transformers cast to float32 by name."""

    @functools.wraps(function)
    def run() -> Any:
        with zoo.quiet(), zoo.default_dtype(torch.float64), zoo.upcasts_to(torch.float64):
            return function()

    return run


@in_float64
def joint() -> Any:
    """Five chunks on rank 0 against one on rank 1."""
    made: list[Joint] = []

    def make(own_loss: bool = False) -> Joint:
        made.append(Joint(own_loss))
        return made[-1]

    found = {
        "coupled": pair(batches(2), {"mode": "joint"}, make),
        "own loss": pair(batches(1), {"mode": "joint", "check": "off"}, lambda: make(True)),
    }
    return found | {"calls": [module.calls for module in made]}


@in_float64
def joint_alone() -> Any:
    """Negative control: without the exchange ranks run other numbers of collective passes."""
    lightning_loop.has_collective_forwards = lightning_check.has_collective_forwards = lambda trainer: False
    GLOO["timeout"] = timedelta(seconds=8)
    found = outcome(Joint(), batches(1), mode="joint", check="off")
    torch.save({"joint_alone": found}, Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
    os._exit(0)  # whoever waits for the other rank waits on


SCENARIOS = {
    function.__name__: function
    for function in (
        uneven,
        adamw,
        clipped,
        equal_weights,
        checked,
        audited,
        malformed,
        no_loss_on_one_rank,
        tensor_parallel,
        joint,
        joint_alone,
    )
}

if __name__ == "__main__":
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    STRATEGY = sys.argv[2]
    results = {name: SCENARIOS[name]() for name in sys.argv[3:]}
    torch.save(results, Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
