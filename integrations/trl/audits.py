"""When windows of an online trainer are looked at, and what these looks have seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ConfigError, GradientCheckError
from lightning_padmin.integrations.common import (
    MOST_BATCHES,
    Fingerprint,
    Ledger,
    RandomState,
    SessionAudits,
    fingerprint,
    new_in_loss,
)
from lightning_padmin.integrations.trl import hooks as trl_stock
from lightning_padmin.integrations.trl.facets import OF_PADDING
from lightning_padmin.integrations.trl.passes import free
from lightning_padmin.microbatching import MicroBatches


class Audits:
    """Whether the window that is about to run is to be looked at, the same on all ranks.

    Args:
        config: the options.
        kept: the session's, for metrics, checkpoints and the file of proof.

    Attributes:
        ledger: what looks that passed have seen.
        loss_is_open: no look has told yet whether the loss separates; the same on all ranks.
        model_is_open: the same of the model and padding.
    """

    def __init__(self, config: PadMinConfig, kept: SessionAudits) -> None:
        self._check, self._kept = config.check, kept
        self.begin()

    def begin(self) -> None:
        """A training begins: with another loss, perhaps."""
        self._kept.end()
        self.ledger = self._kept.ledger() or Ledger()
        self._facets: Callable[[], set[str]] | None = None
        self._of_loss = False
        self.loss_is_open = self.model_is_open = self._check != "off"
        self._shown: set[str] = set()
        self._prints: dict[str, Fingerprint] = {}
        self._last: Fingerprint | None = None  # of a loss that a look has seen
        self._windows = 0
        self._news: list[str] = []
        self._told: list[float] = []  # the difference of the last look, if it could tell

    @property
    def stands(self) -> bool:
        """Whether later windows are looked at, too."""
        return self._check == "audit"

    def ask(self, facets: Callable[[], set[str]], *, loss: bool) -> None:
        """A window is about to run; to be called once for each, before ranks agree on its plan.

        Args:
            facets: finds out what it shows.
            loss: whether a look would tell of its loss.
        """
        self._windows += 1
        self._of_loss, self._facets = loss, facets if self.stands else None
        if self.stands:
            self.ledger.begin_step()

    def wants(self, *batch: object) -> bool:
        """Whether this rank wants a look at the batch that is being prepared; other ranks hear of it, and of errors."""
        facets, self._facets = self._facets, None
        if facets is None:
            return False
        self._shown = facets()
        self.ledger.show(self._shown)
        self._news = sorted(self.ledger.new)
        return self.ledger.wants or (self._of_loss and self.loss_is_open)

    def are_due(self, any_wish: bool) -> bool:
        """Whether to look at it, now that ranks have agreed.

        Args:
            any_wish: whether any rank wants that.
        """
        if self.stands:
            return any_wish
        of_loss = self._of_loss and self.loss_is_open
        return of_loss or (self.model_is_open and self._windows <= MOST_BATCHES)

    def passed(self, difference: float, keys: Sequence[str], *, loss: bool, model: bool) -> None:
        """A look has found nothing.

        Args:
            difference: the largest that it has found.
            keys: what the loss of the window shows with the values that it really has.
            loss: whether it could tell of the loss, on this rank.
            model: whether it could tell of the model.
        """
        if not self.stands:
            return
        if not loss and not model:
            self.ledger.could_not_tell(for_want_of_gradients=True)
            return
        self._told.append(difference)
        seen = self._shown | set(keys)
        self.ledger.passed(difference, seen - OF_PADDING if not model else seen if loss else seen & OF_PADDING)
        self._last = next((self._prints[key] for key in keys), self._last)

    @contextmanager
    def noted(self, batches: MicroBatches, way: Callable[[], str], rank: int) -> Iterator[None]:
        """Around a look, which is written down, on the first rank, with what it has found.

        Args:
            batches: the plan of the window.
            way: the mode in which it is going to run.
            rank: of this process.
        """
        self._told.clear()

        def note(kind: str, facets: Sequence[str], **found: Any) -> None:
            if self.stands and rank == 0:
                plan = {"rows": len(batches.table), "micro_batches": len(batches), "slots": batches.stats.slots}
                self._kept.note(kind, step=self.ledger.step, way=way(), facets=facets, **found, **plan)

        try:
            yield
        except (ConfigError, GradientCheckError) as error:
            note("refused", self._news, words=str(error))
            raise
        if not self._told:
            note("could not tell", self._news, given_up=self.ledger.given_up)
        else:
            note("audit", self.ledger.record[-1].facets, difference=max(self._told))

    def since(self) -> str:
        """What was new, and since when nobody has looked, as the end of a sentence; empty in a training's first."""
        if not self.stands or self._windows == 1:
            return ""
        words = [self._words(each) for each in self._news]
        news = f"New in this window: {', '.join(words[:4])}{', ...' if len(words) > 4 else ''}. " if words else ""
        step, last = self.ledger.step, self.ledger.last if self.ledger.has_passed else 0
        between = step - 1 - last
        told = f"the last look that passed was at window {last}" if last else "no look has passed before"
        gone = f", and {between} windows since then have been trained on and are not undone" if last and between else ""
        return f". {news}This is window {step}; {told}{gone}"

    # What the loss shows.

    def key_of(self, loss: Tensor) -> str:
        """The facet that the graph of a loss is."""
        found = fingerprint(loss)
        key = f"loss {found.key}"
        self._prints.setdefault(key, found)
        return key

    def _words(self, facet: str) -> str:
        found = self._prints.get(facet)
        if found is None:
            return facet
        return "a loss" if self._last is None else f"a loss with {new_in_loss(self._last, found) or 'other operations'}"

    def heard(self, key: str) -> None:
        """What a window's loss has shown while the window ran: the next one is looked at if it is new."""
        if self.stands and not self.ledger.has_seen(key):
            self.ledger.expect([key])


