"""Batches of many entries, of many levels, within themselves, or without values: linear time, or a refusal by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import support
import torch

from lightning_padmin import PadMinConfig, compact, iter_micro_batches
from lightning_padmin.batch import tree
from lightning_padmin.batch.fields import Field
from lightning_padmin.batch.tree import DEEPEST, Paths, iter_leaves, map_leaves
from lightning_padmin.errors import PadMinError, SchemaError

LENGTHS = [3, 6, 2, 5]
COUNTS = torch.ones(4, dtype=torch.long)


def base() -> dict[str, Any]:
    return dict(support.make_batch(LENGTHS))


def numbered(n: int, make: Callable[[], Any]) -> dict[str, Any]:
    return {f"e{k}": make() for k in range(n)}


# name: n -> (batch, options)
MANY: dict[str, Callable[[int], tuple[Any, dict[str, Any]]]] = {
    "declared rows": lambda n: (
        base() | numbered(n, lambda: torch.zeros(4)),
        {"batch_schema": numbered(n, lambda: "row")},
    ),
    "lists": lambda n: (base() | numbered(n, lambda: [1, 2, 3, 4]), {"batch_schema": numbered(n, lambda: "row")}),
    "shared": lambda n: (base() | numbered(n, lambda: 3), {"static_keys": list(numbered(n, int))}),
    "a declared list": lambda n: (
        base() | {"l": [torch.zeros(4)] * n},
        {"batch_schema": {f"l.{k}": "row" for k in range(n)}},
    ),
    "units": lambda n: (
        base() | {"c": COUNTS} | numbered(n, lambda: torch.zeros(4)),
        {"batch_schema": numbered(n, lambda: Field("unit", counts="c"))},
    ),
    "one name in many places": lambda n: (base() | numbered(n, lambda: {"x": torch.zeros(4)}), {}),
}


def seconds(batch: Any, options: dict[str, Any]) -> float:
    started = time.process_time()
    assert len(list(iter_micro_batches(batch, PadMinConfig(token_budget=12, launch_cost=2, **options)))) == 2
    return time.process_time() - started


@pytest.mark.slow  # a time
@pytest.mark.parametrize("kind", MANY)
def test_time_grows_with_the_number_of_entries(kind: str) -> None:
    seconds(*MANY[kind](20))
    few, many = (min(seconds(*MANY[kind](n)) for _ in range(turns)) for n, turns in ((250, 3), (4000, 1)))
    assert many < 64 * few + 0.1, "16 times as many; the square would be 256 times"


@pytest.mark.slow
def test_the_measure_sees_a_search_through_all_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    def through_all(self: Paths, key: str) -> bool:
        return any(path.startswith(key + ".") for path in self.all)

    monkeypatch.setattr(Paths, "has_below", through_all)

    def lists(n: int) -> tuple[Any, dict[str, Any]]:
        return base() | numbered(n, lambda: [1, 2, 3, 4]), {"batch_schema": {f"x{k}": "row" for k in range(n)}}

    seconds(*lists(20))
    assert seconds(*lists(3200)) > 64 * seconds(*lists(200)) + 0.1


def levels(n: int, inner: Any) -> Any:
    for _ in range(n):
        inner = {"a": inner}
    return inner


def within_itself(kind: str) -> Any:
    batch = base()
    holder: Any = [] if kind == "list" else {}
    if kind == "list":
        holder.append(holder)
        return batch | {"m": [holder] * 4}
    if kind == "list of dictionaries":
        holder["again"] = [holder]
        return batch | {"m": [holder] * 4}
    holder["again"] = {"inner": holder}
    return batch | {"m": holder} if kind == "dictionary" else holder | batch


@pytest.mark.parametrize("kind", ["list", "list of dictionaries", "dictionary", "whole batch"])
def test_containers_within_themselves(kind: str) -> None:
    for read in (compact, lambda batch: iter_micro_batches(batch, PadMinConfig())):
        with pytest.raises(SchemaError, match=r"'(m|again)[.a-z]*' is a (list|dict) that lies within itself"):
            read(within_itself(kind))


@pytest.mark.parametrize("n", [DEEPEST + 1, 900, 20_000])
def test_too_many_levels(n: int) -> None:
    for batch in (levels(n, base()), base() | {"m": [levels(n, 1)] * 4}):
        with pytest.raises(SchemaError, match=rf"'(a\.a|m).* lies more than {DEEPEST} levels deep") as caught:
            iter_micro_batches(batch, PadMinConfig())
        assert len(str(caught.value)) < 300
    with pytest.raises(SchemaError, match="levels deep"):
        map_leaves(levels(n, base()), lambda path, leaf: leaf)


def test_as_many_levels_as_may_be() -> None:
    batch = levels(DEEPEST - 1, base())
    first, second = iter_micro_batches(batch, PadMinConfig(token_budget=12, launch_cost=2))
    assert len(list(iter_leaves(first.batch))) == len(list(iter_leaves(second.batch))) == 3


def test_few_containers_that_stand_for_many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MOST", 20_000)
    inner: Any = {"x": 1}
    for _ in range(60):
        inner = {"a": inner, "b": inner}
    for batch in (base() | {"m": inner}, base() | {"m": [inner] * 4}):
        with pytest.raises(SchemaError, match="more than 20,000 entries, at 'm"):
            iter_micro_batches(batch, PadMinConfig())


def test_a_mapping_that_makes_its_entries_anew_is_not_within_itself() -> None:
    class Lazy(Mapping[str, Any]):
        def __init__(self, depth: int) -> None:
            self.depth = depth

        def __getitem__(self, key: str) -> Any:
            return Lazy(self.depth - 1) if self.depth else 7

        def __iter__(self) -> Iterator[str]:
            return iter(["x", "y"] if self.depth else ["z"])

        def __len__(self) -> int:
            return 2 if self.depth else 1

    assert len(list(iter_leaves(Lazy(9)))) == 2**9


@pytest.mark.parametrize("key", ["attention_mask", "input_ids", "labels", "extra", "all"])
def test_tensors_without_values(key: str) -> None:
    batch = base() | {"extra": torch.zeros(4)}
    gone = {name: value.to("meta") for name, value in batch.items() if key in (name, "all")}
    with pytest.raises(SchemaError, match=rf"'{key if key != 'all' else 'attention_mask'}' is a tensor without values"):
        iter_micro_batches(batch | gone, PadMinConfig())
    with pytest.raises(NotImplementedError, match="meta"):  # the control: torch's own word
        gone[key if key != "all" else "labels"].cpu()


def test_units_that_count_each_other_in_a_long_chain() -> None:
    n = DEEPEST + 5
    chain = {f"u{k}": Field("unit", counts=f"u{k - 1}" if k else "c") for k in range(n)}
    batch = base() | {"c": COUNTS} | dict.fromkeys(chain, COUNTS)
    with pytest.raises(SchemaError, match="counts through more than 100 other entries"):
        iter_micro_batches(batch, PadMinConfig(batch_schema=chain))


def test_names_are_shown_short_and_without_escape_sequences() -> None:
    odd = base() | {"\x1b[2J\u202eq": torch.zeros(4)}
    del odd["attention_mask"]
    for batch in (odd, odd | numbered(10_000, lambda: torch.zeros(4))):
        with pytest.raises(PadMinError, match="the batch has no such entry") as caught:
            iter_micro_batches(batch, PadMinConfig())
        assert "\x1b" not in str(caught.value)
        assert "\\x1b[2J\\u202eq" in str(caught.value)
        assert len(str(caught.value)) < 1000
    assert "\x1b" in caught.value.args[0] or "\\x1b" in caught.value.args[0]
    many = base() | numbered(500, lambda: {"\x1bx": torch.zeros(4)})
    with pytest.raises(SchemaError, match="and 480 more") as several:
        iter_micro_batches(many, PadMinConfig(batch_schema={"\x1bx": "row"}))
    assert "\x1b" not in str(several.value)


def test_paths() -> None:
    paths = Paths(["a", "a.b", "a.b.c", "ab", "x.c", "a-b.c"])
    assert paths.below("a") == ["a.b", "a.b.c"]
    assert paths.below("a.b") == ["a.b.c"]
    assert paths.below("x.c") == []
    assert (paths.has_below("a"), paths.has_below("ab"), paths.has_below("a-b")) == (True, False, True)
    assert sorted(paths.ending_in("c")) == ["a-b.c", "a.b.c", "x.c"]
    assert tree.find_path("ab", paths, "x") == "ab"
