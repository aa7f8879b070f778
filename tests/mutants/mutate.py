"""How many small faults in the core the tests notice, and whether they still do after the code has moved.

    cd <project>; export PYTHONPATH=$PWD OMP_NUM_THREADS=1         # and `pip install coverage`
    python tests/mutants/mutate.py map map.json                    # one run of the tests: lines, tests, branch coverage
    python tests/mutants/mutate.py sample tests/mutants/list.json  # chosen once, with a fixed seed, and kept
    python tests/mutants/mutate.py run tests/mutants/list.json map.json results.jsonl --folder <folder>
    python tests/mutants/mutate.py report tests/mutants/list.json map.json results.jsonl tests/mutants/baseline.json

`list.json` holds faults by what surrounds them and not by where they are (see operators.py). After a move, `map`, `run`
and `report` again with the same list, `run` with `--before tests/mutants/baseline.json`: it finds the faults again
wherever they are, says which it does not find, and tries the test that noticed a fault before first, wherever that is
now. Never `sample` again for a comparison. `run` goes on where an earlier one has stopped.

A fault is killed where a test fails that passes without it, or where the tests hang. Of the tests that execute the
faulty statement at most 12 are run, and 40 more where those notice nothing: one that is not chosen may notice it. Each
fault has a fork of one process that has imported the frameworks; all of them take 20 minutes on one core, the map 10.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coverage_map import FOLDERS, record
from operators import Fault, Identity, faults
from worker import Worker

ROOT = Path(__file__).resolve().parents[2]
SEED = 20261130
COUNT = 240
_LEAST = 2  # of every module
_ROUNDS = ((12, 20.0), (40, 30.0))  # most tests and seconds; the second for what the first has not noticed
_PATIENCE = 30.0  # seconds, and three times what the tests took under coverage
# Modules that write texts, tables and pictures, by name: faults in them change what is read, not what is trained.
_TEXT = {
    "wording",
    "printing",
    "cli",
    "command",
    "plot",
    "text",
    "tables",
    "report",
    "progress",
    "problems",
    "remedies",
}
_TESTS = (
    *("tests/core", "tests/fuzz", "tests/reports", "tests/diagnose"),
    *("tests/integrations/test_lightning_equality.py", "tests/integrations/test_lightning_check.py"),
    *("tests/integrations/test_lightning_check_hard.py", "tests/integrations/test_check_columns.py"),
    *("tests/integrations/test_transformers_trainer.py", "tests/integrations/test_accelerate_toggle.py"),
    *("tests/integrations/test_fabric.py", "tests/integrations/test_trl_modes.py"),
    "tests/integrations/test_lightning_pack.py",
)


@dataclass(frozen=True)
class Mutant:
    """A fault of the list, and the module in which it was when the list was made."""

    identity: Identity
    module: str


@dataclass(frozen=True)
class Found:
    """Where a fault is now.

    Attributes:
        is_renamed: the function is called otherwise; the statement is the same and there is no other one.
    """

    file: str
    fault: Fault
    is_renamed: bool


def sources() -> dict[str, bytes]:
    """Every file of the project's code, by its path in the project."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(ROOT / "lightning_padmin" / "integrations")
    }


def sample(count: int, seed: int) -> list[Mutant]:
    """Faults of the core, some of every module and more of larger ones; kinds of faults equally often."""
    places: dict[str, list[Identity]] = {}
    for file, source in sources().items():
        module = file.removeprefix("lightning_padmin/").removesuffix(".py")
        if file.startswith("lightning_padmin/") and module.split("/")[-1] not in _TEXT:
            places[module] = [fault.identity for fault in faults(source)]
    numbers = {module: min(_LEAST, len(found)) for module, found in places.items()}
    while sum(numbers.values()) < count:
        poorest = max(places, key=lambda module: (len(places[module]) - numbers[module]) / (numbers[module] + 1))
        numbers[poorest] += 1
    chosen: list[Mutant] = []
    for module, found in places.items():
        dice = random.Random(f"{seed}:{module}")
        kinds: dict[str, list[Identity]] = defaultdict(list)
        for identity in found:
            kinds[identity.operator].append(identity)
        for _ in range(numbers[module]):
            kind = dice.choice(sorted(kinds))
            chosen.append(Mutant(kinds[kind].pop(dice.randrange(len(kinds[kind]))), module))
            kinds = defaultdict(list, {name: left for name, left in kinds.items() if left})
    return chosen


