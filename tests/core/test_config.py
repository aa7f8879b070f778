"""`PadMinConfig`: what every option refuses, that it is frozen, and that tools can read it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_padmin import Field, PadMinConfig, PadMinError
from lightning_padmin.batch.fields import parse_field
from lightning_padmin.config.options import option_names, refuses_unknown_options
from lightning_padmin.errors import ConfigError

BAD: dict[str, list[Any]] = {
    "enabled": [1, "yes", None],
    "cost_multiple_of": [0, -1, 1.5, "64", True],
    "mode": ["single", None, 1, ["split"]],
    "layout": ["packed", None, True, ["pack"]],
    "check": [1, "on", None, "first batch"],
    "audit_every": [-1, 0.5, None, "100", True],
    "token_budget": [0, -5, 2.0, "8192", True, [8]],
    "loss_reduction": ["mean", None, 1, ["sum"], np.zeros(3), torch.zeros(3)],
    "normalize": ["world", None, np.array(["rank", "global"])],
    "label_shift": [-1, 0.5, False, "1"],
    "ignore_index": [None, -100.0, "-100", True],
    "pad_token_id": [-1, "0", 1.5, False],
    "mask_key": [None, 1, b"mask"],
    "labels_key": [2, ["labels"]],
    "decoder_mask_key": [None, 3],
    "loss_mask_key": [4, ["loss_mask"]],
    "batch_schema": [None, "position", [("x", "row")], {"x": "rows"}, {"x": None}, {"x": {"sort": "row"}}, {0: "row"}],
    "static_keys": [None, "shared", 5, [1], [None]],
    "pad_to_multiple_of": [0, None, 8.0, True],
    "shape_buckets": [0, -1, 2.0, "8", True, [(4, 64)]],
    "max_rows": [0, -1, 1.0],
    "attention_width": [0, -1, 512.0, "512", True],
    "launch_cost": [-1, None, 0.0, "many", True],
    "method": ["best", None, 1],
    "log_prefix": [None, 0],
    "log_reduce": [None, "sum", ["sum"], {"x": "average"}, {"x": None}, {1: "sum"}],
    "call_masks": [None, "mask", {"x": ""}, {"x": "not a name"}, {"x": "sizes:n"}, {"x": None}, {0: "mask"}],
}
_BARE = {False: "off", True: "audit"}  # what YAML makes of a bare off and on
GOOD: dict[str, list[Any]] = {
    "enabled": [False],
    "cost_multiple_of": [1, 256, None],
    "mode": ["split", "joint", "replay", "auto"],
    "layout": ["pad", "pack", "auto"],
    "check": ["off", "first-batch", "audit", False, True],
    "audit_every": [0, 100],
    "token_budget": [1, None, np.int64(512), 2**40],
    "loss_reduction": ["row-mean", "sum", len],
    "normalize": ["global"],
    "label_shift": [0, 1, 2, None],
    "ignore_index": [0, -1],
    "pad_token_id": [0, 50256, np.int32(7)],
    "mask_key": ["mask"],
    "labels_key": ["targets", None],
    "decoder_mask_key": ["decoder_mask"],
    "loss_mask_key": ["loss_mask", None],
    "batch_schema": [{}, {"x": Field("position")}],
    "static_keys": [(), ("a",), ("a", "b")],
    "pad_to_multiple_of": [64],
    "shape_buckets": [1, 16, None],
    "max_rows": [1, None],
    "attention_width": [1, 4096, None],
    "launch_cost": [0, "measured"],
    "method": ["greedy"],
    "log_prefix": ["", "train/padmin/"],
    "log_reduce": [{}, {"rows": "sum", "a": "mean", "b": "max", "c": "min", "d": "last"}],
    "call_masks": [{}, {"encoder": "mask", "towers.*": "~pad", "rnn": "lengths:n_frames", "head": "off"}],
}


def test_every_option_is_tested() -> None:
    assert set(BAD) == set(GOOD) == set(option_names())


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_an_error_that_names_option_and_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        PadMinConfig(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    shown = value if not isinstance(value, dict) else next(iter(value.values()))
    assert repr(shown).strip("[]") in message
    assert "expected" in message or "is no string" in message or "has no argument" in message
    assert isinstance(caught.value, PadMinError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_a_good_value_is_kept(name: str, value: Any) -> None:
    config = PadMinConfig(**{name: value})
    assert getattr(config, name) == (_BARE[value] if name == "check" and isinstance(value, bool) else value)
    if name in ("token_budget", "pad_token_id") and value is not None:
        assert type(getattr(config, name)) is int


def test_an_unknown_option_is_named_with_its_value_and_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"no option 'token_buget' \(got 8192\); did you mean 'token_budget'\?"):
        PadMinConfig(token_buget=8192)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"no option 'zzz' \(got 1\); known options: enabled, token_budget, "):
        PadMinConfig(zzz=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean 'max_rows'"):
        dataclasses.replace(PadMinConfig(), max_row=3)
    with pytest.raises(TypeError):
        PadMinConfig(8192)  # type: ignore[misc]  # keyword-only


def test_aliases() -> None:
    config = PadMinConfig(loss_reduction="sequence-mean")
    assert config.loss_reduction == "row-mean"
    assert config == PadMinConfig(loss_reduction="row-mean")
    assert dataclasses.replace(config, max_rows=2).loss_reduction == "row-mean"


def test_it_is_frozen_and_does_not_follow_what_it_was_made_from() -> None:
    schema: dict[str, Any] = {"x": "position"}
    static, reduce = ["a"], {"rows": "sum"}
    config = PadMinConfig(batch_schema=schema, static_keys=static, log_reduce=reduce)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.token_budget = 5  # type: ignore[misc]
    before = copy.deepcopy(config)
    schema["y"] = "row"
    static.append("b")
    reduce["rows"] = "max"
    assert config == before
    assert PadMinConfig(static_keys=(key for key in ["a", "b"])).static_keys == ("a", "b")


OPTIONS: dict[str, Any] = {
    "token_budget": 77,
    "loss_reduction": "sequence-mean",
    "label_shift": 0,
    "batch_schema": {"x": {"kind": "position", "position_dims": [2, 1], "fill": 0.5}, "y": "row"},
    "static_keys": ["a"],
    "log_reduce": {"rows": "sum"},
}


@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda config: pickle.loads(pickle.dumps(config)),
        dataclasses.replace,
        lambda config: PadMinConfig(**{name: getattr(config, name) for name in option_names()}),
        lambda config: PadMinConfig(**dataclasses.asdict(config)),
    ],
    ids=["copy", "deepcopy", "pickle", "replace", "from options", "from asdict"],
)
def test_round_trips(again: Any) -> None:
    config = PadMinConfig(**OPTIONS)
    assert again(config) == config
    assert again(config).fields["x"] == Field("position", position_dims=(2, 1), fill=0.5)
    assert again(config) != PadMinConfig()
    assert dataclasses.replace(config, token_budget=5).token_budget == 5


def test_schemas_from_plain_mappings() -> None:
    plain = {"kind": "position", "row_dim": 1, "position_dims": [2], "axis": "decoder", "fill": "continue"}
    field = Field("position", 1, (2,), "decoder", "continue")
    for value in (plain, OrderedDict(plain), MappingProxyType(plain), field):
        assert PadMinConfig(batch_schema={"x": value}).fields == {"x": field}
    assert parse_field("x", "position") == Field("position") == Field("position", 0, (1,))
    assert parse_field("x", {"kind": "unit", "counts": "n"}) == Field("unit", counts="n")
    assert parse_field("x", {}) == Field("row")
    with pytest.raises(ConfigError, match=r"batch_schema\['x'\].*has no argument 'dims'"):
        parse_field("x", {"kind": "position", "dims": [1]})
    with pytest.raises(ConfigError, match=r"static_keys=\('x',\): 'x' is in batch_schema too"):
        PadMinConfig(batch_schema={"x": "row"}, static_keys=["x"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kind": "columns"}, "kind='columns'"),
        ({"axis": "output"}, "axis='output'"),
        ({"row_dim": -1}, "row_dim=-1"),
        ({"row_dim": True}, "row_dim=True"),
        ({"row_dim": "0"}, "row_dim='0'"),
        ({"kind": "position", "position_dims": 1}, "position_dims=1"),
        ({"kind": "position", "position_dims": (0, 1)}, r"position_dims=\(0, 1\)"),
        ({"kind": "position", "position_dims": (1, 1)}, r"position_dims=\(1, 1\)"),
        ({"kind": "position", "position_dims": (-1,)}, r"position_dims=\(-1,\)"),
        ({"kind": "position", "position_dims": "12"}, r"position_dims=\('1', '2'\)|position_dims='12'"),
        ({"kind": "row", "position_dims": (1,)}, "only 'position' has position_dims"),
        ({"kind": "unit"}, "counts=None"),
        ({"kind": "unit", "counts": 3}, "counts=3"),
        ({"kind": "unit", "counts": "n", "row_dim": 1}, "row_dim=1"),
        ({"kind": "row", "counts": "n"}, "counts='n'"),
        ({"kind": "position", "fill": "last"}, "fill='last'"),
        ({"kind": "position", "fill": [0]}, r"fill=\[0\]"),
    ],
)
def test_a_bad_field_names_its_argument(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"Field\(.*{named}"):
        Field(**arguments)
    with pytest.raises(ConfigError, match=rf"batch_schema\['pixels'\]=.*{named}"):
        PadMinConfig(batch_schema={"pixels": arguments})


def test_signature_and_help_show_the_typed_options() -> None:
    parameters = inspect.signature(PadMinConfig).parameters
    assert tuple(parameters) == option_names()
    assert parameters["token_budget"].default == 16_384
    assert parameters["token_budget"].annotation == "int | None"
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert all(len(field.metadata["help"]) > 10 for field in dataclasses.fields(PadMinConfig))


def test_the_decorator_serves_other_classes_too() -> None:
    @refuses_unknown_options
    class Thing:
        def __init__(self, size: int = 1) -> None:
            self.size = size

    assert (Thing(3).size, Thing(size=4).size) == (3, 4)
    with pytest.raises(ConfigError, match="Thing has no option 'siz'"):
        Thing(siz=2)  # type: ignore[call-arg]


def instantiate(parser: ArgumentParser, parsed: Any) -> Any:
    """An older jsonargparse has it under another name."""
    return (parser.instantiate if hasattr(parser, "instantiate") else parser.instantiate_classes)(parsed)


def parse(*arguments: str) -> PadMinConfig:
    """As options of a class, and as the type of one option."""
    one, two = ArgumentParser(exit_on_error=False), ArgumentParser(exit_on_error=False)
    one.add_class_arguments(PadMinConfig, "padmin")
    two.add_argument("--padmin", type=PadMinConfig)
    first, second = (instantiate(parser, parser.parse_args(list(arguments))).padmin for parser in (one, two))
    assert first == second
    assert isinstance(first, PadMinConfig)
    return first


def test_jsonargparse_reads_it_with_typed_options() -> None:
    assert parse("--padmin.token_budget=8192") == PadMinConfig(token_budget=8192)
    assert parse("--padmin.token_budget=null").token_budget is None
    assert parse("--padmin.loss_reduction=sequence-mean").loss_reduction == "row-mean"
    assert parse("--padmin.enabled=false").enabled is False
    assert parse('--padmin.static_keys=["a", "b"]').static_keys == ("a", "b")
    assert parse('--padmin.log_reduce={"rows": "sum"}').log_reduce == {"rows": "sum"}
    schema = parse('--padmin.batch_schema={"x": "position", "y": {"kind": "position", "position_dims": [1, 2]}}').fields
    assert schema == {"x": Field("position"), "y": Field("position", position_dims=(1, 2))}
    for wrong in ("--padmin.token_budget=many", "--padmin.normalize=world", "--padmin.token_buget=1"):
        with pytest.raises(Exception, match=wrong.split("=")[0].strip("-").replace(".", r"\.")):
            parse(wrong)
