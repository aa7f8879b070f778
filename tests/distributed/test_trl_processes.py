"""GRPO with the mixin: two real gloo processes, uneven work, against the same training without the mixin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from processes import Ranks

pytest.importorskip("trl")

import trl_cases as cases

WORKER = Path(__file__).with_name("trl_worker.py")
SCENARIOS = {
    "dapo": ("split", "joint", "replay", "auto"),
    "grpo": ("split",),
    "packed": ("split", "joint"),
    "quantile": ("auto", "joint"),
    "adaptive_entropy": ("split", "replay"),
    "truncated": ("split", "replay", "joint"),
    "checkpointing": ("split", "replay", "joint"),
    "couples_on_one_rank": ("auto",),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    output = tmp_path_factory.mktemp("trl") / "result.out"
    return processes.results(
        WORKER, output, "ddp", *SCENARIOS, "equal_weights", "one_rank_refuses", "out_of_memory", timeout=280
    )


def record(values: dict[str, Any]) -> cases.Record:
    return cases.Record(gradients=values["gradients"], logs=values["logs"], parameters=values["parameters"])


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, modes in SCENARIOS.items() for mode in modes])
def test_gradients_parameters_and_metrics(ranks: Ranks, name: str, mode: str) -> None:
    if isinstance(ranks[0][name], str):
        pytest.skip(ranks[0][name])
    for rank in ranks:
        assert rank[name][mode]["kind"] == "MULTI_CPU"
        found, wanted = record(rank[name][mode]), record(rank[name]["stock"])
        assert cases.gradient_difference(found, wanted) <= 1e-5
        moved = (wanted.parameters - cases.flat(cases.qwen2())).abs().max()
        difference = (found.parameters - wanted.parameters).abs().max()
        assert float(difference / moved) <= 1e-4  # one unit in the last place of a parameter is 1.5e-5 of this
    # What is logged is gathered over ranks, and logged by rank 0 alone.
    found, wanted = record(ranks[0][name][mode]), record(ranks[0][name]["stock"])
    worst, metric = cases.metric_difference(found, wanted)
    assert worst <= 1e-5, metric
    assert torch.equal(*(rank[name][mode]["parameters"] for rank in ranks))
    assert all(torch.equal(a, b) for a, b in zip(*(rank[name][mode]["gradients"] for rank in ranks), strict=True))


@pytest.mark.parametrize("mode", ["split", "replay", "joint"])
def test_work_is_uneven_and_counts_are_not(ranks: Ranks, mode: str) -> None:
    first, second = (rank["dapo"][mode]["stats"] for rank in ranks)
    assert first["micro_batches"] == second["micro_batches"] > first["batches"]
    assert first["real_tokens"] > 1.3 * second["real_tokens"]
    logged = sum(logs.get("padmin/slots", 0) for logs in ranks[0]["dapo"][mode]["logs"])
    assert logged == first["slots"] + second["slots"]


def test_a_rank_that_runs_out_of_rows_keeps_in_step(ranks: Ranks) -> None:
    assert [rank["truncated"]["split"]["stats"]["dummies"] > 0 for rank in ranks] == [False, True]


def test_modes_that_ranks_agree_on(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["dapo"]["auto"]["mode"] == "split"
        if not isinstance(rank["quantile"], str):
            assert rank["quantile"]["auto"]["mode"] == "replay"
        assert rank["couples_on_one_rank"]["auto"]["mode"] == "replay"


def test_negative_control_every_chunk_weighs_the_same(ranks: Ranks) -> None:
    values = ranks[0]["equal_weights"]
    assert cases.gradient_difference(record(values["split"]), record(values["stock"])) > 0.1


def test_all_ranks_refuse_what_one_refuses(ranks: Ranks) -> None:
    first, second = (rank["one_rank_refuses"] for rank in ranks)
    assert first.startswith("ArchitectureError: a row takes")
    assert second.startswith("PeerError: rank 0 refused its batch (ArchitectureError)")


@pytest.mark.parametrize("which", [0, 1])
def test_both_ranks_hear_of_one_that_runs_out_of_memory(ranks: Ranks, which: int) -> None:
    for rank in ranks:
        assert rank["out_of_memory"][which].startswith("OutOfMemoryError: out of memory on rank 1 in micro-batch ")


# FSDP, through an Accelerate that is told that it is on devices.

SHARDED = {"dapo": SCENARIOS["dapo"], "truncated": ("split", "replay"), "couples_on_one_rank": ("auto",)}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ranks]:
    done: dict[str, Ranks] = {}

    def run(kind: str) -> Ranks:
        if kind not in done:
            output = tmp_path_factory.mktemp(kind) / "result.out"
            names = (*SHARDED, "equal_weights", "one_rank_refuses")
            done[kind] = processes.results(WORKER, output, kind, *names, timeout=280)
        return done[kind]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, modes in SHARDED.items() for mode in modes])
def test_fsdp(sharded: Callable[[str], Ranks], kind: str, name: str, mode: str) -> None:
    """Gradients and parameters whole under FSDP2; under FSDP1 this rank's shards."""
    ranks = sharded(kind)
    for rank in ranks:
        assert rank[name][mode]["kind"] == "FSDP"
        found, wanted = record(rank[name][mode]), record(rank[name]["stock"])
        assert cases.gradient_difference(found, wanted) <= 1e-5
        assert torch.allclose(found.parameters, wanted.parameters, rtol=0, atol=1e-6)
    worst, metric = cases.metric_difference(record(ranks[0][name][mode]), record(ranks[0][name]["stock"]))
    assert worst <= 1e-5, metric
    counts = [rank[name][mode]["stats"]["micro_batches"] for rank in ranks]
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_fsdp_control_and_refusal(sharded: Callable[[str], Ranks], kind: str) -> None:
    first, second = sharded(kind)
    values = first["equal_weights"]
    assert cases.gradient_difference(record(values["split"]), record(values["stock"])) > 0.1
    assert first["one_rank_refuses"].startswith("ArchitectureError: a row takes")
    assert second["one_rank_refuses"].startswith("PeerError: rank 0 refused its batch (ArchitectureError)")
