"""What micro-batches look like: how rows are planned, and the index maps that gather them.

Padding, packing and bounded shapes stand behind one protocol, so that whoever prepares a batch need not know which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.batch import RowTable
from lightning_padmin.errors import PlanError
from lightning_padmin.microbatching.packed_layout import PackStyle, pack_layout
from lightning_padmin.microbatching.padded_layout import SlotMap, pad_layout
from lightning_padmin.planning import Plan, PlanSpec, ShapeSet, choose_shapes, plan_packs, plan_quietly


class Layout(Protocol):
    """One way to lay rows out."""

    def plan(self, table: RowTable, spec: PlanSpec) -> Plan:
        """Which rows go together; raises PlanError where the options do not fit the batch."""

    def maps(self, plan: Plan, table: RowTable, groups: Sequence[NDArray[np.int64]], spec: PlanSpec) -> list[SlotMap]:
        """The index map of each group: those of the plan, then dummies."""


class Padded:
    """Rectangles, as wide as their longest row."""

    def plan(self, table: RowTable, spec: PlanSpec) -> Plan:
        """See `Layout`."""
        return plan_quietly(table.length, spec, riders=table.weight == 0)

    def maps(self, plan: Plan, table: RowTable, groups: Sequence[NDArray[np.int64]], spec: PlanSpec) -> list[SlotMap]:
        """See `Layout`."""
        return [pad_layout(table, rows, spec.pad_to_multiple_of, spec.max_width) for rows in groups]


class Bucketed(Padded):
    """Rectangles of at most `count` shapes in all batches, chosen on the first one."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._shapes: ShapeSet | None = None

    def plan(self, table: RowTable, spec: PlanSpec) -> Plan:
        """See `Layout`."""
        if len(table.widths) > 1 or spec.max_width is not None:
            why = (
                "rows of an encoder-decoder have two widths"
                if len(table.widths) > 1
                else "widths are rounded beyond the batch's own, and what fills token ids up is not known: set "
                "pad_token_id, and a fill for entries that you declare"
            )
            raise PlanError(f"shape_buckets={self._count}: {why}")
        riders = table.weight == 0
        if self._shapes is None:
            self._shapes = choose_shapes(
                table.length[:, 0],
                self._count,
                spec.limits,
                multiple=spec.pad_to_multiple_of,
                with_riders=bool(riders.any()),
            )
        return plan_quietly(table.length, spec, riders=riders, shapes=self._shapes)

    def maps(self, plan: Plan, table: RowTable, groups: Sequence[NDArray[np.int64]], spec: PlanSpec) -> list[SlotMap]:
        """See `Layout`."""
        if plan.shapes is None:
            return super().maps(plan, table, groups, spec)
        alone = plan.shapes.widths_of(1, table.length[groups[-1]].max(axis=0))
        least = [*plan.widths, *[alone] * (len(groups) - len(plan))]
        return [
            pad_layout(table, rows, spec.pad_to_multiple_of, spec.max_width, widths)
            for rows, widths in zip(groups, least, strict=True)
        ]


class Packed:
    """Rows behind each other in one long row."""

    def __init__(self, style: PackStyle) -> None:
        self._style = style

    def plan(self, table: RowTable, spec: PlanSpec) -> Plan:
        """See `Layout`."""
        return plan_packs(
            table.length[:, 0],
            spec.token_budget,
            max_rows=spec.max_rows,
            min_micro_batches=spec.min_micro_batches,
            launch_cost=spec.launch_cost,
            riders=table.weight == 0,
        )

    def maps(self, plan: Plan, table: RowTable, groups: Sequence[NDArray[np.int64]], spec: PlanSpec) -> list[SlotMap]:
        """See `Layout`."""
        return [pack_layout(table, rows, self._style) for rows in groups]
