"""What the core may import, what a missing extra says, and that the project's files agree with each other."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lightning_padmin

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEEDS_EXTRA = runpy.run_path(str(ROOT / "tests" / "packaging" / "check_wheel.py"))["NEEDS_EXTRA"]
CORE_NAMES = [name for name in lightning_padmin.__all__ if name not in NEEDS_EXTRA]

BLOCKED = [
    "accelerate",
    "jsonargparse",
    "lightning",
    "lightning_fabric",
    "matplotlib",
    "pytorch_lightning",
    "rich",
    "transformers",
    "trl",
]

# Importing any of the blocked packages fails as it does where they are not installed.
BLOCK = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""

IMPORT_CORE = f"""
import lightning_padmin
for name in {CORE_NAMES}:
    getattr(lightning_padmin, name)
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_core_imports_without_any_framework():
    result = run_python(BLOCK + IMPORT_CORE)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("name", "extra"), NEEDS_EXTRA.items())
def test_missing_extra_is_named(name, extra):
    result = run_python(BLOCK + f"from lightning_padmin import {name}")
    assert result.returncode == 1
    error = result.stderr.rpartition("\nImportError: ")[2]
    assert f'pip install "lightning-padmin[{extra}]"' in error
    assert extra in PYPROJECT["project"]["optional-dependencies"]


def test_core_imports_only_torch_and_numpy():
    report = """
import json, pathlib, sys
found = set()
for name in set(sys.modules) - before:
    origin = getattr(sys.modules[name], "__file__", None)
    if isinstance(origin, str) and {"site-packages", "dist-packages"} & set(pathlib.Path(origin).parts):
        found.add(name.partition(".")[0])
print(json.dumps(sorted(found)))
"""
    result = run_python("import sys, numpy, torch\nbefore = set(sys.modules)\n" + IMPORT_CORE + report)
    assert result.returncode == 0, result.stderr
    # An installed lightning_padmin comes from site-packages too.
    assert set(json.loads(result.stdout)) <= {"torch", "numpy", "lightning_padmin"}


def test_top_level_integrations_is_refused():
    result = run_python("import integrations")
    assert result.returncode == 1
    assert "lightning_padmin.integrations" in result.stderr.rpartition("\nImportError: ")[2]


def test_version_is_the_same_everywhere():
    assert PYPROJECT["project"]["version"] == lightning_padmin.__version__


def test_every_package_is_listed():
    core = (path.parent for path in (ROOT / "lightning_padmin").rglob("__init__.py"))
    adapters = (path.parent for path in (ROOT / "integrations").rglob("__init__.py"))
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in core}
    packages |= {"lightning_padmin." + ".".join(folder.relative_to(ROOT).parts) for folder in adapters}
    assert packages == set(PYPROJECT["tool"]["setuptools"]["packages"])


@pytest.mark.parametrize("target", ["quickstart", "test"])
def test_readme_commands_are_makefile_targets(target):
    assert re.search(rf"^\s*(\$ )?make {target}\b", (ROOT / "README.md").read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert re.search(rf"^\.PHONY:.*\b{target}\b", makefile, re.MULTILINE)
