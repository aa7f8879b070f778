"""A proof that a model takes packs counts for the model that was looked at: another way to attend is proven anew."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from architectures import zoo
from lightning.pytorch.callbacks import LambdaCallback
from ranks import Ranks
from support import fit, padmin, ragged_batches, relative
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from lightning_padmin import PaddedForward, PadMinConfig
from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.microbatching.batcher import MicroBatcher
from lightning_padmin.verification.leak import PackGate

sys.path.insert(0, str(Path(__file__).parent))
import test_lightning_pack as cases
import test_trainer_pack as trainers

LENGTHS = np.array([9, 7, 5, 4])
Change = Callable[[Any, pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with zoo.quiet():
        yield


@pytest.fixture
def float64() -> Iterator[None]:
    with zoo.default_dtype(torch.float64), zoo.upcasts_to(torch.float64):
        yield


def leaky(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Attention that sees all that came before, whichever document it is of."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), None


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "leaky", leaky)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "leaky", sdpa_mask)


def attend(how: str) -> Change:
    return lambda model, _: model.set_attn_implementation(how)


def assign(how: str) -> Change:
    return lambda model, _: setattr(model.config, "_attn_implementation", how)


def swap_config(model: Any, _: Any) -> None:
    other = copy.deepcopy(model.config)
    other._attn_implementation = "leaky"
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = other


def one_layer(model: Any, _: Any) -> None:
    """As a part of a model that is composed of several, with a configuration of its own."""
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "leaky"


def in_the_registry(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", leaky)


def over_the_mask(model: Any, patch: pytest.MonkeyPatch) -> None:
    def plain(*args: Any, **options: Any) -> None:
        return None

    patch.setattr(modeling_qwen2, "create_causal_mask", plain)
    patch.setattr(modeling_llama, "create_causal_mask", plain)


def over_torch(model: Any, patch: pytest.MonkeyPatch) -> None:
    stock = F.scaled_dot_product_attention

    def kernel(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        options |= {"attn_mask": None, "is_causal": True}
        return stock(query, key, value, **options)

    patch.setattr(F, "scaled_dot_product_attention", kernel)


def without_mask(stock: Any) -> Any:
    def forward(self: Any, *args: Any, attention_mask: Any = None, **options: Any) -> Any:
        return stock(self, *args, attention_mask=None, **options)

    return forward


def over_a_module(model: Any, _: Any) -> None:
    layer = model.model.layers[0].self_attn
    layer.forward = without_mask(type(layer).forward).__get__(layer)


def over_a_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    kind = type(model.model.layers[0].self_attn)
    patch.setattr(kind, "forward", without_mask(kind.forward))


def another_class(model: Any, _: Any) -> None:
    layer = model.model.layers[0].self_attn
    kind = type(layer)
    layer.__class__ = type("Fused", (kind,), {"forward": without_mask(kind.forward)})


class Running(nn.Module):
    """Adds what came before, of all documents."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.1 * x.cumsum(1)


def another_module(model: Any, _: Any) -> None:
    model.model.layers[1].mlp = Running(model.model.layers[1].mlp)


LEAKS: dict[str, Change] = {
    "set": attend("leaky"),
    "assign": assign("leaky"),
    **{each.__name__: each for each in (swap_config, one_layer, in_the_registry, over_the_mask, over_torch)},
    **{each.__name__: each for each in (over_a_module, over_a_class, another_class, another_module)},
}


def gate_of(model: nn.Module) -> tuple[PackGate, list[str]]:
    said: list[str] = []
    return PackGate({"model": model}, PadMinConfig(layout="pack"), say=said.append), said


@pytest.mark.parametrize("name", LEAKS)
def test_what_leaks_now_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cases.qwen2().float()
    gate, _ = gate_of(model)
    assert gate(LENGTHS)
    LEAKS[name](model, monkeypatch)
    for _ in range(2):  # whoever catches it has no packs either
        with pytest.raises(ArchitectureError, match=r"'pack': model .*since packs were proven.*Use layout='pad'"):
            gate(LENGTHS)
    assert gate.verdict is None


def test_what_does_not_leak_is_proven_once_more() -> None:
    model = cases.qwen2().float()
    gate, said = gate_of(model)
    assert gate(LENGTHS)
    for way in ("eager", "sdpa"):
        model.set_attn_implementation(way)
        assert gate(LENGTHS)
        assert gate(LENGTHS)
        assert f"is {way!r} since packs were proven" in said[-1]
    assert (gate.changes, len(said)) == (2, 3)


def test_control_nothing_else_asks_for_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = cases.qwen2().float()
    gate, said = gate_of(model)
    assert gate(LENGTHS)
    monkeypatch.setattr(gate, "_prove", lambda documents: pytest.fail("proven again"))
    model.eval()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    model.register_forward_hook(lambda *_: None)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.double()
    assert gate(LENGTHS[:3])
    assert (gate.changes, len(said)) == (0, 1)


