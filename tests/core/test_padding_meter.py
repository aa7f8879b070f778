"""Counts of a run and since the last log, over ranks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_padmin import PaddingStats, PadMinError
from lightning_padmin.distributed import exchange_alone
from lightning_padmin.stats import PaddingMeter

SHORT = PaddingStats(batches=1, rows=2, real_tokens=10, loss_tokens=4, slots_before=40, slots=20, longest_row=7)
LONG = PaddingStats(batches=1, rows=2, real_tokens=90, loss_tokens=8, slots_before=100, slots=90, longest_row=50)


def beside(other: PaddingStats, seen: list[list[int]] | None = None):
    """The exchange with a second rank that has counted `other`."""

    def exchange(values: Sequence[int]) -> NDArray[np.int64]:
        if seen is not None:
            seen.append(list(values))
        return np.array([list(values), other.as_counts()])

    return exchange


def metered(*batches: PaddingStats) -> PaddingMeter:
    meter = PaddingMeter("p/")
    for stats in batches:
        meter.add(stats)
    return meter


def test_each_batch_is_logged_once_and_stays_in_the_total() -> None:
    meter = metered(SHORT)
    assert meter.flush(exchange_alone) == SHORT.metrics("p/")
    meter.add(LONG)
    assert meter.flush(exchange_alone) == LONG.metrics("p/")
    assert meter.flush(exchange_alone) == {}
    assert meter.total == SHORT + LONG


def test_ratios_are_those_of_the_sums_over_ranks() -> None:
    found = metered(SHORT).flush(beside(LONG))
    assert found == (SHORT + LONG).metrics("p/")
    mean_of_ratios = (SHORT.waste + LONG.waste) / 2
    assert abs(found["p/waste"] - mean_of_ratios) > 0.1  # what it must not be
    assert found["p/longest_row"] == 50


def test_a_rank_without_a_batch_logs_those_of_others() -> None:
    assert metered().flush(beside(LONG)) == LONG.metrics("p/")


def test_ranks_that_share_batches_count_them_once() -> None:
    seen: list[list[int]] = []
    meter = metered(SHORT)
    assert meter.flush(beside(LONG, seen), is_copy=True) == LONG.metrics("p/")
    assert seen == [PaddingStats().as_counts()]
    assert meter.unlogged == PaddingStats()
    assert meter.total == SHORT


def test_where_ranks_did_not_meet_nothing_is_lost() -> None:
    meter = metered(SHORT)
    assert meter.flush(lambda values: None) is None
    assert meter.unlogged == SHORT
    meter.drop_unlogged()
    assert (meter.unlogged, meter.total) == (PaddingStats(), SHORT)


def test_state_is_kept_with_or_without_what_was_not_logged() -> None:
    meter = metered(SHORT)
    meter.flush(exchange_alone)
    meter.add(LONG)
    assert list(meter.state_dict()) == ["stats"]
    again = metered()
    again.load_state_dict(meter.state_dict(with_unlogged=True))
    assert (again.total, again.unlogged) == (SHORT + LONG, LONG)
    again = metered(SHORT)
    again.load_state_dict(meter.state_dict())
    assert (again.total, again.unlogged) == (SHORT + LONG, SHORT)
    copied = pickle.loads(pickle.dumps(meter))
    assert (copied.total, copied.unlogged) == (meter.total, meter.unlogged)


def test_a_wrong_state_changes_nothing() -> None:
    meter = metered(SHORT)
    with pytest.raises(PadMinError, match="no count"):
        meter.load_state_dict({"stats": LONG.state_dict(), "since_log": {"paper": 1}})
    assert (meter.total, meter.unlogged) == (SHORT, SHORT)
