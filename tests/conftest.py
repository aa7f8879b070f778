"""What holds for all tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """What is imported by now lives on: collections of garbage, which trainers make often, need not look through it."""
    gc.collect()
    gc.freeze()
