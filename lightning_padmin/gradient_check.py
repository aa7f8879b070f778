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
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightning_padmin.config import PadMinConfig
from lightning_padmin.distributed import Exchange, exchange_alone, raise_together
from lightning_padmin.errors import GradientCheckError, PadMinError
from lightning_padmin.fields import Schema
from lightning_padmin.gradient_passes import LocalPasses, LossFunction, Passes, ShardedPasses
from lightning_padmin.guards import has_experts
from lightning_padmin.pack_layout import PackStyle
from lightning_padmin.probe import (
    Ints,
    Probe,
    make_probe,
    masked_tokens_vary,
    probe_sizes,
    tells_reductions,
    whole_probe,
)
from lightning_padmin.rows import RowTable, measure
from lightning_padmin.sketch import Sketches, best_weights, combine

T = TypeVar("T")
Floats = NDArray[np.float64]
# Where half precision moves a token to another expert, gradients differ by a part, not by a multiple.
_MOST_FLIPPED = 0.5
_LIMIT, _HALF_LIMIT = 1e-3, 0.1
_HALF = {torch.float16, torch.bfloat16}
_REDUCTIONS = ("token-mean", "row-mean", "sum")


class _Status(IntEnum):
    EXACT = 0
    ROLLED = 1
    RANDOM = 2
    NO_GRADIENT = 3
    ROUTING = 4
    # From here on training would change.
    PROMPTS = 5
    DECLARATION = 6
    WEIGHTS = 7
    COUPLED = 8


