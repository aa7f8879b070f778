"""Ranks whose options differ never begin, with the trainers of TRL and with Fabric."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_padmin.config import option_names

WORKER = Path(__file__).with_name("options_trl_worker.py")
NAMES = {"grpo": "PadMinMixin", "sft": "PadMinMixin", "dpo": "PadMinMixin", "fabric": "FabricPadMin"}
# The last one the trainer refuses by itself, on the rank that has it.
QUICK = ("fabric:same:0", "fabric:enabled:0", "fabric:normalize:1", "grpo:enabled:0", "grpo:shape_buckets:1")
Ranks = list[dict[str, Any]]


def found(tmp_path: Path, *cases: str) -> dict[str, Ranks]:
    output = tmp_path / "found.json"
    command = [sys.executable, str(WORKER), str(output), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90 * len(cases))
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Ranks] = json.loads(output.read_text())
    assert set(result) == set(cases)
    return result


def judge(case: str, ranks: Ranks) -> None:
    adapter, what, which = case.split(":")
    who, texts = NAMES[adapter], [rank["text"] for rank in ranks]
    if what == "same":
        assert [rank["code"] for rank in ranks] == [0, 0], texts[0][-2000:]
        assert all("GRADIENTS" in text for text in texts)
        return
    assert [rank["code"] for rank in ranks] == [1, 1], (case, texts)
    assert not any("GRADIENTS" in text for text in texts)
    other = int(which)
    if what == "missing":
        assert f"rank {which} has no {who}, while rank {1 - other} has one" in texts[1 - other]
        return
    assert f"{who}: {what} differs between ranks" in texts[1 - other], (case, texts[1 - other][-1500:])
    assert f"{who}: {what} differs between ranks" in texts[other] or f"ConfigError: {what}=" in texts[other]


@pytest.mark.slow
def test_a_few_options_are_refused_by_name(tmp_path: Path) -> None:
    for case, ranks in found(tmp_path, *QUICK).items():
        judge(case, ranks)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("adapter", NAMES)
def test_every_option_is_refused_by_name(tmp_path: Path, adapter: str) -> None:
    cases = [f"{adapter}:{name}:1" for name in option_names()]
    cases += [f"{adapter}:{case}" for case in ("same:0", "enabled:0", "missing:0", "missing:1")]
    for case, ranks in found(tmp_path, *cases).items():
        judge(case, ranks)
