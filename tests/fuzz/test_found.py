"""What the other tests of this folder have found: one small case of each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from support import make_batch

from lightning_padmin import LengthBucketBatchSampler, MicroBatcher, PadMinConfig, PadMinError
from lightning_padmin.batch.fields import parse_field
from lightning_padmin.config import environment
from lightning_padmin.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::lightning_padmin.errors.PadMinWarning")
NARROW = torch.tensor([[1, 1, 0], [1, 1, 1]])


def batch(**entries: Any) -> dict[str, Any]:
    return make_batch([3, 2], width=4, left=[1, 0]) | entries


def run(given: Mapping[str, Any], **options: Any) -> list[Any]:
    return list(MicroBatcher(PadMinConfig(**({"token_budget": 4} | options))).prepare(given))


@pytest.mark.parametrize("name", ["decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds"])
def test_an_entry_that_is_none_makes_no_encoder_decoder_batch(name: str) -> None:
    """Otherwise labels stay where they are while ids are rolled, in silence."""
    plain, with_none = run(batch()), run(batch(**{name: None}))
    for one, other in zip(plain, with_none, strict=True):
        assert torch.equal(one.batch["labels"], other.batch["labels"])
        assert one.weight == other.weight


@pytest.mark.parametrize(
    "values",
    [np.zeros((2, 4), dtype=">f4"), np.zeros((2, 4), dtype=">i8")],
)
def test_arrays_of_another_byte_order(values: Any) -> None:
    run(batch(segments=values), batch_schema={"segments": "position"})


def test_an_array_of_one_row_that_was_reversed() -> None:
    given = make_batch([3], width=4) | {"segments": np.zeros((1, 4))[::-1]}
    run(given, batch_schema={"segments": "position"})


def refused(given: Mapping[str, Any], **options: Any) -> None:
    """Taken, or refused by this library."""
    with suppress(PadMinError):
        run(given, **options)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_a_loss_mask_of_an_odd_type(dtype: torch.dtype) -> None:
    refused(
        batch(loss_mask=make_batch([3, 2], width=4, left=[1, 0])["attention_mask"].to(dtype)), loss_mask_key="loss_mask"
    )


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_a_decoder_mask_of_an_odd_type(dtype: torch.dtype) -> None:
    labels = torch.where(NARROW > 0, 5, -100)
    refused(batch(labels=labels, decoder_attention_mask=NARROW.to(dtype)))


def test_position_ids_of_an_odd_type() -> None:
    refused(batch(position_ids=torch.zeros(2, 4, dtype=torch.uint16)), pad_to_multiple_of=8, pad_token_id=0)


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({"ignore_index": -(2**63) - 1}, torch.int64),
        ({"ignore_index": 2**64}, torch.int64),
        ({"label_shift": 2**64}, torch.int64),
        ({"pad_token_id": 2**63, "pad_to_multiple_of": 8}, torch.int64),
        ({"pad_token_id": 70_000, "pad_to_multiple_of": 8}, torch.int16),
    ],
)
def test_options_that_no_tensor_can_hold(options: dict[str, Any], ids: torch.dtype) -> None:
    given = make_batch([4, 4])
    refused(given | {"input_ids": given["input_ids"].to(ids)}, **options)


def test_a_dummy_is_never_a_row_of_weight_zero_while_others_have_some() -> None:
    """The loss sum(u * l) / sum(u) of such a row alone is 0/0, and 0 * nan is nan."""
    ranks = Ranks(2)
    short = make_batch([4, 3], without_loss=[1]) | {"u": torch.tensor([0.0, 2.0])}
    config = PadMinConfig(loss_reduction=lambda given: given["u"], batch_schema={"u": "row"}, token_budget=8)
    ranks.barrier = type("Alone", (), {"wait": staticmethod(lambda: None)})()
    ranks.said[1] = [0, 2, 8, int(np.float64(1).view(np.int64)), 4, 0, 0, 0, 0]
    (_, dummy) = MicroBatcher(config, exchange=ranks.exchange_of(0)).prepare(short)
    assert dummy.is_dummy
    assert float(dummy.batch["u"].sum()) > 0


@pytest.mark.parametrize("value", [torch.tensor(3), np.zeros(())])
def test_static_keys_that_cannot_be_gone_through(value: Any) -> None:
    with pytest.raises(ConfigError):
        PadMinConfig(static_keys=value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": np.array(["row", "sum"])},
        {"position_dims": np.array(0.0)},
        {"kind": "position", "fill": np.zeros(2)},
        {"axis": np.array(["a", "b"])},
    ],
)
def test_arrays_as_arguments_of_a_field(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_field("x", arguments)


@pytest.mark.parametrize("text", [b"!!int x", b"a: 2001-99-99", b"a: \xff"])
def test_files_that_are_no_yaml(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_bytes(text)
    with pytest.raises(ConfigError):
        environment.resolve(environment={environment.CONFIG_FILE: str(file)})


@pytest.mark.parametrize("variable", ["PADMIN_BATCH_SCHEMA", "PADMIN_LAUNCHED"])
def test_a_number_in_json_that_python_does_not_read(variable: str) -> None:
    with pytest.raises(ConfigError):
        environment.resolve(environment={variable: '{"labels": ' + "9" * 5000 + "}"})


@pytest.mark.parametrize("text", ["1", "[]", "{}"])
def test_what_a_launcher_never_says(text: str) -> None:
    with pytest.raises(ConfigError):
        environment.resolve(environment={"PADMIN_LAUNCHED": text, "PADMIN_TOKEN_BUDGET": "8"})


@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": None},
        {"batches_per_bucket": None},
        {"count_multiple_of": None},
        {"lengths": [None, [4]]},
        {"seed": -1},
        {"seed": "a"},
        {"rank": "0", "world_size": 1},
        {"rank": 0.5, "world_size": 1},
    ],
)
def test_samplers(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        list(LengthBucketBatchSampler(**({"lengths": [3, 2, 1], "token_budget": 4} | options)))
