"""Steps that need whole batches, in Lightning under FSDP: two real gloo processes, five chunks against one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import processes
import pytest
from processes import Ranks

WORKER = Path(__file__).with_name("lightning_shards_worker.py")
STEPS = ["Step", "ClassWeights", "Contrastive", "Flooding", "Queue", "WarmedUp", "SquaredInBackward"]
# Those that the first FSDP cannot run without this library either.
OF_FSDP2 = ["Teacher", "Adversarial", "Adversaries"]
CASES = [("fsdp2", step) for step in [*STEPS, *OF_FSDP2]] + [("fsdp1", step) for step in STEPS]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Ranks]:
    """Results of all steps in a mode, from one pair of processes."""
    done: dict[tuple[str, str], Ranks] = {}

    def run(kind: str, mode: str) -> Ranks:
        if (kind, mode) not in done:
            own = [step for which, step in CASES if which == kind]
            names = [f"{mode} {step}" for step in [*own, "ReadsPadding"]] + ["split ClassWeights"]
            names += [f"{mode} Encoder", f"{mode} ShardedEncoder"] if kind == "fsdp2" else []
            names += ["bounded Contrastive", "bounded ReadsPadding"] if mode == "replay" else []
            output = tmp_path_factory.mktemp("shards") / "result.out"
            done[kind, mode] = processes.results(WORKER, output, kind, *names, fresh=True, timeout=400)
        return done[kind, mode]

    return run


@pytest.mark.parametrize(("kind", "step"), CASES)
def test_joint_is_exact_with_five_chunks_against_one(
    ranks_of: Callable[[str, str], Ranks], kind: str, step: str
) -> None:
    for rank, found in enumerate(each[f"joint {step}"] for each in ranks_of(kind, "joint")):
        assert "refused" not in found, found["refused"]
        assert max(found["gradients"], found["logs"], found["losses"], found["apart"]) <= 1e-12
        stats, calls = found["stats"], 2 if step in ("Teacher", "Adversarial") else 1
        assert stats["micro_batches"] == 5 * 5 * calls
        assert stats["dummies"] == rank * 5 * calls
        assert rank or stats["slots"] < stats["slots_before"] / 2


@pytest.mark.parametrize(("kind", "step"), CASES)
def test_auto_takes_what_is_exact_on_both(ranks_of: Callable[[str, str], Ranks], kind: str, step: str) -> None:
    for rank, found in enumerate(each[f"auto {step}"] for each in ranks_of(kind, "auto")):
        assert "refused" not in found, found["refused"]
        assert found["way"] == (0 if step == "Step" else 1)
        assert bool(found["said"]) == (step != "Step" and not rank)
        if step != "WarmedUp":  # whose new term several ranks hear of behind the step that has it first
            assert max(found["gradients"], found["logs"], found["losses"], found["apart"]) <= 1e-12
        assert rank or found["stats"]["slots"] < found["stats"]["slots_before"] / 2


@pytest.mark.parametrize(("kind", "step"), CASES)
def test_chunks_that_run_again_are_exact(ranks_of: Callable[[str, str], Ranks], kind: str, step: str) -> None:
    """Rank 1 has one chunk, and replays dummies: backward passes are collective."""
    for found in (each[f"replay {step}"] for each in ranks_of(kind, "replay")):
        assert "refused" not in found, found["refused"]
        assert max(found["gradients"], found["logs"], found["losses"], found["apart"]) <= 1e-12


@pytest.mark.parametrize("mode", ["joint", "replay", "auto"])
def test_modules_that_are_no_models_of_transformers(ranks_of: Callable[[str, str], Ranks], mode: str) -> None:
    """In chunks where the module around them gathers their parameters: then no rank waits for another's chunks."""
    for rank, found in enumerate(each[f"{mode} Encoder"] for each in ranks_of("fsdp2", mode)):
        assert max(found["gradients"], found["logs"], found["losses"], found["apart"]) <= 1e-12
        assert found["stats"]["micro_batches"] > 5 if rank == 0 else found["stats"]["micro_batches"] == 0


@pytest.mark.parametrize("mode", ["joint", "auto"])
def test_modules_that_gather_their_parameters_run_as_they_came(
    ranks_of: Callable[[str, str], Ranks], mode: str
) -> None:
    for found in (each[f"{mode} ShardedEncoder"] for each in ranks_of("fsdp2", mode)):
        assert found["gradients"] <= 1e-12
        assert mode != "joint" or any("'model.encoder'" in words and "sharded" in words for words in found["said"])


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_auto_replays_what_is_larger_than_the_budget(ranks_of: Callable[[str, str], Ranks], kind: str) -> None:
    """On both ranks, of which one has small batches."""
    for rank in ranks_of(kind, "replay"):
        found = rank["bounded Contrastive"]
        assert "refused" not in found, found["refused"]
        assert found["way"] == 2
        assert max(found["gradients"], found["logs"], found["losses"], found["apart"]) <= 1e-12
        assert "set token_budget=240 or None" in rank["bounded ReadsPadding"]["refused"]


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_what_is_the_same_in_each_step_is_no_news(ranks_of: Callable[[str, str], Ranks], kind: str) -> None:
    """Checks are those of steps 1 and 3, and one for labels of new values; rank 1 has chunks of one row."""
    assert [rank["auto Step"]["audits"] for rank in ranks_of(kind, "auto")] == [[1, 2, 3]] * 2


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_a_term_that_comes_later_is_named(ranks_of: Callable[[str, str], Ranks], kind: str) -> None:
    first = ranks_of(kind, "auto")[0]["auto WarmedUp"]
    assert first["audits"][-1] == 5
    assert "from step 5 on" in first["said"][0]
    assert "1 step since then is not undone" in first["said"][0]


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_a_loss_that_reads_padding(ranks_of: Callable[[str, str], Ranks], kind: str) -> None:
    """Refused jointly, as it came under auto; and what split trains is another training, the control."""
    refused = [rank["joint ReadsPadding"]["refused"] for rank in ranks_of(kind, "joint")]
    assert refused[0] == refused[1]
    assert refused[0].startswith("GradientCheckError: first-batch check")
    for rank in ranks_of(kind, "auto"):
        assert rank["auto ReadsPadding"]["way"] == 3
        assert rank["auto ReadsPadding"]["gradients"] == 0
        assert rank["split ClassWeights"]["gradients"] > 1e-3
