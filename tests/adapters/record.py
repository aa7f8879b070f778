"""What every adapter does in every scenario, to the bit; and whether two checkouts do the same.

    python tests/adapters/record.py --code CHECKOUT --out FILE [--only PATTERN]   runs the table on that code
    python tests/adapters/record.py --compare A B                                 says what differs
    python tests/adapters/record.py --golden FILE                                 writes golden.json from a record

A record holds, of the run with this library, for each scenario and adapter: rows and width of every call of the model,
check sums of gradients and weights, logged values and metrics (floats as hexadecimal numbers), and the text of every
message and error. Bits are only comparable between runs on one machine, so what is committed (golden.json) has no
floats: calls of the model, messages and errors.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
TESTS, GOLDEN = HERE.parents[1], HERE.with_name("golden.json")


def exactly(value: Any) -> Any:
    """Floats as hexadecimal numbers, also inside of what JSON can hold."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {key: exactly(each) for key, each in value.items()}
    return [exactly(each) for each in value] if isinstance(value, list | tuple) else value


def sums(values: Any) -> list[str]:
    """Sum, sum of squares, and a product with numbers that tell places apart, of a vector in float64."""
    import torch

    places = torch.cos(torch.arange(len(values), dtype=torch.float64))
    return exactly([float(values.sum()), float(values.square().sum()), float(values @ places)])


def without_numbers(text: str) -> str:
    """A message without measured numbers, which may differ in a last digit on another machine; addresses too."""
    text = re.sub(r"0x[0-9a-f]+", "<address>", text)
    return re.sub(r"(?<![\w.])\d*\.\d+(e[-+]?\d+)?|(?<![\w.])\d+e[-+]\d+", "<number>", text)


def entry(out: Any) -> dict[str, Any]:
    """An `Outcome` as JSON holds it, to the bit."""
    return {
        "calls": [list(call) for call in out.calls],
        "messages": [re.sub(r"0x[0-9a-f]+", "<address>", each) for each in out.messages],
        "error": list(out.error) if out.error else None,
        "gradients": [sums(each) for each in out.gradients],
        "weights": sums(out.weights),
        "logs": exactly(out.logs),
        "metrics": exactly(out.metrics),
        "counts": exactly(out.counts),
    }


def record(only: str) -> dict[str, Any]:
    """The table, on the code that can be imported."""
    from adapters import contract

    found: dict[str, Any] = {}
    for name in contract.NAMES:
        for scenario in contract.SCENARIOS:
            key = f"{scenario.name} | {name}"
            if not fnmatch.fnmatch(key, only) or isinstance(scenario.of(name), contract.NotApplicable):
                continue
            out = contract.carry_out(contract.adapter(name), scenario)
            found[key] = entry(out)
            print(key, "refused" if out.error else f"{len(out.calls)} calls", file=sys.stderr, flush=True)
    return found


def versions() -> dict[str, str]:
    """Of the frameworks, whose own passes and messages differ between releases."""
    return {name: importlib.metadata.version(name) for name in ("accelerate", "lightning", "transformers", "trl")}


def golden(found: dict[str, Any]) -> dict[str, Any]:
    """The part of a record that holds on every machine with these releases."""
    kept = {key: golden_entry(each) for key, each in found.items()}
    return {"versions": versions(), "entries": kept}


def golden_entry(each: dict[str, Any]) -> dict[str, Any]:
    """Calls of the model, messages and the error of one entry."""
    shapes = " ".join(f"{rows}x{width}" for rows, width, _ in each["calls"])
    content = zlib.crc32(" ".join(str(content) for *_, content in each["calls"]).encode())
    return {
        "calls": f"{shapes} ({content:08x})",
        "messages": [without_numbers(message) for message in each["messages"]],
        "error": each["error"] and [each["error"][0], without_numbers(each["error"][1])],
    }


def compare(a: Path, b: Path) -> int:
    """Prints what differs; how many entries do."""
    old, new = json.loads(a.read_text()), json.loads(b.read_text())
    differ = 0
    for key in sorted(old.keys() | new.keys()):
        parts = [part for part in old.get(key, {}) if old[key][part] != new.get(key, {}).get(part)]
        if key not in old or key not in new:
            parts = ["only in " + str(a if key in old else b)]
        if parts:
            differ += 1
            print(f"{key}: {', '.join(parts)}")
            for part in parts:
                if part in ("messages", "error"):
                    print(f"  - {old[key][part]}\n  + {new[key][part]}")
    print(f"{len(old.keys() & new.keys())} entries in both, {differ} differ")
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, default=TESTS.parent, help="the checkout whose lightning_padmin is run")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--only", default="*", help="entries, as in 'right padding | grpo-*'")
    parser.add_argument("--compare", type=Path, nargs=2, help="two records")
    parser.add_argument("--golden", type=Path, help="a record to make golden.json of")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the process that runs the table
    given = parser.parse_args()
    if given.compare:
        sys.exit(compare(*given.compare) > 0)
    if given.golden:
        GOLDEN.write_text(json.dumps(golden(json.loads(given.golden.read_text())), indent=1, sort_keys=True) + "\n")
        return
    if given.out is None:
        parser.error("--out is needed")
    if not given.here:
        # The table is this checkout's, the library the other's.
        paths = os.pathsep.join([str(given.code.resolve()), str(TESTS)])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment = {name: each for name, each in environment.items() if not name.startswith("PADMIN_")}
        sys.exit(subprocess.run([sys.executable, str(HERE), *sys.argv[1:], "--here"], env=environment).returncode)
    sys.path.remove(str(HERE.parent))  # `adapters` is what lies here
    import lightning_padmin

    home = Path(str(lightning_padmin.__file__)).resolve()
    if home.parents[1] != given.code.resolve():
        sys.exit(f"lightning_padmin comes from {home}, not from {given.code}")
    warnings.simplefilter("ignore")
    found = record(given.only)
    given.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
