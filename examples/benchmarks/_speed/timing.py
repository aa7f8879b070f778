"""Methods take turns, so that a machine that becomes slower meanwhile does so for all of them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel

from .methods import RECTANGLE, Method, MicroBatches
from .update import difference, gradient, policy_update, saved_bytes


@dataclass
class Result:
    """What one method cost.

    Attributes:
        wall: seconds by the clock, by turn.
        cpu: seconds of this process, by turn.
        preparing: seconds by the clock to make the micro-batches, by turn; part of `wall`.
        slots: cells of all padded rectangles of one pass.
        count: micro-batches.
        memory: bytes; on a GPU the peak of the whole update, else what the largest micro-batch keeps for backward.
        gradient_difference: from the batch as it came, relative; None where the batch is another one.
        failure: why it could not be run.
    """

    name: str
    wall: dict[int, float] = field(default_factory=dict)
    cpu: dict[int, float] = field(default_factory=dict)
    preparing: list[float] = field(default_factory=list)
    slots: int = 0
    count: int = 0
    memory: int = 0
    gradient_difference: float | None = None
    failure: str = ""
    launch_costs: tuple[int, ...] = ()

    def seconds(self, clock: str) -> float:
        """The median."""
        return statistics.median(getattr(self, clock).values()) if self.wall else float("nan")

    def speed_against(self, other: Result, clock: str) -> float:
        """How many times as fast as another method: the median over the turns that both were timed in."""
        own, theirs = getattr(self, clock), getattr(other, clock)
        turns = own.keys() & theirs.keys()
        return statistics.median(theirs[turn] / own[turn] for turn in turns) if turns else float("nan")


def measure(
    methods: Sequence[Method], model: PreTrainedModel, reference: PreTrainedModel, repeats: int, slow_repeats: int
) -> list[Result]:
    """Times all methods; the first turn is a warm-up, in which gradients are compared.

    The method that comes first moves on from turn to turn. Slow methods are not warmed up: others were by then.
    An interrupt (control-C) ends the table with the turns it has.
    """
    results = {method.name: Result(method.name, launch_costs=method.launch_costs) for method in methods}
    gradients: dict[str, list[Tensor]] = {}
    schedule = [
        (turn, method)
        for turn in range(repeats + 1)
        for method in (*methods[turn % len(methods) :], *methods[: turn % len(methods)])
        if (0 < turn <= slow_repeats if method.is_slow else True)
    ]
    with _progress(len(schedule), repeats) as tell, suppress(KeyboardInterrupt):
        for turn, method in schedule:
            tell(method.name, turn)
            result = results[method.name]
            if result.failure:
                continue
            try:
                micro_batches = _run(method, model, reference, result, turn)
            except torch.OutOfMemoryError:
                result.failure = "out of memory"
                continue
            if not result.slots:
                _describe(method, model, micro_batches, result)
                gradients[method.name] = [] if not method.is_same_batch else gradient_of(model)
    _compare(methods, results, gradients)
    return list(results.values())


def gradient_of(model: PreTrainedModel) -> list[Tensor]:
    """In host memory, since there is one for each method."""
    return [each.cpu() for each in gradient(model)]


def _run(method: Method, model: PreTrainedModel, reference: PreTrainedModel, result: Result, turn: int) -> MicroBatches:
    cuda = next(model.parameters()).is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    with method.around(model):
        cpu, wall = time.process_time(), time.perf_counter()
        micro_batches = method.prepare()
        prepared = time.perf_counter()
        policy_update(model, reference, micro_batches)
        if cuda:
            torch.cuda.synchronize()
        done = time.perf_counter()
    if turn:
        result.wall[turn], result.cpu[turn] = done - wall, time.process_time() - cpu
        result.preparing.append(prepared - wall)
    if cuda:
        result.memory = torch.cuda.max_memory_allocated()
    return micro_batches


def _describe(method: Method, model: PreTrainedModel, micro_batches: MicroBatches, result: Result) -> None:
    shapes = [micro["input_ids"].numel() for micro, _ in micro_batches]
    result.slots, result.count = sum(shapes), len(shapes)
    if not result.memory:
        with method.around(model):
            result.memory = saved_bytes(model, micro_batches[shapes.index(max(shapes))][0])


def _compare(methods: Sequence[Method], results: dict[str, Result], gradients: dict[str, list[Tensor]]) -> None:
    """All against the batch as it came, padded to its longest rows (or the first method that ran)."""
    order = [method.name for method in methods if gradients.get(method.name)]
    truth = gradients[order[min(1, len(order) - 1)]]
    for name in order:
        if name != RECTANGLE:
            results[name].gradient_difference = difference(gradients[name], truth)


@contextmanager
def _progress(total: int, repeats: int) -> Iterator[object]:
    """A bar on a terminal; a log file gets a line whenever a turn begins."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    terminal, told = sys.stderr.isatty(), set[int]()
    with Progress(*columns, TimeRemainingColumn(), disable=not terminal, transient=True) as bar:
        task = bar.add_task("", total=total)

        def tell(name: str, turn: int) -> None:
            bar.advance(task, 1 if bar.tasks[task].description else 0)
            bar.update(task, description=name)
            if not terminal and turn not in told:
                told.add(turn)
                print(f"turn {turn} of {repeats}" if turn else "warm-up", file=sys.stderr, flush=True)

        yield tell
