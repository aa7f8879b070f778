"""Models of transformers that take a loss of their own: called as they came, with their backbones in chunks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import support
import torch
import transformers
from architectures import zoo
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.distributed import exchange_alone
from lightning_padmin.errors import BatchError
from lightning_padmin.forward import call_sites, chunked
from lightning_padmin.integrations.common import apart

LENGTHS = [5, 9, 3, 12, 11, 4]
CONFIG = PadMinConfig(token_budget=24, launch_cost=2)
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(kind: str) -> Any:
    config = transformers.BertConfig(**_SIZES, **_OFF, vocab_size=40, max_position_embeddings=64)
    return getattr(transformers, f"BertFor{kind}")(config)


def llama(kind: str) -> Any:
    config = transformers.LlamaConfig(**_SIZES, num_key_value_heads=2, vocab_size=40, pad_token_id=0)
    return getattr(transformers, f"LlamaFor{kind}")(config)


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, vocab_size=40, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def bart() -> Any:
    names = [f"{side}_{what}" for side in ("encoder", "decoder") for what in ("layers", "attention_heads")]
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, **dict.fromkeys(names, 2)}
    config = transformers.BartConfig(**sizes, dropout=0.0, vocab_size=40, pad_token_id=0)
    return transformers.BartForConditionalGeneration(config)


def lora() -> Any:
    options = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], lora_dropout=0.0)
    return peft.get_peft_model(bert("SequenceClassification"), options)


def inputs() -> dict[str, Tensor]:
    batch = support.make_batch(LENGTHS)
    return {"input_ids": batch["input_ids"] % 40, "attention_mask": batch["attention_mask"]}


CLASSES, TOKENS = torch.tensor([0, 1, 0, 1, 1, 0]), torch.where(inputs()["attention_mask"] != 0, 1, -100)
# name -> model, labels, the sites that run in chunks
CASES: dict[str, tuple[Callable[[], Any], dict[str, Tensor], list[str]]] = {
    "classes": (partial(bert, "SequenceClassification"), {"labels": CLASSES}, ["m.bert"]),
    "tokens": (partial(bert, "TokenClassification"), {"labels": TOKENS}, ["m.bert"]),
    "masked": (partial(bert, "MaskedLM"), {"labels": TOKENS}, ["m.bert"]),
    "choices": (partial(bert, "MultipleChoice"), {"labels": CLASSES[:3]}, ["m.bert"]),
    "classes, causal": (partial(llama, "SequenceClassification"), {"labels": CLASSES}, ["m.model"]),
    "causal": (partial(llama, "CausalLM"), {"labels": TOKENS}, ["m"]),
    "encoder": (t5, {"labels": TOKENS[:, :7].contiguous()}, ["m.encoder"]),
    "both sides": (bart, {"labels": TOKENS[:, :7].contiguous()}, ["m.model"]),
    "adapters": (lora, {"labels": CLASSES}, ["m.base_model.model.bert"]),
}
ANSWERS = {"start_positions": torch.ones(6).long(), "end_positions": torch.full((6,), 2)}


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    make, labels, _ = CASES[name]
    with zoo.quiet(), zoo.default_dtype(torch.float64):
        torch.manual_seed(0)
        model = make().train()
    batch = inputs()
    if name == "choices":
        batch = {key: value.view(3, 2, -1) for key, value in batch.items()}
    return model, batch | labels


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_stock_call(name: str) -> None:
    model, batch = made(name)
    with zoo.quiet(), zoo.upcasts_to(torch.float64):
        stock = model(**batch).loss
        stock.backward()
        wanted = support.flat_gradient(model)
        model.zero_grad()
        told: list[str] = []
        with chunked(call_sites(nn.ModuleDict({"m": model})), CONFIG, tell=told.append) as calls:
            loss = model(**batch).loss
        loss.backward()
    assert told == []
    assert list(calls.chunked) == CASES[name][2]
    assert calls.total.micro_batches > 1
    assert abs(float(loss.detach() - stock.detach())) <= 1e-12
    assert support.relative(support.flat_gradient(model), wanted) <= 1e-12


def test_alone_a_model_says_what_it_cannot_take() -> None:
    """As it was: by an error where only the model is handed over, and told where somebody listens."""
    model, batch = made("classes")
    with pytest.raises(BatchError, match="'labels' is among the inputs"), chunked({"m": model}, CONFIG):
        model(**batch)
    told: list[str] = []
    for given in (batch, inputs() | ANSWERS):
        with zoo.quiet(), zoo.default_dtype(torch.float64):
            model = model if "labels" in given else bert("QuestionAnswering")
        with chunked({"m": model}, CONFIG, tell=told.append) as calls:
            assert model(**given).loss.isfinite()
        assert (list(calls), dict(calls.as_they_came)) == ([], {"m": 1})
    assert "'labels' is among the inputs" in told[0]
    assert "the model would take its loss of each chunk: call it without 'start_positions'" in told[1]


def test_entries_that_the_library_does_not_know_are_found_out() -> None:
    """Boxes of four numbers per token, whose dimensions no name tells."""
    with zoo.quiet(), zoo.default_dtype(torch.float64):
        config = transformers.LayoutLMConfig(**_SIZES, **_OFF, vocab_size=40, max_position_embeddings=64)
        model = transformers.LayoutLMModel(config).train()
    batch = inputs()
    boxes = torch.randint(0, 50, (*batch["input_ids"].shape, 4)).sort(-1).values
    told: list[str] = []
    with chunked(call_sites(nn.ModuleDict({"m": model})), CONFIG, tell=told.append) as calls:
        outputs = model(**batch, bbox=boxes)
    stock, real = model(**batch, bbox=boxes), batch["attention_mask"] != 0
    assert (told, dict(calls.chunked)) == ([], {"m": 1})
    assert type(outputs) is type(stock)
    assert support.relative(outputs.last_hidden_state[real], stock.last_hidden_state[real]) <= 1e-12
    assert support.relative(outputs.pooler_output, stock.pooler_output) <= 1e-12


@pytest.mark.parametrize("name", ["classes", "answers"])
def test_a_head_that_reads_padding_is_seen_by_who_compares_both_ways(name: str) -> None:
    """The loss of answers is a softmax over all columns, padding too: no shape tells, gradients do."""
    if name == "answers":
        with zoo.quiet(), zoo.default_dtype(torch.float64):
            model, batch = bert("QuestionAnswering").train(), inputs() | ANSWERS
    else:
        model, batch = made(name)
    sites = call_sites(nn.ModuleDict({"m": model}))

    def loss() -> Any:
        return model(**batch).loss

    ways = [nullcontext, lambda: chunked(sites, CONFIG, tell=lambda words: None)]
    with zoo.quiet():
        found = apart(loss, model, ways, trainer=SimpleNamespace(), without_trace=nullcontext, exchange=exchange_alone)
    assert found.is_too_far == (name == "answers")
    assert found.value > 0.1 if name == "answers" else found.value <= 1e-6
