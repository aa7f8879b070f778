"""Things said to the user: once, by one process, and at the line of the user's own that led there."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Literal, TypeAlias

from lightning_padmin.errors import PadMinWarning

How: TypeAlias = Literal["warn", "print"] | Callable[[str], None]

_PACKAGE = "lightning_padmin"
# Whose lines are not the user's, wherever the user's code is called from.
_FRAMEWORKS = {
    *("torch", "torchvision", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities"),
    *("transformers", "trl", "accelerate", "peft", "deepspeed", "jsonargparse"),
}
_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")


class Notices:
    """Says each thing once in the life of this object, whatever the numbers in it.

    Args:
        name: what speaks, in front of each message; default: nothing is put in front.
        is_main: whether this process speaks, or a function that tells when there is something to say.
        how: `"warn"`, as PadMinWarning; `"print"`; or a function of the words, such as a framework's own.

    Example:
        >>> notices = Notices("PadMinMixin", lambda: accelerator.is_main_process)
        >>> notices("mode='joint': the loss couples rows")
    """

    def __init__(self, name: str = "", is_main: bool | Callable[[], bool] = True, how: How = "warn") -> None:
        self._name, self._is_main, self._how = name, is_main, how
        self._said: set[str] = set()

    def __call__(self, words: str, *, key: str | None = None) -> None:
        """Says it, unless it was said before.

        Args:
            words: the message.
            key: what makes it the same as an earlier one; default: its words without digits.
        """
        key = words.translate(_WITHOUT_DIGITS) if key is None else key
        if key in self._said:
            return
        self._said.add(key)
        if self._is_main() if callable(self._is_main) else self._is_main:
            told = f"{self._name}: {words}" if self._name else words
            if self._how == "warn":
                warn(told)
            elif self._how == "print":
                print(told, flush=True)
            else:
                self._how(told)


def warn(words: str) -> None:
    """A PadMinWarning at the innermost line that is neither this package's nor a framework's."""
    warnings.warn(words, PadMinWarning, stacklevel=_level())


def _level() -> int:
    """The `stacklevel` for the caller; where all lines are of frameworks, that of the first outside of this package."""
    outside: int | None = None
    frame: FrameType | None = sys._getframe(1)  # the caller, which has stacklevel 1
    for level in count(1):
        if frame is None:
            return outside or 1
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if top != _PACKAGE:
            outside = outside or level
            if top not in _FRAMEWORKS and top not in sys.stdlib_module_names:
                return level
        frame = frame.f_back
    raise AssertionError
