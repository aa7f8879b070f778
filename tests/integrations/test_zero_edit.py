"""Scripts that do not know the library: what is said where it could do nothing, and with a TRL that is too old."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_padmin import errors, run
from lightning_padmin.errors import ConfigError

ENDS = {
    "its end": "print('trained')",
    "sys.exit": "import sys; sys.exit()",
    "sys.exit(0)": "import sys; sys.exit(0)",
    "a child": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'], check=True)",
}
QUIET = {
    "a code": ("import sys; sys.exit(3)", SystemExit),
    "words": ("import sys; sys.exit('no data')", SystemExit),
    "an error": ("raise KeyError('x')", KeyError),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of its own, which has imported no adapter yet."""
    monkeypatch.setattr(run, "patch_trainers", lambda config: None)
    monkeypatch.setattr(run, "_is_used", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PADMIN_ENABLED", "true")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    errors.speak(None)


def script(folder: Path, text: str) -> str:
    file = folder / "train.py"
    file.write_text(text)
    return str(file)


def run_it(*arguments: str) -> None:
    try:
        run.main(arguments)
    except SystemExit as left:
        if left.code not in (None, 0):
            raise


@pytest.mark.parametrize("how", ENDS)
def test_a_script_without_a_trainer_is_told_once_at_its_end(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = script(tmp_path, ENDS[how])
    run_it(file)
    captured = capsys.readouterr()
    assert captured.err.count("padmin: switched on (environment variable PADMIN_ENABLED)") == 1
    assert f"{file} has made no Trainer of transformers or TRL" in captured.err
    assert "made no Trainer" not in captured.out


@pytest.mark.parametrize("how", QUIET)
def test_an_error_is_news_enough(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, kind = QUIET[how]
    with pytest.raises(kind):
        run_it(script(tmp_path, text))
    assert "made no Trainer" not in capsys.readouterr().err


@pytest.mark.parametrize("case", ["off", "another rank", "help", "a Trainer was made"])
def test_where_nothing_is_to_be_said(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "off":
        monkeypatch.setenv("PADMIN_ENABLED", "false")
    elif case == "another rank":
        monkeypatch.setenv("RANK", "1")
    elif case == "a Trainer was made":
        monkeypatch.setattr(run, "_is_used", lambda: True)
    run_it(script(tmp_path, "print('trained')"), *(["--help"] if case == "help" else []))
    captured = capsys.readouterr()
    assert "made no Trainer" not in captured.err
    assert "trained" in captured.out


def test_errors_in_a_script_speak_of_variables(tmp_path: Path) -> None:
    text = (
        "from lightning_padmin.errors import ConfigError\nraise ConfigError('Use mode=\\'joint\\', or enabled=False')"
    )
    with pytest.raises(ConfigError) as error:
        run_it(script(tmp_path, text))
    assert str(error.value) == "Use PADMIN_MODE=joint, or PADMIN_ENABLED=false"


OLD = {
    "0.11.4": {"trainer/ppo_trainer.py": "class PPOTrainer: pass"},
    "0.24.0": {
        "trainer/grpo_trainer.py": "class GRPOTrainer:\n    def __init__(self, *_, **__): pass",
        "trainer/rloo_trainer.py": "class RLOOTrainer: pass",
        "trainer/sft_trainer.py": "class SFTTrainer:\n    def __init__(self, *_, **__): pass",
    },
}
TRY = """
from lightning_padmin import PadMinConfig
try:
    from lightning_padmin.integrations.trl import PadMinMixin
except ImportError as error:
    print(error)
else:
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.sft_trainer import SFTTrainer
    for base in (GRPOTrainer, SFTTrainer):
        kind = type("Mine", (PadMinMixin, base), {})
        kind(padmin=PadMinConfig(enabled=False))
        try:
            kind()
        except ValueError as error:
            print(error)
"""


@pytest.mark.parametrize("version", ["0.11.4", pytest.param("0.24.0", marks=pytest.mark.slow)])
def test_an_old_trl_is_named_with_what_is_needed(version: str, tmp_path: Path) -> None:
    for name, text in {"__init__.py": f"__version__ = {version!r}", "trainer/__init__.py": "", **OLD[version]}.items():
        file = tmp_path / "trl" / name
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(text)
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), root]), "PADMIN_ENABLED": "true"}
    command = [sys.executable, "-c", TRY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("trl ")]
    assert len(told) == {"0.11.4": 1, "0.24.0": 2}[version], done.stdout
    for line in told:
        assert line.startswith(f"trl {version} is installed, and PadMinMixin needs trl>=0.29")
        assert "pip install -U 'trl>=0.29'" in line
