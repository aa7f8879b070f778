"""A tiny encoder with a tokenizer, in a folder, and sentences for it, few of which are long."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

VOCABULARY = 60
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def tokenizer() -> PreTrainedTokenizerFast:
    words = {name: k for k, name in enumerate(_SPECIAL)} | {f"w{k}": k for k in range(4, VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, model_max_length=64, **named)


def saved(kind: type = BertModel, dropout: float = 0.0, **options: Any) -> str:
    """A folder with weights that are large enough for sentences to differ."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = BertConfig(
        vocab_size=VOCABULARY, max_position_embeddings=64, initializer_range=0.3, **sizes, **dropouts, **options
    )
    folder = tempfile.mkdtemp()
    kind(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def saved_classifier() -> str:
    """The same with one score."""
    return saved(BertForSequenceClassification, num_labels=1)


class Sentences:
    """Draws them."""

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)

    def __call__(self) -> str:
        length = self._dice.choice([2, 3, 3, 4, 5, 5, 6, 36])
        return " ".join(f"w{self._dice.randrange(4, VOCABULARY)}" for _ in range(length))

    def number(self) -> float:
        return round(self._dice.random(), 2)

    def kind(self, count: int = 3) -> int:
        return self._dice.randrange(count)


def dataset(*columns: str, count: int = 48) -> Dataset:
    """Columns of sentences; `score` is a number, `label` a kind."""
    draw = Sentences()
    made: dict[str, list[Any]] = {name: [] for name in columns}
    for _ in range(count):
        for name in columns:
            made[name].append(draw.number() if name == "score" else draw.kind() if name == "label" else draw())
    return Dataset.from_dict(made)
