"""Trainers of transformers whose steps only whole batches give: losses that couple rows, state, passes of their own."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.transformers import PadMinTrainerMixin

VOCABULARY = 40
JOINT = PadMinConfig(mode="joint", token_budget=64, launch_cost=4)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES, **options)).double()


def bert(kind: type, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    return kind(
        BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **SIZES, **NO_DROPOUT, **options)
    ).double()


def t5() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0)).double()


def bart() -> nn.Module:
    torch.manual_seed(1)
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64}
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, dropout=0.0, **sizes)).double()


# Data: rows whose lengths differ, a few of them long.


def lengths(count: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.choice([3, 4, 4, 5, 6, 7, 30]) for _ in range(count)]


def rows(count: int = 32) -> list[dict[str, Any]]:
    dice = random.Random(1)
    made = []
    for length in lengths(count):
        ids = [dice.randrange(1, VOCABULARY) for _ in range(length)]
        made.append({"input_ids": ids, "labels": [-100, *ids[1:]], "kind": dice.randrange(3)})
    return made


def padded(rows: Sequence[Sequence[int]], fill: int = 0) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    ids = [each["input_ids"] for each in samples]
    return {
        "input_ids": padded(ids),
        "attention_mask": padded([[1] * len(each) for each in ids]),
        "labels": padded([each["labels"] for each in samples], -100),
        "kind": torch.tensor([each["kind"] for each in samples]),
    }


def spans(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Features of extractive question answering."""
    batch = collate(samples)
    ends = torch.tensor([len(each["input_ids"]) - 1 for each in samples])
    kind = batch.pop("kind")
    del batch["labels"]
    return batch | {"start_positions": torch.minimum(kind, ends), "end_positions": ends}


