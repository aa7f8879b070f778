"""The bucket sampler in two real processes, under Lightning's DDP and under Accelerate."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
from processes import Ranks

WORKER = Path(__file__).with_name("sampler_worker.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return processes.results(WORKER, tmp_path_factory.mktemp("sampler") / "result.out", timeout=120)


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_every_row_once_on_one_rank_and_other_orders_in_each_epoch(ranks: Ranks, framework: str) -> None:
    epochs = [rank[framework][0] if framework == "lightning" else rank[framework] for rank in ranks]
    for first, second in zip(*epochs, strict=True):
        assert len(first) == len(second) == len(epochs[0][0])
        assert sorted(index for batch in first + second for index in batch) == list(range(101))
    assert epochs[0][0] != epochs[0][1] != epochs[0][2]


def test_lightning_does_not_put_its_own_sampler_in(ranks: Ranks) -> None:
    for rank in ranks:
        assert "distributed" in rank["lightning"][1]
        assert rank["lightning"][1].startswith("TypeError")
