"""What audits cost: one of them in training steps, times how many there are in 1,000 steps; and their memory.

    python examples/benchmarks/audit_cost.py                                  # SmolLM2-135M whole, an hour on two cores
    python examples/benchmarks/audit_cost.py --layers 4 --scale 2 --clock cpu # minutes

One audit is measured with SmolLM2 in Lightning: every batch is audited and trained on, so that steps and audits take
turns. How many there are, and why, is counted with a tiny model on batches of the same lengths, shuffled in each epoch.
A step is forward, backward and optimizer of all micro-batches of the batch; lengths are those of `data`, in tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning.pytorch as pl
import numpy as np
import torch
import transformers
from _frameworks.memory import peak
from _speed import models, workload
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_padmin import PadMinCallback, PadMinConfig
from lightning_padmin.integrations.common import Training
from lightning_padmin.integrations.transformers import PadMinTrainerMixin
from lightning_padmin.verification import Ledger

VOCABULARY, CLASSES = 2000, 5
MOST, MOST_LATE, MOST_FINGERPRINT = 0.015, 0.003, 0.001  # of the time of a training
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
Batch = dict[str, Any]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32], help="of a batch")
    parser.add_argument("--layers", type=int, default=None, help="of SmolLM2, the lowest; all if left out")
    parser.add_argument("--scale", type=int, default=1, help="lengths are divided by it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="in which audits are counted")
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS), help="cpu where other programs run too")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--modes", nargs="+", default=["split", "joint"], choices=["split", "joint"])
    parser.add_argument("--part", nargs="+", default=["cost", "memory", "count"], choices=["cost", "memory", "count"])
    return parser.parse_args(arguments)


@dataclass
class Watch:
    """What a training spends in audits and in what tells whether one is due, and which there were."""

    clock: Clock
    spent: Counter[str] = field(default_factory=Counter)
    audits: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    peak_of_audit: int | None = None
    model: nn.Module | None = None

    @contextmanager
    def installed(self, *, always: bool = False, memory: bool = False) -> Iterator[None]:
        """Watches; with `always`, every batch is audited."""
        audited = Training.audited

        def noted(training: Training, check: Any, *more: Any, **named: Any) -> Any:
            assert training.ledger is not None
            self.audits.append((training.ledger.step, tuple(sorted(training.ledger.new))))
            if not memory:
                return self._timed("audit", audited)(training, check, *more, **named)
            found: list[Any] = []
            size = peak(lambda: found.append(audited(training, check, *more, **named)), nn.Module())
            self.peak_of_audit = max(self.peak_of_audit or 0, size)
            return found[0]

        patches = [
            mock.patch.object(Training, "audited", noted),
            mock.patch.object(Training, "_show", self._timed("facets", Training._show)),
            mock.patch.object(Training, "hear", self._timed("fingerprint", Training.hear)),
        ]
        if always:
            patches.append(mock.patch.object(Ledger, "wants", property(lambda _: True)))
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[name] += self.clock() - begin

        return timed


# What is trained.


class Tiny(nn.Module):
    """Next tokens, or with `classes` the class of a row."""

    def __init__(self, classes: bool, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classes = classes
        self.embedding, self.inner = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES if classes else VOCABULARY)
        self.embedding.requires_grad_(not frozen)
        self.head.requires_grad_(not frozen)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        """The loss, and no more of it."""
        hidden = torch.tanh(self.inner(self.embedding(input_ids)))
        if self.classes:
            mask = attention_mask[..., None]
            return {"loss": F.cross_entropy(self.head((hidden * mask).sum(1) / mask.sum(1)), labels)}
        carries = labels[:, 1:] >= 0  # few logits
        return {"loss": F.cross_entropy(self.head(hidden[:, :-1][carries]), labels[:, 1:][carries])}


class Lit(pl.LightningModule):
    """A model that returns its loss, and AdamW."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Its loss is logged."""
        loss: Tensor = self.model(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of what is trained."""
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], 1e-4)


def rows_of(lengths: Any, kind: str, vocabulary: int) -> list[Batch]:
    """A data set: rows with prompts that carry no loss, with one of a few classes, or with entries besides."""
    source = torch.Generator().manual_seed(0)
    found = []
    for index, (prompt, completion) in enumerate(lengths.tolist()):
        ids = torch.randint(3, vocabulary, (prompt + completion,), generator=source)
        row: Batch = {"input_ids": ids, "labels": ids.clone()}
        row["labels"][:prompt] = workload.IGNORED
        if kind == "classes":
            row["labels"] = torch.randint(0, CLASSES, (), generator=source)
        if kind == "entries":
            score = torch.rand((), generator=source)
            row |= {"index": torch.tensor(index), "length": torch.tensor(len(ids)), "score": score}
        found.append(row)
    return found


def collate(rows: Sequence[Batch]) -> Batch:
    """Padded on the right to the longest row."""
    pad = nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    batch = {"input_ids": pad(ids, batch_first=True), "attention_mask": pad([i * 0 + 1 for i in ids], batch_first=True)}
    for name in rows[0].keys() - {"input_ids"}:
        values = [row[name] for row in rows]
        is_tokens = values[0].ndim > 0
        batch[name] = (
            pad(values, batch_first=True, padding_value=workload.IGNORED) if is_tokens else torch.stack(values)
        )
    return batch


def fit(model: nn.Module, batches: Any, around: Callable[[Callable[[], None]], None], **options: Any) -> None:
    """Trains in Lightning, split as a rule; `around` is called with each step."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=options.pop("max_steps", -1),
        max_epochs=-1 if "max_epochs" not in options else options.pop("max_epochs"),
        callbacks=[PadMinCallback(config=PadMinConfig(**options))],
        logger=DummyLogger(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loop: Any = trainer.fit_loop.epoch_loop
    advance = loop.advance
    loop.advance = lambda *args: around(lambda: advance(*args))
    module = Lit(model)
    module.train()
    trainer.fit(module, batches)


# One audit.


@dataclass
class Cost:
    """Of audits, facets and fingerprints in steps, by the batch; the first one is a warm-up."""

    audit: list[float]
    facets: list[float]
    fingerprint: list[float]
    seconds: list[float]


def batches_of(options: argparse.Namespace, rows: int, count: int, vocabulary: int) -> list[Batch]:
    """Drawn from the lengths of the data."""
    lengths = workload.read_lengths(workload.FILES["gsm8k"])
    return [
        collate(rows_of(workload.draw(lengths, rows, options.scale, seed), "causal", vocabulary))
        for seed in range(count)
    ]


def third(batch: Batch) -> int:
    """The token budget: a third of a batch."""
    return int(batch["input_ids"].numel()) // 3


def twice(batch: Batch) -> DataLoader[Any]:
    """A loader of two such batches."""
    return DataLoader([batch] * 2, batch_size=None)  # type: ignore[arg-type]


def cost(options: argparse.Namespace, model: nn.Module, batches: Sequence[Batch], mode: str) -> Cost:
    """Audits every batch."""
    found = Cost([], [], [], [])
    for batch in [batches[0], *batches]:  # each with a budget of its own, and the first audit of a fit is another one
        watch = Watch(CLOCKS[options.clock])
        steps: list[tuple[float, Counter[str]]] = []

        def around(step: Callable[[], None], watch: Watch = watch, steps: list[Any] = steps) -> None:
            watch.spent.clear()
            begin = watch.clock()
            step()
            steps.append((watch.clock() - begin, watch.spent.copy()))

        with watch.installed(always=True):
            fit(model, twice(batch), around, max_epochs=1, token_budget=third(batch), mode=mode)
        whole, spent = steps[1]
        seconds = whole - spent["audit"]
        found.seconds.append(seconds)
        for name in ("audit", "facets", "fingerprint"):
            getattr(found, name).append(spent[name] / seconds)
    for each in vars(found).values():
        del each[0]
    return found


def costs(options: argparse.Namespace, model: nn.Module) -> dict[str, float]:
    """Prints them, and returns that of an audit by mode."""
    worst: dict[str, float] = {}
    print(f"{'one audit':24} {'step s':>9} {'steps':>7} {'least':>7} {'most':>7} {'facets':>9} {'fingerprint':>12}")
    for rows in options.rows:
        batches = batches_of(options, rows, options.repeats, model.config.vocab_size)
        for mode in options.modes:
            found = cost(options, model, batches, mode)
            middle = statistics.median(found.audit)
            worst[mode] = max(worst.get(mode, 0.0), middle)
            print(
                f"{f'{mode}, {rows} rows':24} {statistics.median(found.seconds):9.3f} {middle:7.2f} "
                f"{min(found.audit):7.2f} {max(found.audit):7.2f} {statistics.median(found.facets):9.3%} "
                f"{statistics.median(found.fingerprint):12.3%}",
                flush=True,
            )
    return worst


def memory(options: argparse.Namespace, model: nn.Module) -> bool:
    """Whether an audit takes no more than a step: bytes above what is there before, gradients kept in both."""
    fine = True
    print(f"{'peak of memory, MB':24} {'step':>9} {'audit':>9}")
    for rows in options.rows:
        batch = batches_of(options, rows, 1, model.config.vocab_size)[0]
        for mode in options.modes:
            config = {"max_epochs": 1, "token_budget": third(batch), "mode": mode}
            of_steps: list[int] = []
            fit(model, twice(batch), lambda step, k=of_steps: k.append(peak(step, nn.Module())), check="off", **config)
            watch = Watch(time.process_time)
            with watch.installed(always=True, memory=True):
                fit(model, twice(batch), lambda step: step(), **config)
            of_audit = watch.peak_of_audit or 0
            of_step = of_steps[-1]  # states of the optimizer are there
            fine &= of_audit <= 1.01 * of_step  # besides what it allocates itself, which is small
            print(f"{f'{mode}, {rows} rows':24} {of_step / 1e6:9.0f} {of_audit / 1e6:9.0f}", flush=True)
    return fine


# How many there are.


def counted(options: argparse.Namespace, framework: str, kind: str, mode: str) -> list[tuple[int, tuple[str, ...]]]:
    """Audits of a training of a tiny model: at which step, and what was new."""
    lengths = np.maximum(1, workload.read_lengths(workload.FILES["gsm8k"]) // options.scale)
    rows, size = rows_of(lengths, kind, VOCABULARY), options.rows[0]
    joint = mode == "joint"  # of models of transformers
    model = models.build("qwen2", 32, 1, VOCABULARY) if joint else Tiny(kind == "classes", kind == "frozen")
    budget = size * int(lengths.sum(axis=1).max()) // 3
    reduction = "row-mean" if kind == "classes" else "token-mean"
    declared: Any = {"token_budget": budget, "loss_reduction": reduction}
    watch = Watch(time.process_time)
    torch.manual_seed(1)
    with watch.installed():
        if framework == "lightning":
            loader = DataLoader(rows, batch_size=size, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
            fit(model, loader, lambda step: step(), max_steps=options.steps, mode=mode, **declared)
        else:
            _trainer(model, rows, size, options.steps, PadMinConfig(**declared))
    return watch.audits


class _Trainer(PadMinTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """Ours."""


def _trainer(model: nn.Module, rows: Any, size: int, steps: int, config: PadMinConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=size,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
        )
        made = _Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate, padmin=config)
        made.train()


def counts(options: argparse.Namespace, worst: dict[str, float]) -> bool:
    """Prints them with the product, and whether it keeps its bounds."""
    fine = True
    print(f"audits in {options.steps} steps of a tiny model, batches of {options.rows[0]} rows")
    print(f"{'':28} {'audits':>7} {'for facets':>11} {'after 100':>10} {'share':>8} {'after 100':>10}")
    for framework, kind, mode in (
        ("lightning", "causal", "split"),
        ("lightning", "causal", "joint"),
        ("lightning", "frozen", "split"),
        ("lightning", "classes", "split"),
        ("lightning", "entries", "split"),
        ("trainer", "causal", "split"),
        ("trainer", "frozen", "split"),
        ("trainer", "classes", "split"),
        ("trainer", "entries", "split"),
    ):
        audits = counted(options, framework, kind, mode)
        late = sum(step > 100 for step, _ in audits)
        whole = len(audits) * worst.get(mode, float("nan")) / options.steps
        share_late = late * worst.get(mode, float("nan")) / max(options.steps - 100, 1)
        fine &= not whole > MOST and not share_late > MOST_LATE
        print(
            f"{f'{framework}, {kind}, {mode}':28} {len(audits):7} {sum(bool(new) for _, new in audits):11} {late:10} "
            f"{whole:8.2%} {share_late:10.2%}",
            flush=True,
        )
        for step, new in audits:
            print(f"    step {step}: {', '.join(new) or 'looked at in turn'}"[:200])
    return fine


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if audits keep their bounds of time and memory."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    worst: dict[str, float] = {}
    fine = True
    if {"cost", "memory"} & set(options.part):
        model = models.build("smollm2", 0, options.layers, 0)
        print(
            f"SmolLM2-135M, {model.config.num_hidden_layers} layers, float32, {torch.get_num_threads()} threads; "
            f"GSM8K lengths / {options.scale}, a token budget of a third of each batch; "
            f"medians of {options.repeats} batches, {options.clock} time"
        )
        if "cost" in options.part:
            worst = costs(options, model)
        if "memory" in options.part:
            fine &= memory(options, model)
    if "count" in options.part:
        fine &= counts(options, worst)
    return int(not fine)


if __name__ == "__main__":
    raise SystemExit(main())
