"""Collects what the tests measure; PADMIN_RESULTS=FILE writes it as JSON at the end of the session."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

RESULTS: dict[str, dict[str, float]] = defaultdict(dict)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """record(architecture, left_logits=1e-16, ...): the worst value of each key is kept."""

    def keep(architecture: str, **measured: float) -> None:
        for key, value in measured.items():
            request.node.user_properties.append((f"{architecture}/{key}", value))
            RESULTS[architecture][key] = max(value, RESULTS[architecture].get(key, value))

    return keep


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small lose by more
    yield
    torch.set_num_threads(before)


def pytest_sessionfinish() -> None:
    target = os.environ.get("PADMIN_RESULTS")
    if target and RESULTS:
        import transformers
        from architectures.zoo import BY_NAME

        said = {name: {"group": BY_NAME[name].group, "note": BY_NAME[name].note} for name in RESULTS}
        content = {
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "architectures": {name: said[name] | measured for name, measured in RESULTS.items()},
        }
        Path(target).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
