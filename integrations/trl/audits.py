"""When windows of an online trainer are looked at, and what these looks have seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_padmin.integrations.common import MOST_BATCHES, Fingerprint, Ledger, RandomState, Topology, fingerprint
from lightning_padmin.integrations.trl import hooks as trl_stock
from lightning_padmin.integrations.trl.facets import OF_PADDING

_LOSS = "the loss has operations or factors like no loss before"


class Audits:
    """Whether the window that is about to run is to be looked at, the same on all ranks.

    Args:
        check: the option: `"off"`, `"first-batch"` (until a look could tell) or `"audit"`.
        topology: of the processes.

    Attributes:
        ledger: what looks that passed have seen.
        loss_is_open: no look has told yet whether the loss separates; the same on all ranks.
        model_is_open: the same of the model and padding.
    """

    def __init__(self, check: str, topology: Topology) -> None:
        self._check, self._topology = check, topology
        self.begin()

    def begin(self) -> None:
        """A training begins: with another loss, perhaps."""
        self.ledger = Ledger()
        self.loss_is_open = self.model_is_open = self._check != "off"
        self._shown: set[str] = set()
        self._late: dict[str, int] = {}
        self._words: dict[str, str] = {}
        self._windows = 0
        self.news = ""

    @property
    def stands(self) -> bool:
        """Whether later windows are looked at, too."""
        return self._check == "audit"

    def are_due(self, facets: Callable[[], set[str]]) -> bool:
        """Whether to look at the window that is about to run; to be called once for each, on every rank.

        Args:
            facets: what it shows.
        """
        if self._check == "off":
            return False
        self._windows += 1
        if not self.stands:
            return self.loss_is_open or (self.model_is_open and self._windows <= MOST_BATCHES)
        ledger = self.ledger
        ledger.begin_step()
        self._shown = facets()
        ledger.show(self._shown | set(self._late))
        self.news = "; ".join(self._words.get(each, each) for each in sorted(ledger.new))
        return self._agreed(ledger.wants or self.loss_is_open)

    def _agreed(self, wish: bool) -> bool:
        """Whether any rank wants a look."""
        return bool(self._topology.exchange([int(wish)]).any())

    def passed(self, difference: float, keys: Iterable[str], *, loss: bool, model: bool) -> None:
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
            self.ledger.could_not_tell()
            return
        seen = self._shown | set(keys)
        seen = seen - OF_PADDING if not model else seen if loss else seen & OF_PADDING
        self.ledger.passed(difference, seen)
        self._late = {key: window for key, window in self._late.items() if not self.ledger.has_seen(key)}

    def since(self) -> str:
        """What was new, and since when nobody has looked, as the end of a sentence; empty in a training's first."""
        if not self.stands or self._windows == 1:
            return ""
        news = f" It came with: {self.news}." if self.news else ""
        last = self.ledger.last
        between = self._windows - 1 - last
        told = f"the last look that passed was at window {last}" if last else "no look has passed before"
        gone = f", and {between} windows since have been trained on and are not undone" if between else ""
        return f"{news} This is window {self._windows}; {told}{gone}"

    # What the loss shows.

    def key_of(self, loss: Tensor) -> str:
        """The facet that the graph of a loss is."""
        print_: Fingerprint = fingerprint(loss)
        key = f"loss {print_.key}"
        self._words.setdefault(key, _LOSS)
        return key

    def heard(self, key: str) -> None:
        """What a window's loss has shown while the window ran: the next one is looked at if it is new."""
        if self.stands and not self.ledger.has_seen(key):
            self._late.setdefault(key, self._windows)


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
                found.add(audits.key_of(stock_loss(inputs, values)[0]))
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
