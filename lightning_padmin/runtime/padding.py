"""What stands in slots of outputs that are padding: zeros, or something else while a check asks whether it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_FILLED: ContextVar[bool] = ContextVar("padmin_padding_is_filled", default=False)


@contextmanager
def padding_filled() -> Iterator[None]:
    """Inside, outputs that are put together have values of other slots where rows have padding, in place of zeros."""
    token = _IS_FILLED.set(True)
    try:
        yield
    finally:
        _IS_FILLED.reset(token)


def is_padding_filled() -> bool:
    """Whether that is asked for here."""
    return _IS_FILLED.get()


__all__ = ["is_padding_filled", "padding_filled"]
