"""TRL's GRPOTrainer, stock and with PadMinMixin, on completions of given lengths."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset
from grpo_update import tokenizer
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from lightning_padmin.integrations.trl import PadMinMixin
from lightning_padmin.integrations.trl import online as trl_engine
from lightning_padmin.integrations.trl.window import Window

from .ledger import PAUSED, Ledger
from .runs import DEVICE, RATE, VOCABULARY, Setting, Sizes, Watch


class Timed:
    """Scripted completions, whose lengths begin anew with each training; a step is the update, without generation."""

    ledger: Ledger
    lengths: Any
    generated = 0
    slots = 0
    real = 0

    def train(self, *args: Any, **options: Any) -> Any:
        """Stock, from the first completion lengths on."""
        self.generated = 0
        return super().train(*args, **options)  # type: ignore[misc]

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """The first one of a window begins a step."""
        self.ledger.begin()
        loss: torch.Tensor = super().training_step(*args, **options)  # type: ignore[misc]
        return loss

    def log(self, *args: Any, **options: Any) -> None:
        """Behind the optimizer step; ends it."""
        super().log(*args, **options)  # type: ignore[misc]
        self.ledger.end()

    def _generate_single_turn(self, prompt_ids: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        source = random.Random(self.generated)
        lengths = self.lengths[self.generated % len(self.lengths), :, 1].tolist()
        self.generated += 1
        return [[source.randrange(3, VOCABULARY) for _ in range(n)] for n in lengths[: len(prompt_ids)]], None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.ledger.part(PAUSED):
            outputs = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
            masks = torch.cat([outputs["prompt_mask"], outputs["completion_mask"]], dim=1)
            self.slots, self.real = self.slots + masks.numel(), self.real + int(masks.sum())
        return outputs


class Stock(Timed, GRPOTrainer):
    """TRL's own."""


class Ours(Timed, PadMinMixin, GRPOTrainer):
    """With padding removed."""


class TrlRun:
    """Each turn is a training of its own."""

    def __init__(self, setting: Setting, ledger: Ledger, is_ours: bool) -> None:
        self.watch, self.setting, self.model = Watch(ledger), setting, setting.model()
        steps, rows, _ = setting.lengths.shape
        source = random.Random(0)
        lengths = setting.lengths.reshape(-1, 2)[:: rows // setting.accumulate, 0].tolist()
        texts = [" ".join(f"w{source.randrange(3, VOCABULARY)}" for _ in range(length)) for length in lengths]
        arguments = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=rows // setting.accumulate,
            gradient_accumulation_steps=setting.accumulate,
            num_generations=rows // setting.accumulate,
            max_completion_length=int(setting.lengths[..., 1].max()),
            max_steps=steps,
            loss_type="dapo",
            beta=0.0,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # clipping would hide gradients of another size
            report_to=[],
            save_strategy="no",
            use_cpu=DEVICE == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            logging_steps=1,
        )
        self.trainer: Any = (Ours if is_ours else Stock)(
            model=self.model,
            reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer(),
            optimizers=(self.watch.optimizer(self.model), None),
            **({"padmin": setting.config(mode="split")} if is_ours else {}),
        )
        self.trainer.ledger, self.trainer.lengths = ledger, setting.lengths
        self.trainer.remove_callback(PrinterCallback)

    def turn(self) -> None:
        """Trains."""
        self.trainer.train()

    def sizes(self) -> Sizes:
        """Of a step."""
        steps = self.watch.steps
        if isinstance(self.trainer, Ours):
            return Sizes.counted(self.trainer.padding_stats, steps)
        return Sizes(self.trainer.slots / steps, self.trainer.real / steps, self.setting.accumulate)

    def largest(self, stock: Any) -> tuple[list[int], Any]:
        """See `Run`; stock has the prompt that our shortest row has, so that it takes as many logits."""
        found: list[tuple[int, int, int]] = []

        class Seen(Window):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                for slots in self.batches.slot_maps:
                    prompts = slots.source_widths[0] - self.completion - slots.start[:, 0]
                    found.append((len(slots), slots.widths[0], int(prompts.min())))

        with mock.patch.object(trl_engine, "Window", Seen):
            self.turn()
        rows, width, prompt = max(found, key=lambda each: each[0] * each[1])
        if rows < 2:  # no group to compare rewards in
            return [rows, width], None
        setting, ledger = self.setting, self.watch.ledger
        lengths = np.tile(np.array([prompt, width - prompt]), (setting.steps, rows * setting.accumulate, 1))
        lengths[:, 1::rows, 1] -= 1  # with nothing to mask, attention would take another path, and less memory
        return [rows, width], TrlRun(replace(setting, lengths=lengths), ledger, is_ours=False)
