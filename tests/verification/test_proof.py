"""The file with a line per audit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_padmin import PadMinConfig
from lightning_padmin.verification import Proof
from lightning_padmin.verification.proof import plain


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def row_weights(batch: Any) -> Any:
    return batch


def test_the_first_line_of_a_run_is_its_configuration(tmp_path: Path) -> None:
    config = PadMinConfig(loss_reduction=row_weights, static_keys=("a",))
    for _ in range(2):
        proof = Proof(tmp_path, {"options": config}, pytest.fail)
        assert not (tmp_path / "padmin").exists() or proof.path.exists()
        proof.add("audit", step=1, difference=1e-7, facets=("a", "b"))
        proof.add("audit", step=3, difference=float("nan"))
    found = lines_of(tmp_path / "padmin" / "proof.jsonl")
    assert [line["kind"] for line in found] == ["configuration", "audit", "audit"] * 2
    assert found[0]["options"]["loss_reduction"].endswith("test_proof.row_weights")
    assert (found[0]["options"]["static_keys"], found[0]["options"]["check"]) == (["a"], "audit")
    assert found[1]["facets"] == ["a", "b"]
    assert found[2]["difference"] == "nan"  # JSON has no such number
    assert {"lightning_padmin", "torch"} <= found[1]["versions"].keys()
    assert found[1]["time"].endswith("+00:00")


def test_what_was_cut_off_stays_a_line_of_its_own(tmp_path: Path) -> None:
    Proof(tmp_path, {}, pytest.fail).add("audit", step=1)
    path = tmp_path / "padmin" / "proof.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    Proof(tmp_path, {}, pytest.fail).add("audit", step=2)
    *_, cut, configuration, audit = path.read_text().splitlines()
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut)
    assert (json.loads(configuration)["kind"], json.loads(audit)["step"]) == ("configuration", 2)


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import os, sys; from lightning_padmin.verification.proof import Proof\n"
        f"proof = Proof({str(tmp_path)!r}, {{}}, print)\n"
        "proof.add('audit', step=1); proof.add('audit', step=2); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == -9
    assert [line["kind"] for line in lines_of(tmp_path / "padmin" / "proof.jsonl")] == [
        "configuration",
        "audit",
        "audit",
    ]


def _file(folder: Path) -> None:
    (folder / "padmin").write_text("a file in the way")


def _pipe(folder: Path) -> None:
    (folder / "padmin").mkdir()
    os.mkfifo(folder / "padmin" / "proof.jsonl")


def _device(folder: Path) -> None:
    (folder / "padmin").mkdir()
    (folder / "padmin" / "proof.jsonl").symlink_to("/dev/full")


@pytest.mark.parametrize("spoil", [_file, _pipe, _device])
def test_what_cannot_be_written_is_said_once(tmp_path: Path, spoil: Any) -> None:
    said: list[str] = []
    spoil(tmp_path)
    proof = Proof(tmp_path, {}, said.append)
    proof.add("audit", step=1)
    proof.add("audit", step=2)
    (words,) = said
    assert "cannot be written (" in words
    assert Path(words.partition(" cannot")[0]) == proof.path


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    proof = Proof(tmp_path, {}, said.append)
    proof.add("audit", step=1)
    before, write = proof.path.read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    proof.add("audit", step=2)
    assert proof.path.read_bytes() == before
    assert len(said) == 1


def test_plain_values() -> None:
    @dataclass
    class Pair:
        left: Any
        right: Any

    found = plain({"a": Pair(1.5, {"b", "a"}), 2: [float("inf"), None, True, len], "c": object()})
    assert json.loads(json.dumps(found)) == found
    assert found["a"] == {"left": 1.5, "right": ["a", "b"]}
    assert found["2"] == ["inf", None, True, "builtins.len"]
    assert plain("x" * 10_000) == "x" * 2_000
