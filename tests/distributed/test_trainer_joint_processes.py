"""mode="joint" of PadMinTrainerMixin under DistributedDataParallel: two real gloo processes, in float64."""

from __future__ import annotations

from pathlib import Path

import joint_cases as cases
import processes
import pytest
import torch
from processes import Ranks

WORKER = Path(__file__).with_name("trainer_joint_worker.py")
CASES = [*(step.__name__ for step in cases.OWN), "window", "checkpoints", "other chunks"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    output = tmp_path_factory.mktemp("joint") / "result.out"
    return processes.results(WORKER, output, fresh=True, timeout=280)


@pytest.mark.parametrize("case", CASES)
def test_gradients_logs_and_parameters_are_the_stock_ones(ranks: Ranks, case: str) -> None:
    for found in (rank[case] for rank in ranks):
        assert found["gradients"] <= 1e-12
        assert found["logs"] <= 1e-12
        assert found["apart"] <= 1e-12
        assert found["waste"][1] <= found["waste"][0] / 2
    assert torch.equal(*(rank[case]["parameters"] for rank in ranks))


def test_split_is_another_training(ranks: Ranks) -> None:
    """The control."""
    assert all(rank["control"]["gradients"] > 1e-3 for rank in ranks)


@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("split", "split"),
        ("weighted", "joint"),
        ("adversarial", "joint"),
        ("choices", "joint"),
        ("own step", "as it came"),
        ("reads", "as it came"),
    ],
)
def test_auto_goes_the_same_way_on_both(ranks: Ranks, case: str, way: str) -> None:
    """Without a declaration; one of the two reads padding on one rank alone, and only the first rank tells."""
    for found in (rank[f"auto {case}"] for rank in ranks):
        assert found["way"] == way
        assert found["gradients"] <= 1e-12
        assert found["logs"] <= (1e-6 if way == "split" else 1e-12)
        assert found["apart"] <= 1e-12
        assert way == "as it came" or found["waste"][1] <= found["waste"][0] / 2
    assert [bool(rank[f"auto {case}"]["told"]) for rank in ranks] == [way != "split", False]


@pytest.mark.parametrize("case", ["reads", "late"])
def test_what_reads_padding_on_one_rank_is_refused_on_both(ranks: Ranks, case: str) -> None:
    """In the middle of a training by the audit behind the step that shows it first."""
    found = [rank[case] for rank in ranks]
    assert all(each.startswith("GradientCheckError: ") for each in found)
    assert ("audit of step" if case == "late" else "first-batch check") in found[0]
