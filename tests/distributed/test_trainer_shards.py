"""Trainers of transformers that keep batches whole, under FSDP: two real gloo processes, five chunks against one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import joint_cases as cases
import processes
import pytest
from processes import Ranks

WORKER = Path(__file__).with_name("trainer_shards_worker.py")
KINDS = ("fsdp2", "fsdp1")
JOINT = [f"joint {step.__name__}" for step in cases.OWN]
JOINT += ["joint WarmUp, window", "joint WarmUp, checkpoints", "joint Weighted, full rows"]
AUTO = {f"auto {step.__name__}": "joint" for step in cases.OWN} | {
    "auto OwnStep": "as it came",  # what it sends backward cannot be compared on several ranks
    "auto None": "split",
    "auto LateWeights": "joint",
    "auto Weighted, window": "joint",
}
REPLAY = [case.replace("joint", "replay") for case in JOINT]
BOUNDED = {"bounded None": "split", "bounded Weighted": "replay", "bounded Contrastive": "replay"}
OTHERS = ("split Weighted", "joint LateReads")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ranks]:
    """Results of scenarios under a kind of FSDP, from one pair of processes."""
    done: dict[tuple[str, ...], Ranks] = {}

    def run(*arguments: str) -> Ranks:
        if arguments not in done:
            output = tmp_path_factory.mktemp("shards") / "result.out"
            done[arguments] = processes.results(WORKER, output, *arguments, fresh=True, timeout=400)
        return done[arguments]

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", JOINT)
def test_joint_is_exact_with_five_chunks_against_one(ranks_of: Callable[..., Ranks], kind: str, case: str) -> None:
    for rank, found in enumerate(each[case] for each in ranks_of(kind, *JOINT, *OTHERS)):
        assert "refused" not in found, found["refused"]
        assert max(found["gradients"], found["logs"], found["apart"]) <= 1e-12
        stats = found["stats"]
        calls = 2 if "Adversarial" in case or "Remembering" in case else 1
        assert stats["micro_batches"] == 5 * 6 * calls
        assert rank or stats["slots"] < stats["slots_before"] / 2


@pytest.mark.parametrize("kind", KINDS)
def test_split_is_another_training(ranks_of: Callable[..., Ranks], kind: str) -> None:
    """The control."""
    assert all(rank["split Weighted"]["gradients"] > 1e-3 for rank in ranks_of(kind, *JOINT, *OTHERS))


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_to_read_padding_on_one_rank_is_refused_on_both(ranks_of: Callable[..., Ranks], kind: str) -> None:
    first, second = (rank["joint LateReads"]["refused"] for rank in ranks_of(kind, *JOINT, *OTHERS))
    assert first == second
    assert first.startswith("GradientCheckError: audit of step 3")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", AUTO)
def test_auto_takes_what_is_exact_on_both(ranks_of: Callable[..., Ranks], kind: str, case: str) -> None:
    for rank, found in enumerate(each[case] for each in ranks_of(kind, *AUTO)):
        assert "refused" not in found, found["refused"]
        assert found["way"] == AUTO[case]
        assert max(found["gradients"], found["apart"]) <= 1e-12
        assert found["logs"] <= (1e-6 if AUTO[case] == "split" else 1e-12)  # losses of parts are added in float32
        assert bool(found["said"]) == (AUTO[case] != "split" and not rank)
        assert rank or AUTO[case] == "as it came" or found["stats"]["slots"] < found["stats"]["slots_before"] / 2


@pytest.mark.parametrize("kind", KINDS)
def test_auto_goes_over_in_the_middle(ranks_of: Callable[..., Ranks], kind: str) -> None:
    first, second = (rank["auto LateWeights"] for rank in ranks_of(kind, *AUTO))
    assert first["audits"] == second["audits"] == [1, 3, 5]
    assert "from step 3 on, model calls run in chunks" in first["said"][0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [*REPLAY, *BOUNDED])
def test_chunks_that_run_again_are_exact(ranks_of: Callable[..., Ranks], kind: str, case: str) -> None:
    """Rank 1 has one chunk, and replays dummies: backward passes are collective."""
    for found in (each[case] for each in ranks_of(kind, *REPLAY, *BOUNDED, "bounded OwnStep")):
        assert "refused" not in found, found["refused"]
        assert found["way"] == BOUNDED.get(case, "replay")
        assert max(found["gradients"], found["apart"]) <= 1e-12
        assert found["logs"] <= (1e-6 if found["way"] == "split" else 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_run_as_it_came_and_is_too_large(ranks_of: Callable[..., Ranks], kind: str) -> None:
    for rank in ranks_of(kind, *REPLAY, *BOUNDED, "bounded OwnStep"):
        assert "set token_budget=240 or None" in rank["bounded OwnStep"]["refused"]


def test_a_rank_whose_loss_fails_ends_both(ranks_of: Callable[..., Ranks]) -> None:
    first, second = (rank["joint Raises"]["refused"] for rank in ranks_of("fsdp2", "joint Raises"))
    assert second == "ValueError: no such row"
    assert first != "trained"
