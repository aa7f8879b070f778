"""One rank of test_processes.py: `python rank_worker.py RESULT_FILE NAME ...`, rank from LOCAL_RANK.

Real Trainers under DDP and FSDP with gloo; what is shared with other tests of that kind is in tests/distributed.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

import ddp_worker
import sharded_worker
import support
import torch
import torch.distributed as dist
from ddp_worker import callback, fit, pair
from support import Module, make_batch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_padmin.distributed.collectives import exchange_all

RANK = int(os.environ["LOCAL_RANK"])
EIGHT = {"token_budget": 8}


def own(*lengths: list[int], count: int = 2, **options: Any) -> list[dict[str, Tensor]]:
    """Batches of this rank's lengths."""
    return [make_batch(lengths[RANK], seed=3 * k + RANK, **options) for k in range(count)]


# Lengths of both ranks under a budget of 8: how many micro-batches each would run by itself, R05 and R06.
UNEVEN = {"3 and 1": ([8, 8, 8], [2, 2, 2]), "2 and 4": ([4, 4, 8], [8, 7, 6, 5]), "1 and 5": ([2, 2], [8, 8, 8, 8, 8])}
FEW_ROWS = {"4 and 2": ([8] * 4, [3, 3]), "3 and 1": ([8, 7, 7], [2]), "1 and 5": ([3], [8, 6, 6, 6, 5])}


def r05() -> Any:
    return {name: pair(Module, own(*lengths), EIGHT) for name, lengths in UNEVEN.items()}


def r06() -> Any:
    """The same with fewer rows than passes, and with dummies that weigh as much as other micro-batches (the fault)."""
    found = {}
    for name, lengths in FEW_ROWS.items():
        found[name] = pair(Module, own(*lengths), EIGHT)
    with support.equal_weights():
        found["fault"] = pair(Module, own(*FEW_ROWS["4 and 2"]), EIGHT | {"check": "off"})
    return found


NO_LOSS = {"one row": ([4], [5]), "several passes": ([8, 8, 3], [8, 5, 5]), "unequal passes": ([2, 2], [8, 8, 8])}


def r09() -> Any:
    """Rank 0 has no loss token. Every parameter must get a gradient, and ranks the mean of theirs."""
    found = {}
    for name, lengths in NO_LOSS.items():
        (batch,) = own(*lengths, count=1, without_loss=range(len(lengths[0])) if RANK == 0 else ())
        module, alone = Module(), Module()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(module, [batch], callback(**EIGHT))
        if RANK == 1:
            alone.loss(batch).backward()
        grads = support.flat_gradient(alone.model) if RANK == 1 else torch.zeros_like(module.gradients[0])
        dist.all_reduce(grads)
        found[name] = module.gradients[0], grads / 2, float(module.losses[0])
    return found


@contextmanager
def counted(*kinds: Any) -> Iterator[list[int]]:
    """How often no_sync is entered."""
    calls = [0] * len(kinds)
    originals = [kind.no_sync for kind in kinds]

    def counting(k: int) -> Any:
        def no_sync(self: Any) -> Any:
            calls[k] += 1
            return originals[k](self)

        return no_sync

    for k, kind in enumerate(kinds):
        kind.no_sync = counting(k)
    try:
        yield calls
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.no_sync = original


def r39() -> Any:
    """Gradients, and calls of no_sync, under DDP, FSDP2 and FSDP1."""
    found = {}
    with counted(DistributedDataParallel, FullyShardedDataParallel) as calls:
        found["ddp"] = pair(Module, ddp_worker.batches(count=2), {}), list(calls)
        for name in ("fsdp2", "fsdp1"):
            sharded_worker.STRATEGY, calls[:] = name, [0, 0]
            found[name] = sharded_worker.pair(sharded_worker.batches(2)), list(calls)
    return found


def reductions(model: nn.Module, batches: list[Tensor], inside: str) -> int:
    """Buckets reduced over some passes of DistributedDataParallel, all but the last with no_sync."""
    calls, parallel = [0], DistributedDataParallel(model)

    def hook(state: Any, bucket):  # type: ignore[no-untyped-def]  # torch refuses string annotations here
        calls[0] += 1
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    parallel.register_comm_hook(None, hook)
    for k, batch in enumerate(batches):
        last = k == len(batches) - 1
        with nullcontext() if last or inside == "backward" else parallel.no_sync():
            loss = parallel(batch).sum()
            with nullcontext() if last else parallel.no_sync():
                loss.backward()
    return calls[0]


