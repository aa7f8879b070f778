"""Merging what K micro-batches log and return into what one batch would have logged and returned."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from lightning_padmin.errors import PadMinWarning
from lightning_padmin.microbatching import MicroBatches

_REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class LossNames:
    """Which logged names are the loss once more, as far as batches of several rows have told.

    In a micro-batch of one row whatever a step takes over rows (the largest loss of a row, their sum) equals the loss
    too, so that only others tell.
    """

    def __init__(self) -> None:
        self._told: dict[str, bool] = {}
        self._warned: set[str] = set()

    def tell(self, name: str, is_loss: bool) -> None:
        """What a batch of several rows with loss has shown; once not the loss, never the loss."""
        self._told[name] = is_loss and self._told.get(name, True)

    def is_loss(self, name: str, reduce_fx: str) -> bool:
        """Whether a value that equals the loss in micro-batches of one row each is the loss.

        Where nothing has told, it is taken for the loss, with a warning.
        """
        if name not in self._told and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{name!r} is logged with reduce_fx={reduce_fx!r} and equals the loss in micro-batches of one row "
                f"each: it merges over them as the loss does. If it is the {reduce_fx} over rows, set "
                f"log_reduce={{{name!r}: {reduce_fx!r}}}; log_reduce={{{name!r}: 'mean'}} says that it is the loss",
                PadMinWarning,
                stacklevel=5,
            )
        return self._told.get(name, True)


class LogRecorder:
    """Stands in for Lightning's `_ResultCollection.log` while the micro-batches of one batch run.

    Each call of `self.log` in `training_step` is kept, and replayed once at the end with the merged value, so that
    Lightning sees one call per batch as without splitting: `reduce_fx` mean -> the mean over micro-batches weighted
    as the loss is (`log_reduce` names other ways), sum -> sum, max and min likewise, an explicit `batch_size` -> sum. A
    value that equals the loss is merged as the loss under every `reduce_fx`, which then runs over batches. Parts of the
    loss that `on_before_backward` logs add up. Other values of other hooks, and torchmetrics objects, which accumulate
    by themselves, are replayed as they were last.
    """

    def __init__(
        self,
        micro_batches: MicroBatches,
        log_reduce: Mapping[str, str],
        accumulate: int,
        loss_names: LossNames | None = None,
    ) -> None:
        self._shares, self._loss = micro_batches.shares, LossMerge(micro_batches, accumulate)
        self._rows = np.array([len(slots) for slots in micro_batches.slot_maps], dtype=np.float64)
        self._real = len(micro_batches.plan)
        self._log_reduce, self._names = log_reduce, loss_names or LossNames()
        self._calls: dict[tuple[str, str, int], list[tuple[int, Any, dict[str, Any]]]] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._micro = 0

    @property
    def names(self) -> set[str]:
        """What training_step has logged."""
        return {name for fx, name, _ in self._calls if fx.split(".")[0] == "training_step"}

    @property
    def loss(self) -> LossMerge:
        """What knows the loss of each micro-batch."""
        return self._loss

    def begin(self, micro: int) -> None:
        """What is logged from here on belongs to micro-batch `micro`."""
        self._micro = micro
        self._seen = {}

    def add_loss(self, micro: int, loss: Tensor) -> None:
        """The loss of a micro-batch, already divided by the number of accumulated batches."""
        self._loss.add(micro, loss)

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
            elif fx.split(".")[0] == "on_before_backward":
                value = self._loss.total({index: v for index, v, _ in entries}, value)
            log(fx, name, value, **arguments)

    def _merge(self, name: str, entries: Sequence[tuple[int, Any, dict[str, Any]]]) -> Tensor:
        how = self._log_reduce.get(name)
        declared = how is not None
        if how is None:
            reduce_fx = entries[-1][2].get("reduce_fx", "mean")
            how = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        by_micro = {index: _wide(value) for index, value, _ in entries}
        if (not declared or how == "mean") and self._is_loss(name, how, {index: v for index, v, _ in entries}):
            return self._loss.merged(by_micro)
        values, micro = torch.stack(list(by_micro.values())), list(by_micro)
        if how == "last":
            return values[-1]
        if how in _REDUCTIONS:
            return _REDUCTIONS[how](values, 0)
        if how == "row-mean":
            factors = self._rows[micro] / self._rows[micro].sum()
        else:
            factors = self._shares[micro]
            if len(micro) < self._real and factors.sum() > 0:  # logged by some micro-batches only
                factors = factors / factors.sum()
        return _weighted_sum(values, factors)

    def _is_loss(self, name: str, how: str, values: Mapping[int, Tensor]) -> bool:
        """Whether to merge a value as the loss; not asked (it waits for the device) where that makes no difference."""
        if how not in _REDUCTIONS:
            may_differ = self._loss.has_own_factors or len(values) < self._real
            return may_differ and self._loss.equals(values)
        if not self._loss.equals(values):
            self._names.tell(name, False)
            return False
        if self._loss.has_several_rows(values):
            self._names.tell(name, True)
            return True
        return (how == "sum" and self._loss.is_sum) or self._names.is_loss(name, how)


class LossMerge:
    """The loss of each micro-batch of a batch, and what one batch makes of a value that equals it.

    Args:
        micro_batches: of the batch.
        accumulate: by how much the losses that are added are divided.
    """

    def __init__(self, micro_batches: MicroBatches, accumulate: int) -> None:
        self._micro_batches, self._accumulate = micro_batches, accumulate
        # Without loss tokens every weight is 0; what is logged is then a mean over rows.
        weights, shares = micro_batches.weights, micro_batches.shares
        self._factors = weights if weights.any() else shares
        self._losses: dict[int, Tensor] = {}

    def add(self, micro: int, loss: Tensor) -> None:
        """The loss of a micro-batch."""
        self._losses[micro] = loss.detach()

    @property
    def has_own_factors(self) -> bool:
        """Whether it merges in another way than other values."""
        return self._factors is not self._micro_batches.shares

    @property
    def is_sum(self) -> bool:
        """Whether the losses of micro-batches add up."""
        return bool((self._factors[: len(self._micro_batches.plan)] == 1).all())

    def equals(self, values: Mapping[int, Any]) -> bool:
        """Whether these, by micro-batch, are its loss as the step returned it, or as Lightning has divided it."""
        losses = [self._losses.get(k) for k in values]
        divisors = sorted({self._accumulate, 1}, reverse=True)
        return any(same_losses(list(values.values()), losses, by) for by in divisors)

    def total(self, values: Mapping[int, Any], last: Any) -> Any:
        """The sum of values that are the parts of the loss which are sent backward; `last` where they are not."""
        real = range(len(self._micro_batches.plan))
        if set(values) != set(real) or not all(k in self._losses for k in real):
            return last
        parts = [self._losses[k] * float(self._micro_batches.weights[k]) for k in real]
        if not same_losses(list(values.values()), [parts[k] for k in values]):
            return last
        numbers = [_number(value) for value in values.values()]
        total = _weighted_sum(torch.stack([_wide(number) for number in numbers]), np.ones(len(numbers)))
        return total.to(numbers[0].dtype) if isinstance(last, Tensor) else total.item()

    def has_several_rows(self, micro: Iterable[int]) -> bool:
        """Whether one of these has rows with loss of which a maximum or sum would not be the loss."""
        weight = self._micro_batches.table.weight
        carries = weight > 0 if weight.any() else np.ones(len(weight), dtype=bool)
        return any(int(carries[self._micro_batches.slot_maps[k].rows].sum()) > 1 for k in micro)

    def merged(self, values: Mapping[int, Tensor]) -> Tensor:
        """Of values that equal the loss; where some micro-batches gave none, by what the others lack."""
        real = range(len(self._micro_batches.plan))
        some = next(iter(values))
        scale = 1.0
        if len(values) < len(real) and not same_losses([values[some]], [self._losses[some]]):
            scale = float(self._accumulate)
        like = values[some]
        parts = [values[k] if k in values else (self._losses[k] * scale).to(like).view(like.shape) for k in real]
        return _weighted_sum(torch.stack(parts), self._factors[: len(parts)])


def same_losses(values: Sequence[Any], losses: Sequence[Tensor | None], divisor: int = 1) -> bool:
    """Whether values divided by `divisor` are these losses, up to the precision of the coarser dtype.

    `loss.item()` comes back in float32 when it is logged; a number of Python is as exact as the loss.
    """
    numbers = [_number(value) for value in values]
    present = [loss for loss in losses if loss is not None and loss.numel() == 1]
    if len(present) < len(numbers) or not all(
        isinstance(v, Tensor) and v.numel() == 1 and v.is_floating_point() for v in numbers
    ):
        return False
    dtype = max([each.dtype for each in (*numbers, *present)], key=lambda each: torch.finfo(each).eps)
    eps = torch.finfo(dtype).eps
    own, wanted = (torch.stack([v.to(present[0].device, dtype).reshape(()) for v in vs]) for vs in (numbers, present))
    return torch.allclose(own / divisor, wanted, rtol=(4 if eps < 1e-4 else 2) * eps, atol=0, equal_nan=True)


def _number(value: Any) -> Any:
    """Numbers of Python and numpy as tensors, whatever else as it is."""
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, float | np.floating) else value


def _wide(value: Tensor) -> Tensor:
    """At least float32, so that a mean of integers or of half precision is one."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def _weighted_sum(values: Tensor, factors: NDArray[np.float64]) -> Tensor:
    """(K, ...) values and (K,) factors; in float64 where there is one, so that a mean of equal values is that value."""
    exact = values if values.device.type == "mps" else values.double()
    shaped = exact.new_tensor(factors).view(-1, *[1] * (exact.ndim - 1))
    return (exact * shaped).sum(dim=0).to(values.dtype)


