"""Who is still there: a ring of connections on which ranks hear that another one has ended, and why.

    rank 0 -> rank 1 -> rank 2 -> rank 0        "->": holds a connection to, and listens

A process that ends, however it ends, has its connections closed by the system: the rank before it on the ring hears
that at once, without a sign of life that a busy process might be late with. It tells the rank before itself, and so
on around the ring. A rank that knows why it ends says so first. Nothing of it runs in the way of training: one
thread per rank sleeps until something arrives.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from lightning_padmin.printing import printable

_NOBODY = "its process is gone without a word: killed, crashed, or left by an exit"
_AT_END = "it has come to the end of its batches, while others have more: give every rank as many"
_MOST_WORDS, _MOST_BYTES = 1_000, 65_536
_CONNECT_TIMEOUT = 5.0
_RETRY = 0.2

Publish = Callable[[str, str], None]
LookUp = Callable[[str], str | None]


class PeerWatch:
    """One rank's place on the ring.

    Args:
        rank: of this process.
        world: number of ranks, at least 2.
        publish: writes a value under a key that all ranks can look up.
        look_up: the value of a key, None while there is none.
        towards: a host name on the way to the other ranks; says which of this machine's addresses they can reach.

    A rank that has said why it ends may survive its error and train again (`forget`); one that is gone may not.
    """

    def __init__(self, rank: int, world: int, publish: Publish, look_up: LookUp, towards: str | None = None) -> None:
        self.rank = rank
        self._said, self._gone = dict[int, str](), set[int]()
        # The number of this rank's training, and of the last one in which each rank has said why it ends: words may
        # arrive when the training that they ended is over here too, and the next one has begun.
        self._training, self._heard = 0, dict[int, int]()
        # How many exchanges this rank has begun, and is going to; how many each rank had when its batches were at an
        # end, or is going to while another one's are.
        self._begun, self._ahead = 0, 0
        self._at_end, self._beyond = dict[int, int](), dict[int, int]()
        self._next = (rank + 1) % world
        self._look_up, self._is_closed = look_up, False
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._successor: socket.socket | None = None
        self._received: dict[socket.socket, bytes] = {}
        self._wake_read, self._wake_write = socket.socketpair()
        address = _own_address(towards)
        self._door = _listening(address)
        for each in (self._door, self._wake_read):
            if each is not None:
                each.setblocking(False)
                self._selector.register(each, selectors.EVENT_READ)
        _open.add(self)
        # Without a door nobody listens to this rank, and nobody need wait for it.
        where = None if self._door is None else [_machine(), address, self._door.getsockname()[1]]
        publish(_key(rank), json.dumps(where))
        self._thread = threading.Thread(target=self._run, name="padmin-peers", daemon=True)
        self._thread.start()

    def say(self, words: str) -> None:
        """Tells the ranks before this one, as far as they listen, why this one ends; does not wait."""
        self._spread(self.rank, words, is_gone=False, training=self._training)

    def leave(self, words: str) -> None:
        """The same for a process that ends; others know of batches that have come to an end."""
        if self.rank not in self._at_end:
            self.say(words)

    def forget(self) -> None:
        """Another training begins: what ended an earlier one, in processes that are still there, is over.

        To be called equally often on every rank.
        """
        with self._changed:
            self._training = max(self._training + 1, *self._heard.values(), 0)
            self._said = {rank: words for rank, words in self._said.items() if rank in self._gone or self._is_new(rank)}
            self._begun, self._ahead, self._at_end, self._beyond = 0, 0, {}, {}

    def _is_new(self, rank: int) -> bool:
        """Whether what a rank has said last is of this training, or of one that it has begun before this rank."""
        return self._heard.get(rank, -1) >= self._training

    def begin_exchange(self) -> None:
        """This rank meets the others; those that are at an end hear of it. Costs nothing where there are none."""
        self._begun += 1
        self._ahead = max(self._ahead, self._begun)
        if self._at_end:
            self._go_beyond()

    def go_on(self) -> None:
        """This rank has another batch, and may meet other ranks elsewhere before it comes to the next exchange."""
        self._ahead = self._begun + 1
        if self._at_end:
            self._go_beyond()

    def end_exchange(self) -> None:
        """All ranks took part; one that was at an end before has begun another training."""
        if self._at_end:
            with self._changed:
                self._at_end = {rank: begun for rank, begun in self._at_end.items() if begun >= self._begun}

    def come_to_end(self) -> None:
        """Tells the others, as far as they listen, that this rank has no more batches; does not wait."""
        self._note("end", self.rank, self._begun)

    def goes_on(self) -> bool:
        """Whether another rank is known to have more batches than this one, which has come to its end."""
        with self._changed:
            return any(begun > self._begun for rank, begun in self._beyond.items() if rank != self.rank)

    def why(self, ranks: list[int]) -> dict[int, str]:
        """Those of these ranks that have ended, with the reason."""
        with self._changed:
            return {rank: self._said[rank] for rank in ranks if rank in self._said}

    def wait(self, timeout: float) -> dict[int, str]:
        """What is heard of other ranks within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._said.keys() - {self.rank}), timeout)
            return {rank: words for rank, words in self._said.items() if rank != self.rank}

    def close(self) -> None:
        """Leaves the ring; the rank before hears that this one has ended."""
        self._is_closed = True
        with suppress(OSError):
            self._wake_write.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)
            if not self._thread.is_alive():
                self._close_all()

    def _run(self) -> None:
        try:
            self._connect()
            while not self._is_closed:
                for key, _ in self._selector.select():
                    self._take(key.fileobj)  # type: ignore[arg-type]
        except Exception:  # whatever it is, training goes on as it would without
            if not self._is_closed:
                return  # connections stay open: closed ones would say that this process has ended
        self._close_all()

    def _connect(self) -> None:
        """To the next rank, as soon as its address is known; meanwhile the rank before may connect."""
        while not self._is_closed:
            text = self._look_up(_key(self._next))
            if text is not None:
                break
            for key, _ in self._selector.select(_RETRY):
                self._take(key.fileobj)  # type: ignore[arg-type]
        else:
            return
        where = json.loads(text)
        if where is None:
            return  # it has no door
        machine, address, port = where
        if address.startswith("127.") and machine != _machine():
            return  # another machine's loopback: nobody to be heard there
        try:
            self._successor = socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT)
        except ConnectionRefusedError:
            self._spread(self._next, _NOBODY, is_gone=True)  # it was there when it published
            return
        except OSError:  # a network on which ranks do not reach each other
            return
        _keep_alive(self._successor)
        self._successor.setblocking(False)
        self._received[self._successor] = b""
        self._selector.register(self._successor, selectors.EVENT_READ)

    def _take(self, ready: socket.socket) -> None:
        if ready is self._door:
            with suppress(OSError):
                listener, _ = self._door.accept()
                listener.settimeout(1.0)
                self._listeners.append(listener)
                for rank, words in list(self._said.items()):
                    _send(listener, rank, words, rank in self._gone, self._heard.get(rank, 0))
                for what, known in (("end", self._at_end), ("on", self._beyond)):
                    for rank, begun in list(known.items()):
                        _send(listener, what, rank, begun)
        elif ready is self._wake_read:
            with suppress(OSError):
                self._wake_read.recv(64)
        else:
            self._hear(ready)

    def _hear(self, successor: socket.socket) -> None:
        try:
            data = successor.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(successor)
            self._spread(self._next, _NOBODY, is_gone=True)
            return
        *lines, rest = (self._received[successor] + data).split(b"\n")
        self._received[successor] = rest[-_MOST_BYTES:]
        for line in lines:
            with suppress(ValueError, TypeError):
                first, second, third, *training = json.loads(line)
                if isinstance(first, str):
                    self._note(first, int(second), int(third))
                else:
                    self._spread(int(first), str(second), bool(third), int(*training))

    def _spread(self, rank: int, words: str, is_gone: bool, training: int = 0) -> None:
        """Notes what has become of a rank, and tells the rank before this one, once."""
        with self._changed:
            if rank in self._gone or (training <= self._heard.get(rank, -1) and not is_gone):
                return
            if is_gone and self._at_end.get(rank, self._ahead) < self._ahead:
                words = _AT_END
            words = printable(words, _MOST_WORDS)
            if is_gone:
                self._gone.add(rank)
                words = self._said.setdefault(rank, words)  # its own words, where it had some
            else:
                self._heard[rank] = training
                if self._is_new(rank):
                    self._said[rank] = words
            self._changed.notify_all()
        self._pass_on(rank, words, is_gone, training)

    def _note(self, what: str, rank: int, begun: int) -> None:
        """How far a rank has come, told the rank before this one, once."""
        with self._changed:
            known = self._at_end if what == "end" else self._beyond
            if known.get(rank) == begun:
                return
            known[rank] = begun
            self._changed.notify_all()
        self._pass_on(what, rank, begun)
        if what == "end":
            self._go_beyond()

    def _go_beyond(self) -> None:
        """Tells those whose batches are at an end, where this rank has begun more; once in a training."""
        ends = [begun for rank, begun in list(self._at_end.items()) if rank != self.rank]
        if ends and min(ends) < self._ahead and self._beyond.get(self.rank, 0) <= max(ends):
            self._note("on", self.rank, self._ahead)

    def _pass_on(self, *message: object) -> None:
        for listener in list(self._listeners):
            _send(listener, *message)

    def _close_all(self) -> None:
        with suppress(Exception):
            self._selector.close()
        for each in [self._door, self._wake_read, self._wake_write, self._successor, *self._listeners]:
            if each is not None:
                with suppress(OSError):
                    each.close()