def locate(mutants: Sequence[Mutant], files: dict[str, bytes]) -> list[Found | None]:
    """Where each fault is now; None for one that is not there any more, or of which that is not clear."""
    exactly: dict[Identity, list[tuple[str, Fault]]] = defaultdict(list)
    otherwise: dict[tuple[str, str, int], list[tuple[str, Fault]]] = defaultdict(list)
    for file, source in files.items():
        for fault in faults(source):
            each = fault.identity
            exactly[each].append((file, fault))
            otherwise[each.statement, each.operator, each.occurrence].append((file, fault))
    found: list[Found | None] = []
    for mutant in mutants:
        each = mutant.identity
        name = mutant.module.split("/")[-1] + ".py"
        same = exactly[each]
        # Of equal ones in several files, that of the file that is still called so.
        here = same if len(same) == 1 else [(file, fault) for file, fault in same if file.split("/")[-1] == name]
        renamed = otherwise[each.statement, each.operator, each.occurrence] if not same else []
        candidates = here or renamed
        found.append(Found(*candidates[0], not here) if len(candidates) == 1 else None)
    return found


def _users(file: str, known: dict[str, Any]) -> set[int]:
    """Tests that execute more of a file than importing it does."""
    imported = set(known["imported"].get(file, []))
    lines = known["lines"].get(file, {}).items()
    return {test for line, tests in lines if int(line) not in imported for test in tests}


@functools.cache
def _text(file: str) -> str:
    """A file of the project."""
    return (ROOT / file).read_text()


def tests_for(found: Found, known: dict[str, Any]) -> list[list[str]]:
    """Ids of the tests that are tried on a fault, per round: quick ones of many files, and such as see little else."""
    names = list(known["tests"])
    seconds = list(known["tests"].values())
    lines = {int(line): tests for line, tests in known["lines"].get(found.file, {}).items()}
    first, last = found.fault.lines
    if found.fault.in_function:
        those = {test for line in range(first, last + 1) for test in lines.get(line, [])}
    else:  # executed at import: whoever uses the file, or what imports it where it holds names only
        those = _users(found.file, known)
        if not those:
            module = re.compile(rf"import .*\b{Path(found.file).stem}\b|from .*\b{Path(found.file).stem} import")
            those = {test for file in known["lines"] if module.search(_text(file)) for test in _users(file, known)}
    here: Counter[int] = Counter(test for tests in lines.values() for test in tests)
    functions: dict[str, int] = {}  # the quickest case of each test function
    for test in sorted(those, key=lambda test: seconds[test]):
        functions.setdefault(names[test].split("[")[0], test)
    quick = list(functions.values())
    close = sorted(quick, key=lambda test: -here[test] / known["breadth"][test])
    by_file: dict[str, int] = {}
    for test in quick:
        by_file.setdefault(names[test].split("::")[0], test)
    few = _ROUNDS[0][0] // 3
    order = [
        *close[:few],
        *list(by_file.values())[:few],
        *close,
        *quick,
        *sorted(those, key=lambda test: seconds[test]),
    ]
    left = list(dict.fromkeys(order))
    rounds = []
    for most, limit in _ROUNDS:
        chosen: list[int] = []
        for test in left:
            if len(chosen) < most and (not chosen or sum(seconds[each] for each in (*chosen, test)) <= limit):
                chosen.append(test)
        left = [test for test in left if test not in chosen]
        rounds.append([names[test] for test in sorted(chosen, key=lambda test: seconds[test])])
    return rounds


