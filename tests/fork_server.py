"""Scripts in processes of their own that need not import the frameworks first: `python fork_server.py`.

Imports them once. Each line on standard input then names a script (as JSON: folder, arguments, env, cwd), and a process
that is forked off here runs it as `python ARGUMENTS...` would, up to the end of the interpreter: with an environment,
a session and output of its own (`stdout` and `stderr` in the folder, where its `pid` and then its exit `code` are noted
as well). This library is not among what is imported here: scripts import it themselves.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
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


def serve() -> dict[str, Any] | None:
    """In a child, what it is to run; None here, when standard input is at its end."""
    folders: dict[int, Path] = {}
    read = b""
    while True:
        if select.select([0], [], [], 0.02 if folders else None)[0]:
            new = os.read(0, 1 << 16)
            if not new:
                break
            *lines, read = (read + new).split(b"\n")
            for line in lines:
                task: dict[str, Any] = json.loads(line)
                child = os.fork()
                if not child:
                    return task
                folders[child] = Path(task["folder"])
                note(folders[child] / "pid", child)
        for child, folder in list(folders.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                note(folder / "code", os.waitstatus_to_exitcode(status))
                del folders[child]
    for child in folders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return None


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
    task = serve()
    if task is not None:
        become(task)
        run(task["arguments"])
