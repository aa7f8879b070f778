"""What cannot be read or measured, as one line for the user."""

from __future__ import annotations

import importlib
from typing import Any

from lightning_padmin.errors import PadMinError

_SHOWN = 60  # characters of a value that a message quotes


class DiagnoseError(PadMinError):
    """A source, a value or an option that cannot be used; the message names it, where it stands, and the fix."""


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


def shown(value: object) -> str:
    """A value as a message quotes it: one short line."""
    if isinstance(value, str | bytes | list) and len(value) > _SHOWN:
        value = value[:_SHOWN]
        text = repr(value)[:_SHOWN] + "..."
    else:
        text = repr(value)
    return text if len(text) <= _SHOWN + 10 else text[:_SHOWN] + "..."


def first_line(error: BaseException) -> str:
    """The first line of what another library says, or the name of the error where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
