"""A file that grows by one line per audit: what was looked at, when, and how far gradients were apart.

It is written for people who have to show that a training was what it claims to be, and for `padmin prove`. Lines are
JSON objects; the first of each run is the configuration. A training never ends because its proof cannot be written.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_padmin._version import __version__

FOLDER, FILE = "padmin", "proof.jsonl"
_FORMAT = 1
_PACKAGES = ("torch", "lightning", "transformers", "trl", "accelerate", "deepspeed", "peft")
_MOST_LETTERS = 2_000


class Proof:
    """Appends to `padmin/proof.jsonl` in a folder, which is made when there is something to write.

    A line is written in one go or not at all, so that a process that is killed leaves whole lines, and what comes after
    it (the same training, resumed) goes on behind them.

    Args:
        folder: of the log.
        facts: the first line of this run, besides its kind and versions: plain values, or see `plain`.
        complain: told once why the file cannot be written; from then on nothing is.
    """

    def __init__(self, folder: str | os.PathLike[str], facts: Mapping[str, Any], complain: Callable[[str], None]):
        self.path = Path(folder) / FOLDER / FILE
        self._facts, self._complain = dict(facts), complain
        self._has_begun = self._gives_up = False

    def add(self, kind: str, **facts: Any) -> None:
        """Another line.

        Args:
            kind: `"audit"`, or another word for what has happened.
            facts: what is known of it; values that are not plain are written as `plain` has them.
        """
        if self._gives_up:
            return
        lines = [] if self._has_begun else [_line("configuration", {"format": _FORMAT} | self._facts)]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _append(self.path, "".join([*lines, _line(kind, facts)]).encode())
        except (OSError, ValueError) as error:
            self._gives_up = True
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._complain(f"{self.path} cannot be written ({why}): this training leaves no file of its audits")
            return
        self._has_begun = True


def versions() -> dict[str, str]:
    """Of this library and of the packages that have been imported."""
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    return {"lightning_padmin": __version__} | {name: str(found) for name, found in loaded.items() if found is not None}


def plain(value: Any) -> Any:
    """A value as JSON has it: functions by their name, numbers that JSON lacks and all else as text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str):
        return value[:_MOST_LETTERS]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key)[:_MOST_LETTERS]: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', type(value).__module__)}.{name}"
    return repr(value)[:_MOST_LETTERS]


def _line(kind: str, facts: Mapping[str, Any]) -> str:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return json.dumps({"kind": kind} | plain(facts) | {"versions": versions(), "time": now}) + "\n"


def _append(path: Path, data: bytes) -> None:
    """All of it, or nothing: what was written of a line when the disk was full is taken back."""
    # Without waiting for a reader, should there be a pipe of this name.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_size:
            os.lseek(descriptor, -1, os.SEEK_END)
            if os.read(descriptor, 1) != b"\n":  # cut off: by another program, or with the machine
                data = b"\n" + data
        try:
            written = os.write(descriptor, data)
            if written < len(data):
                raise OSError(0, "the disk is full")
        except OSError:
            os.ftruncate(descriptor, found.st_size)
            raise
    finally:
        os.close(descriptor)


__all__ = ["FILE", "FOLDER", "Proof", "plain", "versions"]
