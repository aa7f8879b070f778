"""Batches of every container type: paths, rebuilding, and micro-batches that leave the caller's objects alone."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import support
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from lightning_padmin import PadMinConfig, compact, iter_micro_batches
from lightning_padmin.batch.tree import check_rebuildable, iter_leaves, join, map_leaves, tensors_in
from lightning_padmin.errors import SchemaError

LENGTHS = [3, 6, 2, 5]
BUDGET = PadMinConfig(token_budget=12, launch_cost=2, static_keys=["shared"])  # rows 1 and 3, then 0 and 2


@dataclass
class Plain:
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    names: list[str] = field(default_factory=list)
    inner: Any = None
    late: Any = field(init=False)
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1

    @cached_property
    def rows(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class Frozen:
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    names: list[str]
    inner: Any
    derived: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", self.input_ids.sum(1))


@dataclass(frozen=True, slots=True)
class Slotted:
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    names: list[str]
    inner: Any


class Named(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    names: list[str]
    inner: Any


class Fussy(namedtuple("Fussy", "input_ids attention_mask labels names inner")):
    def __new__(cls, batch: Mapping[str, Any]) -> Fussy:
        return super().__new__(cls, **batch)


class Labelled(dict):
    """A dictionary with an attribute and a constructor of its own."""

    def __init__(self, source: str, **entries: Any) -> None:
        super().__init__(entries)
        self.source = source


class Stored(MutableMapping):
    """Keeps its entries in an attribute, which a shallow copy shares."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.store, self.source = dict(entries), "here"

    def __getitem__(self, key: str) -> Any:
        return self.store[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.store[key] = value

    def __delitem__(self, key: str) -> None:
        del self.store[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.store)

    def __len__(self) -> int:
        return len(self.store)


def entries() -> dict[str, Any]:
    batch: dict[str, Any] = support.make_batch(LENGTHS)
    inner = {
        "score": torch.arange(4.0),
        "image": torch.arange(4 * 5, dtype=torch.float16).view(4, 5, 1).transpose(0, 0),
        "array": np.arange(8).reshape(4, 2),
        "pieces": [torch.arange(n) for n in (50, 7, 9, 1)],
        "tuple": ("p", "q", "r", "s"),
        "three": ["not", "per", "row"],
        "task": "qa-4",
        "flag": True,
        "none": None,
        "number": 2.5,
        "scalar": torch.tensor(7),
        "shared": torch.ones(3),
    }
    return batch | {"names": ["a", "b", "c", "d"], "inner": inner}


CONTAINERS = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda batch: defaultdict(list, batch),
    "dict subclass": lambda batch: Labelled("there", **batch),
    "MappingProxyType": MappingProxyType,
    "UserDict": UserDict,
    "BatchEncoding": BatchEncoding,
    "own mapping": Stored,
    "dataclass": lambda batch: Plain(**batch),
    "frozen dataclass": lambda batch: Frozen(**batch),
    "slotted dataclass": lambda batch: Slotted(**batch),
    "NamedTuple": lambda batch: Named(**batch),
    "NamedTuple with __new__": Fussy,
    "tuple": lambda batch: tuple(batch.values()),
    "list": lambda batch: list(batch.values()),
    "nested": lambda batch: {"outer": {"middle": batch}},
    "tuple of dict": lambda batch: (batch, 3),
}
POSITIONS = {"0": "input_ids", "1": "attention_mask", "2": "labels", "3": "names"}


def config_for(kind: str) -> PadMinConfig:
    if kind not in ("tuple", "list"):
        return BUDGET
    keys = {"mask_key": "1", "labels_key": "2", "batch_schema": {"0": "position"}}
    return PadMinConfig(token_budget=12, launch_cost=2, static_keys=["shared"], **keys)


def fingerprint(batch: Any) -> dict[str, Any]:
    """What changes when somebody writes to a leaf or puts another in its place."""
    leaves = dict(iter_leaves(batch))
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    versions = {path: (leaf.data_ptr(), leaf._version, leaf.shape, leaf.stride()) for path, leaf in tensors.items()}
    return {"ids": {path: id(leaf) for path, leaf in leaves.items()}, "versions": versions}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("kind", CONTAINERS)
