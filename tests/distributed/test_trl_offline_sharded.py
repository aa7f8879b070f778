"""Trainers of TRL that learn from a dataset, and that of transformers in joint mode, under FSDP, against stock.

Two real gloo processes with uneven work.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import processes
import pytest
from processes import Ranks

pytest.importorskip("trl")

SCENARIOS = ("sft", "dpo", "trainer", "reads", "reads_in_trainer")
WORKER = Path(__file__).with_name("trl_offline_worker.py")


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ranks]:
    done: dict[str, Ranks] = {}

    def run(kind: str) -> Ranks:
        if kind not in done:
            output = tmp_path_factory.mktemp(kind) / "result.out"
            done[kind] = processes.results(WORKER, output, kind, *SCENARIOS, timeout=200, fresh=True)
        return done[kind]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("trainer", ["sft", "dpo", "trainer"])
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
@pytest.mark.parametrize("case", ["reads", "reads_in_trainer"])
def test_a_loss_that_reads_padding_on_one_rank_is_refused_on_all(
    ranks_of: Callable[[str], Ranks], kind: str, case: str
) -> None:
    first, second = (rank[case] for rank in ranks_of(kind))
    assert first == second or case == "reads_in_trainer"  # which names what moves on each rank
    assert all(each.startswith("GradientCheckError: first-batch check") for each in (first, second))
    assert "_fsdp_wrapped_module" not in first
