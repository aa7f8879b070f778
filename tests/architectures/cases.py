"""Rows of one architecture, the same rows padded in three ways, and the truth: each row alone, unpadded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from architectures.zoo import CLASSES, PAD, VOCABULARY, Architecture
from support import relative
from torch import Tensor

from lightning_padmin import PadMinConfig

Padding = Literal["left", "right", "two-sided"]
PADDINGS: tuple[Padding, ...] = ("left", "right", "two-sided")
# A budget of 28 slots (48 with a decoder) cuts these into 14 11 | 9 6 5 | 3 or the like.
LENGTHS = (5, 14, 3, 9, 11, 6)
DECODER_LENGTHS = (4, 7, 3, 10, 5, 8)
Row = dict[str, Tensor]


class Case:
    """A model and its rows. Inputs of the model are all entries of a row or batch but the labels."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self.model = architecture.build()
        self.shift = architecture.label_shift
        self.seq2seq = architecture.kind == "seq2seq"
        self.by_row = architecture.kind == "classification"
        generator = torch.Generator().manual_seed(3)
        self.rows = [self._row(k, generator) for k in range(len(LENGTHS))]

    def _row(self, k: int, generator: torch.Generator) -> Row:
        def tokens(count: int) -> Tensor:
            return torch.randint(3, VOCABULARY, (count,), generator=generator)

        row = {"input_ids": tokens(LENGTHS[k])}
        kind = self.architecture.kind
        if kind == "classification":
            row["labels"] = torch.randint(CLASSES, (), generator=generator)
        elif kind == "seq2seq":
            row["decoder_input_ids"], row["labels"] = tokens(DECODER_LENGTHS[k]), tokens(DECODER_LENGTHS[k])
        elif kind == "masked-lm":
            row["labels"] = tokens(LENGTHS[k])
            row["labels"][1::2] = -100
        else:  # the first tokens are a prompt, of another length in each row
            row["labels"] = row["input_ids"].clone()
            row["labels"][: 1 + k % 2] = -100
        return row

    def length(self, k: int) -> int:
        """Positions of row k that have logits."""
        return DECODER_LENGTHS[k] if self.seq2seq else LENGTHS[k]

    def starts(self, padding: Padding) -> tuple[list[int], list[int]]:
        """Column where each row begins, on both axes."""
        return tuple(self._starts(lengths, padding) for lengths in (LENGTHS, DECODER_LENGTHS))  # type: ignore

    def _width(self, lengths: Sequence[int], padding: Padding) -> int:
        multiple = self.architecture.multiple
        return math.ceil((max(lengths) + 3 * (padding == "two-sided")) / multiple) * multiple

    def _starts(self, lengths: Sequence[int], padding: Padding) -> list[int]:
        spare = [self._width(lengths, padding) - length for length in lengths]
        shares = {"left": 1.0, "right": 0.0, "two-sided": 0.5}
        return [int(share * shares[padding]) for share in spare]

    def batch(self, padding: Padding) -> dict[str, Tensor]:
        """All rows, with their masks and labels."""
        input_starts, decoder_starts = self.starts(padding)
        sides: list[tuple[str, Sequence[int], list[int], str]] = [
            ("input_ids", LENGTHS, input_starts, "attention_mask")
        ]
        labels_side = (LENGTHS, input_starts)
        if self.seq2seq:
            sides.append(("decoder_input_ids", DECODER_LENGTHS, decoder_starts, "decoder_attention_mask"))
            labels_side = (DECODER_LENGTHS, decoder_starts)
        batch: dict[str, Tensor] = {}
        for key, lengths, starts, mask in sides:
            batch[key] = self._padded(key, lengths, starts, self._width(lengths, padding), PAD)
            batch[mask] = torch.zeros_like(batch[key])
            for k, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                batch[mask][k, start : start + length] = 1
        if self.by_row:
            batch["labels"] = torch.stack([row["labels"] for row in self.rows])
        else:
            batch["labels"] = self._padded("labels", *labels_side, self._width(labels_side[0], padding), -100)
        return batch

    def _padded(self, key: str, lengths: Sequence[int], starts: list[int], width: int, fill: int) -> Tensor:
        padded = torch.full((len(self.rows), width), fill)
        for k, row in enumerate(self.rows):
            padded[k, starts[k] : starts[k] + lengths[k]] = row[key]
        return padded

    def config(self, **options: Any) -> PadMinConfig:
        budget = max(48 if self.seq2seq else 28, 2 * self.architecture.multiple)
        shift = None if self.by_row else self.shift
        multiple: dict[str, Any] = {"pad_to_multiple_of": self.architecture.multiple, "pad_token_id": PAD}
        return PadMinConfig(token_budget=budget, launch_cost=4, label_shift=shift, **multiple, **options)

    def logits(self, inputs: dict[str, Any]) -> Tensor:
        """Of the model itself; labels are left out."""
        inputs = {key: value for key, value in inputs.items() if key != "labels"}
        return self.model(**inputs, **self.architecture.forward).logits

    def row_losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy and number of targets of each row, (n,) each, in float64."""
        if self.by_row:
            return _cross_entropy(logits, labels), torch.ones_like(labels)
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return _cross_entropy(logits, labels).sum(dim=1), (labels != -100).sum(dim=1)

    def token_mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses, targets = self.row_losses(logits, labels)
        return losses.sum() / targets.sum()

    def coupled(self, logits: Tensor, labels: Tensor) -> Tensor:
        """A loss that no weighted sum over parts of the batch gives."""
        losses, targets = self.row_losses(logits, labels)
        return (losses / targets).logsumexp(dim=0)

    def gradient(self, loss: Tensor, retain: bool = False) -> Tensor:
        """Gradient of a loss, flat; zeros where none arrives."""
        found = torch.autograd.grad(loss, self._trained, retain_graph=retain, allow_unused=True)
        return self._flat(found)

    def collected_gradient(self) -> Tensor:
        """What backward passes have left on the parameters, as `gradient` gives it."""
        return self._flat([parameter.grad for parameter in self._trained])

    @property
    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(self._trained, gradients, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).double().flatten() for p, g in pairs])

    @cached_property
    def truth(self) -> Truth:
        return Truth(self)

    def logit_difference(self, logits: Tensor, rows: Sequence[int], starts: Sequence[int]) -> float:
        """Largest difference on real slots from each row alone, relative to the largest logit."""
        pairs = []
        for i, k in enumerate(rows):
            own = logits[i] if self.by_row else logits[i, starts[i] : starts[i] + self.length(k)]
            pairs.append((own.detach().double(), self.truth.logits[k]))
        return relative(torch.cat([a.flatten() for a, _ in pairs]), torch.cat([b.flatten() for _, b in pairs]))


class Truth:
    """Logits of each row alone, and the gradients of both losses over rows alone."""

    def __init__(self, case: Case) -> None:
        self.logits: list[Tensor] = []
        losses, targets = [], []
        for k, row in enumerate(case.rows):
            inputs = {key: value[None] for key, value in row.items() if key != "labels"}
            spare = -LENGTHS[k] % case.architecture.multiple
            if spare:
                inputs["input_ids"] = torch.nn.functional.pad(inputs["input_ids"], (0, spare), value=PAD)
            logits = case.logits(inputs)
            logits = logits if case.by_row else logits[:, : case.length(k)]
            loss, count = case.row_losses(logits, row["labels"][None])
            losses.append(loss)
            targets.append(count)
            self.logits.append(logits[0].detach().double())
        loss, count = torch.cat(losses), torch.cat(targets)
        self.token_mean = case.gradient(loss.sum() / count.sum(), retain=True)
        self.coupled = case.gradient((loss / count).logsumexp(dim=0))


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    flat = torch.nn.functional.cross_entropy(
        logits.double().reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100, reduction="none"
    )
    return flat.view(labels.shape)
