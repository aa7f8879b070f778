"""Text of others - names of files and columns, what other libraries say - as a terminal may show it.

A name may hold escape sequences that recolour, clear or retitle a terminal, marks that turn its writing around, and
characters that are not seen. None of these is written as it is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from itertools import islice
from typing import IO, Any

_NAME = 60  # characters of a name in a list of names


def printable(text: object, limit: int | None = None) -> str:
    r"""A text as one line without anything that acts on a terminal: `"a\x1b[2J"` becomes `a\x1b[2J` in plain letters.

    What Python itself would escape is escaped: control characters (C0, DEL, C1), marks of writing direction, characters
    of no width, lone surrogates, line ends.

    Args:
        text: anything; `str` is taken of it.
        limit: most characters; what is cut off is told by `...`.
    """
    text = str(text)
    if limit is not None and len(text) > limit:
        text = text[:limit] + "..."
    if text.isprintable():
        return text
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return shown if limit is None or len(shown) <= 2 * limit else shown[: 2 * limit] + "..."


def printable_lines(text: object) -> str:
    """The same for a text of several lines, whose line ends stay."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def listed(names: Collection[object], most: int = 20) -> str:
    """Names with commas between them; of many only the first."""
    shown = ", ".join(printable(name, _NAME) for name in islice(names, most))
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def say(text: object, file: IO[str] | None = None) -> None:
    """Prints, with a stand-in for what the terminal's encoding does not have."""
    out: Any = sys.stdout if file is None else file
    encoding = out.encoding or "utf-8"
    print(printable_lines(text).encode(encoding, "replace").decode(encoding), file=out)


def first_line(error: BaseException) -> str:
    """The first line of what another library says, or the name of the error where it says nothing."""
    found = str(error).strip().splitlines()
    return printable(found[0], 200) if found else type(error).__name__


def guard_logs(*packages: str) -> None:
    """What these packages log to a terminal quotes files too; from now on it is shown as `printable_lines`."""
    for package in packages:
        for handler in logging.getLogger(package).handlers:
            if _GUARD not in handler.filters:
                handler.addFilter(_GUARD)


class _Guard(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable_lines(record.getMessage()), ()
        return True


_GUARD = _Guard()
