"""Optimizer steps as a loader would make them, drawn from the lengths, and ratios of sums over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.diagnose.problems import DiagnoseError
from lightning_padmin.diagnose.reading import Lengths

Ints: TypeAlias = NDArray[np.int64]
Batching: TypeAlias = Literal["random", "sorted", "file", "fixed", "generation"]
BATCHINGS: tuple[Batching, ...] = ("random", "sorted", "file", "fixed", "generation")
_ROWS_PLANNED = 200_000  # of all sampled steps together: some seconds for each budget
_LEAST_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the user trains today, and what is to be tried.

    Attributes:
        batch_size: rows of a batch on one rank.
        accumulate: batches per optimizer step.
        world_size: ranks.
        batching: "random" (shuffled, padded to the longest of the batch), "sorted" (batches of neighbours in length),
            "file" (in the file's order), "fixed" (padded to `max_length`), or "generation" (prompts padded to the
            longest prompt of a rank's whole step, completions to the longest completion).
        max_length: rows are cut to it; needed for "fixed".
        budgets: token budgets to try, in slots; None: chosen by the lengths.
        max_rows: most rows of a micro-batch.
        launch_cost: what one more micro-batch costs, in slots.
        pad_to_multiple_of: widths are rounded up to a multiple of this.
        steps: most optimizer steps to look at.
        seed: of the sample.
    """

    batch_size: int = 8
    accumulate: int = 1
    world_size: int = 1
    batching: Batching = "random"
    max_length: int | None = None
    budgets: tuple[int, ...] | None = None
    max_rows: int | None = None
    launch_cost: int = 128
    pad_to_multiple_of: int = 1
    steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate", "world_size", "pad_to_multiple_of", "steps", "max_length", "max_rows"):
            _check(name, getattr(self, name), 1)
        _check("launch_cost", self.launch_cost, 0)
        for budget in self.budgets or ():
            _check("budgets", budget, 1)
        if self.batching not in BATCHINGS:
            raise DiagnoseError(f"--batching {self.batching}: is unknown, use one of {', '.join(BATCHINGS)}")
        if self.batching == "fixed" and self.max_length is None:
            raise DiagnoseError("--batching fixed needs --max-length, the width that batches are padded to")

    @property
    def rows_per_rank(self) -> int:
        """Rows of one rank's optimizer step."""
        return self.batch_size * self.accumulate

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step on all ranks."""
        return self.rows_per_rank * self.world_size


def _check(name: str, value: Any, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise DiagnoseError(f"--{name.replace('_', '-')} {value}: expected an integer of at least {least}")


@dataclass(frozen=True)
class Ratio:
    """A ratio of sums over steps.

    Attributes:
        value: the ratio.
        error: its standard error by the scatter of the steps; None if there is a single step.
    """

    value: float
    error: float | None = None


def ratio(above: NDArray[Any], below: NDArray[Any]) -> Ratio:
    """Sum of `above` over sum of `below`, both (S,), one value per step.

    Sums first: a mean of the steps' ratios would weight short steps like long ones.
    """
    total = float(below.sum())
    value = float(above.sum()) / total
    count = len(below)
    if count < 2:
        return Ratio(value)
    rest = above - value * below
    return Ratio(value, float(np.sqrt((rest**2).sum() / (count - 1) * count)) / total)


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows of some optimizer steps.

    Attributes:
        lengths: (S, W, A, B, parts) int64: steps, ranks, batches of a step, rows of a batch, prompt and completion.
        setup: with batch size, accumulation and ranks lowered to the rows there are.
        is_whole: every full step of one pass over the data was taken.
    """

    lengths: Ints
    setup: Setup
    is_whole: bool


def cut_to(lengths: Lengths, max_length: int | None) -> tuple[Lengths, int]:
    """Rows cut to `max_length` tokens, from the end, and how many were longer."""
    table = lengths.table
    if max_length is None:
        return lengths, 0
    longer = int((lengths.total > max_length).sum())
    if not longer:
        return lengths, 0
    first = np.minimum(table[:, :1], max_length)
    rest = np.minimum(table[:, 1:], max_length - first)
    return replace(lengths, table=np.concatenate([first, rest], axis=1)), longer


def draw_steps(lengths: Lengths, setup: Setup) -> Sample:
    """Draws steps without replacement, as one pass over the data gives them; the rest of the data is not looked at.

    Args:
        lengths: (n, parts) of the whole data.
        setup: how batches are made. Where the data has less rows than a step, the sample is one smaller step.
    """
    table = lengths.table
    setup = _fitted(setup, len(table))
    available = len(table) // setup.rows_per_step
    count = min(available, setup.steps, max(_LEAST_STEPS, _ROWS_PLANNED // setup.rows_per_step))
    rng = np.random.default_rng(setup.seed)
    shape = (count, setup.world_size, setup.accumulate, setup.batch_size)
    if setup.batching == "sorted":
        batches = rng.choice(len(table) // setup.batch_size, count * setup.world_size * setup.accumulate, replace=False)
        places = batches[:, None] * setup.batch_size + np.arange(setup.batch_size)
        rows = np.argsort(lengths.total, kind="stable")[places]
    elif setup.batching == "file":
        starts = np.sort(rng.choice(available, count, replace=False)) * setup.rows_per_step
        # Ranks take turns, batch by batch.
        rows = (starts[:, None] + np.arange(setup.rows_per_step)).reshape(
            count, setup.accumulate, setup.world_size, setup.batch_size
        )
        rows = rows.swapaxes(1, 2)
    else:
        rows = rng.choice(len(table), count * setup.rows_per_step, replace=False)
    picked = table[rows.reshape(-1)].astype(np.int64).reshape(*shape, table.shape[1])
    return Sample(picked, setup, count == available)


def _fitted(setup: Setup, rows: int) -> Setup:
    """As many ranks, batches and rows as there is data for."""
    batch_size = min(setup.batch_size, rows)
    accumulate = min(setup.accumulate, rows // batch_size)
    world_size = min(setup.world_size, rows // (batch_size * accumulate))
    return replace(setup, batch_size=batch_size, accumulate=accumulate, world_size=world_size)
