"""Calls of any module in chunks: equal to the whole call where rows are real, or as they came and told why."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import call_modules
import numpy as np
import pytest
import torch
from call_modules import LENGTHS, Attends, Packed, Towers, inputs
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.distributed import exchange_alone
from lightning_padmin.errors import ConfigError, PadMinWarning
from lightning_padmin.forward import Calls, CallSite, any_module, call_sites, chunked
from lightning_padmin.forward.arguments import leaves
from lightning_padmin.integrations.common import apart
from lightning_padmin.verification.made_with import MadeWith

CONFIG = PadMinConfig(token_budget=24, launch_cost=2)
DECLARED = replace(CONFIG, call_masks={"declared": "~pad"})


@pytest.fixture(autouse=True)
def _doubles() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run(
    module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any], **options: Any
) -> tuple[Any, Calls, list[str]]:
    """Outputs in chunks, what they cost, and what was told."""
    root = nn.ModuleDict({"declared" if "pad" in named else "m": module})
    config = DECLARED if "pad" in named else CONFIG
    told: list[str] = []
    with chunked(call_sites(root, config), config, tell=told.append, **options) as calls:
        outputs = module(*args, **named)
    return outputs, calls, told


def compared(module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any], **how: Any) -> tuple[Calls, list[str]]:
    """Outputs where rows are real, and gradients of a loss of these, against the whole call's; to 1e-12."""
    module = module.eval() if how.pop("evaluates", False) else module.train()
    for child in module.modules():  # draws of parts are others than those of the whole
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        if isinstance(child, nn.RNNBase | nn.MultiheadAttention):
            child.dropout = 0.0
    other = copy.deepcopy(module)
    wanted, given = called(other, args, named)
    (outputs, calls, told), own = called(lambda *args, **named: run(module, args, named, **how), args, named)
    wanted = leaves(wanted)
    got = leaves(outputs)
    assert list(got) == list(wanted)
    loss = other_loss = torch.zeros(())
    for path, whole in wanted.items():
        if not isinstance(whole, Tensor):
            assert got[path] == whole
            continue
        assert got[path].shape == whole.shape
        assert got[path].dtype == whole.dtype
        real = kept(got[path], whole)
        assert real.any()
        assert torch.equal(got[path][real].isfinite(), whole[real].isfinite())
        finite = real & whole.isfinite()
        if whole.is_floating_point():
            assert float((got[path] - whole)[finite].detach().abs().max()) <= 1e-12
            weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(5))
            loss = loss + (got[path] * weight)[finite].sum()
            other_loss = other_loss + (whole * weight)[finite].sum()
        else:
            assert torch.equal(got[path], whole)
    loss.backward()
    other_loss.backward()
    pairs = list(zip([*module.parameters(), *own], [*other.parameters(), *given], strict=True))
    scale = max(float(b.grad.abs().max()) for _, b in pairs if b.grad is not None)
    for a, b in pairs:
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or float((a.grad - b.grad).abs().max()) <= 1e-12 * scale
    return calls, told


def called(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
    """What it gives for inputs that want gradients, with these."""
    own: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(leaf, value))
        is_mask = isinstance(value, Tensor) and bool(((value == 0) | (value == 1)).all())
        if not isinstance(value, Tensor) or not value.is_floating_point() or is_mask:
            return value
        own.append(value.clone().requires_grad_())
        return own[-1] * 1  # what somebody has computed

    return function(*map(leaf, args), **{name: leaf(value) for name, value in named.items()}), own


def kept(got: Tensor, whole: Tensor) -> Tensor:
    """Where positions are real, by the lengths of the batch; all of what has no positions."""
    real = torch.ones(whole.shape, dtype=torch.bool)
    rows = [dim for dim, size in enumerate(whole.shape) if size == len(LENGTHS)]
    for dim, size in enumerate(whole.shape):
        if size in (max(LENGTHS), call_modules.WIDTH) and rows:
            mask = torch.arange(size) < torch.tensor(LENGTHS)[:, None]
            shape = [1] * whole.ndim
            shape[rows[0]], shape[dim] = mask.shape
            real = real & (mask if rows[0] < dim else mask.T).reshape(shape)
    return real


