"""Joint mode keeps one `PaddedForward` per model and fit, so that what is said once is said once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Module, fit, make_batch, padmin, ragged_batches
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_padmin import PaddedForward, PadMinConfig
from lightning_padmin.forward import chunked, proxy

CONFIG = PadMinConfig(token_budget=24, launch_cost=4)


def llama() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=23, attn_implementation="eager", **sizes))


class Joint(Module):
    """Two models, each called in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.other = llama(), llama()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        kept = batch["attention_mask"][..., None]
        return ((self.model(**inputs).logits - self.other(**inputs).logits) * kept).pow(2).mean()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def counted(model: Any, *arguments: Any, **options: Any) -> PaddedForward:
        found.append(model)
        return PaddedForward(model, *arguments, **options)

    monkeypatch.setattr(proxy, "PaddedForward", counted)
    return found


def test_one_per_model_and_fit(made: list[Any]) -> None:
    module = Joint()
    fit(module, ragged_batches(3), padmin(mode="joint"))  # the check of the first batch has calls too
    assert sorted(map(id, made)) == sorted(map(id, (module.model, module.other)))
    fit(module, ragged_batches(3), padmin(mode="joint"))
    assert len(made) == 4


@pytest.mark.parametrize(("kept", "wanted"), [({}, 1), (None, 3)])
def test_only_what_is_kept_is_used_again(made: list[Any], kept: Any, wanted: int) -> None:
    """The control: whoever keeps nothing has a new one for each time."""
    model, batch = llama(), make_batch([9, 5, 2])
    for _ in range(3):
        with chunked({"": model}, CONFIG, kept=kept) as calls:
            for _ in range(2):
                model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        assert len(calls) == 2
    assert made == [model] * wanted
