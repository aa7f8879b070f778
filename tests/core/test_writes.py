"""Memory is copied when it is written into, whichever way, and put back; what nobody writes into is not copied."""

from __future__ import annotations

import collections
import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from lightning_padmin.runtime.isolation import ModuleState, untouched
from lightning_padmin.runtime.keeper import is_sharded
from lightning_padmin.runtime.writes import Writes, _written

MIB = 2**20
SIZE = 1024  # float32 (SIZE, SIZE) is 4 MiB: more than what is copied at once


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.ParameterList(nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False) for _ in range(4))
        self.trained = nn.Parameter(torch.randn(SIZE, SIZE))
        self.register_buffer("table", torch.randn(SIZE, SIZE))
        self.register_buffer("mean", torch.zeros(8))
        self.kept = torch.randn(SIZE, SIZE)
        self.flat = torch.randn(2 * SIZE, SIZE)
        self.views = [self.flat[:SIZE], self.flat[SIZE:]]

    def forward(self) -> Tensor:
        return sum((p * self.trained).mean() for p in self.frozen) + self.table.mean() + self.kept.mean()


def frozen(net: Large) -> list[Tensor]:
    return [p.data for p in net.frozen[:2]]


WRITES: dict[str, tuple[Callable[[Large], Any], int]] = {
    "an optimizer's step on .data": (lambda net: torch._foreach_add_(frozen(net), 1.0), 8),
    "foreach with lists": (lambda net: torch._foreach_copy_(frozen(net), [torch.zeros(SIZE, SIZE)] * 2), 8),
    ".data": (lambda net: net.frozen[0].data.mul_(2), 4),
    "a view of .data": (lambda net: net.frozen[0].data.T[3:5].zero_(), 4),
    "out=": (lambda net: torch.add(net.table, 1, out=net.table), 4),
    "out= of detached weights": (lambda net: torch.sub(net.kept, 1, out=net.frozen[3].detach()), 4),
    "an item": (lambda net: net.kept.__setitem__((0, 0), 5.0), 4),
    "numpy": (lambda net: net.kept.numpy().fill(3), 4),
    "numpy of weights": (lambda net: np.asarray(net.frozen[1].data).fill(3), 4),
    "clipped weights": (lambda net: net.trained.data.clamp_(-0.1, 0.1), 4),
    "one view of two": (lambda net: net.views[1].fill_(0), 8),
    "fused optimizer": (
        lambda net: torch._fused_sgd_(
            [net.trained.data],
            [torch.ones(SIZE, SIZE)],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=1.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        ),
        4,
    ),
    "in a backward pass": (
        lambda net: (
            checkpoint(lambda x: x * net.table.add_(1).mean(), net.trained, use_reentrant=True).sum().backward()
        ),
        4,
    ),
    "random numbers": (lambda net: net.frozen[0].data.normal_(), 4),
    "sorted in place": (lambda net: torch.sort(net.kept, out=(net.kept, torch.empty(0, dtype=torch.long))), 4),
    "nothing": (lambda net: net().backward(), 0),
    "small buffers": (lambda net: net.mean.add_(1), 0),
}


def content(net: Large) -> list[Tensor]:
    return [each.detach().clone() for each in (*net.parameters(), *net.buffers(), net.kept, net.flat)]


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_undone_and_nothing_else_is_copied(name: str) -> None:
    write, copied = WRITES[name]
    net = Large()
    before, state = content(net), ModuleState(net)
    free = state.copied
    assert free <= MIB
    for _ in range(2):
        with state.watching():
            write(net)
        if copied:
            assert not all(map(torch.equal, content(net), before)), "nothing was written, so nothing was tested"
        state.clear()
        assert all(map(torch.equal, content(net), before))
    state.restore()
    assert state.copied - free == copied * MIB
    assert all(p.grad is None for p in net.parameters())


def test_without_watching_writes_stay() -> None:
    """Negative control."""
    net = Large()
    before, state = content(net), ModuleState(net)
    net.frozen[0].data.add_(1)
    state.restore()
    assert not all(map(torch.equal, content(net), before))