def test_control_without_looking_a_leak_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would miss: an old proof lets the other attention train on packs."""
    model = cases.qwen2().float()
    gate, _ = gate_of(model)
    assert gate(LENGTHS)
    monkeypatch.setattr("lightning_padmin.verification.made_with.MadeWith.change", lambda self: None)
    attend("leaky")(model, monkeypatch)
    assert gate(LENGTHS)


@pytest.mark.parametrize("mode", ["joint", "replay"])
def test_padded_forward(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cases.qwen2()
    batch = support.make_batch([9, 7, 5, 4])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    forward = PaddedForward(model, PadMinConfig(layout="pack", token_budget=14, launch_cost=0), mode)

    def gradient(call: Any) -> Tensor:
        model.zero_grad()
        logits = call(**inputs).logits
        (logits * inputs["attention_mask"][..., None]).square().sum().backward()
        if call is forward:
            forward.backward_pending()
        return support.flat_gradient(model)

    for way in ("sdpa", "eager"):
        attend(way)(model, monkeypatch)
        assert relative(gradient(forward), gradient(model)) <= 1e-11
        assert forward.micro_batches is not None
        assert forward.micro_batches.plan.is_packed
    attend("leaky")(model, monkeypatch)
    with pytest.raises(ArchitectureError, match="since packs were proven"):
        forward(**inputs)


def changes_at(batch: int, change: Any) -> Any:
    def start(trainer: Any, module: Any, data: Any, batch_idx: int) -> None:
        if batch_idx == batch:
            change(module.model)

    return LambdaCallback(on_train_batch_start=start)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", ["auto", "joint"])
def test_lightning(mode: Any) -> None:
    batches = ragged_batches(6)

    def eager(model: Any) -> None:
        model.set_attn_implementation("eager")

    stock, ours, callback = cases.StepLoss(), cases.StepLoss(), padmin(layout="pack", mode=mode)
    fit(stock, batches, changes_at(3, eager))
    fit(ours, batches, changes_at(3, eager), callback)
    assert cases.worst(ours, stock) <= 1e-11
    # Of the batch with the change rows are padded, until the step has been looked at with the next one.
    padded = callback.stats.slots - callback.stats.real_tokens
    assert padded == (0 if mode == "joint" else 1)
    with pytest.raises(ArchitectureError, match="since packs were proven"):
        fit(cases.StepLoss(), batches, changes_at(3, lambda model: model.set_attn_implementation("leaky")), callback)


@pytest.mark.usefixtures("float64")
def test_a_model_that_lightning_gets_in_place_of_another() -> None:
    """The gate follows the module's attribute."""

    def another(model: Any) -> None:
        holder.model = copy.deepcopy(model)
        holder.model.set_attn_implementation("leaky")

    holder = cases.StepLoss()
    with pytest.raises(ArchitectureError, match="since packs were proven"):
        fit(holder, ragged_batches(4), changes_at(2, another), padmin(layout="pack"))


class ChangesAt(TrainerCallback):
    def __init__(self, way: str) -> None:
        self.way = way

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            model.set_attn_implementation(self.way)


def test_trainer() -> None:
    def kind(base: type, way: str) -> type:
        def train(self: Any, *args: Any, **options: Any) -> Any:
            self.add_callback(ChangesAt(way))
            return base.train(self, *args, **options)  # type: ignore[attr-defined]

        return type("Changing", (base,), {"train": train})

    _, stock = trainers.train(kind(Trainer, "eager"), trainers.llama)
    trainer, ours = trainers.train(kind(trainers.Ours, "eager"), trainers.llama, trainers.PACK)
    assert trainers.apart(ours, stock) <= 1e-5
    stats = trainer.padding_stats
    assert 0 < stats.slots - stats.real_tokens < (stats.slots_before - stats.real_tokens) / 3
    with pytest.raises(ArchitectureError, match="since packs were proven"):
        trainers.train(kind(trainers.Ours, "leaky"), trainers.llama, trainers.PACK)


def test_all_ranks_hear_of_a_change_on_one() -> None:
    ranks, batch = Ranks(2), support.make_batch([9, 7, 5, 4])
    models = [cases.qwen2().float() for _ in range(2)]
    config = PadMinConfig(layout="pack", token_budget=14)
    batchers = [
        MicroBatcher(config, exchange=ranks.exchange_of(rank), gate=PackGate({"": model}, config), asks_of_step=True)
        for rank, model in enumerate(models)
    ]

    def prepared(may_pack: bool = True) -> list[bool]:
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(lambda batcher: batcher.prepare(batch, may_pack=may_pack), batchers)
            return [each.plan.is_packed for each in found]

    for batcher, model in zip(batchers, models, strict=True):
        del model
        assert batcher._packing is not None
        assert batcher._packing._policy(LENGTHS)
    assert prepared() == [True, True]
    models[1].set_attn_implementation("eager")
    assert prepared() == [True, False]
    assert [each.has_changed for each in batchers] == [True] * 2
    assert prepared(may_pack=False) == [False, False]
    assert not any(each.has_changed for each in batchers)
