"""A checkpoint that is written while one of two ranks is killed is whole, or is not taken for one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("save_worker.py")
SIGKILL = -9
Found = dict[str, dict[str, Any]]


def run(folder: Path, *scenarios: str) -> Found:
    command = [sys.executable, str(WORKER), str(folder), *scenarios]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 100 * len(scenarios))
    assert done.returncode == 0, done.stderr[-4000:]
    found: Found = json.loads((folder / "found.json").read_text())
    assert set(found) == set(scenarios)
    return found


def final(folder: Path, scenario: str) -> list[torch.Tensor]:
    return [torch.load(folder / scenario.replace(":", "-") / f"final{rank}.pt") for rank in range(2)]


def judge(folder: Path, found: Found) -> None:
    """Both ranks have ended, the other one with the rank that is gone; what is there leads to the same numbers."""
    for scenario, what in found.items():
        adapter, place, who = scenario.split(":")
        codes = [rank["code"] for rank in what["ranks"]]
        if place == "never":
            assert codes == [0, 0], (scenario, what["ranks"][0]["text"][-2000:])
            continue
        other = what["ranks"][1 - int(who)]
        assert codes[int(who)] == SIGKILL, (scenario, codes, what["ranks"][int(who)]["text"][-2000:])
        assert other["code"] == 1, (scenario, other["text"][-2000:])
        if adapter.endswith("stock"):
            continue
        assert f"rank {who} has ended" in other["text"], (scenario, other["text"][-2000:])
        # What stock leaves in the middle of a file is no checkpoint, and the one before is.
        assert len(what["whole"]) >= 1, scenario
        assert len(what["all"]) - len(what["whole"]) == (place in HALF[adapter][int(who)]), (scenario, what["all"])
        assert set(what["names"]) <= set(found[f"{adapter}:never:0"]["names"]), scenario
        assert [rank["code"] for rank in what["resumed"]] == [0, 0], (scenario, what["resumed"][0]["text"][-2000:])
        for ours, wanted in zip(final(folder, scenario), final(folder, f"{adapter}:never:0"), strict=True):
            assert float((ours - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max()), scenario


# Places of a rank at whose death something lies there that is no checkpoint.
HALF: dict[str, tuple[set[str], set[str]]] = {
    "lightning": ({"file"}, set()),
    "call": ({"file"}, set()),
    "fsdp2": ({"file", "written"}, {"file"}),
    "trainer": ({"file"}, {"file"}),
    "grpo": ({"file"}, {"file"}),
}


@pytest.mark.slow
def test_lightning_with_a_sampler(tmp_path: Path) -> None:
    judge(tmp_path, run(tmp_path, "lightning:never:0", "lightning:file:0", "lightning:state:1"))


@pytest.mark.slow
def test_control_another_checkpoint_ends_elsewhere(tmp_path: Path) -> None:
    """The comparison sees where a run went on from."""
    found = run(tmp_path, "lightning:never:0")
    first = torch.load(tmp_path / "lightning-never-0" / "step=2.ckpt", weights_only=False)
    second = torch.load(tmp_path / "lightning-never-0" / "step=4.ckpt", weights_only=False)
    assert first["callbacks"]["Callback"]["stats"] != second["callbacks"]["Callback"]["stats"]
    weights = [torch.cat([v.flatten() for v in each["state_dict"].values()]) for each in (first, second)]
    assert float((weights[0] - weights[1]).abs().max()) > 1e-3
    assert found["lightning:never:0"]["whole"][:2] == ["step=2.ckpt", "step=4.ckpt"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("adapter", ["lightning", "call", "fsdp2", "trainer", "grpo"])
def test_each_rank_at_each_place(tmp_path: Path, adapter: str) -> None:
    places = [("state", 0), ("state", 1), ("file", 0), ("written", 0)]
    if adapter in ("fsdp2", "trainer", "grpo"):  # the second rank writes files too
        places.append(("file", 1))
    scenarios = [f"{adapter}:never:0", *(f"{adapter}:{place}:{who}" for place, who in places)]
    found = run(tmp_path, *scenarios)
    judge(tmp_path, found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_lies_there_is_what_stock_leaves(tmp_path: Path) -> None:
    """The Trainer with the mixin writes the files of the one without, up to the same one, beside its file of proof."""
    places = ("state:0", "state:1", "file:0", "file:1", "written:0")
    found = run(tmp_path, *(f"{adapter}:{place}" for place in places for adapter in ("trainer", "trainer-stock")))
    for place in places:
        ours = [name for name in found[f"trainer:{place}"]["names"] if not name.startswith("padmin")]
        assert ours == found[f"trainer-stock:{place}"]["names"], place
