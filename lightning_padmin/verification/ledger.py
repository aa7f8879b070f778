"""Which facets a training has shown to gradient checks that passed, and when another check is due.

A verdict holds for what it has seen: a batch that shows something new is checked before it is trained on. Besides
there are checks at steps 1, 3, 10, 30 and 100, and after that every so often, for what no facet tells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_padmin.errors import PadMinError

FIRST_STEPS = (1, 3, 10, 30, 100)
WAYS = ("split", "joint", "replay", "as it came")
MOST_FACETS = 64
_MOST_TRIES = 8  # batches on which a facet is looked for in vain
_WITHOUT_GRADIENT = 0.08  # of a try: gradients may come yet
_MOST_KEPT = 64  # audits that the record names; the others are counted
_MOST_LETTERS = 500  # of a facet that comes from a file


@dataclass(frozen=True)
class Audit:
    """One check of a training.

    Attributes:
        step: batches up to and with the one that was checked.
        difference: max |split - un-split| / max |un-split| over all gradients.
        facets: what it has seen that none before had.
    """

    step: int
    difference: float
    facets: tuple[str, ...]


class Ledger:
    """What one training has shown to its checks.

    Args:
        every: steps between two checks once there have been 100; 0: none are due but for what is new.

    Attributes:
        step: batches so far, with the one that is about to run; those before a checkpoint are counted too.
        audits: checks that have passed.
        worst: the largest difference among them.
        last: the step of the last one.
        record: the first and the last of them.
        way: how batches run, one of `WAYS`; a verdict is one on that way.
        given_up_before: facets that none had seen when the checkpoint was written.
    """

    def __init__(self, every: int = 500) -> None:
        self.every, self.step, self.audits, self.worst, self.last = every, 0, 0, 0.0, 0
        self.record: list[Audit] = []
        self.way = WAYS[0]
        self._began = self._audits_before = 0  # steps and audits of earlier processes
        self._history: dict[str, int] = {}  # what they have seen
        self.given_up_before: list[str] = []
        self._seen: dict[str, int] = {}
        self._tries: dict[str, float] = {}
        self._new: frozenset[str] = frozenset()
        self._pending: frozenset[str] = frozenset()
        self._is_due = self._is_late = False

    def begin_step(self) -> None:
        """Another batch comes."""
        self.step += 1
        self._new = frozenset()
        self.show_expected()
        step = self.step - self._began
        late = step > FIRST_STEPS[-1] and self.every > 0 and (step - FIRST_STEPS[-1]) % self.every == 0
        self._is_due, self._is_late = step in FIRST_STEPS or late or self._is_late, False

    def show(self, facets: Iterable[str]) -> None:
        """What the batch that is about to run shows; may be called more than once for a step."""
        room = MOST_FACETS - len(self._seen)
        new = [each for each in facets if each not in self._seen and self._tries.get(each, 0) < _MOST_TRIES]
        self._new |= frozenset(sorted(new)[: max(room, 0)])

    def forget(self, facets: Collection[str]) -> None:
        """These are no facets any more; there is room for others."""
        for facet in facets:
            self._seen.pop(facet, None)
            self._tries.pop(facet, None)
        self._new -= frozenset(facets)

    def expect(self, facets: Iterable[str]) -> None:
        """What a step has shown behind its forward passes, too late to look at it: the next one is checked."""
        self._pending |= frozenset(facets)

    def show_expected(self) -> None:
        """It is looked at now, after all."""
        self.show(self._pending)
        self._pending = frozenset()

    def postpone(self) -> None:
        """This batch cannot be looked at; the next one is."""
        self._pending |= self._new
        self._is_late = self._is_late or self._is_due
        self._new, self._is_due = frozenset(), False

    @property
    def new(self) -> frozenset[str]:
        """What the batch shows that no check has seen."""
        return self._new

    @property
    def wants(self) -> bool:
        """Whether this batch is to be checked: it shows something new, or the time has come."""
        return self._is_due or bool(self._new)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for further facets: only the time decides over checks from now on."""
        return len(self._seen) >= MOST_FACETS

    def has_seen(self, facet: str) -> bool:
        """Whether a check that passed has seen it, or it was looked for often enough."""
        return facet in self._seen or self._tries.get(facet, 0) >= _MOST_TRIES or self.is_full

    def passed(self, difference: float, facets: Iterable[str]) -> None:
        """A check of this batch has passed.

        Args:
            difference: see `Audit`.
            facets: what its rows have shown; others of this batch are left open.
        """
        shown = [each for each in sorted(set(facets)) if each not in self._seen]
        shown = shown[: max(MOST_FACETS - len(self._seen), 0)]
        self._seen |= dict.fromkeys(shown, self.step)
        self.audits, self.last, self.worst = self.audits + 1, self.step, max(self.worst, difference)
        if len(self.record) >= _MOST_KEPT:
            del self.record[_MOST_KEPT // 2]
        self.record.append(Audit(self.step, difference, tuple(shown)))
        self.could_not_tell()

    def restart(self, way: str) -> None:
        """The batch that is about to run goes another way: what was seen counts no more, and it is checked."""
        self.way, self._history = way, self.facets
        self._began, self._audits_before = self.step - 1, self.audits
        self._seen, self._tries, self._pending = {}, {}, frozenset()
        self._new, self._is_due = frozenset(), True

    @property
    def has_passed(self) -> bool:
        """Whether a check of this training has passed; not so where that was before a checkpoint."""
        return self.audits > self._audits_before

    @property
    def facets(self) -> dict[str, int]:
        """All that was seen, with the step where it was seen first; before a checkpoint, too."""
        return dict(self._seen) | self._history

    def could_not_tell(self, *, for_want_of_gradients: bool = False) -> None:
        """A check of this batch could not tell; what it shows is looked for on some more batches."""
        for facet in self._new - set(self._seen):
            self._tries[facet] = self._tries.get(facet, 0) + (_WITHOUT_GRADIENT if for_want_of_gradients else 1)
        self._new, self._is_due = frozenset(), False

    @property
    def given_up(self) -> list[str]:
        """Facets that no check could see on several batches."""
        return sorted(facet for facet, tries in self._tries.items() if tries >= _MOST_TRIES and facet not in self._seen)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain numbers, texts, lists and dictionaries of these."""
        record = [asdict(each) | {"facets": list(each.facets)} for each in self.record]
        return {
            "step": self.step,
            "way": self.way,
            "audits": self.audits,
            "worst": self.worst,
            "last": self.last,
            "facets": self.facets,
            "given_up": self.given_up,
            "record": record,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting. What was seen before counts as history alone: code may have changed since.

        So the first batch is checked again, and the steps at which checks are due are counted from here.

        Raises:
            PadMinError: something is missing or of another type; nothing has been changed then.
        """
        try:
            record = [
                Audit(int(each["step"]), float(each["difference"]), _texts(each["facets"])) for each in state["record"]
            ]
            numbers = int(state["step"]), int(state["audits"]), float(state["worst"]), int(state["last"])
            given_up = list(_texts(state.get("given_up", ())))
            way = str(state.get("way", self.way))
            if way not in WAYS:
                raise ValueError(f"way={way[:40]!r}: expected one of {', '.join(map(repr, WAYS))}")
            history = {_text(facet): int(step) for facet, step in dict(state.get("facets", {})).items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PadMinError(f"audits of a checkpoint cannot be read: {type(error).__name__}: {error}") from None
        self.step, self.audits, self.worst, self.last = numbers
        self.way, half = way, _MOST_KEPT // 2
        self.record = record if len(record) <= _MOST_KEPT else record[:half] + record[-half:]
        self.given_up_before = given_up[: 4 * MOST_FACETS]
        self._began, self._audits_before = self.step, self.audits
        self._history = dict(list(history.items())[: 4 * MOST_FACETS])


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a facet is no {type(value).__name__}")
    return value[:_MOST_LETTERS]


def _texts(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(_text(each) for each in values)


__all__ = ["FIRST_STEPS", "MOST_FACETS", "WAYS", "Audit", "Ledger"]
