"""The trainers of TRL in the contract table: GRPO in three modes, SFT and DPO."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import offline_cases
import torch
import trl_cases as cases
from adapters.contract import Adapter, Follows, Outcome, Scenario, forget_accelerate
from datasets import Dataset
from torch import nn
from transformers.trainer_callback import PrinterCallback

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.trl_trainers import PadMinMixin


class Normed(nn.Module):
    """A layer with batch normalization behind it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.BatchNorm1d(32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(ids).transpose(1, 2)).transpose(1, 2)


def model_of(options: Mapping[str, Any], *, reads: bool = False, norm: bool = False, frozen: bool = False) -> nn.Module:
    model: Any = cases.qwen2(**options)
    embedding = model.get_input_embeddings()
    if norm:
        model.set_input_embeddings(Normed(embedding))
    if reads:  # every position sees the mean over all columns, padding included
        embedding.register_forward_hook(lambda module, args, output: output + output.mean(1, keepdim=True))
    if frozen:
        embedding.requires_grad_(False)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups."""
    named = list(model.named_parameters())
    rest = [each for name, each in named if "lm_head" not in name]
    head = [each for name, each in named if "lm_head" in name]
    return torch.optim.SGD([{"params": head, "lr": 0.002}, {"params": rest}], lr=0.01)


def finish(trainer: Any, ours: bool, out: Outcome) -> None:
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Follows(out))
    trainer.train()
    out.weights = cases.flat(trainer.model)
    if ours:
        out.counts = trainer.padding_stats.state_dict()


@dataclass
class OfGRPO:
    """Completions from a script; see `trl_cases`."""

    name: str
    mode: str

    def train(self, scenario: Scenario, ours: bool, out: Outcome) -> None:
        forget_accelerate()
        case = scenario.online
        assert case is not None
        model = model_of(case.model, reads=case.reads, norm=case.norm, frozen=case.frozen)
        out.watch(model)
        layer = type("Script", (), {"completion_length": case.completion, "long_share": 1.0 if case.uniform else 0.1})
        stock, mixed = cases.trainers(outer=(layer,))
        more: dict[str, Any] = {"optimizers": (optimizer_of(model), None)} if case.groups else {}
        if case.uniform:
            source = random.Random(0)
            texts = [" ".join(f"w{source.randrange(3, cases.VOCABULARY)}" for _ in range(8)) for _ in range(32)]
            more["train_dataset"] = Dataset.from_dict({"prompt": texts})
        options = {"max_steps": 2, "max_grad_norm": 0.0} | dict(case.arguments)
        config = None
        if ours:
            config = PadMinConfig(**({"token_budget": 64, "launch_cost": 8, "mode": self.mode} | dict(case.options)))
        trainer = cases.build(mixed if ours else stock, options, config, lambda: model, **more)
        finish(trainer, ours, out)


_LENGTHS = (4, 5, 6, 9, 30)
# What `Scenario.offline` says of a run; everything else are options of PadMinConfig.
_OF_RUNS = ("uniform", "accumulate", "clip", "groups", "frozen", "bf16", "model", "norm", "reads")


@dataclass
class OfOffline:
    """SFT and DPO on rows of a few words."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def train(self, scenario: Scenario, ours: bool, out: Outcome) -> None:
        forget_accelerate()
        given = dict(scenario.offline or {})
        run = {key: given.pop(key) for key in _OF_RUNS if key in given}
        model: Any = model_of(
            run.get("model", {}), reads="reads" in run, norm="norm" in run, frozen=run.get("frozen", False)
        )
        out.watch(model.base_model)
        base, _, arguments = offline_cases.KINDS[self.name]
        if self.name == "dpo":
            model.config._name_or_path = cases.saved(model)
        options = {
            "output_dir": tempfile.mkdtemp(),
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": run.get("accumulate", 1),
            "max_steps": 2,
            "learning_rate": 0.05,
            "optim": "sgd",
            "max_grad_norm": run.get("clip", 0.0),
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": run.get("bf16", False),
            "disable_tqdm": True,
            "seed": 3,
        }
        more: dict[str, Any] = {"optimizers": (optimizer_of(model), None)} if "groups" in run else {}
        if ours:
            more["padmin"] = PadMinConfig(**({"token_budget": 64, "launch_cost": 4} | given))
        kind = type("Ours", (PadMinMixin, base), {}) if ours else base
        trainer = kind(
            model=model,
            args=arguments(**(options | dict(self.arguments))),
            train_dataset=rows(self.name, uniform="uniform" in run),
            processing_class=cases.tokenizer(),
            **more,
        )
        finish(trainer, ours, out)


def rows(kind: str, uniform: bool = False) -> Dataset:
    """24 rows, of which few are long; or all of 9 words."""
    source = random.Random(0)

    def ids() -> list[int]:
        return [source.randrange(3, cases.VOCABULARY) for _ in range(9 if uniform else source.choice(_LENGTHS))]

    if kind == "sft":
        return Dataset.from_dict({"input_ids": [ids() for _ in range(24)]})
    columns = ("prompt", "chosen", "rejected")
    texts = {name: [" " + " ".join(f"w{each}" for each in ids()) for _ in range(24)] for name in columns}
    return Dataset.from_dict(texts)


ADAPTERS: dict[str, Adapter] = {
    each.name: each
    for each in (
        OfGRPO("grpo-split", "split"),
        OfGRPO("grpo-joint", "joint"),
        OfGRPO("grpo-replay", "replay"),
        OfOffline("sft"),
        OfOffline("dpo", {"beta": 0.1}),
    )
}
