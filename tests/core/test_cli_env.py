"""`padmin env`, and how `padmin launch` is reached."""

from __future__ import annotations

import pytest
import torch

from lightning_padmin.cli import commands as cli
from lightning_padmin.config import environment


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "launcher_file", lambda: None)


def test_env_prints_versions_devices_configuration_and_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PADMIN_MAX_ROWS", "3")
    assert cli.main(["env"]) == 0
    printed = capsys.readouterr().out
    assert f"torch: {torch.__version__.split('+')[0]}" in printed
    assert "devices: " in printed
    assert "padmin: on, token_budget=16384 (environment variable PADMIN_MAX_ROWS)" in printed
    assert "  max_rows: 3\n" in printed


def test_env_says_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    assert "padmin: off (no explicit argument, no PADMIN_* variable)" in capsys.readouterr().out


def test_env_says_what_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PADMIN_ENABLED", "maybe")
    assert cli.main(["env"]) == 1
    assert "padmin: cannot be resolved: PADMIN_ENABLED='maybe'" in capsys.readouterr().out


def test_launch_passes_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[list[str]] = []
    monkeypatch.setattr(cli, "launch", passed.append)
    assert cli.main(["launch", "--config_file", "a.yaml", "x.py", "--help", "--json"]) == 0
    assert passed == [["--config_file", "a.yaml", "x.py", "--help", "--json"]]


def test_launch_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["launch", "--help"])
    assert caught.value.code == 0
    assert "accelerate launch" in capsys.readouterr().out
