"""Settings around training: compiled and checkpointed models, inference mode, loaders with processes, pinning."""

from __future__ import annotations

import dataclasses
import multiprocessing
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import support
import torch
from faults import settings_worker as worker
from support import LENGTHS, Module, fit, flat_parameters, make_batch, padmin, quiet_trainer, relative
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_padmin import MicroBatcher, PadMinCallback, PadMinConfig, compact

EXACT = 1e-12
CONFIG = PadMinConfig(token_budget=support.BUDGET, launch_cost=4)


# Compiled models


class Causal(nn.Module):
    """Without loops, so that it compiles as one graph: a causal mean, and dropout."""

    def __init__(self, share: float = 0.0, hidden: int = 12) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(support.VOCABULARY, hidden), nn.Linear(hidden, hidden)
        self.drop, self.head = nn.Dropout(share), nn.Linear(hidden, support.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.embedding(input_ids)
        count = torch.arange(1, states.shape[1] + 1, dtype=states.dtype)[:, None]
        return self.head(self.drop(torch.tanh(self.mix(states.cumsum(1) / count))))


def compiled(how: str, backend: Any, share: float = 0.0, **options: Any) -> Callable[[], Module]:
    """`how`: "wrapped" by torch.compile, compiled "in place", or "eager"."""

    def make() -> Module:
        module = Module()
        torch.manual_seed(1)
        module.model = Causal(share).double()
        torch._dynamo.reset()
        if how == "wrapped":
            module.model = torch.compile(module.model, backend=backend, fullgraph=True, **options)
        elif how == "in place":
            module.model.compile(backend=backend, fullgraph=True, **options)
        return module

    return make


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    """Nothing that other tests have compiled, or given up compiling."""
    torch._dynamo.reset()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_model_that_is_compiled_as_one_graph(how: str, backend: str, dynamic: bool | None) -> None:
    """Against stock training in eager mode; the first-batch check is on."""
    graphs = CompileCounterWithBackend(backend)
    eager, split, callback = compiled("eager", backend)(), compiled(how, graphs, dynamic=dynamic)(), padmin()
    fit(eager, support.ragged_batches(2))
    fit(split, support.ragged_batches(2), callback)
    assert graphs.frame_count > 0, "nothing was compiled"
    assert callback.stats.micro_batches == 10
    assert max(relative(a, b) for a, b in zip(split.gradients, eager.gradients, strict=True)) <= EXACT


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_dropout_in_a_compiled_model(how: str) -> None:
    """The check leaves dropout out, but not out of the graphs that training runs."""
    fitted = []
    for way in (how, "eager"):
        module = compiled(way, "eager", share=0.4)()
        torch.manual_seed(2)
        fit(module, support.ragged_batches(3), padmin())
        fitted.append(module)
    without = compiled("eager", "eager")()
    fit(without, support.ragged_batches(3), padmin())
    assert relative(fitted[0].gradients[0], fitted[1].gradients[0]) <= EXACT
    assert relative(fitted[0].gradients[0], without.gradients[0]) > 1e-2


def test_a_graph_break_would_be_an_error() -> None:
    """Negative control of `fullgraph`."""

    class Breaks(Causal):
        def forward(self, input_ids: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(input_ids)

    module = Module()
    module.model = torch.compile(Breaks().double(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        fit(module, support.ragged_batches(1), padmin(check="off"))


@pytest.mark.usefixtures("equal_weights")
def test_weights_of_one_over_k_are_far_off_in_compiled_models() -> None:
    """Negative control of the gradients."""
    eager, split = compiled("eager", "eager")(), compiled("wrapped", "eager")()
    fit(eager, support.ragged_batches(1))
    fit(split, support.ragged_batches(1), padmin(check="off"))
    assert relative(split.gradients[0], eager.gradients[0]) > 0.1


# Gradient checkpointing


class Checkpointed(Module):
    """The body runs again in the backward pass; counts how often it runs."""

    padmin_per_call = ("runs",)

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant, self.runs = reentrant, 0

    def body(self, states: Tensor) -> Tensor:
        self.runs += 1
        return self.model.rnn(states)[0]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        states = self.model.embedding(batch["input_ids"])
        if self.reentrant is None:
            hidden = self.body(states)
        else:
            hidden = checkpoint(self.body, states, use_reentrant=self.reentrant)
        losses = support.token_losses(self.model.head(hidden), batch["labels"])
        return support.reduce_loss(losses, batch["labels"], self.how)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_by_hand(reentrant: bool) -> None:
    plain, split, callback = Checkpointed(None), Checkpointed(reentrant), padmin()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    fit(plain, support.ragged_batches(4), **options)
    fit(split, support.ragged_batches(4), callback, **options)
    assert (plain.runs, split.runs) == (4, 40), "nothing was computed again"
    assert callback.stats.micro_batches == 20
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) <= EXACT
    assert relative(flat_parameters(split), flat_parameters(plain)) <= EXACT


class Llama(Module):
    def __init__(self, reentrant: bool | None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=support.VOCABULARY, **sizes, attention_dropout=dropout)
        self.model = LlamaForCausalLM(config)
        if reentrant is not None:
            self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return support.reduce_loss(support.token_losses(logits, batch["labels"]), batch["labels"], self.how)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_transformers(reentrant: bool) -> None:
    plain, split, callback = Llama(None), Llama(reentrant), padmin()
    fit(plain, support.ragged_batches(3))
    fit(split, support.ragged_batches(3), callback)
    assert split.model.is_gradient_checkpointing
    assert callback.stats.micro_batches == 15
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) <= 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_dropout_of_the_first_pass(reentrant: bool) -> None:
    """Each micro-batch's own, though others have drawn since: as without checkpointing, from the same seed."""
    gradients = []
    for way, seed in ((None, 3), (reentrant, 3), (reentrant, 4)):
        module = Llama(way, dropout=0.3)
        torch.manual_seed(seed)
        fit(module, support.ragged_batches(1), padmin())
        gradients.append(module.gradients[0])
    assert relative(gradients[1], gradients[0]) <= 1e-5
    assert relative(gradients[2], gradients[0]) > 1e-3


@pytest.mark.usefixtures("equal_weights")
def test_weights_of_one_over_k_are_far_off_with_checkpointing() -> None:
    plain, split = Checkpointed(None), Checkpointed(False)
    fit(plain, support.ragged_batches(1))
    fit(split, support.ragged_batches(1), padmin(check="off"))
    assert relative(split.gradients[0], plain.gradients[0]) > 0.1


# Inference mode


class Caches(Module):
    """Validates in inference mode, keeps tensors from there, and runs a batch made compact as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position", None, persistent=False)
        self.kept: Any = None
        self.modes: list[bool] = []
        self.seen: list[tuple[Tensor, Tensor]] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        width = batch["input_ids"].shape[1]
        if self.position is None or len(self.position) < width:
            self.position = torch.arange(width, dtype=torch.float64)
        return super().loss(batch) + 0 * self.position[:width].sum()  # stock may not save such tensors either

    @torch.inference_mode()
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.modes.append(torch.is_inference_mode_enabled())
        whole = self.model(batch["input_ids"])
        small = compact(batch, CONFIG)
        back = small.restore(self.model(small.batch["input_ids"]))
        self.kept = whole.sum()
        real = batch["attention_mask"] != 0
        self.seen.append((back[real], whole[real]))
        self.loss(batch)


@pytest.mark.parametrize("first", ["training", "sanity check", "validate"])
def test_validation_in_inference_mode(first: str) -> None:
    """Where validation is first, a buffer comes from inference mode; the check of the first batch leaves it alone.

    Inside of fit Lightning itself uses no_grad, in validate inference mode; the step here asks for it in both.
    """
    batches, validation = support.ragged_batches(4), [make_batch(LENGTHS, width=30)] * 2
    modules = []
    for extra in ([padmin()], []):
        module = Caches()
        trainer = quiet_trainer(*extra, max_epochs=3, num_sanity_val_steps=2 if first == "sanity check" else 0)
        if first == "validate":
            trainer.validate(module, support.loader(validation), verbose=False)
        trainer.fit(module, support.loader(batches), support.loader(validation))
        modules.append(module)
    split, plain = modules
    assert split.modes == plain.modes == [True] * (6 if first == "training" else 8)
    assert split.position.is_inference()
    assert split.kept.is_inference()
    assert len(split.shapes) == 5 * len(plain.shapes) == 60
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) <= EXACT
    assert relative(flat_parameters(split), flat_parameters(plain)) <= EXACT
    for found, whole in split.seen:
        assert relative(found, whole) <= EXACT


@pytest.mark.parametrize("made_inside", [False, True])
def test_compact_and_micro_batches_in_inference_mode(made_inside: bool) -> None:
    """The same as outside, whether the batch was made inside or not; the caller's tensors stay what they are."""

    def make() -> dict[str, Tensor]:
        return make_batch([20, 3, 9, 2], left=[0, 4, 1, 2], width=22)

    wanted, planned, outside = compact(make(), CONFIG), MicroBatcher(CONFIG).prepare(make()), make()
    with torch.inference_mode():
        batch = make() if made_inside else outside
        found, micros = compact(batch, CONFIG), MicroBatcher(CONFIG).prepare(batch)
        gathered = [micro.batch for micro in micros]
        restored = found.restore(found.batch["input_ids"])
    assert batch["input_ids"].is_inference() is made_inside
    for key, value in wanted.batch.items():
        assert torch.equal(found.batch[key], value)
        assert all(torch.equal(a[key], b.batch[key]) for a, b in zip(gathered, planned, strict=True))
    assert len(gathered) > 1
    assert torch.equal(restored, torch.where(batch["attention_mask"] != 0, batch["input_ids"], 0))
    assert not torch.equal(found.batch["input_ids"], batch["input_ids"][:, :20]), "there was nothing to roll"


# Loaders with processes


def rows_of(lengths: Any = LENGTHS, width: int = 24) -> list[dict[str, Tensor]]:
    return [{key: value[0] for key, value in make_batch([n], width=width, seed=n).items()} for n in lengths]


@pytest.mark.parametrize("persistent", [False, True])
def test_two_workers(persistent: bool) -> None:
    """Two epochs of batches that two processes collate; the callback's metrics are those of batches without them."""
    modules, stats = [], []
    for workers, extra in ((2, [padmin()]), (0, [padmin()]), (0, [])):
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
        data = torch.utils.data.DataLoader(support.Batches(rows_of() * 3), batch_size=10, **options)
        module = Module()
        quiet_trainer(*extra, max_epochs=2).fit(module, data)
        modules.append(module)
        stats += [callback.stats for callback in extra]
    workers, alone, plain = modules
    assert stats[0] == stats[1]
    assert stats[0].micro_batches == 5 * stats[0].batches == 30
    assert all(torch.equal(a, b) for a, b in zip(workers.gradients, alone.gradients, strict=True))
    assert max(relative(a, b) for a, b in zip(workers.gradients, plain.gradients, strict=True)) <= EXACT


@pytest.mark.usefixtures("equal_weights")
def test_weights_of_one_over_k_are_far_off_with_collated_batches() -> None:
    modules = []
    for extra in ([padmin(check="off")], []):
        modules.append(Module())
        data = torch.utils.data.DataLoader(support.Batches(rows_of()), batch_size=10)
        quiet_trainer(*extra).fit(modules[-1], data)
    assert relative(modules[0].gradients[0], modules[1].gradients[0]) > 0.1


@pytest.mark.slow
def test_processes_that_are_spawned() -> None:
    """Configuration and callback cross over, with functions of the user's and counters, and plan there as here."""
    config = PadMinConfig(
        token_budget=24, launch_cost=4, loss_reduction=worker.rows_weigh_their_length, batch_schema={"tokens": "row"}
    )
    callback = PadMinCallback(config=config)
    batch = make_batch(LENGTHS)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=worker.in_a_new_process, args=(queue, batch, config, callback))
    process.start()
    try:
        found = queue.get(timeout=60)
    finally:
        process.join(10)
    assert process.exitcode == 0
    plan = worker.plan_of(batch, config)
    assert found == (config, config, callback.stats, plan, plan)
    assert plan != worker.plan_of(batch, dataclasses.replace(config, loss_reduction="token-mean"))


@pytest.mark.slow
def test_a_loader_whose_spawned_workers_use_the_configuration() -> None:
    """The collate function rolls and trims in the worker's process; training goes on from there."""
    config = PadMinConfig(token_budget=24)
    data = torch.utils.data.DataLoader(
        support.Batches(rows_of(width=40)),
        batch_size=10,
        collate_fn=worker.Collate(config),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    split, plain = Module(), Module()
    quiet_trainer(padmin()).fit(split, data)
    quiet_trainer().fit(plain, torch.utils.data.DataLoader(support.Batches(rows_of(width=40)), batch_size=10))
    assert plain.shapes == [(10, 40)]
    assert split.shapes == [(1, 24), (1, 20), (2, 12), (4, 6), (2, 3)]
    assert relative(split.gradients[0], plain.gradients[0]) <= EXACT


# Pinned batches


@dataclass
class Pinned:
    """A batch type of the user's, as documentation of loaders shows it."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    times_pinned: int = 0

    def pin_memory(self) -> Pinned:
        return dataclasses.replace(self, times_pinned=self.times_pinned + 1)

    def __getitem__(self, key: str) -> Tensor:
        return getattr(self, key)


class Sees(Module):
    padmin_per_call = ("batches",)

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch)
        return super().training_step(batch, batch_idx)


def test_batches_with_a_method_that_pins_them() -> None:
    """Without an accelerator loaders pin nothing, so the loader's own function is called here."""
    batches = [Pinned(**batch) for batch in support.ragged_batches(2)]
    pinned = [torch.utils.data._utils.pin_memory.pin_memory(batch) for batch in batches]
    assert [batch.times_pinned for batch in pinned] == [1, 1]
    plain, split = Sees(), Sees()
    fit(plain, pinned)
    fit(split, pinned, padmin())
    assert max(relative(a, b) for a, b in zip(split.gradients, plain.gradients, strict=True)) <= EXACT
    assert len(split.batches) == 10
    assert all(type(batch) is Pinned and batch.times_pinned == 1 for batch in split.batches)
    assert split.batches[0].pin_memory().times_pinned == 2
    small = compact(pinned[0], CONFIG).batch
    assert (type(small), small.times_pinned) == (Pinned, 1)


def test_a_loader_that_is_told_to_pin() -> None:
    gradients = []
    for pin, extra in ((True, [padmin()]), (False, [])):
        module = Module()
        data = torch.utils.data.DataLoader(support.Batches(rows_of()), batch_size=10, pin_memory=pin)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*pin_memory.*")
            quiet_trainer(*extra).fit(module, data)
        gradients.append(module.gradients[0])
    assert relative(*gradients) <= EXACT
