"""Stock and ours take turns; their gradients are compared after each."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from accelerate.state import AcceleratorState, GradientState

from .accelerate_run import AccelerateRun
from .ledger import CHECK, LOSS, NOT_OURS, PAUSED, Ledger
from .lightning_run import LightningRun
from .memory import peak
from .parts import PARTS, TARGETS
from .runs import Setting, worst
from .trl_run import TrlRun

RUNS: dict[str, Any] = {"lightning": LightningRun, "trl": TrlRun, "accelerate": AccelerateRun}
BEYOND = "TRL's loss, beyond stock's"
_APART = (PAUSED, CHECK)
Steps = Sequence[dict[str, float]]


def measure(name: str, setting: Setting, repeats: int, clock: str) -> dict[str, Any]:
    """One framework: the first turn of each is not timed; who begins changes from turn to turn."""
    forget_accelerate()
    ledger = Ledger(clock)
    with ledger.watching(TARGETS[name]):
        stock, ours = RUNS[name](setting, ledger, False), RUNS[name](setting, ledger, True)
        gaps, check, turns = [], 0.0, []
        for turn in range(repeats + 1):
            began, taken = time.perf_counter(), {}
            for run in (stock, ours) if turn % 2 else (ours, stock):
                run.turn()
                taken[run is ours] = ledger.take()
            check += sum(step.get(CHECK, 0.0) for step in taken[True])
            gaps.append(worst(ours.watch.take(), stock.watch.take()))
            if turn:
                turns.append(compared(taken[False], taken[True]))
            what = f"turn {turn} of {repeats}" if turn else "warm-up"
            print(f"{name}: {what}, {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        sizes = {"stock": asdict(stock.sizes()), "ours": asdict(ours.sizes())}
        memory = None if setting.is_control else peaks(stock, ours)
    middle = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    parts = {key: middle.pop(key) for key in (*PARTS, BEYOND)}
    return {
        "framework": name,
        **middle,
        "parts": parts,
        "check_seconds": check,
        "sizes": sizes,
        "memory": memory,
        "gradient_differences": gaps,
        "largest_gradient_difference": max(gaps),
        "turns": [[turn["stock_seconds"], turn["our_seconds"]] for turn in turns],
    }


def forget_accelerate() -> None:
    """What Accelerate keeps for the whole process: how many batches the framework before has accumulated, say."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def compared(stock: Steps, ours: Steps) -> dict[str, float]:
    """One turn: means over its steps, in seconds."""
    seconds = [sum(_seconds(step) for step in steps) / len(steps) for steps in (stock, ours)]
    parts = {part: sum(step.get(part, 0.0) for step in ours) / len(ours) for part in PARTS}
    unknown = {part for step in ours for part in step} - {*PARTS, *NOT_OURS}
    assert not unknown, f"parts without a column: {unknown}"
    loss = [sum(step.get(LOSS, 0.0) for step in steps) / len(steps) for steps in (stock, ours)]
    parts[BEYOND] = max(0.0, loss[1] - loss[0])
    return {
        "stock_seconds": seconds[0],
        "our_seconds": seconds[1],
        "times_as_fast": seconds[0] / seconds[1],
        "overhead_seconds": sum(parts.values()),
        "overhead": sum(parts.values()) / seconds[1],
        **parts,
    }


def _seconds(step: dict[str, float]) -> float:
    return sum(spent for part, spent in step.items() if part not in _APART)


def peaks(stock: Any, ours: Any) -> dict[str, Any] | None:
    """Ours with its batches, then stock with batches that are all as large as our largest micro-batch."""
    shape, same = ours.largest(stock)
    if same is None:
        return None
    found = {}
    for who, run in (("ours", ours), ("stock", same)):
        run.watch.is_on = False
        found[who] = peak(run.turn, run.model)
        gc.collect()
    return {**found, "ratio": found["ours"] / found["stock"], "largest_micro_batch": shape}
