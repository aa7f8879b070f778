"""All errors in one file, each told to other ranks by a number of its own."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from lightning_padmin import errors
from lightning_padmin.distributed import raise_together
from lightning_padmin.errors import PadMinError, PeerError, code_of, name_of_code

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
]
CODED = [kind for kind in KINDS if "code" in vars(kind)]


def test_no_code_stands_twice_and_none_is_that_of_no_error() -> None:
    codes = [kind.code for kind in CODED]
    assert len(CODED) == 10
    assert len(set(codes)) == len(codes)
    assert 0 not in codes


@pytest.mark.parametrize("kind", CODED)
def test_other_ranks_hear_the_name(kind: type[PadMinError]) -> None:
    name = "an error" if kind is PadMinError else kind.__name__
    with pytest.raises(PeerError, match=rf"rank 1 refused its batch \({name}\)"):
        raise_together(None, np.array([0, code_of(kind("x"))]))


def test_errors_without_a_code_are_sent_as_their_base_class() -> None:
    assert [code_of(each) for each in (None, KeyError("x"), errors.DiagnoseError("x"))] == [0, 9, 9]
    assert name_of_code(code_of(errors.TrainingStepError("x"))) == "ConfigError"
    assert name_of_code(9) is name_of_code(99) is None


def test_no_other_module_has_one() -> None:
    folder = Path(errors.__file__).parent
    files = [path for path in folder.rglob("*.py") if path != folder / "errors.py"]
    assert len(files) > 80
    bases = re.compile(r"^class [A-Z]\w*\(.*(Error|Exception|Warning)\b", re.MULTILINE)
    assert [path.name for path in files if bases.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("architectures.findings", "ArchitectureError"),
        ("architectures.gradient_hooks", "GradientHookError"),
        ("architectures.loading", "UsageError"),
        ("diagnose.problems", "DiagnoseError"),
        ("microbatching.memory", "OutOfMemoryError"),
        ("verification.sketch", "OnlyBackwardError"),
        *(("architectures", name) for name in ("ArchitectureError", "GradientHookError", "UsageError")),
        ("microbatching", "OutOfMemoryError"),
        ("verification", "OnlyBackwardError"),
    ],
)
def test_where_it_was_it_is_found(module: str, name: str) -> None:
    assert getattr(importlib.import_module(f"lightning_padmin.{module}"), name) is getattr(errors, name)
