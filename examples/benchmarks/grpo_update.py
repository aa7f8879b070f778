"""How long a policy update of GRPO takes, stock and with PadMinMixin, on the same completions.

    python examples/benchmarks/grpo_update.py [--repeats 7] [--loss-type dapo] [--modes split joint replay]

A Qwen2 of random weights; completions are scripted, one in twelve of the greatest length and the others short (about
30% of the slots that stock runs are real), so nothing is generated. Trainers take turns, one optimizer step of
`--accumulate` micro-batches each; the medians of their step times are compared. The first turn of each is not timed.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.trl import PadMinMixin

VOCABULARY = 1024


class Scripted:
    """Completions of given lengths in place of generation; the same in every turn and for every trainer."""

    longest = 256

    def _generate_single_turn(self, prompt_ids: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        source = random.Random(1)
        lengths = [
            self.longest if k % 12 == 0 else source.randrange(8, self.longest // 5) for k in range(len(prompt_ids))
        ]
        return [[source.randrange(3, VOCABULARY) for _ in range(n)] for n in lengths], None


class Timed:
    """Keeps the seconds of each optimizer step: forward and backward passes, without generation and scoring."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seconds: list[float] = []
        self._spent = 0.0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Stock, timed."""
        start = time.perf_counter()
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        self._spent += time.perf_counter() - start
        if self.accelerator.sync_gradients:  # type: ignore[attr-defined]
            self.seconds.append(self._spent)
            self._spent = 0.0
        return loss

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        outputs = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        self._spent -= time.perf_counter() - start  # generation is not the update
        return outputs


class Stock(Timed, Scripted, GRPOTrainer):
    """TRL's own."""


class Ours(Timed, Scripted, PadMinMixin, GRPOTrainer):
    """With padding removed."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{k}": k for k in range(3, VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def policy(hidden: int, layers: int) -> Qwen2ForCausalLM:
    """The same random weights every time."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def make(mode: str, options: argparse.Namespace) -> Any:
    """A trainer of one optimizer step."""
    source = random.Random(0)
    lengths = [source.randrange(10, 60) for _ in range(256)]
    texts = [" ".join(f"w{source.randrange(3, VOCABULARY)}" for _ in range(length)) for length in lengths]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=options.accumulate,
        num_generations=options.rows,
        max_completion_length=Scripted.longest,
        max_steps=1,
        loss_type=options.loss_type,
        beta=0.0,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        disable_tqdm=True,
        logging_strategy="no",
    )
    more: dict[str, Any] = {}
    if mode != "stock":
        config = PadMinConfig(token_budget=options.budget, launch_cost=options.launch_cost, mode=mode)  # type: ignore[arg-type]
        more["padmin"] = config
    return (Stock if mode == "stock" else Ours)(
        model=policy(options.hidden, options.layers),
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer(),
        **more,
    )


def slots_of(trainer: Any) -> tuple[int, int]:
    """Real tokens and slots of one optimizer step."""
    if isinstance(trainer, Ours):
        stats, turns = trainer.padding_stats, len(trainer.seconds)
        return stats.real_tokens // turns, stats.slots // turns
    entries = trainer._buffered_inputs
    masks = [torch.cat([each["prompt_mask"], each["completion_mask"]], dim=1) for each in entries]
    return sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--modes", nargs="+", default=["split", "joint", "replay"], choices=["split", "joint", "replay"]
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--launch-cost", type=int, default=64)
    parser.add_argument("--loss-type", default="dapo")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 0."""
    options = parse(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    trainers = {mode: make(mode, options) for mode in ("stock", *options.modes)}
    for trainer in trainers.values():
        trainer.remove_callback(PrinterCallback)
    for turn in range(options.repeats + 1):
        for trainer in trainers.values():
            trainer.train()
        print(f"turn {turn} of {options.repeats}", flush=True)
    medians = {mode: statistics.median(trainer.seconds[1:]) for mode, trainer in trainers.items()}
    table = Table("mode", "slots", "real", "seconds (median)", "times as fast")
    for mode, trainer in trainers.items():
        real, slots = slots_of(trainer)
        speed = f"{medians['stock'] / medians[mode]:.2f}"
        table.add_row(mode, f"{slots:,}", f"{real / slots:.0%}", f"{medians[mode]:.2f}", speed)
    Console().print(table)
    print(
        f"GRPO {options.loss_type}, {options.rows} rows x {options.accumulate}, Qwen2 {options.hidden} x "
        f"{options.layers}, float32, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{options.repeats} turns"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
