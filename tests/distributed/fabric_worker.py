"""One rank of the scenarios in test_fabric_processes.py: `python fabric_worker.py RESULT_FILE STRATEGY SCENARIO ...`.

The rank comes from LOCAL_RANK. Each scenario trains under a real Fabric with gloo and returns what the test compares.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import cpu_fsdp
import loop_cases
import support
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import FSDPPrecision
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.fabric import FabricPadMin

RANK = int(os.environ["LOCAL_RANK"])
BUDGET = 24
# Natural counts under BUDGET: five micro-batches on rank 0, one on rank 1.
FIVE, ONE = [24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2]
CONFIG = PadMinConfig(token_budget=BUDGET, launch_cost=4)
GLOO: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=60)}


class CpuFSDP(FSDPStrategy):
    """Fabric gives FSDP an index of a device, and a CPU has none; Fabric also refuses FSDPStrategy itself on CPUs."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        return cpu_fsdp.wrapped(module, nn.Linear)


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    fully_shard(model.head, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DDPStrategy(**GLOO),
    "ddp_static": lambda: DDPStrategy(static_graph=True, **GLOO),
    "ddp_find_unused": lambda: DDPStrategy(find_unused_parameters=True, **GLOO),
    "fsdp1": lambda: CpuFSDP(**GLOO),
    "fsdp1_single": lambda: CpuFSDP(**GLOO),
    "fsdp2": lambda: ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1, **GLOO),
    # Two ranks that share each batch. The model is left alone: what counts here is who counts what.
    "tensor_parallel": lambda: ModelParallelStrategy(
        lambda model, mesh: model, data_parallel_size=1, tensor_parallel_size=2, **GLOO
    ),
}
FABRIC: Fabric


def batches(count: int) -> list[dict[str, Tensor]]:
    own = (FIVE, ONE)[RANK]
    turns = [k % len(own) for k in range(count)]
    return [support.make_batch(own[t:] + own[:t], seed=7 * k + RANK) for k, t in enumerate(turns)]


def fresh() -> nn.Module:
    torch.manual_seed(1)
    return support.TinyLM().double()


def set_up() -> Any:
    return FABRIC.setup_module(fresh())


def loss_of(model: nn.Module, batch: dict[str, Tensor], how: str = "token-mean") -> Tensor:
    return support.reduce_loss(support.token_losses(model(batch["input_ids"]), batch["labels"]), batch["labels"], how)


def full_gradient(model: Any) -> Tensor:
    """The gradient of all parameters, un-sharded, the same on every rank."""
    if isinstance(FABRIC.strategy, FSDPStrategy):
        with FullyShardedDataParallel.summon_full_params(model._forward_module, with_grads=True):
            return support.flat_gradient(model).clone()
    grads = [p.grad for p in model.parameters()]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).detach().flatten() for g in grads])


