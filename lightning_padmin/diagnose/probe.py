"""Passes of a real model, timed in turns: what starting one costs, and on a GPU what memory allows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_padmin.architectures import UsageError, load_model, logits_of, random_batch, token_mean, vocabulary_of
from lightning_padmin.diagnose.problems import DiagnoseError, first_line
from lightning_padmin.planning import Fit, Shape, fit_times, largest_budget
from lightning_padmin.printing import printable

# Full rows: from what a start costs to where the width shows. A GPU takes a thousandth of a CPU's time.
CPU_SHAPES: tuple[Shape, ...] = ((1, 16), (1, 64), (4, 16), (1, 256), (4, 64), (2, 256), (8, 64))
GPU_SHAPES: tuple[Shape, ...] = ((1, 64), (1, 256), (4, 64), (1, 1024), (4, 256), (4, 1024), (16, 256))
_SAFE = 0.9  # of a GPU's memory: allocators leave gaps
_ADAM_BYTES = 8  # two moments in float32 for each trained parameter, which the probe itself does not hold


@dataclass(frozen=True)
class ProbeReport:
    """What was measured of a model.

    Attributes:
        model: as the user named it.
        device: "cpu", or a GPU's name.
        points: (rows, width, median seconds) of each shape.
        repeats: timed passes of each.
        fit: of the medians.
        launch_costs: least and most if any one repeat is left out.
        budget: largest token budget that fits in memory; None where it was not checked or nothing fits.
        memory: what is known of memory, in words.
    """

    model: str
    device: str
    points: tuple[tuple[int, int, float], ...]
    repeats: int
    fit: Fit
    launch_costs: tuple[int, int]
    budget: int | None
    memory: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"launch_cost": self.fit.launch_cost, "attention_width": self.fit.attention_width}


def probe_model(
    name: str,
    *,
    dtype: str = "float32",
    repeats: int = 5,
    widest: int | None = None,
    tell: Callable[[int], None] | None = None,
    shapes: Sequence[Shape] | None = None,
    trust_remote_code: bool = False,
) -> ProbeReport:
    """Times forward and backward passes of a model on full rows of random tokens.

    Args:
        name: folder, hub id, or module:function, as `padmin verify` takes it.
        dtype: of the parameters.
        repeats: timed passes of each shape, in turns, so that a busy moment does not hit one shape alone.
        widest: longest row in tokens; shapes are cut to it.
        tell: called with the number of passes done.
        shapes: (rows, width); None: chosen by the device.
        trust_remote_code: whether Python code that lies beside the model may run.

    Raises:
        DiagnoseError: the model cannot be loaded or run.
    """
    module, loss_of = _loaded(name, dtype, trust_remote_code)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module.to(device)
    shapes = shapes or (GPU_SHAPES if device == "cuda" else CPU_SHAPES)
    if widest is not None:
        shapes = list(dict.fromkeys((rows, min(width, widest)) for rows, width in shapes))
    batches = {shape: _on(device, _batch(module, shape)) for shape in shapes}

    def run(shape: Shape) -> float:
        return _seconds(name, module, loss_of, batches[shape], shape)

    seconds = _in_turns(run, shapes, repeats, tell)
    medians = [float(np.median(each)) for each in seconds.T]
    costs = [fit_times(shapes, np.median(each, axis=0).tolist()).launch_cost for each in _without_one(seconds)]
    budget, memory = None, "Memory was not checked: on a CPU only time is measured."
    if device == "cuda":
        budget, memory = _memory(module, loss_of, widest or max(width for _, width in shapes))
    return ProbeReport(
        name,
        torch.cuda.get_device_name() if device == "cuda" else "cpu",
        tuple((rows, width, each) for (rows, width), each in zip(shapes, medians, strict=True)),
        repeats,
        fit_times(shapes, medians),
        (min(costs), max(costs)),
        budget,
        memory,
    )


def _loaded(name: str, dtype: str, trust_remote_code: bool) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    try:
        module, loss_fn = load_model(name, trust_remote_code)
    except UsageError as error:
        raise DiagnoseError(f"--model {error}") from error
    module.to(getattr(torch, dtype)).train()
    return module, loss_fn or (lambda batch: token_mean(logits_of(module, batch), batch["labels"]))


def _batch(module: nn.Module, shape: Shape) -> dict[str, Tensor]:
    rows, width = shape
    return random_batch([width] * rows, vocabulary_of(module), seed=0)


def _on(device: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.to(device) for key, value in batch.items()}


def _in_turns(
    run: Callable[[Shape], float], shapes: Sequence[Shape], repeats: int, tell: Callable[[int], None] | None
) -> Any:
    """(repeats, shapes) seconds; each shape once before, untimed, and in a new order in every turn."""
    done, order = 0, list(range(len(shapes)))
    generator = random.Random(0)
    seconds = np.zeros((repeats, len(shapes)))
    for turn in range(-1, repeats):
        generator.shuffle(order)
        for index in order:
            taken = run(shapes[index])
            if turn >= 0:
                seconds[turn, index] = taken
            done += 1
            if tell is not None:
                tell(done)
    return seconds


def _without_one(seconds: Any) -> list[Any]:
    """(repeats - 1, shapes) for each repeat left out; all of them if there is only one."""
    return [np.delete(seconds, turn, axis=0) for turn in range(len(seconds))] if len(seconds) > 1 else [seconds]


def _seconds(name: str, module: nn.Module, loss_of: Callable[[Any], Tensor], batch: Any, shape: Shape) -> float:
    _wait()
    started = time.perf_counter()
    try:
        torch.autograd.backward(loss_of(batch))
    except Exception as error:  # whatever the user's model raises
        rows, width = shape
        raise DiagnoseError(
            f"--model {name}: a pass of {rows} x {width} tokens failed ({first_line(error)})"
        ) from error
    _wait()
    taken = time.perf_counter() - started
    module.zero_grad(set_to_none=True)
    return taken


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory(module: nn.Module, loss_of: Callable[[Any], Tensor], widest: int) -> tuple[int | None, str]:
    """The largest budget whose extreme shapes ran within a GPU's memory, with room for Adam; and what that means."""
    total = torch.cuda.get_device_properties(0).total_memory
    reserved = _ADAM_BYTES * sum(p.numel() for p in module.parameters() if p.requires_grad)

    def fits(shape: Shape) -> bool:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            torch.autograd.backward(loss_of(_on("cuda", _batch(module, shape))))
            return bool(torch.cuda.max_memory_allocated() + reserved <= _SAFE * total)
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            module.zero_grad(set_to_none=True)

    budget, tried = largest_budget(fits, widest)
    if budget is None:
        return None, f"Not even 1,024 slots fit in {_SAFE:.0%} of the GPU's {total / 2**30:.0f} GiB."
    shapes = " and ".join(f"{rows:,} x {width:,}" for rows, width in tried)
    return budget, (
        f"{budget:,} slots fit in {_SAFE:.0%} of the GPU's {total / 2**30:.0f} GiB with room for Adam's moments; "
        f"{shapes} were run, and twice as many slots do not fit or were not tried."
    )