def r40() -> Any:
    """Stock counts of reductions and ours, for 1 and 3 batches; then the fault in a loop by hand."""
    ours = {}
    for count in (1, 3):

        class Counted(Module):
            def on_train_start(self) -> None:
                def hook(state: Any, bucket):  # type: ignore[no-untyped-def]
                    self.reduced += 1
                    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
                    return work.get_future().then(lambda future: future.value()[0])

                self.reduced = 0
                self.trainer.strategy.model.register_comm_hook(None, hook)

        modules = Counted(), Counted()
        fit(modules[0], ddp_worker.batches(count=count))
        fit(modules[1], ddp_worker.batches(count=count), callback())
        ours[count] = modules[0].reduced, modules[1].reduced, len(modules[1].shapes)
    passes = [torch.randn(2, 4) for _ in range(3)]
    return ours, [reductions(nn.Linear(4, 4), passes, inside) for inside in ("both", "backward")]


class Checkpointed(Module):
    """Re-entrant checkpoints: their backward pass runs the forward pass again."""

    reentrant = True

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        def head(hidden: Tensor) -> Tensor:
            return self.model.head(hidden)

        embedded = self.model.embedding(batch["input_ids"])
        hidden = checkpoint(lambda x: self.model.rnn(x)[0], embedded, use_reentrant=self.reentrant)
        logits = checkpoint(head, hidden, use_reentrant=self.reentrant)
        return support.reduce_loss(support.token_losses(logits, batch["labels"]), batch["labels"], self.how)


class CheckpointedPlainly(Checkpointed):
    reentrant = False


def r41() -> Any:
    """The fault: two forward passes, then one backward pass. Some versions of torch raise, others reduce too early."""
    found = {kind.__name__: pair(kind, ddp_worker.batches(count=2), {}) for kind in (Checkpointed, CheckpointedPlainly)}

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=True)

    torch.manual_seed(0)
    parallel, x = DistributedDataParallel(Body()), torch.full((2, 4), 1.0 + RANK, requires_grad=True)
    try:
        (parallel(x).sum() + parallel(x).sum()).backward()
    except RuntimeError as error:  # "marked as ready twice"
        return found, str(error)
    return found, support.flat_gradient(parallel)


class Scaled(Module):
    """A gradient of the rank's own, whatever the batch."""

    def __init__(self, added: Any, values: tuple[float, float]) -> None:
        super().__init__()
        self.automatic_optimization, self.added, self.value = False, [added], values[RANK]
        self.model = nn.ParameterList([torch.zeros((), dtype=torch.float64)])

    def forward(self, batch: Any) -> Tensor:
        return self.model[0] * self.value

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for micro, weight in self.added[0].micro_batches(batch):
            self.manual_backward(self(micro) * weight)
        self.gradients.append(self.model[0].grad.clone())
        self.optimizers().step()
        self.optimizers().zero_grad()

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class Unwrapped(Scaled):
    """The fault: a gradient that DistributedDataParallel does not see."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            gradient = torch.autograd.grad(self(batch), self.model[0])[0]
        self.gradients.append(gradient)
        with torch.no_grad():
            self.model[0] -= 0.5 * gradient


GRADIENTS = [(1.0, 3.0), (0.0, 5.0), (-2.0, 2.0)]


def r47() -> Any:
    found = []
    for values in GRADIENTS:
        module, wrong = Scaled(callback(), values), Unwrapped(callback(), values)
        fit(module, ddp_worker.batches(count=2), module.added[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(wrong, ddp_worker.batches(count=2))
        found.append(tuple([*map(float, each.gradients), float(each.model[0])] for each in (module, wrong)))
    return found


NUMBERS = [[1, 2], [2**31 - 1, 2**40], [2**62, 0, 5]]


def r52() -> Any:
    return [exchange_all([number + RANK for number in numbers]).tolist() for numbers in NUMBERS]


def r53() -> Any:
    """Evaluation with other numbers of batches and rows on each rank: it runs as without the callback."""

    class Evaluates(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.append(tuple(batch["input_ids"].shape))
            self.log("validation", self.loss(batch), sync_dist=True, batch_size=len(batch["labels"]))

    found = []
    for counts in ((3, 2), (2, 2), (1, 4)):
        for added in ([], [callback()]):
            module, trainer = Evaluates(), None
            module.validated = []
            module.val_dataloader = lambda counts=counts: support.loader(  # type: ignore[method-assign]
                ddp_worker.batches(count=counts[RANK], seed=50)
            )
            trainer = fit(module, ddp_worker.batches(count=2), *added, num_sanity_val_steps=0)
            found.append((counts, module.validated, float(trainer.callback_metrics["validation"])))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    results = {name: globals()[name]() for name in sys.argv[2:]}
    torch.save(results, Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
