"""Tiny models and scripted completions for TRL's trainers, and what a training recorded."""

from __future__ import annotations

import dataclasses
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.trl import PadMinMixin

VOCABULARY = 40
EOS, PAD = 1, 0


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2} | {f"w{k}": k for k in range(3, VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def qwen2(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**(sizes | options)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # far from uniform, so that ratios and clipping do something
    return model


def scaled(model: nn.Module, factor: float = 3.0) -> nn.Module:
    """Far from uniform, so that ratios and clipping do something."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)
    return model


def prompts(count: int = 32) -> Dataset:
    """Prompts of 2 to 14 words."""
    source = random.Random(0)
    texts = [
        " ".join(f"w{source.randrange(3, VOCABULARY)}" for _ in range(source.randrange(2, 15))) for _ in range(count)
    ]
    return Dataset.from_dict({"prompt": texts})


def skewed(source: random.Random, most: int, long_share: float) -> int:
    """Mostly short, a few long, as online runs have them."""
    return most if source.random() < long_share else source.randrange(2, max(3, most // 3))


def flat(model: nn.Module) -> Tensor:
    """All parameters; of FSDP1, this rank's shards of them."""
    return torch.cat([whole(parameter).double().flatten() for parameter in model.parameters()])


def whole(tensor: Tensor) -> Tensor:
    """Of a tensor that FSDP2 has sharded, all of it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class Scripted:
    """Completions from a script in place of generation: the same ones with and without the mixin."""

    completion_length = 24
    long_share = 0.1
    seed = 0

    def _generate_single_turn(self, prompt_ids: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        calls = self.__dict__.setdefault("_calls", [0])
        rank = self.accelerator.process_index  # type: ignore[attr-defined]
        source = random.Random(1000 * self.seed + 17 * calls[0] + rank)
        calls[0] += 1
        completions = []
        for _ in prompt_ids:
            length = skewed(source, self.completion_length, self.long_share)
            words = [source.randrange(3, VOCABULARY) for _ in range(length)]
            completions.append(words if length == self.completion_length else [*words[:-1], EOS])
        if isinstance(prompt_ids[0], str):  # TRL 0.29 gives texts, and asks for their tokens back
            ids = self.processing_class(text=list(prompt_ids))["input_ids"]  # type: ignore[attr-defined]
            return (ids, completions, None, {}) if isinstance(self, GRPOTrainer) else (ids, completions)
        return (completions, None) if isinstance(self, GRPOTrainer) else completions


class Uneven:
    """Before `Scripted`: long completions on rank 0, short ones on rank 1."""

    @property
    def long_share(self) -> float:
        return (0.6, 0.0)[self.accelerator.process_index]  # type: ignore[attr-defined]

    @property
    def completion_length(self) -> int:
        return (24, 9)[self.accelerator.process_index]  # type: ignore[attr-defined]


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) - 3 for text in completions]


@dataclass
class Record:
    """Gradients before each optimizer step, logged metrics, parameters, and forward passes of the model."""

    gradients: list[Tensor] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    parameters: Tensor = field(default_factory=lambda: torch.zeros(0))
    slots: int = 0
    largest: int = 0
    trainer: Any = None


class Recorder(TrainerCallback):
    def __init__(self, record: Record) -> None:
        self.record = record

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
        self.record.gradients.append(torch.cat([whole(grad).double().flatten() for grad in grads]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.record.logs.append({key: value for key, value in logs.items() if isinstance(value, int | float)})


def arguments(kind: type, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 24,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "beta": 0.0,
        "disable_tqdm": True,
        "seed": 3,
    }
    missing = set(options) - {field.name for field in dataclasses.fields(kind)}
    if missing:
        pytest.skip(f"TRL {trl.__version__} has no {', '.join(sorted(missing))}")
    return kind(**(defaults | options))


RELEASE = tuple(int(part) for part in trl.__version__.split(".")[:2])
CONFIGS = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}


def trainers(base: type = GRPOTrainer, *inner: type, outer: tuple[type, ...] = ()) -> tuple[type, type]:
    """The stock trainer and the same with the mixin.

    Args:
        base: of TRL.
        inner: what changes the trainer behind the mixin.
        outer: what changes it before the mixin, as the body of a user's own class does.
    """
    stock = type("Stock", (*outer, Scripted, *inner, base), {})
    return stock, type("Ours", (*outer, Scripted, PadMinMixin, *inner, base), {})


def saved(model: nn.Module) -> str:
    """The folder with the model; one for all processes, since transformers saves on the first of them alone."""
    folder = [tempfile.mkdtemp()]
    if distributed.is_initialized():
        distributed.broadcast_object_list(folder)
    model.save_pretrained(folder[0])
    if distributed.is_initialized():
        distributed.barrier()
    return folder[0]


def build(
    kind: type, options: dict[str, Any], padmin: PadMinConfig | None, make: Callable[[], nn.Module] = qwen2, **more: Any
) -> Any:
    """A trainer with the mixin (`padmin`) or without (None)."""
    base = GRPOTrainer if issubclass(kind, GRPOTrainer) else RLOOTrainer
    model = make()
    model.config._name_or_path = saved(model)  # where the trainer finds its reference model
    given = {} if padmin is None else {"padmin": padmin}
    defaults = {"reward_funcs": reward, "train_dataset": prompts(), "processing_class": tokenizer()}
    trainer = kind(model=model, args=arguments(CONFIGS[base], **options), **(defaults | given | more))
    trainer.remove_callback(PrinterCallback)
    return trainer


def run(trainer: Any) -> Record:
    """Trains, and records."""
    record = Record()
    trainer.add_callback(Recorder(record))

    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        shape = kwargs["input_ids"].shape
        record.slots += shape.numel()
        record.largest = max(record.largest, shape.numel())

    hook = trainer.accelerator.unwrap_model(trainer.model).register_forward_pre_hook(count, with_kwargs=True)
    try:
        trainer.train()
    finally:
        hook.remove()
    record.parameters = flat(trainer.model)
    record.trainer = trainer
    return record


def train(
    kind: type, options: dict[str, Any], padmin: PadMinConfig | None, make: Callable[[], nn.Module] = qwen2, **more: Any
) -> Record:
    return run(build(kind, options, padmin, make, **more))


def padmin(mode: str = "auto", **options: Any) -> PadMinConfig:
    """A budget below one stock micro-batch, so that there are many chunks."""
    return PadMinConfig(**({"token_budget": 96, "launch_cost": 8, "mode": mode} | options))


STOCK, OURS = trainers()
STOCK_RLOO, OURS_RLOO = trainers(RLOOTrainer)


_RUNS: dict[str, Record] = {}


def stock(options: dict[str, Any], kind: type = STOCK, make: Callable[[], nn.Module] = qwen2) -> Record:
    """The run without the mixin, once for all modes that are compared with it."""
    key = f"{id(kind)} {id(make)} {sorted(options.items())}"
    if key not in _RUNS:
        _RUNS[key] = train(kind, options, None, make)
    return _RUNS[key]


def same(found: Record, wanted: Record, bound: float = 1e-5) -> None:
    """Gradients at every optimizer step and every metric that stock logs."""
    assert gradient_difference(found, wanted) <= bound
    worst, name = metric_difference(found, wanted)
    assert worst <= bound, name


def equally(split: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In place of `Passes._split`: the loss of each chunk by itself, divided by their number."""

    def wrong(self: Any, chunk: int, scores: Any) -> Tensor:
        window = self.window
        masks = [entry.inputs["completion_mask"] for entry in window.entries]
        mine = sum(float(masks[e][rows].sum()) for e, (_, rows) in window.places(chunk).items())
        everything = sum(float(mask.sum()) for mask in masks)
        return split(self, chunk, scores) * (everything / mine / len(window.batches))

    return wrong


def metric_difference(found: Record, wanted: Record) -> tuple[float, str]:
    """The largest |a - b| / max(1, |a|) over all metrics that stock logs, times apart; and where."""
    worst, name = 0.0, ""
    assert len(found.logs) == len(wanted.logs)
    for mine, stock in zip(found.logs, wanted.logs, strict=True):
        missing = set(stock) - set(mine)
        assert not missing, missing
        for key, value in stock.items():
            if "time" in key or "runtime" in key or "per_second" in key or key == "total_flos":
                continue
            difference = abs(mine[key] - value) / max(1.0, abs(value))
            if not difference <= worst:
                worst, name = difference, key
    return worst, name


def gradient_difference(found: Record, wanted: Record) -> float:
    assert len(found.gradients) == len(wanted.gradients) > 0
    pairs = zip(found.gradients, wanted.gradients, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


os.environ.setdefault("HF_HUB_OFFLINE", "1")
