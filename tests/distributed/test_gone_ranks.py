"""A rank that ends, wherever and however: the others end as soon as without the callback, and say which and why."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("gone_worker.py")
WAYS = ("kill", "interrupt", "exit", "raise")
PLACES = ("loader", "batch_start", "forward", "backward", "optimizer_step", "before_step", "batch_end")
FIRST, LATER = 3, 23  # in the first batches ranks note how each went; later only in those that need more memory
WORDS = {"interrupt": "KeyboardInterrupt", "exit": "SystemExit", "raise": "the roof is on fire"}
MOST_LATER = 5.0

Found = dict[str, list[dict[str, Any]]]


def run(tmp_path: Path, scenarios: list[str], timeout: float = 1500) -> Found:
    output = tmp_path / "found.json"
    command = [sys.executable, str(WORKER), str(output), *scenarios]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: Found = json.loads(output.read_text())
    return found


def table(found: Found) -> str:
    """One line per scenario: seconds from the end of one rank to the end of the other, ours beside stock's."""
    lines = [f"{'how':10} {'place':15} {'batch':>5} {'rank':>4} {'stock':>6} {'ours':>6}  with"]
    for scenario, ranks in found.items():
        how, place, batch, who, adapter = scenario.split(":")
        if "ours" not in adapter:
            continue
        stock = found.get(scenario.replace("ours", "stock"))
        seconds = [lateness(each, int(who)) if each else float("nan") for each in (stock, ranks)]
        lines.append(f"{how:10} {place:15} {batch:>5} {who:>4} {seconds[0]:6.1f} {seconds[1]:6.1f}  {_name(adapter)}")
    return "\n".join(lines)


def _name(adapter: str) -> str:
    return adapter.removesuffix("ours").removesuffix("-") or "lightning"


def lateness(ranks: list[dict[str, Any]], who: int) -> float:
    later: float = ranks[1 - who]["seconds"] - ranks[who]["seconds"]
    return later


def check(found: Found) -> None:
    print(table(found))
    for scenario, ranks in found.items():
        how, _, _, who, adapter = scenario.split(":")
        other = ranks[1 - int(who)]
        assert other["code"] not in (0, "hung"), (scenario, other["text"][-2000:])
        if "ours" in adapter:
            stock = found.get(scenario.replace("ours", "stock"))
            allowed = MOST_LATER + (max(lateness(stock, int(who)), 0.0) if stock else 0.0)
            assert lateness(ranks, int(who)) <= allowed, (scenario, table(found))
            assert f"rank {who}" in other["text"], (scenario, other["text"][-2000:])
            assert WORDS.get(how, "gone without a word") in other["text"], (scenario, other["text"][-2000:])


def test_a_rank_that_ends_takes_the_other_along(tmp_path: Path) -> None:
    wanted = [
        f"kill:forward:{FIRST}:1",
        f"kill:forward:{LATER}:1",
        f"kill:optimizer_step:{FIRST}:0",
        f"interrupt:forward:{FIRST}:1",
        f"raise:optimizer_step:{FIRST}:1",
        f"raise:loader:{LATER}:1",
        f"raise:before_step:{FIRST}:1",
        f"raise:batch_end:{FIRST}:0",
    ]
    trainers = [f"kill:forward:8:1:trainer-{adapter}" for adapter in ("stock", "ours")]
    check(run(tmp_path, [f"{each}:ours" for each in wanted] + trainers))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("who", [0, 1])
def test_every_way_at_every_place(tmp_path: Path, who: int) -> None:
    wanted = [
        f"{how}:{place}:{batch}:{who}:{adapter}"
        for how, place, batch, adapter in itertools.product(WAYS, PLACES, (FIRST, LATER), ("stock", "ours"))
    ]
    trainers = [
        f"{how}:forward:{forward}:{who}:trainer-{adapter}"
        for how, forward, adapter in itertools.product(WAYS, (1, 5, 8), ("stock", "ours"))
    ]
    check(run(tmp_path, wanted + trainers))
