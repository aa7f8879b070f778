"""The audits of one adapter: its ledgers, what metrics and checkpoints say of them, and the file that proves them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import PadMinError
from lightning_padmin.verification import WAYS, Ledger, Proof


class Audits:
    """One ledger for each training, in the order in which they began.

    What a checkpoint has, and what an earlier fit has shown, is history that the next training goes on with.

    Args:
        name: of the adapter.
        config: its options.
        complain: told once, should the file of proof not be written.

    Attributes:
        is_on: whether batches are audited.
    """

    def __init__(self, name: str, config: PadMinConfig, complain: Callable[[str], None]) -> None:
        self._name, self._config, self._complain = name, config, complain
        self.is_on = config.check == "audit" and config.enabled
        self._running: list[Ledger] = []
        self._waiting: list[Ledger] = []
        self._folder: str | None = None
        self._proof: Proof | None = None

    # Ledgers.

    def ledger(self) -> Ledger | None:
        """That of a training which begins; None where nothing is audited."""
        if not self.is_on:
            return None
        ledger = self._waiting.pop(0) if self._waiting else Ledger(self._config.audit_every)
        self._running.append(ledger)
        return ledger

    def end(self) -> None:
        """The trainings that run end; another one goes on counting, and audits its first batch."""
        self._waiting = [_resumed(each.state_dict(), each.every) for each in self._running] + self._waiting
        self._running = []

    @property
    def _ledgers(self) -> list[Ledger]:
        return self._running + self._waiting

    def metrics(self, prefix: str) -> dict[str, float | int]:
        """Audits that have passed so far, and the worst difference among them; the same on every rank."""
        if not self.is_on:
            return {}
        count = sum(each.audits for each in self._ledgers)
        worst = {f"{prefix}audit_worst": max(each.worst for each in self._ledgers)} if count else {}
        ways = [WAYS.index(each.way) for each in self._ledgers]
        mode = {f"{prefix}mode": max(ways)} if ways and self._config.mode == "auto" else {}
        return {f"{prefix}audits": count} | worst | mode

    # Checkpoints.

    def state(self) -> list[dict[str, Any]]:
        """For a checkpoint: plain numbers, texts, lists and dictionaries of these."""
        return [each.state_dict() for each in self._ledgers]

    @property
    def counts(self) -> tuple[int, ...]:
        """What changes with `state`, but for steps."""
        return tuple(number for each in self._ledgers for number in (each.audits, len(each.given_up)))

    def count_steps(self, state: list[dict[str, Any]]) -> None:
        """Brings the steps of what `state` has returned up to date, where `counts` are the same."""
        for each, ledger in zip(state, self._ledgers, strict=True):
            each["step"] = ledger.step

    def read(self, state: Any) -> list[Ledger]:
        """What `state` has returned, as ledgers.

        Raises:
            PadMinError: it is something else.
        """
        if not isinstance(state, list) or not all(isinstance(each, Mapping) for each in state):
            raise PadMinError(f"audits of a checkpoint cannot be read: {type(state).__name__} and no list of records")
        return [_resumed(each, self._config.audit_every) for each in state]

    def take(self, ledgers: list[Ledger]) -> None:
        """Goes on with them, in place of what was counted until now."""
        if not self.is_on:
            return
        for ledger, found in zip(self._running, ledgers, strict=False):
            ledger.load_state_dict(found.state_dict())
        self._waiting = ledgers[len(self._running) :]

    # The file of proof.

    def prove_in(self, folder: object) -> None:
        """Audits are written down below this folder from now on; None, or what is no path: nowhere."""
        path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
        self._folder, self._proof = path if isinstance(path, str) and path else None, None

    def note(self, kind: str, **facts: Any) -> None:
        """A line of the file, on the process that writes it."""
        if self._folder is None:
            return
        if self._proof is None:
            options = {"adapter": self._name, "options": self._config}
            self._proof = Proof(self._folder, options, self._complain)
        self._proof.add(kind, **facts)

    def __getstate__(self) -> dict[str, Any]:
        """Copies count on, and are part of no training."""
        waiting = [_resumed(each.state_dict(), each.every) for each in self._ledgers]
        return vars(self) | {"_running": [], "_waiting": waiting, "_folder": None, "_proof": None}


class KeptAudits:
    """What was audited, among the states of callbacks in the `TrainerState` of transformers, which checkpoints hold.

    Args:
        audits: of the adapter.
    """

    NAME = "PadMinAudits"

    def __init__(self, audits: Audits) -> None:
        self._audits, self._looks = audits, True
        self._kept: dict[str, Any] = {}
        self._known: tuple[int, ...] = ()

    def begin(self) -> None:
        """A training begins, which may go on from a checkpoint."""
        self._looks = True

    def resume(self, state: Any) -> None:
        """Before the first step: goes on with what the checkpoint holds, if there is one and it has something.

        Args:
            state: a `TrainerState`.

        Raises:
            PadMinError: what it holds is malformed.
        """
        if not self._looks or not self._audits.is_on:
            return
        self._looks = False
        kept = (getattr(state, "stateful_callbacks", None) or {}).get(self.NAME)
        if kept is None or kept is self._kept:
            return
        attributes = kept.get("attributes") if isinstance(kept, Mapping) else None
        self._audits.take(self._audits.read(attributes.get("audits") if isinstance(attributes, Mapping) else None))

    def keep(self, state: Any) -> None:
        """Behind each step, before anything is saved.

        Args:
            state: a `TrainerState`.
        """
        callbacks = getattr(state, "stateful_callbacks", None)
        if not self._audits.is_on or not isinstance(callbacks, dict):
            return
        known = self._audits.counts
        if known != self._known:
            self._kept, self._known = {"args": {}, "attributes": {"audits": self._audits.state()}}, known
        else:  # most steps add nothing but themselves
            self._audits.count_steps(self._kept["attributes"]["audits"])
        callbacks[self.NAME] = self._kept


def _resumed(state: Mapping[str, Any], every: int) -> Ledger:
    ledger = Ledger(every)
    ledger.load_state_dict(state)
    return ledger


__all__ = ["Audits", "KeptAudits"]
