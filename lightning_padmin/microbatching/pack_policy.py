"""Who decides whether rows are packed.

Only a forward pass tells whether a model keeps packed rows apart, and no pass is run here: who runs them hands its
answer in.
"""

from __future__ import annotations

from typing import Protocol

from lightning_padmin.microbatching.packed_layout import PackStyle
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
