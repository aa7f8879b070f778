"""One to four ranks, in threads: equal counts, the un-split mean over ranks, and a refusal on all if on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from ranks import Ranks

from fuzz import model, reference
from fuzz.amounts import Amount, amounts
from fuzz.cases import Case, Sizes, lookup, sizes
from fuzz.mutations import mask_of_zeros
from lightning_padmin import MicroBatcher, MicroBatches, PadMinError
from lightning_padmin.errors import PeerError

pytestmark = pytest.mark.filterwarnings("ignore::lightning_padmin.errors.PadMinWarning")
EXACT = 1e-12


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def prepare_on_ranks(threads: ThreadPoolExecutor, cases: list[Case]) -> list[MicroBatches | Exception]:
    """What each rank gets, or what it raises."""
    ranks = Ranks(len(cases))

    def prepare(rank: int) -> MicroBatches | Exception:
        case = cases[rank]
        exchange = ranks.exchange_of(rank)
        try:
            return MicroBatcher(case.config, exchange=exchange, encoder_decoder=case.encoder_decoder).prepare(
                case.batch
            )
        except Exception as error:
            return error

    found = list(threads.map(prepare, range(len(cases))))
    assert set(ranks.calls) == {1}, "not one exchange on every rank"
    return found


def check_refused(found: list[Any], bad: set[int]) -> None:
    for rank, result in enumerate(found):
        if rank in bad:
            assert isinstance(result, PadMinError)
            assert not isinstance(result, PeerError)
        else:
            assert isinstance(result, PeerError)
            assert ", ".join(map(str, sorted(bad))) in str(result)


def divisor_of_all(cases: list[Case]) -> float | None:
    """With normalize="global" the mean is over all ranks, each of which is then averaged over ranks."""
    if cases[0].options["normalize"] != "global":
        return None
    return sum(sum(model.row_weights(case)) for case in cases) / len(cases)


def check_run(cases: list[Case], found: list[MicroBatches]) -> None:
    assert len({len(micros) for micros in found}) == 1
    total = divisor_of_all(cases)
    split, truth = [], []
    for case, micros in zip(cases, found, strict=True):
        reference.check_micro_batches(case, micros)
        tokens = zip(model.token_weights(case), model.row_weights(case), strict=True)
        if any(weight and (count or not micros.table.counts_loss) for count, weight in tokens):
            dummies = [micro for micro in micros if micro.is_dummy]
            for micro in dummies:
                assert torch.isfinite(model.loss_of(case, model.view(case, micro.batch)))
                assert len(lookup(micro.batch, case.paths[str(case.roles["mask"])])) == 1
        if sum(model.row_weights(case)):
            split.append(model.gradient(model.split_loss(case, micros)))
            truth.append(model.gradient(model.reference_loss(case, total)))
    if truth:
        assert model.difference(torch.stack(split).sum(0), torch.stack(truth).sum(0)) <= EXACT


@amounts(500)
def test_ranks_run_alike_or_refuse_alike(
    amount: Amount, threads: ThreadPoolExecutor, record_property: Callable[[str, Any], None]
) -> None:
    def check(sizes: list[Sizes], how: str, everywhere: str, bad: int) -> str:
        wrong: set[int] = set()
        cases = []
        for rank, size in enumerate(sizes):

            def change(case: Case, rank: int = rank) -> None:
                case.options["normalize"] = everywhere
                if bad % 3 == 0 and bad >> (2 + rank) & 1:
                    mask_of_zeros(case, case.dice("wrong"))
                    wrong.add(rank)

            cases.append(replace(size, features=size.features - {"no labels"}).make(how=how, change=change))
        found = prepare_on_ranks(threads, cases)
        if wrong:
            check_refused(found, wrong)
            return "refused"
        for result in found:
            if isinstance(result, Exception):
                raise result
        check_run(cases, found)  # type: ignore[arg-type]
        return "with dummies" if any(micros.stats.dummies for micros in found) else "alike"  # type: ignore[union-attr]

    tally = amount.run(
        record_property,
        check,
        st.lists(sizes(5, 6), min_size=1, max_size=4),
        st.sampled_from(["token-mean", "token-mean", "row-mean", "sum", "function"]),
        st.sampled_from(["rank", "global"]),
        st.integers(0, 63),
    )
    assert min(tally["refused"], tally["with dummies"], tally["alike"]) > tally["examples"] / 20
