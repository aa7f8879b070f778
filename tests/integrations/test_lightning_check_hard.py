"""The first-batch check on modules that make it hard: no false alarm, no miss, no damage."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning_utilities.core import rank_zero
from support import LENGTHS, Module, fit, make_batch, padmin, ragged_batches, token_losses
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_padmin.errors import GradientCheckError

SIZES = {"vocab_size": support.VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


class Plain(Module):
    """A model of transformers, and a token mean of its logits."""

    def __init__(self, model: nn.Module, how: str = "token-mean") -> None:
        super().__init__(how, dtype=torch.float32)
        self.model = model

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return support.reduce_loss(token_losses(logits.float(), batch["labels"]), batch["labels"], self.how)


def told(module: Module, batches: list[Any] | None = None, **options: Any) -> str:
    """What the check says, at most in words to the log: a warning would be an error here."""
    records: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    trainer_options = options.pop("trainer", {})
    # Not by its name: importing pytorch_lightning as well replaces the logger that both packages share.
    logger, handler = rank_zero.log, Keeps()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        fit(module, batches or ragged_batches(1), padmin(**options), **trainer_options)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return " ".join(text for text in records if "PadMinCallback: mode" in text)


def wrong(module: Module, how: str, batches: list[Any] | None = None, **options: Any) -> None:
    """A wrong declaration is refused, and the right one named."""
    with pytest.raises(GradientCheckError, match=f"set .*loss_reduction='{how}'"):
        told(module, batches, **options)


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=24, **options))


def gpt2() -> nn.Module:
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=support.VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64))


# No false alarm, and wrong ones found all the same


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_checkpointing_with_dropout(name: str, use_reentrant: bool) -> None:
    def make() -> nn.Module:
        model = llama(attention_dropout=0.3) if name == "llama" else gpt2()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model.train()

    assert "are the un-split ones" in told(Plain(make()))
    wrong(Plain(make(), "row-mean"), "row-mean")


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x.float())).to(x.dtype)


def adapted(how: str = "token-mean") -> Plain:
    """Adapters in float32 on a frozen base in bf16, and a Trainer that knows nothing of it."""
    model = llama().bfloat16().requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.up_proj = LowRank(layer.mlp.up_proj)
    return Plain(model, how)


def test_adapters_in_float32_on_a_base_in_half_precision() -> None:
    assert "are the un-split ones" in told(adapted())
    wrong(adapted("sum"), "sum")


def test_autocast_of_the_users_own() -> None:
    class Casts(Plain):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().loss(batch)

    assert "are the un-split ones" in told(Casts(llama()))
    wrong(Casts(llama(), "sum"), "sum")


@pytest.mark.parametrize("kind", ["numpy", "torch", "count"])
def test_a_step_with_a_generator_of_its_own(kind: str) -> None:
    """The generator is put back before each pass, so that a step which scales its loss by it is a function again."""

    class Draws(Module):
        def __init__(self, how: str = "token-mean") -> None:
            super().__init__(how)
            self.rng, self.generator = np.random.default_rng(3), torch.Generator().manual_seed(3)
            self.count = itertools.count(1)

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            factor = {
                "numpy": lambda: self.rng.random(),
                "torch": lambda: float(torch.rand((), generator=self.generator)),
                "count": lambda: float(next(self.count)),
            }[kind]()
            return super().loss(batch) * factor

    if kind == "count":  # cannot be put back, but is noticed: un-split gradients do not repeat
        with pytest.raises(GradientCheckError, match="is another function at each call"):
            told(Draws())
    else:
        assert "are the un-split ones" in told(Draws())
        wrong(Draws("row-mean"), "row-mean")


@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_dropout_inside_of_fused_modules(kind: str) -> None:
    class Fused(Module):
        def __init__(self, how: str = "token-mean") -> None:
            super().__init__(how)
            self.mixer: nn.Module = (
                nn.LSTM(12, 12, 2, dropout=0.4, batch_first=True)
                if kind == "lstm"
                else nn.TransformerEncoderLayer(12, 2, 16, dropout=0.3, batch_first=True)
            ).double()

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            x = self.model.embedding(batch["input_ids"])
            n = x.shape[1]
            causal = torch.ones(n, n, dtype=torch.bool).triu(1)
            hidden = self.mixer(x)[0] if kind == "lstm" else self.mixer(x, src_mask=causal, is_causal=True)
            losses = token_losses(self.model.head(hidden), batch["labels"])
            return support.reduce_loss(losses, batch["labels"], self.how)

    assert "are the un-split ones" in told(Fused())
    wrong(Fused("row-mean"), "row-mean")


def t5_batch() -> dict[str, Tensor]:
    batch = make_batch([9, 7, 5, 3, 8, 2])
    labels = torch.full((6, 8), -100)
    for row, n in enumerate((8, 2, 6, 3, 5, 1)):
        labels[row, :n] = torch.randint(1, support.VOCABULARY, (n,), generator=torch.Generator().manual_seed(row))
    return batch | {"labels": labels}


@pytest.mark.parametrize("how", ["token-mean", "row-mean", "sum"])
def test_encoder_decoder_without_a_decoder_mask(how: str) -> None:
    class Seq2Seq(Module):
        def __init__(self) -> None:
            super().__init__(dtype=torch.float32)
            torch.manual_seed(1)
            sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.1}
            self.model = T5ForConditionalGeneration(
                T5Config(vocab_size=support.VOCABULARY, **sizes, decoder_start_token_id=0)
            )

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            logits = self.model(**batch).logits
            losses = nn.functional.cross_entropy(
                logits.transpose(1, 2), batch["labels"], ignore_index=-100, reduction="none"
            )
            valid = batch["labels"] != -100
            if how == "row-mean":
                return (losses.sum(1) / valid.sum(1)).mean()
            return losses.sum() / (valid.sum() if how == "token-mean" else 1)

    assert "are the un-split ones" in told(Seq2Seq(), [t5_batch()], loss_reduction=how)
    wrong(Seq2Seq(), how, [t5_batch()], loss_reduction="sum" if how != "sum" else "row-mean")


def test_gradients_taken_inside_of_the_step() -> None:
    """A penalty on a gradient couples rows; the step must see its own gradients, not what the check makes of them."""

    class Penalised(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            loss = super().loss(batch)
            (gradient,) = torch.autograd.grad(loss, self.model.head.weight, create_graph=True)
            return loss + 5 * gradient.pow(2).sum()

    with pytest.raises(GradientCheckError, match="couples rows"):
        told(Penalised())


@pytest.mark.parametrize("coefficient", [0.1, 0.01, 1e-3])
def test_a_small_part_that_is_wholly_wrong(coefficient: float) -> None:
    """In-batch negatives of a head whose gradients are small beside those of the model."""

    class Contrastive(Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(12, 6).double()

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            hidden = self.model.rnn(self.model.embedding(batch["input_ids"]))[0]
            mask = (batch["attention_mask"]).unsqueeze(-1)
            z = self.projection((hidden * mask).sum(1).detach())
            pairs = nn.functional.cross_entropy(z @ z.T.roll(1, 0), torch.arange(len(z)))
            losses = token_losses(self.model.head(hidden), batch["labels"])
            return support.reduce_loss(losses, batch["labels"], "token-mean") + coefficient * pairs

    with pytest.raises(GradientCheckError, match="most in 'projection"):
        told(Contrastive())


def test_parameters_that_the_step_freezes_and_what_it_writes_over() -> None:
    class Switches(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            self.model.embedding.requires_grad_(self.trainer.global_step > 0)
            hidden = nn.functional.dropout(torch.relu(self.model.rnn(self.model.embedding(batch["input_ids"]))[0]), 0.1)
            hidden *= 2
            losses = token_losses(self.model.head(hidden), batch["labels"])
            return support.reduce_loss(losses, batch["labels"], self.how)

    assert "are the un-split ones" in told(Switches())


def test_the_budget_holds_where_widths_are_rounded() -> None:
    shapes: list[tuple[int, ...]] = []

    class Watches(Module):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            shapes.append(tuple(batch["input_ids"].shape))
            return super().loss(batch)

    told(Watches(), [make_batch([12, 9, 8, 8, 6, 5, 4, 3], width=256)], token_budget=48, pad_to_multiple_of=4)
    assert max(rows * width for rows, width in shapes) <= 48


def test_what_a_logger_knows_is_there(tmp_path: Path) -> None:
    class Writes(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (Path(self.logger.log_dir) / "seen.txt").touch()
            self.logger.log_metrics({"own": 1.0}, step=0)
            self.logger.experiment.log_metrics({"other": 1.0}, 0)
            assert Path(self.logger.save_dir) == tmp_path
            return super().training_step(batch, batch_idx)

    for check in ("first-batch", "off"):
        logger = CSVLogger(tmp_path, name=check)
        fit(Writes(), ragged_batches(1), padmin(check=check), logger=logger)
    files = [(tmp_path / name / "version_0" / "metrics.csv").read_text() for name in ("first-batch", "off")]
    assert files[0] == files[1]


def test_advice_can_be_followed() -> None:
    """Each option that the check names makes the fit run."""
    for how in ("token-mean", "row-mean", "sum"):
        for declared in ("token-mean", "row-mean", "sum"):
            options: dict[str, Any] = {"loss_reduction": declared}
            for _ in range(2):
                try:
                    told(Module(how), [make_batch(LENGTHS)], **options)
                    break
                except GradientCheckError as error:
                    advice = str(error).split(": set ")[1]
                    options |= eval(f"dict({advice})")
            else:
                pytest.fail(f"{how} declared {declared}: the advice does not help")
