"""Gradient sketches, and running a step without a trace."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_padmin.runtime.isolation import untouched, without_dropout
from lightning_padmin.runtime.random_state import RandomState
from lightning_padmin.verification.sketch import (
    Sketches,
    best_weights,
    combine,
    difference,
    scales,
    sizes,
    sketch,
    sketched_gradients,
)


@pytest.mark.parametrize("shape", [(1,), (7,), (1024,), (1025,), (40, 60), (3, 2048), (9000, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sketch_sees_a_difference_anywhere(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    own = sketch(tensor, 3)
    assert own.shape == (min(tensor.numel(), 1024),)
    assert own.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
        other = tensor.clone()
        other.view(-1)[place] += 8
        moved = (sketch(other, 3) - own).abs()
        exact = float(other.view(-1)[place].double() - tensor.view(-1)[place].double())
        rows = math.ceil(tensor.numel() / 1024)
        assert float(moved.max()) == pytest.approx(exact / math.sqrt(rows), rel=1e-3)
        assert int((moved > 1e-4).sum()) == 1


def test_a_sketch_is_linear_and_keeps_small_gradients_whole() -> None:
    a, b = torch.randn(2, 70, 33, dtype=torch.float64)
    torch.testing.assert_close(sketch(2 * a - 3 * b, 1), 2 * sketch(a, 1) - 3 * sketch(b, 1), rtol=1e-12, atol=1e-12)
    small = torch.randn(30)
    assert torch.equal(sketch(small, 1), small)


@pytest.mark.parametrize("width", [1024, 512, 1000])
def test_two_rows_never_cancel(width: int) -> None:
    """Opposite equal gradients of two rows of an embedding, for every seed; and the same gradient in all rows."""
    for seed in range(40):
        gradient = torch.zeros(300, width)
        gradient[7], gradient[211] = 1.0, -1.0
        assert float(sketch(gradient, seed).abs().max()) > 0.01
        assert float(sketch(torch.ones(300, width), seed).abs().max()) > 0.5


def test_buckets_are_of_the_size_of_entries() -> None:
    gradient = torch.randn(5000, 1024, generator=torch.Generator().manual_seed(0))
    assert 2 < float(sketch(gradient, 1).abs().max()) < 6


def apart(found: Sketches, wanted: Sketches, limit: float = 1e-3) -> tuple[float, str]:
    return difference(found, wanted, scales(sizes(wanted), limit))


def test_small_gradients_are_held_against_themselves_above_the_noise() -> None:
    wanted = {"large": torch.ones(4), "small": torch.full((4,), 1e-3), "noise": torch.full((4,), 1e-6)}
    assert apart(wanted, wanted) == (0.0, "large")
    assert apart(wanted | {"small": wanted["small"] * 2}, wanted)[0] > 1e-3
    assert apart(wanted | {"small": wanted["small"] * 1.05}, wanted)[0] <= 1e-3
    assert apart(wanted | {"noise": wanted["noise"] * 5}, wanted)[0] <= 1e-3
    assert apart(wanted | {"large": wanted["large"] * 1.002}, wanted)[0] > 1e-3
    assert apart(wanted | {"small": wanted["small"] * 2}, wanted, limit=0.1)[0] <= 0.1


class Net(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 40, sparse=sparse)
        self.head = nn.Linear(40, 5)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids)).square().mean()


@pytest.mark.parametrize("sparse", [False, True])
def test_sketched_gradients_are_sketches_of_the_gradients(sparse: bool) -> None:
    net, ids = Net(sparse), torch.tensor([[1, 2, 2], [4, 9, 1]])
    found = sketched_gradients(lambda: net(ids), net)
    assert all(p.grad is None for p in net.parameters())
    assert not any(p._backward_hooks for p in net.parameters())
    net(ids).backward()
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    assert set(found) == {name for name, _ in named}
    for index, (name, p) in enumerate(named):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        torch.testing.assert_close(found[name], sketch(gradient, index), rtol=1e-6, atol=1e-9)


def test_a_loss_that_reaches_no_parameter_has_gradient_zero() -> None:
    found = sketched_gradients(lambda: torch.ones(()), Net())
    assert set(sizes(found).values()) == {0.0}
    assert apart(found, found)[0] == 0


def test_weights_are_found_by_least_squares() -> None:
    net = Net()
    parts = [sketched_gradients(lambda k=k: net(torch.tensor([[k, k + 1]])), net) for k in (1, 7)]
    whole = combine(parts, [0.3, 1.7])
    assert best_weights(parts, whole) == pytest.approx([0.3, 1.7], rel=1e-5)
    assert apart(combine(parts, [0.3, 1.7]), whole)[0] == 0
    value, name = apart(combine(parts, [0.5, 1.7]), whole)
    assert value > 0.01
    assert name in dict(net.named_parameters())
    parts[0]["head.bias"][0] = math.nan
    assert math.isnan(apart(parts[0], whole)[0])
    assert apart(parts[0], whole)[1] == "head.bias"


def test_everything_is_put_back() -> None:
    class Stateful(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.norm = nn.BatchNorm1d(3)
            self.numbers, self.last, self.names = [1], deque([1], maxlen=2), {"a"}
            self.table, self.counts = {"x": {"y": [1]}}, Counter("aab")
            self.kept = torch.zeros(2)
            self.count = 0
            self.array, self.draws = np.zeros(3), [np.random.default_rng(1), random.Random(1), torch.Generator()]
            self.other = ["config"]

    net = Stateful()
    numbers, mean, drawn = net.numbers, net.mean, []
    frozen = net.frozen.weight.clone()
    net.head.weight.grad = gradient = torch.ones_like(net.head.weight)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = RandomState()
    with contextlib.suppress(KeyError), untouched(net):
        net(torch.tensor([[1]])).backward()
        net.norm(torch.randn(4, 3))
        net.mean += 1
        net.register_buffer("mean", torch.ones(7))
        net.numbers.append(2)
        net.last.extend([5, 6])
        net.names.add("b")
        net.table["x"]["y"].append(2)
        net.counts["c"] += 1
        net.kept.add_(1)
        net.kept = torch.ones(9)
        net.count += 1
        net.added = 1
        net.array[1] = 5
        net.frozen.weight.data.add_(1)
        net.norm.running_mean.data.add_(1)
        drawn.append((net.draws[0].random(), net.draws[1].random(), float(torch.rand((), generator=net.draws[2]))))
        random.random(), np.random.rand()
        assert not before.is_as(RandomState())
        raise KeyError
    assert before.is_as(RandomState())
    assert net.numbers is numbers
    assert net.mean is mean
    assert net.head.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert (net.numbers, list(net.last), net.names, net.table) == ([1], [1], {"a"}, {"x": {"y": [1]}})
    assert net.counts == Counter("aab")
    assert not net.mean.any()
    assert net.norm.num_batches_tracked == 0
    assert net.kept.tolist() == [0, 0]
    assert net.count == 0
    assert not hasattr(net, "added")
    assert not net.array.any()
    assert torch.equal(net.frozen.weight, frozen)
    assert not net.norm.running_mean.any()
    drawn.append((net.draws[0].random(), net.draws[1].random(), float(torch.rand((), generator=net.draws[2]))))
    assert drawn[0] == drawn[1]


class Picky(dict):
    """Like configurations and outputs of models, which refuse to be filled again."""

    def clear(self) -> None:
        raise TypeError

    def update(self, *args: object) -> None:
        raise TypeError


def test_optimizers_of_a_step_are_put_back() -> None:
    """With states, schedules and scalers, from before their first step and from between two."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)
            self.optimizer = torch.optim.AdamW(self.inner.parameters(), lr=0.1)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

        def step(self) -> None:
            self.scaler.scale(self.inner(torch.ones(1, 3)).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()

        def content(self) -> str:
            held = (self.optimizer.state_dict(), self.schedule.state_dict(), self.scaler.state_dict())
            return repr((held, [p.tolist() for p in self.parameters()]))

    holder = Holder()
    for _ in range(2):
        before = holder.content()
        with untouched(holder):
            holder.step()
            holder.step()
            assert holder.content() != before
        assert holder.content() == before
        holder.step()


def test_containers_of_other_types_are_left_alone() -> None:
    net = Net()
    net.picky, net.large = Picky(a=1), [[k] for k in range(200_000)]
    with untouched(net):
        net(torch.tensor([[1]]))
    assert net.picky == {"a": 1}
    assert len(net.large) == 200_000


@pytest.mark.parametrize("seed", range(3))
def test_dropout_is_off_in_training_mode(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 3, 8, 8)
    layers = [nn.Dropout(0.5), nn.Dropout1d(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)]
    query = torch.randn(1, 2, 5, 4)
    with without_dropout(nn.Module()):
        for layer in layers:
            assert torch.equal(layer(x), x)
            assert layer(x) is not x
        attention = nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.9)
    torch.testing.assert_close(attention, nn.functional.scaled_dot_product_attention(query, query, query))
    assert not torch.equal(layers[0](x), x)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
        lambda: nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
    ],
)
def test_dropout_inside_of_other_modules_and_of_checkpointing(
    make: Callable[[], nn.Module], use_reentrant: bool
) -> None:
    module, x = make(), torch.randn(2, 5, 8, requires_grad=True)
    inputs = 3 if isinstance(module, nn.MultiheadAttention) else 1

    def run(value: Tensor) -> Tensor:
        output = module(*[value] * inputs)
        return output[0] if isinstance(output, tuple) else output

    def gradient() -> Tensor:
        with without_dropout(module):
            loss = checkpoint(run, x, use_reentrant=use_reentrant).square().sum()
            module.zero_grad()
            loss.backward()
        return torch.cat([p.grad.flatten().clone() for p in module.parameters() if p.grad is not None])

    assert torch.equal(gradient(), gradient())
    torch.manual_seed(0)
    first = run(x)
    assert not torch.equal(first, run(x))
    with without_dropout(module):
        assert torch.equal(run(x), run(x))


def test_half_precision_is_noticed() -> None:
    layer = nn.Linear(4, 4)
    with without_dropout(layer) as watch:
        layer(torch.ones(1, 4))
        assert not watch.saw_half
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.ones(1, 4))
        assert watch.saw_half
