"""Models that look at widths: chunked scans, xLSTM, and rotary embeddings that are scaled beyond a length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from architectures.zoo import BY_NAME, Architecture
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import Module, fit, make_batch, padmin, relative
from torch import Tensor

from lightning_padmin.architectures.findings import ArchitectureError


class Modelled(Module):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.model = architecture.build()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        logits = self.model(**inputs, use_cache=False).logits.double()
        return logits[batch["attention_mask"].bool()].square().mean()


def unlabelled(lengths: list[int]) -> dict[str, Tensor]:
    batch = make_batch(lengths)
    del batch["labels"]  # the loss is one of every token
    return batch


def shapes(name: str, **options: Any) -> list[tuple[int, ...]]:
    module = Modelled(BY_NAME[name])
    batch = unlabelled([4, 3, 3, 2, 2, 1])
    callback = padmin(
        token_budget=100, launch_cost=2, loss_mask_key="attention_mask", label_shift=0, check="off", **options
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


ROPES: dict[str, Architecture] = {
    "longrope": replace(
        BY_NAME["Phi3"],
        options={
            **BY_NAME["Phi3"].options,
            "original_max_position_embeddings": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 8,
                "short_factor": [1.0, 1.0],
                "long_factor": [4.0, 8.0],
                "factor": 8.0,
            },
        },
    ),
    "dynamic": replace(
        BY_NAME["Llama"],
        options={
            **BY_NAME["Llama"].options,
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
}
EVERY_TOKEN: dict[str, Any] = {"loss_mask_key": "attention_mask", "label_shift": 0, "token_budget": 12}


@pytest.mark.parametrize("name", ROPES)
def test_scaled_rotary_embeddings_are_exact_up_to_their_original_length(name: str) -> None:
    batches = [unlabelled([8, 5, 4, 3, 2]), unlabelled([7, 2, 2])]
    stock, split = Modelled(ROPES[name]), Modelled(ROPES[name])
    fit(stock, batches)
    fit(split, batches, padmin(**EVERY_TOKEN))
    assert len(split.shapes) > len(stock.shapes) == 2
    assert max(relative(a, b) for a, b in zip(split.gradients, stock.gradients, strict=True)) <= 1e-12


@pytest.mark.parametrize("name", ROPES)
def test_scaled_rotary_embeddings_are_refused_beyond(name: str) -> None:
    batches = [unlabelled([8, 5, 4, 3, 2]), unlabelled([9, 2, 2])]
    module = Modelled(ROPES[name])
    with pytest.raises(ArchitectureError, match=r"a row takes 9 positions.*shorten rows to 8"):
        fit(module, batches, padmin(**EVERY_TOKEN))
    assert len(module.gradients) == 1
    with pytest.raises(ArchitectureError, match="a row takes 10 positions"):  # the width counts, not the row
        fit(module, batches[:1], padmin(**EVERY_TOKEN, pad_to_multiple_of=5, pad_token_id=0))
    # Beyond that length a split would have trained something else.
    stock, split = Modelled(ROPES[name]), Modelled(ROPES[name])
    long = [unlabelled([16, 8, 5, 4, 3])]
    fit(stock, long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_padmin.architectures.screening.row_limit", lambda findings: None)
        fit(split, long, padmin(check="off", **EVERY_TOKEN | {"token_budget": 16}))
        assert relative(split.gradients[0], stock.gradients[0]) > 1e-3
