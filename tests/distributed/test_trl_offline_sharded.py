"""Trainers of TRL that learn from a dataset, under FSDP: two real gloo processes, uneven work, against stock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import processes
import pytest
from processes import Ranks

pytest.importorskip("trl")

WORKER = Path(__file__).with_name("trl_offline_worker.py")


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ranks]:
    done: dict[str, Ranks] = {}

    def run(kind: str) -> Ranks:
        if kind not in done:
            output = tmp_path_factory.mktemp(kind) / "result.out"
            done[kind] = processes.results(WORKER, output, kind, "sft", "dpo", "reads", timeout=200, fresh=True)
        return done[kind]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_gradients_are_the_stock_ones(ranks_of: Callable[[str], Ranks], kind: str, trainer: str) -> None:
    for found in (each[trainer] for each in ranks_of(kind)):
        assert found["kind"] == "FSDP"
        assert found["gradient"] <= 1e-5
        assert found["metric"] <= 1e-5
        assert found["checks"] == [0]  # before the first step, once
    first, second = (each[trainer]["stats"] for each in ranks_of(kind))
    assert first["micro_batches"] == second["micro_batches"] > 2 * first["batches"]
    assert first["real_tokens"] > 2 * second["real_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_a_loss_that_reads_padding_on_one_rank_is_refused_on_all(ranks_of: Callable[[str], Ranks], kind: str) -> None:
    first, second = (rank["reads"] for rank in ranks_of(kind))
    assert first == second
    assert first.startswith("GradientCheckError: first-batch check")
    assert "_fsdp_wrapped_module" not in first
