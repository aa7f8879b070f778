"""One thread, no remarks of Lightning about processors and loaders, and the classical mistake as a control."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest
import support
import torch


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
def equal_weights() -> Iterator[None]:
    """The classical mistake: every micro-batch weighs 1/K."""
    with support.equal_weights():
        yield
