"""`PadMinArguments`: the same options under a prefix, and what wins over what."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lightning_padmin import PadMinArguments, PadMinConfig
from lightning_padmin.config.environment import PREFIX, resolve_for_class
from lightning_padmin.errors import ConfigError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


def test_every_option_is_there() -> None:
    names = ["padmin_" + field.name for field in dataclasses.fields(PadMinConfig)]
    assert [field.name for field in dataclasses.fields(PadMinArguments)] == names
    assert all(field.metadata["help"] for field in dataclasses.fields(PadMinArguments))
    assert all(field.default is None for field in dataclasses.fields(PadMinArguments))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"token_budget": "8192"}, {"token_budget": 8192}),
        ({"token_budget": 8192}, {"token_budget": 8192}),  # from YAML
        ({"token_budget": "none"}, {"token_budget": None}),
        ({"max_rows": "None", "label_shift": "0"}, {"max_rows": None, "label_shift": 0}),
        ({"enabled": False}, {"enabled": False}),
        ({"check": "off"}, {"check": "off"}),
        ({"check": False}, {"check": "off"}),  # a bare off in YAML
        ({"mask_key": "1"}, {"mask_key": "1"}),
        ({"labels_key": "none", "loss_mask_key": "m"}, {"labels_key": None, "loss_mask_key": "m"}),
        ({"loss_reduction": "sequence-mean"}, {"loss_reduction": "row-mean"}),
        ({"static_keys": ["a", "b"]}, {"static_keys": ["a", "b"]}),
        ({"batch_schema": '{"segments": "position"}'}, {"batch_schema": {"segments": "position"}}),
        ({"batch_schema": {"segments": "position"}}, {"batch_schema": {"segments": "position"}}),
        ({"log_reduce": '{"rows": "sum"}'}, {"log_reduce": {"rows": "sum"}}),
        ({"call_masks": '{"encoder": "~pad"}'}, {"call_masks": {"encoder": "~pad"}}),
    ],
)
def test_values(given: dict[str, Any], expected: dict[str, Any]) -> None:
    arguments = PadMinArguments(**{f"padmin_{name}": value for name, value in given.items()})
    assert arguments.to_config() == PadMinConfig(**expected)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"token_budget": "many"}, "padmin_token_budget: token_budget='many': expected an integer"),
        ({"token_budget": 0}, "argument padmin_token_budget: token_budget=0: expected an integer of at least 1"),
        ({"enabled": "yes"}, "padmin_enabled='yes': expected true or false"),
        ({"mode": "fast"}, "padmin_mode: mode='fast': expected one of 'auto'"),
        ({"log_reduce": "rows=sum"}, "padmin_log_reduce='rows=sum': expected JSON"),
        ({"static_keys": "a,"}, None),
    ],
)
def test_bad_values(given: dict[str, Any], match: str | None) -> None:
    arguments = PadMinArguments(**{f"padmin_{name}": value for name, value in given.items()})
    if match is None:
        assert arguments.to_config().static_keys == ("a",)
        return
    with pytest.raises(ConfigError, match=match):
        arguments.to_config()


def test_arguments_win_over_variables_option_by_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADMIN_TOKEN_BUDGET", "512")
    monkeypatch.setenv("PADMIN_LAUNCH_COST", "3")
    assert PadMinArguments(padmin_token_budget="64").to_config() == PadMinConfig(token_budget=64, launch_cost=3)
    monkeypatch.setenv("PADMIN_ENABLED", "false")
    assert not PadMinArguments(padmin_token_budget="64").to_config().enabled
    assert PadMinArguments(padmin_enabled=True).to_config().enabled


def test_a_class_that_asks_for_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve_for_class(None) == PadMinConfig()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("PADMIN_TOKEN_BUDGET", "77")
    assert resolve_for_class(None) == PadMinConfig(token_budget=77)
    assert capsys.readouterr().out == "padmin: on, token_budget=77 (environment variable PADMIN_TOKEN_BUDGET)\n"
    assert resolve_for_class(PadMinConfig(token_budget=5)) == PadMinConfig(token_budget=5)
    monkeypatch.setenv("PADMIN_ENABLED", "false")
    assert not resolve_for_class(None).enabled
    monkeypatch.setenv("PADMIN_BUDGET", "77")
    with pytest.raises(ConfigError, match="PADMIN_BUDGET='77': there is no such variable"):
        resolve_for_class(None)