def test_micro_batches_keep_types_and_leave_the_batch_alone(kind: str) -> None:
    batch = CONTAINERS[kind](entries())
    before, copied = fingerprint(batch), dict(iter_leaves(copy.deepcopy(dict(iter_leaves(batch)))))
    micro_batches = list(iter_micro_batches(batch, config_for(kind)))
    assert [micro.rows.tolist() for micro in micro_batches] == [[1, 3], [0, 2]]
    for micro, width in zip(micro_batches, (6, 3), strict=True):
        assert type(micro.batch) is type(batch)
        rows = micro.rows.tolist()
        for path, leaf in iter_leaves(micro.batch):
            whole = dict(iter_leaves(batch))[path]
            name = (POSITIONS if kind in ("tuple", "list") else {}).get(path, path.rsplit(".", 1)[-1])
            if name in ("input_ids", "attention_mask", "labels"):
                assert same(leaf, whole[rows][:, :width]), path
            elif name in ("score", "image", "array", "derived"):
                assert same(leaf, whole[rows]), path
            elif name in ("pieces", "names", "tuple"):
                assert same(leaf, type(whole)(whole[row] for row in rows)), path
            else:
                assert leaf is whole, path
    assert fingerprint(batch) == before
    assert all(same(leaf, copied[path]) for path, leaf in iter_leaves(batch))


@pytest.mark.parametrize("write", [lambda b: b["labels"].zero_(), lambda b: b.update(labels=b["labels"].clone())])
def test_the_fingerprint_sees_a_write(write: Any) -> None:
    batch = entries()
    before = fingerprint(batch)
    write(batch)
    assert fingerprint(batch) != before


@pytest.mark.parametrize("kind", CONTAINERS)
def test_micro_batches_share_no_container_with_the_batch(kind: str) -> None:
    """What a training step pops or adds does not reach the caller, nor the next micro-batch."""
    batch = CONTAINERS[kind](entries())
    first, second = iter_micro_batches(batch, config_for(kind))
    leaves = dict(iter_leaves(batch))
    inner = dict(iter_leaves(second.batch))
    for node in _inner_nodes(first.batch):
        node["new"] = 1
        del node["new"], node[next(iter(node))]
    assert dict(iter_leaves(batch)).keys() == leaves.keys()
    assert dict(iter_leaves(second.batch)).keys() == inner.keys()


def _inner_nodes(node: Any) -> Iterator[MutableMapping[str, Any]]:
    if isinstance(node, MutableMapping):
        yield from [n for value in node.values() for n in _inner_nodes(value)]
        yield node
    elif isinstance(node, tuple | list):
        yield from [n for value in node for n in _inner_nodes(value)]
    elif dataclasses.is_dataclass(node):
        yield from _inner_nodes(node.inner)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_mapping_every_leaf_to_itself_gives_an_equal_batch(kind: str) -> None:
    batch = CONTAINERS[kind](entries())
    new = map_leaves(batch, lambda path, leaf: leaf)
    assert new is not batch
    assert type(new) is type(batch)
    assert [(path, id(leaf)) for path, leaf in iter_leaves(new)] == [(p, id(leaf)) for p, leaf in iter_leaves(batch)]


def test_attributes_and_factories_survive() -> None:
    def change(batch: Any) -> Any:
        return map_leaves(batch, lambda path, leaf: 0)

    assert change(defaultdict(list, a=1))["other"] == []
    assert list(change(OrderedDict(b=1, a=2))) == ["b", "a"]
    assert change(Labelled("there", a=1)).source == "there"
    stored = Stored({"a": 1})
    assert (change(stored)["a"], change(stored).source, stored["a"]) == (0, "here", 1)
    output = change(BaseModelOutput(last_hidden_state=torch.ones(2)))
    assert (output["last_hidden_state"], output.last_hidden_state) == (0, 0)


def test_a_dataclass_is_copied_not_constructed() -> None:
    batch = Plain(**entries())
    assert (batch.made, batch.rows) == (1, 4)
    first, second = (micro.batch for micro in iter_micro_batches(batch, BUDGET))
    assert (first.made, second.made) == (1, 1)
    assert not hasattr(first, "late")
    assert (first.rows, second.rows, batch.rows) == (2, 2, 4), "a cached property of the whole batch was kept"
    batch.late = ["v", "w", "x", "y"]
    assert [micro.batch.late for micro in iter_micro_batches(batch, BUDGET)] == [["w", "y"], ["v", "x"]]