def merge_outputs(
    micro_batches: MicroBatches, outputs: Sequence[Mapping[str, Any]], loss: LossMerge | None = None
) -> dict[str, Any]:
    """One dictionary from those that `training_step` returned for each micro-batch that is no dummy.

    They come without "loss", and their tensors detached.

    Tensors (n_k, ...) with one slice per row, and lists with one entry per row, are put back in the batch's order as
    (B, ...); what equals the loss, also as a number, is merged as the loss; other scalars become the mean weighted as
    the loss is; anything else (for instance per-position outputs, whose widths differ) becomes the list of the
    micro-batches' values.
    """
    keys = dict.fromkeys(key for output in outputs for key in output)
    return {key: _merge_values(micro_batches, [output.get(key) for output in outputs], loss) for key in keys}


def _merge_values(micro_batches: MicroBatches, values: list[Any], loss: LossMerge | None) -> Any:
    rows = [len(slots) for slots in micro_batches.slot_maps[: len(values)]]
    if all(isinstance(value, Tensor) and value.ndim > 0 for value in values):
        per_row = all(value.shape[0] == n for value, n in zip(values, rows, strict=True))
        if per_row and len({value.shape[1:] for value in values}) == 1:
            return micro_batches.restore_rows(values)
    scalars = all(isinstance(value, Tensor) and value.ndim == 0 for value in values)
    may_differ = loss is not None and (loss.has_own_factors or not scalars)
    if loss is not None and may_differ and loss.equals(dict(enumerate(values))):
        numbers = [_number(value) for value in values]
        merged = loss.merged({k: _wide(number) for k, number in enumerate(numbers)})
        return merged.to(numbers[0].dtype) if isinstance(values[0], Tensor) else merged.item()
    if scalars and all(value.is_floating_point() for value in values):
        return _weighted_sum(torch.stack(values), micro_batches.shares[: len(values)])
    if all(isinstance(value, list) and len(value) == n for value, n in zip(values, rows, strict=True)):
        order = [int(row) for slots in micro_batches.slot_maps[: len(values)] for row in slots.rows]
        by_row = dict(zip(order, [item for value in values for item in value], strict=True))
        return [by_row[row] for row in sorted(by_row)]
    return values


class MetricGuard:
    """Keeps torchmetrics objects as they are, while a dummy micro-batch runs, say: its row has been counted already.

    Args:
        module: whose.
        results: what has been logged, by name, as Lightning keeps it.
    """

    def __init__(self, module: torch.nn.Module, results: dict[str, Any] | None = None) -> None:
        self._metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._results = {} if results is None else results
        self._saved: list[dict[str, Any]] = []
        self._logged: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> None:
        # States are plain attributes, updated in place or rebound; lists of tensors are only appended to.
        self._saved = [{name: _kept(value) for name, value in vars(metric).items()} for metric in self._metrics]
        logged = self._results.items()
        self._logged = {key: {name: _kept(value) for name, value in vars(each).items()} for key, each in logged}

    def __exit__(self, *_: object) -> None:
        for metric, saved in zip(self._metrics, self._saved, strict=True):
            vars(metric).update(saved)
        for key in set(self._results) - set(self._logged):
            del self._results[key]
        for key, saved in self._logged.items():
            vars(self._results[key]).update(saved)


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
