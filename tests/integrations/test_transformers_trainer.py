"""PadMinTrainerMixin against the stock Trainer of transformers: gradients, logged losses, parameters."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lightning_padmin import PadMinConfig
from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.errors import BatchError, ConfigError, GradientCheckError, PadMinWarning
from lightning_padmin.integrations.transformers import PadMinTrainerMixin

VOCABULARY, PAD = 40, 0
BUDGET = PadMinConfig(token_budget=64, launch_cost=4, pad_token_id=PAD)


class Ours(PadMinTrainerMixin, Trainer):
    pass


def rows(count: int = 40, classes: int = 0, targets: bool = False) -> list[dict[str, Any]]:
    source = random.Random(0)
    made = []
    for _ in range(count):
        length = source.choice([3, 4, 5, 6, 8, 11, 14, 30])
        ids = [source.randrange(1, VOCABULARY) for _ in range(length)]
        row: dict[str, Any] = {"input_ids": ids, "labels": [-100, *ids[1:]]}
        if classes:
            row["labels"] = source.randrange(classes)
        if targets:
            row["labels"] = [source.randrange(1, VOCABULARY) for _ in range(source.randrange(1, 9))]
        made.append(row)
    return made


def collate(samples: Sequence[dict[str, Any]], left: bool = False) -> dict[str, Tensor]:
    width = max(len(sample["input_ids"]) for sample in samples)

    def padded(values: list[int], fill: int, to: int = width) -> list[int]:
        more = [fill] * (to - len(values))
        return more + values if left else values + more

    batch = {
        "input_ids": torch.tensor([padded(sample["input_ids"], PAD) for sample in samples]),
        "attention_mask": torch.tensor([padded([1] * len(sample["input_ids"]), 0) for sample in samples]),
    }
    labels = [sample["labels"] for sample in samples]
    if isinstance(labels[0], int):
        return batch | {"labels": torch.tensor(labels)}
    to = max(map(len, labels)) if len(labels[0]) != len(samples[0]["input_ids"]) else width
    return batch | {"labels": torch.tensor([padded(each, -100, to) for each in labels])}


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **options))


class MeanLoss(nn.Module):
    """A model that knows nothing of num_items_in_batch: its loss is a mean over the tokens of its batch."""

    def __init__(self, how: str = "token-mean") -> None:
        super().__init__()
        self.inner, self.how = llama(), how
        self.config = self.inner.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits
        losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        valid = labels[:, 1:] != -100
        by_row = losses.sum(1) / valid.sum(1).clamp(min=1)
        return {"loss": losses.sum() / valid.sum() if self.how == "token-mean" else by_row.mean()}


class Record(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.logs: list[dict[str, Any]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.parameters = torch.zeros(0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        self.gradients.append(torch.cat([grad.detach().double().flatten() for grad in grads]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def train(
    kind: type,
    make: Callable[[], nn.Module] = llama,
    padmin: PadMinConfig | None = None,
    data: Any = None,
    collator: Any = collate,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> Record:
    defaults: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "learning_rate": 0.05,
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": 3,
    }
    record, model = Record(), make()
    more: dict[str, Any] = dict(trainer_options or {}) | ({} if padmin is None else {"padmin": padmin})
    arguments = TrainingArguments(**(defaults | options))
    trainer = kind(
        model=model, args=arguments, train_dataset=data or rows(), data_collator=collator, callbacks=[record], **more
    )
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: record.shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    trainer.train()
    hook.remove()
    record.parameters = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    record.trainer = trainer
    return record


def test_only_one_attribute_is_added(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    stock, ours = (kind(model=llama(), args=arguments) for kind in (Trainer, Ours))
    assert vars(ours).keys() - vars(stock).keys() == {"_padmin"}
    assert {name for name in vars(PadMinTrainerMixin) if not name.startswith("__")} == {
        "_padmin",
        "get_batch_samples",
        "log",
        "padding_stats",
        "train",
        "training_step",
    }


def apart(found: Record, wanted: Record) -> float:
    assert len(found.gradients) == len(wanted.gradients) > 1
    pairs = zip(found.gradients, wanted.gradients, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def losses(record: Record) -> list[float]:
    return [log["loss"] for log in record.logs if "loss" in log]


def check(make: Callable[[], nn.Module], config: PadMinConfig, **options: Any) -> tuple[Record, Record]:
    """The mixin's gradients, losses and parameters are the stock Trainer's, from fewer slots."""
    stock, ours = train(Trainer, make, **options), train(Ours, make, config, **options)
    assert apart(ours, stock) <= 1e-5
    assert losses(ours) == pytest.approx(losses(stock), abs=1e-5)
    assert float((ours.parameters - stock.parameters).abs().max()) <= 1e-5
    slots = [sum(n * width for n, width in record.shapes) for record in (ours, stock)]
    # Without the passes of the check, where these weigh in a training as short as this one.
    assert min(slots[0], ours.trainer.padding_stats.slots) < slots[1]
    return ours, stock


def test_windows_are_pooled_where_losses_are_sums() -> None:
    """The last window of an epoch is shorter, and batches have widths of their own."""
    ours, stock = check(llama, BUDGET, trainer_options={})
    probe = 4  # forward passes of the check
    assert max(n * width for n, width in ours.shapes) <= 64
    assert max(n for n, _ in ours.shapes[probe:]) > 4, "no chunk has rows of several batches"
    stats = ours.trainer.padding_stats
    assert (stats.batches, stats.rows) == (20, 80)
    assert stats.waste < 0.1 < stats.waste_before
    assert "padmin/waste" in ours.logs[0]
    assert "padmin/waste" not in stock.logs[0]


@pytest.mark.slow  # as a scenario of every adapter: tests/adapters
@pytest.mark.parametrize("how", ["token-mean", "row-mean"])
def test_batches_are_split_where_losses_are_means(how: str) -> None:
    config = PadMinConfig(token_budget=64, launch_cost=4, loss_reduction=how)
    ours, _ = check(lambda: MeanLoss(how), config)
    assert max(n for n, _ in ours.shapes) <= 4


@pytest.mark.slow  # as a scenario of every adapter: tests/adapters
@pytest.mark.usefixtures("equal_weights")
def test_weights_of_one_over_k_are_far_off() -> None:
    config = PadMinConfig(token_budget=64, launch_cost=4, pad_token_id=PAD, check="off")
    for make in (llama, MeanLoss):
        assert apart(train(Ours, make, config), train(Trainer, make)) > 0.1


@pytest.mark.parametrize("declared", ["row-mean", "sum"])
def test_a_wrong_declaration_is_refused(declared: str) -> None:
    config = PadMinConfig(token_budget=64, loss_reduction=declared)
    with pytest.raises(GradientCheckError, match="set loss_reduction='token-mean'"):
        train(Ours, MeanLoss, config)


@pytest.mark.slow  # as a scenario of every adapter: tests/adapters
def test_left_padding_equals_right_padding() -> None:
    right = train(Trainer)
    left = train(Ours, padmin=BUDGET, collator=lambda samples: collate(samples, left=True))
    assert apart(left, right) <= 1e-5


def test_clipping_schedule_and_adamw() -> None:
    check(llama, BUDGET, optim="adamw_torch", max_grad_norm=0.1, learning_rate=1e-3, lr_scheduler_type="cosine")


def test_label_smoothing() -> None:
    check(llama, BUDGET, label_smoothing_factor=0.1)


def test_a_loss_function_of_the_users() -> None:
    def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"][:, :-1].transpose(1, 2)
        return nn.functional.cross_entropy(logits, labels[:, 1:], reduction="sum") / num_items_in_batch

    check(llama, BUDGET, trainer_options={"compute_loss_func": summed})

    def coupled(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs["logits"].logsumexp(0).mean()

    with pytest.raises(GradientCheckError):
        train(Ours, padmin=BUDGET, trainer_options={"compute_loss_func": coupled})


def test_classification() -> None:
    def bert() -> nn.Module:
        torch.manual_seed(1)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=3, **sizes, **dropouts))

    check(bert, PadMinConfig(token_budget=64, launch_cost=4, loss_reduction="row-mean"), data=rows(classes=3))


def t5() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0))


def test_encoder_decoder() -> None:
    config = PadMinConfig(token_budget=64, launch_cost=4, pad_token_id=PAD)
    ours, _ = check(t5, config, data=rows(targets=True))
    # It takes num_items_in_batch and returns a mean, so its batches are split one by one.
    assert ours.trainer._padmin.pools is False


def test_evaluation_is_untouched() -> None:
    options = {"eval_strategy": "epoch", "per_device_eval_batch_size": 5}
    more = {"trainer_options": {"eval_dataset": rows(15)}}
    ours, stock = check(llama, BUDGET, **options, **more)
    pairs = [[log["eval_loss"] for log in record.logs if "eval_loss" in log] for record in (ours, stock)]
    assert pairs[0] == pytest.approx(pairs[1], abs=1e-5)
    assert len(pairs[0]) == 2
    assert (5, 30) in ours.shapes


@pytest.mark.slow  # as a scenario of every adapter: tests/adapters
def test_switched_off_it_is_stock_to_the_bit() -> None:
    stock, off = train(Trainer), train(Ours, padmin=PadMinConfig(enabled=False))
    assert all(torch.equal(a, b) for a, b in zip(stock.gradients, off.gradients, strict=True))
    assert off.shapes == stock.shapes
    assert not any(key.startswith("padmin/") for log in off.logs for key in log)


@pytest.mark.slow  # as a scenario of every adapter: tests/adapters
def test_mixed_precision() -> None:
    stock, ours = train(Trainer, bf16=True), train(Ours, padmin=BUDGET, bf16=True)
    assert apart(ours, stock) <= 0.05


# What is refused


@pytest.mark.parametrize(
    ("options", "config", "told"),
    [
        ({}, {"normalize": "global"}, "average_tokens_across_devices"),
        ({"label_smoothing_factor": 0.1}, {"mode": "split"}, "label_smoothing_factor=0.1"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        train(Ours, MeanLoss, PadMinConfig(**config), **options)


def test_entries_whose_filler_is_not_known() -> None:
    """Batches of a window have other widths, and nothing says what pads token ids."""
    with pytest.raises(BatchError, match=r"'input_ids' is .* set pad_token_id"):
        train(Ours, padmin=PadMinConfig(token_budget=64, check="off"), trainer_options={})


def test_scaled_rotary_embeddings() -> None:
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 8}
    with pytest.raises(ArchitectureError, match="shorten rows to 8"):
        train(Ours, lambda: llama(**rope), replace(BUDGET, mode="split"))


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "get_batch_samples", lambda self, loader: loader)
    with pytest.raises(ConfigError, match=r"transformers .*: Trainer.get_batch_samples takes \['self', 'loader'\]"):
        train(Ours, padmin=BUDGET)


def test_a_malformed_batch_is_named() -> None:
    def broken(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collate(samples)
        return batch | {"labels": torch.ones_like(batch["labels"])}

    with pytest.raises(BatchError, match=r"'labels' is set on .* padding slots"):
        train(Ours, padmin=BUDGET, collator=broken)
    assert issubclass(PadMinWarning, UserWarning)


class OwnLoss:
    """A loss in the body of the user's class, which asks nobody else, as documentation shows it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:], reduction="none")
        loss = losses.sum() / (inputs["labels"][:, 1:] != -100).sum()
        return (loss, {"logits": logits}) if return_outputs else loss


