"""What every rank says of its set-up at the start, so that ranks which would not train the same thing never begin.

It goes through the key-value store of the process group and not through a collective: a rank that does not take part
(the library is not installed there, or the callback is missing) would meet a collective with one of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

from lightning_padmin._version import __version__
from lightning_padmin.config import PadMinConfig
from lightning_padmin.distributed.collectives import group_store, heard_of_others, peer_watch
from lightning_padmin.errors import ConfigError

_PATIENCE, _TELL_AFTER, _LAST_READ = 15.0, 5.0, 3.0
PATIENCE_OF_LOOPS = 60.0  # where nothing says that all ranks have come as far as this one
_MOST = 200  # characters of a value in a message


def announce(who: str, config: PadMinConfig, **more: str) -> Announcement:
    """This rank's options, written down for the others; to be called on every rank, also where it is switched off.

    Args:
        who: what announces, as users know it.
        config: its options.
        more: further facts; those that begin with an underscore may differ.
    """
    store, rank, world = group_store()
    if store is not None and config.enabled:
        peer_watch()
    return Announcement(who, option_facts(config) | more, store, rank, world)


class Store(Protocol):
    """A key-value store of all ranks, as those of torch.distributed."""

    def set(self, key: str, value: str) -> Any:
        """Writes."""

    def get(self, key: str) -> bytes:
        """Reads; waits for the key."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of the keys are there."""


class Announcement:
    """One rank's set-up, written down for the others.

    Args:
        who: what announces, as users know it (`PadMinCallback`).
        facts: option -> value as text; what must be the same on all ranks.
        store: of the process group; None: this process is alone.
        rank: of this process.
        world: number of ranks.
    """

    def __init__(self, who: str, facts: Mapping[str, str], store: Store | None, rank: int, world: int) -> None:
        self._who, self._rank, self._world, self._store = who, rank, world, store
        self.facts = [dict(facts)]
        if store is None or world == 1:
            self._store = None
            return
        number = next(_numbers.setdefault(who, itertools.count()))  # the same on every rank that has the library
        self._unheard, self._lost = [other for other in range(world) if other != rank], list[int]()
        self._keys = [f"padmin/announced/{who}/{number}/{other}" for other in range(world)]
        store.set(self._keys[rank], json.dumps(dict(facts)))

    @property
    def is_due(self) -> bool:
        """Whether there are other ranks, whose set-up has not been compared yet."""
        return self._store is not None

    def agree(
        self,
        patience: float = _PATIENCE,
        gone: Callable[[], str | None] = heard_of_others,
        tell: Callable[[str], None] = lambda words: print(f"lightning-padmin: {words}", file=sys.stderr, flush=True),
    ) -> list[dict[str, str]]:
        """Waits for what the others say; returns it, by rank.

        Args:
            patience: seconds to wait for a rank that says nothing: few, where it is known that all ranks have come as
                far as this one; else as many as the slowest may need.
            gone: words about ranks that have ended meanwhile, None while there are none.
            tell: told once, after some seconds, who is waited for.

        Raises:
            ConfigError: ranks differ in what must be the same, or a rank says nothing; on every rank that announces.
        """
        store = self._store
        if store is None:
            return self.facts
        self._store = None
        began, told = time.monotonic(), False
        while missing := self._missing(store):
            ranks, waited = ", ".join(map(str, missing)), time.monotonic() - began
            if waited > _TELL_AFTER and not told:
                told = True
                tell(f"waiting for rank {ranks}, which has no {self._who} yet")
            why = gone() or ("the rank that holds the key-value store has ended" if missing == self._lost else None)
            if waited > patience or why is not None:
                raise ConfigError(
                    f"rank {ranks} has no {self._who}, while rank {self._rank} has one"
                    + (f" ({why})" if why is not None else f" (nothing was heard of it within {patience:.0f} s)")
                    + ": ranks would run different passes. Set it up on every rank, with the same options"
                )
            time.sleep(0.02)
        self.facts = [json.loads(store.get(key).decode()) for key in self._keys]
        store.set(f"{self._keys[self._rank]}/read", "")
        try:
            refuse_differences(self._who, self.facts)
        except ConfigError:
            self._wait_until_read(store)
            raise
        return self.facts

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Around what may break because a rank that was refused has left, before ranks have come to `agree`.

        Raises:
            ConfigError: in place of an error from inside: ranks differ in what must be the same.
        """
        try:
            yield
        except Exception as error:
            store = self._store
            if store is not None and not isinstance(error, ConfigError):
                facts = None
                with suppress(RuntimeError):  # the rank that holds it has left
                    if not self._missing(store):
                        facts = [json.loads(store.get(key).decode()) for key in self._keys]
                if facts is not None:
                    self._store = None
                    try:
                        refuse_differences(self._who, facts)
                    except ConfigError as found:
                        raise found from error
            raise

    def _missing(self, store: Store) -> list[int]:
        """Ranks that have said nothing; those of the last time where the store is gone, which is then noted."""
        try:
            self._unheard = [rank for rank, key in enumerate(self._keys) if not store.check([key])]
        except RuntimeError:  # DistStoreError, DistNetworkError
            self._lost = self._unheard
        return self._unheard

    def _wait_until_read(self, store: Store) -> None:
        """The rank that holds the store must not leave before the others know what it knows."""
        end = time.monotonic() + _LAST_READ
        with suppress(RuntimeError):  # it has left
            while time.monotonic() < end and not store.check([f"{key}/read" for key in self._keys]):
                time.sleep(0.01)


_numbers: dict[str, itertools.count[int]] = {}


def refuse_differences(who: str, facts: list[dict[str, str]]) -> None:
    """Raises ConfigError naming the first option that is not the same on all ranks, with its values.

    Args:
        who: what was set up.
        facts: option -> value as text, by rank; names that begin with an underscore may differ.
    """
    for name in sorted({name for each in facts for name in each if not name.startswith("_")}, key=_importance):
        values = [each.get(name, "nothing") for each in facts]
        if len(set(values)) > 1:
            groups = {value: [str(rank) for rank, other in enumerate(values) if other == value] for value in values}
            told = "; ".join(
                f"{value[:_MOST]} on rank {_few(ranks)}" for value, ranks in sorted(groups.items(), key=lambda g: g[1])
            )
            raise ConfigError(
                f"{who}: {name} differs between ranks: {told}. Give every rank the same: the same script and "
                "configuration file, and the same PADMIN_* variables, on every node"
            )


def _importance(name: str) -> tuple[bool, str]:
    """A switch that is off somewhere explains the rest."""
    return name != "enabled", name


def _few(ranks: list[str]) -> str:
    return ", ".join(ranks) if len(ranks) <= 8 else f"{', '.join(ranks[:8])} and {len(ranks) - 8} more"


def option_facts(config: PadMinConfig) -> dict[str, str]:
    """Every option as text, the same for equal values in every process, and the version of this library."""
    facts = {option.name: _text(getattr(config, option.name)) for option in fields(config)}
    return facts | {"lightning_padmin.__version__": __version__}


def _text(value: Any) -> str:
    if callable(value):
        code = getattr(value, "__code__", None)
        name = getattr(value, "__qualname__", type(value).__qualname__)
        known = (
            "" if code is None else f" {hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()[:12]}"
        )
        return f"{getattr(value, '__module__', '')}.{name}{known}"
    if is_dataclass(value) and not isinstance(value, type):
        return (
            f"{type(value).__name__}({', '.join(f'{f.name}={_text(getattr(value, f.name))}' for f in fields(value))})"
        )
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


__all__ = ["Announcement", "announce", "option_facts", "refuse_differences"]
