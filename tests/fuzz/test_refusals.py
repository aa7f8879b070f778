"""Batches and declarations that are wrong: an error of this library that names what is, or everything is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from fuzz import mutations, reference
from fuzz.amounts import Amount, amounts
from fuzz.cases import Case, Sizes, sizes
from lightning_padmin import MicroBatcher, PadMinError

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_padmin.errors.PadMinWarning", "ignore::UserWarning:torch", "ignore::DeprecationWarning"
)


def names(error: PadMinError, case: Case, wanted: tuple[str, ...]) -> bool:
    paths = [case.paths[name] for name in wanted if name in case.paths]
    return any(name in str(error) for name in (*wanted, *(f"'{path}{end}" for path in paths for end in ("'", "."))))


@amounts(3400)
def test_what_is_wrong_is_named(amount: Amount, record_property: Callable[[str, Any], None]) -> None:
    count = len(mutations.BEFORE) + len(mutations.AFTER)

    def check(size: Sizes, which: int) -> str:
        which = (which + size.seed) % count  # hypothesis likes zeros
        before = which < len(mutations.BEFORE)
        mutation = (*mutations.BEFORE, *mutations.AFTER)[which]
        wrong: list[mutations.Wrong | None] = []

        def change(case: Case) -> None:
            wrong.append(mutation(case, case.dice("wrong")))

        case = size.make(change=change if before else None)
        if not before:
            change(case)
        if wrong[0] is None:
            return "does not apply"
        copies = reference.snapshot(case) if case.batch is not None and mutation is not mutations.anything else {}
        try:
            found = MicroBatcher(case.config, encoder_decoder=case.encoder_decoder).prepare(case.batch)
            for _ in found:  # gathering may not fail either
                pass
        except PadMinError as error:
            assert names(error, case, wrong[0].names), (case, error)  # noqa: PT017
            return f"{mutation.__name__} refused"
        assert not wrong[0].must, case
        reference.check_loosely(case, found, wrong[0].changed)
        if copies:
            reference.check_unchanged(case, copies)
        return f"{mutation.__name__} taken"

    tally: Counter[str] = amount.run(record_property, check, sizes(5, 6), st.integers(0, count - 1))
    assert tally["does not apply"] < tally["examples"] / 5
    never = {mutation.__name__ for mutation in (*mutations.BEFORE, *mutations.AFTER)}
    never -= {name.rsplit(" ", 1)[0] for name in tally}
    assert not never
