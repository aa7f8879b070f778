"""A batch and its plan: what is said of it to other ranks, and what it becomes when they agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_padmin.batch import FlatBatch, LossSpec, RowTable, Schema
from lightning_padmin.microbatching import weights
from lightning_padmin.microbatching.agreement import Agreed, Agreement
from lightning_padmin.microbatching.layouts import Layout
from lightning_padmin.microbatching.micro_batches import MicroBatches
from lightning_padmin.microbatching.timing import LaunchMeter
from lightning_padmin.planning import Plan, PlanSpec
from lightning_padmin.stats import PaddingStats


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A batch that has been planned by this rank, and not run yet.

    Attributes:
        batch: flattened.
        schema: its schema.
        table: its row table.
        layout: what its micro-batches look like.
        spec: the options of its plan.
        plan: which rows go together.
    """

    batch: FlatBatch
    schema: Schema
    table: RowTable
    layout: Layout
    spec: PlanSpec
    plan: Plan

    def says(self, first: int, changed: int = 0, audit: int = 0) -> Agreement:
        """What other ranks are told, see `Agreement`."""
        return Agreement(
            micro_batches=len(self.plan),
            slots=self.plan.slots,
            weight=float(self.table.weight.sum()),
            largest=int(self.plan.slots_per_group.max()),
            lost_targets=self.table.lost_targets,
            first=first,
            changed=changed,
            audit=audit,
        )

    def mapped(
        self, agreed: Agreed, loss: LossSpec, is_global: bool, grows: bool, meter: LaunchMeter | None
    ) -> MicroBatches:
        """As many micro-batches as all ranks have, with their index maps and weights.

        Args:
            agreed: what all ranks have said.
            loss: how the loss is reduced.
            is_global: whether a mean is one over all ranks.
            grows: whether memory may not suffice.
            meter: what times them.
        """
        table, plan = self.table, self.plan.at_least(agreed.micro_batches)
        dummies = agreed.micro_batches - len(plan)
        # One group holds all rows: keep them in the caller's order, so that an untouched batch is passed on as it is.
        groups = list(plan.groups) if len(plan) > 1 or plan.is_packed else [np.arange(len(table))]
        groups += [weights.dummy_row(table)] * dummies
        maps = self.layout.maps(plan, table, groups, self.spec)
        totals = agreed.weights if is_global else None
        own, shares = weights.weights(table, groups, len(plan), loss.reduction, totals)
        stats = PaddingStats(
            batches=1,
            rows=len(table),
            real_tokens=int(table.real_tokens.sum()),
            loss_tokens=int(table.loss_tokens.sum()),
            slots_before=table.slots,
            slots=sum(slots.slots for slots in maps),
            micro_batches=len(maps),
            dummies=dummies,
            over_budget_rows=len(plan.over_budget),
            wait_slots=agreed.slots - self.plan.slots,
            longest_row=int(table.length.sum(axis=1).max()),
        )
        lost = agreed.lost_targets
        return MicroBatches(self.batch, self.schema, table, plan, maps, own, shares, stats, grows, lost, meter)

    def remarks(self) -> Iterator[str]:
        """What the user should know of it."""
        if self.plan.notice:
            yield self.plan.notice
        if not self.table.has_loss:
            yield (
                "a batch has no loss tokens at all: a mean over them is 0/0 or 0, and what else its loss holds (a "
                "penalty, say) counts as in the whole batch"
            )
        if self.table.lost_targets:
            yield (
                f"{self.table.lost_targets} left-padded rows of a batch have a label on their first real token. Left "
                "padded, it was predicted from a padding slot; rolled to the front, it has nothing before it and "
                "carries no loss (as in a right-padded batch)"
            )
