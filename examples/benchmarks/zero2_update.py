"""CPU seconds of a policy update of GRPO under DeepSpeed's ZeRO 2, on two processes: stock and with PadMinMixin.

    python examples/benchmarks/zero2_update.py [--repeats 5] [--stage 2]

Completions are scripted, with lengths and seeds fixed here: one in twelve of the greatest length and the others short,
of other lengths on each process, so nothing is generated. Stock and ours take turns, each with a new trainer of two
optimizer steps; of the second one the passes alone are timed, in seconds of CPU, so that waiting does not count. The
slower process counts. Medians are compared. Needs DeepSpeed; runs on CPUs with gloo.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

WORLD = 2
_RANK = "ZERO2_UPDATE_RANK"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--launch-cost", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--longest", type=int, default=256)
    return parser.parse_args(arguments)


def launch(arguments: Sequence[str]) -> int:
    """Starts one process per rank of this script; returns the worst of their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(WORLD), "LOCAL_SIZE": str(WORLD), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    common |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), _RANK: str(rank)},
            stdout=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(WORLD)
    ]
    return max(abs(process.wait()) for process in started)


def run(options: argparse.Namespace) -> None:
    """One rank."""
    import deepspeed
    import torch
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType
    from datasets import Dataset
    from grpo_update import VOCABULARY, policy, tokenizer
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from lightning_padmin import PadMinConfig
    from lightning_padmin.integrations.trl import PadMinMixin

    rank = int(os.environ[_RANK])
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled first
    # Accelerate knows DeepSpeed on devices only; all it needs of them is a backend and a name.
    prepared: Any = PartialState
    prepared._prepare_backend = lambda *args, **given: ("gloo", DistributedType.MULTI_GPU)
    prepared.set_device = lambda self: setattr(self, "device", torch.device("cpu"))

    class Scripted:
        """The same completions in every turn, and the CPU seconds of each optimizer step without making them."""

        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            self.seconds, self._spent, self._source = list[float](), 0.0, random.Random(1 + rank)

        def _generate_single_turn(self, prompt_ids: Sequence[Any], *args: Any, **given: Any) -> Any:
            source, longest = self._source, options.longest
            lengths = [longest if k % 12 == 0 else source.randrange(8, longest // 5) for k in range(len(prompt_ids))]
            return [[source.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths], None

        def training_step(self, *args: Any, **given: Any) -> Any:
            start = time.process_time()
            loss = super().training_step(*args, **given)  # type: ignore[misc]
            self._spent += time.process_time() - start
            if self.accelerator.sync_gradients:  # type: ignore[attr-defined]
                self.seconds.append(self._spent)
                self._spent = 0.0
            return loss

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.process_time()
            outputs = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
            self._spent -= time.process_time() - start
            return outputs

    kinds = {
        "stock": type("Stock", (Scripted, GRPOTrainer), {}),
        "ours": type("Ours", (Scripted, PadMinMixin, GRPOTrainer), {}),
    }
    source = random.Random(0)
    texts = [
        " ".join(f"w{source.randrange(3, VOCABULARY)}" for _ in range(source.randrange(10, 60))) for _ in range(256)
    ]
    ours = PadMinConfig(token_budget=options.budget, launch_cost=options.launch_cost)
    engine = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }

    def turn(name: str) -> tuple[float, Any]:
        AcceleratorState._reset_state(False)
        GradientState._reset_state()
        if PartialState._shared_state:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        unset_hf_deepspeed_config()
        model = policy(options.hidden, options.layers)
        arguments = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=options.rows,
            gradient_accumulation_steps=options.accumulate,
            num_generations=options.rows,
            max_completion_length=options.longest,
            max_steps=2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            bf16=False,
            disable_tqdm=True,
            deepspeed=engine,
        )
        trainer: Any = kinds[name](
            model=model,
            reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer(),
            **({} if name == "stock" else {"padmin": ours}),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        seconds = torch.tensor([trainer.seconds[-1]], dtype=torch.float64)
        torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
        return float(seconds), trainer

    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(options.repeats):
        for name, seconds in found.items():
            value, trainer = turn(name)
            seconds.append(value)
            if rank == 0:
                slots = f", {trainer.padding_stats.slots // 2:,} slots a step" if name == "ours" else ""
                print(f"turn {number + 1} of {options.repeats}: {name} {value:.2f} s{slots}", flush=True)
    if rank == 0:
        stock, other = (statistics.median(found[name]) for name in ("stock", "ours"))
        print(
            f"ZeRO {options.stage}, {WORLD} processes, CPU seconds of the slower one, median of {options.repeats}: "
            f"stock {stock:.2f}, with PadMinMixin {other:.2f}: {stock / other:.2f} times as fast"
        )
    torch.distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures; returns 0."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    if _RANK not in os.environ:
        return launch(given)
    run(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
