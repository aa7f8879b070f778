"""Running out of memory: what is one, what it says, and what ranks tell each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from ranks import Ranks, ThreadBoard
from support import make_batch

from lightning_padmin import MicroBatcher, MicroBatches, PadMinConfig
from lightning_padmin.distributed.collectives import Exchange
from lightning_padmin.errors import PadMinError, PeerError
from lightning_padmin.microbatching import memory
from lightning_padmin.microbatching.memory import MemoryGuard, OutOfMemoryError, is_out_of_memory

CONFIG = PadMinConfig(token_budget=24, launch_cost=0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_is_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_real_allocator_that_fails_is_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def run(batches: MicroBatches, fails: Any = None, **options: Any) -> list[int]:
    """The micro-batches that ran; `fails` is (index, error, in the backward pass)."""
    guard, done = MemoryGuard(batches, **options), []
    index, error, backward = fails or (None, None, False)
    for k in range(len(batches)):
        with guard.around(k):
            if k == index and not backward:
                raise error
            guard.forward_is_done(k)
            if k == index:
                raise error
            done.append(k)
    return done


def prepared(lengths: list[int], exchange: Exchange | None = None) -> MicroBatches:
    return MicroBatcher(CONFIG, exchange=exchange).prepare(make_batch(lengths))


@pytest.mark.parametrize("backward", [False, True])
def test_the_message_names_rank_shape_and_the_next_budget(backward: bool) -> None:
    out = torch.OutOfMemoryError("CUDA out of memory.")
    batches = prepared([8, 8, 8, 3, 3])
    assert [len(batches), batches[0].batch["input_ids"].shape] == [2, (3, 8)]
    with pytest.raises(OutOfMemoryError) as caught:
        run(batches, (0, out, backward), rank=5)
    words = "out of memory on rank 5 in micro-batch 1 of 2: 3 x 8 = 24 slots. Set token_budget=12"
    assert str(caught.value) == f"{words} (CUDA out of memory.)"
    assert caught.value.__cause__ is out
    assert isinstance(caught.value, PadMinError)
    assert isinstance(caught.value, torch.OutOfMemoryError)  # handlers that users have see it


def test_a_budget_that_one_row_fits_in_is_named_at_least() -> None:
    with pytest.raises(OutOfMemoryError, match=r"2 x 12 = 24 slots. Set token_budget=12 "):
        run(prepared([12, 12]), (0, torch.OutOfMemoryError(), False))
    with pytest.warns(match="24"):
        batches = prepared([30, 2])
    with pytest.raises(OutOfMemoryError, match=r"1 x 30 = 30 slots. One row alone does not fit, whatever"):
        run(batches, (0, torch.OutOfMemoryError(), False))


def test_other_errors_are_passed_on_as_they_are() -> None:
    error = KeyError("x")
    with pytest.raises(KeyError) as caught:
        run(prepared([4, 3]), (0, error, False))
    assert caught.value is error
    assert run(prepared([8, 8, 8, 3, 3])) == [0, 1]


# Ranks

LENGTHS = ([8, 8, 8, 3, 3], [2, 2])


def on_ranks(*fails: Any) -> tuple[list[Any], dict[tuple[int, int], list[int]]]:
    ranks, notes = Ranks(2), dict[tuple[int, int], list[int]]()

    def work(rank: int) -> Any:
        batches = prepared(LENGTHS[rank], ranks.exchange_of(rank))
        try:
            return run(batches, fails[rank], board=ThreadBoard(notes, rank), rank=rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2))), notes


@pytest.mark.parametrize(("index", "backward"), [(0, False), (0, True), (1, False)])
def test_all_ranks_raise_the_same(index: int, backward: bool) -> None:
    (first, second), _ = on_ranks((index, torch.OutOfMemoryError(), backward), None)
    shape = ("3 x 8 = 24 slots. Set token_budget=12", "2 x 3 = 6 slots. Set token_budget=3")[index]
    assert type(first) is type(second) is OutOfMemoryError
    for error in (first, second):
        assert str(error).startswith(f"out of memory on rank 0 in micro-batch {index + 1} of 2: {shape} (")


def test_the_last_backward_pass_is_told_to_nobody() -> None:
    """It reduces gradients, so the others are in that already."""
    (first, second), notes = on_ranks((1, torch.OutOfMemoryError(), True), None)
    assert isinstance(first, OutOfMemoryError)
    assert second == [0, 1]
    assert all(values[0] == 0 for values in notes.values())


def test_ranks_that_fail_differently() -> None:
    (first, second), _ = on_ranks((0, KeyError("x"), False), (0, torch.OutOfMemoryError(), False))
    assert isinstance(first, KeyError)
    assert str(second).startswith("out of memory on rank 1 in micro-batch 1 of 2")
    (first, second), _ = on_ranks((0, KeyError("x"), False), None)
    assert isinstance(first, KeyError)
    assert str(second) == "rank 0 raised an error in training; its message stands in that rank's log"
    assert isinstance(second, PeerError)


def test_ranks_tell_each_other_only_while_memory_may_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    def grows(first: int) -> list[list[bool]]:
        monkeypatch.setattr(memory, "_FIRST", first)
        ranks = Ranks(2)

        def work(rank: int) -> list[bool]:
            batcher = MicroBatcher(CONFIG, exchange=ranks.exchange_of(rank))
            rows = ([4, 4], [4, 3], [2, 4 + 2 * rank], [6, 2], [9, 2])
            return [batcher.prepare(make_batch(lengths)).grows for lengths in rows]

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(work, range(2)))

    # Third: no larger. Fourth: no larger for rank 1, and for rank 0 no larger than 4 + 4.
    assert grows(0) == [[True, False, False, False, True]] * 2
    assert grows(2) == [[True, True, False, False, True]] * 2  # the optimizer's states come with the first step


def test_nothing_is_noted_later() -> None:
    notes: dict[tuple[int, int], list[int]] = {}
    batches = prepared([8, 8, 8, 3, 3])
    batches.grows = False
    with pytest.raises(OutOfMemoryError, match="Set token_budget=12"):
        run(batches, (0, torch.OutOfMemoryError(), False), board=ThreadBoard(notes, 0))
    assert notes == {}


@pytest.mark.parametrize(
    "text", ["CUDA out of memory. Tried to allocate 2 GiB", "DefaultCPUAllocator: not enough memory"]
)
def test_others_that_look_for_it_find_it(text: str) -> None:
    from accelerate.utils.memory import should_reduce_batch_size

    with pytest.raises(OutOfMemoryError) as caught:
        run(prepared([8, 8]), (0, RuntimeError(text), False))
    assert should_reduce_batch_size(caught.value)
    assert text in str(caught.value)
