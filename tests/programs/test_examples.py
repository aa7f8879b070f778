"""Programs of others, unchanged: the examples of transformers and the reward stage of LLaMA-Factory, against stock.

`TRANSFORMERS_EXAMPLES` names the folder `examples/pytorch` of a checkout of transformers, `LLAMAFACTORY`
one of LLaMA-Factory, and `LLAMAFACTORY_PYTHON` an interpreter that has what that needs. Without them, skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import examples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
_TOLERANCE = 1e-5
_ROOT = Path(__file__).parents[2]
_PROGRAMS = os.environ.get("TRANSFORMERS_EXAMPLES", "")
_LLAMAFACTORY = os.environ.get("LLAMAFACTORY", "")
needs_programs = pytest.mark.skipif(
    not _PROGRAMS, reason="TRANSFORMERS_EXAMPLES does not name the folder examples/pytorch of transformers"
)
# Which way the default options take, and why it is not another.
SPLIT = [
    "text-classification/run_glue.py",
    "text-classification/run_classification.py",
    "token-classification/run_ner.py",
    "language-modeling/run_mlm.py",
    "question-answering/run_seq2seq_qa.py",
    "summarization/run_summarization.py",
    "translation/run_translation.py",
]
JOINT = [
    "multiple-choice/run_swag.py",  # rows have several choices
    "question-answering/run_qa_beam_search.py",  # labels are places in a row that is padded on its left
    "contrastive-image-text/run_clip.py",  # in-batch negatives
]
AS_IT_CAME = [
    "language-modeling/run_clm.py",  # blocks without padding
    "question-answering/run_qa.py",  # the softmax over places takes those that are padding in
    "image-classification/run_image_classification.py",  # no masks from here on
    "image-pretraining/run_mim.py",
    "image-pretraining/run_mae.py",
    "audio-classification/run_audio_classification.py",  # sounds whose rows nobody has declared
    "speech-recognition/run_speech_recognition_ctc.py",
    "speech-recognition/run_speech_recognition_seq2seq.py",
]


class Runs:
    """Of one program, whose model and data stay the same."""

    def __init__(self, name: str, folder: Path, *more: str, dropout: float = 0.0) -> None:
        self.is_reward = name == examples.REWARDS
        script = Path(_LLAMAFACTORY if self.is_reward else _PROGRAMS) / name
        assert script.exists(), f"{script} is not there"
        if name.startswith(("image-", "contrastive-")):
            pytest.importorskip("torchvision")
        self.folder, self.command = folder, [str(script), *examples.command(name, folder), *more]
        if dropout:
            for file in folder.rglob("config.json"):
                config = {k: dropout if "drop" in k else v for k, v in json.loads(file.read_text()).items()}
                file.write_text(json.dumps(config))

    def failing(self, way: str) -> subprocess.CompletedProcess[str]:
        shutil.rmtree(self.folder / "out", ignore_errors=True)  # of another way
        python = os.environ.get("LLAMAFACTORY_PYTHON", sys.executable) if self.is_reward else sys.executable
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        caches = {"HF_DATASETS_CACHE": str(self.folder / "cache"), "HF_HUB_CACHE": str(self.folder / "hub")}
        return subprocess.run(
            [python, str(Path(__file__).with_name("program.py")), str(self.folder / way), way, *self.command],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            | caches,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=280,
        )

    def __call__(self, way: str) -> dict[str, Any]:
        done = self.failing(way)
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = torch.load(self.folder / way, weights_only=False)
        return found


def weights(found: dict[str, Any]) -> torch.Tensor:
    return torch.cat([each.flatten().double() for each in found["weights"].values()])


def logged(found: dict[str, Any]) -> list[dict[str, float]]:
    own = ("padmin/", "runtime", "per_second", "flos")
    return [{k: v for k, v in log.items() if not any(each in k for each in own)} for log in found["logs"]]


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    return float((weights(one) - weights(other)).abs().max())


def check(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    """Final weights and all that was logged, evaluations included."""
    assert apart(stock, ours) <= _TOLERANCE
    found, wanted = logged(ours), logged(stock)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=_TOLERANCE, abs=_TOLERANCE)


def halved(found: dict[str, Any]) -> bool:
    slots, before, real = (found["stats"][name] for name in ("slots", "slots_before", "real_tokens"))
    return 1 - real / slots <= (1 - real / before) / 2


@needs_programs
@pytest.mark.parametrize("name", SPLIT + JOINT)
def test_weights_and_logs_are_the_stock_ones_without_the_padding(name: str, tmp_path: Path) -> None:
    run = Runs(name, tmp_path)
    ours = run("auto")
    check(run("stock"), ours)
    assert ours["way"] == ("split" if name in SPLIT else "joint")
    assert len(ours["warned"]) == (name in JOINT)
    assert halved(ours)


@needs_programs
@pytest.mark.parametrize("name", AS_IT_CAME)
def test_where_no_padding_can_be_cut_a_training_is_the_stock_one(name: str, tmp_path: Path) -> None:
    run = Runs(name, tmp_path)
    ours = run("auto")
    check(run("stock"), ours)
    assert ours["stats"]["slots"] == ours["stats"]["slots_before"]


@needs_programs
@pytest.mark.parametrize("name", ["text-classification/run_glue.py", "language-modeling/run_mlm.py", JOINT[0]])
def test_windows_of_batches(name: str, tmp_path: Path) -> None:
    run = Runs(name, tmp_path, "--gradient_accumulation_steps", "3")
    ours = run("auto")
    check(run("stock"), ours)
    assert halved(ours)


@needs_programs
@pytest.mark.parametrize("name", SPLIT + JOINT)
def test_dropout_and_adam_raise_no_alarm(name: str, tmp_path: Path) -> None:
    ours = Runs(name, tmp_path, "--optim", "adamw_torch", "--learning_rate", "0.001", dropout=0.1)("auto")
    assert ours["way"] == ("split" if name in SPLIT else "joint")
    assert len(ours["warned"]) == (name in JOINT)


@needs_programs
@pytest.mark.parametrize("name", ["text-classification/run_glue.py", "language-modeling/run_mlm.py", SPLIT[-1]])
def test_weights_of_parts_that_are_wrong_would_be_seen(name: str, tmp_path: Path) -> None:
    run = Runs(name, tmp_path)
    assert apart(run("stock"), run("wrong")) > 100 * _TOLERANCE


@needs_programs
@pytest.mark.parametrize(
    ("name", "words"),
    [("multiple-choice/run_swag.py", "has shape (8, 4, "), ("question-answering/run_qa.py", "the batch has no labels")],
)
def test_what_cannot_be_split_is_refused_by_name(name: str, words: str, tmp_path: Path) -> None:
    done = Runs(name, tmp_path).failing("split")
    assert done.returncode == 1
    assert words in done.stderr


@pytest.mark.skipif(not _LLAMAFACTORY, reason="LLAMAFACTORY does not name a checkout of LLaMA-Factory")
def test_rewards_of_pairs(tmp_path: Path) -> None:
    run = Runs(examples.REWARDS, tmp_path)
    ours = run("auto")
    check(run("stock"), ours)
    assert ours["way"] == "joint"
    assert halved(ours)
    assert "split_size" in run.failing("split").stderr  # its loss takes halves of a batch
