"""What cannot be read or measured, as one line for the user."""

from __future__ import annotations

import importlib
import os
import stat
from pathlib import Path
from typing import Any

from lightning_padmin.errors import DiagnoseError
from lightning_padmin.printing import first_line

__all__ = ["DiagnoseError", "first_line", "needed", "refuse_special", "shown"]

_SHOWN = 60  # characters of a value that a message quotes


def needed(module: str, what: str) -> Any:
    """An optional package's module.

    Args:
        module: dotted name.
        what: what it is needed for, to begin the message with.

    Raises:
        DiagnoseError: it is not installed; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DiagnoseError(f'{what} needs {package}: pip install "lightning-padmin[diagnose]"') from error


def refuse_special(path: Path, option: str = "") -> None:
    """Raises DiagnoseError for a pipe, socket or device, also behind a link: reading it would wait or never end.

    A redirected standard input (`/dev/stdin` of a file) is the file.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # whoever opens it says why it cannot be opened
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return
    kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    kind = next((name for is_kind, name in kinds if is_kind(mode)), "a device")
    raise DiagnoseError(f"{option}{path}: is {kind} and no regular file; save what it gives to a file")


def shown(value: object) -> str:
    """A value as a message quotes it: one short line."""
    cut = isinstance(value, str | bytes | list) and len(value) > _SHOWN
    try:
        text = repr(value[:_SHOWN] if isinstance(value, str | bytes | list) else value)
    except RecursionError:
        return f"a {type(value).__name__} of too many levels"
    if cut:
        return text[:_SHOWN] + "..."
    return text if len(text) <= _SHOWN + 10 else text[:_SHOWN] + "..."
