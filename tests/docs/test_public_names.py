"""What users import, run and have pickled stays where it is; the list is `public_names.json`."""

from __future__ import annotations

import ast
import base64
import dataclasses
import importlib
import json
import pickle
import re
import runpy
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import public_names
import pytest

import lightning_padmin
from lightning_padmin import run

ROOT = Path(__file__).parents[2]
KNOWN: dict[str, Any] = json.loads(public_names.LIST.read_text())


@pytest.mark.parametrize("path", KNOWN["names"])
def test_names_are_where_they_were(path: str) -> None:
    module = importlib.import_module(path)
    missing = [name for name in KNOWN["names"][path] if not hasattr(module, name)]
    assert not missing


def test_the_list_is_complete() -> None:
    """A name that is public now is in the list; the top level has nothing else."""
    assert sorted(lightning_padmin.__all__) == KNOWN["names"]["lightning_padmin"]
    for path, names in KNOWN["names"].items():
        listed = set(getattr(importlib.import_module(path), "__all__", ()))
        assert listed <= set(names), f"{path}: python tests/public_names.py"


def test_one_class_by_whatever_path() -> None:
    """The same objects, not copies, so that `except` and `isinstance` hold."""
    for name in lightning_padmin.__all__:
        top = getattr(lightning_padmin, name)
        for path, names in KNOWN["names"].items():
            if name in names and (path, name) != ("lightning_padmin.diagnose.report", "Report"):
                assert getattr(importlib.import_module(path), name) is top, path


@pytest.mark.parametrize("name", KNOWN["pickles"])
def test_pickles_of_the_first_version_are_read(name: str) -> None:
    found, wanted = pickle.loads(base64.b64decode(KNOWN["pickles"][name])), public_names.objects()[name]
    assert type(found) is type(wanted)
    if name in ("errors", "architecture error", "warning"):
        assert [type(each) for each in [found, *(found if name == "errors" else [])]] == [
            type(each) for each in [wanted, *(wanted if name == "errors" else [])]
        ]
        assert repr(found) == repr(wanted)
    elif name == "config":  # what it did then is what it does now
        assert found == dataclasses.replace(wanted, check="first-batch")
    else:
        assert found == wanted


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    ("module", "arguments", "told"),
    [("lightning_padmin.run", [], "usage: python -m lightning_padmin.run"), ("lightning_padmin.cli", ["--help"], "0")],
)
def test_the_commands(module: str, arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are run; in processes of their own in `tests/integrations/test_accelerate_launch.py`."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"padmin": "lightning_padmin.cli:main"}
    assert callable(importlib.import_module("lightning_padmin.cli").main)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert str(left.value.code).startswith(told)


@pytest.mark.parametrize(("package", "mixin"), [("trl", "PadMinMixin"), ("transformers", "PadMinTrainerMixin")])
def test_names_made_of_strings(package: str, mixin: str) -> None:
    kind = type("SomeTrainer", (), {"__module__": f"{package}.trainer.some_trainer"})
    found = run._mixin_for(kind)
    assert found.__name__ == mixin
    assert found.__module__.startswith("lightning_padmin.")  # or `with_mixin` would not know it again


def imports(source: str) -> Iterator[tuple[str, str | None]]:
    """Module and name of every import of this package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("lightning_padmin"):
            yield from ((str(node.module), each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.name, None) for each in node.names if each.name.startswith("lightning_padmin"))


def sources() -> dict[str, str]:
    texts = {}
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        lines = re.findall(r"(from lightning_padmin\S* import \w+(?:, \w+)*)", file.read_text(encoding="utf-8"))
        texts[file.name] = "\n".join(lines)
    for file in sorted((ROOT / "examples").rglob("*.py")):
        texts[str(file.relative_to(ROOT))] = file.read_text(encoding="utf-8")
    return texts


def test_imports_of_the_documents_and_examples() -> None:
    checked = 0
    for where, text in sources().items():
        for path, name in imports(text):
            module = importlib.import_module(path)
            if name is None or hasattr(module, name):
                checked += 1
                continue
            # A module of a package.
            assert isinstance(importlib.import_module(f"{path}.{name}"), types.ModuleType), where
            checked += 1
    assert checked > 30


def test_documents_import_what_is_in_the_list() -> None:
    for where, text in sources().items():
        if not where.endswith(".md"):
            continue
        for path, name in imports(text):
            assert name in KNOWN["names"].get(path, ()), (where, path, name)


def test_a_name_that_is_gone_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.delattr("lightning_padmin.config.as_config")
    with pytest.raises(AssertionError, match="as_config"):
        test_names_are_where_they_were("lightning_padmin.config")