def test_copies_that_are_made_at_once_are_a_hundredth() -> None:
    net = nn.Module()
    for k in range(300):
        net.register_buffer(f"b{k}", torch.zeros(64 * 1024))  # 256 KiB each
    assert ModuleState(net).copied <= MIB
    net.weight = nn.Parameter(torch.zeros(250 * MIB // 4), requires_grad=False)
    assert MIB < ModuleState(net).copied <= 3.5 * MIB


def test_shapes_storages_and_flags_come_back() -> None:
    net = Large()
    table, weight, kept = net.table, net.trained, net.kept
    places = [each.untyped_storage()._cdata for each in (table, weight, kept)]
    before = content(net)
    with untouched(net):
        weight.data = torch.zeros(3)
        weight.requires_grad_(False)
        net.frozen[0].requires_grad_(True)
        table.resize_(2, 2)
        kept.t_()
        net.eval()
        net.frozen[1].data = net.frozen[1].data.half()
        net.extra = nn.Linear(2, 2)
        net.register_parameter("more", nn.Parameter(torch.zeros(1)))
        net.register_buffer("new", torch.zeros(1), persistent=False)
        net.register_full_backward_hook(lambda *_: None)
        net.register_state_dict_post_hook(lambda *_: None)
        net.__class__ = nn.Identity
    assert [each.untyped_storage()._cdata for each in (table, weight, kept)] == places
    assert all(map(torch.equal, content(net), before))
    assert (weight.requires_grad, net.frozen[0].requires_grad, net.training) == (True, False, True)
    assert type(net) is Large
    assert not {"extra", "more", "new"} & {*net._modules, *net._parameters, *net._buffers, *vars(net)}
    assert not net._non_persistent_buffers_set
    assert not net._backward_hooks
    assert not net._state_dict_hooks


def test_a_module_that_takes_shape_in_its_first_pass() -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    torch.manual_seed(1)
    with untouched(net):
        net(torch.ones(2, 5))
        assert type(net[0]) is nn.Linear
    assert type(net[0]) is nn.LazyLinear
    assert isinstance(net[0].weight, nn.UninitializedParameter)
    net(torch.ones(2, 7))
    assert net[0].weight.shape == (3, 7)


def test_batch_norms_write_into_what_their_schemas_do_not_name() -> None:
    operator = torch.ops.aten.native_batch_norm.default
    assert {name for _, name in _written(operator)} == {"running_mean", "running_var"}
    width = MIB  # of a size that is not copied at once
    norm = nn.BatchNorm1d(width)
    with untouched(norm):
        norm(torch.randn(2, width))
    assert not norm.running_mean.any()
    assert bool((norm.running_var == 1).all())


def test_tensors_of_other_kinds() -> None:
    net = nn.Module()
    with torch.inference_mode():
        inference = torch.zeros(SIZE, SIZE)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.zeros(2, SIZE), (3, SIZE))
    net.inference, net.sparse = inference, sparse
    net.meta = torch.zeros(4, device="meta")
    net.quantized = torch.zeros(2 * MIB, dtype=torch.int8)
    net.two = nn.Parameter(TwoTensor(torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE)), requires_grad=False)
    net.csr = torch.eye(3).to_sparse_csr()
    with untouched(net):
        with torch.inference_mode():
            inference.add_(1)
        sparse._values().add_(1)
        net.meta.add_(1)
        net.quantized.add_(1)
        net.two.data.add_(1)
        net.csr.values().mul_(2)
    assert not inference.any()
    assert not sparse.to_dense().any()
    assert not net.quantized.any()
    assert not net.two.a.any()
    assert not net.two.b.any()
    assert torch.equal(net.csr.to_dense(), torch.eye(3))


def test_storages_that_others_free_and_gather_are_left_alone() -> None:
    """As sharded parameters are: their storage has no memory between passes."""
    writes, shard = Writes(), torch.zeros(SIZE, SIZE)
    gathered = torch.ones(SIZE, SIZE)
    size = gathered.untyped_storage().nbytes()
    for each in (shard, gathered):
        writes.protect(each)
    writes.settle()
    gathered.untyped_storage().resize_(0)
    with writes.watching():
        gathered.untyped_storage().resize_(size)
        gathered.fill_(2)
        shard.add_(1)
    gathered.untyped_storage().resize_(0)
    writes.restore()
    assert not shard.any()
    assert gathered.untyped_storage().nbytes() == 0
    assert not is_sharded(Large())
    net = Large()
    net.frozen[0].ds_id = 1
    assert is_sharded(net)


class Base:
    pass


class Meter(Base):
    def __init__(self) -> None:
        self.total = 0


class AtWork(Meter):
    def __init__(self) -> None:
        super().__init__()
        self.lock, self.queue = threading.Lock(), queue.Queue()


class Thread(threading.Thread):
    total = 0


class Named(collections.UserDict):
    pass


def test_what_is_in_the_middle_of_something_is_left_alone() -> None:
    net = nn.Module()
    net.meter, net.at_work, net.thread, net.named = Meter(), AtWork(), Thread(), Named(total=0)
    net.generators = [np.random.RandomState(0), random.Random(0)]
    drawn = [each.random() for each in (np.random.RandomState(0), random.Random(0))]
    vars(net)["parent"] = nn.Sequential(net)  # not registered: it holds the module itself
    vars(net)["parent"].note = 1
    with untouched(net):
        net.meter.total = net.at_work.total = net.thread.total = net.named["total"] = 5
        vars(net)["parent"].note = 2
        for each in net.generators:
            each.random()
    assert [net.meter.total, net.at_work.total, net.thread.total, net.named["total"]] == [0, 5, 5, 0]
    assert vars(net)["parent"].note == 2
    assert [each.random() for each in net.generators] == drawn


def test_figures_are_found_beside_data() -> None:
    """What is near is looked at first, so that a data set does not take its place."""
    net = nn.Module()
    net.rows = [{"ids": [k]} for k in range(60_000)]
    net.figures = {"by split": {"train": {"loss": [1.0]}}}
    net.meter = Meter()
    with untouched(net):
        net.figures["by split"]["train"]["loss"].append(2.0)
        net.meter.total += 1
        net.rows.append({})
    assert net.figures == {"by split": {"train": {"loss": [1.0]}}}
    assert net.meter.total == 0
    assert len(net.rows) == 60_000


def test_the_same_values_come_out() -> None:
    """The mode changes no result, higher-order operators included."""
    from torch.nn.attention.flex_attention import flex_attention

    x = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    net = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        wanted = flex_attention(x, x, x), net(x[0])
        with untouched(net):
            found = flex_attention(x, x, x), net(x[0])
    assert all(map(torch.equal, found, wanted))
    compiled = torch.compile(net, backend="eager")
    with untouched(compiled):
        torch.testing.assert_close(compiled(x[0]), net(x[0]))
