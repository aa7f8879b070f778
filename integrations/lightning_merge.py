"""Merging what K micro-batches log and return into what one batch would have logged and returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from lightning_padmin.microbatch import MicroBatches

_REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class LogRecorder:
    """Stands in for Lightning's `_ResultCollection.log` while the micro-batches of one batch run.

    Each call of `self.log` in `training_step` is kept, and replayed once at the end with the merged value, so that
    Lightning sees one call per batch as without splitting: `reduce_fx` mean -> the mean over micro-batches weighted
    as the loss is (`log_reduce` names other ways), sum -> sum, max and min likewise, an explicit `batch_size` -> sum. A
    value that equals the loss is
    merged exactly as the loss. Values logged by other hooks, which may fire once per micro-batch, and torchmetrics
    objects, which accumulate by themselves, are replayed as they were last.
    """

    def __init__(self, micro_batches: MicroBatches, log_reduce: Mapping[str, str], accumulate: int) -> None:
        self._shares, self._weights = micro_batches.shares, micro_batches.weights
        self._rows = np.array([len(slots) for slots in micro_batches.slot_maps], dtype=np.float64)
        self._real = len(micro_batches.plan)
        self._log_reduce, self._accumulate = log_reduce, accumulate
        self._calls: dict[tuple[str, str, int], list[tuple[int, Any, dict[str, Any]]]] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._losses: dict[int, Tensor] = {}
        self._micro = 0

    @property
    def names(self) -> set[str]:
        """What training_step has logged."""
        return {name for fx, name, _ in self._calls if fx.split(".")[0] == "training_step"}

    def begin(self, micro: int) -> None:
        """What is logged from here on belongs to micro-batch `micro`."""
        self._micro = micro
        self._seen = {}

    def add_loss(self, micro: int, loss: Tensor) -> None:
        """The loss of a micro-batch, already divided by the number of accumulated batches."""
        self._losses[micro] = loss.detach()

    def log(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        """Same arguments as `_ResultCollection.log`."""
        if self._micro >= self._real:  # a dummy: its row has been logged already
            return
        occurrence = self._seen.get((fx, name), 0)
        self._seen[fx, name] = occurrence + 1
        value = value.detach() if isinstance(value, Tensor) else value
        self._calls.setdefault((fx, name, occurrence), []).append((self._micro, value, arguments))

    def replay(self, log: Callable[..., None]) -> None:
        """Calls `log` once for each key, in the order in which they first came."""
        for (fx, name, _), entries in self._calls.items():
            _, value, arguments = entries[-1]
            if fx.split(".")[0] == "training_step" and isinstance(value, Tensor):
                value = self._merge(name, entries)
                sizes = [call.get("batch_size") for _, _, call in entries]
                if all(size is not None for size in sizes):
                    arguments = {**arguments, "batch_size": sum(sizes)}
            log(fx, name, value, **arguments)

    def _merge(self, name: str, entries: Sequence[tuple[int, Any, dict[str, Any]]]) -> Tensor:
        reduce_fx = entries[-1][2].get("reduce_fx", "mean")
        how = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        how = self._log_reduce.get(name, how)
        values = torch.stack([_wide(value) for _, value, _ in entries])
        if how == "last":
            return values[-1]
        if how in _REDUCTIONS:
            return _REDUCTIONS[how](values, 0)
        micro = [index for index, _, _ in entries]
        if how == "row-mean":
            factors = self._rows[micro] / self._rows[micro].sum()
        elif self._weights is not self._shares and all(self._is_loss(index, value) for index, value, _ in entries):
            factors = self._weights[micro]
        else:
            factors = self._shares[micro]
            if len(micro) < self._real and factors.sum() > 0:  # logged by some micro-batches only
                factors = factors / factors.sum()
        return _weighted_sum(values, factors)

    def _is_loss(self, micro: int, value: Tensor) -> bool:
        """Up to the precision of the coarser one: `loss.item()` comes back in float32."""
        loss = self._losses.get(micro)
        if loss is None or value.shape != loss.shape or not value.is_floating_point():
            return False
        dtype = max(value.dtype, loss.dtype, key=lambda each: torch.finfo(each).eps)
        mine = value.to(loss.device, dtype) / self._accumulate
        return torch.allclose(mine, loss.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


def _wide(value: Tensor) -> Tensor:
    """At least float32, so that a mean of integers or of half precision is one."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def _weighted_sum(values: Tensor, factors: NDArray[np.float64]) -> Tensor:
    """(K, ...) values and (K,) factors; in float64 where there is one, so that a mean of equal values is that value."""
    exact = values if values.device.type == "mps" else values.double()
    shaped = exact.new_tensor(factors).view(-1, *[1] * (exact.ndim - 1))
    return (exact * shaped).sum(dim=0).to(values.dtype)


def merge_outputs(micro_batches: MicroBatches, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One dictionary from those that `training_step` returned for each micro-batch that is no dummy.

    They come without "loss", and their tensors detached.

    Tensors (n_k, ...) with one slice per row, and lists with one entry per row, are put back in the batch's order as
    (B, ...); scalars become the mean weighted as the loss is; anything else (for instance per-position outputs, whose
    widths differ) becomes the list of the micro-batches' values.
    """
    keys = dict.fromkeys(key for output in outputs for key in output)
    return {key: _merge_values(micro_batches, [output.get(key) for output in outputs]) for key in keys}


def _merge_values(micro_batches: MicroBatches, values: list[Any]) -> Any:
    rows = [len(slots) for slots in micro_batches.slot_maps[: len(values)]]
    if all(isinstance(value, Tensor) and value.ndim > 0 for value in values):
        per_row = all(value.shape[0] == n for value, n in zip(values, rows, strict=True))
        if per_row and len({value.shape[1:] for value in values}) == 1:
            return micro_batches.restore_rows(values)
    elif all(isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point() for value in values):
        return _weighted_sum(torch.stack(values), micro_batches.shares[: len(values)])
    elif all(isinstance(value, list) and len(value) == n for value, n in zip(values, rows, strict=True)):
        order = [int(row) for slots in micro_batches.slot_maps[: len(values)] for row in slots.rows]
        by_row = dict(zip(order, [item for value in values for item in value], strict=True))
        return [by_row[row] for row in sorted(by_row)]
    return values


class MetricGuard:
    """Keeps torchmetrics objects as they are while a dummy micro-batch runs: its row has been counted already."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._saved: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        # States are plain attributes, updated in place or rebound; lists of tensors are only appended to.
        self._saved = [{name: _kept(value) for name, value in vars(metric).items()} for metric in self._metrics]

    def __exit__(self, *_: object) -> None:
        for metric, saved in zip(self._metrics, self._saved, strict=True):
            vars(metric).update(saved)


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
