"""Kinds of faults in the Trainer of transformers: what a loss is divided by, and what happens once per window."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
from support import VOCABULARY, TinyLM, make_batch, reduce_loss, relative, token_losses
from torch import Tensor, nn
from transformers import PretrainedConfig, Trainer, TrainerCallback, TrainingArguments

from lightning_padmin import PadMinConfig, PadMinWarning
from lightning_padmin.integrations.transformers import PadMinTrainerMixin

pytestmark = pytest.mark.slow  # the kinds are in the quick table of adapters, these inputs are not

SPLIT = PadMinConfig(token_budget=12, launch_cost=0, pad_token_id=0)
LENGTHS = [12, 3, 4, 2, 11, 3, 2, 5, 9, 9, 2, 3, 12, 2, 4, 4, 3, 7, 2, 2]  # five batches of four


class Ours(PadMinTrainerMixin, Trainer):
    pass


class Model(nn.Module):
    """Its loss is 2.0 for every token, or that of a language model."""

    loss_type = "ForCausalLM"  # so that the Trainer counts with the shift
    padmin_per_call = ("calls",)

    def __init__(self, constant: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.config = PretrainedConfig(vocab_size=VOCABULARY)
        self.constant, self.calls = constant, 0
        self.inner = nn.ParameterList([torch.full((), 2.0)]) if constant else TinyLM()

    def losses(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        if self.constant:
            return self.inner[0] * (labels[:, 1:] != -100)
        return token_losses(self.inner(input_ids), labels)


class TakesNoCount(Model):
    """A mean over the batch; the Trainer divides by the number of batches."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": reduce_loss(self.losses(input_ids, labels), labels, "token-mean")}


class Swallows(TakesNoCount):
    """Is given the count and ignores it."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        return super().forward(input_ids, attention_mask, labels)


class Declares(Swallows):
    """Says that it ignores the count, as models of transformers do."""

    accepts_loss_kwargs = False


class UsesCount(Model):
    """A sum over the count of the whole window."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        count = num_items_in_batch if num_items_in_batch is not None else (labels[:, 1:] != -100).sum()
        return {"loss": self.losses(input_ids, labels).sum() / count}


