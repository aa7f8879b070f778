"""Starting one process per rank, with a timeout for all of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

Ranks = list[dict[str, Any]]


def start(worker: Path, *arguments: object, ranks: int = 2) -> list[subprocess.Popen[str]]:
    """`python worker arguments...`, once for each rank, with a free port on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    command = [sys.executable, str(worker), *map(str, arguments)]
    return [
        subprocess.Popen(
            command, env=common | {"LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float) -> list[tuple[int, str]]:
    """Exit code and output of every process; kills what outlives the timeout, and fails."""
    end = time.monotonic() + timeout
    try:
        outputs = [process.communicate(timeout=max(end - time.monotonic(), 1))[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def results(worker: Path, output: Path, *arguments: object, timeout: float = 240) -> Ranks:
    """What the ranks of a worker that succeeds have saved beside `output`."""
    for code, text in finish(start(worker, output, *arguments), timeout):
        assert code == 0, text[-6000:]
    return [torch.load(output.with_suffix(f".rank{rank}.pt"), weights_only=False) for rank in range(2)]
