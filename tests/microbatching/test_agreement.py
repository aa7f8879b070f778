"""What ranks say goes over the wire and comes back as it was."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_padmin.errors import BatchError, PadMinError, code_of
from lightning_padmin.microbatching.agreement import Agreed, Agreement

ONE = Agreement(micro_batches=3, slots=120, weight=0.1, largest=48, lost_targets=2)
OTHER = Agreement(micro_batches=5, slots=90, weight=1e300, largest=50, lost_targets=1, first=1, changed=1, audit=1)


def test_the_wire_is_nine_integers_in_this_order() -> None:
    """Ranks of one run have one version; all the same it is fixed, and a float64 goes as its bits."""
    assert ONE.encode() == [0, 3, 120, 0x3FB999999999999A, 48, 2, 0, 0, 0]
    assert Agreement(error=4).encode() == [4, 0, 0, 0, 0, 0, 0, 0, 0]
    assert all(type(value) is int for value in OTHER.encode())


def test_what_all_have_said() -> None:
    agreed = Agreed.decode(np.array([ONE.encode(), OTHER.encode()]))
    assert agreed.errors.tolist() == [0, 0]
    assert (agreed.micro_batches, agreed.slots, agreed.lost_targets, agreed.first) == (5, 120, 3, True)
    assert agreed.changed
    assert agreed.audit
    assert not Agreed.decode(np.array([ONE.encode()])).changed
    assert not Agreed.decode(np.array([ONE.encode()])).audit
    assert agreed.weights.tolist() == [0.1, 1e300]  # to the bit
    assert agreed.largest.tolist() == [48, 50]


@pytest.mark.parametrize("weight", [0.0, -0.0, 1 / 3, 5e-324, 1.7e308, float("inf")])
def test_weights_come_back_to_the_bit(weight: float) -> None:
    (found,) = Agreed.decode(np.array([Agreement(weight=weight).encode()])).weights
    assert found.tobytes() == np.float64(weight).tobytes()


def test_codes_of_errors() -> None:
    assert code_of(None) == 0
    assert code_of(BatchError("a")) == BatchError.code != PadMinError.code
    assert code_of(RuntimeError("a")) == PadMinError.code