def keys_of_losses(
    audits: Audits,
    trainer: Any,
    entries: Sequence[Any],
    stock_loss: Callable[..., Any],
    kinds: Sequence[tuple[torch.dtype, torch.device] | None],
) -> set[str]:
    """What the loss of each stock micro-batch shows, before any of them has run: with values as they may be.

    Args:
        audits: gives names.
        trainer: of TRL.
        entries: prepared inputs.
        stock_loss: the trainer's loss of inputs, with log-probs and entropies in place of a forward pass.
        kinds: dtypes and devices of these; None for those that are not there.
    """
    found: set[str] = set()
    draw = RandomState()
    for inputs in entries:
        values = [None if kind is None else _values(inputs, kind, k == 0) for k, kind in enumerate(kinds)]
        try:
            with torch.enable_grad(), trl_stock.without_trace(trainer), draw.again():
                loss = stock_loss(inputs, values)[0]
            found.add(audits.key_of(loss))  # outside, where nothing watches what the graph has saved
            free(loss, values)
        except Exception:  # the passes of the window will say so, in step with other ranks
            return found
    return found


def _values(inputs: Any, kind: tuple[torch.dtype, torch.device], of_log_probs: bool) -> Tensor:
    """Log-probs near those of the old policy where they are known; entropies."""
    dtype, device = kind
    rows, columns = inputs["completion_ids"].shape
    pattern = (torch.arange(rows)[:, None] * 7 + torch.arange(columns) * 3) % 11 / 11.0
    old = inputs.get("old_per_token_logps") if of_log_probs else None
    start = pattern.to(device, dtype)
    values = old.to(device, dtype) * (1 + 0.1 * start) if old is not None else start + 0.5
    if old is None and of_log_probs:
        values = -values
    return values.detach().requires_grad_()


__all__ = ["Audits", "keys_of_losses"]
