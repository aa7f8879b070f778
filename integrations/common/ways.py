"""Under `mode="auto"`: from one way of running batches to the next, where a check finds that it would change training.

split         gradients of micro-batches are added; exact where the loss separates over rows
joint         calls of models run in chunks inside of one whole step; exact where the model keeps rows apart
as it came    what training would be without this library

Only split is bounded by the token budget: a batch that stays whole takes the memory that it takes without padmin. So
the other two are for batches of at most `token_budget` slots, or where the budget is None, as if the user had said so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from lightning_padmin.batch import RowTable
from lightning_padmin.errors import GradientCheckError, PadMinError
from lightning_padmin.integrations.common.training import Training
from lightning_padmin.stats import PaddingStats

Way: TypeAlias = Literal["split", "joint", "as it came"]
_SAID = {
    "joint": "model calls run in chunks inside of the whole step, as with mode='joint'",
    "as it came": "batches run as they came, padding and all",
}


class Ladder:
    """The ways that are left to one training.

    Args:
        training: whose way it is.
        ways: those that there are here, the best first.
        budget: most slots of a batch that stays whole; None: any.
        why_kept: why the way of the first batch is kept, in words; None: it is not.
    """

    def __init__(
        self,
        training: Training,
        ways: Sequence[Way],
        budget: int | None,
        why_kept: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._training, self._ways, self._budget, self._why_kept = training, list(ways), budget, why_kept
        self._reasons: list[str] = []
        self._has_run = False
        if self._ways and self.now not in self._ways:  # a checkpoint's, of a module that had other models
            training.way = self._ways[0]
        self._bound()

    @property
    def now(self) -> str:
        """The way that batches go."""
        return self._training.way

    @property
    def left(self) -> list[Way]:
        """The ways after this one."""
        now = self.now
        return self._ways[self._ways.index(now) + 1 :] if now in self._ways else []

    def begin(self, way: Way, reason: str) -> None:
        """Before the first batch: the ways before this one cannot be gone."""
        self._reasons.append(reason)
        self._training.way = way
        self._bound()

    def go_over(self, error: PadMinError) -> None:
        """To the next way, for the batch that is about to run and all that come. Ranks do so alike.

        Args:
            error: why not this one; the same on all ranks.

        Raises:
            PadMinError: that error, where no way is left, with why; and where another option is what is asked for.
        """
        if not self.left or getattr(error, "is_declaration", False):
            raise error
        kept = self._why_kept() if self._has_run else None
        if kept is not None:
            raise _further(error, f"mode='auto' keeps the way of the first batch here ({kept})")
        training, way = self._training, self.left[0]
        slots = int(training.topology.exchange([training.slots]).max())
        if self._budget is not None and slots > self._budget:
            raise _further(
                error,
                f"mode='auto' does not go on with whole batches, since one of {slots:,} slots takes more memory than "
                f"token_budget={self._budget} allows: set token_budget={slots} or None, if it fits",
            )
        self._reasons.append(_reason_of(error))
        training.go_over(way)
        self._bound()

    def heard(self) -> None:
        """The batch has been checked, and runs: what has changed is told, once."""
        self._has_run = True
        if self._reasons:
            training, reasons = self._training, "; ".join(self._reasons)
            step = f"from step {training.ledger.step} on, " if training.ledger is not None else ""
            training.notices(f"mode='auto': {step}{_SAID[self.now]}, since otherwise training would change: {reasons}")
            self._reasons = []

    def _bound(self) -> None:
        self._training.room = self._budget if self._ways and self.now != "split" else None


def stats_as_it_came(table: RowTable) -> PaddingStats:
    """What a batch costs that runs as it came."""
    return PaddingStats(
        batches=1,
        rows=len(table),
        real_tokens=int(table.real_tokens.sum()),
        loss_tokens=int(table.loss_tokens.sum()),
        slots_before=table.slots,
        slots=table.slots,
        micro_batches=1,
        longest_row=int(table.length.sum(axis=1).max()),
    )


def _reason_of(error: PadMinError) -> str:
    """What was found, without what could be done instead."""
    return str(error).split(". ")[0].rstrip(".")


def _further(error: PadMinError, words: str) -> PadMinError:
    made = type(error)(f"{str(error).rstrip('.')}. {words}")
    return made if isinstance(made, GradientCheckError) else error


__all__ = ["Ladder", "Way", "stats_as_it_came"]
