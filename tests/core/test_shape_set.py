"""A bound on the shapes of micro-batches, against exhaustive search, and over a whole run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks

from lightning_padmin.config.options import PadMinConfig
from lightning_padmin.errors import ConfigError, PadMinWarning, PlanError
from lightning_padmin.microbatching import MicroBatcher, iter_micro_batches
from lightning_padmin.planning.plan import Plan
from lightning_padmin.planning.planner import plan_quietly
from lightning_padmin.planning.search import Limits
from lightning_padmin.planning.shape_buckets import ShapeSet, choose_shapes
from lightning_padmin.planning.spec import PlanSpec


def planned(
    lengths: Any,
    shapes: ShapeSet | None,
    budget: int = 10_000,
    *,
    riders: Any = None,
    launch_cost: int = 5,
    **options: Any,
) -> Plan:
    spec = PlanSpec(token_budget=budget, launch_cost=launch_cost, **options)
    return plan_quietly(lengths, spec, riders, shapes)


def shapes_of(plan: Plan) -> list[tuple[int, int]]:
    return [(len(rows), int(width[0])) for rows, width in zip(plan.groups, plan.widths, strict=True)]


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    for smaller in partitions(rows[1:]):
        yield [[rows[0]], *smaller]
        for i, group in enumerate(smaller):
            yield [*smaller[:i], [rows[0], *group], *smaller[i + 1 :]]


def least_cost(lengths: Sequence[int], shapes: ShapeSet, launch_cost: int, riders: Sequence[bool]) -> float:
    """Of all partitions whose groups have one of the shapes, and a row that is no rider."""
    best = float("inf")
    for groups in partitions(list(range(len(lengths)))):
        cost = 0.0
        for group in groups:
            longest = max(lengths[row] for row in group)
            fitting = [width for rows, width in shapes.shapes if rows == len(group) and width >= longest]
            if any(riders) and all(riders[row] for row in group):
                fitting = []
            cost += len(group) * min(fitting, default=float("inf")) + launch_cost
        best = min(best, cost)
    return best


sets = st.dictionaries(st.integers(1, 24), st.integers(0, 3), max_size=4).map(lambda powers: ShapeSet({25: 0} | powers))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 25), min_size=1, max_size=7), sets, st.integers(0, 30))
def test_no_partition_into_these_shapes_is_better(lengths: list[int], shapes: ShapeSet, launch_cost: int) -> None:
    plan = planned(lengths, shapes, launch_cost=launch_cost)
    assert sorted(itertools.chain(*(rows.tolist() for rows in plan.groups))) == list(range(len(lengths)))
    assert set(shapes_of(plan)) <= set(shapes.shapes)
    assert all(lengths[row] <= width[0] for rows, width in zip(plan.groups, plan.widths, strict=True) for row in rows)
    assert plan.cost == least_cost(lengths, shapes, launch_cost, [False] * len(lengths))
    assert plan.widths[:, 0].tolist() == sorted(plan.widths[:, 0].tolist(), reverse=True)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(1, 25), st.booleans()), min_size=2, max_size=7), sets)
def test_every_group_has_a_row_with_loss(rows: list[tuple[int, bool]], shapes: ShapeSet) -> None:
    lengths, riders = [row[0] for row in rows], [row[1] for row in rows]
    plan = planned(lengths, shapes, riders=np.array(riders))
    if all(riders):
        return
    assert all(not all(riders[row] for row in group) for group in plan.groups)
    if plan.shapes is None:  # nothing in the set would do
        assert "shape_buckets does not bound" in plan.notice
        return
    assert set(shapes_of(plan)) <= set(shapes.shapes)


def test_where_riders_leave_no_choice_it_is_told() -> None:
    """Three rows, two of them without loss, must be one group, and no shape has three rows."""
    plan = planned([10, 20, 20], ShapeSet({25: 1}), riders=np.array([False, True, True]))
    assert shapes_of(plan) == [(3, 20)]
    assert "rows without loss leave no choice of shapes" in plan.notice


def test_rows_without_loss_keep_to_the_shapes_too() -> None:
    """Three of nine rows are without loss, and the longest; a run of them changes one for a row with loss."""
    seen: set[tuple[int, int]] = set()
    missed = 0
    shapes = choose_shapes(np.arange(10, 101, 10), 12, Limits(200, 9, 16), with_riders=True)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(5, 100, 9)
        riders = np.isin(np.arange(9), np.argsort(-lengths)[: 1 + seed % 3])
        plan = planned(lengths, shapes, 200, riders=riders, launch_cost=16)
        missed += bool(plan.notice)
        assert all(not riders[group].all() for group in plan.groups)
        assert sorted(itertools.chain(*(rows.tolist() for rows in plan.groups))) == list(range(9))
        for group, width in zip(plan.groups, plan.widths[:, 0], strict=True):
            assert lengths[group].max() <= width
        seen |= set(shapes_of(plan)) if not plan.notice else set()
    assert seen <= set(shapes.shapes)
    assert missed <= 12, missed


def test_more_micro_batches_are_halves() -> None:
    shapes = ShapeSet({32: 3, 16: 3})
    plan = planned([30] * 8, shapes, launch_cost=100)
    assert shapes_of(plan) == [(8, 32)]
    assert sorted(shapes_of(plan.at_least(3))) == [(2, 32), (2, 32), (4, 32)]
    assert set(shapes_of(plan.at_least(99))) == {(1, 32)}
    # The half that is short enough goes to the narrower width.
    assert shapes_of(planned([30] * 4 + [9] * 4, shapes, launch_cost=10_000).at_least(2)) == [(4, 32), (4, 16)]


@pytest.mark.parametrize("count", [1, 2, 7, 8, 12, 24, 64])
def test_a_set_has_no_more_shapes_than_asked_for_and_a_place_for_every_row(count: int) -> None:
    rng = np.random.default_rng(count)
    lengths = np.maximum(1, (rng.lognormal(5, 0.8, 300)).astype(int))
    shapes = choose_shapes(lengths, count, Limits(4096, 16, 128), multiple=8)
    assert len(shapes) == len(shapes.shapes) <= count
    assert all(width % 8 == 0 and rows <= 16 for rows, width in shapes.shapes)
    assert all(rows == 1 or rows * width <= 4096 for rows, width in shapes.shapes)
    assert lengths.max() <= shapes.widest
    seen = {shape for k in range(50) for shape in shapes_of(planned(rng.choice(lengths, 40), shapes, 4096))}
    assert seen <= set(shapes.shapes)


def test_more_shapes_cost_less() -> None:
    lengths = np.random.default_rng(0).integers(20, 600, 128)
    costs = [
        planned(lengths, choose_shapes(lengths, n, Limits(4096, 4096, 128)), 4096).cost for n in (4, 8, 16, 32, 64)
    ]
    free = planned(lengths, None, 4096, launch_cost=128).cost
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 1.05 * free < 1.1 * free < costs[0]


# --- Over many batches. ---


def batch_of(lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, 50, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def some(seed: int, rows: int = 24, most: int = 300) -> list[int]:
    return np.random.default_rng(seed).integers(5, most, rows).tolist()


def config(**options: Any) -> PadMinConfig:
    return PadMinConfig(**({"token_budget": 1024, "shape_buckets": 12, "pad_token_id": 0, "launch_cost": 32} | options))


def run(batcher: MicroBatcher, batches: int) -> set[tuple[int, ...]]:
    return {
        tuple(micro.batch["input_ids"].shape) for k in range(batches) for micro in batcher.prepare(batch_of(some(k)))
    }


def test_shapes_are_bounded_over_a_run() -> None:
    bounded = run(MicroBatcher(config()), 40)
    assert len(bounded) <= 12
    assert len(run(MicroBatcher(config(shape_buckets=None)), 40)) > 100  # the control


def test_filler_is_padding_and_weights_are_as_ever() -> None:
    batch = batch_of(some(1))
    batches = MicroBatcher(config()).prepare(batch)
    assert sum(weight for _, weight in batches) == pytest.approx(1)
    for micro in batches:
        for i, row in enumerate(micro.rows):
            n = int(batch["attention_mask"][row].sum())
            assert torch.equal(micro.batch["input_ids"][i, :n], batch["input_ids"][row, :n])
            assert not micro.batch["attention_mask"][i, n:].any()
            assert (micro.batch["labels"][i, n:] == -100).all()
    assert batches.stats.slots == sum(micro.batch["input_ids"].numel() for micro in batches)


def test_a_row_longer_than_all_shapes_runs_alone_and_is_told_of() -> None:
    batcher = MicroBatcher(config())
    batcher.prepare(batch_of([40, 30, 20]))
    with pytest.warns(PadMinWarning, match=r"a row of 200 positions is longer than the widest of the \d+ shapes"):
        batches = batcher.prepare(batch_of([200, 30, 20]))
    assert tuple(batches[0].batch["input_ids"].shape) == (1, 200)


def test_ranks_run_equally_many_and_keep_to_their_shapes() -> None:
    """Each rank has a set of its own; dummies have one of its shapes too."""
    shapes: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}

    ranks = Ranks(2)

    def work(rank: int) -> list[int]:
        batcher = MicroBatcher(config(), exchange=ranks.exchange_of(rank))
        counts = []
        for k in range(8):
            batches = batcher.prepare(batch_of(some(100 * rank + k, rows=30 if rank else 6)))
            shapes[rank] |= {tuple(micro.batch["input_ids"].shape) for micro in batches}
            counts.append(len(batches))
        return counts

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert first == second
    assert max(map(len, shapes.values())) <= 12


def test_a_compiler_of_fixed_shapes_compiles_no_more_often() -> None:
    compiled: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(tuple(next(each.shape for each in inputs if each.ndim == 2)))
        return graph.forward

    table = torch.nn.Embedding(50, 4)
    torch._dynamo.reset()  # type: ignore[no-untyped-call]  # of what other tests have compiled
    with torch._dynamo.config.patch(recompile_limit=64):
        model = torch.compile(lambda ids: table(ids).cumsum(1).sum(), backend=backend, dynamic=False, fullgraph=True)
        batcher = MicroBatcher(config())
        ran = set()
        for k in range(12):
            for micro in batcher.prepare(batch_of(some(k))):
                model(micro.batch["input_ids"]).backward()
                ran.add(tuple(micro.batch["input_ids"].shape))
    assert len(compiled) == len(ran) <= 12


# --- What is refused. ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape_buckets": 0}, "shape_buckets=0"),
        ({"shape_buckets": "many"}, "shape_buckets='many'"),
        ({"shape_buckets": 8, "mode": "joint"}, "shape_buckets=8 needs mode='split'"),
        ({"shape_buckets": 8, "method": "greedy"}, "shape_buckets=8 needs method='optimal'"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PadMinConfig(**options)


def test_batches_that_cannot_be_widened() -> None:
    with pytest.raises(PlanError, match=r"shape_buckets=12: .*set pad_token_id"):
        MicroBatcher(config(pad_token_id=None)).prepare(batch_of([5, 3]))


def test_one_batch_is_not_a_run() -> None:
    with pytest.raises(ConfigError, match="keep one MicroBatcher"):
        iter_micro_batches(batch_of([5, 3]), config())