@pytest.mark.parametrize("name", call_modules.exact())
def test_chunks_give_what_the_whole_call_gives(name: str) -> None:
    module, args, named = call_modules.exact()[name]()
    calls, told = compared(module, args, named)
    assert told == []
    assert sum(calls.chunked.values()) == len(calls) == (3 if name == "towers" else 1)
    assert calls.total.micro_batches > len(calls)
    assert calls.total.slots < 0.8 * calls.total.slots_before


@pytest.mark.parametrize("name", call_modules.inexact())
def test_what_is_not_exact_runs_as_it_came(name: str) -> None:
    make, why = call_modules.inexact()[name]
    module, args, named = make()
    other = copy.deepcopy(module)
    args = tuple(each.clone() for each in args)
    before = torch.get_rng_state()
    for _ in range(3 if name == "a running mean" else 1):
        wanted = other(*(each.clone() for each in args), **named)
    torch.set_rng_state(before)
    warns = pytest.warns(PadMinWarning, match=f"calls of 'm' .* run as they came, with their padding: .*{why}")
    with warns, chunked(call_sites(nn.ModuleDict({"m": module}), CONFIG), CONFIG) as calls:
        for _ in range(3 if name == "a running mean" else 1):
            got = module(*args, **named)
    assert torch.equal(got, wanted)
    assert list(calls) == []
    assert calls.as_they_came == {"m": 1}  # and those of before, which were open
    for a, b in zip(module.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["convolution", "not packed", "mean over the width", "rows coupled"])
