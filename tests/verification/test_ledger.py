"""When a batch is checked again."""

from __future__ import annotations

import json

import pytest

from lightning_padmin.errors import PadMinError
from lightning_padmin.verification import Ledger
from lightning_padmin.verification.ledger import MOST_FACETS


def steps_with_checks(ledger: Ledger, count: int, facets: dict[int, set[str]], seen: bool = True) -> list[int]:
    checked = []
    for step in range(1, count + 1):
        ledger.begin_step()
        ledger.show(facets.get(step, {"padding"}))
        if ledger.wants:
            checked.append(step)
            new = ledger.new
            ledger.passed(0.0, new) if seen else ledger.could_not_tell()
    return checked


def test_schedule() -> None:
    assert steps_with_checks(Ledger(), 1200, {}) == [1, 3, 10, 30, 100, 600, 1100]
    assert steps_with_checks(Ledger(every=0), 1200, {}) == [1, 3, 10, 30, 100]


def test_what_is_new_is_checked_once() -> None:
    assert steps_with_checks(Ledger(), 20, {7: {"padding", "left padding"}, 8: {"left padding"}}) == [1, 3, 7, 10]


def test_what_cannot_be_seen_is_given_up() -> None:
    ledger = Ledger(every=0)
    assert len(steps_with_checks(ledger, 50, {}, seen=False)) == 8 + 2  # eight tries of the facet; steps 10 and 30
    assert ledger.given_up == ["padding"]
    assert ledger.has_seen("padding")


def test_only_what_rows_have_shown_counts() -> None:
    ledger = Ledger()
    ledger.begin_step()
    ledger.show({"a", "b"})
    ledger.passed(1e-7, {"a"})
    ledger.begin_step()
    ledger.show({"a", "b"})
    assert ledger.new == {"b"}


def test_there_is_an_end_of_new_facets() -> None:
    facets = {step: {f"facet {step}"} for step in range(1, 200)}
    checked = steps_with_checks(Ledger(every=0), 199, facets)
    assert len([step for step in checked if step > MOST_FACETS]) <= 1  # step 100


def test_record_of_a_checkpoint() -> None:
    ledger = Ledger()
    steps_with_checks(ledger, 5, {})
    state = json.loads(json.dumps(ledger.state_dict()))
    other = Ledger()
    other.load_state_dict(state)
    assert (other.step, other.audits, other.last) == (5, 2, 3)
    assert other.record == ledger.record
    other.begin_step()
    other.show({"padding"})
    assert other.wants  # the code may be another one by now
    with pytest.raises(PadMinError, match="'audits'"):
        other.load_state_dict({key: value for key, value in state.items() if key != "audits"})
