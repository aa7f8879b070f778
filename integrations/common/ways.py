"""Under `mode="auto"`: from one way of running batches to the next, where a check finds that it would change training.

split         gradients of micro-batches are added; exact where the loss separates over rows
joint         calls of models run in chunks inside of one whole step; exact where the model keeps rows apart
replay        joint, where a chunk's activations are not kept, and it runs again in the backward pass
as it came    what training would be without this library

Split and replay are bounded by the token budget (replay but for the outputs of the whole batch); a batch that goes one
of the other two ways takes the memory that it takes without padmin. So these are for batches of at most `token_budget`
slots, or where the budget is None, as if the user had said so. Between joint and replay each batch decides by its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from lightning_padmin.batch import RowTable
from lightning_padmin.errors import GradientCheckError, PadMinError
from lightning_padmin.integrations.common.topology import has_static_graph
from lightning_padmin.integrations.common.training import Training
from lightning_padmin.microbatching import MicroBatch
from lightning_padmin.runtime import RandomState
from lightning_padmin.stats import PaddingStats

Way: TypeAlias = Literal["split", "joint", "as it came"]
_SAID = {
    "joint": "model calls run in chunks inside of the whole step, as with mode='joint'",
    "replay": "model calls run in chunks inside of the whole step, as with mode='replay' where a batch has more slots "
    "than the budget, else as with mode='joint'",
    "as it came": "batches run as they came, padding and all",
}


class Ladder:
    """The ways that are left to one training.

    Args:
        training: whose way it is.
        ways: those that there are here, the best first.
        budget: most slots of a batch that stays whole; None: any.
        why_kept: why the way of the first batch is kept, in words; None: it is not.
        may_replay: whether chunks of batches that are larger can be replayed here.
    """

    def __init__(
        self,
        training: Training,
        ways: Sequence[Way],
        budget: int | None,
        why_kept: Callable[[], str | None] = lambda: None,
        *,
        may_replay: bool = False,
    ) -> None:
        self._training, self._ways, self._budget, self._why_kept = training, list(ways), budget, why_kept
        self._reasons: list[str] = []
        self._why: list[str] = []  # all of them
        # DeepSpeed's engine gathers parameters by hooks of its own, in the backward pass for that pass alone.
        self._may_replay = may_replay and training.topology.kind != "engine"
        self._has_run, training.may_go_over = False, bool(ways)
        if self._ways and self.rung not in self._ways:  # a checkpoint's, of a module that had other models
            training.way = self._ways[0]
        self._bound()

    @property
    def now(self) -> str:
        """The way that batches go."""
        return self._training.way

    @property
    def left(self) -> list[Way]:
        """The ways after this one."""
        now = self.rung
        return self._ways[self._ways.index(now) + 1 :] if now in self._ways else []

    @property
    def rung(self) -> Any:
        """The same among the ways that there are: a batch that is replayed is one that goes jointly."""
        return "joint" if self.now == "replay" else self.now

    @property
    def has_run(self) -> bool:
        """Whether a batch has gone its way."""
        return self._has_run

    def begin(self, way: Way, reason: str, words: str | None = None) -> None:
        """Before the first batch: the ways before this one cannot be gone.

        Args:
            way: where it begins.
            reason: why, as it is told.
            words: the same with what could be done instead, for an error.
        """
        self._because(reason, words)
        self._training.way = way
        self._bound()

    def go_over(self, error: PadMinError) -> None:
        """To the next way, for the batch that is about to run and all that come. Ranks do so alike.

        Args:
            error: why not this one; the same on all ranks.

        Raises:
            PadMinError: that error, where no way is left, with why; and where another option is what is asked for.
            Exception: what the step itself has raised for a part of a batch, if it is that.
        """
        of_step = error.__cause__
        if not self.left or getattr(error, "is_declaration", False):
            raise error if of_step is None else of_step
        kept = self._why_kept() if self._has_run else None
        if kept is not None:
            raise of_step or _further(error, f"mode='auto' keeps the way of the first batch here ({kept})")
        training, way = self._training, self.left[0]
        slots = int(training.topology.exchange([training.slots]).max())
        if self._budget is not None and slots > self._budget and not self.replays(way):
            own = of_step if self.rung == "split" else None  # a step that fails by itself does so on few rows, too
            raise own or too_large(error, slots, self._budget) from of_step
        self._because(reason_of(error), str(error))
        training.go_over(way)
        self._bound()
        if training.topology.kind == "sharded":
            training.decide_by_size()

    def heard(self) -> None:
        """The batch has been checked, and runs: what has changed is told, once."""
        self._has_run = True
        if self._reasons:
            training, reasons = self._training, "; ".join(self._reasons)
            step = f"from step {max(training.ledger.step, 1)} on, " if training.ledger is not None else ""
            training.notices(f"mode='auto': {step}{_SAID[self.now]}, since otherwise training would change: {reasons}")
            self._reasons = []

    def refuses_left(self, words: str) -> None:
        """Raises GradientCheckError: in a batch above the budget a call cannot run in chunks; says which, and why."""
        slots = self._training.slots
        error = GradientCheckError(
            f"{words}. Batches stay whole, since otherwise training would change: {'; '.join(self._why)}. This one has "
            f"{slots:,} slots, and that call takes the memory of all of them, more than token_budget={self._budget} "
            f"allows: set token_budget={slots} or None, if it fits, as it does where it trained without padmin; or "
            "make batches smaller"
        )
        error.is_declaration = True
        raise error

    def _because(self, reason: str, words: str | None = None) -> None:
        self._reasons.append(reason)
        self._why.append((words or reason).rstrip("."))

    def replays(self, way: str) -> bool:
        """Whether larger batches that go this way are replayed."""
        return way == "joint" and self._may_replay

    def _bound(self) -> None:
        is_bounded = bool(self._ways) and self.now != "split"
        replays = self.replays(self.rung)
        self._training.room = self._budget if is_bounded and not replays else None
        self._training.keeps = self._budget if is_bounded and replays else None


class BeforeStep:
    """What a step that runs another way after all must find as it was: random numbers, gradients, and what is given.

    What a step writes into anything else is refused where batches are split.

    Args:
        module: whose gradients.
        more: entered now, and left to put something back besides.
        zeroes: whether gradients are zeroed in the step, so that those before it do not count.
    """

    def __init__(
        self, module: nn.Module, more: AbstractContextManager[Any] | None = None, *, zeroes: bool = False
    ) -> None:
        self._module, self._more, self._random = module, more, RandomState()
        self._is_first = zeroes or all(p.grad is None for p in module.parameters())
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] | None = None
        self._has_begun = False
        if more is not None:
            more.__enter__()

    def heed(self, is_new: bool) -> None:
        """A loss is about to be sent backward. Gradients before the first one are copied, if that one is new.

        Args:
            is_new: whether it is of a kind that no check has seen.
        """
        if is_new and not self._is_first and not self._has_begun:
            parameters = self._module.parameters()
            self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]
        self._has_begun = True

    @property
    def can_be_had_back(self) -> bool:
        """Whether there were no gradients before, or they are known."""
        return self._is_first or self._gradients is not None

    def restore(self) -> None:
        """Puts all back."""
        self._random.restore()
        if self._more is not None:
            self._more.__exit__(None, None, None)
        for parameter, gradient in self._gradients or ():
            parameter.grad = gradient
        if self._is_first:
            self._module.zero_grad(set_to_none=True)


class Whole(Sequence[MicroBatch]):
    """A batch that stays whole, as the one micro-batch that it is.

    Args:
        batch: as it came.
        table: its row table.

    Attributes:
        stats: what it costs; to be written once its calls have run in chunks.
    """

    def __init__(self, batch: Any, table: RowTable) -> None:
        rows = np.arange(len(table), dtype=np.int64)
        self._micro = MicroBatch(batch, 1.0, rows, 0, 1, has_loss=table.has_loss)
        self.stats, self.source, self.table = stats_as_it_came(table), batch, table

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return [self._micro][index]


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


def why_way_is_kept(wrapper: nn.Module) -> str | None:
    """Why batches cannot go another way than the first one went, in words; None: they can.

    Args:
        wrapper: what is trained, as it is wrapped.
    """
    if has_static_graph(wrapper):
        return "static_graph=True"
    for module in wrapper.modules():
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
            return f"{type(module).__name__} is compiled"
    return None


def too_large(error: PadMinError, slots: int, budget: int) -> PadMinError:
    """An error where batches would have to stay whole, and have more slots than the budget."""
    return _further(
        error,
        f"mode='auto' does not go on with whole batches, since one of {slots:,} slots takes more memory than "
        f"token_budget={budget} allows: set token_budget={slots} or None, if it fits",
    )


def reason_of(error: PadMinError) -> str:
    """What was found, without what could be done instead."""
    return str(error).split(". ")[0].rstrip(".")


def _further(error: PadMinError, words: str) -> PadMinError:
    return type(error)(f"{str(error).rstrip('.')}. {words}")


__all__ = ["BeforeStep", "Ladder", "Way", "Whole", "reason_of", "stats_as_it_came", "too_large", "why_way_is_kept"]
