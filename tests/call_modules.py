"""Modules that are no models of transformers, as people write them, with inputs for a ragged batch of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

LENGTHS = [5, 9, 3, 12, 11, 4]
ROWS, WIDTH, HIDDEN = len(LENGTHS), 14, 8
VOCABULARY = 30


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.linear = nn.Linear(HIDDEN, HIDDEN)


class Packed(Embeds):
    """Lengths; a GRU on a packed sequence; states with layers first; ends with the longest row."""

    def __init__(self, layers: int = 1, both: bool = False, total: bool = False) -> None:
        super().__init__()
        self.total = total
        self.rnn = nn.GRU(HIDDEN, 6, layers, batch_first=True, bidirectional=both, dropout=0.1 if layers > 1 else 0.0)

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        self.rnn.flatten_parameters()
        packed = pack_padded_sequence(self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, last = self.rnn(packed)
        total = ids.shape[1] if self.total else None
        return pad_packed_sequence(states, batch_first=True, total_length=total)[0], last


class TimeFirst(Embeds):
    """(width, rows, hidden) in and out, a cell's state carried in, lengths as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor], seq_lens: list[int]) -> dict[str, Any]:
        packed = pack_padded_sequence(x, torch.tensor(seq_lens), enforce_sorted=False)
        states, state = self.rnn(packed, state)
        return {"states": pad_packed_sequence(states, total_length=x.shape[0])[0], "state": state}


class Attends(Embeds):
    """Its own attention: (rows, width, hidden) and weights (rows, width, width)."""

    def weights(self, x: Tensor, real: Tensor) -> Tensor:
        scores = self.linear(x) @ x.transpose(1, 2)
        return scores.masked_fill(~real[:, None, :], float("-inf")).softmax(-1)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        weights = self.weights(x, torch.ones_like(ids).bool() if attention_mask is None else attention_mask != 0)
        return weights @ x, weights