_open: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked process (a loader's worker) must not hold connections open for a rank that has ended."""
    for watch in list(_open):
        watch._is_closed = True
        watch._close_all()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def _listening(address: str) -> socket.socket | None:
    """A socket that others can connect to; None where the system has none to give."""
    with suppress(OSError):
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            door.bind((address, 0))
            door.listen(8)
        except OSError:
            door.close()
            raise
        return door
    return None


def _send(listener: socket.socket, *message: object) -> None:
    with suppress(OSError):
        listener.sendall(json.dumps(message).encode() + b"\n")


def _key(rank: int) -> str:
    return f"door/{rank}"


def _keep_alive(connection: socket.socket) -> None:
    """A machine that is switched off closes nothing; then the system asks, and hears nothing, within half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _machine() -> str:
    """What tells machines, and networks of containers on one, apart."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def _own_address(towards: str | None) -> str:
    """This machine's address on the way to a host; that of the loopback where there is none."""
    # Connecting a datagram socket sends nothing: it only asks the system for a route.
    for host in [towards, "192.0.2.1"] if towards else []:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            address = str(probe.getsockname()[0])
            if not address.startswith("127.") or host in ("localhost", "127.0.0.1"):
                return address
    return "127.0.0.1"


__all__ = ["PeerWatch"]
