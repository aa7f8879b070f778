"""Two ranks, of which one is killed while they save: `python save_worker.py FOLDER ADAPTER:PLACE:RANK ...`.

Adapters: `lightning` (ModelCheckpoint), `call` (`trainer.save_checkpoint` in a hook), `fsdp2` (a folder of shards),
`trainer` and `grpo`, also with `-stock`. Places: `state` (while this rank's state is asked for), `file` (half of it is
on the disk), `written` (before the ranks meet again), `never`. Then the run goes on from the last whole checkpoint.
Written as JSON: exit codes, seconds and texts of both ranks, and what was there. Forked as in `gone_worker`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))

import torch
from gone_cases import DDPStrategy, LightningEnvironment, support, timedelta
from gone_worker import run as run_with_mark
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_padmin import LengthBucketBatchSampler, PadMinCallback

SECOND = 2  # of the checkpoints; the first one is whole
ROWS = [24, 20, 12, 12, 6, 6, 6, 6, 3, 2, 9, 17, 5, 5, 4, 8, 7, 11, 3, 14]
Places = Callable[[str], None]


def killer(place: str) -> Places:
    """Ends this process at the second time that it comes to a place."""
    seen = [0]

    def come_to(found: str) -> None:
        seen[0] += found == place
        if found == place and seen[0] == SECOND:
            os.kill(os.getpid(), signal.SIGKILL)

    return come_to


class Loader(torch.utils.data.DataLoader[Any]):
    """Keeps the sampler's place, which Lightning asks for."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.batch_sampler.state_dict()  # type: ignore[union-attr]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch_sampler.load_state_dict(state)  # type: ignore[union-attr]


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def collate(indices: list[int]) -> Any:
    return support.make_batch([ROWS[k] for k in indices], seed=sum(indices))


class Callback(PadMinCallback):
    come_to: Places = staticmethod(lambda place: None)

    def state_dict(self) -> dict[str, Any]:
        type(self).come_to("state")
        return super().state_dict()


