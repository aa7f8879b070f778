"""The callback's options: those of `PadMinConfig`, one by one, and from a configuration file."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from support import Module, loader, ragged_batches

import lightning_padmin
from lightning_padmin import Field, PadMinCallback, PadMinConfig
from lightning_padmin.config.options import option_names
from lightning_padmin.errors import ConfigError, PadMinWarning

PARAMETERS = inspect.signature(PadMinCallback).parameters


def test_the_callback_has_every_option_and_no_other() -> None:
    assert set(PARAMETERS) == {*option_names(), "config"}


@pytest.mark.parametrize("name", option_names())
def test_defaults_are_those_of_the_config(name: str) -> None:
    assert getattr(PadMinCallback().config, name) == getattr(PadMinConfig(), name)
    # Mutable defaults are None in the signature.
    assert PARAMETERS[name].default == (getattr(PadMinConfig(), name) or PARAMETERS[name].default)


VALUES: dict[str, Any] = {
    "enabled": False,
    "token_budget": None,
    "loss_reduction": "sum",
    "normalize": "global",
    "label_shift": 0,
    "ignore_index": -1,
    "pad_token_id": 7,
    "mask_key": "mask",
    "labels_key": "targets",
    "decoder_mask_key": "other_mask",
    "loss_mask_key": "weights",
    "batch_schema": {"images": Field("unit", counts="image_counts")},
    "static_keys": ("table",),
    "pad_to_multiple_of": 8,
    "max_rows": 3,
    "layout": "auto",
    "shape_buckets": 16,
    "attention_width": 4096,
    "launch_cost": 0,
    "cost_multiple_of": 64,
    "method": "greedy",
    "mode": "split",
    "check": "off",
    "audit_every": 100,
    "log_prefix": "",
    "log_reduce": {"rows": "sum"},
    "call_masks": {"encoder": "~pad"},
}


@pytest.mark.parametrize("name", option_names())
def test_every_option_reaches_the_config(name: str) -> None:
    value = VALUES[name]
    assert value != getattr(PadMinConfig(), name)
    assert PadMinCallback(**{name: value}).config == PadMinConfig(**{name: value})
    assert PadMinCallback(config=PadMinConfig(**{name: value})).config == PadMinConfig(**{name: value})


def test_only_the_budget_may_be_positional() -> None:
    assert PadMinCallback(99).config.token_budget == 99
    with pytest.raises(TypeError):
        PadMinCallback(99, "sum")  # type: ignore[misc]


def test_the_public_name_is_the_class() -> None:
    from lightning_padmin.integrations.lightning.callback import PadMinCallback as direct

    assert lightning_padmin.PadMinCallback is direct


# Configuration files

YAML = """
trainer:
  logger: false
  accelerator: cpu
  max_epochs: 1
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_padmin.PadMinCallback
      init_args:
        token_budget: 24
        launch_cost: 4
        loss_reduction: sequence-mean
        normalize: global
        static_keys: [table]
        log_reduce: {rows: sum}
        batch_schema: {images: row, position_ids: {kind: position, position_dims: [2], row_dim: 1}}
"""


class CliModule(Module):
    def __init__(self, how: str = "row-mean") -> None:
        super().__init__(how)


def cli(tmp_path: Path, text: str) -> LightningCLI:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    arguments = ["--config", str(path)]
    return LightningCLI(CliModule, run=False, args=arguments, save_config_callback=None, seed_everything_default=False)


def callback_of(made: LightningCLI) -> PadMinCallback:
    (callback,) = (each for each in made.trainer.callbacks if isinstance(each, PadMinCallback))
    return callback


def test_lightning_cli(tmp_path: Path) -> None:
    made = cli(tmp_path, YAML)
    assert callback_of(made).config == PadMinConfig(
        token_budget=24,
        launch_cost=4,
        loss_reduction="row-mean",
        normalize="global",
        static_keys=("table",),
        log_reduce={"rows": "sum"},
        batch_schema={"images": Field("row"), "position_ids": Field("position", row_dim=1, position_dims=(2,))},
    )
    with pytest.warns(PadMinWarning, match=r"log_reduce names 'rows'.*has logged loss"):
        made.trainer.fit(made.model, loader(ragged_batches(1)))
    assert len(made.model.shapes) == 5


def test_a_configuration_that_was_saved_is_the_same_again(tmp_path: Path) -> None:
    """As LightningCLI writes it beside the logs."""
    made = cli(tmp_path, YAML)
    saved = made.parser.dump(made.config)
    again = cli(tmp_path, saved)
    assert callback_of(again).config == callback_of(made).config


def test_the_command_line() -> None:
    options = {"logger": False, "accelerator": "cpu", "enable_checkpointing": False}
    arguments = ["--trainer.callbacks+=lightning_padmin.PadMinCallback", "--trainer.callbacks.token_budget=8192"]
    made = LightningCLI(CliModule, run=False, args=arguments, save_config_callback=None, trainer_defaults=options)
    assert callback_of(made).config == PadMinConfig(token_budget=8192)


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [
        ("token_budget: 24", "token_budget: many", "token_budget"),
        ("token_budget: 24", "token_budget: 2.5", "token_budget"),
        ("token_budget: 24", "tokn_budget: 24", "tokn_budget"),
        ("normalize: global", "normalize: everywhere", "normalize"),
        ("log_reduce: {rows: sum}", "log_reduce: {rows: median}", "log_reduce"),
        ("static_keys: [table]", "static_keys: 3", "static_keys"),
    ],
)
def test_lightning_cli_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], good: str, bad: str, told: str
) -> None:
    with pytest.raises(SystemExit):
        cli(tmp_path, YAML.replace(good, bad))
    reasons = capsys.readouterr().err.partition("Given value: [")[0]  # behind it the whole config is quoted
    assert told in reasons


PARSED: list[tuple[dict[str, Any], PadMinConfig]] = [
    ({}, PadMinConfig()),
    ({"token_budget": None, "max_rows": 4}, PadMinConfig(token_budget=None, max_rows=4)),
    ({"config": {"token_budget": 8, "method": "greedy"}}, PadMinConfig(token_budget=8, method="greedy")),
    ({"enabled": False}, PadMinConfig(enabled=False)),
]


@pytest.mark.parametrize(("arguments", "config"), PARSED)
def test_jsonargparse(arguments: dict[str, Any], config: PadMinConfig) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.Callback, "callback")
    entry = {"class_path": "lightning_padmin.PadMinCallback", "init_args": arguments}
    made = parser.instantiate_classes(parser.parse_object({"callback": entry})).callback
    assert made.config == config


def row_weights(batch: Any) -> torch.Tensor:
    return batch["u"]


def test_a_function_from_a_configuration_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_padmin, "row_weights", row_weights, raising=False)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.Callback, "callback")
    options = {"loss_reduction": "lightning_padmin.row_weights"}
    entry = {"class_path": "lightning_padmin.PadMinCallback", "init_args": options}
    made = parser.instantiate_classes(parser.parse_object({"callback": entry})).callback
    assert made.config.loss_reduction is row_weights


def test_a_config_in_the_wrong_place_is_named() -> None:
    with pytest.raises(ConfigError, match="pass it as config="):
        PadMinCallback(PadMinConfig())  # type: ignore[arg-type]
