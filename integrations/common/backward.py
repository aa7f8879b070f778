"""What functions of the user's would do to parts of gradients, which they are called with once for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_padmin.architectures import name_of, read_hook, reenters
from lightning_padmin.runtime import untouched

_SHARES = (1.0, 0.5, 4.0, 30.0)


def acts_on_gradients(function: Callable[..., Any], own: object) -> str | None:
    """What a `backward` of the user's own does besides running a backward pass, and where it stands; None: nothing.

    Args:
        function: as it is called.
        own: as it was written.
    """
    reading = read_hook(function, gradients=())
    return f"{reading.why or 'writes into gradients'}: {name_of(own)}" if reading.steps else None


def is_linear(backward: Callable[..., Any], module: nn.Module) -> bool:
    """Whether a `backward` of the user's own does with shares of a loss what it does with the loss; True if it fails.

    Tried on single numbers: the gradient of c * x must be c times that of x. What it writes is put back.

    Args:
        backward: takes a loss.
        module: whose.
    """

    def gradient(share: float) -> float:
        number = torch.ones((), requires_grad=True)
        backward(number * share)
        return 0.0 if number.grad is None else float(number.grad)

    with untouched(module):
        try:
            found = [gradient(share) / share for share in _SHARES]
        except Exception:  # it wants a loss of the module itself
            return True
    return all(abs(each - found[0]) <= 1e-5 * abs(found[0]) for each in found)


__all__ = ["acts_on_gradients", "is_linear", "reenters"]
