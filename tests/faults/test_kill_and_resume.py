"""Runs that end by SIGKILL, wherever they are, and go on from their last checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from faults import kill_worker as worker
from support import flat_parameters, relative
from transformers import Trainer

pytestmark = pytest.mark.slow

LIGHTNING = ["in a micro-batch", "in a window", "before the step", "rare checkpoints", "while it writes"]
TRAINER = {"in a chunk, sums": "sums", "in a chunk, means": "means", "while the Trainer saves": "sums"}


def killed_runs(folder: Path, seed: int) -> dict[str, int]:
    """Kills every run of the worker where it waits; exit codes by name."""
    command = [sys.executable, worker.__file__, str(folder), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ends = threading.Timer(120, process.kill)
    ends.start()
    codes: dict[str, int] = {}
    said = []
    try:
        for line in process.stdout or ():
            said.append(line)
            if line.startswith("held|"):
                os.kill(int(line.split("|")[2]), signal.SIGKILL)
            elif line.startswith("ended|"):
                codes[line.split("|")[1]] = int(line.split("|")[2])
        assert process.wait() == 0, "".join(said)[-4000:]
    finally:
        ends.cancel()
        process.kill()
    return codes


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]


@pytest.fixture(scope="module", params=SEEDS)
def killed(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the killed runs, by name."""
    folder = tmp_path_factory.mktemp("killed")
    codes = killed_runs(folder, request.param)
    assert codes == dict.fromkeys([*LIGHTNING, *TRAINER], -signal.SIGKILL)
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same runs to their end; each is made once."""
    torch.set_num_threads(1)
    made: dict[Any, Any] = {}

    def get(way: str, kind: type = worker.Placed) -> Any:
        if (way, kind) not in made:
            folder = tmp_path_factory.mktemp("unbroken")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = worker.lightning(folder) if way == "lightning" else worker.transformers(way, folder, kind=kind)
            made[way, kind] = run, folder
        return made[way, kind]

    return get


def whole(path: Path) -> bool:
    try:
        torch.load(path, weights_only=False)
    except Exception:
        return False
    return True


def last_of(folder: Path, name: str) -> Path:
    """The last checkpoint: `last.ckpt`, or the last that is whole where the kill came while one was written."""
    if name != "while it writes":
        return folder / "last.ckpt"
    files = sorted(folder.glob("step=*.ckpt"), key=lambda file: int(file.stem.split("=")[1]))
    assert not whole(files[-1])
    assert whole(files[-2])
    return files[-2]


def step_of(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=False)["global_step"])


@pytest.mark.parametrize("name", LIGHTNING)
def test_lightning_ends_where_an_unbroken_run_does(name: str, killed: Path, unbroken: Any) -> None:
    (wanted, counts), _ = unbroken("lightning")
    checkpoint = last_of(killed / name, name)
    step = step_of(checkpoint)
    assert 0 < step < worker.STEPS
    saved = torch.load(checkpoint, weights_only=False)["callbacks"]["PadMinCallback"]["stats"]
    assert (saved["batches"], saved["micro_batches"]) == (2 * step, 10 * step), "something of the batch that was killed"
    found, callback = worker.lightning(None, checkpoint=checkpoint)
    assert relative(flat_parameters(found), flat_parameters(wanted)) <= 1e-12
    assert len(found.gradients) == worker.STEPS - step
    for ours, theirs in zip(found.gradients, wanted.gradients[step:], strict=True):
        assert relative(ours, theirs) <= 1e-12
    assert callback.stats == counts.stats
    assert len(found.shapes) == 10 * (worker.STEPS - step)


@pytest.mark.parametrize("name", LIGHTNING)
def test_a_killed_fit_leaves_checkpoints_and_nothing_else(name: str, killed: Path, unbroken: Any) -> None:
    _, folder = unbroken("lightning")
    assert {file.name for file in (killed / name).rglob("*")} <= {file.name for file in folder.rglob("*")}


def test_lightning_from_a_wrong_step_ends_elsewhere(killed: Path, unbroken: Any, tmp_path: Path) -> None:
    """Negative control: weights of the last step, counters and loader of the one before."""
    (wanted, _), _ = unbroken("lightning")
    folder = killed / "before the step"
    state = torch.load(folder / "last.ckpt", weights_only=False)
    step = int(state["global_step"])
    state["loops"] = torch.load(folder / f"step={step - 1}.ckpt", weights_only=False)["loops"]
    torch.save(state, tmp_path / "wrong.ckpt")
    found, _ = worker.lightning(None, checkpoint=tmp_path / "wrong.ckpt")
    assert relative(flat_parameters(found), flat_parameters(wanted)) > 1e-3


def test_the_end_of_an_epoch_is_as_in_stock(unbroken: Any) -> None:
    """Whatever Lightning makes of a checkpoint from there: the same with the callback and without it."""
    _, folder = unbroken("lightning")
    ends = [worker.lightning(None, checkpoint=folder / "step=3.ckpt", enabled=enabled)[0] for enabled in (True, False)]
    assert relative(*map(flat_parameters, ends)) <= 1e-12
    assert len(ends[0].gradients) == len(ends[1].gradients)
    assert ends[0].trainer.global_step == ends[1].trainer.global_step


def checkpoints(folder: Path) -> list[Path]:
    """Of the Trainer, the whole ones, in their order; its state is written last."""
    found = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json")]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


@pytest.mark.parametrize("name", TRAINER)
def test_the_trainer_ends_where_an_unbroken_run_does(name: str, killed: Path, unbroken: Any, tmp_path: Path) -> None:
    """To the bit, dropout included."""
    wanted, folder = unbroken(TRAINER[name])
    last = checkpoints(killed / name)[-1]
    step = int(last.name.split("-")[1])
    assert 0 < step < len(wanted.gradients) == 8
    found = worker.transformers(TRAINER[name], tmp_path, checkpoint=last)
    assert len(found.gradients) == 8 - step
    assert all(torch.equal(a, b) for a, b in zip(found.gradients, wanted.gradients[step:], strict=True))
    assert torch.equal(found.parameters, wanted.parameters)
    stats = found.trainer.padding_stats
    assert stats.micro_batches > stats.batches == sum(3 if k % 4 < 3 else 1 for k in range(step, 8))
    names = [{str(file.relative_to(path)) for file in path.rglob("*")} for path in (killed / name, folder)]
    assert names[0] <= names[1]


def test_a_chunk_of_a_killed_window_leaves_no_files_that_stock_has_not(unbroken: Any) -> None:
    """Control of the names above: they are those of the Trainer without the mixin."""
    names = [
        {str(file.relative_to(folder)) for file in folder.rglob("*")}
        for folder in (unbroken("sums")[1], unbroken("sums", Trainer)[1])
    ]
    assert names[0] - {"padmin", "padmin/proof.jsonl"} == names[1]
    assert len(names[0]) > 10


def test_the_trainer_from_a_wrong_step_ends_elsewhere(killed: Path, unbroken: Any, tmp_path: Path) -> None:
    """Negative controls: the counters of another step, and another random state."""
    wanted, folder = unbroken("sums")
    for what, other in (("trainer_state.json", 2), ("rng_state.pth", 6)):
        wrong = tmp_path / what / "checkpoint-4"
        shutil.copytree(folder / "checkpoint-4", wrong)
        shutil.copy(folder / f"checkpoint-{other}" / what, wrong / what)
        found = worker.transformers("sums", tmp_path / what / "out", checkpoint=wrong)
        assert support.relative(found.parameters, wanted.parameters) > 1e-3
    assert json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
