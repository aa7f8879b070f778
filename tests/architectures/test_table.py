"""The script that puts measurements into the README."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXACT = {
    "stock_logits": 1e-15,
    "micro_logits": 0.0,
    "micro_gradients": 2e-16,
    "joint_logits": 1e-16,
    "joint_gradients": 3e-16,
    "replay_gradients": 4e-16,
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "compatibility_table.py"
    spec = importlib.util.spec_from_file_location("compatibility_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _measured(**stock: float) -> dict[str, Any]:
    names = {"A": "", "B": "", "C, long": "why"}
    rows = {name: {**EXACT, "group": "g", "note": note} for name, note in names.items()}
    for name, value in stock.items():
        rows[name]["stock_logits"] = value
    rows["C, long"]["stock_logits"] = 0.25
    return {"versions": {"torch": "9.9.9+cpu", "transformers": "8.8"}, "architectures": rows}


def test_alike_architectures_share_a_line_with_the_worst_of_each(script: ModuleType) -> None:
    lines = script.render(_measured(B=7e-15)).splitlines()
    assert "transformers 8.8 and torch 9.9.9 " in lines[0]
    assert lines[4:] == [
        "| g: A, B | 7e-15 | 0 | 2e-16 | 4e-16 |  |",
        "| g: C (long) | **0.25** | 0 | 2e-16 | 4e-16 | why |",
    ]


def test_each_has_its_own_line(script: ModuleType) -> None:
    assert len(script.render(_measured(), each=True).splitlines()) == 4 + 3


def test_only_the_text_between_the_markers_changes(script: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n\n{script.BEGIN}\nold\n{script.END}\n\nafter\n", encoding="utf-8")
    assert script.write(readme, "new") == 0
    once = readme.read_text(encoding="utf-8")
    assert once == f"before\n\n{script.BEGIN}\n\nnew\n\n{script.END}\n\nafter\n"
    assert script.write(readme, "new") == 0
    assert readme.read_text(encoding="utf-8") == once


def test_a_readme_without_markers_is_left_alone(script: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("text\n", encoding="utf-8")
    assert script.write(readme, "new") == 2
    assert readme.read_text(encoding="utf-8") == "text\n"
