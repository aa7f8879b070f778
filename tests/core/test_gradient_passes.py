"""The small passes of the first-batch check: what they add up to, and what they leave behind."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import ranks
import support
import torch
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.batch.row_table import measure
from lightning_padmin.batch.schema import infer_schema
from lightning_padmin.distributed import exchange_alone
from lightning_padmin.verification.passes import LocalPasses, ShardedPasses, difference_over_ranks, sketched_shards
from lightning_padmin.verification.probe import make_probe
from lightning_padmin.verification.sketch import combine, sketch

LENGTHS = [3, 9, 5, 7]


class Setting:
    """A model, a batch and a probe of four rows."""

    def __init__(self, **batch: Any) -> None:
        torch.manual_seed(0)
        self.model = support.TinyLM().double()
        self.batch = support.make_batch(LENGTHS, **batch)
        self.schema = infer_schema(self.batch, pad_token_id=0)
        self.table = measure(self.batch, self.schema)
        self.probe = make_probe(self.batch, self.schema, self.table, PadMinConfig(), 4)
        self.shapes: list[tuple[int, ...]] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.shapes.append(tuple(batch["input_ids"].shape))
        losses = support.token_losses(self.model(batch["input_ids"]), batch["labels"])
        return support.reduce_loss(losses, batch["labels"], "token-mean")

    def passes(self, sharded: bool = False, joint: Any = None, loss: Any = None) -> Any:
        arguments = (loss or self.loss, self.batch, self.schema, self.model, self.probe, joint)
        return ShardedPasses(*arguments, exchange=exchange_alone) if sharded else LocalPasses(*arguments)

    @property
    def weights(self) -> list[float]:
        tokens = [float(self.table.loss_tokens[group].sum()) for group in self.probe.groups]
        return [each / sum(tokens) for each in tokens]

    def wanted(self) -> dict[str, Tensor]:
        model = support.TinyLM().double()
        model.load_state_dict(self.model.state_dict())
        losses = support.token_losses(model(self.batch["input_ids"]), self.batch["labels"])
        support.reduce_loss(losses, self.batch["labels"], "token-mean").backward()
        return {name: sketch(p.grad, k) for k, (name, p) in enumerate(model.named_parameters()) if p.grad is not None}


@pytest.mark.parametrize("sharded", [False, True])
def test_split_with_the_right_weights_is_whole(sharded: bool) -> None:
    setting = Setting()
    passes = setting.passes(sharded)
    came = passes.came()
    assert passes.difference(came, setting.wanted(), 1e-3)[0] < 1e-9
    assert passes.difference(passes.whole(), came, 1e-3)[0] < 1e-9
    assert passes.difference(passes.split(setting.weights), came, 1e-3)[0] < 1e-9
    value, where = passes.difference(passes.split([0.5, 0.5]), came, 1e-3)
    assert value > 1e-2
    assert where in came
    assert passes.largest(came) == pytest.approx(max(float(each.abs().max()) for each in came.values()))
    maps = [setting.probe.parts[0], setting.probe.parts[1]]
    assert passes.difference(passes.of(maps, setting.weights), came, 1e-3)[0] < 1e-9
    assert all(p.grad is None for p in setting.model.parameters())
    assert (passes.drew, passes.saw_half) == (False, False)


def test_weights_need_no_further_pass_but_those_that_go_backward_do() -> None:
    setting = Setting()
    passes = setting.passes()
    passes.split([1.0, 0.0])
    count = len(setting.shapes)
    assert count >= 2
    assert passes.difference(passes.split(setting.weights), setting.wanted(), 1e-3)[0] < 1e-9
    assert len(setting.shapes) == count
    assert passes.difference(combine(passes.parts, setting.weights), setting.wanted(), 1e-3)[0] < 1e-9
    assert passes.difference(passes.weighted(setting.weights), setting.wanted(), 1e-3)[0] < 1e-9
    assert len(setting.shapes) > count
    bent = setting.passes(loss=lambda batch: _Clamped.apply(setting.loss(batch)))
    assert bent.difference(bent.split([0.5, 0.5]), bent.weighted([0.5, 0.5]), 1e-3)[0] > 0.1


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(max=0.75)


@pytest.mark.parametrize("sharded", [False, True])
def test_joint_passes_run_the_whole_inside_of_their_context(sharded: bool) -> None:
    setting, entered = Setting(), []
    passes = setting.passes(sharded, joint=lambda: entered.append(1) or nullcontext())  # type: ignore[func-returns-value]
    assert passes.difference(passes.split([]), setting.wanted(), 1e-3)[0] < 1e-9
    assert entered == [1]
    assert set(setting.shapes) == {(4, 9)}
    passes.through(lambda: entered.append(2) or nullcontext())  # type: ignore[func-returns-value]
    assert entered == [1, 2]


def test_rolled_rows_and_batches_read_otherwise() -> None:
    setting = Setting(left=[6, 0, 0, 0])
    passes = setting.passes()
    came, whole = passes.came(), passes.whole()
    assert passes.difference(whole, came, 1e-3)[0] > 1e-2, "a recurrent state reads padding on the left"
    passes.read_as(support.make_batch(LENGTHS), setting.schema)
    assert passes.difference(passes.came(), whole, 1e-3)[0] < 1e-9


def test_random_numbers_and_what_a_step_writes() -> None:
    setting = Setting()
    setting.model.register_buffer("steps", torch.zeros(1))

    def loss(batch: dict[str, Tensor]) -> Tensor:
        setting.model.steps += 1
        return setting.loss(batch) * (1 + torch.rand(()))

    passes = setting.passes(loss=loss)
    before = torch.get_rng_state()
    assert not passes.drew
    passes.came()
    assert passes.drew
    setting.passes().came()
    passes.restore()
    assert torch.equal(torch.get_rng_state(), before)
    assert setting.model.steps == 0


def test_shards() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    module[0].bias.requires_grad_(False)
    module[0](torch.ones(1, 2)).sum().backward()
    found = sketched_shards(module)
    assert list(found) == ["0.weight", "1.weight"]
    assert not found["1.weight"].any()
    assert torch.equal(found["0.weight"], sketch(module[0].weight.grad, 0))


def test_differences_over_ranks() -> None:
    wanted = {"a": torch.tensor([2.0, -4.0]), "b": torch.tensor([1.0])}
    found = [
        {"a": torch.tensor([2.0, -4.0]), "b": torch.tensor([1.5])},
        {"a": torch.tensor([3.0, -4.0]), "b": torch.tensor([1.0])},
    ]
    both, told = ranks.Ranks(2), {}

    def run(rank: int) -> None:
        told[rank] = difference_over_ranks(found[rank], wanted, 1e-1, both.exchange_of(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # Of `a` 1 of 4, and of `b` 0.5 of what is less: 4, or 0.5 / 0.1 of its own size, that is 4 too.
    assert told == {0: (0.25, "a"), 1: (0.25, "a")}
    odd = {"a": torch.tensor([2.0, -4.0]), "b": torch.tensor([float("nan")])}
    value, where = difference_over_ranks(odd, wanted, 1e-1, exchange_alone)
    assert np.isnan(value)
    assert where == "b"
    assert difference_over_ranks({}, {}, 1e-1, exchange_alone) == (0.0, "")