def run(
    mutants: Sequence[Mutant], known: dict[str, Any], out: Path, folder: Path, before: Mapping[str, str] | None = None
) -> None:
    """Tries every fault and appends one line of JSON for each to `out`; `before`: number -> what had noticed it."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for test in known["tests"]:
        by_name[test.split("::", 1)[-1]].append(test)
    known["breadth"] = Counter(test for lines in known["lines"].values() for tests in lines.values() for test in tests)
    done = {json.loads(line)["number"] for line in out.read_text().splitlines()} if out.exists() else set()
    files = sources()
    places = locate(mutants, files)
    worker = Worker(ROOT, folder, known["preload"])
    sound: dict[str, bool] = {}  # whether a test passes here without a fault

    def is_sound(test: str) -> bool:
        if test not in sound:
            sound[test] = worker.run([test], _PATIENCE + 3 * known["tests"].get(test, 0)).code == 0
        return sound[test]

    for number, (mutant, found) in enumerate(zip(mutants, places, strict=True)):
        if number in done:
            continue
        result: dict[str, Any] = {"number": number, "module": mutant.module}
        start = time.monotonic()
        if found is None:
            result["result"] = "not found"
        else:
            result |= {"file": found.file, "line": found.fault.lines[0], "is_renamed": found.is_renamed}
            first = by_name.get((before or {}).get(str(number), "").split("::", 1)[-1], [])
            rounds = [first, *tests_for(found, known)] if first else tests_for(found, known)
            result |= _try(found, found.fault.apply(files[found.file]), rounds, known["tests"], worker, is_sound)
        result["seconds"] = round(time.monotonic() - start, 1)
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{number + 1:>4}/{len(mutants)} {result['result']:<9} {result['seconds']:>5.1f} s  {mutant}", flush=True)


def _try(
    found: Found,
    source: bytes,
    rounds: Sequence[list[str]],
    seconds: Mapping[str, float],
    worker: Worker,
    is_sound: Callable[[str], bool],
) -> dict[str, Any]:
    tried = 0
    for tests in rounds:
        while tests:
            limit = _PATIENCE + 3 * sum(seconds[test] for test in tests)
            outcome = worker.run(tests, limit, found.file, source)
            if outcome.code == 0:
                tried += len(tests)
                break
            # Without the name of a test, the file could not be imported or the process has ended.
            suspects = [test for test in outcome.failed if test in tests] or tests
            unsound = [test for test in suspects if not is_sound(test)]
            if not unsound:
                told = {"killer": outcome.failed[0] if outcome.failed else f"exit code {outcome.code}"}
                return told | {"result": "hung" if outcome.code is None else "killed", "tests": tried + len(tests)}
            tests = [test for test in tests if test not in unsound]
    return {"result": "survived" if tried else "no test", "tests": tried}


def report(mutants: Sequence[Mutant], known: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures per module and in all, and what was not noticed."""
    columns = ("killed", "hung", "survived", "no test", "not found")
    modules: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        modules[result["module"]][result["result"]] += 1
    total = sum(modules.values(), Counter[str]())
    core = {file: counts for file, counts in known["coverage"].items() if file.startswith("lightning_padmin/")}
    return {
        "seed": SEED,
        "mutants": len(mutants),
        "total": {column: total[column] for column in columns},
        "modules": {name: {c: counts[c] for c in columns if counts[c]} for name, counts in sorted(modules.items())},
        "coverage": {"total": _share(core.values()), "modules": {file: _share([core[file]]) for file in sorted(core)}},
        "noticed_by": {str(each["number"]): each["killer"] for each in results if "killer" in each},
        "not_noticed": [
            {
                "number": each["number"],
                "result": each["result"],
                "tests": each.get("tests", 0),
                "module": each["module"],
            }
            | asdict(mutants[each["number"]].identity)
            for each in results
            if each["result"] not in ("killed", "hung")
        ],
    }