class Inverted(Attends):
    def forward(self, ids: Tensor, key_padding_mask: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embedding(ids)
        return self.weights(x, ~key_padding_mask) @ x


class Declared(Attends):
    """A `pad` that is nonzero on padding, which its name does not say; keyword-only."""

    def forward(self, ids: Tensor, *, pad: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embedding(ids)
        return self.weights(x, pad == 0) @ x


@dataclass
class Found:
    hidden: Tensor
    pooled: Tensor
    padding: Tensor
    name: str = "found"


class Structured(Attends):
    """A dataclass with a mean over real tokens and the mask of padding, inverted."""

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Found:  # type: ignore[override]
        x, real = self.embedding(ids), attention_mask != 0
        hidden = self.weights(x, real) @ x
        pooled = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return Found(hidden, pooled, ~real)


class Both(NamedTuple):
    hidden: Tensor
    nested: dict[str, list[Tensor]]


class Extras(Attends):
    """One value per row, one vector per token, a table of columns, one that all share, scores hidden at padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, HIDDEN))

    def forward(  # type: ignore[override]
        self, ids: Tensor, attention_mask: Tensor, scale: Tensor, more: Tensor, columns: Tensor, table: Tensor, on: bool
    ) -> Both:
        x = self.embedding(ids) * scale[:, None, None] + more + columns + self.table[: ids.shape[1]]
        hidden = self.weights(x, attention_mask != 0) @ (x + table.mean(0))
        scores = hidden.sum(-1).masked_fill(attention_mask == 0, float("-inf"))
        return Both(hidden, {"scores": [scores if on else -scores]})


class Biased(Attends):
    """Scores (rows, width, width) of its own, and classes."""

    def forward(  # type: ignore[override]
        self, x: Tensor, bias: Tensor, classes: Tensor, attention_mask: Tensor
    ) -> Tensor:
        scores = (x @ x.transpose(1, 2) + bias).masked_fill(attention_mask[:, None, :] == 0, float("-inf"))
        hidden = scores.softmax(-1) @ x
        return (hidden @ classes.T).softmax(-1) @ classes + self.embedding.weight[0, 0]


class Choices(Attends):
    """(rows, choices, width) in, a score for each choice out."""

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        flat, real = ids.flatten(0, 1), attention_mask.flatten(0, 1) != 0
        x = self.embedding(flat)
        hidden = (self.weights(x, real) @ x * real[..., None]).sum(1)
        return self.linear(hidden).sum(-1).view(ids.shape[:2])


class Stock(Embeds):
    """torch's own layers, (width, rows, hidden) unless batch_first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(HIDDEN, 2, 16, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor, real: Tensor, causal: bool = False) -> Tensor:
        x = self.embedding(ids)
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool() if causal else None
        if self.batch_first:
            return self.encoder(x, mask=mask, src_key_padding_mask=real == 0)  # type: ignore[no-any-return]
        return self.encoder(x.transpose(0, 1), mask, src_key_padding_mask=real == 0).transpose(0, 1)  # type: ignore[no-any-return]


class Translates(nn.Module):
    """Two sequences with masks of their own: one is cut, the other goes with its rows."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        layer = nn.TransformerDecoderLayer(HIDDEN, 2, 16, batch_first=True)
        both = nn.Transformer(HIDDEN, 2, 1, 1, 16, batch_first=True)
        self.whole, self.inner = whole, both if whole else nn.TransformerDecoder(layer, 1)

    def forward(self, source: Tensor, target: Tensor, of_source: Tensor, of_target: Tensor) -> Tensor:
        masks = {"memory_key_padding_mask": of_source, "tgt_key_padding_mask": of_target}
        if self.whole:
            return self.inner(source, target, src_key_padding_mask=of_source, **masks)  # type: ignore[no-any-return]
        return self.inner(target, source, **masks)  # type: ignore[no-any-return]


class Towers(nn.Module):
    """Two encoders, and one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.document = Attends(), Packed(both=True, total=True)

    def forward(self, ids: Tensor, other: Tensor, real: Tensor) -> Tensor:
        lengths = real.sum(1)
        one, two = self.query(ids, real)[0], self.query(other, attention_mask=real.bool())[0]
        three = self.document(ids, lengths)[0].sum(-1)
        mean = [(each * real[..., None]).sum(1) / lengths[:, None] for each in (one, two)]
        return mean[0] @ mean[1].T + (three * real).sum(1)


# What is not exact in chunks


class Convolves(Embeds):
    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x + x.roll(-1, 1)  # reads the slot behind a row


class Unpacked(Embeds):
    """The backward direction starts in padding."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(HIDDEN, 6, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.rnn(self.embedding(ids))[0]  # type: ignore[no-any-return]


class Averages(Embeds):
    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (self.embedding(ids) * attention_mask[..., None]).mean(1)


class Coupled(Embeds):
    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(ids) * attention_mask[..., None]
        return x - x.sum((0, 1))


class Totals(Embeds):
    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (self.embedding(ids) * attention_mask[..., None]).sum()


class Similar(Embeds):
    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = (self.embedding(ids) * attention_mask[..., None]).sum(1)
        return x @ x.T


class Counts(Attends):
    """A running mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        self.seen.mul_(0.9).add_(0.1 * attention_mask.sum())
        return super().forward(ids, attention_mask)[0]


class Noisy(Attends):
    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        hidden = super().forward(ids, attention_mask)[0]
        return hidden + torch.randn_like(hidden)


class Overwrites(Attends):
    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        x.mul_(attention_mask[..., None])
        return self.linear(x)


class Weighs(Embeds):
    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        real = attention_mask[..., None] if x.ndim == 3 else attention_mask[:, None, :, None]
        return x.cumsum(-2) * real + self.embedding.weight[0, 0]


class Prototypes(Embeds):
    """As many classes as the batch has rows: what sizes suggest is wrong."""

    def forward(self, ids: Tensor, classes: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(ids) * attention_mask[..., None]
        return x + (x @ classes.T).softmax(-1) @ classes


Make = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


def inputs(width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and lengths."""
    torch.manual_seed(1)
    lengths = torch.tensor(LENGTHS)
    return torch.randint(1, VOCABULARY, (ROWS, width)), (torch.arange(width) < lengths[:, None]).long(), lengths


def _extras() -> dict[str, Any]:
    return {
        "scale": torch.rand(ROWS),
        "more": torch.randn(ROWS, WIDTH, HIDDEN),
        "columns": torch.randn(WIDTH, HIDDEN),
        "table": torch.randn(5, HIDDEN),
    }


def _choices() -> tuple[Tensor, Tensor]:
    ids, mask, _ = inputs()
    return ids.view(3, 2, WIDTH), mask.view(3, 2, WIDTH)


def _square(classes: int) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    bias = torch.randn(ROWS, WIDTH, WIDTH)
    return torch.randn(ROWS, WIDTH, HIDDEN), bias, torch.randn(classes, HIDDEN)


def _pairs() -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    of_target = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS)[:, None]
    source = torch.randn(ROWS, 10, HIDDEN), torch.arange(10) >= torch.tensor([3, 10, 4, 2, 5, 6])[:, None]
    return source[0], torch.randn(ROWS, max(LENGTHS), HIDDEN), source[1], of_target


def exact() -> dict[str, Make]:
    """By name: a module, positional and named inputs."""
    ids, mask, lengths = inputs()
    short = ids[:, : max(LENGTHS)]
    vectors, state = torch.randn(max(LENGTHS), ROWS, HIDDEN), torch.randn(1, ROWS, HIDDEN)
    return {
        "gru": lambda: (Packed(), (short, lengths), {}),
        "gru at the call's width": lambda: (Packed(total=True), (short, lengths), {}),
        "bidirectional, by name": lambda: (Packed(2, both=True), (), {"lengths": lengths, "ids": short}),
        "time first, states in": lambda: (TimeFirst(), (vectors, (state, -state), LENGTHS), {}),
        "attention": lambda: (Attends(), (ids, mask), {}),
        "attention, a mask of floats": lambda: (Attends(), (ids,), {"attention_mask": mask.double()}),
        "inverted": lambda: (Inverted(), (ids, mask == 0), {}),
        "declared": lambda: (Declared(), (ids,), {"pad": 1 - mask}),
        "dataclass": lambda: (Structured(), (ids, mask), {}),
        "extras": lambda: (Extras(), (ids, mask), {**_extras(), "on": True}),
        "a square": lambda: (Biased(), (*_square(5), mask), {}),
        "as many classes as positions": lambda: (Biased(), (*_square(WIDTH), mask), {}),
        "choices": lambda: (Choices(), _choices(), {}),
        "torch, batch first": lambda: (Stock(True), (ids, mask), {}),
        "torch, width first": lambda: (Stock(False), (ids, mask), {}),
        "torch, causal": lambda: (Stock(False), (ids, mask, True), {}),
        "torch, both sides": lambda: (Translates(True), _pairs(), {}),
        "torch, a decoder": lambda: (Translates(False), _pairs(), {}),
        "towers": lambda: (Towers(), (short, short.flip(1), mask[:, : max(LENGTHS)]), {}),
    }


def inexact() -> dict[str, tuple[Make, str]]:
    """Modules whose calls run as they came, and why."""
    ids, mask, lengths = inputs()
    vectors = torch.randn(ROWS, WIDTH, HIDDEN)
    differs = "differs in chunks"
    return {
        "convolution": (lambda: (Convolves(), (ids, mask), {}), differs),
        "not packed": (lambda: (Unpacked(), (ids[:, : max(LENGTHS)], lengths), {}), differs),
        "mean over the width": (lambda: (Averages(), (ids, mask), {}), differs),
        "rows coupled": (lambda: (Coupled(), (ids, mask), {}), differs),
        "noise": (lambda: (Noisy(), (ids, mask), {}), differs),
        "as many classes as rows": (lambda: (Prototypes(), (ids, torch.randn(ROWS, HIDDEN), mask), {}), differs),
        "a total": (lambda: (Totals(), (ids, mask), {}), "its output has no rows"),
        "rows against rows": (lambda: (Similar(), (ids, mask), {}), "its output has rows twice"),
        "a running mean": (lambda: (Counts(), (ids, mask), {}), "it writes to itself in each call .*seen"),
        "written inputs": (lambda: (Overwrites(), (vectors, mask), {}), "it writes to its input 'x'"),
        "as many features as rows, elsewhere": (
            lambda: (Weighs(), (torch.randn(ROWS, 3, WIDTH, ROWS), mask), {}),
            "'x' has shape .* where sizes agree",
        ),
    }