class Writes(TorchCheckpointIO):
    """Has half of a checkpoint in its place for a while."""

    def __init__(self, come_to: Places) -> None:
        super().__init__()
        self.come_to = come_to

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        whole = Path(path).read_bytes()
        Path(path).write_bytes(whole[: len(whole) // 2])
        self.come_to("file")
        Path(path).write_bytes(whole)
        self.come_to("written")


class Module(support.Module):
    def __init__(self) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(
            next(self.model.parameters()), DTensor
        ):
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(torch.zeros(1))


def lightning(adapter: str, come_to: Places, folder: Path, checkpoint: Path | None) -> Any:
    Callback.come_to = staticmethod(come_to)
    gloo: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=20)}
    sharded = adapter == "fsdp2"
    strategy: Any = (
        ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **gloo) if sharded else DDPStrategy(**gloo)
    )
    saver: Any = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    if adapter == "call":

        def save(trainer: Any, *_: Any) -> None:
            if trainer.global_step % 2 == 0:
                trainer.save_checkpoint(folder / f"step={trainer.global_step}.ckpt")

        saver = LambdaCallback(on_train_batch_end=save)
    module, sampler = Module(), LengthBucketBatchSampler(ROWS, 30)
    trainer = support.quiet_trainer(
        Callback(token_budget=24, launch_cost=4),
        saver,
        strategy=strategy,
        devices=2,
        max_epochs=2,
        enable_checkpointing=True,
        use_distributed_sampler=False,
        plugins=[LightningEnvironment(), *([] if sharded else [Writes(come_to)])],
    )
    if sharded:
        places_of_shards(come_to)
    trainer.fit(module, Loader(Rows(), batch_sampler=sampler, collate_fn=collate), ckpt_path=checkpoint)
    return torch.cat(
        [(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in module.parameters()]
    )


def places_of_shards(come_to: Places) -> None:
    """Every rank writes a file of its own; the first one then says in another which there are."""
    from torch.distributed.checkpoint import FileSystemWriter

    write, finish = FileSystemWriter.write_data, FileSystemWriter.finish

    def write_data(self: Any, *args: Any, **options: Any) -> Any:
        found = write(self, *args, **options)
        come_to("file")
        return found

    def finish_all(self: Any, *args: Any, **options: Any) -> None:
        finish(self, *args, **options)
        come_to("written")

    FileSystemWriter.write_data, FileSystemWriter.finish = write_data, finish_all  # type: ignore[method-assign]


def trainer(adapter: str, come_to: Places, folder: Path, checkpoint: Path | None, rank: int) -> Any:
    """That of transformers, or GRPO with completions from a script."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")

    class Saves:
        def train(self, *args: Any, **options: Any) -> Any:
            resumed = None if checkpoint is None else str(checkpoint)
            return super().train(resume_from_checkpoint=resumed)  # type: ignore[misc]

        def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
            self._calls = [self.state.global_step]  # type: ignore[attr-defined]
            return super()._generate_single_turn(*args, **options)  # type: ignore[misc]

        def _save_checkpoint(self, *args: Any, **options: Any) -> None:
            come_to("state")
            super()._save_checkpoint(*args, **options)  # type: ignore[misc]
            come_to("written")

        def _save_optimizer_and_scheduler(self, *args: Any, **options: Any) -> None:
            come_to("file")
            super()._save_optimizer_and_scheduler(*args, **options)  # type: ignore[misc]

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01}
    options |= {"ddp_backend": "gloo", "ddp_timeout": 20, "max_steps": 6, "gradient_accumulation_steps": 2}
    options["output_dir"] = str(folder)
    if adapter.startswith("grpo"):
        import trl_cases

        kinds = trl_cases.trainers(outer=(Saves,))
        is_ours = adapter == "grpo"
        return trl_cases.train(kinds[is_ours], options, trl_cases.padmin() if is_ours else None).parameters
    import test_transformers_trainer as cases
    from transformers import Trainer

    base, config = (Trainer, None) if adapter == "trainer-stock" else (cases.Ours, cases.BUDGET)
    return cases.train(type("Saving", (Saves, base), {}), cases.llama, config, **options).parameters


def train(adapter: str, place: str, who: int, folder: Path, checkpoint: Path | None, rank: int) -> None:
    come_to = killer(place if rank == who else "never")
    if adapter.startswith(("trainer", "grpo")):
        found = trainer(adapter, come_to, folder, checkpoint, rank)
    else:
        found = lightning(adapter, come_to, folder, checkpoint)
    torch.save(found, folder / f"final{rank}.pt")


def is_whole(adapter: str, path: Path) -> bool:
    """Whether the file that is written last is there, and can be read.

    Those of a Trainer have random states besides, which every rank writes without waiting for another. Stock takes a
    folder that lacks one, says so, and draws other numbers there.
    """
    if adapter.startswith(("trainer", "grpo")):
        return all((path / name).exists() for name in ("trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"))
    if adapter == "fsdp2":
        return (path / ".metadata").exists() and (path / "meta.pt").exists()
    try:
        torch.load(path, weights_only=False)
    except Exception:
        return False
    return True


def run(work: Callable[[int], None]) -> list[dict[str, Any]]:
    """Both ranks of a scenario."""
    return run_with_mark(lambda rank, mark: work(rank))


def main(root: str, *scenarios: str) -> None:
    torch.set_num_threads(1)
    # Once, not in every process that is forked off.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if any(scenario.startswith("trainer") for scenario in scenarios):
        import test_transformers_trainer  # noqa: F401
    if any(scenario.startswith("grpo") for scenario in scenarios):
        import trl_cases  # noqa: F401
    results: dict[str, Any] = {}
    for scenario in scenarios:
        adapter, place, who = scenario.split(":")
        folder = Path(root, scenario.replace(":", "-"))
        folder.mkdir(parents=True)
        ranks = run(partial(train, adapter, place, int(who), folder, None))
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        pattern = "checkpoint-*" if adapter.startswith(("trainer", "grpo")) else "step=*.ckpt"
        found = sorted(folder.glob(pattern), key=lambda path: int("".join(filter(str.isdigit, path.stem))))
        whole = [path for path in found if is_whole(adapter, path)]
        results[scenario] = {"ranks": ranks, "names": names, "whole": [path.name for path in whole]}
        results[scenario]["all"] = [path.name for path in found]
        if place != "never" and whole and not adapter.endswith("stock"):
            results[scenario]["resumed"] = run(partial(train, adapter, "never", 0, folder, whole[-1]))
        Path(root, "found.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(*sys.argv[1:])
