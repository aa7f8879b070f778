"""The same rows and the same seed give the same plan, the same micro-batches, and the same parameters to the bit.

Devices other than the CPU are not in here: planning copies lengths to the host, which `meta` tensors do not have.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import support
import torch
from faults import digest_worker as worker
from support import Module, fit, flat_parameters, padmin, ragged_batches
from torch import Tensor, nn

from lightning_padmin import MicroBatcher, MicroBatches, PadMinConfig, compact

CONFIG = PadMinConfig(token_budget=support.BUDGET, launch_cost=4)


class Dropping(Module):
    """Dropout before the head, random noise in the step, AdamW."""

    def __init__(self, share: float) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05))
        self.drop = nn.Dropout(share)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.model.rnn(self.model.embedding(batch["input_ids"]))[0]
        losses = support.token_losses(self.model.head(self.drop(hidden)), batch["labels"])
        return support.reduce_loss(losses, batch["labels"], self.how)


class Noisy(Dropping):
    """Draws outside of dropout too."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) * (1 + 0.1 * torch.rand(()) + 0.1 * random.random())


def trained(share: float, seed: int, kind: type[Dropping] = Dropping, **options: Any) -> Dropping:
    module, callback = kind(share), padmin(**options)
    torch.manual_seed(seed)
    random.seed(seed)
    fit(module, ragged_batches(6), callback, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert callback.stats.micro_batches == 5 * callback.stats.batches
    return module


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_same_seed_gives_the_same_parameters_to_the_bit(share: float) -> None:
    first, second = trained(share, 5), trained(share, 5)
    assert torch.equal(flat_parameters(first), flat_parameters(second))
    assert all(torch.equal(a, b) for a, b in zip(first.gradients, second.gradients, strict=True))
    assert torch.equal(torch.stack(first.losses), torch.stack(second.losses))


@pytest.mark.filterwarnings("ignore:.*draws random numbers outside of dropout")
@pytest.mark.parametrize("kind", [Dropping, Noisy])
def test_the_first_batch_check_leaves_the_random_state_alone(kind: type[Dropping]) -> None:
    """A run with it is the run without it."""
    checked, unchecked = trained(0.3, 5, kind), trained(0.3, 5, kind, check="off")
    assert torch.equal(flat_parameters(checked), flat_parameters(unchecked))


def test_another_seed_gives_other_parameters() -> None:
    """Negative control: only where something is random."""
    assert not torch.equal(flat_parameters(trained(0.3, 5)), flat_parameters(trained(0.3, 6)))
    assert torch.equal(flat_parameters(trained(0.0, 5)), flat_parameters(trained(0.0, 6)))


def test_neither_plans_nor_tensors_depend_on_the_hash_seed() -> None:
    command = [sys.executable, worker.__file__, "3"]
    started = [
        subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    said = [process.communicate(timeout=60)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert said[0][:-1] == said[1][:-1]
    assert said[0][-1] != said[1][-1], "the hash seeds made no difference to anything"
    here = [f"{name} {value}" for name, value in worker.digests(worker.batch(3)).items()]
    assert said[0][:-1] == here
    assert not set(here) & {f"{name} {value}" for name, value in worker.digests(worker.batch(4)).items()}


def micros(prepared: MicroBatches) -> list[dict[str, Any]]:
    return [micro.batch for micro in prepared]


def same(found: MicroBatches, wanted: MicroBatches) -> bool:
    """Plan, weights and every entry of every micro-batch, by key; masks by what they say."""
    if [g.tolist() for g in found.plan.groups] != [g.tolist() for g in wanted.plan.groups]:
        return False
    if found.weights.tolist() != wanted.weights.tolist() or found.stats != wanted.stats:
        return False
    for ours, theirs in zip(micros(found), micros(wanted), strict=True):
        if set(ours) != set(theirs):
            return False
        for key, value in ours.items():
            other = theirs[key]
            if not (torch.equal(value.double(), other.double()) if isinstance(value, Tensor) else value == other):
                return False
    return True


def full_batch() -> dict[str, Any]:
    lengths = support.LENGTHS
    left = [0, 2, 0, 4, 1, 0, 3, 0, 0, 5]
    batch: dict[str, Any] = support.make_batch(lengths, left=left, width=28)
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    batch["scores"] = torch.arange(10.0)
    return batch | {"names": [f"row {k}" for k in range(10)], "temperature": 0.5}


def test_the_order_of_keys_does_not_matter() -> None:
    """Every entry once in every place, and 60 orders that are drawn."""
    batch = full_batch()
    wanted = MicroBatcher(CONFIG).prepare(batch)
    assert len(wanted) > 3
    keys = list(batch)
    orders = [keys[k:] + keys[:k] for k in range(len(keys))] + [keys[::-1]]
    orders += random.Random(0).sample(list(itertools.permutations(keys)), 60)
    for order in orders:
        found = MicroBatcher(CONFIG).prepare({key: batch[key] for key in order})
        assert same(found, wanted)
        assert all(list(micro) == list(order) for micro in micros(found)), "entries come as they came"
        again = compact({key: batch[key] for key in order}, CONFIG)
        assert all(torch.equal(again.batch[key], compact(batch, CONFIG).batch[key]) for key in ("input_ids", "labels"))


def test_the_order_of_rows_does_matter() -> None:
    """Negative control of the comparison."""
    batch = full_batch()
    turned = {key: value.flip(0) if isinstance(value, Tensor) else value for key, value in batch.items()}
    assert not same(MicroBatcher(CONFIG).prepare(turned), MicroBatcher(CONFIG).prepare(batch))
    longer = batch["attention_mask"].clone()
    longer[9, :6] = 1
    assert not same(
        MicroBatcher(CONFIG).prepare(batch | {"attention_mask": longer}), MicroBatcher(CONFIG).prepare(batch)
    )


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_dtype_of_the_mask_does_not_matter(dtype: torch.dtype) -> None:
    batch = full_batch()
    wanted = MicroBatcher(CONFIG).prepare(batch)
    found = MicroBatcher(CONFIG).prepare(batch | {"attention_mask": batch["attention_mask"].to(dtype)})
    assert same(found, wanted)
    assert all(micro["attention_mask"].dtype == dtype for micro in micros(found)), "the model gets its own dtype"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_nor_does_it_in_training(dtype: torch.dtype) -> None:
    modules = []
    for kind in (torch.int64, dtype):
        batches = [batch | {"attention_mask": batch["attention_mask"].to(kind)} for batch in ragged_batches(3)]
        modules.append(Module())
        fit(modules[-1], batches, padmin())
        assert len(modules[-1].shapes) == 15
    assert torch.equal(*map(flat_parameters, modules))


def test_memory_layout_does_not_matter() -> None:
    """Transposed and strided tensors, as collate functions leave them."""
    batch = full_batch()
    wanted = MicroBatcher(CONFIG).prepare(batch)
    transposed = {k: v.T.contiguous().T if isinstance(v, Tensor) and v.ndim == 2 else v for k, v in batch.items()}
    assert not transposed["input_ids"].is_contiguous()
    assert same(MicroBatcher(CONFIG).prepare(transposed), wanted)


def test_what_came_before_does_not_matter() -> None:
    """A batcher remembers sizes, and warns once; neither changes a plan."""
    batcher = MicroBatcher(CONFIG)
    for seed in range(5):
        batcher.prepare(support.make_batch([3 + seed, 9, 24, 7], seed=seed) | {"scores": torch.arange(4.0)})
    assert same(batcher.prepare(full_batch()), MicroBatcher(CONFIG).prepare(full_batch()))