def test_without_the_proof_such_a_call_would_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shapes are those of any other; who compares a step in both ways finds it too."""
    monkeypatch.setattr(any_module, "_compared", lambda places, *others: places)
    module, args, named = call_modules.inexact()[name][0]()
    sites = sites_of(module)
    _, mask, _ = inputs(args[0].shape[1])

    def loss() -> Tensor:
        outputs = module(*args, **named)
        return (outputs.square() * (mask[..., None] if outputs.ndim == 3 else 1)).sum()

    ways = [nullcontext, lambda: chunked(sites, CONFIG)]
    found = apart(loss, module, ways, trainer=SimpleNamespace(), without_trace=nullcontext, exchange=exchange_alone)
    assert found.is_too_far
    assert found.value > 0.01


def sites_of(module: nn.Module, config: PadMinConfig = CONFIG) -> dict[str, CallSite]:
    return call_sites(nn.ModuleDict({"m": module}), config)


def test_sites() -> None:
    towers = Towers()
    towers.add_module("loss", nn.CTCLoss())
    found = sites_of(towers)
    assert list(found) == ["m.query", "m.document"]
    assert [each.masks[0].kind for each in found.values()] == ["mask", "lengths"]
    assert list(call_sites(towers.query, with_itself=True)) == [""]
    assert list(call_sites(towers.query)) == []
    config = replace(CONFIG, call_masks={"m.q*": "off", "m": "lengths:real"})
    found = sites_of(towers, config)
    assert [(name, each.has_inside) for name, each in found.items()] == [("m", True), ("m.document", False)]
    compiled = nn.Module()
    compiled._orig_mod = towers
    assert list(sites_of(compiled)) == []  # one graph, into which nothing is put


@pytest.mark.parametrize(
    ("masks", "match"),
    [
        ({"encdoer": "mask"}, r"call_masks\['encdoer'\]: no submodule has that name; give one of m, m.query"),
        ({"m.query": "mask"}, r"call_masks\['m.query'\]='mask': Attends.forward .* give one of ids, att"),
    ],
)
def test_declarations_that_name_nothing(masks: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        sites_of(Towers(), replace(CONFIG, call_masks=masks))


def test_calls_inside_of_chunks_run_as_they_are_and_what_runs_as_it_came_lets_them() -> None:
    """Each level is a site: the outermost that can be taken is."""
    stock = call_modules.Stock(True).eval()
    ids, mask, _ = inputs()
    calls, told = compared(stock, (ids, mask), {}, evaluates=True)
    assert told == []
    assert calls.chunked == {"m.encoder": 1}
    config = replace(CONFIG, call_masks={"m.encoder": "off"})
    with chunked(sites_of(stock, config), config) as calls:
        stock(ids, mask)
    assert calls.chunked == {"m.encoder.layers.0": 1, "m.encoder.layers.1": 1}


def test_what_was_right_once_decides_where_sizes_agree() -> None:
    """Rows and features of one size: as it came at first, in chunks after another call has told."""
    weighs = call_modules.Weighs()
    square = (torch.randn(6, 3, 14, 6), inputs()[1])
    _, calls, told = run(weighs, square, {})
    assert calls.chunked == {}
    (words,) = told
    assert "Declare batch_schema={'x': Field('position', row_dim=..., position_dims=(...,))}" in words
    run(weighs, (torch.randn(4, 3, 9, 6), (torch.arange(9) < torch.tensor([2, 9, 3, 4])[:, None]).long()), {})
    outputs, calls, told = run(weighs, square, {})
    assert (dict(calls.chunked), told) == ({"m": 1}, [])
    wanted = weighs(*square)
    assert float(((outputs - wanted) * square[1][:, None, :, None]).detach().abs().max()) <= 1e-12


def test_a_declared_entry() -> None:
    weighs = call_modules.Weighs()
    config = replace(CONFIG, batch_schema={"x": {"kind": "position", "position_dims": [2]}})
    x, (_, mask, _) = torch.randn(6, 3, 14, 6), inputs()
    with chunked(sites_of(weighs), config) as calls:
        weighs(x, mask)
    assert calls.chunked == {"m": 1}


def test_as_many_rows_as_positions_as_features() -> None:
    """The first call of all: what stands in front is tried, and proven."""
    for module, time_first in ((call_modules.Weighs(), False), (call_modules.TimeFirst(), True)):
        x, lengths = torch.randn(8, 8, 8), [2, 8, 3, 4, 5, 6, 1, 2]
        if time_first:
            state = torch.randn(1, 8, 8)
            _, calls, told = run(module, (x, (state, state), lengths), {})
            assert calls.chunked == {}  # read as (rows, width) the chunks are not the whole
            assert "call of 8 rows and width 8" in told[0] or "parts of it" in told[0] or "differs" in told[0]
            continue
        mask = torch.arange(8) < torch.tensor(lengths)[:, None]
        outputs, calls, told = run(module, (x, mask), {})
        assert (dict(calls.chunked), told) == ({"m": 1}, [])
        assert float((outputs - module(x, mask))[mask].detach().abs().max()) <= 1e-12


def test_nothing_to_remove() -> None:
    """No mask, one without padding, one that is no mask, a cast of it: the module's own outputs, nothing told."""
    attends = Attends()
    ids, mask, _ = inputs()
    for given in (None, torch.ones_like(mask), mask * 0 + 2, mask.double() * 0.5 + 0.5, mask * -1):
        outputs, calls, told = run(attends, (ids, given), {})
        assert torch.equal(outputs[0], attends(ids, given)[0])
        assert (list(calls), dict(calls.as_they_came)) == ([], {})
        assert told == []


def test_without_a_graph() -> None:
    packed = Packed()
    ids, _, lengths = inputs(max(LENGTHS))
    with torch.no_grad():
        outputs, calls, _ = run(packed, (ids, lengths), {})
        assert float((outputs[1] - packed(ids, lengths)[1]).abs().max()) <= 1e-12
    assert calls.total.micro_batches == 3


def test_inside_of_a_checkpoint_calls_run_as_they_came() -> None:
    attends = Attends()
    ids, mask, _ = inputs()
    told: list[str] = []
    with chunked(sites_of(attends), CONFIG, tell=told.append) as calls:
        hidden, _ = torch.utils.checkpoint.checkpoint(attends, ids, mask, use_reentrant=False)
    hidden.sum().backward()
    assert calls.chunked == {}
    assert "inside of torch.utils.checkpoint" in told[0]


