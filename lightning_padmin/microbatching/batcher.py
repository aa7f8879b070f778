"""From a batch to its micro-batches: schema, row table, plan, agreement over ranks, then one gather each.

All that can fail happens in `MicroBatcher.prepare`, before the first forward pass. What it returns only gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lightning_padmin.batch import BatchSpec, FlatBatch, RowTable, Schema, pool
from lightning_padmin.config import PadMinConfig, as_config
from lightning_padmin.distributed import Exchange, exchange_alone, raise_together
from lightning_padmin.errors import BatchError, ConfigError, code_of
from lightning_padmin.microbatching.agreement import Agreed, Agreement
from lightning_padmin.microbatching.layouts import Bucketed, Layout, Padded
from lightning_padmin.microbatching.memory import Growth
from lightning_padmin.microbatching.micro_batches import MicroBatches
from lightning_padmin.microbatching.pack_policy import Packing, PackPolicy
from lightning_padmin.microbatching.packed_layout import PackStyle
from lightning_padmin.microbatching.planned import PlannedBatch
from lightning_padmin.microbatching.reading import Reader
from lightning_padmin.microbatching.timing import LaunchMeter
from lightning_padmin.planning import PlanSpec
from lightning_padmin.runtime import Notices

Asks = Callable[[Mapping[str, Any], Schema, RowTable], bool]


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
        asks_of_step: whether rows may be packed also depends on the step, which is looked at anew for other models.
        packs_inside: whole batches are only read here; what is packed are the calls of models inside.
        subtracts_lost: labels on first tokens behind padding are subtracted from what the loss is divided by.
        wants_audit: told the entries, schema and row table of each batch before ranks agree: whether its gradients
            should be compared.
        other_masks: what to do with masks of other sequences, in the adapter's words; None: nothing is trimmed by
            this one, so that they need not fit.

    Attributes:
        has_changed: whether, on some rank, models had become others when the last batch was planned, so that the step
            must be looked at again; where that is not known yet (`may_pack`), nothing is packed until then.
        audits: whether, on some rank, gradients of the batch that was read last should be compared.
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
        asks_of_step: bool = False,
        packs_inside: bool = False,
        subtracts_lost: bool = False,
        wants_audit: Asks | None = None,
        other_masks: str | None = "",
    ) -> None:
        self._config = config = as_config(config)
        if gate is None and config.layout == "pack":
            raise ConfigError(
                "layout='pack' is only for models that were measured not to leak, and here no model is known: use "
                "PaddedForward(model, config), PadMinCallback, PadMinTrainerMixin or PadMinMixin"
            )
        self._names, self._limits, self._loss = config.batch, config.plan, config.loss
        self._exchange = exchange or exchange_alone
        self._reader = Reader(
            self._loss, config.pad_to_multiple_of, schema, encoder_decoder, before_reading, row_limit, other_masks
        )
        self._packing = None if gate is None else Packing(gate, config.layout == "pack", packs_inside, asks_of_step)
        self._padded = Padded() if config.shape_buckets is None else Bucketed(config.shape_buckets)
        self._meter = LaunchMeter() if config.launch_cost == "measured" else None
        self._growth, self._subtracts_lost, self._wants_audit = Growth(), subtracts_lost, wants_audit
        self.shows_first = self.has_changed = self.audits = False
        self._once = Notices()

    @property
    def config(self) -> PadMinConfig:
        """The options; they stay what they are."""
        return self._config

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
        wish = _Wish(token_budget, may_pack, min_micro_batches)
        micro_batches = self._prepare(lambda: self._pooled(batches), wish)
        micro_batches.stats.batches = len(batches)
        return micro_batches

    def _prepare(self, get: Callable[[], Any], wish: _Wish) -> MicroBatches:
        """Flatten, infer, measure, plan; agree; map."""
        planned: PlannedBatch | None = None
        error: Exception | None = None
        try:
            planned = self._plan(*self._read(get(), wish.names), wish)
            said = self._says(planned)
        except Exception as caught:  # whatever it is, the other ranks must hear of it before this one raises
            error, said = caught, Agreement(error=code_of(caught))
        agreed = Agreed.decode(self._exchange(said.encode()))
        raise_together(error, agreed.errors)
        assert planned is not None
        self.shows_first, self.has_changed, self.audits = agreed.first, agreed.changed, agreed.audit
        grows = self._growth.with_batch(agreed.largest)
        if self._meter is not None:
            self._meter.begin()
        return planned.mapped(agreed, self._loss, self._config.normalize == "global", grows, self._meter)

    def _says(self, planned: PlannedBatch) -> Agreement:
        changed = self._packing is not None and self._packing.have_changed()
        asked = self._asks(planned.batch, planned.schema, planned.table)
        return planned.says(self._has_first(planned.table), int(changed), asked)

    def _asks(self, batch: FlatBatch, schema: Schema, table: RowTable) -> int:
        return 0 if self._wants_audit is None else int(self._wants_audit(batch.leaves, schema, table))

    def _read(self, batch: Any, names: BatchSpec | None = None) -> tuple[FlatBatch, Schema, RowTable]:
        return self._reader.read(batch, names or self._names)

    def _plan(self, batch: FlatBatch, schema: Schema, table: RowTable, wish: _Wish) -> PlannedBatch:
        layout: Layout | None = None
        if self._packing is not None:
            layout = self._packing.layout_of(batch, schema, table, wish.may_pack, self._once)
        layout, spec = layout or self._padded, self._spec_of(schema, wish)
        planned = PlannedBatch(batch, schema, table, layout, spec, layout.plan(table, spec))
        self._tell(planned)  # before the agreement: where warnings are errors, all ranks raise
        return planned

    def _spec_of(self, schema: Schema, wish: _Wish) -> PlanSpec:
        """The options of the plan of one batch, with the budget resolved."""
        spec = self._limits
        budget = wish.token_budget if wish.token_budget is not None else spec.token_budget
        spec = replace(
            spec,
            token_budget=budget if budget is not None else schema.slots(spec.pad_to_multiple_of),
            max_width=None if schema.can_widen else schema.widths,
            min_micro_batches=min(wish.min_micro_batches, schema.rows),
            launch_cost=spec.launch_cost if self._meter is None else self._meter.launch_cost,
        )
        return spec.undivided() if wish.is_whole else spec

    def read_together(self, batch: Any) -> tuple[Schema, RowTable]:
        """`read`, on all ranks; decides whether rows are packed, where that is open.

        Raises:
            PadMinError: on every rank when any rank cannot understand its batch.
        """
        return self.read_made_together(lambda: batch)[1:]

    def read_window_together(self, batches: Sequence[Any]) -> tuple[Any, Schema, RowTable]:
        """The rows of several batches as one batch, if they can be pooled, else the first; with its `read_together`."""
        # Where they cannot be, that is raised when they are planned.
        return self.read_made_together(lambda: self._pooled(batches, or_first=True))

    def _pooled(self, batches: Sequence[Any], or_first: bool = False) -> FlatBatch:
        read = [self._read(batch) for batch in batches]
        try:
            return pool([flat for flat, _, _ in read], [schema for _, schema, _ in read])
        except BatchError:
            if not or_first:
                raise
            return read[0][0]

    def read_made_together(self, make: Callable[[], Any]) -> tuple[Any, Schema, RowTable]:
        """`read_together` of what `make` returns, with that; what it raises, all ranks hear of."""
        local: tuple[FlatBatch, Schema, RowTable] | None = None
        error: Exception | None = None
        said = [0, 0]
        try:
            local = self._read(make())
            if self._packing is not None:
                self._packing.look(*local)
            said = [self._has_first(local[2]), self._asks(*local)]
        except Exception as caught:
            error = caught
        agreed = self._exchange([code_of(error), *said])
        raise_together(error, agreed[:, 0])
        assert local is not None
        self.shows_first, self.audits = bool(agreed[:, 1].any()), bool(agreed[:, 2].any())
        return local[0].whole, *local[1:]

    def read(self, batch: Any) -> tuple[Schema, RowTable]:
        """Schema and row table of a batch; raises PadMinError for one that cannot be understood."""
        return self._read(batch)[1:]

    @property
    def pack_style(self) -> PackStyle | None:
        """What packs of the batch that was read last have; None where it is padded."""
        return None if self._packing is None else self._packing.style

    def _has_first(self, table: RowTable) -> int:
        """1 where the batch has labels on first tokens, and whether the loss takes them matters."""
        if self._subtracts_lost:
            return int(table.behind.any())
        return int(self._loss.reduction == "token-mean" and bool((table.first_weight > 0).any()))

    def _tell(self, planned: PlannedBatch) -> None:
        for words in planned.remarks():
            self._once(words)

    def speaks_with(self, other: MicroBatcher) -> None:
        """What one of the two has said, the other does not say again."""
        self._once = other._once