def render_probe(report: ProbeReport) -> str:
    """Everything that `padmin diagnose --model M` prints."""
    fit = report.fit
    where = f"{printable(report.model, 200)} on {report.device}"
    lines = [f"{where}: forward and backward, median of {report.repeats} passes in turns"]
    lines += [
        f"  {rows:>3} x {width:<5} {1000 * seconds:10.2f} ms {1e6 * seconds / (rows * width):10.1f} us a slot"
        for rows, width, seconds in report.points
    ]
    lines.append(
        f"Fit: {1000 * fit.start:.3g} ms a pass + {1e6 * fit.slot:.3g} us a slot + {1e9 * fit.wide:.3g} ns a slot and "
        f"position; largest difference {fit.error:.0%}."
    )
    low, high = report.launch_costs
    lines.append(f"launch_cost={fit.launch_cost} ({low} to {high} if any one repeat is left out)")
    if fit.attention_width is not None:
        lines.append(f"attention_width={fit.attention_width:,}: rows of that width take twice as long for each slot")
    if high > 2 * max(low, 1):
        lines.append("That scatters by more than a factor of two: raise --repeats, or measure on a quieter machine.")
    if fit.error > 0.25:
        lines.append(
            "The fit is off by more than a quarter somewhere: raise --repeats, or measure on a quieter machine."
        )
    if report.budget is not None:
        lines.append(f"token_budget={report.budget}")
    return "\n".join([*lines, report.memory])