def test_rows_behind_padding() -> None:
    """Rolled where the module does not count columns, after that has been proven for rolled rows; else as it came."""
    ids, mask, _ = inputs()
    attends = Attends()
    for flipped in (mask, mask.flip(1)):
        outputs, calls, told = run(attends, (ids, flipped), {})
        wanted = attends(ids, flipped)
        assert float((outputs[0] - wanted[0])[flipped != 0].detach().abs().max()) <= 1e-12
        assert (dict(calls.chunked), told) == ({"m": 1}, [])
    extras, _, named = call_modules.exact()["extras"]()
    _, calls, told = run(extras, (ids, mask.flip(1)), named)
    assert calls.chunked == {}  # a table of columns: rows begin in the first one, and there is nothing to remove
    assert told == []


def test_weights_that_autocast_keeps_have_their_graph() -> None:
    """The proof runs without one, in the same autocast; what it has cast is not what the step uses."""
    attends = Attends().float()
    ids, mask, _ = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16), chunked(sites_of(attends), CONFIG) as calls:
        hidden = attends(ids, mask)[0]
    assert calls.chunked == {"m": 1}
    hidden[mask != 0].float().square().sum().backward()
    assert attends.linear.weight.grad is not None
    assert attends.linear.weight.grad.any()


def test_a_mask_inside_of_an_argument() -> None:
    class Takes(Attends):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(batch["ids"], batch["real"])[0]

    module, (ids, mask, _) = Takes(), inputs()
    batch = {"ids": ids, "real": mask}
    config = replace(CONFIG, call_masks={"m": "batch.real"})
    assert sites_of(module) == {}
    with chunked(sites_of(module, config), config) as calls:
        outputs = module(batch)
    assert calls.chunked == {"m": 1}
    assert float((outputs - module(batch))[mask != 0].detach().abs().max()) <= 1e-12


def test_under_shards_modules_that_gather_their_parameters_run_as_they_came() -> None:
    """Ranks would have to agree on each of their calls. What a module around them has gathered is there."""
    ids, mask, _ = inputs()
    exchange = lambda values: np.asarray([values])  # noqa: E731
    attends = Attends()
    _, calls, told = run(attends, (ids, mask), {}, exchange=exchange)
    assert (list(calls.chunked), told) == (["m"], [])
    next(attends.parameters()).ds_id = 0  # as ZeRO 3 marks them
    outputs, calls, told = run(attends, (ids, mask), {}, exchange=exchange)
    assert torch.equal(outputs[0], attends(ids, mask)[0])
    assert calls.chunked == {}
    assert "its parameters are sharded" in told[0]


def test_hooks_inside_and_parts_that_raise() -> None:
    """A hook of the user is called with the whole; a row alone of which a module makes something else is not run."""
    ids, mask, _ = inputs()
    seen: list[tuple[int, ...]] = []
    attends = Attends()
    attends.register_forward_hook(lambda module, args, outputs: seen.append(tuple(outputs[0].shape)))
    _, calls, told = run(attends, (ids, mask), {})
    assert (dict(calls.chunked), told, seen) == ({"m": 1}, [], [(6, 14, 8)])
    attends.linear.register_forward_hook(lambda module, args, outputs: seen.append(tuple(outputs.shape)))
    _, calls, told = run(attends, (ids, mask), {})
    assert calls.chunked == {}
    assert "'linear' inside of it has a forward hook" in told[0]
    assert seen[1:] == [(6, 14, 8)] * 2

    class Drops(Attends):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
            hidden = super().forward(ids, attention_mask)[0] * attention_mask[..., None]
            if self.training:
                return hidden.sum(1).squeeze()
            return hidden.sum(1).squeeze().sum(1)

    for training, why in ((True, "its output is"), (False, "a part of it raises IndexError")):
        drops = Drops().train(training)
        outputs, calls, told = run(drops, (ids, mask), {})
        assert torch.equal(outputs, drops(ids, mask))
        assert (len(told), why in told[0], dict(calls.as_they_came)) == (1, True, {"m": 1})


