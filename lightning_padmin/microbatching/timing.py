"""What one more micro-batch costs, found out while training: `launch_cost="measured"`.

Between the moments at which two micro-batches of one batch are gathered lies the whole work of the first: forward and
backward pass and whatever a trainer does around them. Times are fitted with `planning.fit_times`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lightning_padmin.planning import Shape, fit_times

_logger = logging.getLogger(__name__)

UNTIL_THEN = 128
_WARM_UP, _ENOUGH, _MOST = 3, 32, 512  # batches; times; times at which it gives up if their shapes do not tell
_ODD = 0.2  # share of the times that are left out: other programs, a garbage collection
_LEAST_SHAPES = 4
_RANGE = (1, 65_536)


class LaunchMeter:
    """Times micro-batches of the first batches, then fits their launch cost once.

    On an accelerator moments are events of its stream, read when they have passed: nothing waits.

    Args:
        now: gives a moment, in seconds; for tests.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now: Callable[[], Any] = now or _now
        self._batches = 0
        self._last: tuple[Shape, Any] | None = None
        self._pending: deque[tuple[Shape, Any, Any]] = deque()
        self._times: list[tuple[Shape, float]] = []
        self.launch_cost, self.is_done = UNTIL_THEN, False

    def begin(self) -> None:
        """A new batch; what comes after the last micro-batch of the one before is not timed."""
        self._batches += 1
        self._last = None
        self._read()

    def gathered(self, rows: int, width: int) -> None:
        """The next micro-batch is about to run."""
        if self.is_done or self._batches <= _WARM_UP:
            return
        moment = self._now()
        if self._last is not None:
            self._pending.append((*self._last, moment))
        self._last = (rows, width), moment

    def _read(self) -> None:
        while self._pending and _has_passed(self._pending[0][2]):
            shape, start, end = self._pending.popleft()
            self._times.append((shape, _seconds_between(start, end)))
        if not self.is_done and len(self._times) >= _ENOUGH:
            self._fit()

    def _fit(self) -> None:
        shapes, seconds = zip(*self._times, strict=True)
        tells = len(set(shapes)) >= _LEAST_SHAPES and _spread(shapes) >= 2
        if not tells and len(self._times) < _MOST:
            return
        self.is_done = True
        if not tells:
            _logger.warning("launch_cost='measured': micro-batches are all of about one size, so %d stays", UNTIL_THEN)
            return
        self.launch_cost = int(np.clip(_launch_cost(shapes, seconds), *_RANGE))
        _logger.info("launch_cost='measured': one more micro-batch costs %d slots", self.launch_cost)


def _launch_cost(shapes: Sequence[Shape], seconds: Sequence[float]) -> int:
    """That of a fit without the times that are furthest from a first fit."""
    first = fit_times(shapes, seconds)
    rows, widths = np.array(shapes, float).T
    expected = first.start + rows * widths * (first.slot + first.wide * widths)
    far = np.abs(np.array(seconds) / expected - 1)
    kept = np.argsort(far, kind="stable")[: len(far) - int(_ODD * len(far))]
    if len({shapes[k] for k in kept}) < _LEAST_SHAPES - 1:
        return first.launch_cost
    return fit_times([shapes[k] for k in kept], [seconds[k] for k in kept]).launch_cost


def _spread(shapes: Sequence[Shape]) -> float:
    slots = [rows * width for rows, width in shapes]
    return max(slots) / min(slots)


def _now() -> Any:
    if not torch.accelerator.is_available():
        return time.perf_counter()
    event = torch.Event(enable_timing=True)
    event.record()
    return event


def _has_passed(moment: Any) -> bool:
    return isinstance(moment, float) or bool(moment.query())


def _seconds_between(start: Any, end: Any) -> float:
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1000)
