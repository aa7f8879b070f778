"""A small causal model in float64, batches of given lengths, and a way to record what a Trainer did."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from lightning_padmin import PadMinCallback

VOCABULARY = 23
# Ten rows that a budget of BUDGET slots cuts into five micro-batches: 24 | 20 | 12 12 | 6 6 6 6 | 3 2.
LENGTHS = (24, 20, 12, 12, 6, 6, 6, 6, 3, 2)
BUDGET = 24


def make_batch(
    lengths: Sequence[int],
    *,
    seed: int = 0,
    prompt: int = 1,
    width: int | None = None,
    left: Sequence[int] | None = None,
    without_loss: Sequence[int] = (),
) -> dict[str, Tensor]:
    """input_ids, attention_mask, labels, (B, L) int64; the first `prompt` tokens of each row carry no loss.

    `left[i]` columns of padding come before row i.
    """
    generator = torch.Generator().manual_seed(seed)
    left = left or [0] * len(lengths)
    width = width or max(length + before for length, before in zip(lengths, left, strict=True))
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, (length, before) in enumerate(zip(lengths, left, strict=True)):
        row = slice(before, before + length)
        ids[i, row] = torch.randint(1, VOCABULARY, (length,), generator=generator)
        mask[i, row] = 1
        if i not in without_loss:
            loss = slice(before + min(prompt, length - 1), before + length)
            labels[i, loss] = ids[i, loss]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@contextmanager
def equal_weights() -> Iterator[None]:
    """The classical mistake, for negative controls: every micro-batch weighs 1/K."""
    from lightning_padmin.microbatching import weights  # here: other fixtures serve older checkouts too

    right = weights.weights

    def evenly(*arguments: Any) -> Any:
        found, shares = right(*arguments)
        return np.full_like(found, 1 / len(found)), shares

    with mock.patch.object(weights, "weights", evenly):
        yield


class TinyLM(nn.Module):
    """Embedding, GRU, head. Causal, so right padding changes nothing; left padding does (the state takes it in)."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(input_ids))[0])


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, L-1) cross-entropy of each target, 0 where there is none."""
    flat = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
    )
    return flat.view(labels.shape[0], -1)


def reduce_loss(losses: Tensor, labels: Tensor, how: str) -> Tensor:
    valid = labels[:, 1:] != -100
    if how == "token-mean":
        return losses.sum() / valid.sum()
    if how == "row-mean":
        return (losses.sum(1) / valid.sum(1).clamp(min=1)).mean()
    return losses.sum()


class Module(pl.LightningModule):
    """Records gradients before each optimizer step, and everything a test may compare."""

    padmin_per_call = ("shapes",)

    def __init__(
        self,
        how: str = "token-mean",
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        dtype: torch.dtype = torch.float64,
        output: Callable[[dict[str, Tensor], Tensor], Any] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = TinyLM().to(dtype)
        self.how, self.output = how, output
        self.optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.5))
        self.gradients: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.shapes: list[tuple[int, ...]] = []
        self.zero_grads = 0

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses = token_losses(self.model(batch["input_ids"]), batch["labels"])
        return reduce_loss(losses, batch["labels"], self.how)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.shapes.append(tuple(batch["input_ids"].shape))
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss if self.output is None else self.output(batch, loss)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.zero_grads += 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(flat_gradient(self.model))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach() if outputs else torch.tensor(float("nan")))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def flat_gradient(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.detach().double().flatten() for p in module.parameters() if p.grad is not None])


def flat_parameters(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def relative(a: Tensor, b: Tensor) -> float:
    """max |a - b| / max |b|."""
    return float((a - b).abs().max() / b.abs().max())


class Batches(torch.utils.data.Dataset):
    """Ready-made batches; the loader passes them on as they are."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def loader(batches: Sequence[Any]) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(Batches(batches), batch_size=None)


def fit(module: pl.LightningModule, batches: Sequence[Any], *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A quiet CPU Trainer over ready-made batches."""
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"lightning\.")
        trainer = pl.Trainer(callbacks=list(callbacks), **(defaults | options))
        trainer.fit(module, loader(batches))
    return trainer


def quiet_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """The Trainer of `fit`, not started yet."""
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | options))


def padmin(**options: Any) -> PadMinCallback:
    """The callback with the budget that goes with LENGTHS."""
    return PadMinCallback(**({"token_budget": BUDGET, "launch_cost": 4} | options))


def ragged_batches(count: int = 3, *, lengths: Sequence[int] = LENGTHS, **options: Any) -> list[dict[str, Tensor]]:
    """Batches of LENGTHS, rows in another order in each."""
    turns = [3 * k % len(lengths) for k in range(count)]
    return [make_batch([*lengths[t:], *lengths[:t]], seed=k, **options) for k, t in enumerate(turns)]


@dataclass
class Pair:
    """The same fit without and with the callback."""

    plain: Any
    split: Any
    plain_trainer: pl.Trainer
    split_trainer: pl.Trainer
    callback: PadMinCallback

    @property
    def gradient(self) -> float:
        """The worst `relative` difference of a gradient over all optimizer steps."""
        assert len(self.split.gradients) == len(self.plain.gradients) > 0
        return max(relative(a, b) for a, b in zip(self.split.gradients, self.plain.gradients, strict=True))

    @property
    def parameters(self) -> float:
        """`relative` difference of the parameters after training."""
        return relative(flat_parameters(self.split), flat_parameters(self.plain))


def fit_pair(
    make: Callable[[], Any],
    batches: Sequence[Any],
    options: dict[str, Any] | None = None,
    callbacks: Callable[[], Sequence[pl.Callback]] = tuple,
    **trainer: Any,
) -> Pair:
    """`options` are the callback's, the others the Trainer's; the callback comes after `callbacks`."""
    plain, split, added = make(), make(), padmin(**(options or {}))
    trainers = fit(plain, batches, *callbacks(), **trainer), fit(split, batches, *callbacks(), added, **trainer)
    assert added.stats.micro_batches > added.stats.batches > 0, "nothing was split, so nothing was tested"
    return Pair(plain, split, *trainers, added)


Row = dict[str, float]


def without_audits(metrics: Row) -> Row:
    """Of metrics those that tell of batches."""
    return {name: value for name, value in metrics.items() if not name.endswith(("audits", "audit_worst", "mode"))}


class Memory(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, Row]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Row, step: int | None = None) -> None:
        self.rows.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        pass

    def counts(self) -> list[tuple[int | None, Row]]:
        """Rows of the callback, of batches alone: how many were audited is no matter of a batch."""
        return [(step, without_audits(row)) for step, row in self.of("padmin/")]

    def of(self, prefix: str) -> list[tuple[int | None, Row]]:
        """Rows of the callback (its prefix) or of everybody else ("")."""
        return [
            (step, row) for step, row in self.rows if any(name.startswith("padmin/") for name in row) == bool(prefix)
        ]


def mixed_batches() -> list[dict[str, Tensor]]:
    """Three batches of LENGTHS, and two small ones in between, where no row is long."""
    first, second, third = ragged_batches(3)
    return [first, make_batch([8, 4, 4], width=10, seed=7), second, make_batch([8, 4, 4], width=10, seed=8), third]


def fitted(module: pl.LightningModule, batches: Sequence[Any], *callbacks: pl.Callback, **options: Any) -> Memory:
    """What a fit gives its logger, at every step unless told otherwise."""
    memory = Memory()
    fit(module, batches, *callbacks, logger=memory, **({"log_every_n_steps": 1} | options))
    return memory