def test_what_a_tokenizer_knows_of_its_rows_is_dropped_where_rows_move() -> None:
    class Encoding:
        n_sequences = 1

    batch = BatchEncoding(support.make_batch(LENGTHS), encoding=[Encoding() for _ in LENGTHS])
    assert batch.encodings is not None
    assert [micro.batch.encodings for micro in iter_micro_batches(batch, BUDGET)] == [None, None]
    assert batch.encodings is not None


def test_paths() -> None:
    assert join("inputs", "labels") == "inputs.labels"
    assert join("", 0) == "0"
    batch = {"a": {"b": 1, "c": [2, 3]}, "d": Named(4, 5, 6, [7], {"e": 8})}
    names = ["a.b", "a.c", "d.input_ids", "d.attention_mask", "d.labels", "d.names", "d.inner.e"]
    assert [path for path, _ in iter_leaves(batch)] == names
    opened = [path for path, _ in iter_leaves(batch, ["a.c.0"])]
    assert opened == ["a.b", "a.c.0", "a.c.1", *names[2:]]
    assert [path for path, _ in iter_leaves((1, [2, {"a": 3}]))] == ["0", "1"]
    assert [path for path, _ in iter_leaves((1, [2, {"a": 3}]), ["1.1.a"])] == ["0", "1.0", "1.1.a"]
    assert map_leaves(batch, lambda path, leaf: path, ["a.c.0"])["a"] == {"b": "a.b", "c": ["a.c.0", "a.c.1"]}


def test_a_list_is_not_opened_by_a_key_with_a_dot() -> None:
    batch = {"a": [1, 2], "a.x": 3}
    assert [path for path, _ in iter_leaves(batch, ["a", "a.x"])] == ["a", "a.x"]


@pytest.mark.parametrize("batch", [torch.ones(2, 3), "text", None, 5, {1, 2}, np.ones(3)])
def test_what_is_no_container_is_refused(batch: Any) -> None:
    with pytest.raises(SchemaError, match=f"batch of type {type(batch).__name__}: expected a mapping"):
        list(iter_leaves(batch))


@pytest.mark.parametrize("batch", [{"a.b": 1, "a": {"b": 2}}, {1: "x", "1": "y"}])
def test_two_entries_of_one_path_are_refused(batch: Any) -> None:
    with pytest.raises(SchemaError, match=r"two entries of the batch have the path '(a\.b|1)': rename one"):
        list(iter_leaves(batch))


def test_a_container_that_cannot_be_rebuilt_is_refused_before_the_first_micro_batch() -> None:
    class Closed(Mapping):
        def __init__(self) -> None:
            self.entries = entries()

        def __getitem__(self, key: str) -> Any:
            return self.entries[key]

        def __iter__(self) -> Iterator[str]:
            return iter(self.entries)

        def __len__(self) -> int:
            return len(self.entries)

    check_rebuildable(MappingProxyType(entries()))
    with pytest.raises(SchemaError, match=r"one of its containers cannot be rebuilt.*dictionaries, dataclasses"):
        iter_micro_batches(Closed(), BUDGET)


def test_tensors_in_lists_and_objects() -> None:
    class Holder:
        def __init__(self) -> None:
            self.tensor, self.text = torch.ones(5), "x"

    one, two = torch.ones(1), np.ones(2)
    assert [len(t) for t in tensors_in([one, "x", {"a": two, "b": [one, two]}, (two,), Named(one, 1, 2, [], two)])] == [
        *(1, 2, 1),  # of the list inside only the first item
        *(2, 1, 2),
    ]
    assert [len(t) for t in tensors_in(Holder())] == [5]
    assert list(tensors_in([[0] * 10**6] * 1000)) == []  # at once: not every number is looked at
    assert list(tensors_in(3)) == []


def test_nothing_of_a_batch_is_kept_in_a_reference_cycle() -> None:
    gc.disable()
    try:
        batch = entries() | {"counts": torch.tensor([1, 0, 2, 1]), "images": torch.ones(4, 2)}
        schema = {"images": {"kind": "unit", "counts": "counts"}}
        held = [weakref.ref(leaf) for _, leaf in iter_leaves(batch) if isinstance(leaf, Tensor)]
        config = PadMinConfig(token_budget=12, batch_schema=schema, static_keys=["shared"])
        for micro in iter_micro_batches(batch, config):
            held.append(weakref.ref(micro.batch["labels"]))
        compact(batch, config)
        del batch, micro
        assert not any(ref() is not None for ref in held)
    finally:
        gc.enable()
