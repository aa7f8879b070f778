"""LengthBucketBatchSampler: every index once, equal counts, budgets kept, the same again after a stop."""

from __future__ import annotations

import copy
import csv
import json
import pickle
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
    assert (state["epoch"], state["done"]) == (2, done)
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


# A saved state goes on rightly or is refused

LENGTHS = skewed(301)


def sampler_of(world: int, rank: int = 0, **options: Any) -> LengthBucketBatchSampler:
    given: dict[str, Any] = {"lengths": LENGTHS, "token_budget": 256, "rank": rank, "world_size": world}
    return LengthBucketBatchSampler(**(given | options))


def stopped_at(done: int, world: int, state: dict[str, Any] | None = None, **options: Any) -> Any:
    """The state after so many more batches on each rank, saved by rank 0, and all indices that were given."""
    ranks = [sampler_of(world, rank, **options) for rank in range(world)]
    given = []
    for each in ranks:
        each.set_epoch(2)
        if state is not None:
            each.load_state_dict(state)
        steps = iter(each)
        given += [index for _ in range(done) for index in next(steps)]
    states = [each.state_dict() for each in ranks]
    assert all(each == states[0] for each in states)
    return states[0], given


def rest_of(state: dict[str, Any], world: int, **options: Any) -> list[list[list[int]]]:
    ranks = [sampler_of(world, rank, **options) for rank in range(world)]
    for each in ranks:
        each.load_state_dict(state)
        each.set_epoch(2)
    return [list(each) for each in ranks]


@pytest.mark.parametrize("multiples", [(1, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("worlds", [(2, 3), (4, 1), (1, 8), (3, 3), (2, 3, 2), (3, 5, 5, 2)], ids=str)
def test_other_numbers_of_ranks_get_every_remaining_row_once(worlds: list[int], multiples: tuple[int, int]) -> None:
    state, given = None, list[int]()
    for world in worlds[:-1]:
        state, more = stopped_at(2, world, state, count_multiple_of=multiples[0])
        given += more
        state = json.loads(json.dumps(state))  # as any file may keep it
    rest = rest_of(state, worlds[-1], count_multiple_of=multiples[1])
    assert len({len(batches) for batches in rest}) == 1
    assert len(rest[0]) % multiples[1] == 0
    assert sorted(given + [k for batches in rest for batch in batches for k in batch]) == list(range(301))
    assert all(slots(batch, LENGTHS) <= 256 for batches in rest for batch in batches)


@pytest.mark.parametrize("worlds", [(2, 1, 1), (2, 1, 3), (3, 2, 2)])
def test_a_loader_that_has_asked_for_the_end_of_what_others_left(worlds: tuple[int, int, int]) -> None:
    """Workers ask ahead: the last batch has been asked for while some are still to be trained on."""
    state, given = stopped_at(3, worlds[0])
    goes_on = [sampler_of(worlds[1], rank) for rank in range(worlds[1])]
    for each in goes_on:
        each.load_state_dict(state)
    asked = [list(each) for each in goes_on]
    done = len(asked[0]) - 2
    given += [row for batches in asked for batch in batches[:done] for row in batch]
    rest = rest_of(goes_on[0].state_dict(done=done), worlds[2])
    assert sorted(given + [row for batches in rest for batch in batches for row in batch]) == list(range(301))
    assert goes_on[0].state_dict()["done"] == 0  # once it is over, the next iteration begins an epoch


def test_a_place_alone_would_give_rows_twice() -> None:
    """Negative control: what another number of ranks makes of the same number of batches."""
    _, given = stopped_at(3, 2)
    ranks = [sampler_of(3, rank) for rank in range(3)]
    for each in ranks:
        each.set_epoch(2)
    rest = [k for each in ranks for batch in list(each)[3:] for k in batch]
    assert sorted(given + rest) != list(range(301))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "budget": ({"token_budget": 255}, "token_budget: 256 when it was saved, 255 here"),
    "seed": ({"seed": 1}, "seed: 0 when it was saved, 1 here"),
    "bucket": ({"batches_per_bucket": 2}, "batches_per_bucket: 4 when it was saved, 2 here"),
    "shuffle": ({"shuffle": False}, "shuffle: True when it was saved, False here"),
    "rows": ({"max_rows": 3}, "max_rows: None when it was saved, 3 here"),
    "multiple": ({"pad_to_multiple_of": 8}, "pad_to_multiple_of: 1 when it was saved, 8 here"),
    "longest": ({"longest_first": True}, "longest_first: False when it was saved, True here"),
    "fewer": ({"lengths": LENGTHS[:-1]}, "rows: 301 when it was saved, 300 here; lengths: '"),
    "a length": ({"lengths": [*LENGTHS[:-1], LENGTHS[-1] + 1]}, "here, so rows would come twice or never .lengths: '"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_gives_another_order_is_named_with_both_values(name: str) -> None:
    options, told = OTHERS[name]
    state, _ = stopped_at(2, 2)
    other = sampler_of(2, **options)
    with pytest.raises(ConfigError, match=told) as error:
        other.load_state_dict(state)
    assert "begin this epoch again" in str(error.value)
    assert (other.epoch, other.state_dict()["done"]) == (0, 0)
    for fix in ({"epoch": 2, "done": 0}, {"epoch": 3, "done": 0}):  # as the message says
        other.load_state_dict(fix)
        assert other.epoch == fix["epoch"]
        assert len(list(other)) == len(other)
    over = {**state, "done": state["batches"]}
    for harmless in (sampler_of(2).state_dict() | {"epoch": 2}, over):
        other.load_state_dict(harmless)
        assert list(other) == ([] if harmless is over else list(other))
        assert len(list(other)) == len(other)


def test_options_that_change_nothing_may_differ() -> None:
    state, given = stopped_at(2, 2, shuffle=False)
    rest = rest_of(state, 2, shuffle=False, seed=5, batches_per_bucket=9)
    assert sorted(given + [k for batches in rest for batch in batches for k in batch]) == list(range(301))


def test_what_is_left_must_be_enough_for_every_rank() -> None:
    few: dict[str, Any] = {"lengths": [4] * 6, "token_budget": 4}
    state, _ = stopped_at(2, 2, **few)
    with pytest.raises(ConfigError, match=r"what is left of epoch 2: 2 rows cannot be dealt over 3 ranks.*'epoch': 3"):
        sampler_of(3, **few).load_state_dict(state)
    assert [len(batches) for batches in rest_of(state, 1, **few)] == [2]


def test_a_state_of_the_first_version_says_too_little() -> None:
    sampler = LengthBucketBatchSampler([3, 3, 3, 3], 6)
    with pytest.raises(ConfigError, match="done=9: an epoch has 2 batches here"):
        sampler.load_state_dict({"epoch": 1, "done": 9})
    with pytest.raises(ConfigError, match=r"epoch=1, done=1 and nothing else.*sampler.state_dict\(done=1\)"):
        sampler.load_state_dict({"epoch": 1, "done": 1})
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["done"]) == (0, 0)
    sampler.set_epoch(1)  # as the message says
    whole = list(sampler)
    sampler.load_state_dict(sampler.state_dict(done=1))
    assert list(sampler) == whole[1:]
    sampler.load_state_dict({"epoch": 3, "done": 0})
    assert sampler.epoch == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"epoch": "2"}, "epoch='2' in the state"),
        ({"epoch": -1}, "epoch=-1"),
        ({"done": 1.0}, "done=1.0"),
        ({"done": True}, "done=True"),
        ({"done": None}, "done=None"),
        ({"done": 10**6}, "done=1000000 in the state: there were batches="),
        ({"format": 2}, "format=2 in the state: this version reads 1"),
        ({"batches": "7"}, "batches='7'"),
        ({"world_size": 0}, "world_size=0"),
        ({"count_multiple_of": None}, "count_multiple_of=None"),
        ({"before": [[1, 2]]}, r"before=\[\[1, 2\]\]"),
        ({"before": "x"}, "before='x'"),
        ({"order": 5}, "order=5"),
    ],
)
def test_malformed_states(change: dict[str, Any], told: str) -> None:
    state, _ = stopped_at(2, 2)
    with pytest.raises(ConfigError, match=told):
        sampler_of(2).load_state_dict(state | change)
    with pytest.raises(ConfigError, match="expected what state_dict"):
        sampler_of(2).load_state_dict([state])  # type: ignore[arg-type]
    for done in (-1, 10**6, 1.5, "2"):
        with pytest.raises(ConfigError, match="expected an integer"):
            sampler_of(2).state_dict(done=done)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_that_was_left_early_takes_nothing_from_the_next(workers: int) -> None:
    sampler = sampler_of(1)
    loader = torch.utils.data.DataLoader(Rows(LENGTHS), batch_sampler=sampler, num_workers=workers)
    next(iter(loader))
    for index, _ in loader:
        assert len(index)
        break
    assert sorted(int(k) for index, _ in loader for k in index) == list(range(301))


