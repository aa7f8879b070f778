"""What functions of the user's would do to parts of gradients, which they are called with once for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_padmin.architectures import name_of, read_hook, reenters


def acts_on_gradients(function: Callable[..., Any], own: object) -> str | None:
    """What a `backward` of the user's own does besides running a backward pass, and where it stands; None: nothing.

    Args:
        function: as it is called.
        own: as it was written.
    """
    reading = read_hook(function, gradients=())
    return f"{reading.why or 'writes into gradients'}: {name_of(own)}" if reading.steps else None


__all__ = ["acts_on_gradients", "reenters"]
