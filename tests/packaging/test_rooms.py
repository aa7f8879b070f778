"""The rules about which room imports which are kept, and break where they should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="import-linter comes with the extra 'dev'")
ROOT = Path(__file__).parents[2]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--no-cache",
        "--config",
        str(ROOT / "pyproject.toml"),
    ]
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "1000"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False, timeout=60)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rooms")
    shutil.copytree(
        ROOT / "lightning_padmin", folder / "lightning_padmin", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


def test_the_rules_are_kept(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        ("planning/search.py", "from PADMIN.forward import PaddedForward", "rooms below"),
        ("batch/tree.py", "from PADMIN.config import PadMinConfig", "rooms below"),
        ("verification/sketch.py", "from PADMIN.integrations.lightning import PadMinCallback", "rooms below"),
        ("integrations/fabric/loop.py", "from PADMIN.diagnose import report", "the commands"),
        ("integrations/trl/online.py", "from PADMIN.integrations.transformers import trainer", "each other"),
        (
            "integrations/common/deepspeed.py",
            "from PADMIN.integrations.accelerate import PadMin",
            "none of them",
        ),
        ("integrations/fabric/loop.py", "from PADMIN.verification import check_gradients", "ask integrations.common"),
        ("integrations/trl/online.py", "from PADMIN.runtime import replaced", "ask integrations.common"),
        ("forward/proxy.py", "from PADMIN.batch.tree import map_leaves", "batch has one door"),
        (
            "integrations/fabric/loop.py",
            "from PADMIN.integrations.common.deepspeed import find_engine",
            "one door",
        ),
        ("basement.py", "", "rooms below"),
    ],
)
def test_what_breaks_a_rule_is_named(copy: Path, file: str, line: str, rule: str) -> None:
    place = copy / "lightning_padmin" / file
    before = place.read_text() if place.exists() else None
    place.write_text(f"{before or ''}\n{line.replace('PADMIN', 'lightning_padmin')}\n")
    try:
        done = lint(copy)
    finally:
        if before is None:
            place.unlink()
        else:
            place.write_text(before)
    broken = [row for row in done.stdout.splitlines() if row.rstrip().endswith("BROKEN")]
    assert done.returncode == 1, done.stdout[-3000:]
    assert any(rule in row for row in broken), (broken, done.stdout[-2000:])


def test_every_package_is_installed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        ".".join(folder.relative_to(ROOT).parts)
        for folder in [ROOT / "lightning_padmin", *(ROOT / "lightning_padmin").rglob("*/")]
        if (folder / "__init__.py").exists()
    }
    found |= {
        ".".join(("lightning_padmin", *folder.relative_to(ROOT).parts))
        for folder in [ROOT / "integrations", *(ROOT / "integrations").rglob("*/")]
        if (folder / "__init__.py").exists()
    }
    assert listed == found
