"""Ranks whose options differ never begin, and say which option it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_padmin.batch.fields import Field
from lightning_padmin.config.options import PadMinConfig, option_names
from lightning_padmin.distributed.announcement import Announcement, option_facts, refuse_differences
from lightning_padmin.errors import ConfigError

WORKER = Path(__file__).with_name("options_worker.py")
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    output = tmp_path_factory.mktemp("options") / "found.json"
    done = subprocess.run([sys.executable, str(WORKER), str(output)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    result: Found = json.loads(output.read_text())
    return result


def test_every_option_is_tried(found: Found) -> None:
    assert set(option_names()) <= set(found)


@pytest.mark.parametrize("name", option_names())
def test_an_option_that_differs_is_refused_by_name_at_once(found: Found, name: str) -> None:
    for rank in found[name]:
        assert rank["code"] == 1
        assert f"PadMinCallback: {name} differs between ranks" in rank["text"], rank["text"][-1500:]
        assert "GRADIENTS" not in rank["text"]


def test_a_rank_without_the_callback_is_named(found: Found) -> None:
    ours, other = found["missing"]
    assert "rank 1 has no PadMinCallback" in ours["text"]
    assert ours["code"] == 1
    assert other["code"] not in (0, "hung")


@pytest.mark.parametrize(("case", "who"), [("trainer", "PadMinTrainerMixin"), ("loop", "PadMin")])
def test_elsewhere_too(found: Found, case: str, who: str) -> None:
    for rank in found[f"{case}-differs"]:
        assert rank["code"] == 1
        assert f"{who}: enabled differs between ranks: False on rank 0; True on rank 1" in rank["text"]
        assert "GRADIENTS" not in rank["text"]


def test_a_rank_whose_trainer_has_no_mixin_is_named_and_nobody_waits_for_the_timeout(found: Found) -> None:
    other, ours = found["trainer-missing"]
    assert "waiting for rank 0, which has no PadMinTrainerMixin yet" in ours["text"]
    assert [ours["code"], other["code"]] == [1, 1]


def test_control_ranks_that_are_alike_train(found: Found) -> None:
    for case in ("same", "log_every_n_steps", "trainer-same", "loop-same"):
        assert [rank["code"] for rank in found[case]] == [0, 0], found[case][0]["text"][-2000:]
        assert all("GRADIENTS" in rank["text"] for rank in found[case])


class Store:
    """A dictionary in place of a process group's store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_equal_values_are_equal_as_text_and_others_are_not() -> None:
    def weights(batch: Any) -> Any:
        return batch["w"]

    def others(batch: Any) -> Any:
        return batch["v"]

    one = {"batch_schema": {"a": Field("row"), "b": "static"}, "loss_reduction": weights}
    same = {"batch_schema": {"b": "static", "a": Field("row")}, "loss_reduction": weights}
    assert option_facts(PadMinConfig(**one)) == option_facts(PadMinConfig(**same))  # type: ignore[arg-type]
    for changes in ({"loss_reduction": others}, {"batch_schema": {"a": Field("row", row_dim=1), "b": "static"}}):
        with pytest.raises(
            ConfigError, match=f"{next(iter(changes))} differs between ranks: .* on rank 0; .* on rank 1"
        ):
            refuse_differences(
                "X",
                [option_facts(PadMinConfig(**(one | each))) for each in ({}, changes)],  # type: ignore[arg-type]
            )


def test_who_says_nothing_is_named_and_told_of_before() -> None:
    store, told = Store(), list[str]()
    announced = Announcement("PadMin", {"enabled": "True"}, store, 1, 3)
    with pytest.raises(ConfigError, match="rank 0, 2 has no PadMin, while rank 1 has one"):
        announced.agree(patience=0.1, tell=told.append)
    with pytest.raises(ConfigError, match=r"no PadMin.*rank 0 has ended \(ValueError: no\)"):
        Announcement("PadMin", {}, store, 1, 3).agree(gone=lambda: "rank 0 has ended (ValueError: no)")


def test_one_process_asks_nobody() -> None:
    assert Announcement("PadMin", {"a": "1"}, None, 0, 1).agree() == [{"a": "1"}]
