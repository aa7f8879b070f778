"""examples/lightning_multi_gpu.py on two gloo processes, which Lightning's own launcher starts."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import support
import torch

from lightning_padmin import MicroBatcher, PadMinConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_multi_gpu.py"
SMALL = ("--accelerator", "cpu", "--steps", "3", "--rows", "10", "--layers", "2", "--width", "64")
ON, OFF = ("--budget", "1024"), ("--budget", "0")
TWO = {name: ("--devices", "2", "--strategy", name) for name in ("ddp", "fsdp2", "fsdp")}

# The example with something changed; Lightning starts the second rank with the same file.
CHANGED = """
import importlib.util
import sys

{before}
spec = importlib.util.spec_from_file_location("example", {example!r})
example = importlib.util.module_from_spec(spec)
sys.modules["example"] = example
spec.loader.exec_module(example)
{after}
example.main()
"""
WITHOUT_TRANSFORMERS = "sys.modules['transformers'] = None"  # only now: torchmetrics looks for it while it is imported
EQUAL_WEIGHTS = """
import numpy as np
from lightning_padmin.microbatching import weights

right = weights.weights
weights.weights = lambda *args: (np.full(len(args[1]), 1 / len(args[1])), right(*args)[1])
"""
# Lightning gives FSDP1 the index of a GPU.
CPU_FOR_FSDP = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel


class CpuFSDP(example.FSDPStrategy):
    def _setup_model(self, module):
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **self.kwargs)


example.FSDPStrategy, example.wrong = CpuFSDP, lambda options: None
"""


@dataclass
class Line:
    slots: int
    waste: float
    micro_batches: int
    idle: float


@dataclass
class Printed:
    text: str

    @property
    def losses(self) -> list[float]:
        (line,) = (line for line in self.text.splitlines() if line.startswith("loss by step:"))
        return [float(value) for value in line.split(":")[1].split()]

    @property
    def cells(self) -> dict[str, list[str]]:
        """Of the table, by what stands in the first column."""
        rows = ([cell.strip() for cell in line.split("│")[1:-1]] for line in self.text.splitlines() if "│" in line)
        return {row[0]: row[1:] for row in rows}

    @property
    def lines(self) -> dict[str, Line]:
        return {
            rank: Line(
                int(slots.replace(",", "")), float(waste.rstrip("%")) / 100, int(micro), float(idle.rstrip("%")) / 100
            )
            for rank, (slots, waste, micro, idle, *_) in self.cells.items()
        }