@dataclass(frozen=True)
class _Verdict:
    """What this rank found: the status, matching declarations as bits, the difference, and its parameter."""

    status: _Status
    matching: int
    difference: float
    parameter: str


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
    is_sharded: bool = False,
    packs: PackStyle | None = None,
    holders: Sequence[object] = (),
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
        is_sharded: whether parameters are sharded over ranks (FSDP), so that passes are collective.
        packs: what packs have, where rows are packed and not padded.
        holders: objects that `loss_fn` may write into besides, a Trainer's subclass say. They are left as they were.
        more_than_told: run only if these rows tell a token mean from a row mean, since earlier ones did not.

    Returns:
        The outcome, or None where a rank has no two rows that carry loss (another batch may do), or where this batch
        would tell no more than an earlier one.

    Raises:
        GradientCheckError: training would change; on all ranks, with the same message.
        Exception: what the training step raised; the other ranks raise PeerError.
    """
    dtypes = {p.dtype for p in module.parameters()}
    limit = tolerance if tolerance is not None else _HALF_LIMIT if dtypes & _HALF else _LIMIT
    probe = _agreed_probe(batch, schema, table, config, exchange, limit, joint is not None, more_than_told, packs)
    if probe is None:
        return None
    arguments = (loss_fn, batch, schema, module, probe, joint, holders)
    passes = ShardedPasses(*arguments, exchange=exchange) if is_sharded else LocalPasses(*arguments)
    try:
        check = _Check(passes, batch, schema, table, config, module, probe, exchange, limit, joint is not None)
        check.is_packed = packs is not None
        return check.outcome()
    finally:
        passes.restore()


def _agreed_probe(
    batch: Any,
    schema: Schema,
    table: RowTable,
    config: PadMinConfig,
    exchange: Exchange,
    limit: float,
    is_joint: bool,
    more_than_told: bool,
    packs: PackStyle | None,
) -> Probe | None:
    """A probe of equally many rows on all ranks, or None on all."""
    if is_joint:  # coupled losses may need their whole batch, and it is what training is going to run
        return whole_probe(schema, table, config)
    possible, telling = probe_sizes(table, config, limit)
    telling = possible if packs is not None else telling  # the reduction is not what is asked
    agreed = exchange([sum(1 << n for n in possible), sum(1 << n for n in telling)])
    everywhere, somewhere = int(np.bitwise_and.reduce(agreed[:, 0])), int(np.bitwise_or.reduce(agreed[:, 1]))
    if everywhere == 0 or (more_than_told and not everywhere & somewhere):
        return None
    best = everywhere & somewhere or everywhere
    return make_probe(batch, schema, table, config, best.bit_length() - 1, packs)


class _Check:
    """One check, in step with the other ranks."""

    def __init__(
        self,
        passes: Passes,
        batch: Any,
        schema: Schema,
        table: RowTable,
        config: PadMinConfig,
        module: nn.Module,
        probe: Probe,
        exchange: Exchange,
        limit: float,
        is_joint: bool,
    ) -> None:
        self._passes, self._batch, self._schema, self._table = passes, batch, schema, table
        self._config, self._module, self._probe, self._limit = config, module, probe, limit
        self._exchange, self._is_joint = exchange, is_joint
        self.is_packed = False

    def outcome(self) -> Outcome:
        passes = self._passes
        weights = [] if self._is_joint else _weights(self._table, self._probe.groups, self._config.loss_reduction)
        came, found = self._together(lambda: (passes.came(), passes.split(weights)))
        if self._any(passes.saw_half):
            self._limit = max(self._limit, _HALF_LIMIT)
        size = passes.largest(came)
        value, parameter = passes.difference(found, came, self._limit)
        judged = _Verdict(_Status.EXACT, 0, value, parameter)
        differs = not value <= self._limit
        if not 0 < size < np.inf:
            judged, differs = replace(judged, status=_Status.NO_GRADIENT), False
        # A training step may hold collectives of its own, so all ranks run a further pass if one needs it.
        if self._any(differs):
            whole = self._together(passes.whole) if self._any(not self._same_layout) else came
            judged = self._together(lambda: self._judge(found, whole, judged) if differs else judged)
        if self._any(judged.status >= _Status.PROMPTS):
            again = self._together(passes.came)
            repeats = passes.difference(again, came, self._limit)[0] <= self._limit
            if judged.status >= _Status.PROMPTS and not repeats:
                judged = replace(judged, status=_Status.RANDOM)
        return self._agree(judged)

    def _any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        return bool((self._exchange([int(flag)])[:, 0] != 0).any())

    @property
    def _same_layout(self) -> bool:
        came, whole = self._probe.came, self._probe.whole
        return came.widths == whole.widths and bool((came.start == whole.start).all())

    def _together(self, passes: Callable[[], T]) -> T:
        """Runs passes of the user's code; raises on all ranks if it raises on one."""
        error: Exception | None = None
        result: Any = None
        try:
            result = passes()
        except Exception as caught:
            error = caught
            if self.is_packed:
                error.add_note("Rows were packed (layout='pack'): the mask is None, and there is one row of documents.")
            error.add_note(
                f"Raised by the first-batch check, which runs the training step on {len(self._probe.rows)} rows of the "
                "batch. "
                + ("" if self._is_joint else "A step that cannot run on a part of a batch cannot be split. ")
                + "check='off' leaves the check out"
            )
        code = 0 if error is None else error.code if isinstance(error, PadMinError) else PadMinError.code
        raise_together(error, self._exchange([code])[:, 0])
        return cast("T", result)

    def _judge(self, found: Sketches, whole: Sketches, judged: _Verdict) -> _Verdict:
        """What lies behind a difference. Sharded passes come to the same branch on all ranks."""
        from_roll, where = self._passes.difference(found, whole, self._limit)
        if from_roll <= self._limit:
            masked = masked_tokens_vary(self._batch, self._schema, self._table, self._probe.rows)
            return replace(judged, status=_Status.PROMPTS if masked else _Status.ROLLED)
        verdict = _Verdict(_Status.COUPLED, 0, from_roll, where)
        if not self._is_joint and np.isfinite(from_roll):
            matching = self._matching(whole)
            if matching:
                return replace(verdict, status=_Status.DECLARATION, matching=matching)
            parts = self._passes.parts
            if parts:
                fitted = combine(parts, best_weights(parts, whole))
                if self._passes.difference(fitted, whole, self._limit)[0] <= self._limit:
                    return replace(verdict, status=_Status.WEIGHTS)
        # Only now: what matches to the limit was not disturbed by random numbers.
        if self._passes.drew:
            return replace(verdict, status=_Status.RANDOM)
        flips = self._limit >= _HALF_LIMIT and from_roll <= _MOST_FLIPPED and has_experts(self._module)
        return replace(verdict, status=_Status.ROUTING) if flips else verdict

    def _matching(self, whole: Sketches) -> int:
        """The declarations, as bits, under which the groups make up the whole as closely as any does."""
        differences: dict[int, float] = {}
        tried: list[Floats] = []
        for index, changes in enumerate(_declarations(self._config, self._schema)):
            weights, shares = self._weights_if(changes)
            # Declarations that give every row of the batch the same weight are one; the simplest is named.
            known = weights is not None and any(np.allclose(shares, each, rtol=1e-9) for each in tried)
            if self._passes.parts is None and self._any(weights is None or known):
                continue
            if weights is not None and not known:
                tried.append(shares)
                split = self._passes.split(weights)
                differences[index] = self._passes.difference(split, whole, self._limit)[0]
        best = min(differences.values(), default=np.inf)
        if not best <= self._limit:
            return 0
        # What is as close as rounding lets anything be cannot be told apart on these rows.
        return sum(1 << index for index, value in differences.items() if value <= max(2 * best, 0.02 * self._limit))

    def _weights_if(self, changes: dict[str, Any]) -> tuple[list[float] | None, Floats]:
        """Weights of the groups, and of all rows, under another declaration; None where it does not fit the batch."""
        nothing: Floats = np.empty(0)
        try:
            table = _measured(self._batch, self._schema, self._config, changes)
        except PadMinError:
            return None, nothing
        reduction = changes.get("loss_reduction", self._config.loss_reduction)
        if reduction != "sum" and not table.weight[self._probe.rows].sum() > 0:
            return None, nothing
        shares = np.ones(len(table)) if reduction == "sum" else table.weight / table.weight.sum()
        return _weights(table, self._probe.groups, reduction), shares

    def _agree(self, judged: _Verdict) -> Outcome:
        names = [name for name, p in self._module.named_parameters() if p.requires_grad]
        bits = int(np.float64(judged.difference).view(np.int64))
        tells = self._is_joint or self.is_packed or tells_reductions(self._table, self._probe.groups, self._limit)
        place = names.index(judged.parameter) if judged.parameter in names else 0
        table = self._exchange([int(judged.status), judged.matching, bits, place, int(tells)])
        worst = int(table[:, 0].argmax())
        if table[worst, 0] == _Status.EXACT:
            worst = int(table[:, 2].view(np.float64).argmax())
        status = _Status(int(table[worst, 0]))
        value = float(table[worst : worst + 1, 2].view(np.float64)[0])
        place = int(table[worst, 3])
        words = self._words(status, int(table[worst, 1]), value, names[place] if place < len(names) else "")
        if status >= _Status.PROMPTS:
            rank = f" (rank {worst})" if len(table) > 1 else ""
            raise GradientCheckError(f"first-batch check{rank}: {words}")
        told = status in (_Status.EXACT, _Status.ROLLED)
        untellable = status in (_Status.RANDOM, _Status.ROUTING)
        final = untellable or (told and bool(table[:, 4].any()))
        return Outcome(value, told, final, untellable or status is _Status.ROLLED, words)

    def _words(self, status: _Status, matching: int, value: float, parameter: str) -> str:
        n, way = len(self._probe.rows), "split" if not self._is_joint else "joint"
        differs = (
            f"{way} gradients of {n} rows differ from the un-split ones: relative difference {value:.2g} (limit "
            f"{self._limit:.0e}), most in {parameter!r}. "
        )
        if self.is_packed:
            differs += (
                "Rows were packed (layout='pack'): the step must hand batch['position_ids'] and use_cache=False on to "
                "the model, as model(**batch) does, and must not need the mask, which is None. "
            )
        if status is _Status.EXACT:
            return f"{way} gradients of {n} rows are the un-split ones (relative difference {value:.1e})"
        if status is _Status.ROLLED:
            lost = "labels on first tokens of left-padded rows are gone, or " if self._table.lost_targets else ""
            return (
                f"rolling left padding changes gradients (relative difference {value:.2g}): {lost}this model reads "
                "padding, or counts positions by column. Rolled, each row is trained as it is without padding"
            )
        if status is _Status.RANDOM:
            return (
                f"{differs}The training step draws random numbers outside of dropout, so whether the split is exact "
                "cannot be told: make sure of it with a deterministic step, or set check='off'"
            )
        if status is _Status.ROUTING:
            return (
                f"{differs}In half precision that can be tokens which rounding sends to other experts. Whether the "
                "split is exact cannot be told: run the first steps in float32 once"
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
            candidates = enumerate(_declarations(self._config, self._schema))
            choices = " or ".join(_options(changes) for index, changes in candidates if matching >> index & 1)
            told = "" if " or " not in choices else " (these rows do not tell which)"
            return f"{differs}{_declared(self._config)} is not what the training step does: set {choices}{told}"
        if status is _Status.WEIGHTS:
            return (
                f"{differs}The loss weighs rows in another way than {_declared(self._config)} says. If the batch tells "
                "their weights, give loss_reduction=function of the batch that returns them, (rows,), or a "
                "loss_mask_key. If the model's outputs do (a softmax over rows), the loss couples rows: mode='joint'"
            )
        couples = f"{differs}No weights of the micro-batches would match: the loss or the model couples rows "
        if self._is_joint:
            return f"{couples}inside of the model, or returns what cannot be chunked: use enabled=False"
        return (
            f"{couples}(in-batch negatives, a quantile over the batch, a balance loss of experts), or reads padding. "
            "Run the model in chunks with mode='joint', or use enabled=False"
        )


def _weights(table: RowTable, groups: Sequence[Ints], reduction: object) -> list[float]:
    """Weight of each group's loss among the groups, as `MicroBatcher` gives it."""
    if reduction == "sum":
        return [1.0] * len(groups)
    own = [float(table.weight[group].sum()) for group in groups]
    return [weight / sum(own) for weight in own]


def _declarations(config: PadMinConfig, schema: Schema) -> Iterator[dict[str, Any]]:
    """Other declarations to try: changed options, simplest first."""
    shifts = [{}] if schema.labels is None else [{}, {"label_shift": 0}, {"label_shift": 1}]
    for shift in shifts:
        for reduction in _REDUCTIONS:
            changes = {"loss_reduction": reduction} if reduction != config.loss_reduction else {}
            if changes or shift:
                yield changes | shift
    if config.loss_mask_key is not None:
        yield {"loss_reduction": "token-mean", "loss_mask_key": None}
    elif len(schema.widths) == 1 or schema.decoder_mask is not None:  # else labels say where rows end
        # Labels would select among the tokens of a loss mask.
        without = {} if schema.labels is None else {"labels_key": None}
        yield {"loss_reduction": "token-mean", **without, "loss_mask_key": schema.mask}


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
