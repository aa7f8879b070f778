"""PadMinMixin before TRL's SFT, DPO, Reward and KTO trainers: gradients and all logged metrics of the stock ones."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForSequenceClassification
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl_cases import (
    EOS,
    PAD,
    RELEASE,
    VOCABULARY,
    Record,
    Recorder,
    gradient_difference,
    metric_difference,
    qwen2,
    saved,
    skewed,
    tokenizer,
)

from lightning_padmin import PadMinConfig
from lightning_padmin.architectures.screening import Findings
from lightning_padmin.errors import ConfigError, GradientCheckError, PadMinWarning
from lightning_padmin.integrations.common import Session, Topology, WholeSteps, Words
from lightning_padmin.integrations.trl import PadMinMixin
from lightning_padmin.integrations.trl import hooks as trl_stock

BUDGET = PadMinConfig(token_budget=128, launch_cost=8)
KINDS: dict[str, tuple[type, type]] = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "reward": (RewardTrainer, RewardConfig),
    "kto": (KTOTrainer, KTOConfig),
}


def dataset(kind: str, count: int = 40) -> Dataset:
    source = random.Random(1)

    def words(length: int) -> str:
        return " ".join(f"w{source.randrange(3, VOCABULARY)}" for _ in range(length))

    def texts(shift: int = 0) -> list[str]:
        return [" " + words(skewed(source, 30, 0.1) + shift) for _ in range(count)]

    prompts = [words(source.randrange(2, 12)) for _ in range(count)]
    columns = {
        "sft": lambda: {"text": texts()},
        "dpo": lambda: {"prompt": prompts, "chosen": texts(), "rejected": texts()},
        "reward": lambda: {"chosen": texts(3), "rejected": texts(3)},
        "kto": lambda: {
            "prompt": prompts,
            "completion": texts(),
            "label": [bool(source.randrange(2)) for _ in range(count)],
        },
    }["sft" if kind == "reads" else kind]
    return Dataset.from_dict(columns())


def loss_tokens(kind: str) -> int:
    """Tokens of an epoch that carry loss: words behind what they are predicted from, and the ends of the texts."""
    rows, columns = dataset(kind), {"sft": ["text"], "dpo": ["chosen", "rejected"], "kto": ["completion"]}
    texts = [text for column in columns.get(kind, []) for text in rows[column]]
    ends = 0 if kind == "sft" else len(texts)  # the first word of an SFT row is predicted from nothing
    return sum(len(text.split()) for text in texts) + ends


def classifier() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["num_key_value_heads"] = 2
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    return Qwen2ForSequenceClassification(Qwen2Config(vocab_size=VOCABULARY, num_labels=1, **sizes, **ids))


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    options = {"output_router_logits": True, "experts_implementation": "eager", "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, **sizes, **experts, **ids, **options))


def train(kind: str, padmin: PadMinConfig | None, make: Callable[[], nn.Module], **options: Any) -> Record:
    base, config = KINDS[kind]
    record, model = Record(), make()
    model.config._name_or_path = saved(model)
    defaults: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 0.05,
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 3,
    }
    ours = base if issubclass(base, PadMinMixin) else type("Ours", (PadMinMixin, base), {})
    trainer = (base if padmin is None else ours)(
        model=model,
        args=config(**(defaults | options)),
        train_dataset=dataset(kind),
        processing_class=tokenizer(),
        callbacks=[Recorder(record)],
        **({} if padmin is None else {"padmin": padmin}),
    )

    slots: list[int] = []  # with those of the check, which puts back what callbacks hold

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        slots.append(inputs[0].shape[0] * inputs[0].shape[1])

    trainer.accelerator.unwrap_model(trainer.model).base_model.layers[0].register_forward_hook(count)
    trainer.train()
    record.trainer, record.slots, record.largest = trainer, sum(slots), max(slots)
    return record


CASES: dict[str, tuple[str, Callable[[], nn.Module], dict[str, Any]]] = {
    "sft": ("sft", qwen2, {}),
    "sft, dft": ("sft", qwen2, {"loss_type": "dft"}),
    "sft, label smoothing": ("sft", qwen2, {"label_smoothing_factor": 0.1}),
    "sft, experts": ("sft", mixtral, {}),
    "dpo": ("dpo", qwen2, {}),
    "dpo, ipo": ("dpo", qwen2, {"loss_type": ["ipo"]}),
    "dpo, sigmoid and sft": ("dpo", qwen2, {"loss_type": ["sigmoid", "sft"]}),
    "dpo, aot": ("dpo", qwen2, {"loss_type": ["aot"]}),
    "dpo, weighting": ("dpo", qwen2, {"use_weighting": True}),
    "reward": ("reward", classifier, {}),
    "kto": ("kto", qwen2, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_metrics_are_the_stock_ones(name: str) -> None:
    kind, make, options = CASES[name]
    stock = train(kind, None, make, **options)
    reads_padding = kind == "kto" and RELEASE < (1, 16)
    with pytest.warns(PadMinWarning, match="logits/chosen") if reads_padding else nullcontext():
        ours = train(kind, BUDGET, make, **options)
    if reads_padding:
        for logs in ours.logs + stock.logs:
            for name in [name for name in logs if name.startswith("logits/")]:
                del logs[name]
    assert gradient_difference(ours, stock) <= 1e-5
    assert metric_difference(ours, stock)[0] <= 1e-5
    assert ours.trainer.padding_stats.slots < 0.6 * ours.trainer.padding_stats.slots_before
    stats = ours.trainer.padding_stats
    passes = 2 if kind in ("dpo", "kto") else 1  # the reference model runs in chunks too
    checked = ours.slots - stats.slots // passes  # the first batch, as it came and in chunks
    assert 0 < checked <= stock.slots
    assert stats.batches == 5
    assert "padmin/waste" in ours.logs[0]
    assert stats.loss_tokens == loss_tokens(kind)
    assert all(("padmin/loss_tokens" in logs) is (kind != "reward") for logs in ours.logs if "padmin/waste" in logs)
    assert stock.largest > 128


def test_a_part_of_a_pair_is_another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: hidden states of rows in another order."""
    from lightning_padmin.microbatching.micro_batches import MicroBatches

    stock = train("dpo", None, qwen2)
    original = MicroBatches.restore_rows
    monkeypatch.setattr(MicroBatches, "restore_rows", lambda self, parts: original(self, parts).roll(1, 0))
    assert gradient_difference(train("dpo", replace(BUDGET, check="off"), qwen2), stock) > 0.1
    with pytest.raises(GradientCheckError, match="differ from the stock ones"):
        train("dpo", BUDGET, qwen2)


