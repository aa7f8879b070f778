"""LengthBucketBatchSampler: every index once, equal counts, budgets kept, the same again after a stop."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_padmin import LengthBucketBatchSampler
from lightning_padmin.errors import ConfigError, PadMinWarning

BUDGET = 500
GSM8K = Path(__file__).parents[1] / "diagnose" / "gsm8k_lengths.csv"


def gsm8k() -> np.ndarray[Any, Any]:
    with GSM8K.open(newline="") as lines:
        return np.array([int(row["prompt_tokens"]) + int(row["completion_tokens"]) for row in csv.DictReader(lines)])


def skewed(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.minimum(np.random.default_rng(seed).geometric(0.03, count), 200)


def on_ranks(lengths: Any, budget: int, world: int, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    found = []
    for rank in range(world):
        sampler = LengthBucketBatchSampler(lengths, budget, rank=rank, world_size=world, **options)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    return found


def slots(batch: list[int], lengths: Any) -> int:
    return len(batch) * int(max(lengths[k] for k in batch))


def test_every_index_once_and_equal_counts_on_three_ranks() -> None:
    lengths = skewed(1001)
    counts = set()
    for epoch in range(4):
        ranks = on_ranks(lengths, BUDGET, 3, epoch)
        assert len({len(batches) for batches in ranks}) == 1
        counts.add(len(ranks[0]))
        flat = [index for batches in ranks for batch in batches for index in batch]
        assert sorted(flat) == list(range(1001))
        assert all(slots(batch, lengths) <= BUDGET for batches in ranks for batch in batches)
    assert len(counts) == 1  # trainers count batches once, for all epochs


def test_a_sampler_that_does_not_even_out_would_have_unequal_counts() -> None:
    """Negative control for the halving."""
    assert len(on_ranks(skewed(1001), BUDGET, 1)[0]) % 3 != 0


@pytest.mark.parametrize("budget", [4096, 8192])
def test_waste_on_real_lengths_is_within_two_percent(budget: int) -> None:
    lengths = gsm8k()
    (batches,) = on_ranks(lengths, budget, 1)
    assert len(lengths) == 7473
    assert 1 - lengths.sum() / sum(slots(batch, lengths) for batch in batches) <= 0.02
    assert len(batches) <= 1.05 * lengths.sum() / budget
    # Negative control: the same batch size without buckets.
    rows, size = np.random.default_rng(0).permutation(len(lengths)), len(lengths) // len(batches)
    random = [rows[k : k + size].tolist() for k in range(0, len(rows), size)]
    assert 1 - lengths.sum() / sum(slots(batch, lengths) for batch in random) > 0.3


def test_rows_and_batches_are_shuffled_by_epoch_and_seed() -> None:
    lengths = skewed(400)
    (first,), (again,), (other,) = (on_ranks(lengths, 512, 1, epoch) for epoch in (0, 0, 1))
    (seeded,) = on_ranks(lengths, 512, 1, seed=1)
    assert first == again
    assert first != other
    assert first != seeded
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in other}  # not batches alone
    widths = [max(lengths[k] for k in batch) for batch in first]
    assert widths != sorted(widths, reverse=True)
    (plain,) = on_ranks(lengths, 512, 1, shuffle=False)
    assert on_ranks(lengths, 512, 1, 3, shuffle=False) == [plain]
    widths = [max(lengths[k] for k in batch) for batch in plain]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("world", [1, 3])
def test_longest_first(world: int) -> None:
    lengths = skewed(500)
    ranks = on_ranks(lengths, 512, world, longest_first=True)
    first = [slots(batches[0], lengths) for batches in ranks]
    rest = [slots(batch, lengths) for batches in ranks for batch in batches[1:]]
    assert min(first) >= max(rest)
    assert sorted(k for batches in ranks for batch in batches for k in batch) == list(range(500))


@pytest.mark.parametrize("done", [0, 1, 7])
def test_resume_gives_the_batches_that_remained(done: int) -> None:
    lengths = skewed(300)
    whole = LengthBucketBatchSampler(lengths, 256, rank=1, world_size=2)
    whole.set_epoch(2)
    batches = list(whole)
    stopped = LengthBucketBatchSampler(lengths, 256, rank=1, world_size=2)
    stopped.set_epoch(2)
    iterator = iter(stopped)
    assert [next(iterator) for _ in range(done)] == batches[:done]
    state = stopped.state_dict()
    assert state == {"epoch": 2, "done": done}
    resumed = LengthBucketBatchSampler(lengths, 256, rank=1, world_size=2)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)  # as trainers do
    assert list(resumed) == batches[done:]
    assert list(resumed) == batches  # and then whole epochs again
    resumed.set_epoch(3)
    following = list(resumed)
    assert following != batches
    assert len(following) == len(batches)
    assert stopped.state_dict(done=1)["done"] == 1  # for loaders that ask ahead


def test_a_state_of_other_data_is_refused() -> None:
    sampler = LengthBucketBatchSampler([3, 3, 3, 3], 6)
    with pytest.raises(ConfigError, match="done=9: an epoch has 2 batches here"):
        sampler.load_state_dict({"epoch": 1, "done": 9})
    assert sampler.state_dict() == {"epoch": 0, "done": 0}


def test_a_row_over_the_budget_is_alone_and_told() -> None:
    with pytest.warns(PadMinWarning, match="1 of 3 rows are longer than token_budget=8; .* the longest with 9 slots"):
        sampler = LengthBucketBatchSampler([9, 2, 2], 8)
    assert sorted(map(sorted, sampler)) == [[0], [1, 2]]


def test_a_few_long_rows_do_not_make_short_ones_few_to_a_batch() -> None:
    lengths = [60, 50, *[5] * 48]
    for shuffle in (True, False):
        assert sorted(map(len, LengthBucketBatchSampler(lengths, 60, shuffle=shuffle))) == [1, 1, 12, 12, 12, 12]


def test_widths_are_rounded_as_the_collator_does() -> None:
    batches = list(LengthBucketBatchSampler([5] * 8, 16, pad_to_multiple_of=8, shuffle=False))
    assert [len(batch) for batch in batches] == [2, 2, 2, 2]
    assert [len(b) for b in LengthBucketBatchSampler([5] * 8, 16, shuffle=False)] == [3, 3, 2]
    assert [len(b) for b in LengthBucketBatchSampler([1] * 8, 16, shuffle=False, max_rows=3)] == [3, 3, 2]


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        (([], 8), {}, r"lengths: expected integers as \(rows,\), got shape \(0,\)"),
        (([[1]], 8), {}, r"got shape \(1, 1\)"),
        (([1.5], 8), {}, r"of float64"),
        (([3, 0], 8), {}, r"lengths\[1\]=0: a row has at least one token"),
        (([3], 0), {}, r"token_budget=0: expected an integer of at least 1"),
        (([3], True), {}, r"token_budget=True"),
        (([3], 8), {"batches_per_bucket": 0}, r"batches_per_bucket=0"),
        (([3], 8), {"max_rows": -1}, r"max_rows=-1"),
        (([3], 8), {"pad_to_multiple_of": 0}, r"pad_to_multiple_of=0"),
        (([3], 8), {"rank": 0}, r"rank=0, world_size=None: give both, or neither"),
        (([3], 8), {"rank": 2, "world_size": 2}, r"rank=2, world_size=2"),
    ],
)
def test_bad_arguments(arguments: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LengthBucketBatchSampler(*arguments, **options)


def test_fewer_rows_than_ranks() -> None:
    with pytest.raises(ConfigError, match="2 rows cannot be dealt over 3 ranks"):
        len(LengthBucketBatchSampler([3, 3], 8, rank=0, world_size=3))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=4, max_size=80),
    budget=st.integers(60, 400),
    world=st.integers(1, 4),
    multiple=st.sampled_from([1, 2, 8]),
    rows=st.sampled_from([None, 1, 3]),
    per_bucket=st.integers(1, 5),
)
def test_whatever_the_lengths(
    lengths: list[int], budget: int, world: int, multiple: int, rows: int | None, per_bucket: int
) -> None:
    budget = max(budget, 64)
    options = {"pad_to_multiple_of": multiple, "max_rows": rows, "batches_per_bucket": per_bucket}
    try:
        epochs = [on_ranks(lengths, budget, world, epoch, **options) for epoch in (0, 1)]
    except ConfigError as error:
        epochs, reason = [], str(error)
    assert epochs or "no multiple of" in reason
    if not epochs:
        return
    rounded = [-(-length // multiple) * multiple for length in lengths]
    assert len({len(batches) for ranks in epochs for batches in ranks}) == 1
    for ranks in epochs:
        assert sorted(k for batches in ranks for batch in batches for k in batch) == list(range(len(lengths)))
        for batch in (batch for batches in ranks for batch in batches):
            assert slots(batch, rounded) <= budget
            assert rows is None or len(batch) <= rows


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(self.lengths[index])

    def __len__(self) -> int:
        return len(self.lengths)


@pytest.mark.parametrize("workers", [0, 2])
def test_with_a_loader_of_torch(workers: int) -> None:
    lengths = skewed(200)
    sampler = LengthBucketBatchSampler(lengths, 256)
    loader = torch.utils.data.DataLoader(Rows(lengths), batch_sampler=sampler, num_workers=workers)
    batches = [index.tolist() for index, _ in loader]
    assert batches == list(sampler)
    assert len(loader) == len(batches)
