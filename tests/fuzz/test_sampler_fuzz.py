"""LengthBucketBatchSampler on any lengths: every index once, equal counts, the budget, the rest after a stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from fuzz.amounts import Amount, amounts
from lightning_padmin import LengthBucketBatchSampler
from lightning_padmin.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::lightning_padmin.errors.PadMinWarning")

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9) | st.integers(-3, 2**40),  # beyond, products of lengths leave int64
    st.floats(),
    st.text(max_size=3),
    st.sampled_from([np.int64(3), [4], (), object(), np.zeros(2), "4"]),
)
OPTIONS = ("token_budget", "batches_per_bucket", "max_rows", "pad_to_multiple_of", "count_multiple_of", "world_size")


@amounts(1200)
def test_any_lengths(amount: Amount, record_property: Callable[[str, Any], None]) -> None:
    def check(lengths: list[int], budget: int, world: int, options: dict[str, Any], epoch: int, stop: int) -> str:
        def on_rank(rank: int) -> LengthBucketBatchSampler:
            sampler = LengthBucketBatchSampler(lengths, budget, rank=rank, world_size=world, **options)
            sampler.set_epoch(epoch)
            return sampler

        try:
            ranks = [list(on_rank(rank)) for rank in range(world)]
        except ConfigError as error:
            assert ("rows" in str(error) and "ranks" in str(error)) or "batches" in str(error)  # noqa: PT017
            return "refused"
        multiple = options["pad_to_multiple_of"]
        assert sorted(index for batches in ranks for batch in batches for index in batch) == list(range(len(lengths)))
        assert len({len(batches) for batches in ranks}) == 1
        assert len(ranks[0]) % options["count_multiple_of"] == 0
        for batch in (batch for batches in ranks for batch in batches):
            slots = len(batch) * max(-(-lengths[index] // multiple) * multiple for index in batch)
            assert slots <= budget or len(batch) == 1
            assert len(batch) <= (options["max_rows"] or len(lengths))
        rank = stop % world
        done = stop % (len(ranks[rank]) + 1)
        sampler, stopped = on_rank(rank), on_rank(rank)
        steps = iter(stopped)
        assert [next(steps) for _ in range(done)] == ranks[rank][:done]
        sampler.load_state_dict(stopped.state_dict())
        assert list(sampler) == ranks[rank][done:]
        assert list(sampler) == ranks[rank]
        return "dealt"

    options = st.fixed_dictionaries(
        {
            "batches_per_bucket": st.integers(1, 5),
            "shuffle": st.booleans(),
            "seed": st.integers(0, 9),
            "pad_to_multiple_of": st.integers(1, 9),
            "max_rows": st.none() | st.integers(1, 5),
            "longest_first": st.booleans(),
            "count_multiple_of": st.integers(1, 3),
        }
    )
    tally = amount.run(
        record_property,
        check,
        st.lists(st.integers(1, 40), min_size=1, max_size=120),
        st.integers(1, 200),
        st.integers(1, 4),
        options,
        st.integers(0, 3),
        st.integers(0, 99),
    )
    assert tally["dealt"] > tally["examples"] / 3


@amounts(500)
def test_any_value_of_an_option(amount: Amount, record_property: Callable[[str, Any], None]) -> None:
    def check(name: str, value: Any) -> str:
        given: dict[str, Any] = {"lengths": [5, 3, 2, 2, 1, 1], "token_budget": 8, name: value}
        if name == "world_size":
            given["rank"] = 0
        try:
            sampler = LengthBucketBatchSampler(**given)
            assert sum(map(len, sampler)) <= 6
        except ConfigError as error:
            assert name in str(error) or "rows" in str(error)  # noqa: PT017
            return "refused"
        return "taken"

    amount.run(record_property, check, st.sampled_from(["lengths", *OPTIONS]), ODD | st.lists(ODD, max_size=4))
