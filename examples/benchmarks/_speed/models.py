"""Small models of random weights with sensible proportions, and SmolLM2-135M. None needs a network."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from .workload import EXAMPLES

NAMES = ("qwen2", "lfm2", "bamba", "qwen3-next", "smollm2")


def build(name: str, hidden: int, layers: int, vocabulary: int) -> PreTrainedModel:
    """A model of `NAMES` in float32; the same weights every time."""
    torch.manual_seed(0)
    if name == "smollm2":
        return _smollm2(layers)
    make = {"qwen2": _qwen2, "lfm2": _lfm2, "bamba": _bamba, "qwen3-next": _qwen3_next}[name]
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": max(4, hidden // 64),
        "num_key_value_heads": max(2, hidden // 128),
        "max_position_embeddings": 32_768,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return make(sizes).train()


def _qwen2(sizes: dict[str, Any]) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**sizes))


def _lfm2(sizes: dict[str, Any]) -> PreTrainedModel:
    """Every other layer is attention, the others are short convolutions."""
    kinds = ["conv", "full_attention"] * (sizes["num_hidden_layers"] // 2 + 1)
    return Lfm2ForCausalLM(
        Lfm2Config(**sizes, layer_types=kinds[: sizes["num_hidden_layers"]], block_auto_adjust_ff_dim=False)
    )


def _bamba(sizes: dict[str, Any]) -> PreTrainedModel:
    """Chunks of 64 instead of 256: PyTorch's scan computes whole chunks, so short rows would cost 256 tokens each."""
    attention = list(range(1, sizes["num_hidden_layers"], 2))
    return BambaForCausalLM(
        BambaConfig(
            **sizes,
            attn_layer_indices=attention,
            mamba_n_heads=sizes["hidden_size"] // 32,
            mamba_d_head=64,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_chunk_size=64,
        )
    )


def _qwen3_next(sizes: dict[str, Any]) -> PreTrainedModel:
    """Gated delta rule in every other layer. Without experts, whose routing could flip on rounding differences."""
    layers, hidden = sizes["num_hidden_layers"], sizes["hidden_size"]
    kinds = ["linear_attention", "full_attention"] * (layers // 2 + 1)
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **sizes,
            head_dim=hidden // sizes["num_attention_heads"],
            layer_types=kinds[:layers],
            mlp_only_layers=list(range(layers)),
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=hidden // 8,
            linear_value_head_dim=hidden // 4,
        )
    )


def _smollm2(layers: int) -> PreTrainedModel:
    sys.path.append(str(EXAMPLES))  # the example that unpacks the model is one folder up
    from _quickstart import model

    loaded, _ = model.load(None, layers)
    return loaded
