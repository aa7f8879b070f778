"""One table, scenario x adapter: what every adapter does with the same rows, with this library and without it.

`SCENARIOS` says what is trained and what is expected of whom, `ADAPTERS` how each framework is driven. A scenario is
the same everywhere; only trainers of TRL, which make batches themselves, have rows of their own (`Online`, `Offline`).
All run on one thread, in float64 where the framework lets them, with torch.compile off.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import logging
import os
import random
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import support
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.fabric import Fabric
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from lightning_padmin import MicroBatches, PadMinCallback, PadMinConfig, PadMinError, PadMinWarning, run
from lightning_padmin.integrations.accelerate_toggle import PadMin  # old paths: older checkouts are recorded too
from lightning_padmin.integrations.fabric import FabricPadMin
from lightning_padmin.integrations.transformers_trainer import PadMinTrainerMixin

Batch = dict[str, Tensor]
Padding = Literal["right", "left", "mixed"]

# What is expected.


@dataclass(frozen=True)
class Equal:
    """Gradients, weights and logs of the stock run.

    Attributes:
        fault: what is put in as the control (of `FAULTS`), and must show; None: nothing would.
        unsplit: there is nothing to split.
    """

    fault: str | None = "weights"
    unsplit: bool = False


@dataclass(frozen=True)
class Refused:
    """An error of this class; its text stands in golden.json."""

    error: str


@dataclass(frozen=True)
class Repeatable:
    """Other random numbers than in the stock run, but the same ones every time."""


@dataclass(frozen=True)
class Unseen:
    """Another training than the stock one, and nobody says so: an adapter that does not look at the loss."""

    because: str


@dataclass(frozen=True)
class NotApplicable:
    """This adapter has no such thing."""

    because: str


Expected = Equal | Refused | Repeatable | Unseen | NotApplicable

# Models.


class Net(nn.Module):
    """Embedding, GRU, head: causal, and left padding would change its state. Keeps what it was called with.

    Args:
        dropout: of the states.
        norm: batch normalization of the states.
        reads: every position sees the mean over all columns, padding included.
        frozen: the embedding is not trained.
    """

    def __init__(self, dropout: float = 0.0, norm: bool = False, reads: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = support.TinyLM()
        self.places = nn.Embedding(64, 12)
        self.norm = nn.BatchNorm1d(12) if norm else None
        self.dropout, self.reads = nn.Dropout(dropout), reads
        self.inner.embedding.requires_grad_(not frozen)
        self.config = None

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        states = self.inner.embedding(input_ids)
        if position_ids is not None:
            states = states + self.places(position_ids)
        if self.reads:
            states = states + states.mean(1, keepdim=True)
        states = self.dropout(self.inner.rnn(states)[0])
        if self.norm is not None:
            states = self.norm(states.transpose(1, 2)).transpose(1, 2)
        return {"logits": self.inner.head(states)}


class LooksLikeTransformers(Net):
    """For joint mode, which looks for models that have a configuration."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.config = type("Config", (), {"model_type": "tiny"})()


def llama() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=support.VOCABULARY, **sizes, pad_token_id=0))


# Losses of a whole batch.


def token_mean(logits: Tensor, batch: Batch) -> Tensor:
    """0 where no token carries loss."""
    losses = support.token_losses(logits, batch["labels"])
    return losses.sum() / (batch["labels"][:, 1:] != -100).sum().clamp(min=1)


def row_mean(logits: Tensor, batch: Batch) -> Tensor:
    return support.reduce_loss(support.token_losses(logits, batch["labels"]), batch["labels"], "row-mean")


def summed(logits: Tensor, batch: Batch) -> Tensor:
    return support.token_losses(logits, batch["labels"]).sum() / 50


