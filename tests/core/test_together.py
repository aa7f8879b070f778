"""Functions whose errors all ranks hear of, and floats that are sent as integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from ranks import Ranks

from lightning_padmin.distributed import (
    Exchange,
    agree,
    all_gather_floats,
    as_floats,
    as_integer,
    exchange_alone,
    together,
)
from lightning_padmin.errors import ArchitectureError, PeerError


def on_ranks(*work: Callable[[Exchange], Any]) -> list[Any]:
    """What each rank's function returns, or raises."""
    ranks = Ranks(len(work))

    def run(rank: int) -> Any:
        try:
            return work[rank](ranks.exchange_of(rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(work)) as pool:
        results = list(pool.map(run, range(len(work))))
    assert ranks.calls == [1] * len(work), "one exchange, whatever happens"
    return results


def raising(error: Exception) -> Callable[[], Any]:
    def function() -> Any:
        raise error

    return function


def test_each_rank_gets_its_own_result() -> None:
    assert on_ranks(lambda e: together(lambda: "a", e), lambda e: together(lambda: None, e)) == ["a", None]
    assert together(lambda: 3, exchange_alone) == 3


def test_where_one_rank_raises_all_do() -> None:
    error = ArchitectureError("mine")
    first, second = on_ranks(lambda e: together(lambda: "a", e), lambda e: together(raising(error), e))
    assert second is error
    assert isinstance(first, PeerError)
    assert "rank 1 refused its batch (ArchitectureError)" in str(first)
    other = KeyError("no error of this package")
    first, second = on_ranks(lambda e: together(raising(other), e), lambda e: together(lambda: "a", e))
    assert first is other
    assert "rank 0 refused its batch (an error)" in str(second)


def says(results: Sequence[int]) -> Sequence[int]:
    return [len(results), results[0]]


def test_what_ranks_say_of_their_results() -> None:
    first, second = on_ranks(
        lambda e: agree(lambda: [5, 6], e, says, 2),
        lambda e: agree(lambda: [7], e, says, 2),
    )
    assert (first[0], second[0]) == ([5, 6], [7])
    assert first[1].tolist() == second[1].tolist() == [[2, 5], [1, 7]]


def test_what_is_raised_in_saying_it_all_hear_of() -> None:
    first, second = on_ranks(lambda e: agree(lambda: [5], e, says, 2), lambda e: agree(list, e, says, 2))
    assert isinstance(first, PeerError)
    assert isinstance(second, IndexError)


@pytest.mark.parametrize("value", [0.0, -0.0, 1 / 3, 1e308, 5e-324, math.inf, -math.inf])
def test_floats_arrive_to_the_bit(value: float) -> None:
    back = as_floats(np.array([as_integer(value)]))
    assert back.tobytes() == np.array([value]).tobytes()


def test_floats_of_all_ranks() -> None:
    first, second = on_ranks(
        lambda e: all_gather_floats([0.1, math.nan], e), lambda e: all_gather_floats([-2.5, 3.0], e)
    )
    np.testing.assert_array_equal(first, [[0.1, math.nan], [-2.5, 3.0]])
    np.testing.assert_array_equal(first, second)
    table = np.array([[1, as_integer(0.5)], [2, as_integer(0.25)]])
    assert as_floats(table[:, 1]).tolist() == [0.5, 0.25]  # columns of others are not contiguous
