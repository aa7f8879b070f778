"""Starting one process per rank, with a timeout for all of them; scripts in processes that are forked or fresh."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Ranks = list[dict[str, Any]]
ENVIRONMENT = dict(os.environ)  # without what single tests change
RUN = (os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex)[:12]


class Server:
    """Forks processes that have the frameworks already; see `fork_server`.

    All workers of a run of pytest have it in common: the first one that needs it starts it, and it ends with the last.
    """

    def __init__(self, which: int) -> None:
        self.folder = Path(tempfile.gettempdir()) / f"forked-{RUN}-{which}"
        self.socket = socket.socket(socket.AF_UNIX)
        self.count = 0
        while not self._connected():  # the folder was just removed, by a server that ends
            pass

    def _connected(self) -> bool:
        self.folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError), (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(lock.fileno()), os.stat(self.folder / "lock")):
                return False
            if not (self.folder / "socket").exists():
                self._start()
            self.socket.connect(str(self.folder / "socket"))
            return True
        return False

    def _start(self) -> None:
        with socket.socket(socket.AF_UNIX) as listening, (self.folder / "said").open("w") as said:
            listening.bind(str(self.folder / "socket"))
            listening.listen()
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(self.folder)],
                env={"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **ENVIRONMENT},
                stdin=listening,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def ask(self, task: dict[str, Any]) -> Path:
        """The folder of a process that starts with the task."""
        folder = self.folder / f"{os.getpid()}-{self.count}"
        folder.mkdir()
        self.count += 1
        self.socket.sendall((json.dumps(task | {"folder": str(folder)}) + "\n").encode())
        return folder

    def lives(self) -> bool:
        self.socket.setblocking(False)
        try:
            return bool(self.socket.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self.socket.setblocking(True)


@functools.cache
def server(which: int) -> Server:
    """One for the first rank and one for the others: processes of one server have the same hash seed."""
    return Server(which)


class Forked:
    """Of `subprocess.Popen`, what tests need, for a script in a process that is forked off a server."""

    def __init__(
        self,
        arguments: Sequence[object],
        which: int = 0,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        merged: bool = True,
    ) -> None:
        self.args = [str(each) for each in arguments]
        self.server = server(which)
        env, cwd = dict(os.environ if env is None else env), cwd or Path.cwd()
        self.folder = self.server.ask({"arguments": self.args, "env": env, "cwd": str(cwd), "merged": merged})
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and (self.folder / "code").exists():
            self.returncode = int((self.folder / "code").read_text())
        if self.returncode is None:
            assert self.server.lives(), (self.folder.parent / "said").read_text()[-4000:]
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout, self.read("stdout"), self.read("stderr"))
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def read(self, name: str) -> str:
        file = self.folder / name
        return file.read_text() if file.exists() else ""

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.wait(timeout)
        return self.read("stdout"), self.read("stderr")

    def kill(self) -> None:
        """With the processes that it has started."""
        if self.poll() is None and (self.folder / "pid").exists():
            os.killpg(int((self.folder / "pid").read_text()), signal.SIGKILL)


def run(
    *arguments: object, timeout: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, *arguments])` in a forked process, with its output as text."""
    process = Forked(arguments, env=env, cwd=cwd, merged=False)
    try:
        output, errors = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(1), output, errors)


def start(
    worker: Path, *arguments: object, ranks: int = 2, fresh: bool = False
) -> Sequence[subprocess.Popen[str] | Forked]:
    """`python worker arguments...`, once for each rank, with a free port on this machine.

    Fresh processes import everything themselves, forked ones have the frameworks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    command = [str(worker), *map(str, arguments)]
    if not fresh:
        return [Forked(command, min(rank, 1), common | {"LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env=common | {"LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(processes: Sequence[subprocess.Popen[str] | Forked], timeout: float) -> list[tuple[int, str]]:
    """Exit code and output of every process; kills what outlives the timeout, and fails."""
    end = time.monotonic() + timeout
    try:
        outputs = [process.communicate(timeout=max(end - time.monotonic(), 1))[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    codes = [process.poll() for process in processes]
    return [(-1 if code is None else code, output) for code, output in zip(codes, outputs, strict=True)]


def results(worker: Path, output: Path, *arguments: object, timeout: float = 240, fresh: bool = False) -> Ranks:
    """What the ranks of a worker that succeeds have saved beside `output`."""
    for code, text in finish(start(worker, output, *arguments, fresh=fresh), timeout):
        assert code == 0, text[-6000:]
    return [torch.load(output.with_suffix(f".rank{rank}.pt"), weights_only=False) for rank in range(2)]
