"""The first-batch check: are the gradients of the declared way to split those of the batch as it came?

A wrong `loss_reduction` is nearly invisible in the loss and far off in the gradient. So a few short and long rows of
the first batch go through the user's own training step, un-split and split, before anything is trained: two small
passes, a third one if they differ. Gradients are compared as sketches (see `sketch`), which are linear: which
weights would have matched is found out without another pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_padmin.config import PadMinConfig
from lightning_padmin.distributed import Exchange, exchange_alone, raise_together
from lightning_padmin.errors import GradientCheckError, PadMinError
from lightning_padmin.fields import Schema
from lightning_padmin.isolation import NoDropout, random_states, same_random_states, untouched
from lightning_padmin.layout import SlotMap, pad_layout, take_batch
from lightning_padmin.rows import RowTable, measure
from lightning_padmin.sketch import Sketches, best_weights, combine, difference, largest, sketched_gradients
from lightning_padmin.tree import iter_leaves, last_part

Ints = NDArray[np.int64]
LossFunction = Callable[[Any], Tensor]
_MOST_ROWS = 4
_NO_TOKENS = ("position_ids", "mask", "labels", "token_type_ids")
_REDUCTIONS = ("token-mean", "row-mean", "sum")


class _Status(IntEnum):
    EXACT = 0
    ROLLED = 1
    RANDOM = 2
    NO_GRADIENT = 3
    # From here on training would change.
    PROMPTS = 4
    DECLARATION = 5
    WEIGHTS = 6
    COUPLED = 7


@dataclass(frozen=True)
class Outcome:
    """What the check found, the same on all ranks.

    Attributes:
        difference: max |split - un-split| / max |un-split| over all gradients, of the rank where it is largest.
        told: whether it could be told; not so for a step that draws random numbers outside of dropout.
        final: whether another batch could tell no more. Rows of one length do not tell a token mean from a row mean.
        notable: whether the user should know.
        words: the finding as a sentence.
    """

    difference: float
    told: bool
    final: bool
    notable: bool
    words: str


@dataclass(frozen=True, eq=False)
class _Probe:
    """A few rows of a batch: as they came, rolled and trimmed, and in two groups."""

    rows: Ints
    groups: tuple[Ints, Ints]
    came: SlotMap
    whole: SlotMap
    parts: tuple[SlotMap, SlotMap]


def check_gradients(
    loss_fn: LossFunction,
    batch: Any,
    schema: Schema,
    table: RowTable,
    config: PadMinConfig,
    module: nn.Module,
    *,
    tolerance: float | None = None,
    exchange: Exchange = exchange_alone,
    joint: Callable[[], AbstractContextManager[Any]] | None = None,
    more_than_told: bool = False,
) -> Outcome | None:
    """Compares gradients of a few rows, split and as they came; on all ranks or on none.

    Args:
        loss_fn: the loss of a batch, as the training step takes it.
        batch: a batch; it is only read.
        schema: its schema.
        table: its row table.
        config: the declarations that are checked.
        module: the module whose parameters are trained. It is left as it was.
        tolerance: largest relative difference that counts as none; default by dtype, 1e-3 in float32, 0.1 in half
            precision.
        exchange: the collective.
        joint: a context in which `loss_fn` runs the model in chunks; then that is compared, not the split.
        more_than_told: run only if these rows tell a token mean from a row mean, since earlier ones did not.

    Returns:
        The outcome, or None where a rank has no two rows that carry loss (another batch may do), or where this batch
        would tell no more than an earlier one.

    Raises:
        GradientCheckError: training would change; on all ranks, with the same message.
        Exception: what the training step raised; the other ranks raise PeerError.
    """
    probe = _choose(batch, schema, table, config)
    dtype = next((p.dtype for p in module.parameters() if p.requires_grad), torch.float32)
    limit = tolerance if tolerance is not None else 0.1 if dtype in (torch.float16, torch.bfloat16) else 1e-3
    tells = probe is not None and (joint is not None or _tells_reductions(table, probe.groups, limit))
    agreed = exchange([int(probe is not None), int(tells)])
    if (agreed[:, 0] == 0).any() or (more_than_told and not agreed[:, 1].any()):
        return None
    assert probe is not None
    run = _Runner(loss_fn, batch, schema, table, config, module, probe, exchange, limit, joint)
    return run.outcome()


class _Runner:
    """The passes of one check, in step with the other ranks."""

    def __init__(
        self,
        loss_fn: LossFunction,
        batch: Any,
        schema: Schema,
        table: RowTable,
        config: PadMinConfig,
        module: nn.Module,
        probe: _Probe,
        exchange: Exchange,
        limit: float,
        joint: Callable[[], AbstractContextManager[Any]] | None,
    ) -> None:
        self._loss_fn, self._batch, self._schema, self._table = loss_fn, batch, schema, table
        self._config, self._module, self._probe, self._limit = config, module, probe, limit
        self._exchange, self._joint = exchange, joint
        self._drew = False

    def outcome(self) -> Outcome:
        came, parts = self._together(self._first_passes)
        weights = [1.0] if self._joint else _weights(self._table, self._probe.groups, self._config.loss_reduction)
        found = combine(parts, weights)
        value, parameter = difference(found, came)
        status, candidate, whole = _Status.EXACT, 0, came
        if not 0 < largest(came) < np.inf:
            status = _Status.NO_GRADIENT
        # A training step may hold collectives of its own, so all ranks run the third pass if one needs it.
        elif (self._exchange([int(not value <= self._limit)])[:, 0] != 0).any() and not self._same_layout:
            whole = self._together(lambda: self._sketch(self._probe.whole))
        if status is _Status.EXACT and not value <= self._limit:
            status, candidate, value, parameter = self._judge(found, parts, whole, value, parameter)
        return self._agree(status, candidate, value, parameter)

    @property
    def _same_layout(self) -> bool:
        came, whole = self._probe.came, self._probe.whole
        return came.widths == whole.widths and bool((came.start == whole.start).all())

    def _together(self, passes: Callable[[], Any]) -> Any:
        """Runs passes of the user's code; raises on all ranks if it raises on one."""
        error: Exception | None = None
        result = None
        try:
            result = passes()
        except Exception as caught:
            error = caught
            error.add_note(
                f"Raised by the first-batch check, which runs the training step on rows {self._probe.rows.tolist()} of "
                "the batch. A step that cannot run on a part of a batch cannot be split; check='off' leaves it out"
            )
        code = 0 if error is None else error.code if isinstance(error, PadMinError) else PadMinError.code
        raise_together(error, self._exchange([code])[:, 0])
        return result

    def _first_passes(self) -> tuple[Sketches, list[Sketches]]:
        came = self._sketch(self._probe.came)
        if self._joint is None:
            return came, [self._sketch(part) for part in self._probe.parts]
        with self._joint():
            return came, [self._sketch(self._probe.came)]

    def _sketch(self, slots: SlotMap) -> Sketches:
        batch = take_batch(self._batch, self._schema, slots)
        with untouched(self._module), NoDropout(), torch.compiler.set_stance("force_eager"):
            before = random_states()
            sketches = sketched_gradients(lambda: self._loss_fn(batch), self._module)
            self._drew = self._drew or not same_random_states(before, random_states())
        return sketches

    def _judge(
        self, found: Sketches, parts: Sequence[Sketches], whole: Sketches, value: float, parameter: str
    ) -> tuple[_Status, int, float, str]:
        """What lies behind a difference."""
        from_roll, where = difference(found, whole)
        if from_roll <= self._limit:
            masked = _masked_tokens_vary(self._batch, self._schema, self._table, self._probe.rows)
            return (_Status.PROMPTS if masked else _Status.ROLLED), 0, value, parameter
        if self._joint is None and np.isfinite(from_roll):
            matching = self._matching(parts, whole)
            if matching is not None:
                return _Status.DECLARATION, matching, from_roll, where
            fitted = combine(parts, best_weights(parts, whole))
            if difference(fitted, whole)[0] <= self._limit:
                return _Status.WEIGHTS, 0, from_roll, where
        # Only now: what matches to the limit was not disturbed by random numbers.
        return _Status.RANDOM if self._drew else _Status.COUPLED, 0, from_roll, where

    def _matching(self, parts: Sequence[Sketches], whole: Sketches) -> int | None:
        """Index of the declaration under which the parts make up the whole."""
        differences: dict[int, float] = {}
        for index, changes in enumerate(_declarations(self._config, self._schema)):
            try:
                table = _measured(self._batch, self._schema, self._config, changes)
            except PadMinError:
                continue
            reduction = changes.get("loss_reduction", self._config.loss_reduction)
            weights = _weights(table, self._probe.groups, reduction)
            differences[index] = difference(combine(parts, weights), whole)[0]
        best = min(differences, key=lambda index: differences[index], default=None)
        return best if best is not None and differences[best] <= self._limit else None

    def _agree(self, status: _Status, candidate: int, value: float, parameter: str) -> Outcome:
        names = [name for name, p in self._module.named_parameters() if p.requires_grad]
        bits = int(np.float64(value).view(np.int64))
        tells = self._joint is not None or _tells_reductions(self._table, self._probe.groups, self._limit)
        mine = [int(status), candidate, bits, names.index(parameter) if parameter else 0, int(tells)]
        table = self._exchange(mine)
        worst = int(table[:, 0].argmax())
        if table[worst, 0] == _Status.EXACT:
            worst = int(table[:, 2].view(np.float64).argmax())
        status = _Status(int(table[worst, 0]))
        value = float(table[worst : worst + 1, 2].view(np.float64)[0])
        words = self._words(status, int(table[worst, 1]), value, names[int(table[worst, 3])])
        if status >= _Status.PROMPTS:
            rank = f" (rank {worst})" if len(table) > 1 else ""
            raise GradientCheckError(f"first-batch check{rank}: {words}")
        told = status in (_Status.EXACT, _Status.ROLLED)
        final = status is _Status.RANDOM or (told and bool(table[:, 4].any()))
        return Outcome(value, told, final, status in (_Status.ROLLED, _Status.RANDOM), words)

    def _words(self, status: _Status, candidate: int, value: float, parameter: str) -> str:
        n, way = len(self._probe.rows), "split" if self._joint is None else "joint"
        differs = (
            f"{way} gradients of {n} rows differ from the un-split ones by {value:.2g} of the largest gradient (limit "
            f"{self._limit:.0e}), most in {parameter!r}. "
        )
        if status is _Status.EXACT:
            return f"{way} gradients of {n} rows are the un-split ones, within {value:.1e} of the largest gradient"
        if status is _Status.ROLLED:
            return (
                f"rolling left padding changes gradients by {value:.2g} of the largest: this model reads padding, or "
                "counts positions by column. Rolled, each row is trained as it is without padding"
            )
        if status is _Status.RANDOM:
            return (
                f"{differs}The training step draws random numbers outside of dropout, so whether the split is exact "
                "cannot be told: make sure of it with a deterministic step, or set check='off'"
            )
        if status is _Status.NO_GRADIENT:
            return f"gradients of {n} rows are zero or not finite un-split, so there is nothing to compare with"
        if status is _Status.PROMPTS:
            return (
                f"{differs}The roll makes the difference, and slots that {self._schema.mask!r} leaves out hold "
                "different tokens: it seems to leave out prompts, not padding. Give a mask of all real tokens "
                f"(mask_key), and keep what carries loss in {self._config.labels_key!r} or loss_mask_key"
            )
        if status is _Status.DECLARATION:
            changes = list(_declarations(self._config, self._schema))[candidate]
            return f"{differs}{_declared(self._config)} is not what the training step does: set {_options(changes)}"
        if status is _Status.WEIGHTS:
            return (
                f"{differs}The loss weighs rows in another way than {_declared(self._config)} says. If the batch tells "
                "their weights, give loss_reduction=function of the batch that returns them, (rows,), or a "
                "loss_mask_key. If the model's outputs do (a softmax over rows), the loss couples rows: mode='joint'"
            )
        couples = f"{differs}No weights of the micro-batches would match: the loss or the model couples rows "
        if self._joint is not None:
            return f"{couples}inside of the model, or returns what cannot be chunked: use enabled=False"
        return (
            f"{couples}(in-batch negatives, a quantile over the batch, a balance loss of experts), or reads padding. "
            "Run the model in chunks with mode='joint', or use enabled=False"
        )


