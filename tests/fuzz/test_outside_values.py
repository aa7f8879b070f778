"""Values from code, variables and files: ConfigError, or a configuration that holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import strategies as st
from support import make_batch

from fuzz.amounts import Amount, amounts
from lightning_padmin import Field, MicroBatcher, PadMinConfig, PadMinError
from lightning_padmin.batch.fields import parse_field
from lightning_padmin.config import environment
from lightning_padmin.config.options import _INTEGERS, _STRINGS, option_names
from lightning_padmin.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::lightning_padmin.errors.PadMinWarning")
Record = Callable[[str, Any], None]

WORDS = st.sampled_from(
    [
        *("row", "position", "unit", "static", "token-mean", "row-mean", "sequence-mean", "sum", "rank", "global"),
        *("optimal", "greedy", "auto", "split", "off", "first-batch", "none", "null", "true", "false", "1", "0", "-1"),
        *("attention_mask", "labels", "input_ids", "continue", "decoder", "input", "8192", "1e3", "0x10", "²", ""),
    ]
)
SCALARS = st.one_of(
    WORDS,
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.integers(0, 2), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.sampled_from(
    [
        *(
            np.int64(3),
            np.float64(2),
            np.bool_(True),
            np.array(["row", "sum"]),
            np.zeros(3),
            np.zeros(()),
            np.str_("sum"),
        ),
        *(torch.tensor(3), torch.zeros(2), torch.float32, Decimal(3), Fraction(3), b"row", {1}, frozenset(), object()),
        *(Field("position"), Field("unit", counts="labels"), Field, PadMinConfig(), 3 + 0j, range(3), ..., iter([1])),
        *({"input_ids": Field("row")}, {"labels": "static"}, {"attention_mask": "row"}, ["labels"], ("input_ids",)),
    ]
)
VALUES = PLAIN | OBJECTS
NAMES = st.sampled_from(option_names())


def check_holds(config: PadMinConfig) -> None:
    """What was accepted can be given again, and a batch is planned or refused with it."""
    assert isinstance(config, PadMinConfig)
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert PadMinConfig(**options) == config
    batch = make_batch([4, 3, 1])
    try:
        for _ in MicroBatcher(config).prepare(batch):
            pass
    except PadMinError as error:
        assert str(error)  # noqa: PT017


def told(config: PadMinConfig) -> str:
    """Whether it holds; a function of the user's may raise what it likes."""
    if callable(config.loss_reduction):
        return "taken"
    check_holds(config)
    return "taken"


@amounts(1500)
def test_options_of_any_type(amount: Amount, record_property: Record) -> None:
    def check(name: str, value: Any) -> str:
        try:
            config = PadMinConfig(**{name: value})
        except ConfigError as error:
            assert name in str(error)  # noqa: PT017
            return "refused"
        return told(config)

    # Not of any type, but any value of the right one.
    integers = st.integers(-1, 9) | st.integers(-(2**70), 2**70)
    pairs = st.tuples(st.sampled_from(sorted(_INTEGERS)), integers) | st.tuples(
        st.sampled_from(sorted(_STRINGS)), WORDS
    )
    pairs |= st.tuples(NAMES, VALUES)
    tally = amount.run(record_property, lambda pair: check(*pair), pairs)
    assert min(tally["refused"], tally["taken"]) > tally["examples"] / 10


@amounts(1500)
def test_any_mapping_as_a_field(amount: Amount, record_property: Record) -> None:
    def check(key: Any, value: Any) -> str:
        try:
            made = parse_field(key, value)
        except ConfigError as error:
            assert "batch_schema" in str(error)  # noqa: PT017
            return "refused"
        assert isinstance(made, Field)
        assert parse_field("x", {name: getattr(made, name) for name in Field.__dataclass_fields__}) == made
        return "taken"

    small = st.integers(0, 3)
    kinds = st.sampled_from(["row", "position", "unit", "static"])
    likely = {
        "kind": kinds | VALUES,
        "row_dim": small | VALUES,
        "position_dims": st.lists(small, max_size=2) | VALUES,
        "axis": st.sampled_from(["input", "decoder"]) | VALUES,
        "fill": small | VALUES,
        "counts": WORDS | VALUES,
        "sort": VALUES,
    }
    mappings = st.sampled_from(sorted(likely)).flatmap(
        lambda name: st.fixed_dictionaries({"kind": kinds, name: likely[name]})
    )
    pairs = st.tuples(WORDS, mappings) | st.tuples(WORDS, WORDS) | st.tuples(VALUES, VALUES)
    tally = amount.run(record_property, lambda pair: check(*pair), pairs)
    assert min(tally["refused"], tally["taken"]) > tally["examples"] / 20


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "launcher_file", lambda: None)


@pytest.mark.usefixtures("no_launcher")
@amounts(1500)
def test_any_text_in_variables(amount: Amount, record_property: Record) -> None:
    def check(variables: dict[str, str]) -> str:
        try:
            resolved = environment.resolve(environment={"HOME": "/", **variables})
        except ConfigError as error:
            assert any(name in str(error) for name in variables)  # noqa: PT017
            return "refused"
        told(resolved.config)
        again = {name.removeprefix("PADMIN_").lower() for name in variables}
        if "batch_schema" not in again:  # whose fields are objects by now
            texts = environment.as_variables({name: getattr(resolved.config, name) for name in again})
            assert environment.resolve(environment=texts).config == resolved.config
        return "taken"

    names = NAMES.map(lambda name: "PADMIN_" + name.upper())
    names |= st.text("ABCDEGHI_", max_size=4).map(lambda end: "PADMIN_" + end)
    texts = WORDS | st.text(max_size=6) | st.integers(-2, 2**70).map(str) | PLAIN.map(json.dumps)
    amount.run(record_property, check, st.dictionaries(names, texts, max_size=2))


@pytest.mark.usefixtures("no_launcher")
@amounts(800)
def test_any_yaml_in_a_file(amount: Amount, record_property: Record, tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"

    def check(text: str) -> str:
        file.write_text(text, encoding="utf-8")
        try:
            resolved = environment.resolve(environment={environment.CONFIG_FILE: str(file)})
        except ConfigError as error:
            assert str(file) in str(error)  # noqa: PT017
            return "refused"
        return told(resolved.config)

    sections = st.dictionaries(NAMES, SCALARS | PLAIN, min_size=1, max_size=2) | PLAIN
    wholes = sections.map(lambda section: yaml.safe_dump({"dynamo_config": {"padmin": section}}))
    wholes |= PLAIN.map(lambda whole: yaml.safe_dump({"dynamo_config": whole})) | PLAIN.map(yaml.safe_dump)
    pieces = st.sampled_from(["dynamo_config:", "\n", "  padmin: ", "{", "}", "[", "]", "a: 1", "!!int x", "&a", "*a"])
    wholes |= st.lists(pieces, max_size=8).map("".join)
    amount.run(record_property, check, wholes)
