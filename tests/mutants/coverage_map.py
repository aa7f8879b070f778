"""Which tests execute which lines of the core, how long each takes, and the branch coverage of all of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Whose modules are worth importing once, ahead of the tests of every mutant.
_HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "lightning",
    "trl",
    "accelerate",
    "datasets",
    "peft",
    "hypothesis",
    "pyarrow",
)
_COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")
# Where code may be, or may move to.
FOLDERS = ("lightning_padmin", "integrations")


class Recorder:
    """A pytest plug-in: every test is a context of coverage, and its seconds are kept if it passes."""

    def __init__(self, coverage: Any) -> None:
        self._coverage = coverage
        self.seconds: dict[str, float] = {}
        self.unusable: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        start = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = round(time.perf_counter() - start, 3)
        self._coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.unusable.add(report.nodeid)


def record(root: Path, tests: list[str], out: Path) -> int:
    """Runs the tests once and writes the map, a JSON object. What tests do in processes of their own is not seen.

    tests: seconds of each test that passed. lines: {file: {line: [indices into tests]}}, files relative to `root`.
    imported: {file: [lines that are executed outside tests]}. coverage: {file: counts, of lines and branches}. preload:
    modules of others that the tests have imported.
    """
    import coverage

    data_file = out.with_suffix(".coverage")
    measured = coverage.Coverage(
        data_file=str(data_file),
        branch=True,
        source=[str(root / folder) for folder in FOLDERS],
        omit=[str(root / "lightning_padmin" / "integrations" / "*")],  # a link to the other folder
        config_file=False,
    )
    measured.start()
    recorder = Recorder(measured)
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", *tests], plugins=[recorder])
    measured.stop()
    measured.save()
    data = measured.get_data()
    names = [name for name in recorder.seconds if name not in recorder.unusable]
    index = {name: place for place, name in enumerate(names)}
    lines: dict[str, dict[str, list[int]]] = {}
    imported: dict[str, list[int]] = {}
    for path in sorted(data.measured_files()):
        file = Path(path).relative_to(root).as_posix()
        lines[file], imported[file] = {}, []
        for line, contexts in data.contexts_by_lineno(path).items():
            lines[file][str(line)] = sorted(index[each] for each in contexts if each in index)
            if "" in contexts:
                imported[file].append(line)
    report = out.with_suffix(".report.json")
    measured.json_report(outfile=str(report), ignore_errors=True)
    summaries = {
        (root / path).relative_to(root).as_posix(): {
            key: entry["summary"][key]
            for key in ("num_statements", "covered_lines", "num_branches", "covered_branches")
        }
        for path, entry in json.loads(report.read_text())["files"].items()
    }
    preload = sorted(name for name in sys.modules if name.split(".")[0] in _HEAVY)
    out.write_text(
        json.dumps(
            {
                "tests": {name: recorder.seconds[name] for name in names},
                "lines": lines,
                "imported": imported,
                "coverage": summaries,
                "preload": preload,
            }
        )
    )
    return int(code)
