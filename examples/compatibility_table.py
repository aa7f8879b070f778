"""Measures the compatibility table of the README: runs tests/architectures and puts down what they measured.

python examples/compatibility_table.py             print the table
python examples/compatibility_table.py --write     put it into README.md, between its two marker comments
python examples/compatibility_table.py --each      a line for each architecture instead of one for those alike
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- compatibility -->", "<!-- /compatibility -->"
# Columns and the measurements behind each; the worst one is shown.
COLUMNS = {
    "left padding as it is": ("stock_logits",),
    "split: logits": ("micro_logits",),
    "split: gradients": ("micro_gradients",),
    "`PaddedForward`": ("joint_logits", "joint_gradients", "replay_gradients"),
}
EXACT = 1e-10  # the tests' own bound


def main() -> int:
    """Exit status: that of the tests, or 2 for a README without markers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update README.md")
    parser.add_argument("--each", action="store_true", help="one line for each architecture")
    parser.add_argument("--results", type=Path, help="what an earlier run measured (PADMIN_RESULTS=FILE pytest ...)")
    options = parser.parse_args()
    if options.results is None:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results.json"
            status = run_tests(results)
            if status:
                print("The tests do not pass, so there is no table.", file=sys.stderr)
                return status
            measured = json.loads(results.read_text(encoding="utf-8"))
    else:
        measured = json.loads(options.results.read_text(encoding="utf-8"))
    table = render(measured, each=options.each)
    print(table)
    return write(ROOT / "README.md", table) if options.write else 0


def run_tests(results: Path) -> int:
    """Runs the matrix, its output on stderr; returns pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/architectures/test_exact.py"]
    environment = os.environ | {"PADMIN_RESULTS": str(results)}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode


def render(measured: Mapping[str, Any], each: bool = False) -> str:
    """The table in Markdown, with a sentence on what was measured."""
    rows = measured["architectures"]
    versions = measured["versions"]
    lines = [
        f"Measured with transformers {versions['transformers']} and torch {versions['torch'].split('+')[0]} on a CPU: "
        f"{len(rows)} tiny random models in float64, without fused kernels, each row alone and unpadded being the "
        "truth. Differences are max|difference| / max|truth|; of architectures in one line, the worst.",
        "",
        _line(["architecture", *COLUMNS, "note"]),
        _line(["---"] * (len(COLUMNS) + 2)),
    ]
    for names in ([name] for name in rows) if each else alike(rows):
        cells = [_cell(max(rows[name][key] for name in names for key in keys)) for keys in COLUMNS.values()]
        group = rows[names[0]]["group"]
        # A label may hold a comma itself ("Mamba, use_bias"): brackets keep it one name.
        labels = [name if ", " not in name else "{} ({})".format(*name.split(", ", 1)) for name in names]
        lines.append(_line([f"{group}: {', '.join(labels)}", *cells, rows[names[0]]["note"]]))
    return "\n".join(lines)


def alike(rows: Mapping[str, Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    """Names of one group whose stock left padding gives the same verdict for the same reason, in the table's order."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, row in rows.items():
        found.setdefault((row["group"], row["stock_logits"] <= EXACT, row["note"]), []).append(name)
    return found.values()


def _cell(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-").replace("e+00", "") if value <= EXACT else f"**{value:.2g}**"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def write(readme: Path, table: str) -> int:
    """Replaces what stands between the two markers."""
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        print(f"{readme.name} needs one line {BEGIN} and one line {END}.", file=sys.stderr)
        return 2
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