def _share(counts: Any) -> dict[str, Any]:
    """Branches and lines that were executed, of how many."""
    total: Counter[str] = sum((Counter(each) for each in counts), Counter[str]())
    return {
        "branches": [total["covered_branches"], total["num_branches"]],
        "lines": [total["covered_lines"], total["num_statements"]],
    }


def _read(path: Path) -> list[Mutant]:
    return [Mutant(Identity(**each["identity"]), each["module"]) for each in json.loads(path.read_text())]


def _line_by_line(value: dict[str, Any]) -> str:
    """JSON with a line for each module and mutant."""
    text = []
    for key, each in value.items():
        if isinstance(each, dict) and key != "total":
            inner = ",\n".join(f"  {json.dumps(name)}: {_inner(of)}" for name, of in each.items())
            text.append(f"{json.dumps(key)}: {{\n{inner}\n}}")
        elif isinstance(each, list):
            text.append(f"{json.dumps(key)}: [\n" + ",\n".join(f"  {json.dumps(inner)}" for inner in each) + "\n]")
        else:
            text.append(f"{json.dumps(key)}: {json.dumps(each)}")
    return "{\n" + ",\n".join(text) + "\n}\n"


def _inner(value: Any) -> str:
    if isinstance(value, dict) and value and all(isinstance(each, dict) for each in value.values()):
        return "{\n" + ",\n".join(f"    {json.dumps(name)}: {json.dumps(of)}" for name, of in value.items()) + "\n  }"
    return json.dumps(value)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    mapping = commands.add_parser("map", help="run the tests once: which execute which lines, and branch coverage")
    mapping.add_argument("map", type=Path)
    mapping.add_argument("tests", nargs="*", default=list(_TESTS))
    sampling = commands.add_parser("sample", help="choose faults")
    sampling.add_argument("list", type=Path)
    sampling.add_argument("--count", type=int, default=COUNT)
    sampling.add_argument("--seed", type=int, default=SEED)
    running = commands.add_parser("run", help="try the faults of a list")
    running.add_argument("list", type=Path)
    running.add_argument("map", type=Path)
    running.add_argument("results", type=Path)
    running.add_argument("--before", type=Path, help="an earlier report")
    running.add_argument("--folder", type=Path, required=True, help="for the faulty copy, logs and temporary files")
    reporting = commands.add_parser("report", help="write figures")
    reporting.add_argument("list", type=Path)
    reporting.add_argument("map", type=Path)
    reporting.add_argument("results", type=Path)
    reporting.add_argument("out", type=Path)
    locating = commands.add_parser("locate", help="say where the faults of a list are now")
    locating.add_argument("list", type=Path)
    options = parser.parse_args()
    if options.command == "map":
        return record(ROOT, options.tests, options.map.resolve())
    if options.command == "sample":
        chosen = sample(options.count, options.seed)
        options.list.write_text("[\n" + ",\n".join(json.dumps(asdict(each)) for each in chosen) + "\n]\n")
        print(f"{len(chosen)} faults in {len({each.module for each in chosen})} modules")
        return 0
    mutants = _read(options.list)
    if options.command == "locate":
        places = locate(mutants, sources())
        for mutant, found in zip(mutants, places, strict=True):
            print(f"{found.file}:{found.fault.lines[0]}" if found else "not found", mutant.identity)
        return int(None in places)
    known = json.loads(options.map.read_text())
    if options.command == "run":
        before = json.loads(options.before.read_text())["noticed_by"] if options.before else {}
        run(mutants, known, options.results, options.folder.resolve(), before)
    else:
        results = [json.loads(line) for line in options.results.read_text().splitlines()]
        figures = report(mutants, known, sorted(results, key=lambda each: int(each["number"])))
        options.out.write_text(_line_by_line(figures))
        print(json.dumps(figures["total"]), json.dumps(figures["coverage"]["total"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
