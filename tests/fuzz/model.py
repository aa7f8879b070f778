"""A tiny float64 model whose gradient shows every token, its slot, its mask, and what stands before it.

h[t] = sum over s <= t of decay^(t - s) * mask[s] * (E[ids[s]] + P[s])        loss[t] = (h[t] . W[label] - 1)^2 / 2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fuzz.cases import VOCABULARY, Case, lookup

_MOST, _HIDDEN = 40, 3
_generator = torch.Generator().manual_seed(5)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator, dtype=torch.float64).requires_grad_()


PARAMETERS = [_random(VOCABULARY, _HIDDEN), _random(_MOST, _HIDDEN), _random(VOCABULARY, _HIDDEN)]
_steps = torch.arange(_MOST)[:, None] - torch.arange(_MOST)
_MIX = torch.where(_steps >= 0, 0.7 ** _steps.double(), 0.0)

View = Mapping[str, Tensor]


def view(case: Case, batch: Any) -> dict[str, Tensor]:
    """The entries that the model and the loss read, by role."""
    return {
        role: lookup(batch, case.paths[name])
        for role, name in case.roles.items()
        if name is not None
    }  # fmt: skip


def row_alone(case: Case, row: int) -> dict[str, Tensor]:
    """One row as it would be without any padding, cut by hand."""
    found = {}
    for role, name in case.roles.items():
        if name is None:
            continue
        entry = case.entries[name]
        found[role] = entry.value[row : row + 1]
        if entry.kind == "position":
            start, length = case.spans[("input", "decoder").index(entry.axis)][row]
            found[role] = found[role][:, start : start + length]
    return found


def _states(ids: Tensor | None, mask: Tensor | None, width: int) -> Tensor:
    embedding, places, _ = PARAMETERS
    inputs = places[:width][None] if ids is None else embedding[ids.long()] + places[:width]
    return _MIX[:width, :width] @ (inputs if mask is None else inputs * (mask != 0).unsqueeze(-1))


def row_sums(case: Case, batch: View) -> tuple[Tensor, Tensor]:
    """Loss and weight of each row, summed over its tokens, (B,) each."""
    ids, mask = batch["ids"], batch["mask"]
    states = _states(ids, mask, ids.shape[1])
    pooled = (states * (mask != 0).unsqueeze(-1)).sum(1, keepdim=True)
    if len(case.widths) == 2:
        some = next(batch[role] for role in ("decoder_mask", "labels", "loss_mask", "decoder_ids") if role in batch)
        states = _states(batch.get("decoder_ids"), batch.get("decoder_mask"), some.shape[1]) + pooled
    labels, loss_mask, shift = batch.get("labels"), batch.get("loss_mask"), case.shift
    if labels is None and loss_mask is None:  # a loss of rows, not of tokens
        losses = (pooled.squeeze(1) ** 2).sum(-1)
        return losses, torch.ones_like(losses)
    if labels is not None and case.entries[str(case.roles["labels"])].kind == "row":
        labels, states, shift = labels.reshape(len(labels), -1), pooled, 0
        states = states.expand(-1, labels.shape[1], -1)
    weight = torch.ones(states.shape[:2], dtype=torch.float64) if loss_mask is None else loss_mask.double()
    targets = labels if labels is not None else torch.ones(states.shape[:2], dtype=torch.int64)
    targets = targets.long()
    if labels is not None:
        weight = weight * (targets != case.ignore)
        targets = torch.where(targets == case.ignore, 0, targets)
    width = states.shape[1]
    scores = (states[:, : max(width - shift, 0)] * PARAMETERS[2][targets[:, shift:]]).sum(-1)
    weight = weight[:, shift:]
    return (0.5 * (scores - 1) ** 2 * weight).sum(1), weight.sum(1)


def loss_of(case: Case, batch: View) -> Tensor:
    """The loss as a training step reduces it."""
    losses, weights = row_sums(case, batch)
    if case.how == "token-mean":
        return losses.sum() / weights.sum()
    if case.how == "row-mean":
        return (losses / torch.where(weights > 0, weights, 1.0)).mean()
    if case.how == "function":
        return (batch["u"].double() * losses).sum() / batch["u"].double().sum()
    return losses.sum()


def token_weights(case: Case) -> list[float]:
    """Of each row, by plain loops: loss tokens, or the sum of their weights."""
    found = []
    labels, loss_mask = case.role("labels"), case.role("loss_mask")
    for row in range(case.rows):
        if labels is not None and labels.kind == "row":
            values = labels.value[row].reshape(-1).tolist()
            found.append(float(sum(value != case.ignore for value in values)))
            continue
        start, length = case.spans[len(case.widths) - 1][row]
        total = 0.0
        for column in range(start + case.shift, start + length):
            carries = labels is None or int(labels.value[row, column]) != case.ignore
            total += carries * (1.0 if loss_mask is None else float(loss_mask.value[row, column]))
        found.append(total)
    return found


def row_weights(case: Case) -> list[float]:
    """What each row counts in the mean over the batch."""
    if case.how == "function":
        return [float(value) for value in case.role("u").value]  # type: ignore[union-attr]
    return token_weights(case) if case.how == "token-mean" else [1.0] * case.rows


def reference_loss(case: Case, total: float | None = None) -> Tensor:
    """The un-split loss over rows that were never padded; `total` is the divisor of the mean, default: this batch's."""
    weights = row_weights(case)
    divisor = 1.0 if case.how == "sum" else sum(weights) if total is None else total
    parts = [
        loss_of(case, row_alone(case, row)) * (weight / divisor) for row, weight in enumerate(weights) if weight > 0
    ]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def gradient(loss: Tensor) -> Tensor:
    """The loss and its gradient in one vector."""
    if not loss.requires_grad:
        return torch.zeros(1 + sum(p.numel() for p in PARAMETERS), dtype=torch.float64)
    parts = torch.autograd.grad(loss, PARAMETERS, allow_unused=True)
    flat = [torch.zeros(p.numel(), dtype=torch.float64) if g is None else g.flatten() for p, g in
            zip(PARAMETERS, parts, strict=True)]  # fmt: skip
    return torch.cat([loss.detach().reshape(1), *flat])


def split_loss(case: Case, micro_batches: Any) -> Tensor:
    """The sum of the weighted losses, of micro-batches with a weight; a loss of 0/0 stays one."""
    parts = [loss_of(case, view(case, micro.batch)) * micro.weight for micro in micro_batches if micro.weight]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) if bool(a.any() or b.any()) else 0.0
