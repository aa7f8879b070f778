"""A program of somebody else's that makes a Trainer, unchanged: `python program.py RESULT WAY SCRIPT [ARGUMENT ...]`.

The way is `stock`, a mode of this library, or `wrong`: split with parts whose weights are a tenth too large, which must
be seen. What is found after the last training goes to the file RESULT. Metrics, which programs load from elsewhere,
stand in here.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import runpy
import sys
import types
import warnings
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import PadMinWarning
from lightning_padmin.run import patch_trainers


class Agreement:
    """Of predictions and references, by every name that a program asks for."""

    def compute(self, *, predictions: Any = (), references: Any = (), **_: Any) -> Any:
        pairs = list(zip(predictions, references, strict=False))
        share = sum(str(one) == str(other) for one, other in pairs) / max(len(pairs), 1)
        return _Every(agreement=share, written=float(sum(map(ord, str(list(predictions))))))


class _Every(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return self["agreement"]

    def __format__(self, spec: str) -> str:
        return format(str(dict(self)), spec)


def stand_ins() -> None:
    """For metrics and for the rules of sentences, which are loaded from elsewhere, and for a decoder of sounds."""
    metrics = _module("evaluate")
    metrics.load = lambda *_, **__: Agreement()
    words = importlib.import_module("nltk") if importlib.util.find_spec("nltk") else _module("nltk")
    words.data = types.SimpleNamespace(find=lambda *_: None)
    words.sent_tokenize = lambda text: [text]
    datasets.features.Audio.decode_example = heard


def _module(name: str) -> Any:
    module = sys.modules[name] = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return module


def heard(_: Any, value: Any, token_per_repo_id: Any = None) -> Any:
    with wave.open(value["path"], "rb") as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        return {"array": samples.astype(np.float32) / 32768, "sampling_rate": file.getframerate()}


def main(result: str, way: str, script: str, *arguments: str) -> None:
    stand_ins()
    trainers: list[Any] = []
    stock = transformers.Trainer.train

    def train(self: Any, *args: Any, **options: Any) -> Any:
        trainers.append(self)
        return stock(self, *args, **options)

    transformers.Trainer.train = train
    if way != "stock":
        patch_trainers(options_of(way))
    if way == "wrong":
        put_fault_in()
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runpy.run_path(script, run_name="__main__")
    (trainer,) = trainers
    warned = [str(each.message) for each in caught if issubclass(each.category, PadMinWarning)]
    torch.save(found(trainer, warned), result)


def options_of(way: str) -> PadMinConfig:
    common: dict[str, Any] = {"token_budget": None, "launch_cost": 4}
    if way == "wrong":
        return PadMinConfig(mode="split", check="off", **common)
    return PadMinConfig(mode=way, **common)  # type: ignore[arg-type]


def put_fault_in() -> None:
    from lightning_padmin.integrations.transformers.engine import Engine

    right = Engine._weighted
    Engine._weighted = lambda self, weight, *rest: right(self, 1.1 * weight, *rest)  # type: ignore[method-assign]


def numbers(log: Any, before: str = "") -> Iterator[tuple[str, float]]:
    for name, value in log.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{before}{name}.")
        elif isinstance(value, float | int):
            yield before + name, float(value)


def found(trainer: Any, warned: list[str]) -> dict[str, Any]:
    stats = getattr(trainer, "padding_stats", None)
    audits = getattr(trainer, "_padmin", None)
    return {
        "weights": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "logs": [dict(numbers(log)) for log in trainer.state.log_history],
        "warned": warned,
        "stats": None if stats is None else stats.state_dict(),
        "way": None if audits is None else str(audits._training.way),
        "model": type(trainer.model).__name__,
        "trainer": type(trainer).__name__,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
