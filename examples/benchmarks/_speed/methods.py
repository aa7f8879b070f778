"""Ways to run one and the same batch: each makes micro-batches and the weights of their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from transformers import PreTrainedModel

from lightning_padmin import PadMinConfig, compact
from lightning_padmin.architectures.findings import with_scan_chunk
from lightning_padmin.microbatching.batcher import MicroBatcher

from . import packing
from .workload import Batch, Workload, loss_tokens

MicroBatches: TypeAlias = list[tuple[Batch, float]]
RECTANGLE, DEFAULT, ROLL, GREEDY = "perfect rectangle", "our plan", "roll + trim", "greedy budget"


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: what it is called.
        prepare: makes the micro-batches; its time counts.
        is_slow: run fewer times.
        around: context in which the model runs.
        is_same_batch: gradients are to be those of the padded batch.
        launch_costs: those that make this very plan, where it is one of ours.
    """

    name: str
    prepare: Callable[[], MicroBatches]
    is_slow: bool = False
    around: Callable[[PreTrainedModel], AbstractContextManager[None]] = lambda model: nullcontext()
    is_same_batch: bool = True
    launch_costs: tuple[int, ...] = ()


def methods(
    workload: Workload, model: PreTrainedModel, leak: float, launch_cost: int, sweep: Sequence[int]
) -> list[Method]:
    """All of them, the padded ones first; packing only where nothing leaks."""
    batch, widest = workload.batch(), workload.batch(*workload.configured)
    size, budget = workload.micro_rows, workload.budget
    even = workload.rectangle()
    rectangle, rows = even.batch(), len(even.lengths)
    launches = -(-rows // max(1, budget // int(even.totals[0])))

    def planned(cost: int = launch_cost, **options: object) -> Callable[[], MicroBatches]:
        config = with_scan_chunk(PadMinConfig(token_budget=budget, launch_cost=cost, **options), model)
        return lambda: [(micro, weight) for micro, weight in MicroBatcher(config).prepare(batch)]

    return [
        Method("configured maximum", lambda: by_rows(widest, size), is_slow=True),
        Method("generation-wide padding", lambda: by_rows(batch, size), is_slow=True),
        Method("trim per micro-batch", lambda: [(trim(part), weight) for part, weight in by_rows(batch, size)]),
        Method(ROLL, lambda: [(compact(part).batch, weight) for part, weight in by_rows(batch, size)]),
        Method(GREEDY, planned(method="greedy")),
        *_ours(workload, planned, launch_cost, sweep),
        Method("each row alone", planned(max_rows=1)),
        *(_packs(workload, model) if leak <= packing.LEAKS else ()),
        Method(RECTANGLE, lambda: by_rows(rectangle, -(-rows // launches)), is_same_batch=False),
    ]


def _ours(
    workload: Workload, planned: Callable[[int], Callable[[], MicroBatches]], launch_cost: int, sweep: Sequence[int]
) -> list[Method]:
    """Our plan by launch cost; costs that cut alike are one row, or noise would choose among equals."""
    makers, costs = {}, {}
    for cost in dict.fromkeys((launch_cost, *sweep)):
        make = planned(cost)
        cut = tuple(tuple(part["input_ids"].shape) for part, _ in make())
        makers.setdefault(cut, make)
        costs.setdefault(cut, []).append(cost)
    found = []
    for cut, make in makers.items():
        own = tuple(sorted(costs[cut]))
        name = DEFAULT if launch_cost in own else f"{DEFAULT}, launch cost {span(own)}"
        found.append(Method(name, make, launch_costs=own))
    return sorted(found, key=lambda method: method.launch_costs)


def span(costs: Sequence[int]) -> str:
    """From the least to the greatest."""
    return str(costs[0]) if len(costs) == 1 else f"{costs[0]}-{costs[-1]}"


def _packs(workload: Workload, model: PreTrainedModel) -> list[Method]:
    """Packing, for models whose only mixer is attention."""

    def prepare() -> MicroBatches:
        return weighted(packing.packed(workload))

    return [
        Method("packed, block-diagonal mask", prepare, is_slow=True),
        Method(f"packed, {packing.kernel_name(model)}", prepare, around=packing.attention_by_document),
    ]


def by_rows(batch: Batch, rows: int) -> MicroBatches:
    """So many rows at a time, in the order in which they come."""
    starts = range(0, len(batch["labels"]), rows)
    return weighted([{name: tensor[start : start + rows] for name, tensor in batch.items()} for start in starts])


def weighted(parts: list[Batch]) -> MicroBatches:
    """With the share of the loss tokens that each part has: the loss is a mean over all of them."""
    counts = [int(loss_tokens(part).sum()) for part in parts]
    return [(part, count / sum(counts)) for part, count in zip(parts, counts, strict=True)]


def trim(part: Batch) -> Batch:
    """Without the columns that are padding in every row."""
    columns = part["attention_mask"].any(dim=0)
    return {name: tensor[:, columns] if tensor.ndim > 1 else tensor for name, tensor in part.items()}
