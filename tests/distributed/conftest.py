"""What takes long and is of the same kind as what the default run has anyway is marked slow."""

from __future__ import annotations

import pytest

SLOW_STRATEGIES = {"fsdp1", "fsdp1_single", "ddp_static", "ddp_find_unused"}
SLOW_EXAMPLES = ("fsdp2", "strategies_agree", "fsdp1", "equal_weights", "without_transformers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        strategy = getattr(item, "callspec", None) and item.callspec.params.get("strategy")  # type: ignore[attr-defined]
        fabric = item.path.name == "test_fabric_processes.py" and strategy in SLOW_STRATEGIES
        example = item.path.name == "test_multi_gpu_example.py" and any(part in item.name for part in SLOW_EXAMPLES)
        if fabric or example:
            item.add_marker(pytest.mark.slow)
