"""A batch whose entries lie in nodes of any depth and kind is the same batch as the one with flat names."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_padmin import Field, MicroBatcher, PaddedForward, PadMinConfig
from lightning_padmin.errors import PadMinError
from lightning_padmin.microbatching.packed_layout import PackStyle, pack_layout

Pair = namedtuple("Pair", ["first", "second"])
ROLES = ("mask_key", "labels_key", "decoder_mask_key", "loss_mask_key")


def flat_batch(dice: random.Random, decoder: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Entries of every role, with names of transformers or others, and the options that say what they are."""
    lengths = [dice.randint(1, 6) for _ in range(dice.randint(1, 5))]
    left = [dice.randint(0, 3) for _ in lengths]
    batch: dict[str, Any] = support.make_batch(lengths, left=left, seed=dice.randint(0, 99))
    width, rows = batch["input_ids"].shape[1], len(lengths)
    options: dict[str, Any] = {"token_budget": 12, "launch_cost": 0, "pad_token_id": 0}
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    batch["token_type_ids"] = torch.arange(rows * width).view(rows, width)
    batch["cls_index"] = torch.tensor(left) + dice.choice([0, 0, 0, -1])
    batch["texts"] = [f"row {k}" for k in range(rows)]
    batch["segments"], options["batch_schema"] = batch["token_type_ids"] * 2, {"segments": "position"}
    if dice.random() < 0.5:
        batch["selected"] = (batch["labels"] != -100).double() * torch.rand(rows, width).double()
        options["loss_mask_key"] = "selected"
    if dice.random() < 0.4:
        batch["mask"], options["mask_key"] = batch.pop("attention_mask"), "mask"
    if dice.random() < 0.4:
        batch["targets"], options["labels_key"] = batch.pop("labels"), "targets"
    if decoder:
        other = support.make_batch([dice.randint(1, 5) for _ in lengths], left=[dice.randint(0, 2) for _ in lengths])
        batch["decoder_input_ids"], batch["decoder_attention_mask"] = other["input_ids"], other["attention_mask"]
        batch[options.get("labels_key", "labels")] = other["labels"]
        if "selected" in batch:
            batch["selected"] = (other["labels"] != -100) * 0.5
        batch["at"] = other["attention_mask"].argmax(1)
        options["batch_schema"] |= {"at": Field("column", axis="decoder")}
    if dice.random() < 0.15:  # labels on padding, or nothing to attend to
        key = options.get("labels_key", "labels")
        batch[key] = torch.full_like(batch[key], 3)
    return batch, options


def nested(batch: dict[str, Any], dice: random.Random) -> tuple[Any, dict[str, str]]:
    """The same entries in nodes; path of each."""
    groups: dict[str, dict[str, Any]] = {"inputs": {}, "targets": {}, "deep": {}}
    where = {name: dice.choice([*groups, "deep"]) for name in batch}
    for name, value in batch.items():
        groups[where[name]][name] = value
    kinds = {name: dice.choice(["dict", "ordered", "user", "dataclass", "frozen"]) for name in groups}
    made = {name: _node(kinds[name], entries) for name, entries in groups.items()}
    places = {"inputs": "inputs", "targets": "targets", "deep": "targets_of.deep"}
    outer: Any = {"inputs": made["inputs"], "targets": made["targets"], "targets_of": {"deep": made["deep"]}}
    if dice.random() < 0.4:
        outer = (made["inputs"], Pair(made["targets"], made["deep"]))
        places = {"inputs": "0", "targets": "1.first", "deep": "1.second"}
    return outer, {name: f"{places[where[name]]}.{name}" for name in batch}


