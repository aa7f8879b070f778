"""`python main.py fit --config config.yaml`: a program of LightningCLI, to which a file adds the callback."""

from __future__ import annotations

import csv
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
import pytest
import support
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from support import Module

from lightning_padmin import Field, PadMinCallback, PadMinConfig

# `scores` is as wide as the batch, but not by position: without the schema it is refused. `rows` would be a mean.
MAIN = """
import sys

import torch
from lightning.pytorch.cli import LightningCLI
from support import Module, loader, ragged_batches


class TinyModule(Module):
    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=learning_rate)

    def training_step(self, batch, batch_idx):
        assert batch["scores"].shape == (len(batch["labels"]), 24), "not cut as rows"
        self.log("rows", float(len(batch["labels"])))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        batches = ragged_batches(3)
        for batch in batches:
            batch["scores"] = torch.zeros_like(batch["labels"], dtype=torch.float64)
        return loader(batches)

    def on_train_end(self):
        torch.save({"parameters": self.state_dict(), "shapes": self.shapes}, "result.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    LightningCLI(TinyModule, seed_everything_default=0)
"""
TRAINER = """
trainer:
  accelerator: cpu
  max_epochs: 2
  log_every_n_steps: 1
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: logs, name: null, version: run}
"""
CALLBACK = """\
  callbacks:
    - class_path: lightning_padmin.PadMinCallback
      init_args:
        token_budget: 24
        launch_cost: 4
        loss_reduction: token-mean
        mode: split
        check: first-batch
        label_shift: 1
        max_rows: 4
        batch_schema: {scores: row, position_ids: {kind: position, row_dim: 1, position_dims: [2]}}
        log_reduce: {rows: sum}
"""
MODEL = """\
model:
  learning_rate: 0.25
"""


@dataclass
class Program:
    """main.py in a folder of its own, where it leaves its results."""

    folder: Path

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        tests = str(Path(support.__file__).parent)
        path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path}
        done = processes.run("main.py", "fit", *arguments, env=environment, cwd=self.folder, timeout=120)
        assert done.returncode == code, done.stderr[-4000:]
        return done

    def printed(self, *arguments: str) -> str:
        return self.run(*arguments, "--print_config").stdout

    @property
    def result(self) -> dict[str, Any]:
        return torch.load(self.folder / "result.pt")

    @property
    def rows(self) -> list[dict[str, float]]:
        """Of metrics.csv, in their order."""
        with (self.folder / "logs" / "run" / "metrics.csv").open() as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def program(folder: Path, config: str) -> Program:
    folder.mkdir()
    (folder / "main.py").write_text(MAIN)
    (folder / "config.yaml").write_text(config)
    return Program(folder)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Trained with the callback, from a configuration that was printed by --print_config."""
    made = program(tmp_path_factory.mktemp("cli") / "split", TRAINER + CALLBACK + MODEL)
    (made.folder / "printed.yaml").write_text(made.printed("--config", "config.yaml"))
    (made.folder / "config.yaml").unlink()  # LightningCLI saves its own under this name
    made.run("--config", "printed.yaml")
    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Program:
    made = program(tmp_path_factory.mktemp("cli") / "plain", TRAINER + MODEL)
    (made.folder / "config.yaml").rename(made.folder / "given.yaml")
    made.run("--config", "given.yaml")
    return made


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The worst `relative` difference of a parameter."""
    pairs = [(a["parameters"][name], b["parameters"][name]) for name in b["parameters"]]
    return max(support.relative(ours, theirs) for ours, theirs in pairs)


def test_a_file_that_adds_the_callback_trains_the_same(split: Program, plain: Program) -> None:
    assert len(plain.result["shapes"]) == 6
    assert len(split.result["shapes"]) == 30
    assert max(rows for rows, _ in split.result["shapes"]) == 4
    assert distance(split.result, plain.result) <= 1e-12


