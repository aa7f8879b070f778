"""Models of transformers in modules of Lightning, for ways that keep batches whole."""

from __future__ import annotations

from collections.abc import Callable

import support
import torch
from support import Module, relative
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

SIZES = {
    "vocab_size": support.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attn_implementation": "eager",
}
EXACT = 1e-12


def llama() -> nn.Module:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


def mixtral(coefficient: float = 1.0) -> nn.Module:
    torch.manual_seed(1)
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = MixtralConfig(**SIZES, **options, router_aux_loss_coef=coefficient, experts_implementation="eager")
    return MixtralForCausalLM(config).double()


class OwnLoss(Module):
    """The loss that the model itself makes of labels."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


def worst(a: Module, b: Module) -> float:
    assert len(a.gradients) == len(b.gradients) > 0
    return max(relative(x, y) for x, y in zip(a.gradients, b.gradients, strict=True))