def run(file: Path, *arguments: str, timeout: float = 120, code: int = 0) -> Printed:
    """All processes end with the timeout, also those that Lightning has started."""
    process = subprocess.Popen(
        [sys.executable, str(file), *arguments],
        env=os.environ | {"COLUMNS": "120", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == code, text[-6000:]
    return Printed(text)


def changed(folder: Path, *arguments: str, before: str = "", after: str = "") -> Printed:
    file = folder / "changed.py"
    file.write_text(CHANGED.format(example=str(EXAMPLE), before=before, after=after))
    return run(file, *arguments)


Run = Callable[..., Printed]


@pytest.fixture(scope="module")
def printed() -> Run:
    """What the example prints; each run is made once."""
    done: dict[tuple[str, ...], Printed] = {}

    def get(*arguments: str) -> Printed:
        if arguments not in done:
            done[arguments] = run(EXAMPLE, *SMALL, *arguments, timeout=60)
        return done[arguments]

    return get


def worst(ours: Printed, theirs: Printed) -> float:
    assert len(ours.losses) == len(theirs.losses) == 3
    return max(abs(a - b) / b for a, b in zip(ours.losses, theirs.losses, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_losses_with_and_without_the_callback_agree(strategy: str, printed: Run) -> None:
    split, whole = (printed(*TWO[strategy], *budget) for budget in (ON, OFF))
    assert worst(split, whole) <= 1e-5
    # A step changes the loss by far more: these are losses of a training.
    first, _, last = whole.losses
    assert first - last > 1e-2
    assert float(split.cells["all"][-1]) == split.losses[-1]


@pytest.mark.slow
def test_strategies_agree(printed: Run) -> None:
    assert worst(printed(*TWO["fsdp2"], *ON), printed(*TWO["ddp"], *OFF)) <= 1e-5


@pytest.mark.slow
def test_fsdp1_on_a_cpu_agrees(printed: Run, tmp_path: Path) -> None:
    found = changed(tmp_path, *SMALL, *TWO["fsdp"], *ON, after=CPU_FOR_FSDP)
    assert worst(found, printed(*TWO["ddp"], *OFF)) <= 1e-5
    assert found.lines["all"].micro_batches > 6


@pytest.mark.slow
def test_equal_weights_would_show(printed: Run, tmp_path: Path) -> None:
    """Negative control: every micro-batch weighs 1/K."""
    wrong = changed(tmp_path, *SMALL, *TWO["ddp"], *ON, before=EQUAL_WEIGHTS)
    assert worst(wrong, printed(*TWO["ddp"], *OFF)) > 1e-4


def test_without_transformers(tmp_path: Path) -> None:
    """One device, and a transformer made of torch's layers."""
    split, whole = (changed(tmp_path, *SMALL, *budget, after=WITHOUT_TRANSFORMERS) for budget in (ON, OFF))
    assert worst(split, whole) <= 1e-5
    assert whole.losses[0] - whole.losses[-1] > 1e-2
    assert split.lines["all"].micro_batches > whole.lines["all"].micro_batches == 3
    assert split.cells["all"][:4] == split.cells["0"][:4]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_table(strategy: str, printed: Run) -> None:
    split, whole = (printed(*TWO[strategy], *budget).lines for budget in (ON, OFF))
    assert list(split) == list(whole) == ["0", "1", "all"]
    for lines in (split, whole):
        assert lines["all"].slots == lines["0"].slots + lines["1"].slots
        assert lines["all"].micro_batches == lines["0"].micro_batches + lines["1"].micro_batches
        assert lines["0"].micro_batches == lines["1"].micro_batches
        assert min(lines["0"].waste, lines["1"].waste) - 1e-3 <= lines["all"].waste
        assert 0 < lines["all"].idle < max(lines["0"].idle, lines["1"].idle)
    assert whole["0"].micro_batches == 3 < split["0"].micro_batches
    assert split["all"].waste < 0.15 < 0.25 < whole["all"].waste
    # Real tokens do not depend on the callback, up to what the printed digits leave open.
    real = [lines["all"].slots * (1 - lines["all"].waste) for lines in (split, whole)]
    assert real[0] == pytest.approx(real[1], rel=2e-3)


# Parts


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lightning_multi_gpu", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickles look for it
    spec.loader.exec_module(module)
    return module


def test_a_batch_that_came_as_it_is_is_counted_as_the_callback_counts(example: ModuleType) -> None:
    batch = support.make_batch(support.LENGTHS, prompt=2, width=30)
    own = MicroBatcher(PadMinConfig(token_budget=24)).prepare(batch).stats
    found = example.as_it_came(batch)
    for name in ("batches", "rows", "real_tokens", "loss_tokens", "slots_before", "longest_row"):
        assert getattr(found, name) == getattr(own, name)
    assert (found.slots, found.micro_batches) == (300, 1)


def test_waiting_is_counted_step_by_step(example: ModuleType) -> None:
    """One rank is slow in the first step, the other in the second."""
    batches = [[[10, 10], [2, 2]], [[4], [6, 6, 6, 6, 6, 6]]]
    table = [[example.as_it_came(support.make_batch(rows)).as_counts() for rows in rank] for rank in batches]
    first, second = example.with_waiting(torch.tensor(table).numpy())
    assert (first.slots, second.slots) == (20 + 4, 4 + 36)
    assert (first.wait_slots, second.wait_slots) == (36 - 4, 20 - 4)
    assert first.idle == 32 / (32 + 24)


def options(**changes: object) -> argparse.Namespace:
    defaults = {"strategy": "ddp", "devices": 2, "accelerator": "cpu", "budget": 1536, "steps": 4, "rows": 16}
    return argparse.Namespace(**(defaults | {"layers": 4, "width": 128} | changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"strategy": "fsdp"}, r"--strategy fsdp \(FSDP1\) needs a GPU.*take --strategy fsdp2"),
        ({"strategy": "single"}, "--strategy single has one; take --strategy ddp"),
        ({"accelerator": "gpu", "devices": 31}, "there are [0-9]+ GPUs; take --accelerator cpu"),
        ({"devices": 0}, "--devices 0: must be at least 1"),
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"budget": -1}, "--budget -1: must be at least 0"),
        ({"rows": 300}, "there are 512 rows; take fewer"),
        ({"width": 60}, "--width 60: must be a multiple of 8"),
    ],
)
def test_what_cannot_be_run_is_an_error_that_says_what_can(
    changes: dict[str, object], told: str, example: ModuleType
) -> None:
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(example.wrong(options(**changes)))


def test_what_can_be_run(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert example.wrong(options()) is None
    assert example.wrong(options(strategy="fsdp2", budget=0)) is None
    for gpus, found in ((0, "cpu"), (2, "gpu")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        given = options(accelerator="auto")
        assert example.wrong(given) is None
        assert given.accelerator == found
    assert example.wrong(options(strategy="fsdp", accelerator="gpu")) is None


@pytest.mark.slow
def test_an_error_is_that_of_the_command_line() -> None:
    text = run(EXAMPLE, "--strategy", "fsdp", "--devices", "2", "--accelerator", "cpu", code=2).text
    assert text.splitlines()[-1].startswith("lightning_multi_gpu.py: error: --strategy fsdp (FSDP1) needs a GPU")
