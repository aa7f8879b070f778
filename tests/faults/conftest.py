"""One thread, no remarks of Lightning about processors and loaders, and the classical mistake as a control."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_padmin import MicroBatcher


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.(pytorch|fabric)")
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    torch.set_num_threads(threads)


@pytest.fixture
def equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every micro-batch weighs 1/K."""
    original = MicroBatcher._weights

    def weights(*arguments: Any) -> Any:
        weights, shares = original(*arguments)
        return np.full_like(weights, 1 / len(weights)), shares

    monkeypatch.setattr(MicroBatcher, "_weights", weights)
