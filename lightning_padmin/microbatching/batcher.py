"""From a batch to its micro-batches: schema, row table, plan, agreement over ranks, then one gather each.

All that can fail happens in `MicroBatcher.prepare`, before the first forward pass. What it returns only gathers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.architectures import ArchitectureError
from lightning_padmin.batch import BatchSpec, FlatBatch, RowTable, Schema, pool, row_table_of, schema_of
from lightning_padmin.config import PadMinConfig, as_config
from lightning_padmin.distributed import Exchange, exchange_alone, raise_together
from lightning_padmin.errors import BatchError, ConfigError, PadMinError, PadMinWarning, PlanError
from lightning_padmin.microbatching.micro_batches import MicroBatches
from lightning_padmin.microbatching.pack_policy import PackPolicy
from lightning_padmin.microbatching.packed_layout import PackStyle, pack_layout, refuse_holes, refuse_unpackable
from lightning_padmin.microbatching.padded_layout import SlotMap, pad_layout
from lightning_padmin.microbatching.timing import UNTIL_THEN, LaunchMeter
from lightning_padmin.planning import Limits, Plan, ShapeSet, SlotCost, choose_shapes, plan_packs, plan_quietly
from lightning_padmin.stats import PaddingStats

_FIRST = 20
_NO_LIMIT = 2**40


class _Wish(NamedTuple):
    """What is wanted of one batch; see `MicroBatcher.prepare`."""

    token_budget: int | None
    may_pack: bool
    min_micro_batches: int
    is_whole: bool = False
    names: BatchSpec | None = None


class MicroBatcher:
    """Prepares one batch after the other, with what must be remembered between them.

    Args:
        config: the options.
        schema: the schema of some batch, whose entries then count as declared; by default each batch's own is
            inferred.
        exchange: the collective (`distributed.exchange_all`); by default this process is alone.
        encoder_decoder: the model is an encoder-decoder, so labels run along the decoder.
        before_reading: called before each batch is read; what it raises, all ranks hear of.
        row_limit: longest row that may be regrouped, see `architectures.row_limit`.
        gate: decides whether rows are packed; without one they are padded.
        packs_inside: whole batches are only read here; what is packed are the calls of models inside.
        subtracts_lost: labels on first tokens behind padding are subtracted from what the loss is divided by.
        other_masks: what to do with masks of other sequences, in the adapter's words; None: nothing is trimmed by
            this one, so that they need not fit.

    Attributes:
        shows_first: whether in the batch that was read last, on some rank, rows weigh more or less in the loss
            according to whether it takes labels on first tokens.

    Raises:
        ConfigError: `layout="pack"` without a gate, so that nobody has looked whether the model leaks.
    """

    def __init__(
        self,
        config: PadMinConfig,
        schema: Schema | None = None,
        exchange: Exchange | None = None,
        *,
        encoder_decoder: bool = False,
        before_reading: Callable[[], None] | None = None,
        row_limit: int | None = None,
        gate: PackPolicy | None = None,
        packs_inside: bool = False,
        subtracts_lost: bool = False,
        other_masks: str | None = "",
    ) -> None:
        self.shows_first, self._subtracts_lost, self._other_masks = False, subtracts_lost, other_masks
        self._packs_inside, self._is_packable = packs_inside, False
        self.config, self.encoder_decoder = as_config(config), encoder_decoder
        if gate is None and self.config.layout == "pack":
            raise ConfigError(
                "layout='pack' is only for models that were measured not to leak, and here no model is known: use "
                "PaddedForward(model, config), PadMinCallback, PadMinTrainerMixin or PadMinMixin"
            )
        self._gate = gate
        self._before_reading, self._row_limit = before_reading, row_limit
        self._declared, self._last_schema = schema, schema
        self._exchange = exchange or exchange_alone
        self._shapes: ShapeSet | None = None
        self._meter = LaunchMeter() if self.config.launch_cost == "measured" else None
        self._largest: NDArray[np.int64] | None = None  # micro-batch so far, in slots, by rank
        self._prepared = 0
        self._said: set[str] = set()

    def prepare(
        self, batch: Any, *, token_budget: int | None = None, may_pack: bool = True, min_micro_batches: int = 1
    ) -> MicroBatches:
        """Plans a batch, the same number of micro-batches on every rank.

        Args:
            batch: of the caller's type; it is only read.
            token_budget: most slots of a micro-batch of this one; default: what the options say.
            may_pack: False while it is not known whether the training step takes packs; rows are padded then.
            min_micro_batches: the plan has at least this many, where there are as many rows.

        Raises:
            PadMinError: on every rank when any rank cannot plan its batch; nothing has run by then.
        """
        return self._prepare(lambda: batch, _Wish(token_budget, may_pack, min_micro_batches))

    def prepare_made(
        self,
        make: Callable[[], Any],
        *,
        token_budget: int | None = None,
        may_pack: bool = True,
        min_micro_batches: int = 1,
        is_whole: bool = False,
        names: BatchSpec | None = None,
    ) -> MicroBatches:
        """`prepare` of what `make` returns; what it raises, all ranks hear of.

        Args:
            make: makes the batch.
            token_budget: see `prepare`; `may_pack` and `min_micro_batches` too.
            may_pack: see there.
            min_micro_batches: see there.
            is_whole: the batch is rolled and trimmed, and not split.
            names: what the entries of this batch are called; default: what the options say.
        """
        return self._prepare(make, _Wish(token_budget, may_pack, min_micro_batches, is_whole, names))

    def prepare_window(
        self,
        batches: Sequence[Any],
        *,
        token_budget: int | None = None,
        may_pack: bool = True,
        min_micro_batches: int = 1,
    ) -> MicroBatches:
        """Plans the rows of several batches together, see `pool`; otherwise as `prepare`."""
        micro_batches = self._prepare(
            lambda: self._pooled(batches),
            _Wish(token_budget, may_pack, min_micro_batches),
        )
        micro_batches.stats.batches = len(batches)
        return micro_batches

    def _prepare(self, get: Callable[[], Any], wish: _Wish) -> MicroBatches:
        local: tuple[FlatBatch, Schema, RowTable, Plan] | None = None
        error: Exception | None = None
        try:
            local = self._plan(get(), wish)
        except Exception as caught:  # whatever it is, the other ranks must hear of it before this one raises
            error = caught
        agreed = self._exchange(self._message(local, error))
        raise_together(error, agreed[:, 0])
        assert local is not None
        self.shows_first = bool(agreed[:, 6].any())
        batch, schema, table, plan = local
        return self._assemble(batch, schema, table, plan, agreed)

    def read_together(self, batch: Any) -> tuple[Schema, RowTable]:
        """`read`, on all ranks; decides whether rows are packed, where that is open.

        Raises:
            PadMinError: on every rank when any rank cannot understand its batch.
        """
        return self.read_made_together(lambda: batch)[1:]

    def read_window_together(self, batches: Sequence[Any]) -> tuple[Any, Schema, RowTable]:
        """The rows of several batches as one batch, if they can be pooled, else the first; with its `read_together`."""

        def pooled() -> FlatBatch:
            read = [self._read(batch) for batch in batches]
            try:
                return pool([flat for flat, _, _ in read], [schema for _, schema, _ in read])
            except BatchError:  # of no concern here; where it is, it is raised when they are planned
                return read[0][0]

        return self.read_made_together(pooled)

    def _pooled(self, batches: Sequence[Any]) -> FlatBatch:
        read = [self._read(batch) for batch in batches]
        return pool([flat for flat, _, _ in read], [schema for _, schema, _ in read])

    def read_made_together(self, make: Callable[[], Any]) -> tuple[Any, Schema, RowTable]:
        """`read_together` of what `make` returns, with that; what it raises, all ranks hear of."""
        local: tuple[FlatBatch, Schema, RowTable] | None = None
        error: Exception | None = None
        try:
            local = self._read(make())
            self._is_packable = self._may_be_packed(*local)
        except Exception as caught:
            error = caught
        agreed = self._exchange([_code(error), 0 if local is None else self._has_first(local[2])])
        raise_together(error, agreed[:, 0])
        assert local is not None
        self.shows_first = bool(agreed[:, 1].any())
        return local[0].whole, *local[1:]

    def _has_first(self, table: RowTable) -> int:
        """1 where the batch has labels on first tokens, and whether the loss takes them matters."""
        if self._subtracts_lost:
            return int(table.behind.any())
        return int(self.config.loss_reduction == "token-mean" and bool((table.first_weight > 0).any()))

    def _message(self, local: tuple[FlatBatch, Schema, RowTable, Plan] | None, error: Exception | None) -> list[int]:
        """Error code, micro-batches, slots, row weight (a float64's bits), largest slots, lost targets, first."""
        if local is None:
            return [_code(error), 0, 0, 0, 0, 0, 0]
        _, _, table, plan = local
        total = np.float64(table.weight.sum()).view(np.int64)
        largest = int(plan.slots_per_group.max())
        return [0, len(plan), plan.slots, int(total), largest, table.lost_targets, self._has_first(table)]

    def read(self, batch: Any) -> tuple[Schema, RowTable]:
        """Schema and row table of a batch; raises PadMinError for one that cannot be understood."""
        return self._read(batch)[1:]

    def _read(self, batch: Any, names: BatchSpec | None = None) -> tuple[FlatBatch, Schema, RowTable]:
        if self._before_reading is not None:
            self._before_reading()
        config, spec = self.config, names or self.config.batch
        if self._declared is not None:
            spec = spec.declared_by(self._declared)
        flat = FlatBatch.of(batch, spec.paths)
        schema = schema_of(flat, spec, encoder_decoder=self.encoder_decoder, previous=self._last_schema)
        self._last_schema = schema
        table = row_table_of(flat, schema, config.loss, self._other_masks)
        longest = math.ceil(int(table.length.max()) / config.pad_to_multiple_of) * config.pad_to_multiple_of
        if self._row_limit is not None and longest > self._row_limit:
            raise ArchitectureError(
                f"a row takes {longest} positions, and this model's rotary embedding depends on the longest row of the "
                f"call beyond {self._row_limit}: shorten rows to {self._row_limit}, use a fixed scaling (linear, yarn, "
                "llama3), or enabled=False"
            )
        return flat, schema, table

    def _plan(self, batch: Any, wish: _Wish) -> tuple[FlatBatch, Schema, RowTable, Plan]:
        config = self.config
        flat, schema, table = self._read(batch, wish.names)
        opens = self._gate_opens(schema, table)
        packed = self._plan_packs(flat, schema, table, wish) if opens and wish.may_pack else None
        if packed is not None:
            self._tell(table, packed)
            return flat, schema, table, packed
        plan = plan_quietly(
            table.length,
            self._budget(schema, wish),
            pad_to_multiple_of=config.pad_to_multiple_of,
            max_width=None if schema.can_widen else schema.widths,
            max_rows=None if wish.is_whole else config.max_rows,
            min_micro_batches=min(wish.min_micro_batches, len(table)),
            launch_cost=_NO_LIMIT if wish.is_whole else self._launch_cost,
            cost_multiple_of=config.cost_multiple_of or 1,
            attention_width=config.attention_width,
            method=config.method,
            riders=table.weight == 0,
            shapes=self._shapes_for(schema, table, wish),
        )
        self._tell(table, plan)  # before the agreement: where warnings are errors, all ranks raise
        return flat, schema, table, plan

    def _gate_opens(self, schema: Schema, table: RowTable) -> bool:
        """Whether rows may be packed by what is known of the model; an encoder-decoder's only to be refused."""
        return self._gate is not None and (len(schema.widths) > 1 or self._gate(table.length[:, 0]))

    def _plan_packs(self, batch: FlatBatch, schema: Schema, table: RowTable, wish: _Wish) -> Plan | None:
        """None where `layout="auto"` pads a batch that cannot be packed."""
        config = self.config
        try:
            refuse_unpackable(batch, schema, table)
        except BatchError as error:
            if config.layout == "pack":
                raise
            self._once(f"a batch is padded, not packed: {error}")
            return None
        return plan_packs(
            table.length[:, 0],
            self._budget(schema, wish),
            max_rows=None if wish.is_whole else config.max_rows,
            min_micro_batches=min(wish.min_micro_batches, len(table)),
            launch_cost=_NO_LIMIT if wish.is_whole else self._launch_cost,
            riders=table.weight == 0,
        )

    def _may_be_packed(self, batch: FlatBatch, schema: Schema, table: RowTable) -> bool:
        """Whether this batch can be packed; raises where it must be."""
        if not self._gate_opens(schema, table):
            return False
        try:
            if self._packs_inside:
                refuse_holes(schema, table)
            else:
                refuse_unpackable(batch, schema, table)
        except BatchError:
            if self.config.layout == "pack":
                raise
            return False
        return True

    @property
    def pack_style(self) -> PackStyle | None:
        """What packs of the batch that was read last have; None where it is padded."""
        return self._gate.style if self._gate is not None and self._gate.verdict and self._is_packable else None

    @property
    def _launch_cost(self) -> int:
        cost = self.config.launch_cost
        return cost if isinstance(cost, int) else self._meter.launch_cost if self._meter is not None else UNTIL_THEN

    def _shapes_for(self, schema: Schema, table: RowTable, wish: _Wish) -> ShapeSet | None:
        """The shapes of all batches, chosen on the first one."""
        config = self.config
        if config.shape_buckets is None:
            return None
        if len(schema.widths) > 1 or not schema.can_widen:
            why = (
                "rows of an encoder-decoder have two widths"
                if len(schema.widths) > 1
                else "widths are rounded beyond the batch's own, and what fills token ids up is not known: set "
                "pad_token_id, and a fill for entries that you declare"
            )
            raise PlanError(f"shape_buckets={config.shape_buckets}: {why}")
        if self._shapes is None:
            slot_cost = SlotCost(config.cost_multiple_of or 1, config.attention_width or 0)
            budget = self._budget(schema, wish)
            limits = Limits(budget, config.max_rows or budget, self._launch_cost, slot_cost)
            self._shapes = choose_shapes(
                table.length[:, 0],
                config.shape_buckets,
                limits,
                multiple=config.pad_to_multiple_of,
                with_riders=bool((table.weight == 0).any()),
            )
        return self._shapes

    def _budget(self, schema: Schema, wish: _Wish) -> int:
        if wish.is_whole:
            return _NO_LIMIT
        budget = wish.token_budget if wish.token_budget is not None else self.config.token_budget
        return budget if budget is not None else self._slots_without_us(schema)

    def _slots_without_us(self, schema: Schema) -> int:
        """Slots of the batch as it came, at the rounded width where rounding may go beyond the batch's own."""
        multiple = self.config.pad_to_multiple_of if schema.can_widen else 1
        return schema.rows * sum(math.ceil(width / multiple) * multiple for width in schema.widths)

    def _assemble(
        self, batch: FlatBatch, schema: Schema, table: RowTable, plan: Plan, agreed: NDArray[np.int64]
    ) -> MicroBatches:
        count = int(agreed[:, 1].max())
        planned_slots = plan.slots
        plan = plan.at_least(count)
        limits = None if schema.can_widen else schema.widths
        # One group holds all rows: keep them in the caller's order, so that an untouched batch is passed on as it is.
        groups = list(plan.groups) if len(plan) > 1 or plan.is_packed else [np.arange(len(table))]
        groups += [self._dummy_row(table)] * (count - len(plan))
        maps = self._maps(table, plan, groups, limits)
        weights, shares = self._weights(table, groups, len(plan), agreed)
        stats = PaddingStats(
            batches=1,
            rows=len(table),
            real_tokens=int(table.real_tokens.sum()),
            loss_tokens=int(table.loss_tokens.sum()),
            slots_before=table.slots,
            slots=sum(slots.slots for slots in maps),
            micro_batches=len(maps),
            dummies=count - len(plan),
            over_budget_rows=len(plan.over_budget),
            wait_slots=int(agreed[:, 2].max()) - planned_slots,
            longest_row=int(table.length.sum(axis=1).max()),
        )
        # The first batches too: gradients and the optimizer's states take memory only after a step or two.
        grows = self._prepared < _FIRST or self._largest is None or bool((agreed[:, 4] > self._largest).any())
        self._prepared += 1
        self._largest = agreed[:, 4] if self._largest is None else np.maximum(agreed[:, 4], self._largest)
        if self._meter is not None:
            self._meter.begin()
        lost = int(agreed[:, 5].sum())
        return MicroBatches(batch, schema, table, plan, maps, weights, shares, stats, grows, lost, self._meter)

    def _maps(
        self, table: RowTable, plan: Plan, groups: list[NDArray[np.int64]], limits: Sequence[int] | None
    ) -> list[SlotMap]:
        """The index map of each group, dummies included."""
        if plan.is_packed:
            return [pack_layout(table, rows, self._gate.style if self._gate is not None else None) for rows in groups]
        multiple = self.config.pad_to_multiple_of
        if plan.shapes is None:
            return [pad_layout(table, rows, multiple, limits) for rows in groups]
        alone = plan.shapes.widths_of(1, table.length[groups[-1]].max(axis=0))
        least = [*plan.widths, *[alone] * (len(groups) - len(plan))]
        return [pad_layout(table, rows, multiple, limits, widths) for rows, widths in zip(groups, least, strict=True)]

    @staticmethod
    def _dummy_row(table: RowTable) -> NDArray[np.int64]:
        """The shortest row that carries loss, else one with a real token: others may have a loss of 0/0."""
        carries_loss = table.loss_tokens > 0 if table.counts_loss else table.real_tokens > 0
        weighs = table.weight > 0
        for wanted in (weighs & carries_loss, weighs, carries_loss, table.real_tokens > 0):
            if wanted.any():
                break
        candidates = np.flatnonzero(wanted)
        return candidates[[np.argmin(table.length.sum(axis=1)[candidates])]]

    def _weights(
        self, table: RowTable, groups: list[NDArray[np.int64]], real: int, agreed: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Weight and share of each micro-batch; see `MicroBatches`."""
        is_real = np.arange(len(groups)) < real
        total = table.weight.sum()
        if total == 0:  # what else the loss holds (a penalty) counts, as rows of the batch do
            rows = np.array([len(group) for group in groups]) * is_real
            shares = rows / rows.sum()
            others = self.config.normalize == "global" and bool(agreed[:, 3].view(np.float64).any())
            return (np.zeros(len(groups)) if others else shares), shares
        own = np.array([table.weight[group].sum() for group in groups]) * is_real
        shares = own / total
        if self.config.loss_reduction == "sum":
            return is_real.astype(np.float64), shares
        if self.config.normalize == "global":
            # Ranks are averaged afterwards, hence the mean over ranks of their totals.
            return own / agreed[:, 3].view(np.float64).mean(), shares
        return shares, shares

    def _tell(self, table: RowTable, plan: Plan) -> None:
        if plan.notice:
            self._once(plan.notice)
        if not table.has_loss:
            self._once(
                "a batch has no loss tokens at all: a mean over them is 0/0 or 0, and what else its loss holds (a "
                "penalty, say) counts as in the whole batch"
            )
        if table.lost_targets:
            self._once(
                f"{table.lost_targets} left-padded rows of a batch have a label on their first real token. Left "
                "padded, it was predicted from a padding slot; rolled to the front, it has nothing before it and "
                "carries no loss (as in a right-padded batch)"
            )

    def _once(self, message: str) -> None:
        """Warns once for the life of this object, however often it happens and with whatever numbers."""
        key = message.translate(str.maketrans("", "", "0123456789"))
        if key not in self._said:
            self._said.add(key)
            warnings.warn(message, PadMinWarning, stacklevel=6)


def _code(error: Exception | None) -> int:
    return 0 if error is None else error.code if isinstance(error, PadMinError) else PadMinError.code
