"""Thirty optimizer steps of GRPO on real weights, the same completions with and without the mixin.

Equal gradients at one step are the claim; that training then stays the same is what follows from it, and what is
looked at here: losses, KL, entropies and gradient norms of every step, on the first 8 layers of SmolLM2-135M.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import trl_cases as cases
from datasets import Dataset
from trl import GRPOTrainer

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.trl import passes as trl_passes

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
smollm2 = importlib.import_module("_quickstart.model")

STEPS, ROWS, ACCUMULATE, COMPLETION = 30, 4, 2, 40  # 8 rows of up to 60 tokens a step
COMPARED = ("loss", "kl", "entropy", "grad_norm")
BOUND = 1e-4
OPTIONS = {
    "per_device_train_batch_size": ROWS,
    "gradient_accumulation_steps": ACCUMULATE,
    "num_generations": ROWS,
    "num_iterations": 2,  # every second step has ratios other than 1, of which some are clipped
    "max_completion_length": COMPLETION,
    "beta": 0.1,
    "gradient_checkpointing": False,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
}
Logs = list[dict[str, float]]
Train = Callable[..., Logs]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec(smollm2.PACKAGE) is None, reason=f"needs the weights: {smollm2.INSTALL}"
    ),
]


def problem(source: random.Random) -> str:
    """A prompt of 8 to 19 tokens."""
    left, right = source.randrange(2, 60), source.randrange(2, 60)
    opening = source.choice(["", "Think first. ", "Answer with one number and nothing else, please. "])
    return f"{opening}What is {left} + {right}?"


def total(prompt: str) -> int:
    left, right = (int(word) for word in prompt.rstrip("?").split("What is ")[1].split(" + "))
    return left + right


def answer(source: random.Random, right: int) -> str:
    """Mostly short, one in six long; two in three correct."""
    found = right + source.choice([0, 0, 0, 0, 1, -10])
    ends = [f" {found}", f" The answer is {found}.", f" It is {found}, I think."]
    steps = "".join(f" Add {source.randrange(9)} and carry {source.randrange(2)}." for _ in range(8))
    return steps if source.random() < 1 / 6 else source.choice(ends)


class Replayed:
    """Written answers in place of generation; the same in every run."""

    def _generate_single_turn(self, prompt_ids: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        calls = self.__dict__.setdefault("_calls", [0])
        source = random.Random(calls[0])
        calls[0] += 1
        tokens, completions = self.processing_class, []  # type: ignore[attr-defined]
        for prompt in prompt_ids:
            text = answer(source, total(tokens.decode(prompt))) + tokens.eos_token
            completions.append(tokens(text, add_special_tokens=False)["input_ids"][:COMPLETION])
        return completions, None


def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """1 for the right number, less for each word."""
    values = []
    for prompt, completion in zip(prompts, completions, strict=True):
        values.append(float(str(total(prompt)) in completion) - 0.02 * len(completion.split()))
    return values


STOCK, OURS = cases.trainers(GRPOTrainer, outer=(Replayed,))


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    folder = tmp_path_factory.mktemp("reference")  # where trainers find the reference model
    smollm2.load(None, 8)[0].save_pretrained(folder)

    def run(mode: str | None, steps: int = STEPS) -> Logs:
        """What is logged at each step."""
        model, tokenizer = smollm2.load(None, 8)
        tokenizer.padding_side = "left"
        model.config._name_or_path = str(folder)
        source = random.Random(0)
        trainer = (OURS if mode else STOCK)(
            model=model,
            reward_funcs=reward,
            args=cases.arguments(cases.GRPOConfig, **OPTIONS, max_steps=steps),
            train_dataset=Dataset.from_dict({"prompt": [problem(source) for _ in range(STEPS * ROWS)]}),
            processing_class=tokenizer,
            **({"padmin": PadMinConfig(token_budget=160, launch_cost=8, mode=mode)} if mode else {}),
        )
        trainer.remove_callback(cases.PrinterCallback)
        trainer.train()
        if mode:
            assert trainer.padding_stats.slots < 0.7 * trainer.padding_stats.slots_before
        return [logs for logs in trainer.state.log_history if "grad_norm" in logs]

    return run


@pytest.fixture(scope="module")
def stock(train: Train) -> Logs:
    return train(None)


def differences(found: Logs, wanted: Logs) -> dict[str, list[float]]:
    """|a - b| / max(1, |a|) of each metric at each step."""
    pairs = list(zip(found, wanted, strict=True))
    return {name: [abs(b[name] - a[name]) / max(1.0, abs(b[name])) for a, b in pairs] for name in COMPARED}


def test_training_really_moves(stock: Logs) -> None:
    assert len(stock) == STEPS
    assert stock[0]["kl"] < 1e-6
    assert min(logs["kl"] for logs in stock[STEPS // 2 :]) > 0.5
    losses = [logs["loss"] for logs in stock]
    assert max(losses) - min(losses) > 1
    assert max(logs["clip_ratio/region_mean"] for logs in stock) > 0.2


@pytest.mark.parametrize("mode", ["split", "replay"])
def test_thirty_steps_are_the_stock_ones(mode: str, train: Train, stock: Logs) -> None:
    found = differences(train(mode), stock)
    for name, values in found.items():
        worst = max(values)
        print(f"{mode}: {name} {worst:.1e} at step {values.index(worst) + 1}")
    assert {name: max(values) <= BOUND for name, values in found.items()} == dict.fromkeys(COMPARED, True)


def test_negative_control_every_chunk_weighs_the_same(
    train: Train, stock: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps suffice."""
    monkeypatch.setattr(trl_passes.Passes, "_split", cases.equally(trl_passes.Passes._split))
    found = differences(train("split", steps=6), stock[:6])
    for name, values in found.items():
        print(f"control: {name} {max(values):.1e}")
        assert max(values) > 100 * BOUND, name
