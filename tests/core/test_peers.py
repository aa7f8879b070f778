"""The ring on which ranks hear that another one has ended, and why."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_padmin.distributed.peers import PeerWatch

Ring = list[PeerWatch]


def ring(world: int) -> Ring:
    store: dict[str, str] = {}
    return [PeerWatch(rank, world, store.__setitem__, store.get, "127.0.0.1") for rank in range(world)]


@pytest.fixture
def ranks() -> Iterator[Ring]:
    watches = ring(4)
    until(lambda: all(each._successor is not None for each in watches))
    yield watches
    for each in watches:
        each.close()


def until(happens: Callable[[], bool], timeout: float = 5.0) -> None:
    end = time.monotonic() + timeout
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_all_hear_of_a_rank_that_is_gone(ranks: Ring) -> None:
    ranks[2].close()
    for rank in (0, 1, 3):
        until(lambda rank=rank: 2 in ranks[rank].why([0, 1, 2, 3]))  # type: ignore[misc]
        assert "without a word" in ranks[rank].why([2])[2]
        assert ranks[rank].why([0, 1, 3]) == {}


def test_its_own_words_come_first_and_stay(ranks: Ring) -> None:
    ranks[1].say("ValueError: no such token")
    assert ranks[3].wait(5.0) == {1: "ValueError: no such token"}
    ranks[1].close()
    until(lambda: 1 in ranks[0]._gone)
    assert ranks[0].wait(0.0) == {1: "ValueError: no such token"}


def test_words_of_an_earlier_training_are_forgotten_but_not_who_is_gone(ranks: Ring) -> None:
    ranks[1].say("KeyboardInterrupt: ")
    ranks[0].wait(5.0)
    ranks[0].forget()
    assert ranks[0].why([1, 2, 3]) == {}
    ranks[2].close()
    ranks[0].wait(5.0)
    until(lambda: 2 in ranks[0]._gone)
    ranks[0].forget()
    assert list(ranks[0].why([1, 2, 3])) == [2]


def test_words_that_arrive_late_are_of_their_own_training(ranks: Ring) -> None:
    """Rank 1 has told why it ends, and others have begun the next training before they hear of it."""
    for rank in (0, 2, 3):
        ranks[rank].forget()
    ranks[1].say("ValueError: of the training before")
    until(lambda: all(each._heard.get(1) == 0 for each in ranks))  # it came around
    assert [each.why([1]) for each in (ranks[0], ranks[2], ranks[3])] == [{}] * 3
    ranks[1].forget()
    ranks[1].say("ValueError: of this one")
    for rank in (0, 2, 3):
        until(lambda rank=rank: ranks[rank].why([1]) == {1: "ValueError: of this one"})  # type: ignore[misc]


def test_words_that_arrive_early_stay(ranks: Ring) -> None:
    """Rank 1 has ended two trainings before the others begin the second."""
    ranks[1].say("ValueError: first")
    ranks[1].forget()
    ranks[1].say("ValueError: second")
    for rank in (0, 2, 3):
        until(lambda rank=rank: ranks[rank].why([1]) == {1: "ValueError: second"})  # type: ignore[misc]
        ranks[rank].forget()
        assert ranks[rank].why([1]) == {1: "ValueError: second"}
        ranks[rank].forget()
        assert ranks[rank].why([1]) == {}


def exchange(ranks: Ring) -> None:
    for each in ranks:
        each.begin_exchange()
    for each in ranks:
        each.end_exchange()


@pytest.mark.parametrize("goes_on", [PeerWatch.begin_exchange, PeerWatch.go_on])
@pytest.mark.parametrize("late", [False, True])
def test_a_rank_at_its_end_hears_that_another_one_goes_on(
    ranks: Ring, goes_on: Callable[[PeerWatch], None], late: bool
) -> None:
    exchange(ranks)
    if not late:
        goes_on(ranks[3])
    ranks[1].come_to_end()
    until(lambda: 1 in ranks[3]._at_end)
    if late:
        assert not ranks[1].goes_on()
        goes_on(ranks[3])
    until(ranks[1].goes_on)
    ranks[1].close()
    assert "the end of its batches" in ranks[3].wait(5.0)[1]


def test_ranks_at_the_same_end_wait_for_each_other(ranks: Ring) -> None:
    exchange(ranks)
    for rank in (1, 2, 3):
        ranks[rank].come_to_end()
    until(lambda: all(len(each._at_end) == 3 for each in ranks))
    ranks[0].come_to_end()
    until(lambda: all(len(each._at_end) == 4 for each in ranks))
    assert not any(each.goes_on() for each in ranks)


def test_an_end_that_is_heard_in_the_next_training_counts_for_nothing(ranks: Ring) -> None:
    exchange(ranks)
    for each in ranks:
        each.forget()
    ranks[1]._note("end", 1, 1)  # late
    until(lambda: all(1 in each._at_end for each in ranks))
    for _ in range(2):
        exchange(ranks)
    for each in ranks:
        each.come_to_end()
    until(lambda: all(len(each._at_end) == 4 for each in ranks))
    assert not any(each.goes_on() for each in ranks)
    ranks[1].close()
    assert "without a word" in ranks[3].wait(5.0)[1]


def test_nobody_is_missed_while_all_are_there(ranks: Ring) -> None:
    assert ranks[0].wait(0.1) == {}


def test_odd_words_arrive_shortened_and_as_a_terminal_may_show_them(ranks: Ring) -> None:
    ranks[3].say('two\nlines "quoted" \x1b[31m ' + "é" * 10_000)
    words = ranks[0].wait(5.0)[3]
    assert words.startswith('two\\nlines "quoted" \\x1b[31m é')
    assert words.isprintable()
    assert len(words) < 1_100


def test_a_machine_without_free_ports_has_no_ring_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(self: socket.socket, address: tuple[str, int]) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    store: dict[str, str] = {}
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "bind", bind)
        first = PeerWatch(0, 2, store.__setitem__, store.get, "127.0.0.1")
    second = PeerWatch(1, 2, store.__setitem__, store.get, "127.0.0.1")
    try:
        until(lambda: first._successor is not None)
        assert second.wait(0.1) == {}
        second.say("ValueError: no such token")
        assert first.wait(5.0) == {1: "ValueError: no such token"}
    finally:
        first.close()
        second.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_whose_thread_has_failed_is_not_gone(ranks: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("whatever it is")

    monkeypatch.setattr(ranks[2], "_take", fail)
    ranks[2]._wake_write.send(b"x")
    until(lambda: not ranks[2]._thread.is_alive())
    assert ranks[1].wait(0.2) == {}
    ranks[2].close()  # control
    assert list(ranks[1].wait(5.0)) == [2]


PARENT = """
import os, sys, time
from lightning_padmin.distributed.peers import PeerWatch
folder = sys.argv[1]
def publish(key, value): open(os.path.join(folder, key.replace("/", "_") + ".part"), "w").write(value); os.rename(
    os.path.join(folder, key.replace("/", "_") + ".part"), os.path.join(folder, key.replace("/", "_")))
def look_up(key):
    path = os.path.join(folder, key.replace("/", "_"))
    return open(path).read() if os.path.exists(path) else None
watch = PeerWatch(1, 2, publish, look_up, "127.0.0.1")
if os.fork() == 0:  # a loader's worker, which outlives its parent
    time.sleep(20)
    os._exit(0)
open(os.path.join(folder, "forked"), "w").close()
time.sleep(60)
"""


def test_a_worker_that_outlives_its_parent_holds_no_connection_open(tmp_path: Path) -> None:
    def publish(key: str, value: str) -> None:
        (tmp_path / key.replace("/", "_")).write_text(value)

    def look_up(key: str) -> str | None:
        path = tmp_path / key.replace("/", "_")
        return path.read_text() if path.exists() else None

    process = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    watch = PeerWatch(0, 2, publish, look_up, "127.0.0.1")
    try:
        until(lambda: (tmp_path / "forked").exists() and watch._successor is not None, timeout=30)
        assert watch.wait(0.2) == {}
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert "without a word" in watch.wait(5.0)[1]
    finally:
        process.kill()
        watch.close()
