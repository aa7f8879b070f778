"""`launch_cost="measured"`: from times of micro-batches to the cost that the next plans use."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from lightning_padmin.config.options import PadMinConfig
from lightning_padmin.errors import ConfigError
from lightning_padmin.microbatching import MicroBatcher, iter_micro_batches
from lightning_padmin.microbatching.timing import UNTIL_THEN, LaunchMeter

SLOT = 2e-6


class Clock:
    """A clock that is moved on."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def seconds(rows: int, width: int, launch: float = 300, wide: float = 0.0) -> float:
    return SLOT * (launch + rows * width * (1 + wide * width))


def measured(
    batches: Iterable[list[tuple[int, int]]], time_of: Callable[[int, int], float] = seconds, between: float = 0.7
) -> LaunchMeter:
    clock = Clock()
    meter = LaunchMeter(clock)
    for shapes in batches:
        meter.begin()
        for rows, width in shapes:
            meter.gathered(rows, width)
            clock.now += time_of(rows, width)
        clock.now += between  # optimizer, data: part of no micro-batch
    meter.begin()
    return meter


def batches(count: int = 20) -> list[list[tuple[int, int]]]:
    source = random.Random(0)
    return [[(source.randrange(1, 20), source.randrange(20, 400)) for _ in range(5)] for _ in range(count)]


@pytest.mark.parametrize("launch", [0, 40, 300, 2000])
@pytest.mark.parametrize("wide", [0.0, 1 / 500])
def test_it_finds_what_times_are_made_of(launch: int, wide: float) -> None:
    meter = measured(batches(), lambda rows, width: seconds(rows, width, launch, wide))
    assert meter.is_done
    assert meter.launch_cost == pytest.approx(max(1, launch), rel=0.02, abs=2)


def test_busy_moments_do_not_count() -> None:
    """Every tenth time is ten times as long; noise of 3% on all others."""
    source = random.Random(1)

    def noisy(rows: int, width: int) -> float:
        return seconds(rows, width) * (10 if source.random() < 0.1 else source.uniform(0.97, 1.03))

    assert measured(batches(), noisy).launch_cost == pytest.approx(300, rel=0.25)


def test_the_last_micro_batch_of_a_batch_and_the_first_batches_are_not_timed() -> None:
    slow = {(7, 7): 1000.0, (9, 9): 1000.0}
    warm_up = [[(9, 9), (9, 9), (9, 9)]] * 3
    shapes = [*warm_up, *([*batch, (7, 7)] for batch in batches())]
    meter = measured(shapes, lambda rows, width: slow.get((rows, width), 1.0) * seconds(rows, width))
    assert meter.launch_cost == pytest.approx(300, rel=0.02)


def test_until_then_and_where_shapes_do_not_tell() -> None:
    assert measured(batches(4)).launch_cost == UNTIL_THEN
    assert not measured(batches(4)).is_done


def test_it_gives_up_on_shapes_that_do_not_tell(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        meter = measured([[(4, 100)] * 6] * 200)
    assert meter.is_done
    assert meter.launch_cost == UNTIL_THEN
    assert "all of about one size" in caplog.text


def test_a_batcher_uses_what_it_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts are made expensive, so that rows are no longer cut apart."""
    clock = Clock()
    monkeypatch.setattr("lightning_padmin.microbatching.timing._now", clock)

    def train(config: PadMinConfig) -> list[int]:
        batcher, counts = MicroBatcher(config), []
        for k in range(30):
            torch.manual_seed(k)
            lengths = torch.randint(20, 500, (16,))
            mask = (torch.arange(500) < lengths[:, None]).long()
            made = batcher.prepare({"input_ids": mask, "attention_mask": mask, "labels": mask * 101 - 100})
            for micro in made:
                clock.now += seconds(*micro.batch["input_ids"].shape, launch=5000)
            counts.append(len(made))
        return counts

    fixed, found = (
        train(PadMinConfig(token_budget=8192)),
        train(PadMinConfig(token_budget=8192, launch_cost="measured")),
    )
    assert found[:5] == fixed[:5]
    assert sum(found[-10:]) < 0.8 * sum(fixed[-10:])
    assert sum(train(PadMinConfig(token_budget=8192, launch_cost=5000))[-10:]) == pytest.approx(sum(found[-10:]), abs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launch_cost": "fast"}, "launch_cost='fast'"),
        ({"launch_cost": None}, "launch_cost=None"),
        ({"launch_cost": "measured", "mode": "replay"}, "launch_cost='measured' needs mode='split'"),
        ({"launch_cost": "measured", "method": "greedy"}, "launch_cost='measured' needs method='optimal'"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PadMinConfig(**options)


def test_one_batch_is_too_few() -> None:
    mask = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match="keep one MicroBatcher"):
        iter_micro_batches({"attention_mask": mask, "labels": mask}, PadMinConfig(launch_cost="measured"))
