"""PadMinCallback with Lightning's DeepSpeedStrategy, ZeRO 0 to 3: two gloo processes, uneven work, float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import processes
import pytest
from processes import Ranks

pytest.importorskip("deepspeed", reason="deepspeed is not installed")
WORKER = Path(__file__).with_name("lightning_deepspeed_worker.py")
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ranks]:
    done: dict[int, Ranks] = {}

    def run(stage: int) -> Ranks:
        if stage not in done:
            output = tmp_path_factory.mktemp(f"stage{stage}") / "result.out"
            done[stage] = processes.results(WORKER, output, stage, fresh=True)
        return done[stage]

    return run


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scenario", ["accumulate 1", "accumulate 2", "no loss on one rank"])
def test_parameters_are_those_of_the_stock_trainer(ranks_of: Callable[[int], Ranks], stage: int, scenario: str) -> None:
    for rank in ranks_of(stage):
        assert rank[scenario] <= 1e-5
        assert rank["micro_batches"] == 20


@pytest.mark.parametrize("stage", [1, 2])
def test_without_the_boundary_gradients_are_silently_wrong(ranks_of: Callable[[int], Ranks], stage: int) -> None:
    assert all(rank["without boundary"] > 0.5 for rank in ranks_of(stage))


@pytest.mark.parametrize("stage", STAGES)
def test_the_check_refuses_on_all_ranks(ranks_of: Callable[[int], Ranks], stage: int) -> None:
    first, second = (rank["refused"] for rank in ranks_of(stage))
    assert first == second
    assert "set loss_reduction='row-mean'" in first
