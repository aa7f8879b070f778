"""examples/benchmarks/frameworks.py in a very small setting: the same gradients, a check that can fail, all rows."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("rich", "matplotlib", "lightning", "accelerate", "trl"):
    pytest.importorskip(package)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))  # as for `python .../frameworks.py`
frameworks = importlib.import_module("frameworks")
ledger, memory, parts, runs, turns = (
    importlib.import_module(f"_frameworks.{name}") for name in ("ledger", "memory", "parts", "runs", "turns")
)

SIZES = {"hidden": 32, "layers": 1, "repeats": 1, "steps": 2, "rows": 8, "scale": 16, "budget": 128}
TINY = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
NAMES = ["lightning", "trl", "accelerate"]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    yield
    turns.forget_accelerate()
    frameworks.logging.disable(frameworks.logging.NOTSET)


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "numbers.json"
    code = frameworks.main([*TINY, "--json", str(file), *arguments])
    return code, json.loads(file.read_text())


@pytest.mark.slow
def test_all_frameworks_train_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = run(tmp_path)
    assert code == 0
    assert facts["is_exact"]
    assert facts["torch"] == torch.__version__
    assert [each["framework"] for each in facts["frameworks"]] == NAMES
    for each in facts["frameworks"]:
        assert 0 < each["largest_gradient_difference"] < 1e-5
        assert len(each["gradient_differences"]) == 2  # the warm-up is compared too
        assert len(each["turns"]) == 1
        stock, ours = each["sizes"]["stock"], each["sizes"]["ours"]
        assert ours["slots"] < stock["slots"]
        assert ours["real"] == pytest.approx(stock["real"])
        assert ours["micro_batches"] > stock["micro_batches"]
        assert each["parts"].keys() == {*parts.PARTS, turns.BEYOND}
        assert all(each["parts"][part] > 0 for part in ("schema", "row table", "plan", "index maps", "gather"))
        assert each["overhead_seconds"] == pytest.approx(sum(each["parts"].values()))
        assert 0 < each["overhead_seconds"] < each["our_seconds"]
        assert (each["check_seconds"] > 0) == (each["framework"] != "accelerate")  # which has no such check
        assert each["memory"]["ratio"] == each["memory"]["ours"] / each["memory"]["stock"]
        assert 0.5 < each["memory"]["ratio"] < 1.5
        rows, width = each["memory"]["largest_micro_batch"]
        assert rows * width <= 128
    said = capsys.readouterr().out
    for title in ("Lightning", "TRL GRPO", "Accelerate"):
        assert f"{title}, stock" in said
        assert f"{title}, with padmin" in said
    assert all(part in said for part in (*parts.PARTS, turns.BEYOND, torch.__version__))


def test_wrong_weights_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = run(tmp_path, "--control", "--clock", "cpu")
    assert code == 1
    assert not facts["is_exact"]
    assert [each["framework"] for each in facts["frameworks"]] == NAMES
    assert all(each["largest_gradient_difference"] > 0.01 for each in facts["frameworks"])
    assert f"gradients differ: {', '.join(NAMES)}" in capsys.readouterr().err


def test_a_control_that_goes_unnoticed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = [{"framework": "lightning", "largest_gradient_difference": 1e-7}]
    assert frameworks.judge(found, is_control=False) == 0
    assert frameworks.judge(found, is_control=True) == 2
    assert "not noticed: lightning" in capsys.readouterr().err


def test_missing_and_undefined_gradients_differ() -> None:
    one, none = [torch.ones(2)], [torch.full((2,), float("nan"))]
    assert runs.worst([one], [one]) == 0
    assert runs.worst([one], [one, one]) == runs.worst([], []) == runs.worst([none], [one]) == float("inf")
    assert runs.worst([[]], [one]) == float("inf")


def test_time_is_that_of_the_innermost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))  # each look at the clock is a second later
    monkeypatch.setitem(ledger._CLOCKS, "wall", lambda: next(now))
    book = ledger.Ledger("wall")
    inner = book.watched(lambda: None, "gather")
    outer = book.watched(lambda: inner(), "plan")
    check = book.watched(lambda: outer(), ledger.CHECK)
    outer()  # in no step, so it does not count
    book.begin()
    outer()
    check()
    list(book._each(iter([1]), "schema"))
    book.end()
    (step,) = book.take()
    assert step == {ledger.FRAMEWORK: 5, "plan": 2, "gather": 1, ledger.CHECK: 5, "schema": 2}


def test_peaks_see_what_comes_and_goes() -> None:
    assert memory.notices()
    weights = torch.nn.Linear(1000, 1000)
    assert memory.peak(lambda: weights(torch.ones(1, 1000)), weights) < 100_000  # not the weights, which were there
