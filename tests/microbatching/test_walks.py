"""A batch is walked through once for each `prepare`, however many micro-batches it becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import make_batch

from lightning_padmin import MicroBatcher, PadMinConfig, compact
from lightning_padmin.batch import tree
from lightning_padmin.microbatching import PackStyle

LENGTHS = (9, 2, 7, 3, 5)
ONE_BY_ONE = PadMinConfig(max_rows=1, launch_cost=0)


class Open:
    """A policy that packs."""

    style, verdict, changes = PackStyle(), True, 0

    def __call__(self, lengths: Any) -> bool:
        return True


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Containers whose children were looked up, by walk."""
    found: list[int] = []
    flatten, children = tree.flatten, tree._children

    def counted(*arguments: Any, **options: Any) -> Any:
        found.append(0)
        return flatten(*arguments, **options)

    def looked_up(*arguments: Any) -> Any:
        found.append(found.pop() + 1 if found else 1)
        return children(*arguments)

    monkeypatch.setattr(tree, "flatten", counted)
    monkeypatch.setattr(tree, "_children", looked_up)
    return found


def nested(seed: int = 0) -> dict[str, Any]:
    inputs = make_batch(LENGTHS, seed=seed, left=[1, 0, 2, 0, 0], prompt=2)
    return {"inputs": inputs, "extra": {"names": [f"row {k}" for k in range(len(LENGTHS))]}}


def prepared(batch: Any) -> int:
    return len(list(MicroBatcher(ONE_BY_ONE).prepare(batch)))


def packed(batch: Any) -> int:
    config = PadMinConfig(layout="pack", max_rows=1, launch_cost=0)
    return len(list(MicroBatcher(config, gate=Open()).prepare(batch)))


@pytest.mark.parametrize("prepare", [prepared, packed])
def test_a_batch_is_walked_through_once(walks: list[int], prepare: Callable[[Any], int]) -> None:
    assert prepare(nested()) == len(LENGTHS)
    assert len(walks) == 1
    assert walks[0] < 20  # each entry once


def test_a_window_of_n_batches_n_times(walks: list[int]) -> None:
    batches = [nested(seed) for seed in range(3)]
    assert len(list(MicroBatcher(ONE_BY_ONE).prepare_window(batches))) == 3 * len(LENGTHS)
    assert len(walks) == 3


def test_compact_once(walks: list[int]) -> None:
    batch = nested()
    assert compact(batch).batch["inputs"]["labels"] is not batch["inputs"]["labels"]
    assert len(walks) == 1


def test_a_second_walk_would_be_counted(walks: list[int]) -> None:
    """The control: who maps over a batch walks through it."""
    batch = nested()
    prepared(batch)
    tree.map_leaves(batch, lambda path, leaf: leaf)
    assert len(walks) == 2


def test_what_is_built_again_is_of_the_same_types_and_the_original_stays() -> None:
    batch = nested()
    leaves, spec = tree.flatten(batch, ["extra.names.0"])
    assert list(leaves)[-2:] == ["extra.names.3", "extra.names.4"]
    other = spec.unflatten({path: path for path in leaves})
    assert other["extra"] == {"names": [f"extra.names.{k}" for k in range(len(LENGTHS))]}
    assert isinstance(batch["inputs"]["labels"], torch.Tensor)
    again = spec.unflatten(leaves)
    assert again["inputs"]["labels"] is batch["inputs"]["labels"]
    assert again["inputs"] is not batch["inputs"]


def test_a_batch_that_is_one_micro_batch_as_it_came_is_passed_on() -> None:
    batch = make_batch([4, 4])
    (micro,) = MicroBatcher(PadMinConfig()).prepare(batch)
    assert micro.batch is batch
    assert np.array_equal(micro.rows, [0, 1])