def full_parameters(model: Any) -> Tensor:
    if isinstance(FABRIC.strategy, FSDPStrategy):
        with FullyShardedDataParallel.summon_full_params(model._forward_module):
            return support.flat_parameters(model).clone()
    return torch.cat(
        [(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in model.parameters()]
    )


def by_hand(data: list[dict[str, Tensor]]) -> Tensor:
    """The mean over ranks of the gradient of the un-split batches, on a model that is nobody's."""
    model = fresh()
    for batch in data:
        (loss_of(model, batch) / len(data)).backward()
    gradient = support.flat_gradient(model)
    dist.all_reduce(gradient)
    return gradient / 2


def train(
    pad: FabricPadMin | None, steps: int = 3, accumulate: int = 2, clip: dict[str, float] | None = None
) -> dict[str, Any]:
    """`steps` optimizer steps of AdamW, each after `accumulate` batches; without `pad` these are not split."""
    model = set_up()
    optimizer = FABRIC.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    gradients, losses, passes = [], [], 0
    for index, batch in enumerate(batches(steps * accumulate)):
        more = (index + 1) % accumulate != 0
        pairs = [(batch, 1.0)] if pad is None else pad.micro_batches(batch, model, is_accumulating=more)
        total = 0.0
        for micro, weight in pairs:
            loss = loss_of(model, micro) * weight
            FABRIC.backward(loss / accumulate)
            total, passes = total + loss.item(), passes + 1
        losses.append(total)
        if not more:
            if clip:
                FABRIC.clip_gradients(model, optimizer, **clip)
            gradients.append(full_gradient(model))
            optimizer.step()
            optimizer.zero_grad()
    return {"gradients": gradients, "parameters": full_parameters(model), "losses": losses, "passes": passes}


def pair(defer_sync: bool | None = None, **options: Any) -> dict[str, Any]:
    pad = FabricPadMin(FABRIC, CONFIG, defer_sync=defer_sync)
    return {"plain": train(None, **options), "split": train(pad, **options), "stats": pad.stats.state_dict()}


def uneven() -> Any:
    """Counts 5 against 1, two batches per step."""
    return pair()


def deferred() -> Any:
    return pair(defer_sync=True)


def every_time() -> Any:
    return pair(defer_sync=False)


def clipped() -> Any:
    return pair(clip={"max_norm": 0.05})


def clipped_by_value() -> Any:
    return pair(clip={"clip_val": 0.002})


def equal_weights() -> Any:
    """Negative control: every micro-batch weighs 1/K."""
    with support.equal_weights():
        return pair(accumulate=1)


def against_hand() -> Any:
    """One step, against a gradient that no strategy has touched."""
    model, pad, data = set_up(), FabricPadMin(FABRIC, CONFIG), batches(2)
    for index, batch in enumerate(data):
        for micro, weight in pad.micro_batches(batch, model, is_accumulating=index == 0):
            FABRIC.backward(loss_of(model, micro) * weight / 2)
    return {"found": full_gradient(model), "expected": by_hand(data)}


def metrics() -> Any:
    """Two batches, then none."""
    model, pad = set_up(), FabricPadMin(FABRIC, CONFIG)
    losses = [float(pad.backward(batch, model, lambda micro: loss_of(model, micro))) for batch in batches(2)]
    return {"metrics": pad.metrics(), "again": pad.metrics(), "losses": losses, "stats": pad.stats.state_dict()}


def malformed() -> Any:
    """Rank 1's mask is all zero: both ranks raise before a forward pass, and the next batch works."""
    model, pad, data = set_up(), FabricPadMin(FABRIC, CONFIG), batches(1)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    broken = data[0] | ({"attention_mask": torch.zeros_like(data[0]["attention_mask"])} if RANK == 1 else {})
    message = "nothing raised"
    try:
        pad.micro_batches(broken, model)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    forwards = len(calls)
    pad.backward(data[0], model, lambda micro: loss_of(model, micro))
    return {"message": message, "forwards": forwards, "found": full_gradient(model), "expected": by_hand(data)}


def training_mode_on_one_rank() -> Any:
    """A model that only rank 0 may split: both ranks raise."""
    model = nn.Sequential(nn.Embedding(support.VOCABULARY, 8), nn.Flatten(0, 1), nn.BatchNorm1d(8)).double()
    model, pad = FABRIC.setup_module(model), FabricPadMin(FABRIC, CONFIG)
    model.train(RANK == 1)
    try:
        pad.micro_batches(batches(1)[0], model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """How often a collective of torch.distributed is called from Python meanwhile."""
    original, calls = getattr(dist, name), []

    def call(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*args, **options)

    setattr(dist, name, call)
    try:
        yield calls
    finally:
        setattr(dist, name, original)


def collectives() -> Any:
    """All-gathers of one batch: while it is planned, and while its micro-batches run."""
    model, pad, batch = set_up(), FabricPadMin(FABRIC, CONFIG), batches(1)[0]
    with counted("all_gather") as planning:
        steps = pad.micro_batches(batch, model)
    with counted("all_gather") as running:
        for micro, weight in steps:
            FABRIC.backward(loss_of(model, micro) * weight)
    return len(planning), len(running)


def one_backward(model: Any, pad: FabricPadMin | None, batch: Any, is_accumulating: bool) -> None:
    if pad is not None:
        pad.backward(batch, model, lambda micro: loss_of(model, micro), is_accumulating=is_accumulating)
        return
    with FABRIC.no_backward_sync(model, enabled=is_accumulating):
        FABRIC.backward(loss_of(model, batch))


def reductions() -> Any:
    """How often DistributedDataParallel reduces in two steps of two batches: un-split, deferred, every time."""
    counts = []
    for pad in (None, FabricPadMin(FABRIC, CONFIG), FabricPadMin(FABRIC, CONFIG, defer_sync=False)):
        model, calls = set_up(), [0]

        def hook(state: list[int], bucket):  # type: ignore[no-untyped-def]  # torch refuses string annotations here
            state[0] += 1
            work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        model._forward_module.register_comm_hook(calls, hook)
        for index, batch in enumerate(batches(4)):
            one_backward(model, pad, batch, is_accumulating=index % 2 == 0)
        counts.append(calls[0])
    return counts


def fsdp2_groups(model: Any) -> list[Any]:
    """FSDP2's own groups of parameters; older ones have one for each module."""
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    several = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return [group for groups in several for group in groups if group is not None]


def synchronises(model: Any) -> bool:
    """Whether the next backward pass would reduce gradients."""
    inner = model._forward_module
    if isinstance(inner, FullyShardedDataParallel):
        return all(m._sync_gradients for m in inner.modules() if isinstance(m, FullyShardedDataParallel))
    if isinstance(FABRIC.strategy, ModelParallelStrategy):
        return all(group.reduce_grads for group in fsdp2_groups(model))
    return bool(inner.require_backward_grad_sync)


def left_early() -> Any:
    """Whether gradients are reduced again after a break, an exception, and an iterator that is kept; on all ranks."""
    defer_sync = None if isinstance(FABRIC.strategy, ModelParallelStrategy) else True
    model, pad, data = set_up(), FabricPadMin(FABRIC, CONFIG, defer_sync=defer_sync), batches(1)
    batch, found = data[0], {"before": synchronises(model)}

    def refused() -> str:
        try:
            pad.micro_batches(batch, model)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing raised"

    for _ in pad.micro_batches(batch, model):
        found["inside"] = synchronises(model)
        break
    found["break"], found["break_refused"] = synchronises(model), refused()
    try:
        for micro, weight in pad.micro_batches(batch, model):
            FABRIC.backward(loss_of(model, micro) * weight)
            raise KeyError("a loop that fails")
    except KeyError:
        found["raise"], found["raise_refused"] = synchronises(model), refused()
    kept = pad.micro_batches(batch, model)
    next(kept)
    found["kept"] = synchronises(model)
    pad.discard()
    found["discarded"] = synchronises(model)
    model.zero_grad()
    pad.backward(batch, model, lambda micro: loss_of(model, micro))
    return found | {"found": full_gradient(model), "expected": by_hand(data), "end": synchronises(model)}


def one_rank_left_early() -> Any:
    """Rank 1 leaves a batch that reduces nothing yet. Both ranks hear of it at the next one."""
    model, pad, data = set_up(), FabricPadMin(FABRIC, CONFIG, defer_sync=True), batches(1)
    for micro, weight in pad.micro_batches(data[0], model, is_accumulating=True):
        if RANK == 1:
            break
        FABRIC.backward(loss_of(model, micro) * weight)
    try:
        pad.micro_batches(data[0], model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def after_fabrics_own_context() -> Any:
    """Fabric's context for FSDP2, entered with enabled=False as its documentation accumulates, comes first."""
    model, pad, data = set_up(), FabricPadMin(FABRIC, CONFIG), batches(1)
    with FABRIC.no_backward_sync(model, enabled=False):
        pass
    still = synchronises(model)
    pad.backward(data[0], model, lambda micro: loss_of(model, micro))
    return {"still": still, "found": full_gradient(model), "expected": by_hand(data)}


def no_loss_on_one_rank() -> Any:
    """Rank 1's batch has no loss tokens: it contributes zero, five times, and nobody waits."""
    model, pad, data = set_up(), FabricPadMin(FABRIC, CONFIG), batches(1)
    if RANK == 1:
        data[0]["labels"].fill_(-100)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        loss = pad.backward(data[0], model, lambda micro: loss_of(model, micro))
    own = fresh()
    if RANK == 0:
        loss_of(own, data[0]).backward()
    expected = support.flat_gradient(own) if RANK == 0 else torch.zeros_like(support.flat_parameters(own))
    dist.all_reduce(expected)
    return {"loss": float(loss), "found": full_gradient(model), "expected": expected / 2}


def global_mean() -> Any:
    """normalize="global": the gradient of the token mean over both ranks' rows."""
    config = PadMinConfig(token_budget=BUDGET, launch_cost=4, normalize="global")
    model, pad, batch = set_up(), FabricPadMin(FABRIC, config), batches(1)[0]
    pad.backward(batch, model, lambda micro: loss_of(model, micro))
    hand = fresh()
    both = [support.make_batch(lengths, seed=rank) for rank, lengths in enumerate((FIVE, ONE))]
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in both)
    (sum(loss_of(hand, b, "sum") for b in both) / tokens).backward()
    return {"found": full_gradient(model), "expected": support.flat_gradient(hand)}


def memory() -> Any:
    """Gradient elements that this rank holds after two micro-batches: ours, Fabric's no_backward_sync; the model's."""
    model, pad, held = set_up(), FabricPadMin(FABRIC, CONFIG), []
    for step in pad.micro_batches(batches(1)[0], model):
        FABRIC.backward(loss_of(model, step.batch) * step.weight)
        if step.index == 1:
            held.append(held_gradients(model))
    model = set_up()
    for _ in range(2):
        with FABRIC.no_backward_sync(model):
            FABRIC.backward(loss_of(model, batches(1)[0]))
    return *held, held_gradients(model), sum(p.numel() for p in fresh().parameters())


def held_gradients(model: Any) -> int:
    """Sharded and un-sharded ones, of FSDP2."""
    parameters = [parameter for group in fsdp2_groups(model) for parameter in group.fsdp_params]
    whole = [p._unsharded_param.grad for p in parameters if hasattr(p, "_unsharded_param")]
    whole += [p.unsharded_accumulated_grad for p in parameters]
    sharded = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    return sum(g.numel() for g in whole + sharded if g is not None)


def given_up_under_no_sync() -> Any:
    """Fabric's own no_backward_sync under FSDP2, the step given up, then one batch: is that batch's gradient right?"""
    model, data = set_up(), batches(1)
    with FABRIC.no_backward_sync(model):
        FABRIC.backward(loss_of(model, data[0]))
    model.zero_grad()
    FABRIC.backward(loss_of(model, data[0]))
    return {"found": full_gradient(model), "expected": by_hand(data)}


def same_batch_on_both() -> Any:
    """A tensor-parallel group shares its batch, and counts it once."""
    model, pad = set_up(), FabricPadMin(FABRIC, CONFIG)
    pad.backward(support.make_batch(FIVE), model, lambda micro: loss_of(model, micro))
    return pad.metrics()


def audits(defer_sync: bool | None = None) -> Any:
    """Losses that `backward` checks, in windows of two batches."""

    def make(check: str, reduction: str) -> Any:
        model = set_up()
        optimizer = FABRIC.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        config: Any = {"token_budget": BUDGET, "launch_cost": 4, "check": check, "loss_reduction": reduction}
        pad = FabricPadMin(FABRIC, PadMinConfig(**config), defer_sync=defer_sync) if check else None

        def step(batch: Any, index: int, loss_fn: Any) -> None:
            more = index % 2 == 0
            if pad is None:
                FABRIC.backward(loss_fn(batch) / 2)
            else:
                pad.backward(batch, model, lambda micro: loss_fn(micro) / 2, is_accumulating=more)
            if not more:
                optimizer.step()
                optimizer.zero_grad()

        return model, pad, step, lambda: full_parameters(model)

    return loop_cases.audits(make, RANK)


def deferred_audits() -> Any:
    return audits(defer_sync=True)


def one_rank_fails() -> Any:
    """Rank 1 raises in its second micro-batch. Never returns a result; both processes must end."""
    model, pad = set_up(), FabricPadMin(FABRIC, CONFIG)
    for step in pad.micro_batches(batches(1)[0], model):
        if RANK == 1 and step.index == 1:
            raise RuntimeError("rank 1 fails in its second micro-batch")
        FABRIC.backward(loss_of(model, step.batch) * step.weight)


if __name__ == "__main__":
    torch.set_num_threads(1)
    output, strategy, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if strategy == "fsdp1":
        torch.set_default_dtype(torch.float64)  # FSDP's precision plugin casts what a model returns to it
    plugins: list[Any] = [LightningEnvironment()] + ([cpu_fsdp.float64(FSDPPrecision)] if strategy == "fsdp1" else [])
    FABRIC = Fabric(accelerator="cpu", devices=2, strategy=STRATEGIES[strategy](), plugins=plugins)
    FABRIC.launch()
    results = {name: globals()[name]() for name in names}
    torch.save(results, output.with_suffix(f".rank{RANK}.pt"))
    FABRIC.barrier()
    dist.destroy_process_group()
