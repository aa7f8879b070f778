"""Kinds of faults that are numbers: random masks, and precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Module, TinyLM, fit, flat_gradient, make_batch, padmin, reduce_loss, relative, token_losses
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_padmin import PaddedForward, PadMinConfig
from lightning_padmin.verification.equivalence import TOLERANCES


class Dropping(Module):
    """A language model with dropout before its head."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(share)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.model.rnn(self.model.embedding(batch["input_ids"]))[0]
        return reduce_loss(token_losses(self.model.head(self.drop(hidden)), batch["labels"]), batch["labels"], self.how)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_r66_with_dropout_other_masks_are_drawn_and_runs_repeat(share: float, seed: int) -> None:
    def gradient(share: float, *callbacks: Any) -> Tensor:
        module = Dropping(share)
        torch.manual_seed(seed)
        fit(module, [make_batch([24, 6, 6, 3])], *callbacks)
        return module.gradients[0]

    assert relative(gradient(0.0, padmin()), gradient(0.0)) <= 1e-12
    assert torch.equal(gradient(share, padmin()), gradient(share, padmin()))
    assert relative(gradient(share, padmin()), gradient(share)) > 1e-3, "another draw, of the same distribution"


@pytest.mark.parametrize("lengths", [[9, 3, 2], [5, 5, 1, 1], [12, 2]])
def test_r66_a_pass_that_is_repeated_draws_the_same_masks(lengths: list[int]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inner, self.drop = TinyLM().double(), nn.Dropout(0.5)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            hidden = self.inner.rnn(self.inner.embedding(input_ids))[0]
            return {"logits": self.inner.head(self.drop(hidden))}

    batch, gradients = make_batch(lengths), {}
    labels = batch.pop("labels")

    # The fault: a second pass with a random state of its own, whose gradient belongs to another forward pass.
    for name, mode, seed in (("joint", "joint", 5), ("replay", "replay", 5), ("fault", "joint", 6)):
        model = Model()
        forward = PaddedForward(model, PadMinConfig(max_rows=1), mode)
        torch.manual_seed(seed)
        reduce_loss(token_losses(forward(**batch)["logits"], labels), labels, "token-mean").backward()
        forward.backward_pending()
        gradients[name] = flat_gradient(model)
    assert relative(gradients["replay"], gradients["joint"]) <= 1e-12
    assert relative(gradients["fault"], gradients["joint"]) > 1e-2


def llama(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=23, **sizes)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 2e-6), (torch.bfloat16, 0.05)]
)  # models of transformers compute rotations in float32
def test_r67_bounds_go_with_the_precision(dtype: torch.dtype, bound: float) -> None:
    batch = make_batch([24, 20, 9, 3], width=30)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model = llama(dtype)
    with torch.no_grad():
        forward = PaddedForward(model, PadMinConfig(token_budget=24, launch_cost=0))
        found, came = forward(**inputs).logits, model(**inputs).logits
        noise = apart = 0.0
        for row, n in enumerate((24, 20, 9, 3)):
            alone = model(input_ids=batch["input_ids"][row : row + 1, :n]).logits[0]
            apart = max(apart, relative(found[row, :n].double(), alone.double()))
            noise = max(noise, relative(came[row, :n].double(), alone.double()))
    assert apart <= bound
    assert apart <= max(4 * noise, bound)
    if dtype == torch.bfloat16:
        exact = llama(torch.float64)(**inputs).logits.detach()
        rounding = max(relative(found[k, :n].double(), exact[k, :n]) for k, n in enumerate((24, 20, 9, 3)))
        assert rounding > 1e-3, "the fault: what is exact in float64 asserted in half precision"
        assert TOLERANCES[dtype] > rounding
    assert len(forward.micro_batches) > 1
