"""SFT and DPO of SmolLM2-135M with TRL's own trainers and with `PadMinMixin` before them, and what changed.

    python examples/trl_sft_dpo.py
    python examples/trl_sft_dpo.py --arch lfm2 --trainers dpo

Rows are arithmetic problems with worked answers, as long as those of GSM8K. Both runs of a trainer start from the same
weights and see the same batches. In a script of your own it is simply

    class MyTrainer(PadMinMixin, SFTTrainer): ...

    trainer = MyTrainer(..., padmin=PadMinConfig(token_budget=1024))
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _quickstart import data
from _quickstart.arguments import BadInput, OneLineParser, at_least, layers
from _trl import policies, report
from _trl.probe import Clock, Record, Watch, worst_difference
from datasets import Dataset, disable_progress_bars
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.trl import PadMinMixin


class PadMinSFT(PadMinMixin, SFTTrainer):
    """SFT with padding removed."""


class PadMinDPO(PadMinMixin, DPOTrainer):
    """DPO with padding removed, from the reference model's passes too."""


KINDS: dict[str, tuple[type, type, type]] = {
    "sft": (SFTTrainer, PadMinSFT, SFTConfig),
    "dpo": (DPOTrainer, PadMinDPO, DPOConfig),
}


LEARNING_RATES = {"sft": 1e-4, "dpo": 1e-5}


def rows(kind: str, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> Dataset:
    """Problems with answers; for DPO with a rejected one too, which is the answer to another problem."""
    pairs = data.written_pairs(tokenizer, count, seed)
    written = []
    for (prompt, answer), (_, other) in zip(pairs, pairs[1:] + pairs[:1], strict=True):
        row = {"prompt": [{"role": "user", "content": prompt}]}
        answers = {"completion": answer} if kind == "sft" else {"chosen": answer, "rejected": other}
        written.append(row | {name: [{"role": "assistant", "content": text}] for name, text in answers.items()})
    return Dataset.from_list(written)


def settings(kind: str, options: argparse.Namespace, folder: str) -> Any:
    """The same for both runs."""
    return KINDS[kind][2](
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.rows,
        max_length=None,
        learning_rate=options.learning_rate or LEARNING_RATES[kind],
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        seed=options.seed,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def train(
    kind: str,
    record: Record,
    language_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: argparse.Namespace,
    padmin: PadMinConfig | None = None,
) -> Any:
    """One training on a copy of the model; `record` gets what it did."""
    stock, ours, _ = KINDS[kind]
    more: dict[str, Any] = {} if padmin is None else {"padmin": padmin}
    if kind == "dpo":
        more["ref_model"] = copy.deepcopy(language_model)

    def tell(record: Record) -> None:
        loss, step = record.logs[-1]["loss"], len(record.logs)
        print(f"{kind}, {record.name} step {step} of {options.steps}: loss {loss:.4f}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        trainer = (stock if padmin is None else ours)(
            model=copy.deepcopy(language_model),
            args=settings(kind, options, folder),
            train_dataset=rows(kind, tokenizer, options.steps * options.rows, options.seed),
            processing_class=tokenizer,
            callbacks=[Watch(record, tell), Clock(record)],
            **more,
        )
        trainer.remove_callback(PrinterCallback)
        set_seed(options.seed)
        trainer.train()
    return trainer


def compare(kind: str, options: argparse.Namespace, console: Console) -> bool:
    """Both runs of one trainer, and a report. True if they are the same to rounding."""
    language_model, tokenizer = policies.load(options.arch, options.layers, options.seed)
    stock, ours = Record("stock"), Record("padmin")
    train(kind, stock, language_model, tokenizer, options)
    padmin = PadMinConfig(token_budget=options.budget, launch_cost=32)
    stats = train(kind, ours, language_model, tokenizer, options, padmin).padding_stats
    stock.slots, ours.slots = stats.slots_before, stats.slots
    stock.real_tokens = ours.real_tokens = stats.real_tokens
    worst = {name: worst_difference(ours.values(name), stock.values(name)) for name in ("loss", "grad_norm")}
    console.print(
        f"{kind.upper()}: {options.steps} steps of {options.rows} rows, {report.conditions()}", highlight=False
    )
    console.print(report.costs_table([stock, ours]), report.losses_table(stock, ours))
    console.print(
        f"Largest differences: loss {worst['loss']:.1e}, gradient norm {worst['grad_norm']:.1e}. "
        f"{1 - ours.slots / stock.slots:.0%} fewer slots, steps {report.pace(stock, ours)}.\n",
        highlight=False,
        soft_wrap=True,
    )
    return max(worst.values()) <= report.BOUND


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Raises `BadInput`."""
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])

    def option(name: str, kind: Callable[[str], Any], default: Any, help: str, **more: Any) -> None:
        help += "" if default is None else " (%(default)s)"
        parser.add_argument(name, type=kind, default=default, help=help, **more)

    option("--trainers", str, list(KINDS), "which to run", choices=tuple(KINDS), nargs="+")
    option("--arch", str, "smollm2", "the model; the others are small random hybrids", choices=tuple(policies.NAMES))
    option("--layers", layers, 4, "how many of its first layers to use, or 'all'")
    option("--steps", at_least(2), 3, "optimizer steps; the first is not timed")
    option("--rows", at_least(2), 6, "rows, or pairs, in each batch")
    option("--budget", at_least(1), 1024, "most slots in one chunk")
    option("--learning-rate", float, None, "of AdamW (1e-4 for SFT, 1e-5 for DPO)")
    option("--seed", at_least(0), 0, "decides the rows")
    option("--threads", at_least(1), None, "CPU threads (what torch takes by itself)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 if the trainings differ by more than rounding, or 2 for bad input."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    disable_progress_bars()
    try:
        options = parse(arguments)
        if options.threads:
            torch.set_num_threads(options.threads)
        same = [compare(kind, options, Console()) for kind in options.trainers]
        return 0 if all(same) else 1
    except BadInput as error:
        print(f"trl_sft_dpo.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
