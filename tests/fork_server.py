"""Scripts in processes of their own that need not import the frameworks first: `python fork_server.py FOLDER`.

Imports them once. Standard input is a socket that listens; each line of a connection names a script (as JSON: folder,
arguments, env, cwd), and a process that is forked off here runs it as `python ARGUMENTS...` would, up to the end of the
interpreter: with an environment, a session and output of its own (`stdout` and `stderr` in the folder, where its `pid`
and then its exit `code` are noted as well). A connection that closes ends its processes, the last one ends this process
and takes FOLDER along. This library is not among what is imported here: scripts import it themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

FRAMEWORKS = (
    "torch._dynamo",
    "torchmetrics",
    "lightning.pytorch",
    "accelerate",
    "datasets",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.sft_trainer",
)


def serve(home: Path) -> dict[str, Any] | None:
    """In a child, what it is to run; None here, when nobody is connected any more."""
    listening = socket.socket(fileno=0)
    read: dict[socket.socket, bytes] = {}
    children: dict[int, tuple[socket.socket, Path]] = {}
    while True:
        ready = select.select([listening, *read], [], [], 0.02 if children else 20)[0]
        if listening in ready:
            read[listening.accept()[0]] = b""
        for connection in {*ready} - {listening}:
            try:
                new = connection.recv(1 << 16)
            except ConnectionResetError:
                new = b""
            if not new:
                for child, (whose, _) in children.items():
                    if whose is connection:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(child, signal.SIGKILL)
                connection.close()
                del read[connection]
                continue
            *lines, read[connection] = (read[connection] + new).split(b"\n")
            for line in lines:
                task: dict[str, Any] = json.loads(line)
                child = os.fork()
                if not child:
                    listening.detach()  # closed with standard input
                    for each in read:
                        each.close()
                    return task
                children[child] = connection, Path(task["folder"])
                note(children[child][1] / "pid", child)
        for child, (_, folder) in list(children.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                note(folder / "code", os.waitstatus_to_exitcode(status))
                del children[child]
        if not read and not children and ended_with_nobody(home, listening):
            return None


def ended_with_nobody(home: Path, listening: socket.socket) -> bool:
    """Whether nobody has come in the meantime; then nobody will."""
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if select.select([listening], [], [], 0)[0]:
            return False
        shutil.rmtree(home)
    return True


def note(file: Path, value: int) -> None:
    """Whoever sees the file finds all of it."""
    half = file.with_suffix(".half")
    half.write_text(str(value))
    half.rename(file)


def become(task: dict[str, Any]) -> None:
    """What a process has of its own before its script starts."""
    os.setsid()
    for descriptor, path in enumerate((os.devnull, f"{task['folder']}/stdout", f"{task['folder']}/stderr")):
        file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR)
        os.dup2(file, descriptor)
        os.close(file)
    if task["merged"]:
        os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(task["env"])
    os.chdir(task["cwd"])


def run(arguments: list[str]) -> None:
    """`python arguments...`"""
    del sys.path[0]  # where this file is
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    if arguments[0] == "-m":
        sys.argv, sys.path[:0] = arguments[1:], [os.getcwd(), *added]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = arguments, [str(Path(arguments[0]).resolve().parent), *added]
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for name in FRAMEWORKS:
        with contextlib.suppress(Exception):  # a script that needs it says so itself
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # lives on: collections of garbage need not look through it
    task = serve(Path(sys.argv[1]))
    if task is not None:
        become(task)
        run(task["arguments"])
