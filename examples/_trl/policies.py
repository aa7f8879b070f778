"""Models to train: SmolLM2-135M, or small random hybrids with its tokenizer. None needs a network."""

from __future__ import annotations

from typing import Any

import torch
from _quickstart import data, model
from rich.progress import track
from transformers import (
    AutoTokenizer,
    BambaConfig,
    BambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from . import sums

NAMES = {"smollm2": "SmolLM2-135M", "lfm2": "a small LFM2", "bamba": "a small Bamba"}


def load(arch: str, layers: int | None, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in float32 and its tokenizer.

    Args:
        arch: one of `NAMES`.
        layers: how many; None for all that SmolLM2 has, 2 for the others.
        seed: decides the weights of the random ones.

    Raises:
        BadInput: the model cannot be had.
    """
    if arch == "smollm2":
        language_model, tokenizer = model.load(None, layers)
    else:
        tokenizer = AutoTokenizer.from_pretrained(model.smollm2_folder(), local_files_only=True)
        torch.manual_seed(seed)
        language_model = random_model(arch, layers or 2, tokenizer)
    tokenizer.padding_side = "left"
    return language_model.train(), tokenizer


def random_model(arch: str, layers: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A small hybrid of attention and another mixer."""
    return (_lfm2 if arch == "lfm2" else _bamba)(layers, _sizes(tokenizer))


def _sizes(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }


def _lfm2(layers: int, sizes: dict[str, Any]) -> PreTrainedModel:
    """Short convolutions, and attention in every second layer."""
    kinds = [("conv", "full_attention")[k % 2] for k in range(layers)]
    config = Lfm2Config(**sizes, num_hidden_layers=layers, layer_types=kinds, block_auto_adjust_ff_dim=False)
    return Lfm2ForCausalLM(config)


def _bamba(layers: int, sizes: dict[str, Any]) -> PreTrainedModel:
    """Mamba2, and attention in every second layer. Scans run in chunks of 64 tokens, which plans take into account."""
    config = BambaConfig(
        **sizes,
        num_hidden_layers=layers,
        attn_layer_indices=list(range(1, layers, 2)),
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=2,
        mamba_chunk_size=64,
    )
    return BambaForCausalLM(config)


def warm_up(language_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, steps: int, seed: int) -> None:
    """Teach a random model how answers look. Without that its completions are noise that never ends."""
    optimizer = torch.optim.AdamW(language_model.parameters(), lr=3e-3)
    rows = data.make_rows(sums.answers(16 * steps, seed), tokenizer)
    collate = data.right_pad(tokenizer.pad_token_id)
    for first in track(range(0, len(rows), 16), description="warm-up", transient=True):
        language_model(**collate(rows[first : first + 16]), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