def test_the_parameters_are_those_of_a_training(plain: Program) -> None:
    """Negative control: without training the distance is large."""
    untrained = {"parameters": Module().state_dict()}
    assert distance(untrained, plain.result) > 1e-2


def test_what_it_logs_is_what_the_file_asks_for(split: Program, plain: Program) -> None:
    counts = [row for row in split.rows if "padmin/slots" in row]
    assert [row["step"] for row in counts] == [0, 1, 2, 3, 4, 5]
    assert {row["padmin/slots"] for row in counts} == {98}
    ours, theirs = ([row for row in each.rows if "rows" in row] for each in (split, plain))
    assert {row["rows"] for row in theirs} == {10.0}
    assert ours == [pytest.approx(row, rel=1e-12) for row in theirs]


@pytest.mark.slow
def test_a_printed_configuration_prints_itself(split: Program) -> None:
    printed = (split.folder / "printed.yaml").read_text()
    assert split.printed("--config", "printed.yaml") == printed
    (callback,) = yaml.safe_load(printed)["trainer"]["callbacks"]
    given = yaml.safe_load(TRAINER + CALLBACK)["trainer"]["callbacks"][0]["init_args"]
    assert callback["class_path"] == "lightning_padmin.PadMinCallback"
    # All options are in it, with those of the file as they were given.
    assert {*given, "normalize", "pad_token_id", "enabled", "config"} < {*callback["init_args"]}
    for name in ("batch_schema", "token_budget", "log_reduce", "mode", "max_rows"):
        wanted, found = given[name], callback["init_args"][name]
        if name == "batch_schema":
            assert found["scores"] == "row"
            wanted, found = wanted["position_ids"], {key: found["position_ids"][key] for key in wanted["position_ids"]}
        assert found == wanted


def test_the_configuration_saved_beside_the_logs_is_the_same(split: Program) -> None:
    saved = yaml.safe_load((split.folder / "logs" / "run" / "config.yaml").read_text())
    printed = yaml.safe_load((split.folder / "printed.yaml").read_text())
    assert saved["trainer"] == printed["trainer"]
    assert saved["model"] == printed["model"]


def test_a_wrong_file_ends_the_program_before_it_trains(tmp_path: Path) -> None:
    wrong = program(tmp_path / "wrong", TRAINER + CALLBACK.replace("token_budget", "token_buget") + MODEL)
    done = wrong.run("--config", "config.yaml", code=2)
    assert "Option 'token_buget' is not accepted" in done.stderr
    assert not (wrong.folder / "result.pt").exists()


@pytest.mark.slow
def test_without_the_schema_the_batch_is_refused(tmp_path: Path) -> None:
    """Control: what the file says reaches the batches."""
    wrong = program(tmp_path / "wrong", TRAINER + CALLBACK.replace("scores: row, ", "") + MODEL)
    done = wrong.run("--config", "config.yaml", code=1)
    assert "'scores'" in done.stderr.splitlines()[-1]


# Errors


class CliModule(Module):
    def __init__(self, learning_rate: float) -> None:
        super().__init__()


def made(folder: Path, init_args: str) -> LightningCLI:
    text = TRAINER + f"  callbacks:\n    - class_path: lightning_padmin.PadMinCallback\n      init_args: {init_args}\n"
    (folder / "config.yaml").write_text(text + MODEL)
    arguments = ["--config", str(folder / "config.yaml")]
    return LightningCLI(CliModule, run=False, args=arguments, save_config_callback=None, seed_everything_default=False)


