"""Whether a training step takes packed rows: until that is known, they are padded."""

from __future__ import annotations

from collections.abc import Callable

from lightning_padmin.distributed import Exchange
from lightning_padmin.errors import GradientCheckError
from lightning_padmin.microbatching import PackStyle
from lightning_padmin.verification.gradient_check import Outcome
from lightning_padmin.verification.leak import PackGate

_MOST_BATCHES = 100


class PackCheck:
    """Compares gradients of a few rows in one pack with those of the same rows as they came, on all ranks.

    Args:
        gate: says what is known of the model.
        exchange: the collective.
        say: told once that no batch could tell.

    Attributes:
        is_due: whether another batch may tell; the same on all ranks.
        has_passed: whether rows may be packed.
    """

    def __init__(self, gate: PackGate, exchange: Exchange, say: Callable[[str], None]) -> None:
        self._gate, self._exchange, self._say = gate, exchange, say
        self._batches = 0
        self.is_due, self.has_passed = True, False

    def __call__(self, style: PackStyle | None, gradients: Callable[[PackStyle], Outcome | None]) -> bool:
        """Looks at one batch; returns whether rows may be packed.

        Args:
            style: what packs have; None while this rank knows nothing of the model.
            gradients: `check_gradients` of a pack in that style.

        Raises:
            GradientCheckError: `layout="pack"`, and the step does something else with packed rows; on all ranks.
        """
        self._batches += 1
        self.is_due = self._batches < _MOST_BATCHES
        verdict: bool | None = None
        # A rank whose batches have one row each does not know the model yet; on some rank it may be known to leak.
        agreed = self._exchange([int(style is not None), int(self._gate.verdict is False)])
        if agreed[:, 1].any():
            verdict = False
        elif agreed[:, 0].all():
            assert style is not None
            verdict = self._of(lambda: gradients(style))
        if verdict is None and not self.is_due:
            self._say(f"rows are padded: none of the first {self._batches} batches tells whether the step takes packs")
        self.is_due = self.is_due and verdict is None
        self.has_passed = bool(verdict)
        return self.has_passed

    def again(self) -> None:
        """Models have become others on some rank: what was found out of the step does not count any more."""
        self._batches, self.is_due, self.has_passed = 0, True, False

    def _of(self, check: Callable[[], Outcome | None]) -> bool | None:
        """True if the step takes packs, False where rows are padded for good, None if this batch cannot tell."""
        try:
            outcome = check()
        except Exception as error:  # the step may need the mask, or rows
            if self._gate.is_demanded:
                raise
            self._gate.give_up(next(iter(str(error).splitlines()), type(error).__name__))
            return False
        if outcome is None or not (outcome.told or outcome.final):
            return None
        if outcome.told:
            return True
        if self._gate.is_demanded:
            unproven = GradientCheckError(f"layout='pack' stays unproven: {outcome.words}. Use layout='pad'")
            unproven.is_declaration = True
            raise unproven
        self._gate.give_up(outcome.words)
        return False


__all__ = ["PackCheck"]
