"""Two ranks of which one ends: `python gone_worker.py OUTPUT SCENARIO...`; a scenario is `how:place:batch:who:adapter`.

Both ranks of a scenario are forked off this process, which has imported everything already. Written as JSON: per
scenario and rank the exit code, the seconds until it ended, and what it printed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", NODE_RANK="0")

import lightning.pytorch as pl
import support
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

TIMEOUT, LIMIT, BATCHES = 30, 45, 26
LENGTHS = ([24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2])


def end(how: str) -> None:
    """Ends this process, or the training."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        raise SystemExit(3)
    if how == "interrupt":
        raise KeyboardInterrupt
    raise RuntimeError("the roof is on fire")


class Ends(support.Module):
    """Ends at one place of one batch."""

    def __init__(self, how: str, place: str, batch: int) -> None:
        super().__init__()
        self.ends, self.place, self.at = how, place, batch

    def come_to(self, place: str, batch: int) -> None:
        if (place, batch) == (self.place, self.at):
            end(self.ends)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.come_to("batch_start", batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.come_to("forward", batch_idx)
        loss = super().training_step(batch, batch_idx)
        if (self.place, self.at) == ("backward", batch_idx):
            loss.register_hook(lambda gradient: end(self.ends))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.come_to("before_step", self.trainer.fit_loop.epoch_loop.batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **options: Any) -> None:
        self.come_to("optimizer_step", batch_idx)
        super().optimizer_step(epoch, batch_idx, *args, **options)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.come_to("batch_end", batch_idx)


class Loader(support.Batches):
    """Ends while it makes a batch."""

    module: Ends

    def __getitem__(self, index: int) -> Any:
        self.module.come_to("loader", index)
        return super().__getitem__(index)


def lightning(rank: int, module: Ends, ours: bool) -> None:
    own = LENGTHS[rank]
    data = Loader([support.make_batch(own[k % len(own) :] + own[: k % len(own)], seed=k) for k in range(BATCHES)])
    data.module = module
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=TIMEOUT))
    options: dict[str, Any] = {"strategy": strategy, "devices": 2, "plugins": [LightningEnvironment()]}
    callbacks: list[pl.Callback] = [support.padmin()] if ours else []
    trainer = support.quiet_trainer(*callbacks, use_distributed_sampler=False, **options)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))


def trainer(rank: int, how: str, place: str, batch: int, ours: bool) -> None:
    """The Trainer of transformers, whose default of the store's patience is half an hour."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
    import test_transformers_trainer as cases
    from transformers import Trainer

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    passes = [0]

    def count(module: Any, *_: Any) -> None:
        passes[0] += module.training
        if place and passes[0] == batch:
            end(how)

    def make() -> Any:
        model = cases.llama()
        model.register_forward_pre_hook(count)
        return model

    options = {"ddp_backend": "gloo", "ddp_timeout": TIMEOUT, "gradient_accumulation_steps": 2}
    cases.train(cases.Ours if ours else Trainer, make, cases.BUDGET if ours else None, **options)


def run(work: Callable[[int], None]) -> list[dict[str, Any]]:
    """Both ranks of a scenario; what outlives the limit is killed and has the code "hung"."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder, children = tempfile.mkdtemp(), []
    sys.stdout.flush()
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            output = os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(MASTER_PORT=str(port), LOCAL_RANK=str(rank))
            try:
                work(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    began, found = time.monotonic(), dict[int, tuple[Any, float]]()
    while len(found) < 2 and time.monotonic() - began < LIMIT:
        for rank, child in enumerate(children):
            if rank not in found:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    found[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - began
        time.sleep(0.02)
    for rank, child in enumerate(children):
        if rank not in found:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found[rank] = "hung", float(LIMIT)
    texts = [Path(folder, str(rank)).read_text() for rank in range(2)]
    return [{"code": found[r][0], "seconds": found[r][1], "text": texts[r]} for r in range(2)]


def work(how: str, place: str, batch: str, who: str, adapter: str, rank: int) -> None:
    how, place = (how, place) if rank == int(who) else ("", "")
    if adapter.startswith("trainer"):
        trainer(rank, how, place, int(batch), ours=adapter == "trainer-ours")
    else:
        lightning(rank, Ends(how, place, int(batch)), ours=adapter == "ours")


def main(output: str, *scenarios: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    results = {}
    for scenario in scenarios:
        results[scenario] = run(partial(work, *scenario.split(":")))
        Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