def refusal(folder: Path, init_args: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The reasons, without the whole configuration that is quoted after them and holds every key."""
    with pytest.raises((SystemExit, ValueError)) as caught:
        made(folder, init_args)
    is_exit = isinstance(caught.value, SystemExit)
    text = capsys.readouterr().err.partition("error:")[2] if is_exit else str(caught.value)
    return text.partition("Given value: [")[0]


WRONG_TYPES = [
    ("{mode: splitt}", "mode"),
    ("{mode: 3}", "mode"),
    ("{check: 1.5}", "check"),
    ("{loss_reduction: token-men}", "loss_reduction"),
    ("{loss_reduction: 3}", "loss_reduction"),
    ("{loss_reduction: math.pi}", "loss_reduction"),
    ("{method: best}", "method"),
    ("{label_shift: one}", "label_shift"),
    ("{pad_to_multiple_of: 1.5}", "pad_to_multiple_of"),
    ("{max_rows: [1]}", "max_rows"),
    ("{token_budget: true}", "token_budget"),
    ("{log_prefix: 3}", "log_prefix"),
    ("{mask_key: null}", "mask_key"),
    ("{enabled: maybe}", "enabled"),
    ("{log_reduce: sum}", "log_reduce"),
    ("{log_reduce: {rows: 3}}", "log_reduce"),
    ("{batch_schema: row}", "batch_schema"),
    ("{batch_schema: {images: 3}}", "batch_schema"),
    ("{static_keys: table}", "static_keys"),
]
WRONG_VALUES = [
    ("{batch_schema: {images: rows}}", "batch_schema['images']"),
    ("{batch_schema: {images: {kind: rwo}}}", "batch_schema['images']"),
    ("{batch_schema: {images: {kind: row, row_dim: one}}}", "row_dim"),
    ("{batch_schema: {images: {kind: row, dim: 3}}}", "no argument 'dim'"),
    ("{batch_schema: {images: row}, static_keys: [images]}", "static_keys"),
    ("{token_budget: 0}", "token_budget=0"),
    ("{launch_cost: -1}", "launch_cost=-1"),
    ("{launch_cost: null}", "launch_cost=None"),
    ("{max_rows: 0}", "max_rows=0"),
    ("{token_budget: 24, config: {token_budget: 8}}", "token_budget=24"),
]
UNKNOWN_NAMES = [
    ("{lanch_cost: 4}", "lanch_cost"),
    ("{config: {tokn_budget: 4}}", "tokn_budget"),
    ("{token_budget: 24, unsorted: true}", "unsorted"),
]


@pytest.mark.parametrize(("init_args", "told"), [*WRONG_TYPES, *WRONG_VALUES, *UNKNOWN_NAMES])
def test_an_error_names_the_key(init_args: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in refusal(tmp_path, init_args, capsys)


def test_an_error_names_no_other_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control of the test above: the keys that are right are not among the reasons."""
    text = refusal(tmp_path, "{token_budget: 24, max_rows: 4, mode: splitt, log_reduce: {rows: sum}}", capsys)
    assert "mode" in text
    assert not any(name in text for name in ("token_budget", "max_rows", "log_reduce", "rows"))


RIGHT = [
    ("{token_budget: null, max_rows: 8}", PadMinConfig(token_budget=None, max_rows=8)),
    ("{loss_reduction: sequence-mean, label_shift: 0}", PadMinConfig(loss_reduction="row-mean", label_shift=0)),
    ('{mode: joint, check: "off"}', PadMinConfig(mode="joint", check="off")),
    ('{log_prefix: ""}', PadMinConfig(log_prefix="")),
    (
        "{batch_schema: {pixel_values: {kind: unit, counts: num_images}}, log_reduce: {acc: row-mean, n: last}}",
        PadMinConfig(
            batch_schema={"pixel_values": Field("unit", counts="num_images")},
            log_reduce={"acc": "row-mean", "n": "last"},
        ),
    ),
]


@pytest.mark.parametrize(("init_args", "config"), RIGHT)
def test_what_is_right_is_taken_as_it_is(init_args: str, config: PadMinConfig, tmp_path: Path) -> None:
    (callback,) = (each for each in made(tmp_path, init_args).trainer.callbacks if isinstance(each, PadMinCallback))
    assert callback.config == config
