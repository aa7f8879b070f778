"""The first-batch check inside of a Trainer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_padmin.batch import RowTable, Schema
from lightning_padmin.config import PadMinConfig
from lightning_padmin.forward import CallSite, Forwards, call_sites, chunked
from lightning_padmin.integrations.common import Advice, FirstBatches, Outcome, Read, Session, Training, reducing
from lightning_padmin.integrations.lightning.loop import has_collective_forwards, is_sharded, quiet_training_step
from lightning_padmin.microbatching import PackStyle

_MOST_WITHOUT_GRADIENT = 5
_STOP = "use PadMinCallback(enabled=False)"
_COUPLED = "Run the model in chunks with mode='joint', or " + _STOP
_ONCE = "in on_train_batch_end or on_before_optimizer_step (for means over an epoch: self.log)"
_COUPLED_ELSEWHERE = (
    "Call your model through lightning_padmin.PaddedForward in training_step, and leave the callback out, or " + _STOP
)
# What is said of masks of other sequences; see `MicroBatcher`.
OTHER_MASKS = ". If the loss compares rows of both, mode='joint' besides"


class FirstBatchCheck:
    """Checks the first batch of a fit that can tell, and further ones as long as they could tell more.

    Args:
        trainer: the Trainer; its module's training_step is what is checked.
        session: says what is found.
        training: of the module.
        config: the declarations.
        sites: for joint mode, the calls that run in chunks.
        kept: what stands in for these.
        tell: told why one of them runs as it came; see `chunked`.

    Attributes:
        batches: which of them are checked.
        module: whose step it is.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        session: Session,
        training: Training,
        config: PadMinConfig,
        sites: Mapping[str, CallSite],
        kept: Forwards | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._trainer, self._session, self._training, self._config = trainer, session, training, config
        self._sites, self._kept, self._tell = sites, kept, tell
        self._said: set[str] = set()
        self._batch: tuple[OrderedDict[str, Any], Schema, RowTable] | None = None
        self.module, is_on = trainer.lightning_module, config.check != "off"
        most = _MOST_WITHOUT_GRADIENT if config.check == "first-batch" else None
        self.batches = FirstBatches(is_on, most_without_gradient=most)

    def __call__(
        self, kwargs: OrderedDict[str, Any], schema: Schema, table: RowTable, shows_first: bool = False
    ) -> None:
        """Checks one batch, if it may tell more than those before it; on all ranks or on none.

        Args:
            kwargs: what training_step is about to be called with, the batch first.
            schema: the batch's schema.
            table: its row table.
            shows_first: some rank's batch has labels on first tokens; the same on all ranks.

        Raises:
            GradientCheckError: training would change; on all ranks, with the same message.
        """
        self._batch = kwargs, schema, table
        is_due = self.batches.is_due or self._training.audit_is_due
        if not is_due or not is_sharded(self._trainer):
            self._look(kwargs, schema, table)
        else:
            with reducing(self._trainer.strategy.model) as none_waits:
                if none_waits:
                    self._look(kwargs, schema, table)
                else:  # in the middle of a window
                    self._training.postpone()
        if shows_first and self.batches.first_is_open:
            self.batches.heard_of_first_labels(self._outcome(kwargs, schema, table, first_labels=True))

    def _look(self, kwargs: OrderedDict[str, Any], schema: Schema, table: RowTable) -> None:
        if self.batches.is_due:
            self._check(kwargs, schema, table)
        elif self._training.audit_is_due:
            outcome = self._training.audited(lambda: self._outcome(kwargs, schema, table))
            if outcome is not None and outcome.notable:
                self._say(outcome)

    def hear(self, loss: object, rows: Iterable[int] = ()) -> None:
        """See `Training.hear`."""
        self._training.hear(loss, rows)

    @property
    def hears_news(self) -> bool:
        """Whether a loss was heard whose kind no check has seen."""
        return self._training.hears_news

    def settle(self, *, is_last: bool) -> None:
        """Behind a backward pass: audits the batch where its loss was of a new kind.

        Raises:
            GradientCheckError: training would change; the gradients so far are of no use.
        """
        if self._batch is not None:
            kwargs, schema, table = self._batch
            if is_last:
                self._batch = None  # nothing of it is kept
            self._training.settle(lambda rows: self._outcome(kwargs, schema, table, prefer=rows), is_last=is_last)

    def _check(self, kwargs: OrderedDict[str, Any], schema: Schema, table: RowTable) -> None:
        batches = self.batches
        had_told = batches.told
        more = had_told and not self._training.audit_is_due
        outcome = self._training.audited(lambda: self._outcome(kwargs, schema, table, more_than_told=more))
        batches.heard(outcome)
        if outcome is None:
            if not batches.is_due and not had_told:
                words = f"none of the first {batches.count} batches has two rows that carry loss: not checked"
                self._session.tell(words)
        elif not had_told:
            self._say(outcome)

    def _say(self, outcome: Outcome) -> None:
        if outcome.words in self._said:
            return
        self._said.add(outcome.words)
        words = f"mode {self._training.way if self._sites else 'split'}: {outcome.words}"
        if outcome.notable and not (outcome.told and self._training.findings.corrects):
            self._training.notices(words, key=words)
        else:
            self._session.tell(words)

    def _outcome(
        self, kwargs: OrderedDict[str, Any], schema: Schema, table: RowTable, **options: Any
    ) -> Outcome | None:
        can_be_joint = bool(self._sites) or bool(call_sites(self._trainer.lightning_module, self._session.config))
        alone = self._sites and self._training.gate is None
        return _gradients(
            self._trainer,
            self._training,
            kwargs,
            (kwargs["batch"], schema, table),
            self._config,
            joint=self._chunked if self._sites else None,
            alone=self._alone if alone else None,
            advice=Advice(_COUPLED if can_be_joint else _COUPLED_ELSEWHERE, _STOP, _ONCE),
            **options,
        )

    def _chunked(self) -> AbstractContextManager[Any]:
        again = self._training.replays
        return self._in_chunks(self._config, self._training.gate, self._kept, self._tell, anew=True, replays=again)

    def _alone(self) -> AbstractContextManager[Any]:
        # Without a budget of its own: that a row is over it is no news here.
        return self._in_chunks(replace(self._config, max_rows=1, token_budget=None), tell=self._tell)

    def _in_chunks(self, config: PadMinConfig, *more: Any, **named: Any) -> AbstractContextManager[Any]:
        """Ranks run equally many chunks where forward passes are collective."""
        exchange = self._training.topology.exchange if has_collective_forwards(self._trainer) else None
        return chunked(self._sites, config, exchange, *more, **named)