def test_a_loss_that_reads_padding_is_refused() -> None:
    class Reads(PadMinMixin, SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **options)
            hidden = model.base_model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
            return loss + hidden.square().mean()

    KINDS["reads"] = (Reads, SFTConfig)
    with pytest.raises(GradientCheckError, match="reads padding"):
        train("reads", BUDGET, qwen2)


def test_evaluation_and_switched_off() -> None:
    stock, off = train("sft", None, qwen2), train("sft", PadMinConfig(enabled=False), qwen2)
    assert all(torch.equal(a, b) for a, b in zip(stock.gradients, off.gradients, strict=True))
    assert off.slots == stock.slots


@pytest.mark.parametrize(
    ("kind", "config", "options", "told"),
    [
        ("dpo", {"mode": "split"}, {}, r"mode='split': .* needs its whole batch"),
        ("sft", {}, {"packing": True}, "packing=True leaves no padding to remove"),
        ("sft", {}, {"padding_free": True, "max_length": None}, "padding_free=True leaves no padding to remove"),
    ],
)
def test_what_is_refused(kind: str, config: dict[str, Any], options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        train(kind, PadMinConfig(**config), qwen2, **options)


def test_where_a_sharded_check_is_left_out_it_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    """Under FSDP it is done, by two processes in tests/distributed."""

    def engine(main: bool) -> Any:
        accelerator = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, is_main_process=main)
        trainer = SimpleNamespace(accelerator=accelerator)
        training = SimpleNamespace(
            topology=Topology(kind="engine"), findings=Findings(), to_audit=lambda batches: None, ledger=None
        )
        session = Session("PadMinMixin", PadMinConfig(), is_main=main)
        how: Any = {"sites": dict, "loss_tokens": len, "words": Words("", "", "")}
        return WholeSteps(trainer, session, cast(Any, training), **how)

    first = engine(main=True)
    with pytest.warns(PadMinWarning, match="under DeepSpeed the first batch of SimpleNamespace is not checked"):
        first.before_window([{}])
    for quiet in (first, engine(main=False)):
        quiet.before_window([{}])
    assert not [each for each in recwarn if each.category is PadMinWarning]


@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        ({"labels": torch.tensor([[-100, 5, 6, -100], [7, 8, 9, 9]])}, 5),
        ({"labels": torch.tensor([[5, 6]]), "shift_labels": torch.tensor([[6, -100]])}, 1),
        ({"input_ids": torch.ones(2, 4), "completion_mask": torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]])}, 4),
        ({"completion_labels": torch.tensor([[-100, -100, 4]]), "label": [True]}, 1),  # KTO before 1.16
        ({"input_ids": torch.ones(2, 4), "margin": torch.ones(2)}, 0),
    ],
)
def test_loss_tokens_are_those_after_the_shift(inputs: dict[str, Any], count: int) -> None:
    assert trl_stock.loss_tokens(inputs) == count


@pytest.mark.parametrize("kind", ["sft", "kto"])
def test_a_trl_that_is_too_old_is_named_before_anything_is_made(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_stock.trl, "__version__", "0.28.1")
    with pytest.raises(ConfigError, match=r"trl 0.28.1 is installed, and PadMinMixin needs trl>=0.29: pip install -U"):
        type("Ours", (PadMinMixin, KINDS[kind][0]), {})(padmin=BUDGET)