def aligned(logits: Tensor, batch: Batch) -> Tensor:
    """Labels line up with logits."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def by_row_weight(logits: Tensor, batch: Batch) -> Tensor:
    losses = support.token_losses(logits, batch["labels"]).sum(1)
    losses = losses / (batch["labels"][:, 1:] != -100).sum(1).clamp(min=1)
    return (batch["u"] * losses).sum() / batch["u"].sum()


def by_loss_mask(logits: Tensor, batch: Batch) -> Tensor:
    weight = batch["loss_mask"][:, 1:]
    return (support.token_losses(logits, batch["labels"]) * weight).sum() / weight.sum()


def coupled(logits: Tensor, batch: Batch) -> Tensor:
    """A softmax over rows."""
    return torch.logsumexp(support.token_losses(logits, batch["labels"]).sum(1) / 10, 0)


def row_weights(batch: Batch) -> Tensor:
    return batch["u"]


def with_row_weights(batch: Batch) -> Batch:
    return batch | {"u": batch["attention_mask"].sum(1).double() ** 1.5}


def with_loss_mask(batch: Batch) -> Batch:
    place = batch["attention_mask"].cumsum(1)
    return batch | {"loss_mask": ((batch["labels"] != -100) * (1 + place % 3)).double()}


def with_positions(batch: Batch) -> Batch:
    return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


# Scenarios.


@dataclass(frozen=True)
class Online:
    """What GRPO trains.

    Attributes:
        arguments: of `GRPOConfig`.
        options: of `PadMinConfig`.
        model: of `trl_cases.qwen2`.
        uniform: all prompts and completions have one length.
        completion: the longest completion.
        reads: the embedding sees the mean over all columns.
        groups: two parameter groups.
        frozen: the embedding is not trained.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    uniform: bool = False
    completion: int = 24
    reads: bool = False
    norm: bool = False
    groups: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class Scenario:
    """What is trained, and what is expected of each adapter.

    Attributes:
        name: of the row.
        expected: adapter, or a pattern of adapters -> what; the first that fits, else `Equal()`.
        lengths: rows of each batch, by their number of tokens.
        padding: of the batches that an adapter gets; the stock run always gets them padded on the right, which is what
            each row gives alone.
        without_loss: rows whose labels are all -100, in each batch.
        empty: batches none of whose rows carries loss.
        change: adds entries to a batch.
        loss: of logits and batch; None: the model's own.
        model: keywords of `Net`; None: a Llama in float32.
        options: of `PadMinConfig`.
        accumulate: batches in one optimizer step.
        clip: the largest norm of gradients.
        groups: two parameter groups.
        precision: "64", or "bf16" for float32 under autocast.
        resume_at: the batch at which training is stopped and resumed from a checkpoint.
        bound: the largest `relative` difference.
        online: for GRPO; None: it has no such thing.
        offline: `PadMinConfig` options or arguments of SFT and DPO, likewise.
    """

    name: str
    expected: Mapping[str, Expected] = field(default_factory=dict)
    lengths: Sequence[Sequence[int]] = (
        (24, 20, 12, 12, 6, 6, 6, 6, 3, 2),
        (12, 6, 6, 6, 6, 3, 2, 24, 20, 12),
        (6, 6, 3, 2, 24, 20, 12, 12, 6, 6),
    )
    padding: Padding = "right"
    without_loss: Sequence[int] = ()
    empty: Sequence[int] = ()
    change: Callable[[Batch], Batch] = dict
    loss: Callable[[Tensor, Batch], Tensor] | None = token_mean
    model: Mapping[str, Any] | None = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    clip: float | None = None
    groups: bool = False
    precision: Literal["64", "bf16"] = "64"
    resume_at: int | None = None
    bound: float = 1e-11
    online: Online | None = None
    offline: Mapping[str, Any] | None = None

    def unchecked(self) -> Scenario:
        """Without the check of the first batch, which would find a fault that was put in; packs are never without."""
        off = {} if self.options.get("layout") == "pack" else {"check": "off"}
        return replace(
            self,
            options={**self.options, **off},
            online=self.online and replace(self.online, options={**self.online.options, **off}),
            offline=None if self.offline is None else {**self.offline, **off},
        )

    def of(self, adapter: str) -> Expected:
        """What is expected of an adapter."""
        found = next((each for names, each in self.expected.items() if fnmatch.fnmatch(adapter, names)), None)
        if found is not None:
            return found
        if adapter.startswith("grpo") and self.online is None:
            return NotApplicable("batches, labels and the loss are the trainer's own")
        if adapter in ("sft", "dpo") and self.offline is None:
            return NotApplicable("batches, labels and the loss are the trainer's own")
        # Where whole losses are taken of whole batches there are no weights.
        whole = adapter in ("lightning-joint", "grpo-joint", "sft", "dpo")
        return Equal(fault="rows" if whole else "weights")

    def batches(self, padding: Padding | None = None) -> list[Batch]:
        """Fresh batches."""
        made = []
        for k, lengths in enumerate(self.lengths):
            width = max(lengths)
            left = {
                "right": [0] * len(lengths),
                "left": [width - n for n in lengths],
                "mixed": [(width - n) * (row % 3) // 2 for row, n in enumerate(lengths)],
            }[padding or self.padding]
            without = range(len(lengths)) if k in self.empty else self.without_loss
            made.append(self.change(support.make_batch(lengths, seed=k, left=left, width=width, without_loss=without)))
        return made

    def network(self, kind: type[Net] = Net) -> nn.Module:
        """A fresh model."""
        if self.model is None:
            return llama()
        return kind(**self.model).to(torch.float64 if self.precision == "64" else torch.float32)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        if not self.groups:
            return torch.optim.SGD([each for _, each in named], lr=0.5)
        first = [each for name, each in named if "head" in name]
        return torch.optim.SGD(
            [{"params": first, "lr": 0.1}, {"params": [p for n, p in named if "head" not in n]}], lr=0.5
        )

    def config(self, **more: Any) -> PadMinConfig:
        return PadMinConfig(**({"token_budget": support.BUDGET, "launch_cost": 4} | dict(self.options) | more))

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        """Forward pass and loss."""
        if self.loss is None:
            loss: Tensor = model(**batch).loss
            return loss
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
        return self.loss(model(**inputs)["logits"], batch)


_OWN_LOOP = "a loop takes its own loss, and nobody compares gradients there (backward does, and verify_equivalence)"


SCENARIOS = (
    Scenario("right padding", online=Online(), offline={}),
    Scenario("left padding", padding="left"),
    Scenario(
        "mixed padding",
        padding="mixed",
        expected={"grpo*": NotApplicable("prompts left, completions right: as always")},
    ),
    Scenario("rows without loss tokens", without_loss=(3, 4, 8), online=Online({"mask_truncated_completions": True})),
    Scenario(
        "one row over the budget",
        options={"token_budget": 22},
        online=Online(options={"token_budget": 30}),
        offline={"token_budget": 30},
    ),
    Scenario(
        "equal lengths",
        {
            "grpo*": Equal(fault=None),  # its budget takes two of the rows, all of which weigh the same
            "dpo": Equal(fault=None),  # the passes of the reference model are counted with the others
            "*": Equal(fault=None, unsplit=True),
        },
        lengths=((6, 6, 6, 6), (6, 6, 6, 6)),
        online=Online(uniform=True),
        offline={"uniform": True, "token_budget": 4096},
    ),
    Scenario(
        "accumulation 3",
        accumulate=3,
        online=Online({"gradient_accumulation_steps": 3, "generation_batch_size": 12}),
        offline={"accumulate": 3},
    ),
    Scenario("accumulation 3, two steps", accumulate=3, lengths=Scenario("").lengths * 2),
    Scenario("clipping by norm", clip=0.05, online=Online({"max_grad_norm": 0.05}), offline={"clip": 0.05}),
    Scenario("two parameter groups", groups=True, online=Online(groups=True), offline={"groups": True}),
    Scenario("frozen parameters", model={"frozen": True}, online=Online(frozen=True), offline={"frozen": True}),
    Scenario("row mean", loss=row_mean, options={"loss_reduction": "row-mean"}, online=Online({"loss_type": "grpo"})),
    Scenario(
        "token mean",
        {"[!g]*": NotApplicable("that is the loss of the other rows")},
        online=Online({"loss_type": "bnpo"}),
    ),
    Scenario("sum", loss=summed, options={"loss_reduction": "sum"}, online=Online({"loss_type": "dr_grpo"})),
    Scenario(
        "row weights",
        loss=by_row_weight,
        change=with_row_weights,
        options={"loss_reduction": row_weights},
        expected={
            "accelerate-toggle": NotApplicable("a variable holds no function"),
            "lightning-joint": Equal(fault="rows"),
        },
    ),
    Scenario("loss mask", loss=by_loss_mask, change=with_loss_mask, options={"loss_mask_key": "loss_mask"}),
    Scenario("position ids", change=with_positions, padding="mixed"),
    Scenario("labels without shift", loss=aligned, options={"label_shift": 0}),
    Scenario(
        "bfloat16 autocast",
        precision="bf16",
        bound=0.05,
        online=Online({"bf16": True}),
        offline={"bf16": True},
    ),
    Scenario("a batch without loss", empty=(1,)),
    Scenario(
        "dropout",
        {"*": Repeatable()},
        model={"dropout": 0.3},
        online=Online(model={"attention_dropout": 0.3}),
        offline={"model": {"attention_dropout": 0.3}},
    ),
    Scenario("resume", resume_at=2),
    Scenario(
        "shape buckets",
        {
            "lightning-joint": Refused("ConfigError"),
            "grpo*": Refused("ConfigError"),
            "sft": Refused("ConfigError"),
            "dpo": Refused("ConfigError"),
        },
        options={"shape_buckets": 4, "pad_token_id": 0},
        online=Online(options={"shape_buckets": 4}),
        offline={"shape_buckets": 4},
    ),
    Scenario(
        "packs",
        {
            "lightning-manual": Refused("MisconfigurationException"),
            "fabric": Refused("ConfigError"),
            "accelerate*": Refused("ConfigError"),
            "sft": Refused("ConfigError"),
            "dpo": Refused("ConfigError"),
        },
        model=None,
        loss=None,
        options={"layout": "pack"},
        bound=2e-5,
        online=Online({"gradient_checkpointing": False}, {"layout": "pack", "token_budget": 48}),
        offline={"layout": "pack"},
    ),
    Scenario("a Llama, left padding", padding="left", model=None, loss=None, bound=2e-5),
    Scenario(
        "at most two rows", options={"max_rows": 2}, online=Online(options={"max_rows": 1}), offline={"max_rows": 2}
    ),
    Scenario(
        "widths rounded",
        options={"pad_to_multiple_of": 5, "token_budget": 30},
        online=Online(options={"pad_to_multiple_of": 5}),
        offline={"pad_to_multiple_of": 5},
    ),
    Scenario(
        "greedy plans",
        options={"method": "greedy"},
        online=Online(options={"method": "greedy"}),
        offline={"method": "greedy"},
    ),
    Scenario(
        "switched off",
        {"*": Equal(fault=None, unsplit=True)},
        options={"enabled": False},
        bound=0.0,
        online=Online(options={"enabled": False}),
        offline={"enabled": False},
    ),
    Scenario(
        "batch normalization",
        {
            "lightning*": Refused("MisconfigurationException"),
            "trainer*": Refused("GradientCheckError"),  # in a batch that fits it would stay whole
            "*": Refused("ArchitectureError"),
        },
        model={"norm": True},
        online=Online(norm=True),
        offline={"norm": True},
    ),
    Scenario(
        "a model that reads padding",
        {
            "lightning-manual": Unseen(_OWN_LOOP),
            "fabric": Unseen(_OWN_LOOP),
            "accelerate*": Unseen(_OWN_LOOP),
            "*": Refused("GradientCheckError"),
        },
        model={"reads": True},
        online=Online(reads=True),
        offline={"reads": True},
    ),
    Scenario(
        "a loss that couples rows",
        {
            "lightning": Refused("GradientCheckError"),
            "lightning-joint": Equal(fault="rows"),
            "lightning-manual": Unseen(_OWN_LOOP),
            "fabric": Unseen(_OWN_LOOP),
            "accelerate*": Unseen(_OWN_LOOP),
            "trainer*": Refused("GradientCheckError"),
            "grpo-split": Refused("ConfigError"),
            "sft": NotApplicable("its loss is TRL's"),
        },
        loss=coupled,
        online=Online({"top_entropy_quantile": 0.5}),
        offline={},
    ),
)

# What happened.


@dataclass
class Outcome:
    """What one run did.

    Attributes:
        gradients: all of them, before each optimizer step, in float64.
        weights: at the end, in float64.
        logs: what the framework logged, times apart.
        metrics: `padmin/*`, in the order in which they were logged.
        calls: rows, width and a check sum of the token ids of every call of the model, the check's included.
        messages: warnings and notices of this library.
        error: class and text of a refusal.
        counts: `PaddingStats` of the run.
    """

    gradients: list[Tensor] = field(default_factory=list)
    weights: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    logs: list[dict[str, float]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    calls: list[tuple[int, int, int]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    error: tuple[str, str] | None = None
    counts: dict[str, Any] = field(default_factory=dict)

    def log(self, logs: Mapping[str, Any]) -> None:
        """Takes up what a framework logged."""
        numbers = {key: float(value) for key, value in logs.items() if isinstance(value, int | float | Tensor)}
        untimed = {k: v for k, v in numbers.items() if not any(w in k for w in ("time", "per_second", "flos"))}
        ours = {key: value for key, value in untimed.items() if key.startswith("padmin/")}
        theirs = {key: value for key, value in untimed.items() if key not in ours}
        self.logs += [theirs] if theirs else []
        self.metrics += [ours] if ours else []

    def step(self, parameters: Any) -> None:
        """Takes up the gradients of a step."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters if p.requires_grad]
        self.gradients.append(torch.cat([grad.detach().double().flatten() for grad in grads]))

    def watch(self, model: nn.Module) -> None:
        """Takes up the calls of a model, whoever makes them."""

        def call(module: nn.Module, args: Any, inputs: Any) -> None:
            ids = inputs["input_ids"] if "input_ids" in inputs else args[0]
            content = np.ascontiguousarray(ids.detach().cpu().to(torch.int64).numpy()).tobytes()
            self.calls.append((*ids.shape, zlib.crc32(content)))

        model.register_forward_pre_hook(call, with_kwargs=True)


class Adapter(Protocol):
    """How one framework is driven."""

    name: str

    def train(self, scenario: Scenario, ours: bool, out: Outcome) -> None:
        """One run; without `ours` with nothing of this library, on batches padded on the right.

        Raises:
            PadMinError: what is refused.
        """


@contextlib.contextmanager
def equal_weights() -> Iterator[None]:
    """The classical mistake: every micro-batch weighs 1/K."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(support.equal_weights())
        if "lightning_padmin.integrations.trl.passes" in sys.modules:
            import trl_cases

            from lightning_padmin.integrations.trl.passes import Passes
            from lightning_padmin.integrations.trl.window import Window

            split, pull = Passes._split, Window.pull

            def pulled(self: Any, chunk: int, scores: Any) -> Tensor:
                masks = [entry.inputs["completion_mask"] for entry in self.entries]
                mine = sum(float(masks[e][rows].sum()) for e, (_, rows) in self.places(chunk).items())
                share = max(mine, 1.0) / sum(float(mask.sum()) for mask in masks)
                return pull(self, chunk, scores) / share / len(self.batches)

            stack.enter_context(mock.patch.object(Passes, "_split", trl_cases.equally(split)))
            stack.enter_context(mock.patch.object(Window, "pull", pulled))
        yield


@contextlib.contextmanager
def swapped_rows() -> Iterator[None]:
    """Outputs that are put back one row too far: the fault for those who take whole losses of whole batches."""
    original = MicroBatches.restore_rows

    def restore_rows(self: Any, *args: Any, **options: Any) -> Any:
        return original(self, *args, **options).roll(1, 0)

    MicroBatches.restore_rows = restore_rows  # type: ignore[method-assign]
    try:
        yield
    finally:
        MicroBatches.restore_rows = original  # type: ignore[method-assign]


FAULTS = {None: contextlib.nullcontext, "weights": equal_weights, "rows": swapped_rows}


class _Notices(logging.Handler):
    """Keeps what this library logs."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def carry_out(adapter: Adapter, scenario: Scenario, ours: bool = True, fault: str | None = None) -> Outcome:
    """One run from fixed seeds, on one thread, with all that was said; a refusal is an outcome too.

    Args:
        adapter: the framework.
        scenario: what is trained.
        ours: with this library.
        fault: of `FAULTS`, what the control looks for; the check that would see it is switched off.
    """
    if fault is not None:
        scenario = scenario.unchecked()
    out, printed, threads = Outcome(), io.StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    logger, notices = logging.getLogger("lightning_padmin"), _Notices(out.messages)
    logger.addHandler(notices)
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed), FAULTS[fault]():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", PadMinWarning)
            adapter.train(scenario, ours, out)
    except (PadMinError, MisconfigurationException) as error:
        out.error = type(error).__name__, str(error)
    finally:
        logger.removeHandler(notices)
        torch.set_num_threads(threads)
    out.messages += [str(each.message) for each in caught if issubclass(each.category, PadMinWarning)]
    # Which configuration is in force is said once in a process, whatever runs first.
    out.messages += [line for line in printed.getvalue().splitlines() if line.startswith("PadMin")]
    return out


def difference(found: Outcome, wanted: Outcome) -> float:
    """The worst `relative` difference of gradients, at any step, and of the weights in the end."""
    assert len(found.gradients) == len(wanted.gradients) > 0, (len(found.gradients), len(wanted.gradients))
    pairs = [*zip(found.gradients, wanted.gradients, strict=True), (found.weights, wanted.weights)]
    return max(_relative(a, b) for a, b in pairs)


def _relative(a: Tensor, b: Tensor) -> float:
    return 0.0 if torch.equal(a, b) else float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def log_difference(found: Outcome, wanted: Outcome) -> float:
    """The largest |a - b| / max(1, |b|) of all that the stock run logs."""
    assert len(found.logs) == len(wanted.logs)
    worst = 0.0
    for mine, theirs in zip(found.logs, wanted.logs, strict=True):
        assert set(theirs) <= set(mine), set(theirs) - set(mine)
        for key, value in theirs.items():
            both_nan = value != value and mine[key] != mine[key]
            worst = max(worst, 0.0 if both_nan else abs(mine[key] - value) / max(1.0, abs(value)))
    return worst


# Loops.

_GIVEN = "PADMIN_"


@contextlib.contextmanager
def variables(options: Mapping[str, Any]) -> Iterator[None]:
    """The environment variables of options, and no others of this library."""
    before = {name: value for name, value in os.environ.items() if name.startswith(_GIVEN)}
    for name in before:
        del os.environ[name]
    new = {
        f"{_GIVEN}{name.upper()}": str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
        os.environ.update(before)


class _Loop:
    """A plain loop, stopped and resumed where the scenario says so."""

    def train(self, scenario: Scenario, ours: bool, out: Outcome) -> None:
        batches = scenario.batches(None if ours else "right")
        parts = [range(len(batches))]
        if scenario.resume_at is not None:
            parts = [range(scenario.resume_at), range(scenario.resume_at, len(batches))]
        state: dict[str, Any] = {}
        for part in parts:
            original = scenario.network()
            out.watch(original)
            if state:
                original.load_state_dict(state["model"])
            model, optimizer = self.set_up(scenario, ours, original)
            if state and ours:
                self.pad.load_state_dict(state["pad"])
            for index in part:
                self.batch(scenario, ours, model, optimizer, batches[index], index, out)
            state = {"model": original.state_dict()}
            if ours:
                state["pad"] = self.pad.state_dict()
        out.weights = support.flat_parameters(original)
        if ours:
            out.counts = self.pad.stats.state_dict()

    def batch(
        self, scenario: Scenario, ours: bool, model: Any, optimizer: Any, batch: Batch, index: int, out: Outcome
    ) -> None:
        ends = (index + 1) % scenario.accumulate == 0
        total = 0.0
        for micro, weight in self.pairs(ours, batch, model, not ends):
            loss = scenario.loss_of(model, micro) * weight
            total += loss.item()
            self.backward(loss / scenario.accumulate)
        out.log({"loss": total})
        if ends:
            if scenario.clip is not None:
                self.clip(model, optimizer, scenario.clip)
            out.step(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            if ours:
                out.log(self.pad.metrics())

    pad: Any


class OfFabric(_Loop):
    name = "fabric"

    def set_up(self, scenario: Scenario, ours: bool, model: nn.Module) -> tuple[Any, Any]:
        self.fabric = Fabric(
            accelerator="cpu", devices=1, precision="bf16-mixed" if scenario.precision == "bf16" else None
        )
        self.pad = FabricPadMin(self.fabric, scenario.config()) if ours else None
        set_up: tuple[Any, Any] = self.fabric.setup(model, scenario.optimizer(model))
        return set_up

    def pairs(self, ours: bool, batch: Batch, model: Any, more: bool) -> Any:
        return self.pad.micro_batches(batch, model, is_accumulating=more) if ours else [(batch, 1.0)]

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def clip(self, model: Any, optimizer: Any, norm: float) -> None:
        self.fabric.clip_gradients(model, optimizer, max_norm=norm)


def forget_accelerate() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class OfAccelerate(_Loop):
    name = "accelerate"

    def set_up(self, scenario: Scenario, ours: bool, model: nn.Module) -> tuple[Any, Any]:
        forget_accelerate()
        self.accelerator = Accelerator(cpu=True, mixed_precision="bf16" if scenario.precision == "bf16" else "no")
        self.pad = self.make(scenario) if ours else None
        prepared: tuple[Any, Any] = self.accelerator.prepare(model, scenario.optimizer(model))
        return prepared

    def make(self, scenario: Scenario) -> PadMin:
        return PadMin(self.accelerator, scenario.config())

    def pairs(self, ours: bool, batch: Batch, model: Any, more: bool) -> Any:
        return self.pad.micro_batches(batch, model) if ours else [(batch, 1.0)]

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, model: Any, optimizer: Any, norm: float) -> None:
        self.accelerator.clip_grad_norm_(model.parameters(), norm)


class OfToggle(OfAccelerate):
    """Switched on from outside: the script says `PadMin(accelerator)`."""

    name = "accelerate-toggle"

    def make(self, scenario: Scenario) -> PadMin:
        given = {"enabled": True, "token_budget": support.BUDGET, "launch_cost": 4} | dict(scenario.options)
        with variables(given):
            return PadMin(self.accelerator)


# Lightning.


class Task(pl.LightningModule):
    """A scenario's training step; also with manual optimization."""

    padmin_per_call = ("out",)

    def __init__(
        self, scenario: Scenario, out: Outcome, kind: type[Net], callback: Any = None, manual: bool = False
    ) -> None:
        super().__init__()
        self.model, self.scenario, self.out = scenario.network(kind), scenario, out
        self.automatic_optimization = not manual
        self.callback = [callback]
        out.watch(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if self.automatic_optimization:
            loss = self.scenario.loss_of(self.model, batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss
        scenario, callback, total = self.scenario, self.callback[0], 0.0
        for micro, weight in [(batch, 1.0)] if callback is None else callback.micro_batches(batch):
            loss = scenario.loss_of(self.model, micro) * weight
            self.manual_backward(loss / scenario.accumulate)
            total += loss.item()
        self.log("loss", total, on_step=True)
        if (batch_idx + 1) % scenario.accumulate == 0:
            optimizer: Any = self.optimizers()
            if scenario.clip is not None:
                self.clip_gradients(optimizer, gradient_clip_val=scenario.clip, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.out.step(self.model.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.scenario.optimizer(self.model)


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclass
class OfLightning:
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: type[Net] = Net
    manual: bool = False

    def train(self, scenario: Scenario, ours: bool, out: Outcome) -> None:
        batches = scenario.batches(None if ours else "right")
        checkpoint = None
        stops = [len(batches)] if scenario.resume_at is None else [scenario.resume_at, len(batches)]
        with _quiet_lightning():
            for stop in stops:
                callback = PadMinCallback(config=scenario.config(**self.options)) if ours else None
                task, memory = Task(scenario, out, self.kind, callback, self.manual), support.Memory()
                trainer = support.quiet_trainer(
                    *filter(None, [callback]),
                    logger=memory,
                    log_every_n_steps=1,
                    limit_train_batches=stop,
                    max_epochs=1 if stop == stops[0] else 2,
                    precision="bf16-mixed" if scenario.precision == "bf16" else None,
                    **(
                        {}
                        if self.manual
                        else {"accumulate_grad_batches": scenario.accumulate, "gradient_clip_val": scenario.clip}
                    ),
                )
                # The first part ends as an epoch, so that what is left is the next one.
                rest = batches if checkpoint is None else batches[stops[0] :]
                trainer.fit(task, support.loader(rest), ckpt_path=checkpoint)
                for _, row in memory.rows:
                    out.log(row)
                if stop != len(batches):
                    checkpoint = os.path.join(tempfile.mkdtemp(), "stopped.ckpt")
                    trainer.save_checkpoint(checkpoint)
        out.weights = support.flat_parameters(task.model)
        if callback is not None:
            out.counts = callback.stats.state_dict()


# The Trainer of transformers.


class WithLoss(nn.Module):
    """A scenario's model that takes its own loss, a mean over each batch."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario, self.net = scenario, scenario.network()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        u: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        more = {"position_ids": position_ids, "u": u, "loss_mask": loss_mask}
        batch = given | {name: each for name, each in more.items() if each is not None}
        return {"loss": self.scenario.loss_of(self.net, batch)}


class WithSum(nn.Module):
    """The same, with a sum over the targets of the whole window, as models of transformers take it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.net = scenario.network()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        losses = support.token_losses(self.net(input_ids, attention_mask)["logits"], labels).sum()
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": losses / count}


class Follows(TrainerCallback):
    """Takes up what a Trainer does."""

    def __init__(self, out: Outcome) -> None:
        self.out = out

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.out.step(model.parameters())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.out.log(logs)


def _only(samples: Sequence[Any]) -> Any:
    """A collator of ready-made batches."""
    (batch,) = samples
    return dict(batch)


class OfTrainer:
    name = "trainer"

    def train(self, scenario: Scenario, ours: bool, out: Outcome) -> None:
        batches, folder = scenario.batches(None if ours else "right"), tempfile.mkdtemp()
        steps = len(batches) // scenario.accumulate
        stops = [steps] if scenario.resume_at is None else [scenario.resume_at, steps]
        for stop in stops:
            forget_accelerate()
            model = self.model(scenario)
            out.watch(getattr(model, "net", model))
            resumes = stop != stops[0]
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=scenario.accumulate,
                max_steps=stop,
                max_grad_norm=scenario.clip or 0.0,
                lr_scheduler_type="constant",
                logging_steps=1,
                report_to=[],
                save_strategy="steps" if stop != steps else "no",
                save_steps=stop,
                use_cpu=True,
                bf16=scenario.precision == "bf16",
                disable_tqdm=True,
                remove_unused_columns=False,
                train_sampling_strategy="sequential",
                seed=3,
            )
            trainer = self.make(
                scenario,
                ours,
                model=model,
                args=arguments,
                train_dataset=support.Batches(batches),
                data_collator=_only,
                callbacks=[Follows(out)],
                optimizers=(scenario.optimizer(model), None),
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train(resume_from_checkpoint=resumes or None)
        out.weights = support.flat_parameters(model)
        if ours:
            out.counts = trainer.padding_stats.state_dict()

    def model(self, scenario: Scenario) -> nn.Module:
        if scenario.loss is None:
            return scenario.network()
        return WithSum(scenario) if scenario.loss is summed else WithLoss(scenario)

    def config(self, scenario: Scenario) -> PadMinConfig:
        # Where batches are pooled they have several widths, so that what pads token ids must be known.
        reduction = {} if scenario.loss is not summed else {"loss_reduction": "token-mean"}
        return scenario.config(pad_token_id=0, **reduction)

    def make(self, scenario: Scenario, ours: bool, **arguments: Any) -> Any:
        if not ours:
            return Trainer(**arguments)
        return type("Ours", (PadMinTrainerMixin, Trainer), {})(**arguments, padmin=self.config(scenario))


class OfZeroEdit(OfTrainer):
    """The class that `lightning_padmin.run` has a script make in place of its Trainer, without any word of padmin.

    That `run` patches `Trainer.__new__` for good, so it is tried in processes of its own (test_accelerate_launch.py).
    """

    name = "trainer-zero-edit"

    def make(self, scenario: Scenario, ours: bool, **arguments: Any) -> Any:
        kind: Any = run.with_mixin(Trainer, self.config(scenario)) if ours else Trainer
        return kind(**arguments)


ADAPTERS: dict[str, Adapter] = {
    each.name: each
    for each in (
        OfLightning("lightning", {"mode": "split"}),
        OfLightning("lightning-manual", manual=True),
        OfLightning("lightning-joint", {"mode": "joint"}, LooksLikeTransformers),
        OfFabric(),
        OfAccelerate(),
        OfToggle(),
        OfTrainer(),
        OfZeroEdit(),
    )
}
TRL = ("grpo-split", "grpo-joint", "grpo-replay", "sft", "dpo")
NAMES = (*ADAPTERS, *TRL)


def adapter(name: str) -> Adapter:
    """An adapter by its name; TRL is imported when it is asked for."""
    if name in TRL:
        from adapters import contract_trl

        return contract_trl.ADAPTERS[name]
    return ADAPTERS[name]