@pytest.mark.parametrize("order", ["in the class's body", "behind the mixin"])
def test_a_loss_of_the_users_own(order: str) -> None:
    class Stock(OwnLoss, Trainer):
        pass

    class Body(OwnLoss, PadMinTrainerMixin, Trainer):
        pass

    class Behind(PadMinTrainerMixin, OwnLoss, Trainer):
        pass

    kind = Body if order == "in the class's body" else Behind
    stock, ours = train(Stock, llama), train(kind, llama, PadMinConfig(token_budget=64, launch_cost=4))
    assert len(stock.gradients) == len(ours.gradients) > 1
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        assert float((mine - theirs).abs().max() / theirs.abs().max()) <= 1e-5
    assert losses(ours) == pytest.approx(losses(stock), abs=1e-5)
    assert "compute_loss" not in vars(ours.trainer)
    assert ours.trainer.padding_stats.micro_batches > ours.trainer.padding_stats.batches


def sparse_labels(keep: Callable[[int], bool]) -> list[dict[str, Any]]:
    data = rows(targets=True)
    for index, row in enumerate(data):
        if not keep(index):
            row["labels"] = [-100] * len(row["labels"])
    return data


@pytest.mark.filterwarnings("ignore:a batch has no loss tokens")
@pytest.mark.parametrize(
    ("keep", "accumulate", "pools"),
    [(lambda k: k % 4 == 0, 3, False), (lambda k: k >= 8, 3, False), (lambda k: k % 4 == 0, 1, None)],
)
def test_until_a_batch_tells_what_the_loss_is_they_run_as_they_came(
    keep: Callable[[int], bool], accumulate: int, pools: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    """T5 takes num_items_in_batch and returns a mean; of one row with a loss, mean and sum are the same."""
    config = PadMinConfig(token_budget=200, launch_cost=4, pad_token_id=PAD)
    data, how = sparse_labels(keep), {"gradient_accumulation_steps": accumulate, "trainer_options": {}}
    options = {"data": data, "train_sampling_strategy": "sequential", **how}
    stock, ours = train(Trainer, t5, **options), train(Ours, t5, config, **options)
    assert apart(ours, stock) <= 1e-5
    assert losses(ours) == pytest.approx(losses(stock), abs=1e-5)
    assert ours.trainer._padmin.pools is pools
    said = [each for each in caplog.messages if "windows run as they came until one tells" in each]
    assert len(said) == (pools is None)


def test_a_loss_that_draws_random_numbers_runs_as_it_came_and_is_told_of() -> None:
    class Noisy(Ours):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            return super().compute_loss(*args, **options) * random.SystemRandom().uniform(0.5, 1.5)

    with pytest.warns(PadMinWarning, match="whether the loss is a sum over num_items_in_batch is not known"):
        ours = train(Noisy, llama, BUDGET)
    assert max(n for n, _ in ours.shapes[-3:]) == 4
    assert ours.trainer._padmin.pools is None


# Labels on first tokens that only later windows have


def late_first_labels(first_from: int = 12, count: int = 24) -> list[dict[str, Any]]:
    """A third of the tokens have labels; from row `first_from` on the first ones too."""
    dice, made = random.Random(5), []
    for k in range(count):
        n = dice.choice((3, 5, 8, 12, 17))
        ids = [dice.randrange(1, VOCABULARY) for _ in range(n)]
        chosen = {dice.randrange(1, n) for _ in range(max(1, n // 3))} | ({0} if k >= first_from else set())
        made.append({"input_ids": ids, "labels": [each if j in chosen else -100 for j, each in enumerate(ids)]})
    return made


def left_padded(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return collate(samples, left=True)


def masked_bert() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes, **dropout))


class Aligned:
    """A sum over num_items_in_batch of targets that line up with the logits, whatever the Trainer takes it for."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        flat = outputs.logits.flatten(0, 1), labels.flatten()
        loss = nn.functional.cross_entropy(*flat, ignore_index=-100, reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def run_late(kind: type, make: Any = llama, padmin: dict[str, Any] | None = None, **options: Any) -> Record:
    config = None if padmin is None else PadMinConfig(token_budget=48, launch_cost=4, pad_token_id=PAD, **padmin)
    once = {"num_train_epochs": 1, "train_sampling_strategy": "sequential", "max_grad_norm": 0.0}
    options = once | {"data": late_first_labels(), **options}
    return train(kind, make, config, **options)


@pytest.mark.slow
def test_first_labels_of_a_mean_over_each_batch() -> None:
    with pytest.raises(GradientCheckError, match="set label_shift=0") as caught:
        run_late(Ours, masked_bert, {})
    assert "mode='joint'" not in str(caught.value)
    assert apart(run_late(Ours, masked_bert, {"label_shift": 0}), run_late(Trainer, masked_bert)) <= 1e-5
    assert apart(run_late(Ours, masked_bert, {"check": "off"}), run_late(Trainer, masked_bert)) > 0.01  # the control


@pytest.mark.filterwarnings("ignore:.*left-padded rows of a batch have a label")
@pytest.mark.parametrize("collator", [collate, left_padded])
def test_first_labels_of_a_sum_over_the_targets_of_the_window(collator: Any) -> None:
    """Right-padded it is exact whatever is declared; left-padded the Trainer counts the first targets as lost."""
    kinds = [type("Kind", (Aligned, each), {}) for each in (Trainer, Ours)]
    stock = run_late(kinds[0], collator=collator)
    right = run_late(kinds[1], padmin={"label_shift": 0}, collator=collator)
    assert apart(right, stock) <= 1e-5
    if collator is collate:
        assert apart(run_late(kinds[1], padmin={}, collator=collator), stock) <= 1e-5
        return
    with pytest.raises(GradientCheckError, match="is not what the training step does: set label_shift=0"):
        run_late(kinds[1], padmin={}, collator=collator)
    assert apart(run_late(kinds[1], padmin={"check": "off"}, collator=collator), stock) > 0.01  # the control


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*left-padded rows of a batch have a label")
def test_first_labels_of_a_causal_loss_are_lost() -> None:
    """Rolled, its first targets are gone, and the divisor must do without them."""
    kind = type("Kind", (Ours,), {})
    right = run_late(Trainer)
    with pytest.warns(PadMinWarning, match="labels on first tokens of left-padded rows are gone"):
        assert apart(run_late(kind, padmin={}, collator=left_padded), right) <= 1e-4
    with pytest.raises(GradientCheckError, match="set label_shift=1"):
        run_late(kind, padmin={"label_shift": 0}, collator=left_padded)
