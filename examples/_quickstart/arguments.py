"""Command-line arguments whose errors are one line: what is wrong, and what to write instead."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn


class BadInput(Exception):
    """Something the user can mend. The message is one line that names the argument and the fix."""


class OneLineParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line, without the usage text in front of it."""

    def error(self, message: str) -> NoReturn:
        """Raise, where argparse would print the usage and leave."""
        raise BadInput(f"{message} (--help lists the arguments)")


def first_line(error: BaseException) -> str:
    """What another library's error says, shortened to its first line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def at_least(smallest: int) -> Callable[[str], int]:
    """An argparse type: an integer with a lower bound."""

    def integer(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least {smallest}")
        return int(text)

    return integer


def layers(text: str) -> int | None:
    """An argparse type: a number of layers, or None for 'all'."""
    if text == "all":
        return None
    try:
        return at_least(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; give one, or 'all'") from None