def kinds(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Of classification."""
    batch = collate(samples)
    return {name: batch[name] for name in ("input_ids", "attention_mask")} | {"labels": batch["kind"]}


def targets(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Of an encoder-decoder, as its collator pads them."""
    batch = collate(samples)
    lengths = [3 + each["kind"] for each in samples]
    labels = padded([[5, *range(6, 5 + length)] for length in lengths], -100)
    return {name: batch[name] for name in ("input_ids", "attention_mask")} | {"labels": labels}


def choices(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Of multiple choice, as examples of transformers collate them: (B, C, L)."""
    batch = collate(samples)
    batch.pop("labels")
    kind = batch.pop("kind")
    return {name: each.view(len(samples) // 2, 2, -1) for name, each in batch.items()} | {"labels": kind[::2] % 2}


def pairs(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Answers that were chosen, and behind them, in the same batch, those that were rejected."""
    batch = collate([*samples[::2], *samples[1::2]])
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


# Steps. Each is put before a Trainer, or before the mixin and a Trainer.


def pooled(outputs: Any, mask: Tensor) -> Tensor:
    hidden = outputs.hidden_states[-1]
    weight = mask.to(hidden.dtype)[..., None]
    return (hidden * weight).sum(1) / weight.sum(1)


def whole(tensor: Tensor) -> Tensor:
    """Of one that is sharded, all of it, on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """Of one that is sharded, this rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def contrast(hidden: Tensor) -> Tensor:
    """In-batch negatives: each row against the next one's, rows 2k and 2k + 1 belong together."""
    first, second = (F.normalize(each, dim=-1) for each in (hidden[::2], hidden[1::2]))
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


class Own:
    """A loss of hidden states and logits, which logs what share of tokens is guessed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.prepare()

    def prepare(self) -> None:
        pass

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], output_hidden_states=True
        )
        labels = inputs["labels"][:, 1:]
        hits = (outputs.logits[:, :-1].argmax(-1) == labels)[labels != -100].double().mean()
        self.log({"guessed": float(hits)})
        loss = self.loss_of(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def token_loss(self, outputs: Any, inputs: Any, **options: Any) -> Tensor:
        logits = outputs.logits[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, inputs["labels"][:, 1:], **options)

    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        return self.token_loss(outputs, inputs)


class Weighted(Own):
    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        weights = torch.linspace(0.1, 3, VOCABULARY, dtype=outputs.logits.dtype)
        return self.token_loss(outputs, inputs, weight=weights)


class Contrastive(Own):
    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        return contrast(pooled(outputs, inputs["attention_mask"]))


class Flooding(Own):
    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        return (self.token_loss(outputs, inputs) - 3.6).abs() + 3.6


class WarmUp(Own):
    """A coupled term whose coefficient leaves 0 in the middle."""

    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        share = min(1.0, max(0, self.state.global_step - 2) / 4)
        return self.token_loss(outputs, inputs) + share * contrast(pooled(outputs, inputs["attention_mask"]))


class Remembering(Own):
    """A teacher that follows, a queue of what was seen, and a counter, all of them moved by the loss."""

    def prepare(self) -> None:
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.queue, self.count = torch.zeros(0, 16, dtype=torch.float64), 0

    def weights(self) -> list[Tensor]:
        return [whole(each) for each in self.model.parameters()]

    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        self.count += 1
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.weights(), strict=True):
                mine.lerp_(theirs, 0.2)
            seen = self.teacher(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], output_hidden_states=True
            )
        own = pooled(outputs, inputs["attention_mask"])
        wanted = pooled(seen, inputs["attention_mask"])
        old, self.queue = self.queue, torch.cat([self.queue, wanted])[-12:]
        far = (own @ old.T).logsumexp(1).mean() if len(old) else own.sum() * 0
        return F.mse_loss(own, wanted) + 0.1 * far / self.count + self.token_loss(outputs, inputs)


class Adversarial(Own):
    """A second pass on embeddings that were moved along the gradient of the first."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = super().training_step(model, dict(inputs), num_items_in_batch)
        weight = self.model.get_input_embeddings().weight
        moved = 0.5 * weight.grad / weight.grad.norm()
        weight.data.add_(moved)
        again = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(again / self.args.gradient_accumulation_steps)
        weight.data.sub_(moved)
        return loss

    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        return self.token_loss(outputs, inputs) + contrast(pooled(outputs, inputs["attention_mask"]))


class OwnStep(Own):
    """A step of one's own that asks nobody for a loss."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        outputs = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], output_hidden_states=True
        )
        loss = contrast(pooled(outputs, inputs["attention_mask"])) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class Adversaries(Own):
    """Two models: one tells kinds of rows apart, the other is trained to hide them."""

    def prepare(self) -> None:
        torch.manual_seed(2)
        self.judge = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.of_judge = torch.optim.Adam(self.judge.parameters(), lr=0.05)  # whose state a check advances, too

    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        hidden, kind = pooled(outputs, inputs["attention_mask"]), inputs["kind"]
        with torch.enable_grad():
            self.of_judge.zero_grad()
            F.cross_entropy(self.judge(hidden.detach()), kind).backward()
            self.of_judge.step()
        return self.token_loss(outputs, inputs) - 0.3 * F.cross_entropy(self.judge(hidden), kind)


class Masked:
    """Extractive question answering with padding left out, as inference does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        away = inputs["attention_mask"] == 0
        both = zip((outputs.start_logits, outputs.end_logits), ("start_positions", "end_positions"), strict=True)
        loss = sum(F.cross_entropy(each.masked_fill(away, -1e4), inputs[name]) for each, name in both)
        return (loss, outputs) if return_outputs else loss


class WithValues(nn.Module):
    """A causal model with a value for each token, as libraries of reward models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model = llama()
        self.v_head = nn.Linear(16, 1).double()
        self.config = self.pretrained_model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **more: Any) -> tuple[Any, None, Tensor]:
        outputs = self.pretrained_model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, **more
        )
        return outputs.logits, None, self.v_head(outputs.hidden_states[-1]).squeeze(-1)


class Pairwise:
    """Chosen answers are to get larger values at their last tokens than rejected ones."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        _, _, values = model(**inputs, return_dict=True, use_cache=False)
        half = len(values) // 2
        last = values.gather(1, inputs["attention_mask"].sum(1, keepdim=True) - 1).squeeze(1)
        loss = -F.logsigmoid(last[:half] - last[half:]).mean()
        return (loss, last) if return_outputs else loss


OWN: list[type] = [
    Weighted,
    Contrastive,
    Flooding,
    WarmUp,
    Remembering,
    Adversarial,
    OwnStep,
    Adversaries,
]


# Trainings.


class Anneals(nn.Module):
    """A norm with a factor that each call moves, by so little that no limit of gradients tells."""

    def __init__(self, norm: nn.Module, how: str) -> None:
        super().__init__()
        self.norm, self.how, self.count = norm, how, 0
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.how == "buffer":
            self.factor.add_(1e-7)
        elif self.how == "number":
            self.count += 1
        else:  # written anew by each call, and read by nobody
            self.seen, self.width = hidden.detach().abs().mean(), hidden.shape[1]
        return self.norm(hidden) * self.factor.clone() * (1 + 1e-7 * self.count)


class Record(TrainerCallback):
    """Gradients before each step of the optimizer, and what was logged; of shards those of this rank."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.logs: list[dict[str, Any]] = []
        self.parameters = torch.zeros(0)
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        self.gradients.append(torch.cat([local(grad).detach().double().flatten() for grad in grads]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append({name: value for name, value in logs.items() if not name.startswith(("padmin/", "train_"))})


def train(
    step: type | None,
    make: Callable[[], nn.Module] = llama,
    padmin: PadMinConfig | None = None,
    collator: Any = collate,
    behind: bool = False,
    resume: str | None = None,
    data: Any = None,
    **options: Any,
) -> Record:
    """A training with (`padmin`) or without the mixin; `behind`: the step's class behind the mixin."""
    mixin = () if padmin is None else (PadMinTrainerMixin,)
    steps = () if step is None else (step,)
    kind = type("Kind", (*mixin, *steps, Trainer) if behind else (*steps, *mixin, Trainer), {})
    defaults: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 8,
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
    trainer = kind(
        model=model,
        args=TrainingArguments(**(defaults | options)),
        train_dataset=rows() if data is None else data,
        data_collator=collator,
        callbacks=[record],
        **({} if padmin is None else {"padmin": padmin}),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    record.parameters = torch.cat([local(p).detach().double().flatten() for p in trainer.model.parameters()])
    record.trainer = trainer
    return record


def apart(found: Record, wanted: Record) -> float:
    """How far gradients are apart, at most, relative to the largest of their step."""
    assert len(found.gradients) == len(wanted.gradients) > 1
    both = zip(found.gradients, wanted.gradients, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in both)


def logs_apart(found: Record, wanted: Record) -> float:
    """How far what was logged is apart; infinite where something is there in one of both alone."""
    if [set(each) for each in found.logs] != [set(each) for each in wanted.logs]:
        return float("inf")
    both = zip(found.logs, wanted.logs, strict=True)
    return max(abs(float(a[name]) - float(b[name])) for a, b in both for name in a)


KINDS = (BertForSequenceClassification, kinds)
QUESTIONS = (BertForQuestionAnswering, spans)
CHOICES = (BertForMultipleChoice, choices)
