"""The first batches of a training are checked before they are trained on, until they have told all they can."""

from __future__ import annotations

from lightning_padmin.verification import Outcome

MOST_BATCHES = 100


class FirstBatches:
    """Which of them are looked at.

    Args:
        is_on: whether any are.
        most_without_gradient: after so many that could not tell, no more are asked; default: all are.

    Attributes:
        is_due: whether another batch may tell more.
        told: whether one has told.
        first_is_open: whether none has told yet if the loss takes labels on first tokens.
        has_passed: whether they have told all they can, and training stays as it was.
        count: how many have been looked at.
    """

    def __init__(self, is_on: bool, *, most_without_gradient: int | None = None) -> None:
        self.is_due = self.first_is_open = is_on
        self.told = self.has_passed = False
        self.count = self._without_gradient = self._of_first_labels = 0
        self._most_without_gradient = most_without_gradient

    def heard(self, outcome: Outcome | None) -> None:
        """A batch was looked at, and this was found; None: it has no two rows with loss."""
        self.count += 1
        is_final = outcome is not None and outcome.final
        self.has_passed = outcome is not None and outcome.told and is_final
        if outcome is not None and (outcome.tells_first or (is_final and not outcome.told)):
            self.first_is_open = False
        self.is_due = self.count < MOST_BATCHES and not is_final
        if outcome is None or self.told:
            return
        self.told = outcome.told
        self._without_gradient += not outcome.told
        most = self._most_without_gradient
        self.is_due = self.is_due and (most is None or self._without_gradient < most)

    def heard_of_first_labels(self, outcome: Outcome | None) -> None:
        """A batch with labels on first tokens was looked at for these."""
        self._of_first_labels += 1
        told = outcome is not None and outcome.tells_first
        self.first_is_open = not told and self._of_first_labels < MOST_BATCHES


__all__ = ["MOST_BATCHES", "FirstBatches"]
