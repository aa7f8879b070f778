"""One rank of test_accelerate_processes.py: `python accelerate_worker.py RESULT_FILE KIND SCENARIO ...`.

The rank comes from LOCAL_RANK. Each scenario trains with a real Accelerator on CPU with gloo and returns what the test
compares. KIND "one" is one process that knows of no others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
if sys.argv[2] == "one":
    del os.environ["LOCAL_RANK"]
else:
    os.environ |= {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
if sys.argv[2] == "ddp":
    os.environ["ACCELERATE_USE_CPU"] = "true"
sys.path.insert(0, str(Path(__file__).parents[1]))

import loop_cases
import support
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.accelerate import PadMin

KIND = sys.argv[2]
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# Natural counts under BUDGET: five micro-batches on rank 0, one on rank 1.
FIVE, ONE = [24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2]
CONFIG = PadMinConfig(token_budget=24, launch_cost=4)
OFF = PadMinConfig(enabled=False)
BATCHES = 5  # with windows of two, the last one of an epoch has one batch
# What accelerator.distributed_type must be.
TYPES = {"one": "NO", "ddp": "MULTI_CPU", "fsdp1": "FSDP", "fsdp2": "FSDP"}
TYPES |= {f"zero{stage}": "DEEPSPEED" for stage in range(4)}
Record = dict[str, Any]


class Model(nn.Module):
    """Counts its forward passes; loss is a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = support.TinyLM()
        self.passes: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        self.passes.append(tuple(input_ids.shape))
        return support.reduce_loss(support.token_losses(self.inner(input_ids), labels), labels, "token-mean")


def batches() -> list[dict[str, Tensor]]:
    own = (FIVE, ONE)[RANK]
    turns = [3 * k % len(own) for k in range(BATCHES)]
    return [support.make_batch(own[t:] + own[:t], seed=7 * k + RANK) for k, t in enumerate(turns)]


def accelerator_of(window: int) -> Accelerator:
    options: dict[str, Any] = {"gradient_accumulation_steps": window}
    if KIND.startswith("fsdp"):
        own: dict[str, Any] = {"use_orig_params": True} if KIND == "fsdp1" else {"reshard_after_forward": True}
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=int(KIND[-1]), auto_wrap_policy="no_wrap", **own
        )
    if KIND.startswith("zero"):
        options["deepspeed_plugin"] = deepspeed_plugin(int(KIND[-1]), window)
    AcceleratorState._reset_state(False)
    GradientState._reset_state()
    if KIND.startswith("fsdp") and PartialState._shared_state:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # as it was before the first one
    made = Accelerator(cpu=KIND == "one", **options)
    assert made.num_processes == WORLD
    assert made.distributed_type.value == TYPES[KIND], made.distributed_type
    return made


def deepspeed_plugin(stage: int, window: int) -> Any:
    from accelerate import DeepSpeedPlugin

    return DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": len(FIVE),
            "gradient_accumulation_steps": window,
            "gradient_clipping": 0.05,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    )


def train(config: PadMinConfig | None, window: int = 1, clip: bool = False, accumulate: bool = True) -> Record:
    """Two epochs of SGD with momentum and a schedule; `config=None` is the loop without this library."""
    accelerator = accelerator_of(window)
    # FSDP1 clips by a norm in float32, and refuses gradients that are not.
    model: Any = Model() if KIND.startswith(("zero", "fsdp1")) else Model().double()
    own = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    start = support.flat_parameters(own)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loader = Loader(accelerator)
    pad = None if config is None else PadMin(accelerator, config)
    record: Record = {"losses": [], "clipped": [], "rates": [], "metrics": [], "synchronised": 0, "start": start}
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model) if accumulate else nothing():
                record["losses"].append(one_batch(accelerator, model, batch, pad))
                if accelerator.sync_gradients:
                    record["synchronised"] += 1
                    if clip:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.05)
                        if norm is not None:  # ZeRO-0 does not tell
                            record["clipped"].append(float(whole(norm)))
                    if pad is not None:
                        record["metrics"].append(pad.metrics())
                optimizer.step()
                scheduler.step()
                record["rates"].append(scheduler.get_last_lr()[0])
                optimizer.zero_grad()
    unwrapped = accelerator.unwrap_model(model)
    with FullyShardedDataParallel.summon_full_params(model) if KIND == "fsdp1" else nothing():
        record["parameters"] = parameters(unwrapped)
    record["passes"] = len(unwrapped.passes)
    record["stats"] = None if pad is None else pad.stats.state_dict()
    record["engine_steps"] = getattr(model, "global_steps", None)
    return record


