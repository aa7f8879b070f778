"""Who decides whether rows are packed.

Only a forward pass tells whether a model keeps packed rows apart, and no pass is run here: who runs them hands its
answer in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lightning_padmin.batch import FlatBatch, RowTable, Schema
from lightning_padmin.errors import BatchError
from lightning_padmin.microbatching.layouts import Packed
from lightning_padmin.microbatching.packed_layout import PackStyle, refuse_holes, refuse_unpackable
from lightning_padmin.planning import Ints


class PackPolicy(Protocol):
    """Decides per batch, from the lengths of its rows.

    Attributes:
        style: what packs have, once they are proven.
        verdict: None until it is known.
        changes: how often models have become others since packs were proven.
    """

    style: PackStyle
    verdict: bool | None
    changes: int

    def __call__(self, lengths: Ints, /) -> bool:
        """Whether rows of these lengths are to be packed; raises where they must be and cannot."""


class Packing:
    """Asks a policy of the model, and each batch whether its rows can be documents.

    Args:
        policy: what is known of the model.
        is_demanded: a batch that cannot be packed is refused, not padded.
        inside: whole batches are only read here; what is packed are the calls of models inside.
        asks_of_step: whether rows may be packed also depends on the step, which is looked at anew for other models.
    """

    def __init__(self, policy: PackPolicy, is_demanded: bool, inside: bool, asks_of_step: bool = False) -> None:
        self._policy, self._is_demanded, self._inside = policy, is_demanded, inside
        self._asks_of_step, self._changes = asks_of_step, 0
        self._is_packable = False

    def layout_of(
        self, batch: FlatBatch, schema: Schema, table: RowTable, may_pack: bool, say: Callable[[str], None]
    ) -> Packed | None:
        """The layout of packs; None where rows are padded."""
        if not self._opens(schema, table) or not may_pack:
            return None
        if self._asks_of_step and self._policy.changes != self._changes:
            return None  # whether the step takes packs is known of the models before
        try:
            refuse_unpackable(batch, schema, table)
        except BatchError as error:
            if self._is_demanded:
                raise
            say(f"a batch is padded, not packed: {error}")
            return None
        return Packed(self._policy.style)

    def look(self, batch: FlatBatch, schema: Schema, table: RowTable) -> None:
        """Finds out whether this batch can be packed; raises where it must be."""
        self._is_packable = self._opens(schema, table) and self._fits(batch, schema, table)
        self.have_changed()  # what is looked at now, is looked at as they are

    def have_changed(self) -> bool:
        """Whether the step must be looked at again: models have become others since this was asked last."""
        before, self._changes = self._changes, self._policy.changes
        return self._asks_of_step and self._changes != before

    def _fits(self, batch: FlatBatch, schema: Schema, table: RowTable) -> bool:
        try:
            if self._inside:
                refuse_holes(schema, table)
            else:
                refuse_unpackable(batch, schema, table)
        except BatchError:
            if self._is_demanded:
                raise
            return False
        return True

    @property
    def style(self) -> PackStyle | None:
        """What packs of the batch that was looked at last have; None where it is padded."""
        return self._policy.style if self._policy.verdict and self._is_packable else None

    def _opens(self, schema: Schema, table: RowTable) -> bool:
        """Whether rows may be packed by what is known of the model; an encoder-decoder's only to be refused."""
        return len(schema.widths) > 1 or self._policy(table.length[:, 0])
