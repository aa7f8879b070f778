"""All errors and warnings of the package.

Every message names the key and the value that was found and says how to fix it. Ranks tell each other in integers why
a batch was refused (see `distributed`), so each kind that others should hear of by its name has a `code` of its own;
the rest have that of their base class. `name_of_code` leads back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_padmin.printing import printable_lines

_wording: Callable[[str], str] | None = None


def speak(wording: Callable[[str], str] | None) -> None:
    """Has all messages go through a function from now on, where options are not set in Python; None: as they are."""
    global _wording
    _wording = wording


class _Worded(Exception):
    def __str__(self) -> str:
        text = super().__str__()
        return text if _wording is None else _wording(text)


class PadMinError(_Worded, ValueError):
    """Base class of all refusals. Nothing has been changed or left half-installed when one is raised.

    Attributes:
        may_stay_whole: whether nobody has said how the batch is to be split, and nothing else is wrong with it.
    """

    code = 9
    may_stay_whole = False

    def __str__(self) -> str:
        """The message, with names of the user's data as a terminal may show them."""
        return printable_lines(super().__str__())


class ConfigError(PadMinError):
    """An option of `PadMinConfig` has an unknown name, a wrong type, or a value out of range."""

    code = 1


class SchemaError(PadMinError):
    """The layout of a batch is unknown or ambiguous: which entry holds rows, positions, units."""

    code = 2
    may_stay_whole = True


class BatchError(PadMinError):
    """The layout is known but the values are malformed: an empty mask, labels outside of a row's span."""

    code = 3

    @classmethod
    def undeclared(cls, words: str) -> BatchError:
        """One of a batch that can be trained on whole as it is."""
        error = cls(words)
        error.may_stay_whole = True
        return error


class PlanError(PadMinError):
    """The planner was asked for something impossible: lengths below 1, a budget of 0."""

    code = 4


class PeerError(PadMinError):
    """Another rank refused its batch, has ended, or did not come: see `distributed`, `microbatching.memory`."""

    code = 5


class ArchitectureError(PadMinError):
    """The model's outputs for a row depend on which rows run with it, so a batch cannot be regrouped."""

    code = 6


class TrainingStepError(ConfigError):
    """A trainer's own step takes another number of losses than one per part of a batch."""


class GradientCheckError(PadMinError):
    """Gradients of split rows are not those of the same rows un-split; the message says which declaration is wrong.

    Attributes:
        is_declaration: whether with another option, which the message names, they would be.
    """

    code = 7
    is_declaration = False


class OutOfMemoryError(PadMinError, torch.OutOfMemoryError):
    """A micro-batch did not fit in memory; the message names rank, shape and the next budget to try."""

    code = 10


class GradientHookError(PadMinError):
    """A hook would run on parts of gradients, and make something else of them than of the whole."""

    code = 11


class DiagnoseError(PadMinError):
    """A source, a value or an option that cannot be used; the message names it, where it stands, and the fix."""


class UsageError(Exception):
    """Something the user gave on the command line cannot be used; the message names it and the fix."""


class AsItCame(Exception):
    """Why a call cannot run in chunks, as a sentence for the user; empty where the next one may. Caught inside."""


class OnlyBackwardError(RuntimeError):
    """The gradient of a loss can be had by `backward` alone, and its graph is used up."""


class PadMinWarning(_Worded, UserWarning):
    """Something the user should know once: a row over budget, a target lost by the roll."""

    def __str__(self) -> str:
        """As that of `PadMinError`."""
        return printable_lines(super().__str__())


def code_of(error: Exception | None) -> int:
    """What other ranks are told: 0 for no error, the base class's code for one that is not of this package."""
    return 0 if error is None else error.code if isinstance(error, PadMinError) else PadMinError.code


def name_of_code(code: int) -> str | None:
    """The class that has a code as its own; None for the base class's, which says nothing, and for unknown ones."""
    return _NAMES.get(code)


_NAMES = {
    kind.code: kind.__name__
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, PadMinError) and kind is not PadMinError and "code" in vars(kind)
}
