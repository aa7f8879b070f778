"""Chunked scans: the plan counts what the model pads inside, and xLSTM is told its widths."""

from __future__ import annotations

from typing import Any

import pytest
from architectures.zoo import BY_NAME
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import Module, fit, make_batch, padmin
from torch import Tensor


class Modelled(Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = BY_NAME[name].build()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        logits = self.model(**inputs, use_cache=False).logits.double()
        return logits[batch["attention_mask"].bool()].square().mean()


def shapes(name: str, **options: Any) -> list[tuple[int, ...]]:
    module = Modelled(name)
    batch = make_batch([4, 3, 3, 2, 2, 1], prompt=1)
    callback = padmin(
        token_budget=100, launch_cost=2, check="off", loss_mask_key="attention_mask", label_shift=0, **options
    )
    fit(module, [batch], callback)
    return module.shapes


def test_rows_within_one_chunk_are_not_cut_apart() -> None:
    """chunk_size is 4, so rows of 4 and of 2 tokens cost the same, and another launch would be for nothing."""
    assert shapes("Bamba") == [(6, 4)]
    assert shapes("Bamba", cost_multiple_of=1) != [(6, 4)]
    assert shapes("Llama") == shapes("Bamba", cost_multiple_of=1)


def test_xlstm_without_its_width_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"set pad_to_multiple_of=4, pad_token_id"):
        shapes("xLSTM")
    with pytest.raises(MisconfigurationException, match=r"set pad_to_multiple_of=4, pad_token_id"):
        shapes("xLSTM", pad_to_multiple_of=6)
    assert all(width % 4 == 0 for _, width in shapes("xLSTM", pad_to_multiple_of=8, pad_token_id=0))
