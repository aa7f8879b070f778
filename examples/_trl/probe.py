"""What is kept of a training, with the mixin or without: completions, rewards, seconds, slots."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from transformers import TrainerCallback


class Seconds(NamedTuple):
    """By the clock, and of all processors, which other programs disturb less."""

    clock: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        """Since some moment in the past."""
        return cls(time.perf_counter(), time.process_time())

    def until(self, end: Seconds) -> Seconds:
        """What passed in between."""
        return Seconds(end.clock - self.clock, end.cpu - self.cpu)

    def plus(self, other: Seconds) -> Seconds:
        """The sum, each by itself."""
        return Seconds(self.clock + other.clock, self.cpu + other.cpu)


@dataclass
class Record:
    """One training, step by step. `steps`: what policy updates took, or whole steps where nothing is generated."""

    name: str
    completions: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    steps: list[Seconds] = field(default_factory=list)
    seconds: float = 0.0
    slots: int = 0
    real_tokens: int = 0

    def values(self, name: str) -> list[float]:
        """A logged metric at each step."""
        return [logs[name] for logs in self.logs]

    def typical(self) -> Seconds:
        """Medians over all steps but the first, which warms up, and in which the mixin checks the loss."""
        taken = self.steps[1:] or self.steps
        return Seconds(statistics.median(s.clock for s in taken), statistics.median(s.cpu for s in taken))


class Probe:
    """Goes before an online trainer of TRL, and before the mixin: counts slots as stock has them, and takes times."""

    record: Record
    _generation = _spent = Seconds(0, 0)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Stock; forward and backward passes are timed, without generation and rewards."""
        began, before = Seconds.now(), self._generation
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        self._spent = self._spent.plus(self._generation.until(before)).plus(began.until(Seconds.now()))
        if self.accelerator.sync_gradients:  # type: ignore[attr-defined]
            self.record.steps.append(self._spent)
            self._spent = Seconds(0, 0)
        return loss

    def _generate_and_score_completions(self, inputs: Any) -> Mapping[str, Any]:
        began = Seconds.now()
        output: Mapping[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        self._generation = self._generation.plus(began.until(Seconds.now()))
        for name in ("prompt_mask", "completion_mask"):
            self.record.slots += output[name].numel()
            self.record.real_tokens += int(output[name].sum())
        pairs = zip(output["completion_ids"], output["completion_mask"], strict=True)
        self.record.completions.append(tuple(tuple(ids[mask.bool()].tolist()) for ids, mask in pairs))
        return output


class Watch(TrainerCallback):
    """Keeps what is logged at each step, and passes it on."""

    def __init__(self, record: Record, tell: Callable[[Record], None]) -> None:
        self._record, self._tell = record, tell

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """One entry per optimizer step; the summary at the end is none."""
        if "loss" in logs:
            self._record.logs.append(dict(logs))
            self._tell(self._record)


class Clock(TrainerCallback):
    """Times whole steps, for trainers that generate nothing."""

    def __init__(self, record: Record) -> None:
        self._record, self._began = record, Seconds.now()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first micro-batch of a step comes."""
        self._began = Seconds.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimizer has stepped."""
        self._record.steps.append(self._began.until(Seconds.now()))


def steps_alike(one: Record, other: Record) -> int:
    """How many steps from the first one on had the same completions."""
    count = 0
    for mine, theirs in zip(one.completions, other.completions, strict=True):
        if mine != theirs:
            break
        count += 1
    return count


def worst_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest |a - b| / max(1, |a|)."""
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(theirs, ours, strict=True))
