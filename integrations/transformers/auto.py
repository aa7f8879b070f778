"""`mode="auto"` of the Trainer: split where that is exact, else joint where that is, else steps as they came."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import (
    ArchitectureError,
    GradientCheckError,
    GradientHookError,
    PadMinError,
    TrainingStepError,
)
from lightning_padmin.integrations.common import (
    BeforeStep,
    Ladder,
    Session,
    StepState,
    Training,
    Way,
    WholeSteps,
    own_step,
    reason_of,
    refuse_batch_statistics,
    replaced,
    slots_of,
    too_large,
    why_way_is_kept,
)
from lightning_padmin.integrations.transformers.joint import whole_steps, why_not_joint
from lightning_padmin.stats import PaddingStats

_MOST_WATCHED = 4  # first steps in which it is seen whether one of the user's own may be split


@dataclass
class Window:
    """A window whose rows were dealt over its steps, until all of these have run.

    Attributes:
        batches: as they came.
        num_items: the Trainer's own number.
        before: the counts of this rank without it.
        start: what was there before its first step.
        more: of it, what a step of the user's own may have written into.
        sent: what its steps have returned so far.
    """

    batches: list[Any]
    num_items: Any
    before: tuple[PaddingStats, PaddingStats]
    start: BeforeStep | None = None
    more: StepState | None = None
    sent: list[Tensor] = field(default_factory=list)


class Auto:
    """Which way the batches of one Trainer go.

    Args:
        trainer: the Trainer, set up.
        session: of the mixin.
        training: of its model.
        known: what speaks against a way before the first batch: the next one, and why.

    Attributes:
        least: the first way that nothing known speaks against.
        batches: those that are about to run, as they came.
    """

    def __init__(
        self, trainer: Any, session: Session, training: Training, known: Sequence[tuple[Way, PadMinError]]
    ) -> None:
        self._trainer, self._session, self._training = trainer, session, training
        self.batches: Sequence[Any] = ()
        config: PadMinConfig = session.config
        # Joint steps are compared, or there are none; DeepSpeed's engine takes every backward pass for a step's.
        can_compare = config.check != "off" and training.topology.kind != "engine"
        has_joint = can_compare and why_not_joint(trainer, config) is None
        self._ways: list[Way] = ["split", "joint", "as it came"] if has_joint else ["split", "as it came"]
        self._known: PadMinError | None = None  # why
        self.least: Way = "split"
        for way, why in known:
            self.begin_at(way, why)
        self._ladder: Ladder | None = None
        self._whole: WholeSteps | None = None
        self._watched = 0

    def begin_at(self, way: Way, why: PadMinError) -> None:
        """The ways before this one are other trainings; known before the first batch."""
        if way not in self._ways:
            way = "as it came"
        if self._ways.index(way) > self._ways.index(self.least):
            self.least, self._known = way, why

    @property
    def is_split(self) -> bool:
        """Whether batches are split, as far as is known."""
        return self.least == "split" and self._training.way == "split"

    @property
    def ladder(self) -> Ladder:
        """Of the training that runs."""
        assert self._ladder is not None
        return self._ladder

    @property
    def whole(self) -> WholeSteps:
        """What runs steps that are not split."""
        if self._whole is None:
            self._whole = whole_steps(self._trainer, self._session, self._training, self.ladder)
        return self._whole

    def begin(self) -> None:
        """A training begins, which may go on from a checkpoint."""
        self._ladder = self._whole = None

    def first_window(self, read: Callable[[Any], object] | None) -> None:
        """Before anything of a training runs, on all ranks: which way it begins; they go the same.

        Args:
            read: reads one for splitting, and raises what speaks against it; None: it is read later.
        """
        if self._ladder is not None:
            return
        training, ways, budget = self._training, self._ways, self._session.config.token_budget
        self._ladder = Ladder(
            training, ways, budget, lambda: why_way_is_kept(self._trainer.model_wrapped), may_replay=True
        )
        now: Any = self._ladder.rung
        place, why = max(ways.index(now), ways.index(self.least)), self._known
        if ways[place] == "split":
            why = self._why_not_split(read)
            place = int(why is not None)
        told = training.topology.exchange([place, self._slots])
        if int(told[:, 0].max()) > place:
            place, why = int(told[:, 0].max()), PadMinError("so another rank has found")
        if why is None or ways[place] == now:
            return
        slots = int(told[:, 1].max())
        if budget is not None and slots > budget and not self._ladder.replays(ways[place]):
            self._ladder = None
            raise too_large(why, slots, budget)
        self._ladder.begin(ways[place], reason_of(why), str(why))

    def _why_not_split(self, read: Callable[[Any], object] | None) -> PadMinError | None:
        self._trainer.model_wrapped.train()
        try:
            refuse_batch_statistics(self._trainer.model_wrapped)
            if read is not None:
                for batch in self.batches:
                    read(batch)
        except PadMinError as error:
            if isinstance(error, ArchitectureError) or error.may_stay_whole:
                return error
        except Exception:  # raised again in its place
            return None
        return None

    # In the middle of a training.

    @property
    def _slots(self) -> int:
        return max(map(slots_of, self.batches))

    def go_over(self, error: PadMinError) -> None:
        """To the next way, with the batches that are about to run and all that come.

        Args:
            error: why not this one; where only one rank may have seen it, and there are others, it is raised.

        Raises:
            PadMinError: it, or why there is no other way.
        """
        if not self._is_reason(error):
            raise error
        self._training.slots = self._slots
        self.ladder.go_over(error)

    def _is_reason(self, error: PadMinError) -> bool:
        if self._session.config.layout == "pack":  # which was asked for, and whole steps cannot be had with
            return False
        if isinstance(error, GradientCheckError):  # on all ranks
            return True
        if self._training.topology.world > 1:
            return False
        if isinstance(error, ArchitectureError | GradientHookError | TrainingStepError):
            return True
        return error.may_stay_whole and not self.ladder.has_run

    def refuse_logs(self, names: Collection[str]) -> None:
        """Where a batch fits whole, what its loss logs itself is logged once for it, and of all of it; on all ranks.

        Raises:
            GradientCheckError: so this one should stay whole.
        """
        if self._ladder is None or not self._ladder.left:
            return
        told = self._training.topology.exchange([int(bool(names)), self._slots])
        if told[:, 0].any() and self._may_stay_whole(int(told[:, 1].max())):
            raise _of_logs(names or ("what another rank logs",))

    def _may_stay_whole(self, slots: int) -> bool:
        budget, left = self._session.config.token_budget, self.ladder.left
        return budget is None or slots <= budget or (bool(left) and self.ladder.replays(left[0]))

    @contextmanager
    def logs_of_parts(self, count: int, can_be_had_back: bool) -> Iterator[None]:
        """The same of what a loss begins to log in the middle of a training, on one process.

        Args:
            count: of parts.
            can_be_had_back: whether another way may follow.
        """
        if count < 2 or not can_be_had_back or not self._may_stay_whole(self._slots):
            yield
            return

        def log(logs: Any, *_: Any, **__: Any) -> None:
            raise _of_logs(logs)

        with replaced(self._trainer, log=log):
            yield

    @contextmanager
    def watching(self, model: Any, window: Window | None) -> Iterator[BeforeStep | None]:
        """Around a step that is split: what it must be given back, should another way follow; None: it cannot be.

        Args:
            model: unwrapped.
            window: the one whose rows were dealt.
        """
        training = self._training
        if training.topology.world > 1 or training.topology.kind in ("sharded", "engine") or not self.ladder.left:
            yield None
            return
        before, more = (None, None) if window is None else (window.start, window.more)
        if before is None:
            is_first = all(p.grad is None for p in model.parameters())
            if is_first and own_step(self._trainer) is not None and self._watched < _MOST_WATCHED:
                self._watched += 1
                more = StepState(model, self._trainer)
            before = BeforeStep(model, more)
            if window is not None:
                window.start, window.more = before, more
        with nullcontext() if more is None else more.watching():
            yield before

    def reason_of(self, error: Exception, count: int) -> PadMinError | None:
        """Why a step cannot be split, if that is what an error from its middle says, on one process.

        Args:
            error: raised by a part.
            count: of parts.
        """
        if isinstance(error, GradientCheckError | GradientHookError | TrainingStepError):
            return error
        if isinstance(error, PadMinError | torch.OutOfMemoryError | MemoryError) or count < 2:
            return None
        found = GradientCheckError(f"the step fails on a part of a batch ({type(error).__name__}: {error})")
        found.__cause__ = error
        return found


def _of_logs(names: Iterable[str]) -> GradientCheckError:
    told = ", ".join(map(repr, sorted(map(str, names))[:4]))
    return GradientCheckError(f"the loss logs {told} itself, which would be logged once per part of a batch")


__all__ = ["Auto", "Window"]