def one_batch(accelerator: Accelerator, model: Any, batch: Any, pad: PadMin | None) -> float:
    if pad is None:
        loss = model(**batch)
        accelerator.backward(loss)
        return float(loss.detach())
    total = 0.0
    for micro, weight in pad.micro_batches(batch, model):
        loss = model(**micro) * weight
        total += float(loss.detach())
        accelerator.backward(loss)
    return total


@contextmanager
def nothing() -> Iterator[None]:
    yield


class Loader:
    """Each rank's own batches, which tell Accelerate of the end as its own loaders do."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.state, self.end_of_dataloader, self.remainder = accelerator.gradient_state, False, -1

    def __iter__(self) -> Iterator[Any]:
        self.state._add_dataloader(self)
        made = batches()
        for index, batch in enumerate(made):
            self.end_of_dataloader = index == len(made) - 1
            yield batch
        self.state._remove_dataloader(self)
        self.end_of_dataloader = False


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else torch.as_tensor(tensor)


def parameters(model: nn.Module) -> Tensor:
    gathered: Any = nothing()
    if KIND == "zero3":
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(model.parameters()))
    with gathered:
        return torch.cat([whole(p.detach()).double().flatten() for p in model.parameters()])


def pair(**options: Any) -> Record:
    return {"plain": train(None, **options), "split": train(CONFIG, **options), "off": train(OFF, **options)}


def uneven() -> Any:
    return pair()


def accumulated() -> Any:
    return pair(window=2)


def clipped() -> Any:
    return pair(window=2, clip=True)


def without_accumulate() -> Any:
    return pair(accumulate=False)


def equal_weights() -> Any:
    """A negative control: every micro-batch counts the same."""
    with support.equal_weights():
        return {"plain": train(None, window=2), "split": train(CONFIG, window=2)}


def outcome(run: Any) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def set_up(window: int = 1) -> tuple[Accelerator, Any, PadMin]:
    accelerator = accelerator_of(window)
    model = Model().double()
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, prepared, PadMin(accelerator, CONFIG)


def malformed() -> Any:
    """Rank 1's mask is all zero: both ranks raise before a forward pass, and the next batch works."""
    accelerator, model, pad = set_up()
    batch = batches()[0]
    broken = batch | ({"attention_mask": torch.zeros_like(batch["attention_mask"])} if RANK == 1 else {})
    message = outcome(lambda: pad.micro_batches(broken, model))
    passes = len(accelerator.unwrap_model(model).passes)
    return {"message": message, "passes": passes, "loss": one_batch(accelerator, model, batch, pad)}


def left_early() -> Any:
    """Rank 1 leaves a loop; both hear of it at the next batch, and gradients are reduced again."""
    accelerator, model, pad = set_up()
    with accelerator.no_sync(model):
        for micro, weight in pad.micro_batches(batches()[0], model):
            if RANK == 1:
                break
            accelerator.backward(model(**micro) * weight)
    message = outcome(lambda: pad.micro_batches(batches()[0], model))
    return {"message": message, "synchronises": bool(model.require_backward_grad_sync)}