def _choose(batch: Any, schema: Schema, table: RowTable, config: PadMinConfig) -> _Probe | None:
    """Up to four rows that carry loss, two with few and two with many loss tokens; None if there are no two."""
    budget = table.slots if config.token_budget is None else config.token_budget
    carries = table.weight > 0
    if table.counts_loss:
        carries &= table.loss_tokens > 0
    candidates = np.flatnonzero(carries)
    if len(candidates) < 2:
        return None
    tried = [_few_and_many(table, candidates, n, budget // n) for n in range(min(_MOST_ROWS, len(candidates)), 1, -1)]
    tried.append(_few_and_many(table, candidates, 2, None))
    found = [groups for groups in tried if groups is not None]
    many, few = groups = next((each for each in found if _tells_reductions(table, each, 0)), found[0])
    rows = np.sort(np.concatenate(groups))
    multiple, limits = config.pad_to_multiple_of, None if schema.can_widen else schema.widths
    parts = (pad_layout(table, many, multiple, limits), pad_layout(table, few, multiple, limits))
    whole = pad_layout(table, rows, multiple, limits)
    may_crop = multiple == 1 and not _masked_tokens_vary(batch, schema, table, rows)
    came = _as_it_came(table, rows, budget if may_crop else None)
    return _Probe(rows, (many, few), came, whole, parts)


def _few_and_many(table: RowTable, candidates: Ints, n: int, longest: int | None) -> tuple[Ints, Ints] | None:
    """The rows with most and those with fewest loss tokens, `n` together, none longer than `longest` (None: any)."""
    spans = table.length.sum(axis=1)
    if longest is None:
        candidates = candidates[np.argsort(spans[candidates], kind="stable")[:n]]
    else:
        candidates = candidates[spans[candidates] <= longest]
    if len(candidates) < n:
        return None
    order = candidates[np.lexsort((spans[candidates], table.loss_tokens[candidates]))]
    return order[len(order) - (n - n // 2) :], order[: n // 2]


def _as_it_came(table: RowTable, rows: Ints, budget: int | None) -> SlotMap:
    """The rows with their padding; columns that are padding in all of them are left out only to keep a budget."""
    start, end = table.start[rows], table.start[rows] + table.length[rows]
    first, widths = np.zeros(len(table.widths), dtype=np.int64), np.array(table.widths)
    if budget is not None and len(rows) * widths.sum() > budget:
        first, widths = start.min(axis=0), end.max(axis=0) - start.min(axis=0)
    starts, sizes = np.broadcast_to(first, start.shape).copy(), np.broadcast_to(widths, start.shape).copy()
    return SlotMap(rows, starts, sizes, tuple(map(int, widths)), table.widths, len(table), table.units)


def _weights(table: RowTable, groups: Sequence[Ints], reduction: object) -> list[float]:
    """Weight of each group's loss among the groups, as `MicroBatcher` gives it."""
    if reduction == "sum":
        return [1.0] * len(groups)
    own = [float(table.weight[group].sum()) for group in groups]
    return [weight / sum(own) for weight in own]


def _tells_reductions(table: RowTable, groups: Sequence[Ints], limit: float) -> bool:
    """Whether a token mean and a row mean differ on these groups by more than what may be rounding."""
    if not table.counts_loss:
        return True
    tokens = np.array([table.loss_tokens[group].sum() for group in groups], dtype=np.float64)
    rows = np.array([len(group) for group in groups], dtype=np.float64)
    return bool(np.abs(tokens / tokens.sum() - rows / rows.sum()).max() > max(0.02, 1.5 * limit))


def _declarations(config: PadMinConfig, schema: Schema) -> Iterator[dict[str, Any]]:
    """Other declarations to try: changed options, simplest first."""
    shifts = [{}] if schema.labels is None else [{}, {"label_shift": 0}, {"label_shift": 1}]
    for shift in shifts:
        for reduction in _REDUCTIONS:
            changes = {"loss_reduction": reduction} if reduction != config.loss_reduction else {}
            if changes or shift:
                yield changes | shift
    if config.loss_mask_key is None:
        yield {"loss_reduction": "token-mean", "loss_mask_key": schema.mask}
    else:
        yield {"loss_reduction": "token-mean", "loss_mask_key": None}


def _measured(batch: Any, schema: Schema, config: PadMinConfig, changes: dict[str, Any]) -> RowTable:
    if "loss_mask_key" in changes:
        mask = changes["loss_mask_key"]
        schema = replace(schema, loss_mask=mask, labels=schema.labels if mask is None else None)
    return measure(
        batch,
        schema,
        ignore_index=config.ignore_index,
        label_shift=changes.get("label_shift", config.label_shift),
        loss_reduction=changes.get("loss_reduction", config.loss_reduction),
    )


def _options(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())


def _declared(config: PadMinConfig) -> str:
    options = {"loss_reduction": config.loss_reduction, "label_shift": config.label_shift}
    return _options({name: value for name, value in options.items() if value is not None})


def _masked_tokens_vary(batch: Any, schema: Schema, table: RowTable, rows: Ints) -> bool:
    """Whether slots in front of rows hold more than one token, as prompts do and padding does not."""
    front = np.arange(table.widths[0]) < table.start[rows, :1]
    for path, leaf in iter_leaves(batch, schema.fields):
        field = schema.fields.get(path)
        is_tokens = field is not None and field.kind == "position" and field.row_dim == 0 and field.axis == "input"
        is_tokens = is_tokens and path not in (schema.mask, schema.labels, schema.loss_mask)
        is_tokens = is_tokens and not last_part(path).endswith(_NO_TOKENS)
        if is_tokens and isinstance(leaf, Tensor) and leaf.ndim == 2 and not leaf.is_floating_point():
            tokens = leaf[torch.as_tensor(rows, device=leaf.device)].cpu().numpy()[front]
            if len(np.unique(tokens)) > 1:
                return True
    return False
