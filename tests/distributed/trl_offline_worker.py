"""One rank of test_trl_offline_sharded.py: `python trl_offline_worker.py RESULT_FILE KIND SCENARIO ...`.

SFT and DPO under FSDP with gloo: batches of long rows on rank 0, of short ones on rank 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

# Where transformers looks for its place among the processes, as soon as it is imported.
os.environ["RANK"] = os.environ["LOCAL_RANK"]
os.environ["WORLD_SIZE"] = "2"
os.environ["ACCELERATE_USE_CPU"] = "false"
os.environ["ACCELERATE_USE_FSDP"] = "true"
os.environ["FSDP_VERSION"] = sys.argv[2][-1]
os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "Qwen2DecoderLayer"
os.environ["FSDP_USE_ORIG_PARAMS"] = "true"
os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
import trl_cases as cases
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from lightning_padmin import PadMinConfig, PadMinWarning
from lightning_padmin.integrations.common import WholeSteps
from lightning_padmin.integrations.transformers import PadMinTrainerMixin
from lightning_padmin.integrations.trl import PadMinMixin

RANK = int(os.environ["LOCAL_RANK"])
ROWS, WINDOW = 6, 2


class InOrder:
    """Batches as they stand in the dataset: even ones go to rank 0."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class Reads(InOrder):
    """A loss that reads padding on rank 0, whose rows have some."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return loss + (logits.square().mean() if RANK == 0 else logits.sum() * 0)


def texts(kind: str) -> Dataset:
    def words(length: int, start: int) -> str:
        return " " + " ".join(f"w{3 + (start + k) % (cases.VOCABULARY - 3)}" for k in range(length))

    lengths = [length for _ in range(2 * WINDOW) for length in ([30, 25, 14, 9, 5, 3], [6, 5, 4, 4, 3, 3])]
    flat = [length for batch in lengths for length in batch]
    rows = [words(length, 7 * k) for k, length in enumerate(flat)]
    if kind == "trainer":
        encoded = cases.tokenizer()(rows)["input_ids"]
        return Dataset.from_dict({"input_ids": encoded, "labels": [[-100, *row[1:]] for row in encoded]})
    if kind == "sft":
        return Dataset.from_dict({"text": rows})
    others = [words(length + 2, 5 * k) for k, length in enumerate(flat)]
    return Dataset.from_dict({"prompt": ["w5 w6"] * len(flat), "chosen": rows, "rejected": others})


def train(kind: str, padmin: PadMinConfig | None, *layers: type) -> cases.Record:
    base, config, mixin = {
        "sft": (SFTTrainer, SFTConfig, PadMinMixin),
        "dpo": (DPOTrainer, DPOConfig, PadMinMixin),
        "trainer": (Trainer, TrainingArguments, PadMinTrainerMixin),
    }[kind]
    record, model = cases.Record(), cases.qwen2()
    model.config._name_or_path = cases.saved(model)
    arguments = config(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=WINDOW,
        max_steps=2,
        learning_rate=0.05,
        optim="sgd",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=False,
        disable_tqdm=True,
        ddp_timeout=60,
    )
    kinds = (*layers, mixin, base) if padmin is not None else (*layers, base)
    trainer = type("Ours", kinds, {})(
        model=model,
        args=arguments,
        train_dataset=texts(kind),
        processing_class=cases.tokenizer(),
        **({"data_collator": DataCollatorForSeq2Seq(cases.tokenizer())} if kind == "trainer" else {}),
        callbacks=[cases.Recorder(record)],
        **({} if padmin is None else {"padmin": padmin}),
    )
    trainer.train()
    record.trainer = trainer
    return record


CONFIG = PadMinConfig(token_budget=32, launch_cost=4, mode="joint")


def compared(kind: str) -> Any:
    checks: list[Any] = []
    original = WholeSteps._check_shards

    def counted(self: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        checks.append(self._trainer.state.global_step)
        return found

    WholeSteps._check_shards = counted  # type: ignore[method-assign]
    stock, ours = train(kind, None, InOrder), train(kind, CONFIG, InOrder)
    WholeSteps._check_shards = original  # type: ignore[method-assign]
    return {
        "gradient": cases.gradient_difference(ours, stock),
        "metric": cases.metric_difference(ours, stock)[0] if RANK == 0 else 0.0,
        "stats": ours.trainer.padding_stats.state_dict(),
        "checks": checks,
        "kind": ours.trainer.accelerator.distributed_type.value,
    }


def sft() -> Any:
    return compared("sft")


def dpo() -> Any:
    return compared("dpo")


def trainer() -> Any:
    return compared("trainer")


def reads_in_trainer() -> Any:
    return reads("trainer")


def reads(kind: str = "sft") -> Any:
    try:
        train(kind, CONFIG, Reads)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


if __name__ == "__main__":
    warnings.simplefilter("ignore", PadMinWarning)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    # Accelerate knows FSDP on devices only; all it needs of them is a backend and a name.
    PartialState._prepare_backend = lambda *args, **options: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    results = {name: globals()[name]() for name in sys.argv[3:]}
    torch.save(results, Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
