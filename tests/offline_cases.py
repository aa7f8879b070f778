"""Trainers of transformers and TRL that learn from a dataset, on a few rows, and what they recorded."""

from __future__ import annotations

import random
import tempfile
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl_cases import VOCABULARY, Record, Recorder, saved, tokenizer

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.transformers import PadMinTrainerMixin
from lightning_padmin.integrations.trl import PadMinMixin

KINDS: dict[str, tuple[type, type, type]] = {
    "trainer": (Trainer, PadMinTrainerMixin, TrainingArguments),
    "sft": (SFTTrainer, PadMinMixin, SFTConfig),
    "dpo": (DPOTrainer, PadMinMixin, DPOConfig),
    "kto": (KTOTrainer, PadMinMixin, KTOConfig),
}
BUDGET = PadMinConfig(token_budget=64, launch_cost=4)


def dataset(kind: str, count: int = 24, most: int = VOCABULARY) -> Dataset:
    """Rows with ids from 3 to `most`; few are long."""
    source = random.Random(0)

    def ids() -> list[int]:
        return [source.randrange(3, most) for _ in range(source.choice((4, 5, 6, 9, 30)))]

    def words() -> str:
        return " " + " ".join(f"w{each}" for each in ids())

    if kind in ("trainer", "sft"):
        rows = [ids() for _ in range(count)]
        labels = [[-100, *row[1:]] for row in rows]
        return Dataset.from_dict({"input_ids": rows, **({"labels": labels} if kind == "trainer" else {})})
    columns: dict[str, Any] = {"prompt": [words() for _ in range(count)]}
    if kind == "dpo":
        columns |= {"chosen": [words() for _ in range(count)], "rejected": [words() for _ in range(count)]}
    else:
        columns |= {"completion": [words() for _ in range(count)], "label": [k % 3 > 0 for k in range(count)]}
    return Dataset.from_dict(columns)


def build(
    kind: str, model: nn.Module, padmin: PadMinConfig | None, *outer: type, most: int = VOCABULARY, **options: Any
) -> Any:
    """A trainer that has not started; `outer` are classes in front of it, as a user's subclass is."""
    base, mixin, arguments = KINDS[kind]
    defaults: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "learning_rate": 0.05,
        "optim": "sgd",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 3,
    }
    if kind not in ("trainer", "sft"):
        model.config._name_or_path = saved(model)
    more: dict[str, Any] = {"processing_class": tokenizer()}
    if kind == "trainer":
        from transformers import DataCollatorForSeq2Seq

        more["data_collator"] = DataCollatorForSeq2Seq(more.pop("processing_class"))
    record = Record()
    trainer = type(f"My{base.__name__}", (*outer, *(() if padmin is None else (mixin,)), base), {})(
        model=model,
        args=arguments(**(defaults | options)),
        train_dataset=dataset(kind, most=most),
        callbacks=[Recorder(record)],
        **more,
        **({} if padmin is None else {"padmin": padmin}),
    )
    trainer.remove_callback(PrinterCallback)
    record.trainer = trainer
    trainer.record = record
    return trainer


def trained(*args: Any, **options: Any) -> Record:
    """What a training recorded."""
    trainer = build(*args, **options)
    trainer.train()
    record: Record = trainer.record
    return record
