"""Kinds of faults in TRL's trainers: divisors of losses, pairs of rows, and completions that begin at other columns."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
import trl_cases as cases
from datasets import Dataset
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForSequenceClassification
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.trl import PadMinMixin
from lightning_padmin.integrations.trl import passes as trl_passes

pytestmark = pytest.mark.slow  # the kinds are in the quick table of adapters, these inputs are not


class Keeps:
    """Keeps the inputs of the training passes of the first window."""

    kept: list[Any]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        if len(type(self).kept) < self.args.gradient_accumulation_steps:  # type: ignore[attr-defined]
            type(self).kept.append(dict(inputs))
        return super().compute_loss(model, inputs, *args, **more)  # type: ignore[misc]


def by_hand(inputs: list[Any], loss_type: str, divisor: float = 0.0) -> Tensor:
    """The gradient of the first step, each row alone: every ratio is 1 then, and a token's loss -advantage."""
    model = cases.qwen2()
    total: Any = 0.0
    tokens = divisor or sum(float(each["completion_mask"].sum()) for each in inputs)
    for each in inputs:
        for row, advantage in enumerate(each["advantages"]):
            prompt = each["prompt_ids"][row][each["prompt_mask"][row] == 1]
            real = int((each["completion_ids"][row] != cases.PAD).sum())
            mask, completion = each["completion_mask"][row][:real], each["completion_ids"][row][:real]
            ids = torch.cat([prompt, completion])[None]
            log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[-real:, 0]
            losses = -advantage * log_probs * mask
            if loss_type == "dapo":
                total = total + losses.sum() / tokens
            else:
                total = total + losses.sum() / mask.sum().clamp(min=1) / len(each["advantages"]) / len(inputs)
    total.backward()
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )


def first_step(options: dict[str, Any], **script: Any) -> tuple[Tensor, list[Any], Any]:
    """Gradient of our first optimizer step, the stock trainer's inputs of that window, and our record."""
    keeping = type("Keeping", (Keeps,), {"kept": []})
    stock, _ = cases.trainers(cases.GRPOTrainer, keeping)
    _, ours = cases.trainers(cases.GRPOTrainer)
    for kind in (stock, ours):
        for name, value in script.items():
            setattr(kind, name, value)
    chosen = {"max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 0.0} | options
    wanted = cases.train(stock, chosen, None)
    found = cases.train(ours, chosen, cases.padmin("split"))
    cases.same(found, wanted)
    return found.gradients[0].float(), keeping.kept, found


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize(("loss_type", "accumulate"), [("dapo", 4), ("dapo", 2), ("grpo", 4), ("grpo", 1)])
def test_r24_a_loss_is_divided_once_by_what_its_type_says(loss_type: str, accumulate: int) -> None:
    """dapo is a mean over the tokens of the window, grpo over its rows: R23 and R24 are a factor of the window."""
    found, inputs, _ = first_step({"loss_type": loss_type, "gradient_accumulation_steps": accumulate})
    right = by_hand(inputs, loss_type)
    assert len(inputs) == accumulate
    assert apart(found, right) <= 1e-4
    twice = right / accumulate  # the fault
    assert apart(found, twice) > 0.5 or accumulate == 1
    other = by_hand(inputs, "grpo" if loss_type == "dapo" else "dapo")
    assert apart(found, other) > 0.05, "the fault: the divisor of another type"


@pytest.mark.parametrize(("loss_type", "length", "share"), [("dapo", 24, 0.2), ("dapo", 12, 0.4), ("grpo", 24, 0.2)])
def test_r25_masked_completions_leave_the_divisor_too(loss_type: str, length: int, share: float) -> None:
    """Whether a completion without an end counts is up to the stock trainer's mask; numerator and divisor agree."""
    options = {"loss_type": loss_type, "mask_truncated_completions": True, "max_completion_length": length}
    found, inputs, _ = first_step(options, completion_length=length, long_share=share)
    written = sum(int((each["completion_ids"] != cases.PAD).sum()) for each in inputs)
    kept = sum(int(each["completion_mask"].sum()) for each in inputs)
    assert 0 < kept < written, "no completion was masked"
    assert apart(found, by_hand(inputs, loss_type)) <= 1e-4
    if loss_type == "dapo":
        assert apart(found, by_hand(inputs, loss_type, divisor=float(written))) > 0.05, "the fault"


def test_r25_all_masked_is_zero() -> None:
    options = {"loss_type": "dapo", "mask_truncated_completions": True, "max_completion_length": 6, "max_steps": 1}
    stock, ours = cases.trainers(cases.GRPOTrainer)
    for kind in (stock, ours):
        kind.completion_length, kind.long_share = 6, 1.1
    found = cases.train(ours, options, cases.padmin("split"))
    assert found.logs[0]["loss"] == 0
    assert not found.gradients[0].any()


@pytest.mark.parametrize("mode", ["split", "joint", "replay"])
def test_r01_completions_are_scored_at_their_own_columns(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts padded on the left, completions on the right; the reference is each row alone."""
    keeping = type("Keeping", (Keeps,), {"kept": []})
    stock, _ = cases.trainers(cases.GRPOTrainer, keeping)
    _, ours = cases.trainers(cases.GRPOTrainer)
    options = {"loss_type": "grpo", "max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 0.0}
    cases.train(stock, options, None)
    found = cases.train(ours, options, cases.padmin(mode))
    assert apart(found.gradients[0].float(), by_hand(keeping.kept, "grpo")) <= 1e-4
    for each in keeping.kept:  # the fault: an offset that is one number for the batch
        assert len(set(each["prompt_mask"].sum(dim=1).tolist())) > 1


class Skewed:
    """Three short completions and a long one."""

    lengths = (2, 3, 3, 24)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **more: Any) -> Any:
        source = random.Random(len(prompt_ids))
        words = [[source.randrange(3, cases.VOCABULARY) for _ in range(n - 1)] for n in self.lengths]
        return [[*words[k % 4], cases.EOS] for k in range(len(prompt_ids))], None


@pytest.mark.skipif(cases.RELEASE < (1, 0), reason="generation returns other values")
@pytest.mark.parametrize("lengths", [(2, 3, 3, 24), (24, 2, 2, 2), (5, 23, 4, 22)])
def test_r62_short_completions_are_not_padded_to_the_longest(lengths: tuple[int, ...]) -> None:
    kinds = [type("Kind", (Skewed, *base), {"lengths": lengths}) for base in ((cases.GRPOTrainer,), (cases.OURS,))]
    options = {"loss_type": "dapo", "num_iterations": 2, "max_steps": 2}
    wanted = cases.train(kinds[0], options, None)
    found = cases.train(kinds[1], options, cases.padmin("split"))
    cases.same(found, wanted)
    stats = found.trainer.padding_stats
    assert stats.waste < stats.waste_before - 0.1, "the fault: one block, as wide as the longest row"


def offline(kind: str, ours: bool, count: int, rows: int, **options: Any) -> cases.Record:
    """A run of RewardTrainer, DPOTrainer or KTOTrainer on rows of very different lengths."""
    base, config = {
        "reward": (RewardTrainer, RewardConfig),
        "dpo": (DPOTrainer, DPOConfig),
        "kto": (KTOTrainer, KTOConfig),
    }[kind]
    source = random.Random(1)

    def text(n: int) -> str:
        return " " + " ".join(f"w{source.randrange(3, cases.VOCABULARY)}" for _ in range(n))

    lengths = [cases.skewed(source, 30, 0.25) + 3 for _ in range(count)]
    columns: dict[str, list[Any]] = {
        "chosen": [text(n) for n in lengths],
        "rejected": [text(n // 2 + 1) for n in lengths],
    }
    if kind != "reward":
        columns["prompt"] = [text(n % 5 + 2) for n in lengths]
    if kind == "kto":
        columns = {
            "prompt": columns["prompt"],
            "completion": columns["chosen"],
            "label": [bool(k % 2) for k in range(count)],
        }
    model: nn.Module = cases.qwen2()
    if kind == "reward":
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        tokens = {"vocab_size": cases.VOCABULARY, "pad_token_id": cases.PAD, "eos_token_id": cases.EOS}
        model = Qwen2ForSequenceClassification(
            Qwen2Config(num_labels=1, num_key_value_heads=2, bos_token_id=None, **sizes, **tokens)
        )
    model.config._name_or_path = cases.saved(model)
    record = cases.Record()
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "max_steps": 2,
        "learning_rate": 0.5,
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    trainer = (type("Ours", (PadMinMixin, base), {}) if ours else base)(
        model=model,
        args=config(output_dir=tempfile.mkdtemp(), **(defaults | options)),
        train_dataset=Dataset.from_dict(columns),
        processing_class=cases.tokenizer(),
        callbacks=[cases.Recorder(record)],
        **({"padmin": PadMinConfig(token_budget=64, launch_cost=4)} if ours else {}),
    )
    trainer.train()
    record.trainer = trainer
    return record


@pytest.mark.parametrize(("kind", "rows", "accumulate"), [("reward", 4, 1), ("reward", 3, 2), ("dpo", 4, 2)])
def test_r11_pairs_weigh_alike_however_long_they_are(kind: str, rows: int, accumulate: int) -> None:
    stock, ours = (
        offline(kind, with_us, 4 * rows * accumulate, rows, gradient_accumulation_steps=accumulate)
        for with_us in (False, True)
    )
    assert cases.gradient_difference(ours, stock) <= 1e-5
    assert cases.metric_difference(ours, stock)[0] <= 1e-5
    assert ours.trainer.padding_stats.micro_batches > ours.trainer.padding_stats.batches


STRONG = {"beta": 1.0, "max_steps": 4}  # the estimate is cut off at 0, where the policy has hardly moved


@pytest.mark.parametrize("rows", [3, 2, 5])
def test_r28_kto_pairs_rows_of_the_whole_batch(rows: int) -> None:
    """Its divergence pairs each prompt with the next row's completion; chunks run inside of the stock loss."""
    stock, ours = (offline("kto", with_us, 4 * rows, rows, **STRONG) for with_us in (False, True))
    assert cases.gradient_difference(ours, stock) <= 1e-4
    assert cases.metric_difference(ours, stock)[0] <= 1e-4
    assert ours.trainer.padding_stats.micro_batches > ours.trainer.padding_stats.batches


def test_r28_parts_of_a_batch_pair_other_rows() -> None:
    """The fault: the same four rows as two batches of two. (One of one row TRL refuses.)"""
    whole, parts = (offline("kto", False, 16, 4 // k, gradient_accumulation_steps=k, **STRONG) for k in (1, 2))
    assert cases.gradient_difference(parts, whole) > 0.1
    assert max(log.get("kl", 0.0) for log in whole.logs) > 0


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_r24_chunks_that_weigh_alike_are_far_off(loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_passes.Passes, "_split", cases.equally(trl_passes.Passes._split))
    options = {"loss_type": loss_type, "max_steps": 1}
    found = cases.train(cases.OURS, options, cases.padmin("split"))
    assert cases.gradient_difference(found, cases.stock(options)) > 0.1
