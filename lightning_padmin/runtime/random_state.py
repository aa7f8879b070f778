"""Random generators as they are now, to be put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


class RandomState:
    """State of every generator that a step may draw from, when this is made.

    Python's, numpy's, torch's on the CPU and on the current accelerator.
    """

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        self._device: Any = None if accelerator is None else getattr(torch, accelerator.type)
        self._states: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
        if self._device is not None:
            self._states.append(self._device.get_rng_state())

    def restore(self) -> None:
        """Puts it back; may be called again."""
        python, numpy, cpu, *device = self._states
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for state in device:
            self._device.set_rng_state(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same random numbers inside; afterwards it goes on as if there had been no inside."""
        now = RandomState()
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def is_as(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two."""
        return _same(self._states, other._states)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, tuple | list):
        return all(_same(a, b) for a, b in zip(first, second, strict=True))
    return bool(np.array_equal(first, second)) if isinstance(first, np.ndarray) else bool(first == second)