def reductions() -> Any:
    """How often DistributedDataParallel reduces in two windows of two batches: plain, split."""
    counts = []
    for config in (None, CONFIG):
        accelerator = accelerator_of(2)
        model: Any = Model().double()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        calls = [0]

        def hook(state: list[int], bucket):  # type: ignore[no-untyped-def]  # torch refuses string annotations here
            state[0] += 1
            work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        model.register_comm_hook(calls, hook)
        pad = None if config is None else PadMin(accelerator, config)
        for batch in batches()[:4]:
            with accelerator.accumulate(model):
                one_batch(accelerator, model, batch, pad)
                optimizer.step()
                optimizer.zero_grad()
        counts.append(calls[0])
    return counts


class Network(nn.Module):
    """The logits of token ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = support.TinyLM().double()

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids)
        return logits


def audits() -> Any:
    """Losses that `backward` checks, in windows of two batches."""

    def make(check: str, reduction: str) -> Any:
        accelerator, own = accelerator_of(2), Network()
        model: Any
        model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
        config: Any = {"token_budget": 24, "launch_cost": 4, "check": check, "loss_reduction": reduction}
        pad = PadMin(accelerator, PadMinConfig(**config)) if check else None

        def step(batch: Any, index: int, loss_fn: Any) -> None:
            with accelerator.accumulate(model):
                if pad is None:
                    accelerator.backward(loss_fn(batch))
                else:
                    pad.backward(batch, model, loss_fn)
                optimizer.step()
                optimizer.zero_grad()

        def now() -> Tensor:
            with FullyShardedDataParallel.summon_full_params(model) if KIND == "fsdp1" else nothing():
                return parameters(accelerator.unwrap_model(model)).clone()

        return model, pad, step, now

    return loop_cases.audits(make, RANK)


def unprepared() -> Any:
    _, _, pad = set_up()
    model = Model().double()
    return outcome(lambda: pad.micro_batches(batches()[0], model))


def join() -> Any:
    """What `accelerator.join_uneven_inputs` enters on devices."""
    _, model, pad = set_up()
    with Join([model]):
        message = outcome(lambda: pad.micro_batches(batches()[0], model))
        model(**batches()[0]).backward()
    return message


def disagree() -> Any:
    """Variables that differ from rank to rank."""
    os.environ["PADMIN_ENABLED"] = "true" if RANK == 0 else "false"
    try:
        return outcome(lambda: PadMin(accelerator_of(1)))
    finally:
        del os.environ["PADMIN_ENABLED"]


def evaluation() -> Any:
    """A loader that is only evaluated, on rows that do not divide evenly, with `gather_for_metrics`."""
    accelerator, model, pad = set_up()
    one_batch(accelerator, model, batches()[0], pad)
    rows = torch.utils.data.TensorDataset(torch.arange(11))
    loader = accelerator.prepare(torch.utils.data.DataLoader(rows, batch_size=2))
    found = [accelerator.gather_for_metrics(row) for (row,) in loader]
    return torch.cat(found).tolist()


def deepspeed_control() -> Any:
    """ZeRO told nothing: its engine steps at every micro-batch."""
    from lightning_padmin.integrations.accelerate import loop as accelerate_toggle

    original = accelerate_toggle.before_boundary
    accelerate_toggle.before_boundary = lambda accelerator: nothing()
    try:
        return {"plain": train(None), "split": train(CONFIG)}
    finally:
        accelerate_toggle.before_boundary = original


if __name__ == "__main__":
    torch.set_num_threads(1)
    output, scenarios = Path(sys.argv[1]), sys.argv[3:]
    if KIND.startswith(("fsdp", "zero")):
        # Accelerate knows these on devices only; all it needs of them is a backend and a name.
        PartialState._prepare_backend = lambda *args, **options: ("gloo", DistributedType.MULTI_GPU)
    results = {name: globals()[name]() for name in scenarios}
    torch.save(results, output.with_suffix(f".rank{RANK}.pt"))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
