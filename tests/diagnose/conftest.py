"""What the tests of `padmin diagnose` share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_padmin.cli import commands as cli
from lightning_padmin.diagnose.reading import Lengths

Diagnose = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def diagnose(capsys: pytest.CaptureFixture[str]) -> Diagnose:
    """Runs `padmin diagnose` in this process: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main(["diagnose", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def data(diagnose: Diagnose) -> Callable[..., dict[str, Any]]:
    """The report of `padmin diagnose ... --json`."""

    def run(*arguments: object) -> dict[str, Any]:
        code, out, err = diagnose(*arguments, "--json")
        assert (code, err) == (0, "")
        found: dict[str, Any] = json.loads(out)["data"]
        return found

    return run


@pytest.fixture(scope="session")
def gsm8k_file() -> Path:
    """Prompt and completion lengths of GSM8K's 7,473 training problems, in tokens of SmolLM2."""
    return Path(__file__).with_name("gsm8k_lengths.csv")


@pytest.fixture
def lengths() -> Callable[[Any], Lengths]:
    def make(rows: Any) -> Lengths:
        table = np.array(rows, np.int32)
        return Lengths(table if table.ndim == 2 else table[:, None])

    return make
