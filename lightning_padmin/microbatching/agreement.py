"""What ranks tell each other of their batches before the first pass: one exchange of a few integers each.

On the wire a rank is the integers of its `Agreement`, in the order of the attributes; a float64 goes as its bits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Agreement:
    """What one rank says of its batch.

    Attributes:
        error: code of what it has raised; 0 for nothing.
        micro_batches: how many it has planned.
        slots: of all of them.
        weight: what all of its rows weigh in a mean.
        largest: slots of the largest micro-batch.
        lost_targets: targets that the roll has taken, see `RowTable`.
        first: 1 where rows weigh more or less in the loss according to whether it takes labels on first tokens.
        changed: 1 where models have become others, so that what was found out of the step does not count any more.
        audit: 1 where gradients of this batch should be compared before it is trained on.
    """

    error: int = 0
    micro_batches: int = 0
    slots: int = 0
    weight: float = 0.0
    largest: int = 0
    lost_targets: int = 0
    first: int = 0
    changed: int = 0
    audit: int = 0

    def encode(self) -> list[int]:
        """As it goes over the wire."""
        values = dataclasses.astuple(self)
        return [int(np.float64(value).view(np.int64)) if k == _WEIGHT else value for k, value in enumerate(values)]


_NAMES = tuple(each.name for each in dataclasses.fields(Agreement))
_WEIGHT = _NAMES.index("weight")


@dataclass(frozen=True, eq=False)
class Agreed:
    """What all ranks have said.

    Attributes:
        table: (ranks, n) int64, the `encode` of each.
    """

    table: NDArray[np.int64]

    @staticmethod
    def decode(table: NDArray[np.int64]) -> Agreed:
        """Of what an exchange has returned."""
        return Agreed(table)

    def _of(self, name: str) -> NDArray[np.int64]:
        return self.table[:, _NAMES.index(name)]

    @property
    def errors(self) -> NDArray[np.int64]:
        """(ranks,) the code of each."""
        return self._of("error")

    @property
    def micro_batches(self) -> int:
        """How many every rank runs: as many as the one with most."""
        return int(self._of("micro_batches").max())

    @property
    def slots(self) -> int:
        """Of the rank with most."""
        return int(self._of("slots").max())

    @property
    def weights(self) -> NDArray[np.float64]:
        """(ranks,) what the rows of each weigh."""
        return self._of("weight").view(np.float64)

    @property
    def largest(self) -> NDArray[np.int64]:
        """(ranks,) slots of the largest micro-batch of each."""
        return self._of("largest")

    @property
    def lost_targets(self) -> int:
        """Of all ranks."""
        return int(self._of("lost_targets").sum())

    @property
    def first(self) -> bool:
        """Whether any rank says so."""
        return bool(self._of("first").any())

    @property
    def changed(self) -> bool:
        """Whether any rank says so."""
        return bool(self._of("changed").any())

    @property
    def audit(self) -> bool:
        """Whether any rank says so."""
        return bool(self._of("audit").any())
