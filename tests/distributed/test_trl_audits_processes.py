"""Looks at windows in the middle of a training, on two real gloo processes: all ranks look, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import torch

pytest.importorskip("trl")

import trl_cases as cases

WORKER = Path(__file__).with_name("trl_worker.py")


def record(values: dict[str, Any]) -> cases.Record:
    return cases.Record(gradients=values["gradients"], logs=values["logs"], parameters=values["parameters"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_what_is_new_on_one_rank_is_looked_at_on_all(tmp_path: Path, kind: str) -> None:
    scenarios = ("couples_later_on_one_rank", "reads_padding", "dapo")
    ranks = processes.results(WORKER, tmp_path / "audits.out", kind, *scenarios, timeout=280)
    for rank in ranks:
        compared, refused = rank["couples_later_on_one_rank"]
        assert compared["auto"]["mode"] == "replay"
        assert cases.gradient_difference(record(compared["auto"]), record(compared["stock"])) <= 1e-5
        assert refused.startswith("1 ConfigError: mode='split': gradients of the loss at the log-probs change by")
        for words in rank["reads_padding"]:
            assert words.startswith("0 GradientCheckError: check of the model: a row with padding behind it")
        assert rank["dapo"]["auto"]["mode"] == "split"  # exact ones are not refused
        assert cases.gradient_difference(record(rank["dapo"]["auto"]), record(rank["dapo"]["stock"])) <= 1e-5
    both = [rank["couples_later_on_one_rank"][0]["auto"]["parameters"] for rank in ranks]
    assert kind != "ddp" or torch.equal(*both)
