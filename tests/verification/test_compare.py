"""When two computations count as the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_padmin.verification import Tolerance, dtypes_of, relative_difference, scales
from lightning_padmin.verification.compare import TOLERANCES

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dtypes", "saw_half", "limit"),
    [
        ({F32}, False, 1e-3),
        ({F64}, False, 1e-3),
        ((), False, 1e-3),
        ({BF16}, False, 0.1),
        ({F32, F16}, False, 0.1),
        ({F32}, True, 0.1),
    ],
)
def test_half_precision_anywhere_widens(dtypes: set[torch.dtype], saw_half: bool, limit: float) -> None:
    found = Tolerance.for_(dtypes, saw_half=saw_half)
    assert found.limit == limit
    assert found.is_half == (limit == 0.1)
    assert (found.noise, found.own_limit) == ((0.05, 0.5) if found.is_half else (1e-4, 0.1))


def test_a_limit_of_the_users_is_widened_too_and_never_narrowed() -> None:
    assert Tolerance(1e-5).if_half(False).limit == 1e-5
    assert Tolerance(1e-5).if_half(True).limit == 0.1
    assert Tolerance(0.3).if_half(True).limit == 0.3


def test_what_may_be_tokens_at_other_experts() -> None:
    assert Tolerance(0.1).may_be_flips(0.5)
    assert not Tolerance(0.1).may_be_flips(0.51)
    assert not Tolerance(0.1).may_be_flips(math.nan)
    assert not Tolerance(1e-3).may_be_flips(0.2)


def test_dtypes_of_parameters() -> None:
    assert dtypes_of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, dtype=BF16))) == {F32, BF16}


def test_relative_difference() -> None:
    wanted = torch.tensor([1.0, -4.0])
    assert relative_difference(torch.tensor([2.0, -4.0]), wanted) == 0.25
    assert math.isnan(relative_difference(torch.tensor([math.nan, 0.0]), wanted))
    # Half precision would round the difference away, or overflow it.
    big = torch.tensor([60000.0, -60000.0], dtype=F16)
    assert relative_difference(-big, big) == 2.0


def test_where_nothing_is_wanted() -> None:
    nothing, some = torch.zeros(2), torch.tensor([0.0, 1e-5])
    assert relative_difference(nothing, nothing) == relative_difference(nothing, nothing, nothing=1e-30) == 0.0
    assert relative_difference(some, nothing) == pytest.approx(1e-5)
    assert relative_difference(some, nothing, nothing=1e-30) > 1e20


def test_one_limit_is_right_for_small_gradients_too() -> None:
    """A part of the model whose gradients are small and wrong by half of their size is found, rounding is not."""
    for limit, own, noise in ((1e-3, 0.1, 1e-4), (0.1, 0.5, 0.05)):
        found = scales({"large": 1.0, "small": 2 * noise, "rounding": noise / 2}, limit)
        assert found["large"] == found["rounding"] == 1.0
        assert found["small"] == min(1.0, 2 * noise * own / limit)


def test_tolerances_of_outputs() -> None:
    assert {F64: 1e-9, F32: 1e-3, BF16: 0.1, F16: 0.1} == TOLERANCES
