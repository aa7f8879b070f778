"""The callback's own metrics in loggers and monitors, and its counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support import (
    BUDGET,
    LENGTHS,
    Memory,
    Module,
    Row,
    fit,
    fitted,
    make_batch,
    mixed_batches,
    padmin,
    without_audits,
)

# Counted by hand. Ten rows of LENGTHS, 24 wide: micro-batches of 24, 20, 2 x 12, 4 x 6 and 2 x 3 slots.
LARGE = {"real": 97, "loss": 87, "before": 240, "slots": 98, "micro": 5, "longest": 24}
# Three rows of 8, 4 and 4 tokens, 10 wide: micro-batches of 8 and 2 x 4 slots.
SMALL = {"real": 16, "loss": 13, "before": 30, "slots": 16, "micro": 2, "longest": 8}
BATCHES = [LARGE, SMALL, LARGE, SMALL, LARGE]


def expected(first: int, last: int, prefix: str = "padmin/") -> Row:
    """Of batches first ... last."""
    some = BATCHES[first : last + 1]
    total = {name: sum(batch[name] for batch in some) for name in LARGE}
    values = {
        "waste": 1 - total["real"] / total["slots"],
        "waste_before": 1 - total["real"] / total["before"],
        "real_tokens": total["real"],
        "loss_tokens": total["loss"],
        "slots": total["slots"],
        "micro_batches": total["micro"],
        "longest_row": max(batch["longest"] for batch in some),
        "dummies": 0,
        "over_budget_rows": 0,
        "idle": 0,
    }
    return {prefix + name: value for name, value in values.items()}


@pytest.mark.parametrize(
    ("every", "accumulate", "written"),
    [
        (1, 1, [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4)]),
        (2, 1, [(1, 0, 1), (3, 2, 3), (4, 4, 4)]),
        (50, 1, [(4, 0, 4)]),
        (1, 2, [(0, 0, 1), (1, 2, 3), (2, 4, 4)]),
        (2, 2, [(1, 0, 3), (2, 4, 4)]),
        (1, 50, [(0, 0, 4)]),
        (0, 1, [(4, 0, 4)]),
    ],
)
def test_metrics(every: int, accumulate: int, written: list[tuple[int, int, int]]) -> None:
    """At Lightning's own logging steps, over all batches since the last one; the rest at the last step."""
    memories = [Memory(), Memory()]
    trainer = fit(
        Module(),
        mixed_batches(),
        padmin(),
        logger=memories,
        log_every_n_steps=every,
        accumulate_grad_batches=accumulate,
    )
    for memory in memories:
        assert memory.counts() == [(step, pytest.approx(expected(a, b))) for step, a, b in written]
    final = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("padmin/")}
    assert without_audits(final) == pytest.approx(expected(*written[-1][1:]))
    stepped = [step for step, row in memories[0].of("") if any(name.endswith("_step") for name in row)]
    assert [step for step, *_ in written][: len(stepped)] == stepped, "not at Lightning's own steps"
    assert trainer.progress_bar_metrics == {}


def test_the_prefix_is_an_option() -> None:
    memory = fitted(Module(), mixed_batches(), padmin(log_prefix="tokens."), log_every_n_steps=50)
    assert (4, pytest.approx(expected(0, 4, "tokens."))) in [(step, without_audits(row)) for step, row in memory.rows]
    assert "tokens.audits" in memory.rows[-1][1] or "tokens.audits" in memory.rows[-2][1]


def test_a_row_over_the_budget_is_counted() -> None:
    with pytest.warns(UserWarning, match="1 of 10 rows exceed token_budget=22"):
        memory = fitted(Module(), [make_batch(LENGTHS)], padmin(token_budget=22))
    ((_, row),) = memory.of("padmin/")
    assert row["padmin/over_budget_rows"] == 1
    assert row["padmin/longest_row"] == 24 > BUDGET - 2


def test_a_monitor_may_use_the_metrics(tmp_path: Path) -> None:
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, monitor="padmin/slots", mode="min", every_n_train_steps=1)
    fit(Module(), mixed_batches(), padmin(), checkpoint, enable_checkpointing=True, log_every_n_steps=1)
    assert float(checkpoint.best_model_score) == 16.0


def test_batches_that_are_skipped_are_not_counted() -> None:
    """The loader gives None, or a hook ends the epoch: no row of zeros is written."""

    class Ends(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    callback = padmin()
    memory = fitted(Ends(), mixed_batches(), callback)
    assert [step for step, _ in memory.of("padmin/")] == [0, 1]
    assert callback.stats.batches == 2
    with_none = fitted(Module(), [None, *mixed_batches()[:2]], padmin())
    assert [row for _, row in with_none.counts()] == [expected(0, 0), expected(1, 1)]


def test_counters_of_the_callback() -> None:
    callback = padmin()
    fit(Module(), mixed_batches(), callback, max_epochs=2)
    stats = callback.stats
    assert (stats.batches, stats.rows, stats.micro_batches) == (10, 72, 38)
    assert (stats.real_tokens, stats.loss_tokens) == (646, 574)
    assert (stats.slots_before, stats.slots) == (1560, 652)