class Kept(TrainerCallback):
    """Gradients, rates and losses of each optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradients.append(torch.cat([p.grad.detach().flatten() for p in model.parameters()]))

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any) -> None:
        self.rates.append(lr_scheduler.get_last_lr()[0])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def rows(lengths: list[int], prompt: int = 1) -> list[dict[str, Tensor]]:
    batches = [make_batch([n], seed=k, prompt=prompt) for k, n in enumerate(lengths)]
    return [{name: value[0] for name, value in batch.items()} for batch in batches]


def collate(samples: list[dict[str, Tensor]], left: bool = False) -> dict[str, Tensor]:
    def padded(name: str, fill: int) -> Tensor:
        side = "left" if left else "right"
        return nn.utils.rnn.pad_sequence([sample[name] for sample in samples], True, fill, side)

    return {name: padded(name, -100 if name == "labels" else 0) for name in samples[0]}


def train(
    kind: type, model: nn.Module, accumulate: int = 1, data: Any = None, more: Any = None, **options: Any
) -> Kept:
    kept = Kept()
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": accumulate,
        "learning_rate": 1.0,
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), **(defaults | options))
    given: dict[str, Any] = {"data_collator": collate} | (more or {}) | ({"padmin": SPLIT} if kind is Ours else {})
    trainer = kind(model=model, args=arguments, train_dataset=data or rows(LENGTHS), callbacks=[kept], **given)
    trainer._train_sampler = None
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    kept.trainer = trainer  # type: ignore[attr-defined]
    return kept


@functools.cache
def constant_rate(kind: type, make: type, accumulate: int, compute_loss_func: Any = None) -> Kept:
    """Five batches at the rate 0, so that every gradient and loss is that of the first parameters."""
    more = {"compute_loss_func": compute_loss_func} if compute_loss_func else {}
    return train(kind, make(), accumulate, more=more, learning_rate=0.0)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("make", [TakesNoCount, Declares, UsesCount])
def test_r23_a_window_is_divided_by_once(make: type, accumulate: int) -> None:
    """Every loss has the gradient 1, so their mean has; without the division it has that of their sum."""
    ours = constant_rate(Ours, make, accumulate)
    assert ours.trainer.padding_stats.micro_batches > 5  # type: ignore[attr-defined]
    assert [float(gradient) for gradient in ours.gradients] == pytest.approx([1.0] * len(ours.gradients), rel=1e-5)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_r23_the_fault_is_there_where_a_mean_is_taken_for_a_part_of_a_sum(accumulate: int) -> None:
    undivided = constant_rate(Trainer, Swallows, accumulate)
    assert float(undivided.gradients[0]) == pytest.approx(accumulate, rel=1e-5)


class Outputs(UsesCount):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"value": self.inner[0]}


def of_outputs(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return outputs["value"] * (labels[:, 1:] != -100).sum() / num_items_in_batch


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_r23_a_loss_function_of_ones_own_is_divided_once(accumulate: int) -> None:
    ours = constant_rate(Ours, Outputs, accumulate, of_outputs)
    assert [float(gradient) for gradient in ours.gradients] == pytest.approx([1.0] * len(ours.gradients), rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("make", [TakesNoCount, Declares, UsesCount])
def test_r51_the_loss_does_not_grow_with_the_window(make: type, accumulate: int) -> None:
    ours = constant_rate(Ours, make, accumulate)
    assert ours.losses == pytest.approx([2.0] * len(ours.losses), rel=1e-5)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_r51_a_model_that_ignores_the_count_trains_as_it_does_without_us(accumulate: int) -> None:
    """The fault itself: the stock Trainer takes such a mean for a part of a sum. It is not ours to change."""
    stock, ours = (constant_rate(kind, Swallows, accumulate) for kind in (Trainer, Ours))
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert max(stock.losses) == pytest.approx(2.0 * accumulate, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", [Swallows, UsesCount])
def test_r51_gradients_of_either_kind_are_the_stock_ones(make: type, accumulate: int) -> None:
    stock, ours = (train(kind, make(constant=False), accumulate) for kind in (Trainer, Ours))
    assert max(relative(a, b) for a, b in zip(ours.gradients, stock.gradients, strict=True)) <= 1e-5
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.parametrize("prompt", [1, 3])
def test_r13_left_padded_rows_have_the_count_of_right_padded_ones(prompt: int) -> None:
    left = {"data_collator": lambda samples: collate(samples, left=True)}
    data = rows(LENGTHS, prompt)
    right = train(Trainer, UsesCount(constant=False), 2, data)
    with pytest.warns(PadMinWarning, match="this model reads padding"):
        ours = train(Ours, UsesCount(constant=False), 2, data, left)
    assert max(relative(a, b) for a, b in zip(ours.gradients, right.gradients, strict=True)) <= 1e-5
    naive = train(Trainer, UsesCount(constant=False), 2, data, left)
    assert relative(naive.gradients[0], right.gradients[0]) > 1e-2, "the fault: the state takes in padding"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_r13_a_label_on_the_first_token_is_no_target(accumulate: int) -> None:
    """Right-padded, as collators make it that copy the ids: counted without the shift 2.0 would be less."""
    ours = train(Ours, UsesCount(), accumulate, rows(LENGTHS, prompt=0), learning_rate=0.0)
    assert ours.losses == pytest.approx([2.0] * len(ours.losses), rel=1e-5)
    unshifted = type("Unshifted", (UsesCount,), {"loss_type": None})
    wrong = train(Trainer, unshifted(), accumulate, rows(LENGTHS, prompt=0), learning_rate=0.0)
    assert max(wrong.losses) < 1.9, "the fault"


@pytest.mark.filterwarnings("ignore::lightning_padmin.errors.PadMinWarning")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_r13_targets_that_the_roll_drops_leave_the_count(accumulate: int) -> None:
    """The same, left-padded: the roll drops what was predicted from padding."""
    left = {"data_collator": lambda samples: collate(samples, left=True)}
    ours = train(Ours, UsesCount(), accumulate, rows(LENGTHS, prompt=0), left, learning_rate=0.0)
    assert ours.losses == pytest.approx([2.0] * len(ours.losses), rel=1e-5)


@pytest.mark.parametrize(("accumulate", "right"), [(1, [0.8, 0.6, 0.4, 0.2, 0.0]), (2, [2 / 3, 1 / 3, 0.0])])
def test_r43_the_schedule_advances_once_per_window(accumulate: int, right: list[float]) -> None:
    ours = train(Ours, UsesCount(constant=False), accumulate, lr_scheduler_type="linear")
    assert ours.rates == pytest.approx(right, abs=1e-9)
    passes = ours.trainer.padding_stats.micro_batches  # type: ignore[attr-defined]
    assert passes > len(ours.rates)
    assert max(0.0, 1 - passes / len(right)) < right[0], "the fault: once per micro-batch"


@pytest.mark.parametrize(
    ("make", "accumulate", "lengths"),
    [
        (TakesNoCount, 4, LENGTHS),
        (UsesCount, 4, LENGTHS),
        (UsesCount, 8, LENGTHS),
        (TakesNoCount, 4, LENGTHS[:18]),
        (UsesCount, 2, LENGTHS[:9]),
    ],
)
def test_r45_the_last_window_of_an_epoch_is_divided_by_what_it_has(make: type, accumulate: int, lengths: Any) -> None:
    ours = train(Ours, make(), accumulate, rows(lengths), learning_rate=0.0)
    assert [float(gradient) for gradient in ours.gradients] == pytest.approx([1.0] * len(ours.gradients), rel=1e-5)
    batches = -(-len(lengths) // 4)
    assert batches % accumulate / accumulate < 1, "the fault: the last window divided by a full one"


@pytest.mark.parametrize("make", [TakesNoCount, UsesCount])
def test_r45_with_a_last_batch_of_fewer_rows_training_is_the_stock_one(make: type) -> None:
    stock, ours = (train(kind, make(constant=False), 4, rows(LENGTHS[:18])) for kind in (Trainer, Ours))
    assert max(relative(a, b) for a, b in zip(ours.gradients, stock.gradients, strict=True)) <= 1e-5