def test_what_a_module_makes_once_is_no_write_in_each_call() -> None:
    class Lazy(Attends):
        angles: Tensor | None = None

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
            if self.angles is None:
                self.angles = torch.arange(ids.shape[1])[:, None].cos()
            x = self.embedding(ids) + self.angles[: ids.shape[1]]
            return self.weights(x, attention_mask != 0) @ x

    lazy = Lazy()
    ids, mask, _ = inputs()
    first = run(lazy, (ids, mask), {})
    second = run(lazy, (ids, mask), {})
    assert (dict(first[1].chunked), dict(second[1].chunked)) == ({}, {"m": 1})
    assert first[2] == second[2] == []
    assert float((first[0] - second[0])[mask != 0].detach().abs().max()) <= 1e-12


def test_a_proof_holds_for_what_was_switched_on() -> None:
    """A coupling that an argument, an attribute or a buffer brings in later; at audits, whatever has changed."""

    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.share, self.hidden = nn.Linear(4, 4).double(), 0.0, [0.0]
            self.register_buffer("weight", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor, attention_mask: Tensor, mix: float = 0.0) -> Tensor:
            out = self.inner(x) * attention_mask.unsqueeze(-1)
            return out + (mix + self.share + self.weight + self.hidden[0]) * out.mean(0)

    def differs(module: Mixes, mix: float = 0.0, **options: Any) -> float:
        x = torch.arange(96, dtype=torch.float64).reshape(4, 6, 4).sin()
        mask = (torch.arange(6) < torch.tensor([6, 3, 2, 2])[:, None]).long()
        wanted = module(x, mask, mix) * mask.unsqueeze(-1)
        config, holder = PadMinConfig(token_budget=8, launch_cost=0), nn.ModuleDict({"inner": module})
        with chunked(call_sites(holder), config, kept=kept, tell=told.append, **options) as calls:
            found = module(x, mask, mix) * mask.unsqueeze(-1)
        ran.append(len(calls))
        return float((found - wanted).detach().abs().max())

    for change in ("mix", "share", "weight", "hidden"):
        module, kept, told, ran = Mixes(), {}, list[str](), list[int]()
        assert differs(module) <= 1e-12
        if change == "share":
            module.share = 0.5
        elif change == "weight":
            module.weight.fill_(0.5)
        elif change == "hidden":
            module.hidden[0] = 0.5
            assert differs(module) > 0.01  # the control: nothing tells of it but an audit
            differs(module, anew=True)
        assert differs(module, mix=0.5 if change == "mix" else 0.0) <= 1e-12
        assert ran[0] == 1
        assert ran[-1] == 0
        assert "couples rows" in told[-1]


def test_a_copy_of_a_module_that_is_run_in_chunks_is_a_module_of_its_own() -> None:
    holder = nn.ModuleDict({"inner": nn.TransformerEncoderLayer(4, 1, 8, batch_first=True).double()})
    mask = torch.tensor([[False, False], [False, True]])
    x = torch.ones(2, 2, 4, dtype=torch.float64)
    with chunked(call_sites(holder), PadMinConfig(), tell=lambda words: None):
        copied = copy.deepcopy(holder)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert not torch.equal(copied["inner"](x, src_key_padding_mask=mask), holder["inner"](x))
    assert "forward" not in vars(holder["inner"])
    assert torch.equal(copied["inner"](x), nn.TransformerEncoderLayer.forward(copied["inner"], x))


def test_what_stands_in_is_no_other_model() -> None:
    """So that what was proven of a model whose calls run in chunks is not proven anew for each batch."""
    module = Attends()
    made = MadeWith({"": module})
    with chunked(call_sites(module, CONFIG, with_itself=True), CONFIG):
        assert "forward" in vars(module)
        assert made.change() is None
    module.forward = lambda *args, **options: Attends.forward(module, *args, **options)  # type: ignore[method-assign]
    assert made.change() is not None  # the control
