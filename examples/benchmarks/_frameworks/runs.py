"""What all runs have: a model, batches, a ledger, and the gradients of their optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from _speed import models, workload
from _speed.update import difference
from torch import Tensor
from transformers import PreTrainedModel

from lightning_padmin import PadMinConfig
from lightning_padmin.microbatching.batcher import MicroBatcher

from .ledger import PAUSED, Ledger

VOCABULARY, RATE = 1024, 1e-3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What is trained on: the same for all frameworks.

    Attributes:
        lengths: (steps, rows, 2) prompt and completion tokens.
        accumulate: batches of an optimizer step, for frameworks that accumulate.
        budget: most slots of a micro-batch.
        launch_cost: of a micro-batch, in slots.
        is_control: weights are wrong on purpose.
    """

    lengths: Any
    hidden: int
    layers: int
    accumulate: int
    budget: int
    launch_cost: int
    is_control: bool

    @property
    def steps(self) -> int:
        """Optimizer steps of a turn."""
        return len(self.lengths)

    def config(self, **options: Any) -> PadMinConfig:
        """The library's options. A control goes unchecked, or the first batch would refuse it."""
        check = "off" if self.is_control else "first-batch"
        return PadMinConfig(token_budget=self.budget, launch_cost=self.launch_cost, check=check, **options)

    def model(self) -> PreTrainedModel:
        """The same random weights every time."""
        return models.build("qwen2", self.hidden, self.layers, VOCABULARY).to(DEVICE)

    def batches(self, of_step: int) -> list[Batch]:
        """Right-padded batches, each to its longest row; `of_step` of them make an optimizer step."""
        rows = self.lengths.reshape(self.steps * of_step, -1, 2)
        source = torch.Generator().manual_seed(0)
        return [padded(each, source) for each in rows]


def padded(lengths: Any, source: torch.Generator) -> Batch:
    """One batch of random tokens; completions carry loss."""
    shape = len(lengths), int(lengths.sum(axis=1).max())
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, workload.IGNORED)
    for row, (prompt, completion) in enumerate(lengths.tolist()):
        length = prompt + completion
        ids[row, :length] = torch.randint(3, VOCABULARY, (length,), generator=source)
        mask[row, :length] = 1
        labels[row, prompt:length] = ids[row, prompt:length]
    made = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: each.to(DEVICE) for name, each in made.items()}


@dataclass
class Sizes:
    """Of an optimizer step, on average."""

    slots: float
    real: float
    micro_batches: float

    @classmethod
    def of(cls, batches: Sequence[Batch], steps: int) -> Sizes:
        """Of batches that are run as they are."""
        masks = [batch["attention_mask"] for batch in batches]
        real = sum(int(mask.sum()) for mask in masks)
        return cls(sum(mask.numel() for mask in masks) / steps, real / steps, len(masks) / steps)

    @classmethod
    def counted(cls, stats: Any, steps: int) -> Sizes:
        """From the library's own counts."""
        return cls(stats.slots / steps, stats.real_tokens / steps, stats.micro_batches / steps)


@dataclass
class Watch:
    """Copies the gradients of each optimizer step; the step's time does not include that."""

    ledger: Ledger
    gradients: list[list[Tensor]] = field(default_factory=list)
    steps: int = 0
    is_on: bool = True

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """One without states, so that weights stay together as long as gradients do."""
        made = torch.optim.SGD(model.parameters(), lr=RATE)
        made.register_step_post_hook(self._copy)
        return made

    def _copy(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps += 1
        with self.ledger.part(PAUSED):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            if self.is_on:
                self.gradients.append([w.grad.float().clone() for w in weights if w.grad is not None])

    def take(self) -> list[list[Tensor]]:
        """The steps since the last call."""
        taken, self.gradients = self.gradients, []
        return taken


class Run(Protocol):
    """Stock or ours, of one framework."""

    watch: Watch
    model: torch.nn.Module

    def turn(self) -> None:
        """The optimizer steps of one turn."""

    def sizes(self) -> Sizes:
        """Of a step."""

    def largest(self, stock: Any) -> tuple[list[int], Any]:
        """Shape of the largest micro-batch, and the stock run with batches of that shape; None if there is none."""


def only_largest(batches: Sequence[Batch], config: PadMinConfig, stock: Any) -> tuple[list[int], Any]:
    """See `Run.largest`; for a stock run whose batches can be replaced."""
    micro_batches = [micro.batch for batch in batches for micro in MicroBatcher(config).prepare(batch)]
    largest = max(micro_batches, key=lambda micro: micro["input_ids"].numel())
    stock.batches = [largest] * len(stock.batches)
    return list(largest["input_ids"].shape), stock


def worst(ours: list[list[Tensor]], stock: list[list[Tensor]]) -> float:
    """max|difference| / max|gradient|, of the worst step; infinite where steps are missing."""
    if len(ours) != len(stock) or not stock:
        return float("inf")
    gaps = [difference(a, b) if len(a) == len(b) else float("inf") for a, b in zip(ours, stock, strict=True)]
    return max(float("inf") if gap != gap else gap for gap in gaps)
