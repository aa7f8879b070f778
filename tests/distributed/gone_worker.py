"""Two ranks of which one ends: `python gone_worker.py OUTPUT SCENARIO...`; `how:place:batch:rank:framework:whose`.

`whose` is "stock" or "ours". Both ranks of a scenario are forked off this process, which has imported everything
already. Written as JSON: per scenario and rank the exit code, what it printed, and the seconds from the end of the one
rank's training until the process ended.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", NODE_RANK="0")

import gone_cases as cases
import torch

LIMIT = 45


def in_child(work: Callable[[], None]) -> int:
    """The exit code; errors go where Python takes them at the end of a process."""
    try:
        work()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    return code


def run(work: Callable[[int, Path], None], limit: float = LIMIT) -> list[dict[str, Any]]:
    """Both ranks of a scenario; what outlives the limit is killed and has the code "hung"."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder, children = Path(tempfile.mkdtemp()), []
    sys.stdout.flush()
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            output = os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(MASTER_PORT=str(port), LOCAL_RANK=str(rank))
            try:
                code = in_child(partial(work, rank, folder / "mark"))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    began, found = time.monotonic(), dict[int, tuple[Any, float]]()
    while len(found) < 2 and time.monotonic() - began < limit:
        for rank, child in enumerate(children):
            if rank not in found:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    found[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.02)
    for rank, child in enumerate(children):
        if rank not in found:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found[rank] = "hung", time.monotonic()
    mark = folder / "mark"
    since = float(mark.read_text()) if mark.exists() else began
    return [
        {"code": code, "seconds": ended - since, "text": (folder / str(rank)).read_text(), "came": mark.exists()}
        for rank, (code, ended) in sorted(found.items())
    ]


def work(how: str, place: str, batch: str, who: str, framework: str, whose: str, rank: int, mark: Path) -> None:
    ending = cases.Ending(how if rank == int(who) else "", place, int(batch), mark)
    cases.CASES[framework][0](rank, ending, whose == "ours")


def main(output: str, *scenarios: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    results = {}
    for scenario in scenarios:
        results[scenario] = run(partial(work, *scenario.split(":")))
        Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
