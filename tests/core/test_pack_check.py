"""Whether a step takes packs: what is decided on which outcome, on one rank and on several."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ranks

from lightning_padmin.distributed import exchange_alone
from lightning_padmin.errors import GradientCheckError
from lightning_padmin.microbatching.packed_layout import PackStyle
from lightning_padmin.verification.gradient_check import Outcome
from lightning_padmin.verification.pack_check import PackCheck

TOLD = Outcome(1e-9, True, False, False, "they are equal")
OPEN = Outcome(0.0, False, False, False, "there is no gradient")
FINAL = Outcome(0.5, False, True, True, "the step is random")
STYLE = PackStyle()


def gate(verdict: bool | None = True, is_demanded: bool = False) -> Any:
    given_up: list[str] = []
    return SimpleNamespace(verdict=verdict, is_demanded=is_demanded, give_up=given_up.append, given_up=given_up)


def check(gate: Any, exchange: Any = exchange_alone) -> tuple[PackCheck, list[str]]:
    said: list[str] = []
    return PackCheck(gate, exchange, said.append), said


def failing(style: PackStyle) -> Outcome:
    raise ValueError("no mask\nin the step")


def test_equal_gradients() -> None:
    checked, said = check(gate())
    assert (checked.is_due, checked.has_passed) == (True, False)
    styles: list[PackStyle] = []
    assert checked(STYLE, lambda style: styles.append(style) or TOLD)  # type: ignore[func-returns-value]
    assert (checked.is_due, checked.has_passed, styles, said) == (False, True, [STYLE], [])


@pytest.mark.parametrize("outcome", [None, OPEN])
def test_batches_that_cannot_tell(outcome: Outcome | None) -> None:
    checked, said = check(gate())
    for _ in range(99):
        assert not checked(STYLE, lambda style: outcome)
        assert checked.is_due
    assert not said
    assert not checked(STYLE, lambda style: outcome)
    assert not checked.is_due
    assert said == ["rows are padded: none of the first 100 batches tells whether the step takes packs"]


def test_the_last_batch_that_is_looked_at_may_tell() -> None:
    checked, said = check(gate())
    for _ in range(99):
        checked(STYLE, lambda style: None)
    assert checked(STYLE, lambda style: TOLD)
    assert (checked.is_due, said) == (False, [])


def test_what_cannot_be_told_at_all() -> None:
    own = gate()
    checked, _ = check(own)
    assert not checked(STYLE, lambda style: FINAL)
    assert (checked.is_due, checked.has_passed, own.given_up) == (False, False, ["the step is random"])
    with pytest.raises(GradientCheckError, match="layout='pack' stays unproven: the step is random"):
        check(gate(is_demanded=True))[0](STYLE, lambda style: FINAL)


def test_a_step_that_fails() -> None:
    own = gate()
    checked, _ = check(own)
    assert not checked(STYLE, failing)
    assert (checked.is_due, own.given_up) == (False, ["no mask"])
    with pytest.raises(ValueError, match="no mask"):
        check(gate(is_demanded=True))[0](STYLE, failing)

    def silent(style: PackStyle) -> Outcome:
        raise KeyError

    own = gate()
    check(own)[0](STYLE, silent)
    assert own.given_up == ["KeyError"]


def test_a_model_that_leaks_or_is_not_known_yet() -> None:
    checked, _ = check(gate(verdict=False))
    assert not checked(STYLE, failing)  # which is not called
    assert not checked.is_due
    checked, _ = check(gate(verdict=None))
    assert not checked(None, failing)
    assert checked.is_due


@pytest.mark.parametrize(
    ("verdicts", "styles", "expected"),
    [
        ((True, True), (STYLE, STYLE), (True, False)),
        ((True, None), (STYLE, None), (False, True)),
        ((True, False), (STYLE, STYLE), (False, False)),
        ((True, False), (STYLE, None), (False, False)),
    ],
)
def test_ranks_decide_together(verdicts: Any, styles: Any, expected: tuple[bool, bool]) -> None:
    both, found = ranks.Ranks(2), {}

    def run(rank: int) -> None:
        checked, _ = check(gate(verdicts[rank]), both.exchange_of(rank))
        checked(styles[rank], lambda style: TOLD)
        found[rank] = checked.has_passed, checked.is_due

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: expected, 1: expected}
