"""A small causal model in float64, batches of given lengths, and a way to record what a Trainer did."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

VOCABULARY = 23


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