def test_iterators_count_for_themselves() -> None:
    sampler = sampler_of(1)
    whole = list(sampler)
    first = iter(sampler)
    assert [next(first) for _ in range(3)] == whole[:3]
    assert sampler.state_dict()["done"] == 3
    second = iter(sampler)
    assert next(second) == whole[0]
    assert next(first) == whole[3]
    assert sampler.state_dict()["done"] == 1  # the newest one's
    assert list(first) == whole[4:]
    assert list(second) == whole[1:]
    assert sampler.state_dict()["done"] == 0
    sampler.load_state_dict(sampler.state_dict(done=4))
    third = iter(sampler)
    assert next(third) == whole[4]
    assert list(sampler) == whole  # a loaded place is taken once
    assert list(third) == whole[5:]
    late = iter(sampler)
    sampler.set_epoch(1)
    assert next(late) != whole[0]
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["done"]) == (1, 1)


def test_copies_epochs_and_states_do_not_disturb_an_iteration_under_way() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 200)
    rows = list(range(200))

    def flat(batches: Any) -> list[int]:
        return sorted(index for batch in batches for index in batch)

    for disturb in (
        copy.deepcopy,
        lambda sampler: pickle.loads(pickle.dumps(sampler)),
        lambda sampler: sampler.set_epoch(3),
        lambda sampler: sampler.load_state_dict(sampler.state_dict()),
    ):
        sampler = LengthBucketBatchSampler(lengths, token_budget=200)
        under_way = iter(sampler)
        begun = [next(under_way) for _ in range(4)]
        other = disturb(sampler)  # type: ignore[no-untyped-call]
        assert flat([*begun, *under_way]) == rows
        if other is not None:
            assert flat(other) == rows


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
