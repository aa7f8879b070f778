"""Every Trainer on every sharding, against stock: two real gloo processes, uneven work, three clipped steps.

`sharding.json` holds what was measured, and `docs/sharding.md` shows it. A run compares what it finds with both; with
WRITE_MATRIX=1 in the environment it writes them.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
from processes import Ranks

pytest.importorskip("trl")

HERE = Path(__file__)
WORKER, FIGURES = HERE.with_name("trl_matrix_worker.py"), HERE.with_name("sharding.json")
PAGE = HERE.parents[2] / "docs" / "sharding.md"
TRAINERS = {
    "trainer": "Trainer",
    "sft": "SFT",
    "dpo": "DPO",
    "reward": "Reward",
    "kto": "KTO",
    "grpo": "GRPO",
    "rloo": "RLOO",
}
SHARDINGS = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2"} | {f"zero{k}": f"ZeRO {k}" for k in range(4)}
EXACT, WRONG = 1e-5, 0.05  # float32
# Of GRPO. Where rounding decides which ratios are clipped, stock itself is farther from stock under DDP.
SETUPS = {
    "grpo joint": EXACT,
    "grpo replay": EXACT,
    "windows of two generations": EXACT,
    "two windows of a generation": EXACT,
    "dr_grpo": EXACT,
    "clipped by the engine": EXACT,
    "without rows": 1e-4,
    "few rows": 1e-4,
    "checkpointing": EXACT,
    "quantile": EXACT,
    "audit": EXACT,
    "audit of rloo": EXACT,
    "audit joint": EXACT,
    "by name": EXACT,
    "adapters": EXACT,
    "offloaded": EXACT,
    "resumed": EXACT,
    "bf16": 0.3,
}
WRITES = os.environ.get("WRITE_MATRIX") == "1"
BEGIN, END = "<!-- written by tests/distributed/test_trl_matrix.py -->", "<!-- end -->"

without_deepspeed = importlib.util.find_spec("deepspeed") is None  # not imported: it would stay loaded
columns = pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(
            each,
            marks=pytest.mark.skipif(
                each.startswith("zero") and without_deepspeed, reason="deepspeed is not installed: not run"
            ),
        )
        for each in SHARDINGS
    ],
)


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ranks]:
    """What both ranks have found in a column, from one pair of processes."""
    done: dict[tuple[str, ...], Ranks] = {}

    def run(sharding: str, *names: str) -> Ranks:
        key = (sharding, *names)
        if key not in done:
            output = tmp_path_factory.mktemp(sharding) / "result.out"
            done[key] = processes.results(WORKER, output, *key, timeout=290, fresh=True)
        return done[key]

    return run


def figures(ranks: Ranks, name: str) -> dict[str, Any]:
    """The worst of both ranks; of metrics, what the first one logs."""
    found = [rank[name] for rank in ranks]
    if any(isinstance(each, str) for each in found):
        return {"refused": next(each for each in found if isinstance(each, str))}
    worst = {key: max(float(each[key]) for each in found) for key in ("displacement", "metric")}
    return worst | {"control": min(float(each["control"]) for each in found if "control" in each)}


@pytest.mark.slow
@columns
def test_trainings_end_where_stock_ones_do(ranks_of: Callable[..., Ranks], sharding: str) -> None:
    ranks = ranks_of(sharding, *TRAINERS)
    measured = {name: figures(ranks, name) for name in TRAINERS}
    if WRITES:
        table = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
        table[sharding] = {name: rounded(each) for name, each in measured.items()}
        FIGURES.write_text(json.dumps({each: table[each] for each in SHARDINGS if each in table}, indent=1) + "\n")
        PAGE.write_text(with_table(PAGE.read_text(), json.loads(FIGURES.read_text())))
    known = json.loads(FIGURES.read_text())[sharding]
    for name, found in measured.items():
        assert ("refused" in found) == ("refused" in known[name]), (name, found)
        if "refused" in found:
            continue
        assert found["displacement"] <= EXACT, name
        assert found["metric"] <= EXACT, name
        assert found["control"] > WRONG, name
    for rank in ranks:
        for name, found in rank.items():
            if isinstance(found, str):
                continue
            assert found["steps"] == (3, 3, 3), name
            assert sharding == "zero0" or len(found["norms"]) == 3, name  # whose engine tells no norm
            assert found["stats"]["micro_batches"] > found["stats"]["batches"] or rank is ranks[1], name
    first, second = (rank["grpo"]["stats"] for rank in ranks)
    assert first["micro_batches"] == second["micro_batches"]
    assert first["real_tokens"] > 2 * second["real_tokens"]


@pytest.mark.slow
@pytest.mark.skipif(without_deepspeed, reason="deepspeed is not installed: not run")
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_set_ups_of_deepspeed(ranks_of: Callable[..., Ranks], sharding: str, part: int) -> None:
    if importlib.util.find_spec("peft") is None and part:
        pytest.skip("peft is not installed")
    names = list(SETUPS)[part::2]
    ranks = ranks_of(sharding, *names)
    for name in names:
        for rank in ranks:
            assert not isinstance(rank[name], str), (name, rank[name])
            assert rank[name]["displacement"] <= SETUPS[name], name
            assert rank[name]["metric"] <= (EXACT if name != "bf16" else 0.1), rank[name]["metric_name"]
            assert rank[name]["steps"][:2] == (3, 3), name
    for name in {"without rows", "few rows"} & set(names):
        assert ranks[1][name]["stats"]["dummies"] > 0, name
    if "quantile" in names:
        assert [rank["quantile"]["mode"] for rank in ranks] == ["replay", "replay"]


def rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, str) else float(f"{value:.1e}") for key, value in found.items()}


def with_table(page: str, table: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The page with the figures as a table: largest of displacement and metrics, and the control."""
    head = ["| |" + "".join(f" {name} |" for name in SHARDINGS.values()), "|---|" + "---|" * len(SHARDINGS)]
    rows = [
        f"| {words} |" + "".join(f" {cell(table.get(sharding, {}).get(name))} |" for sharding in SHARDINGS)
        for name, words in TRAINERS.items()
    ]
    before, _, rest = page.partition(BEGIN)
    return before + "\n".join([BEGIN, *head, *rows, END]) + rest.partition(END)[2]


def cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run"
    if "refused" in found:
        return "refused"
    return f"{max(found['displacement'], found['metric']):.0e} ({found['control']:.1g})"


def test_the_page_shows_what_was_measured() -> None:
    table, page = json.loads(FIGURES.read_text()), PAGE.read_text()
    assert page == with_table(page, table)
    assert list(table) == list(SHARDINGS)
    for sharding, column in table.items():
        assert list(column) == list(TRAINERS)
        for name, found in column.items():
            must = name in ("trainer", "sft", "dpo", "grpo") and sharding in ("ddp", "fsdp2", "zero2", "zero3")
            if "refused" not in found:
                assert max(found["displacement"], found["metric"]) <= EXACT
                assert found["control"] > WRONG
            else:
                assert not must
                assert found["refused"].startswith("ConfigError: ")