def _node(kind: str, entries: dict[str, Any]) -> Any:
    if kind in ("dataclass", "frozen"):
        record = dataclasses.make_dataclass("Record", [(name, Any) for name in entries], frozen=kind == "frozen")
        return record(**entries)
    return {"dict": dict, "ordered": OrderedDict, "user": UserDict}[kind](entries)


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        children = list(node.items())
    elif dataclasses.is_dataclass(node):
        children = [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    elif isinstance(node, tuple):
        names = node._fields if hasattr(node, "_fields") else range(len(node))
        children = list(zip(names, node, strict=True))
    else:
        yield path.rpartition(".")[2], node
        return
    for key, value in children:
        yield from leaves(value, f"{path}.{key}")


def outcome(batch: Any, options: dict[str, Any]) -> Any:
    """Table, plan, weights and micro-batches, or what was raised; entries by their own names."""
    batcher = MicroBatcher(PadMinConfig(**options))
    try:
        found = batcher.prepare(batch)
    except PadMinError as error:
        return type(error).__name__, str(error)
    table = {name: np.asarray(value).tolist() for name, value in vars(found.table).items() if name != "units"}
    micros = [{name: _plain(leaf) for name, leaf in leaves(micro.batch)} for micro in found]
    return table, [rows.tolist() for rows in found.plan.groups], found.weights.tolist(), micros, batcher.shows_first


def _plain(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, Tensor) else leaf


@pytest.mark.filterwarnings("ignore::lightning_padmin.errors.PadMinWarning")
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_nested_is_flat(seed: int, decoder: bool, whole_paths: bool) -> None:
    dice = random.Random(seed)
    batch, options = flat_batch(dice, decoder)
    inner, paths = nested(batch, dice)
    longer = dict(options)
    if whole_paths:
        longer |= {role: paths[options[role]] for role in ROLES if role in options}
        longer["batch_schema"] = {paths[key]: field for key, field in options["batch_schema"].items()}
    flat, ours = outcome(batch, options), outcome(inner, longer)
    if isinstance(flat[0], str):
        for name, path in sorted(paths.items(), key=lambda item: -len(item[1])):
            ours = ours[0], ours[1].replace(repr(path), repr(name))
        assert ours[0] == flat[0]
        assert set(ours[1].split()) == set(flat[1].split())
    else:
        assert ours == flat


def test_roles_in_tuples_inside_of_a_mapping() -> None:
    """A tuple below the top is opened where an option names an entry of it."""
    flat = support.make_batch([5, 2, 3])
    inner = {"x": [flat["input_ids"], flat["attention_mask"]], "y": (flat["labels"], ["a", "b", "c"])}
    options = {
        "token_budget": 6,
        "launch_cost": 0,
        "mask_key": "x.1",
        "labels_key": "y.0",
        "batch_schema": {"x.0": "position"},
    }
    found = list(MicroBatcher(PadMinConfig(**options)).prepare(inner))
    wanted = list(MicroBatcher(PadMinConfig(token_budget=6, launch_cost=0)).prepare(flat))
    assert [micro.weight for micro in found] == [micro.weight for micro in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine.batch["x"][0], theirs.batch["input_ids"])
        assert torch.equal(mine.batch["y"][0], theirs.batch["labels"])
        assert mine.batch["y"][1] == [["a", "b", "c"][row] for row in mine.rows]


def test_a_node_of_the_decoder_has_the_decoders_axis() -> None:
    """Names of the input axis beside the decoder's mask; of one width by coincidence they would be rolled wrongly."""
    encoder, decoder = support.make_batch([6, 2, 4], left=[0, 4, 2]), support.make_batch([1, 6, 3], left=[5, 0, 3])
    labels = decoder.pop("labels")
    encoder.pop("labels")
    batch = {"encoder": encoder, "decoder": decoder, "labels": labels}
    options = {"mask_key": "encoder.attention_mask", "decoder_mask_key": "decoder.attention_mask"}
    flat = encoder | {f"decoder_{name}": value for name, value in decoder.items()} | {"labels": labels}
    config = {"token_budget": 14, "launch_cost": 0}
    found = list(MicroBatcher(PadMinConfig(**config, **options)).prepare(batch))
    wanted = list(MicroBatcher(PadMinConfig(**config)).prepare(flat))
    for mine, theirs in zip(found, wanted, strict=True):
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(mine.batch["encoder"][name], theirs.batch[name])
            assert torch.equal(mine.batch["decoder"][name], theirs.batch[f"decoder_{name}"])


def test_packs_of_nested_batches() -> None:
    """Position ids and the like go beside the mask, in whatever it lies."""
    flat = support.make_batch([4, 2, 3])
    config = PadMinConfig(mask_key="attention_mask")
    for outer in ((dict(flat),), {"a": Pair(dict(flat), None)}, {"inputs": {"deep": dict(flat)}}):
        schema, table = MicroBatcher(config).read(outer)
        pack = dict(leaves(pack_layout(table, [0, 2], PackStyle()).take_batch(outer, schema)))
        wanted = pack_layout(table, [0, 2], PackStyle()).take_batch(flat, MicroBatcher(config).read(flat)[0])
        assert pack["position_ids"].tolist() == wanted["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
        assert torch.equal(pack["labels"], wanted["labels"])
        assert pack["attention_mask"] is None


def test_options_of_a_nested_batch_hold_for_the_calls_of_its_model() -> None:
    """The step hands `inputs.segments` on as `segments`, and keeps the loss mask to itself."""
    flat = support.make_batch([6, 2, 4], left=[0, 4, 2])
    segments = torch.arange(18).view(3, 6)

    def model(input_ids: Tensor, attention_mask: Tensor, segments: Tensor) -> Tensor:
        assert input_ids.shape == segments.shape
        return (input_ids * 100 + segments)[..., None].double() * attention_mask[..., None]

    config = PadMinConfig(
        token_budget=7,
        launch_cost=0,
        mask_key="inputs.attention_mask",
        batch_schema={"inputs.segments": "position", "extra.attention_mask": "row"},
        labels_key="targets.labels",
    )
    inputs = {"input_ids": flat["input_ids"], "attention_mask": flat["attention_mask"], "segments": segments}
    assert torch.equal(PaddedForward(model, config)(**inputs), model(**inputs))
    with pytest.raises(PadMinError, match="'labels' is among the inputs"):
        PaddedForward(model, config)(**inputs, labels=flat["labels"])
