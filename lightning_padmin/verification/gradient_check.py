"""The check of one batch: are the gradients of the declared way to split those of the batch as it came?

A wrong `loss_reduction` is nearly invisible in the loss and far off in the gradient. So a few rows that tell go through
the user's own training step, un-split, split and one by one, before the batch is trained on, and once more in other
ways if they differ. When a batch is checked is not known here, see `ledger`. Gradients are compared as sketches (see
`sketch`), which are linear: which weights would have matched is found out without another pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_padmin.architectures import has_experts
from lightning_padmin.batch import AXES, RowTable, Schema, iter_leaves, map_leaves
from lightning_padmin.config import PadMinConfig
from lightning_padmin.distributed import Exchange, as_floats, as_integer, exchange_alone, together
from lightning_padmin.errors import GradientCheckError, PadMinError
from lightning_padmin.microbatching import PackStyle, SlotMap
from lightning_padmin.runtime import Draws
from lightning_padmin.verification.agreed_probe import agreed_first_labels, agreed_probe, halved
from lightning_padmin.verification.column_check import ColumnCheck
from lightning_padmin.verification.compare import Tolerance, dtypes_of
from lightning_padmin.verification.explain import (
    Advice,
    Status,
    declarations,
    group_weights,
    measured,
)
from lightning_padmin.verification.facets import Values, row_facets
from lightning_padmin.verification.noise import (
    is_doubtful,
    may_run_in_float32,
    measured_limit,
    narrowed_limit,
    rounded_otherwise,
)
from lightning_padmin.verification.padding import GRADIENTS, STILL, Heard, Logged, filled, moved
from lightning_padmin.verification.padding import named as named_values
from lightning_padmin.verification.passes import LocalPasses, LossFunction, Passes, ShardedPasses
from lightning_padmin.verification.probe import Probe, masked_tokens_vary, one_row, padded_row, rolled_rows
from lightning_padmin.verification.rows import Ints, Shown, tells_reductions
from lightning_padmin.verification.sketch import Sketches, best_weights, combine
from lightning_padmin.verification.words import Said, words_of
from lightning_padmin.verification.writes import (
    States,
    WriteSearch,
    advanced,
    as_integers,
    may_have_advanced,
    named,
    states,
    text_of,
)

T = TypeVar("T")
Floats = NDArray[np.float64]
_RAISED = "Raised by the first-batch check"
_SAME = 1e-5  # up to which two passes have computed in one dtype


@dataclass(frozen=True)
class _Verdict:
    """What this rank found: the status, matching declarations or entries as bits, the difference, its parameter."""

    status: Status
    matching: int
    difference: float
    parameter: str


@dataclass(frozen=True)
class Outcome:
    """What the check found, the same on all ranks.

    Attributes:
        difference: max |split - un-split| / max |un-split| over all gradients, of the rank where it is largest.
        told: whether it could be told; not so where gradients are zero, or where a joint step draws random numbers.
        final: whether another batch could tell no more. Rows of one length do not tell a token mean from a row mean.
        notable: whether the user should know.
        words: the finding as a sentence.
        tells_first: whether a loss that takes labels on first tokens, or does not, against the declaration would
            have been found.
        rows: which of the batch it has looked at; none: all.
        losses: keys of the kinds of loss that it has seen on this rank, see `fingerprint`.
        limit: up to which a difference counts as none.
    """

    difference: float
    told: bool
    final: bool
    notable: bool
    words: str
    tells_first: bool = False
    rows: tuple[int, ...] = field(default=(), compare=False)
    losses: frozenset[str] = field(default=frozenset(), compare=False)
    limit: float = 0.0


def check_gradients(
    loss_fn: LossFunction,
    batch: Any,
    schema: Schema,
    table: RowTable,
    config: PadMinConfig,
    module: nn.Module,
    *,
    tolerance: float | None = None,
    is_half: bool = False,
    may_stay_untold: bool = False,
    exchange: Exchange = exchange_alone,
    joint: Callable[[], AbstractContextManager[Any]] | None = None,
    more_than_told: bool = False,
    is_sharded: bool = False,
    packs: PackStyle | None = None,
    holders: Sequence[object] = (),
    first_labels: bool = False,
    subtracts_lost: bool = False,
    alone: Callable[[], AbstractContextManager[Any]] | None = None,
    logged: Logged | None = None,
    advice: Advice | None = None,
    wanted: Collection[str] = (),
    prefer: Sequence[int] | NDArray[np.int64] | None = None,
    values: Values | None = None,
    settled: bool = False,
    is_bounded: bool = False,
) -> Outcome | None:
    """Compares gradients of a few rows, split and as they came; on all ranks or on none.

    Args:
        loss_fn: the loss of a batch, as the training step takes it.
        batch: a batch; it is only read.
        schema: its schema.
        table: its row table.
        config: the declarations that are checked.
        module: the module whose parameters are trained. It is left as it was.
        tolerance: largest relative difference that counts as none; default 1e-3 in float32, and in half precision by
            what rounding makes of the batch (see `noise`), at most 0.1. Where weights are float32, autocast is left
            out if the step runs without it.
        may_stay_untold: no refusal of what cannot be told, since nothing is split then; it is asked for reductions,
            of which one row tells nothing.
        is_half: the step computes in half precision, which compiled code may hide.
        exchange: the collective.
        joint: a context in which `loss_fn` runs the model in chunks; then that is compared, not the split.
        is_sharded: whether parameters are sharded over ranks (FSDP), so that passes are collective.
        packs: what packs have, where rows are packed and not padded.
        holders: objects that `loss_fn` may write into besides, a Trainer's subclass say. They are left as they were.
        more_than_told: run only if these rows tell a token mean from a row mean, since earlier ones did not.
        first_labels: run only if rows tell whether the loss takes labels on first tokens, and with such rows.
        subtracts_lost: the loss is divided by a number from which labels on first tokens behind padding are subtracted,
            unless `label_shift=0` is declared.
        alone: as `joint`, with one row in each chunk.
        logged: what the last call of `loss_fn` has logged, by name; asked in joint mode, where it must not depend on
            outputs of padding.
        advice: what can be done instead, in the adapter's words.
        wanted: facets of rows (see `row_facets`) that are to be seen before others.
        prefer: rows to take where there is a choice.
        values: of entries of the batches before.
        settled: a check before this one has passed, and this rank's batch shows nothing new. Joint mode takes a pass
            less then, if that is so on all ranks.
        is_bounded: in joint mode a pass of the whole batch may be too large, so that rows are chosen within the budget.

    Returns:
        The outcome, or None where a rank has no two rows that carry loss (another batch may do), or where this batch
        would tell no more than an earlier one.

    Raises:
        GradientCheckError: training would change; on all ranks, with the same message.
        Exception: what the training step raised; the other ranks raise PeerError.
    """
    limit = tolerance if tolerance is not None else Tolerance.for_(dtypes_of(module), saw_half=is_half).limit
    if first_labels:
        probe = agreed_first_labels(batch, schema, table, config, exchange, limit, subtracts_lost)
    else:
        leaves = dict(iter_leaves(batch, schema.fields))
        facets = row_facets(leaves, schema, table, values) if joint is None or is_bounded else {}
        shown = Shown.of(facets, len(table), wanted, prefer)
        is_joint = joint is not None
        # In float32, where the check may leave autocast out, activations take twice the memory.
        room = halved(config, table) if is_half and not is_joint and may_run_in_float32(module) else config
        among = limit, is_joint, more_than_told, packs, shown, not may_stay_untold, is_bounded
        probe = agreed_probe(batch, schema, table, room, exchange, *among)
    if probe is None:
        return None
    heard = Heard(loss_fn, logged) if joint is not None else None
    arguments = (heard or loss_fn, batch, schema, module, probe, joint, holders)
    passes = ShardedPasses(*arguments, exchange=exchange) if is_sharded else LocalPasses(*arguments)
    try:
        check = _Check(passes, batch, schema, table, config, module, probe, exchange, limit, joint is not None)
        check.is_packed, check.subtracts_lost, check.alone = packs is not None, subtracts_lost, alone
        check.may_stay_untold = may_stay_untold
        if heard is not None and joint is not None:
            check.heard, check.filled, check.settled = heard, filled(joint), settled
        check.advice, check.measures = advice or Advice(), tolerance is None
        return check.outcome()
    finally:
        passes.restore()


def was_raised_in_check(error: BaseException) -> bool:
    """Whether the step itself has raised it on the few rows of a check, as steps may that need their whole batch."""
    is_other = isinstance(error, PadMinError | torch.OutOfMemoryError | MemoryError)
    return not is_other and is_from_check(error)


def is_from_check(error: BaseException) -> bool:
    """Whether it ended a pass of a check, whoever has raised it."""
    return any(note.startswith(_RAISED) for note in getattr(error, "__notes__", ()))


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
        self.is_packed = self.subtracts_lost = self._tells_first = self.may_stay_untold = False
        self._is_bent = False  # whether it makes a difference that weights go backward with the loss
        self.alone: Callable[[], AbstractContextManager[Any]] | None = None
        self.advice, self.measures = Advice(), False
        self.heard: Heard | None = None  # the loss, in joint mode
        self.filled: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._heard_names: list[str] = []
        self._came: Sketches = {}  # un-split gradients
        self.settled = False
        self._columns = ColumnCheck(passes, batch, schema, table, exchange)
        self._knows_rows = False  # whether rows were compared with themselves alone
        self._written = ""  # what the step writes once per call

    def outcome(self) -> Outcome:
        """Runs the passes, once more with fixed draws where a pass has drawn random numbers, and agrees."""
        judged = self._judged()
        coupled_inside = self._is_joint or self.is_packed
        asked = self._passes.drew and not (coupled_inside and judged.status in (Status.EXACT, Status.ROLLED))
        if self._any(asked):
            judged = self._with_fixed_draws(judged)
        return self._agree(self._of_writes(judged))

    def _with_fixed_draws(self, judged: _Verdict) -> _Verdict:
        """The same where random numbers are constants, and where they depend on the row alone.

        Only what differs then too is a difference; what cannot be compared then is as it was.
        """
        starts = self._table.start[:, 0]
        constant = Draws()
        self._passes.with_draws(constant, starts)
        found = self._judged()
        if found.status is not Status.NO_GRADIENT:
            judged = found
        by_row = [] if self._is_joint or self.is_packed else constant.by_row
        asked = bool(by_row) and found.status in (Status.EXACT, Status.ROLLED, Status.NO_GRADIENT)
        if self._any(asked):
            self._passes.with_draws(Draws(by_row), starts)
            found = self._judged()
            if found.status is not Status.NO_GRADIENT:
                judged = found
        return judged

    def _judged(self) -> _Verdict:
        passes = self._passes
        self._is_bent = self._tells_first = self._knows_rows = False
        weights = [] if self._is_joint else group_weights(self._table, self._probe.groups, self._config.loss_reduction)
        came = self._together(passes.came)
        of_came = {} if self.heard is None else self.heard.take()
        came = self._came = self._limited(came, weights)
        of_columns = None if self._is_joint or self.is_packed else self._columns(came, self._limit)
        if self._any(of_columns is not None):
            judged = _Verdict(Status.EXACT, 0, 0.0, "")
            judged = judged if of_columns is None else _Verdict(Status.COLUMNS, *of_columns)
            return self._if_it_repeats(judged, came)
        found = self._together(lambda: passes.split(weights))
        values = {} if self.heard is None else self.heard.take()
        size = passes.largest(came)
        value, parameter = self._difference(found, came)
        judged = _Verdict(Status.EXACT, 0, value, parameter)
        differs = not value <= self._limit
        if not 0 < size < np.inf:
            judged, differs = self._without_gradient(judged, size, passes.largest(found)), False
        if not self._is_joint and isinstance(passes, LocalPasses) and self._any(differs):
            # Weights that go backward with the loss: steps may bend gradients of hidden states on the way.
            weighed = self._together(lambda: passes.weighted(weights))
            value, parameter = passes.difference(weighed, came, self._limit)
            if differs:
                found, judged = weighed, _Verdict(Status.EXACT, 0, value, parameter)
            self._is_bent = self._any(differs and value <= self._limit)
            differs = differs and not value <= self._limit
        # A training step may hold collectives of its own, so all ranks run a further pass if one needs it.
        if self._any(differs):
            whole = self._together(passes.whole) if self._any(not self._same_layout) else came
            judged = self._together(lambda: self._judge(found, whole, judged) if differs else judged)
            judged = self._of_declarations(judged, whole)
            judged = self._explained(judged, found, whole)
        judged = self._of_outputs(judged, found, values, (came, of_came))
        judged = self._of_single_rows(judged, found)
        judged = self._without_padding(judged)
        self._tell_first(judged, found)
        if self.subtracts_lost and self._tells_first and judged.status is Status.EXACT and self._table.shift:
            # Nothing was lost, so nothing may be subtracted.
            judged = replace(judged, status=Status.DECLARATION, matching=self._shift_bits(0))
        return self._if_it_repeats(judged, came)

    def _of_writes(self, judged: _Verdict) -> _Verdict:
        """Whether the step writes something once per call that is put back before each pass."""
        if self._is_joint:
            return self._of_writes_in_chunks(judged)
        if self.is_packed or not self._any(bool(self._passes.left)):
            return judged
        search = WriteSearch(self._passes, self._probe.parts)
        self._together(search.twice)
        if self._any(search.is_open):
            self._together(search.from_elsewhere)
        if self._any(search.is_doubtful):
            self._together(search.once_more)
        # Other ranks may have more micro-batches, so that rows run once more here, with weight 0.
        if len(self._exchange([0])) == 1 and search.found:
            self._together(lambda: search.in_parts(self._limit))
        self._written = named(search.found)
        return replace(judged, status=Status.WRITES) if search.found else judged

    def _of_writes_in_chunks(self, judged: _Verdict) -> _Verdict:
        """Joint mode: whether a call of the model writes something that is another one after several chunks."""
        passes = self._passes
        whole, by_chunks = passes.left or {}, passes.left_by_chunks or {}
        if not self._any(not passes.drew and bool(may_have_advanced(whole, by_chunks))):
            return judged
        after: list[States] = []
        look = lambda k, state: after.append(states(state.changes()) if k else {})  # noqa: E731
        self._together(lambda: passes.in_turn([self._probe.came] * 2, look))
        found = [] if passes.drew else advanced(whole, by_chunks, after[2])
        self._written = named(found)
        return replace(judged, status=Status.WRITES) if found else judged

    def _limited(self, came: Sketches, weights: Sequence[float]) -> Sketches:
        """Sets the limit. Returns un-split gradients to go on with: of passes in float32, if those can be had."""
        passes, tolerance = self._passes, Tolerance(self._limit)
        is_half = self._any(passes.saw_half or tolerance.is_half)
        self._limit = tolerance.if_half(is_half).limit
        if not (is_half and self.measures):
            return came
        exact = self._in_float32(came, weights)
        if exact is not None:
            self._limit = Tolerance.for_(()).limit
            return exact
        if not self._any(has_experts(self._module)):  # what rounding does to routes is not in this spread
            again = self._together(lambda: rounded_otherwise(passes))
            spread = passes.difference(again, came, self._limit)[0]
            self._limit = measured_limit(spread, self._limit, self._exchange)
        return came

    def _difference(self, found: Sketches, wanted: Sketches) -> tuple[float, str]:
        """See `Passes.difference`; where it lies between rounding and the limit, by a limit that is measured first."""
        apart = self._passes.difference(found, wanted, self._limit)
        return self._passes.difference(found, wanted, self._limit) if self._narrows(apart[0]) else apart

    def _narrows(self, value: float = 0.0) -> bool:
        """Whether the limit has been measured, since a difference on some rank, this one's is `value`, asks for it."""
        asked = self.measures and not has_experts(self._module) and is_doubtful(value, Tolerance(self._limit))
        if not self._any(asked):
            return False
        again = self._together(lambda: rounded_otherwise(self._passes))
        spread = self._passes.difference(again, self._came, self._limit)[0]
        self._limit = narrowed_limit(spread, self._limit, self._exchange)
        return True

    def _in_float32(self, came: Sketches, weights: Sequence[float]) -> Sketches | None:
        """Un-split gradients without autocast, and so will be those of all further passes; None if they stay half.

        Only where half precision, which training runs in, has shown nothing by its own limit.
        """
        passes, twice = self._passes, 2 * self._probe.came.slots  # activations take twice the memory
        budget = self._table.slots if self._config.token_budget is None else self._config.token_budget
        may = isinstance(passes, LocalPasses) and not self._is_joint and twice <= budget
        if self._any(not (may and may_run_in_float32(self._module))):
            return None
        try:
            halves = passes.split(weights)
        except Exception:  # to be raised where it can be explained
            halves = None
        if self._any(halves is None or not passes.difference(halves, came, self._limit)[0] <= self._limit):
            return None
        parts, passes.parts = passes.parts, None
        passes.in_float32, passes.saw_half, exact = True, False, None
        try:
            exact = passes.came()
        except Exception:  # kernels that are there in half precision alone, memory
            passes.saw_half = True
        # Alike: something else decides about the dtype. Far apart: in float32 another path is taken.
        apart = np.inf if exact is None else passes.difference(exact, came, self._limit)[0]
        if self._any(passes.saw_half or not _SAME < apart <= self._limit):
            passes.in_float32, passes.parts, exact = False, parts, None
        return exact

    def _without_gradient(self, judged: _Verdict, size: float, of_split: float) -> _Verdict:
        """Un-split gradients are zero or not finite: nothing to compare with, unless split ones are there."""
        if size == 0 and self._limit / 100 < of_split and np.isfinite(of_split) and not self._passes.drew:
            return replace(judged, status=Status.COUPLED, difference=np.inf)
        return replace(judged, status=Status.NO_GRADIENT)

    def _if_it_repeats(self, judged: _Verdict, came: Sketches) -> _Verdict:
        """A refusal only where un-split gradients are the same once more."""
        if self._any(judged.status >= Status.PROMPTS):
            again = self._together(self._passes.came)
            repeats = self._passes.difference(again, came, self._limit)[0] <= self._limit
            if judged.status >= Status.PROMPTS and not repeats:
                judged = replace(judged, status=Status.RANDOM)
        return judged

    def _explained(self, judged: _Verdict, found: Sketches, whole: Sketches) -> _Verdict:
        """What the roll changed: numbers of columns, labels on first tokens, or rows that are now as they are alone."""
        if self.subtracts_lost and self._any(judged.status is Status.ROLLED and not self._table.shift):
            judged = self._of_lost_labels(judged, whole)
        if judged.status is Status.ROLLED and self._columns.alternatives:
            judged = replace(judged, status=Status.COLUMNS)
        if not self._any(judged.status is Status.ROLLED):
            return judged
        if not self._is_joint:
            alone, wanted = self._together(self._rows_alone), whole
        elif self.alone is not None:
            alone, wanted = self._together(self._rows_in_chunks), found
        else:
            return judged
        self._knows_rows = True
        value, where = self._passes.difference(wanted, alone, self._limit)
        if judged.status is Status.ROLLED and not value <= self._limit:
            # Where a row with padding behind it is another one, `_without_padding` says so.
            status = Status.PADDING if self._is_joint else Status.COUPLED
            return replace(judged, status=status, difference=value, parameter=where)
        return judged

    def _rows_alone(self) -> Sketches:
        """Of the finest partition, as training would weigh its parts."""
        return self._of_groups(self._probe.alone)

    def _of_groups(self, groups: Sequence[Ints]) -> Sketches:
        weights = group_weights(self._table, groups, self._config.loss_reduction)
        return self._passes.of([self._rolled(each) for each in groups], weights)

    def _rolled(self, rows: Ints) -> SlotMap:
        return rolled_rows(self._schema, self._table, rows, self._config)

    def _of_declarations(self, judged: _Verdict, whole: Sketches) -> _Verdict:
        """Declarations that fit each row alone, as they fit the groups; where none does, rows are coupled."""
        asked = judged.status is Status.DECLARATION
        if not isinstance(self._passes, LocalPasses) or not self._any(asked):
            return judged
        groups = self._probe.alone
        try:
            alone = [self._passes.of([self._rolled(each)]) for each in groups]
        except Exception:  # what cannot run on one row may run on two
            return judged
        if not asked or self._passes.drew or not all(self._passes.largest(each) < np.inf for each in alone):
            return judged
        fitting = 0
        for index, changes in enumerate(declarations(self._config, self._schema)):
            weights = self._weights_if(changes, groups)[0] if judged.matching >> index & 1 else None
            if weights and self._passes.difference(combine(alone, weights), whole, self._limit)[0] <= self._limit:
                fitting |= 1 << index
        return replace(judged, matching=fitting) if fitting else replace(judged, status=Status.COUPLED)

    @property
    def _has_padding(self) -> bool:
        return bool((self._table.length < self._table.widths).any())

    def _of_outputs(
        self,
        judged: _Verdict,
        found: Sketches,
        values: Mapping[str, Tensor],
        un_split: tuple[Sketches, Mapping[str, Tensor]],
    ) -> _Verdict:
        """Joint mode: whether loss, gradients or logged values move with what stands in slots of padding.

        What the un-split model leaves there is one filling. Where another one was tried on batches like this before,
        it is enough that nothing has moved from that to zeros.
        """
        if self.heard is None or not self._any(self._has_padding):
            return judged
        if not self._any(not self.settled):
            came, of_came = un_split
            apart_from_stock = self._passes.difference(found, came, self._limit)[0]  # on all ranks
            if not self._any(bool(moved(values, of_came)) or not apart_from_stock <= STILL):
                return judged
        apart, where = self._moved(self.filled, found, values)
        if self._any(bool(apart)):
            anyway, _ = self._moved(None, found, values)
            apart = {name: value for name, value in apart.items() if name not in anyway}  # what moves by itself is left
        self._heard_names = named_values(values)
        if not apart:
            return judged
        matching = sum(1 << k for k, name in enumerate(self._heard_names) if name in apart)
        return _Verdict(Status.OUTPUTS, matching, max(apart.values()), where)

    def _moved(
        self, within: Callable[[], AbstractContextManager[Any]] | None, found: Sketches, values: Mapping[str, Tensor]
    ) -> tuple[dict[str, float], str]:
        """By how much each value is apart in another joint pass, where it is, and the parameter that is most."""
        passes, heard = self._passes, self.heard
        assert heard is not None
        again = self._together(lambda: passes.split([]) if within is None else passes.through(within))
        apart = moved(heard.take(), values)
        value, where = passes.difference(again, found, self._limit)
        return apart | ({} if value <= STILL else {GRADIENTS: value}), where

    def _of_single_rows(self, judged: _Verdict, found: Sketches) -> _Verdict:
        """Whether rows alone make up what groups of them do; where a row alone cannot run, two other groups.

        A loss that leaves a part of the batch out (its largest losses, say) may by chance take as many from each group,
        and rows that it compares may be in one.
        """
        asked = not self._is_joint and not self.is_packed
        is_local = isinstance(self._passes, LocalPasses)
        several = any(len(group) > 1 for group in self._probe.groups)
        if not (asked and self._any(several and judged.status is Status.EXACT)):
            return judged
        parts: list[Sketches] | None = None
        if is_local:
            try:
                parts = self._weighed(self._probe.alone)
            except Exception:  # what cannot run on one row may run on two
                parts = None
        if self._any(parts is None) and not self._any(not self._probe.second):
            other = self._together(lambda: self._of_groups(self._probe.second))
            parts = [other] if parts is None else parts
        if judged.status is not Status.EXACT or parts is None or self._passes.drew:
            self._narrows()
            return judged
        value, where = self._difference(combine(parts, [1.0] * len(parts)), found)
        if value <= self._limit:
            self._knows_rows = self._knows_rows or (is_local and len(parts) > 1)
            return judged
        status = Status.COUPLED
        if Tolerance(self._limit).may_be_flips(value) and has_experts(self._module):
            status = Status.ROUTING
        elif is_local and len(parts) > 1 and np.isfinite(value):
            fitted = combine(parts, best_weights(parts, found))
            if self._passes.difference(fitted, found, self._limit)[0] <= self._limit:
                status = Status.WEIGHTS
        return replace(judged, status=status, difference=value, parameter=where)

    def _weighed(self, groups: Sequence[Ints]) -> list[Sketches]:
        """Of each group, its loss times its weight."""
        weights = group_weights(self._table, groups, self._config.loss_reduction)
        return [self._passes.of([self._rolled(each)], [w]) for each, w in zip(groups, weights, strict=True)]

    def _rows_in_chunks(self) -> Sketches:
        assert self.alone is not None
        return self._passes.through(self.alone)

    def _of_lost_labels(self, judged: _Verdict, whole: Sketches) -> _Verdict:
        """Whether labels on first tokens are what the roll took, though the declaration says that none is lost."""
        without = self._together(lambda: self._passes.reading(self._without_first_labels(), self._schema, came=True))
        lost = bool(self._table.behind[self._probe.rows].any())
        same = self._passes.difference(without, whole, self._limit)[0] <= self._limit
        if judged.status is Status.ROLLED and lost and same:
            return replace(judged, status=Status.DECLARATION, matching=self._shift_bits(1))
        return judged

    def _without_first_labels(self) -> Any:
        rows = np.flatnonzero(self._table.behind)
        column = self._table.start[rows, AXES.index(self._schema.labels_axis)]

        def change(path: str, leaf: Any) -> Any:
            if path != self._schema.labels:
                return leaf
            leaf = leaf.clone()
            index = (torch.as_tensor(each, device=leaf.device) for each in (rows, column))
            leaf[tuple(index)] = self._config.ignore_index
            return leaf

        return map_leaves(self._batch, change, self._schema.fields)

    def _shift_bits(self, shift: int) -> int:
        """The declaration that only changes the shift, as a bit."""
        tried = enumerate(declarations(self._config, self._schema))
        return sum(1 << index for index, changes in tried if changes == {"label_shift": shift})

    def _without_padding(self, judged: _Verdict) -> _Verdict:
        """Whether a row is the same with its padding behind it and without, where nothing else has shown it."""
        open_ = judged.status in (Status.ROLLED, Status.COUPLED) or (
            judged.status is Status.EXACT and not self._shows_padding
        )
        row = padded_row(self._table, self._probe.rows)
        asked = open_ and row is not None and not self._is_joint and not self.is_packed
        if not self._any(asked):
            return judged
        row = int(self._probe.rows[0]) if row is None else row
        trimmed, padded = (one_row(self._schema, self._table, row, self._config, wide) for wide in (False, True))
        pair = self._together(lambda: (self._passes.of([trimmed]), self._passes.of([padded])))
        size = self._passes.largest(pair[0])
        value, where = self._difference(pair[1], pair[0])
        if not asked or not 0 < size < np.inf or value <= self._limit or self._passes.drew:
            return judged
        if Tolerance(self._limit).may_be_flips(value) and has_experts(self._module):
            return replace(judged, status=max(judged.status, Status.ROUTING), difference=value, parameter=where)
        return replace(judged, status=Status.PADDING, difference=value, parameter=where)

    @property
    def _shows_padding(self) -> bool:
        """Whether the split has taken padding away that the rows came with."""
        came = np.array(self._probe.came.widths)
        parts = list(self._probe.parts)
        if self._knows_rows:
            parts += [self._rolled(rows) for rows in self._probe.alone]
        return any((np.array(part.widths) < came).any() for part in parts)

    def _tell_first(self, judged: _Verdict, found: Sketches) -> None:
        """Finds out whether the other answer about labels on first tokens would have been another gradient here."""
        fine = judged.status in (Status.EXACT, Status.ROLLED)
        if self.subtracts_lost:
            self._tells_first = fine and bool(self._table.behind[self._probe.rows].any())
            return
        asks = not self._is_joint and not self.is_packed and self._config.loss_reduction == "token-mean"
        has_any = len(self._table.first_weight) > 0 and bool(self._table.first_weight[self._probe.rows].any())
        if not self._any(asks and has_any):
            return
        weights = group_weights(self._table, self._probe.groups, "token-mean")
        table = measured(self._batch, self._schema, self._config, {"label_shift": int(self._table.shift == 0)})
        if table.weight[self._probe.rows].sum() > 0:
            weights = group_weights(table, self._probe.groups, "token-mean")
        passes = self._passes
        split = passes.weighted if self._is_bent and isinstance(passes, LocalPasses) else passes.split
        other = self._together(lambda: split(weights))
        apart = self._passes.difference(other, found, self._limit)[0]
        self._tells_first = fine and has_any and not apart <= self._limit

    def _any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        return bool((self._exchange([int(flag)])[:, 0] != 0).any())

    @property
    def _same_layout(self) -> bool:
        came, whole = self._probe.came, self._probe.whole
        return came.widths == whole.widths and bool((came.start == whole.start).all())

    def _together(self, passes: Callable[[], T]) -> T:
        """Runs passes of the user's code; raises on all ranks if it raises on one."""

        def explained() -> T:
            try:
                return passes()
            except Exception as error:
                self._explain(error)
                raise

        return together(explained, self._exchange)

    def _explain(self, error: Exception) -> None:
        if self.is_packed:
            error.add_note("Rows were packed (layout='pack'): the mask is None, and there is one row of documents.")
        error.add_note(
            f"{_RAISED}, which runs the training step on {len(self._probe.rows)} rows of the "
            "batch. "
            + (
                ""
                if self._is_joint
                else f"A step that cannot run on a part of a batch cannot be split. {self.advice.coupled}. "
            )
            + "check='off' leaves the check out"
        )

    def _judge(self, found: Sketches, whole: Sketches, judged: _Verdict) -> _Verdict:
        """What lies behind a difference. Sharded passes come to the same branch on all ranks."""
        from_roll, where = self._passes.difference(found, whole, self._limit)
        if from_roll <= self._limit:
            if self._is_joint and not self._table.start[self._probe.rows].any():  # nothing is rolled, only trimmed
                return replace(judged, status=Status.PADDING)
            masked = masked_tokens_vary(self._batch, self._schema, self._table, self._probe.rows)
            return replace(judged, status=Status.PROMPTS if masked else Status.ROLLED)
        verdict = _Verdict(Status.COUPLED, 0, from_roll, where)
        if not self._is_joint and np.isfinite(from_roll):
            matching = self._matching(whole)
            if matching:
                return replace(verdict, status=Status.DECLARATION, matching=matching)
            parts = self._passes.parts
            if parts:
                fitted = combine(parts, best_weights(parts, whole))
                if self._passes.difference(fitted, whole, self._limit)[0] <= self._limit:
                    return replace(verdict, status=Status.WEIGHTS)
        # Only now: what matches to the limit was not disturbed by random numbers.
        if self._passes.drew:
            return replace(verdict, status=Status.RANDOM)
        flips = Tolerance(self._limit).may_be_flips(from_roll) and has_experts(self._module)
        return replace(verdict, status=Status.ROUTING) if flips else verdict

    def _matching(self, whole: Sketches) -> int:
        """The declarations, as bits, under which the groups make up the whole as closely as any does."""
        differences: dict[int, float] = {}
        tried: list[Floats] = []
        for index, changes in enumerate(declarations(self._config, self._schema)):
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

    def _weights_if(
        self, changes: dict[str, Any], groups: Sequence[NDArray[np.int64]] | None = None
    ) -> tuple[list[float] | None, Floats]:
        """Weights of the groups, and of all rows, under another declaration; None where it does not fit the batch."""
        groups = self._probe.groups if groups is None else groups
        nothing: Floats = np.empty(0)
        try:
            table = measured(self._batch, self._schema, self._config, changes)
        except PadMinError:
            return None, nothing
        reduction = changes.get("loss_reduction", self._config.loss_reduction)
        if reduction != "sum" and not table.weight[self._probe.rows].sum() > 0:
            return None, nothing
        shares = np.ones(len(table)) if reduction == "sum" else table.weight / table.weight.sum()
        return group_weights(table, groups, reduction), shares

    @property
    def _said(self) -> Said:
        return Said(
            rows=len(self._probe.rows),
            limit=self._limit,
            schema=self._schema,
            config=self._config,
            advice=self.advice,
            shift=self._table.shift,
            is_joint=self._is_joint,
            is_packed=self.is_packed,
            loses_targets=bool(self._table.lost_targets),
            knows_rows=self._knows_rows,
            alternatives=self._columns.alternatives,
            written=self._written,
            heard=self._heard_names,
        )

    def _agree(self, judged: _Verdict) -> Outcome:
        names = [name for name, p in self._module.named_parameters() if p.requires_grad]
        bits = as_integer(judged.difference)
        tells = self._is_joint or self.is_packed or tells_reductions(self._table, self._probe.groups, self._limit)
        place = names.index(judged.parameter) if judged.parameter in names else 0
        said = [int(judged.status), judged.matching, bits, place, int(tells), int(self._tells_first)]
        table = self._exchange(said)
        worst = int(table[:, 0].argmax())
        if table[worst, 0] == Status.EXACT:
            worst = int(as_floats(table[:, 2]).argmax())
        status = Status(int(table[worst, 0]))
        value = float(as_floats(table[:, 2])[worst])
        place = int(table[worst, 3])
        if status is Status.WRITES:
            self._written = text_of(self._exchange(as_integers(self._written))[worst])
        words = words_of(status, int(table[worst, 1]), value, names[place] if place < len(names) else "", self._said)
        stays_untold = self._is_joint or self.is_packed or self.may_stay_untold
        if status >= Status.PROMPTS or (status is Status.RANDOM and not stays_untold):
            rank = f" (rank {worst})" if len(table) > 1 else ""
            error = GradientCheckError(f"first-batch check{rank}: {words}")
            by_option = status in (Status.PROMPTS, Status.COLUMNS, Status.DECLARATION)
            error.is_declaration = self.is_packed or by_option
            raise error
        told = status in (Status.EXACT, Status.ROLLED)
        untellable = status in (Status.RANDOM, Status.ROUTING)
        final = untellable or (told and bool(table[:, 4].any()))
        tells_first = told and bool(table[:, 5].any())
        rows, losses = tuple(map(int, self._probe.rows)), frozenset(self._passes.losses)
        notable = untellable or status is Status.ROLLED
        return Outcome(value, told, final, notable, words, tells_first, rows, losses, self._limit)


__all__ = ["Advice", "Outcome", "check_gradients", "is_from_check", "was_raised_in_check"]
