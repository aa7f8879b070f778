"""The first-batch check inside of a Trainer."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import nn

from lightning_padmin.batch import RowTable, Schema
from lightning_padmin.config import PadMinConfig
from lightning_padmin.distributed import Exchange
from lightning_padmin.errors import PadMinWarning
from lightning_padmin.forward import Forwards, chunked, transformers_models
from lightning_padmin.integrations.lightning.loop import has_collective_forwards, is_sharded, quiet_training_step
from lightning_padmin.microbatching import MicroBatcher, PackStyle
from lightning_padmin.verification import Advice, Outcome, PackCheck, PackGate, check_gradients

_MOST_BATCHES, _MOST_WITHOUT_GRADIENT = 100, 5
_STOP = "use PadMinCallback(enabled=False)"
_COUPLED = "Run the model in chunks with mode='joint', or " + _STOP
_COUPLED_ELSEWHERE = (
    "Call your model through lightning_padmin.PaddedForward in training_step, and leave the callback out, or " + _STOP
)
# What is said of masks of other sequences; see `MicroBatcher`.
OTHER_MASKS = ". If the loss compares rows of both, mode='joint' besides"


class FirstBatchCheck:
    """Checks the first batch of a fit that can tell, and further ones as long as they could tell more.

    Args:
        trainer: the Trainer; its module's training_step is what is checked.
        config: the declarations.
        exchange: the collective.
        models: for joint mode, the models whose calls are chunked.
        gate: decides whether rows are packed.
        corrects: whether it is known that rolling corrects what this architecture makes of left padding.

    Attributes:
        is_due: whether another batch may tell more.
        first_is_open: whether no batch has told yet if the loss takes labels on first tokens.
        has_passed: whether the first batches have told all they can.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        config: PadMinConfig,
        exchange: Exchange,
        models: dict[str, nn.Module],
        *,
        corrects: bool = False,
        gate: PackGate | None = None,
        kept: Forwards | None = None,
    ) -> None:
        self._trainer, self._config, self._exchange = trainer, config, exchange
        self._models, self._corrects, self._gate, self._kept = models, corrects, gate, kept
        self._told, self._batches, self._without_gradient, self._first_batches = False, 0, 0, 0
        self._said: set[str] = set()
        self.is_due = self.first_is_open = config.check == "first-batch"
        self.has_passed, self.module = False, trainer.lightning_module

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
        if self.is_due:
            self._check(kwargs, schema, table)
        if shows_first and self.first_is_open:
            self._first_batches += 1
            outcome = self._outcome(kwargs, schema, table, first_labels=True)
            told = outcome is not None and outcome.tells_first
            self.first_is_open = not told and self._first_batches < _MOST_BATCHES

    def _check(self, kwargs: OrderedDict[str, Any], schema: Schema, table: RowTable) -> None:
        self._batches += 1
        outcome = self._outcome(kwargs, schema, table, more_than_told=self._told)
        if outcome is not None and (outcome.tells_first or (outcome.final and not outcome.told)):
            self.first_is_open = False
        self.is_due = self._batches < _MOST_BATCHES and not (outcome is not None and outcome.final)
        self.has_passed = outcome is not None and outcome.told and outcome.final
        if outcome is None:
            if not self.is_due and not self._told:
                _say(f"none of the first {self._batches} batches has two rows that carry loss: not checked", False)
        elif not self._told:
            self._told = outcome.told
            self._without_gradient += not outcome.told
            self.is_due = self.is_due and self._without_gradient < _MOST_WITHOUT_GRADIENT
            mode = "joint" if self._models else "split"
            if outcome.words not in self._said:
                self._said.add(outcome.words)
                _say(f"mode {mode}: {outcome.words}", outcome.notable and not (outcome.told and self._corrects))

    def _outcome(
        self, kwargs: OrderedDict[str, Any], schema: Schema, table: RowTable, **options: Any
    ) -> Outcome | None:
        module = self._trainer.lightning_module
        can_be_joint = bool(self._models) or bool(transformers_models(module))
        with quiet_training_step(self._trainer, kwargs) as loss:
            return check_gradients(
                loss,
                kwargs["batch"],
                schema,
                table,
                self._config,
                module,
                tolerance=_tolerance(self._trainer),
                exchange=self._exchange,
                joint=self._chunked if self._models else None,
                alone=self._alone if self._models and self._gate is None else None,
                is_sharded=is_sharded(self._trainer),
                advice=Advice(_COUPLED if can_be_joint else _COUPLED_ELSEWHERE, _STOP),
                **options,
            )

    def _chunked(self) -> AbstractContextManager[Any]:
        return chunked(self._models, self._config, self._chunk_exchange, self._gate, self._kept)

    def _alone(self) -> AbstractContextManager[Any]:
        # Without a budget of its own: that a row is over it is no news here.
        return chunked(self._models, replace(self._config, max_rows=1, token_budget=None), self._chunk_exchange)

    @property
    def _chunk_exchange(self) -> Exchange | None:
        """Ranks run equally many chunks where forward passes are collective."""
        return self._exchange if has_collective_forwards(self._trainer) else None


def pack_gradients(
    trainer: pl.Trainer,
    config: PadMinConfig,
    exchange: Exchange,
    kwargs: OrderedDict[str, Any],
    batcher: MicroBatcher,
    check: PackCheck,
) -> bool:
    """Lets the check look at one batch; returns whether rows may be packed."""
    schema, table = batcher.read_together(kwargs["batch"])

    def gradients(style: PackStyle) -> Outcome | None:
        with quiet_training_step(trainer, kwargs) as loss:
            return check_gradients(
                loss,
                kwargs["batch"],
                schema,
                table,
                config,
                trainer.lightning_module,
                tolerance=_tolerance(trainer),
                exchange=exchange,
                packs=style,
                advice=Advice(off="use layout='pad'"),
            )

    return check(batcher.pack_style, gradients)


def tell(words: str) -> None:
    """Warns, on the first rank."""
    _say(words, True)


def _tolerance(trainer: pl.Trainer) -> float | None:
    """Mixed precision computes in another dtype than the parameters'."""
    return None if trainer.precision.startswith(("32", "64")) else 0.1


@rank_zero_only  # type: ignore[untyped-decorator]
def _say(words: str, notable: bool) -> None:
    if notable:
        warnings.warn(words, PadMinWarning, stacklevel=2)
    else:
        rank_zero_info(f"PadMinCallback: {words}")