class Losses:
    """What hears of losses, on the way that batches go now.

    Args:
        check: gives the check of that way.
    """

    def __init__(self, check: Callable[[], FirstBatchCheck | None]) -> None:
        self._check = check

    def hear(self, loss: object, rows: Iterable[int] = ()) -> None:
        """See `Training.hear`."""
        if (check := self._check()) is not None:
            check.hear(loss, rows)

    @property
    def are_new(self) -> bool:
        """Whether one was heard whose kind no check has seen."""
        return (check := self._check()) is not None and check.hears_news

    def settle(self, *, is_last: bool) -> None:
        """See `FirstBatchCheck.settle`."""
        if (check := self._check()) is not None:
            check.settle(is_last=is_last)


def pack_gradients(
    trainer: pl.Trainer,
    training: Training,
    config: PadMinConfig,
    kwargs: OrderedDict[str, Any],
    style: PackStyle,
    read: Read,
) -> Outcome | None:
    """Compares the step on packs of a batch with the step on its rows as they came."""
    return _gradients(trainer, training, kwargs, read, config, packs=style, advice=Advice(off="use layout='pad'"))


def _gradients(
    trainer: pl.Trainer,
    training: Training,
    kwargs: OrderedDict[str, Any],
    read: Read,
    config: PadMinConfig,
    **how: Any,
) -> Outcome | None:
    # Mixed precision computes in another dtype than the parameters'.
    is_half = not trainer.precision.startswith(("32", "64"))
    said: dict[str, Any] = {}
    with quiet_training_step(trainer, kwargs, said) as loss:
        how["logged"] = lambda: _values(trainer.lightning_module, said)
        return training.gradients(loss, read, config, is_half=is_half, **how)


def _values(module: nn.Module, said: Mapping[str, Any]) -> dict[str, Any]:
    """What a step has logged, and what is in the metrics that it may have updated, by name."""
    metrics = {name: child for name, child in module.named_modules() if isinstance(child, Metric)}
    metrics |= {name: value for name, value in said.items() if isinstance(value, Metric)}
    values = {name: value for name, value in said.items() if not isinstance(value, Metric)}
    for name, metric in metrics.items():
        for key in metric._defaults:
            state = getattr(metric, key)
            parts = [state] if isinstance(state, Tensor) else list(state)
            values |= {f"{name}.{key}" + f"[{k}]" * (len(parts) > 1): part for k, part in enumerate(parts)}
    return values
