"""A rank that ends, wherever and however: the others end as soon as in stock training, and say which and why."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import processes
import pytest

WORKER = Path(__file__).with_name("gone_worker.py")
WAYS = ("kill", "interrupt", "exit", "raise")
PLACES = ("loader", "batch_start", "forward", "backward", "before_step", "optimizer_step", "after_step", "batch_end")
OF = {"lightning": PLACES, "fsdp2": PLACES, "trainer": PLACES, "grpo": ("generate", *PLACES)}
OF |= {"accelerate": tuple(place for place in PLACES if place != "optimizer_step")}  # a loop has nothing in between
FIRST, LATER = 3, 23  # in the first batches ranks note how each went; later only in those that need more memory
# A loop of a user's own has no place where an exit passes by.
WORDS = {
    "kill": "gone without a word",
    "interrupt": "KeyboardInterrupt",
    "exit": "SystemExit: 3|its end: by an exit",
    "raise": "RuntimeError: the roof is on fire",
    "short": "the end of its batches|no more batches",
}
MOST_LATER = 5.0

Found = dict[str, list[dict[str, Any]]]


def run(tmp_path: Path, scenarios: list[str], timeout: float = 1500) -> Found:
    output = tmp_path / "found.json"
    done = processes.run(WORKER, output, *scenarios, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    found: Found = json.loads(output.read_text())
    return found


def table(found: Found) -> str:
    """One line per scenario: seconds from the end of one rank's training until both are gone, ours beside stock's."""
    lines = [f"{'how':10} {'place':15} {'batch':>5} {'rank':>4} {'stock':>6} {'ours':>6}  with"]
    for scenario, ranks in found.items():
        how, place, batch, who, framework, whose = scenario.split(":")
        if whose == "ours":
            stock = found.get(scenario.replace(":ours", ":stock"))
            seconds = [until_all_are_gone(each) if each else float("nan") for each in (stock, ranks)]
            lines.append(f"{how:10} {place:15} {batch:>5} {who:>4} {seconds[0]:6.1f} {seconds[1]:6.1f}  {framework}")
    return "\n".join(lines)


def until_all_are_gone(ranks: list[dict[str, Any]]) -> float:
    return max(float(each["seconds"]) for each in ranks)


def check(found: Found) -> None:
    """Codes and words; times where stock's are known."""
    print(table(found))
    for scenario, ranks in found.items():
        how, _, _, who, framework, whose = scenario.split(":")
        other = ranks[1 - int(who)]
        # What ranks of GRPO with different lengths hear of each other breaks off before any of them is through.
        assert ranks[0]["came"] or (how, framework) == ("short", "grpo"), (scenario, other["text"][-2000:])
        if whose == "ours":
            assert other["code"] not in (0, "hung"), (scenario, other["text"][-2000:])
            said = re.findall(rf"rank {who} has ended \((.*)", other["text"])
            if ranks[0]["came"]:
                assert any(re.search(WORDS[how], words) for words in said), (scenario, other["text"][-2000:])
            stock = found.get(scenario.replace(":ours", ":stock"))
            if stock:
                assert until_all_are_gone(ranks) <= until_all_are_gone(stock) + MOST_LATER, (scenario, table(found))


def test_a_rank_that_ends_takes_the_other_along(tmp_path: Path) -> None:
    wanted = [
        f"kill:forward:{FIRST}:1:lightning",
        f"interrupt:optimizer_step:{FIRST}:0:lightning",
        f"raise:loader:{LATER}:1:lightning",
        f"short:loader:{FIRST}:1:lightning",
        f"raise:before_step:{FIRST}:1:fsdp2",
        f"kill:forward:{FIRST}:1:trainer",
        "raise:backward:1:0:grpo",
        f"exit:before_step:{FIRST}:1:accelerate",
    ]
    control = f"raise:before_step:{FIRST}:1:accelerate"
    found = run(tmp_path, [f"{control}:stock", *(f"{each}:ours" for each in wanted)])
    stock = found.pop(f"{control}:stock")
    check(found)
    with pytest.raises(AssertionError):
        check({f"{control}:ours": stock})


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("framework", list(OF))
def test_every_way_at_every_place(tmp_path: Path, framework: str, who: int) -> None:
    wanted = [
        f"{how}:{place}:{batch}:{who}:{framework}:{whose}"
        for how, place, batch, whose in itertools.product(WAYS, OF[framework], (FIRST, LATER), ("stock", "ours"))
    ]
    check(run(tmp_path, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("framework", list(OF))
def test_loaders_of_different_length(tmp_path: Path, framework: str) -> None:
    wanted = itertools.product((FIRST, LATER), (0, 1), ("stock", "ours"))
    check(run(tmp_path, [f"short:loader:{count}:{who}:{framework}:{whose}" for count, who, whose in wanted]))
