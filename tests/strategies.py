"""Random batches for property tests: padding on both sides, holes in masks, rows without loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import VOCABULARY
from torch import Tensor


@st.composite
def spans(draw: st.DrawFn, max_rows: int = 6, max_length: int = 7) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Start and length of each row, (B,) each, and a width that holds them all."""
    rows = draw(st.integers(1, max_rows))
    length = np.array(draw(st.lists(st.integers(1, max_length), min_size=rows, max_size=rows)))
    start = np.array(draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)))
    if draw(st.booleans()):
        start[:] = 0  # plain right padding, the usual case
    return start, length, int((start + length).max()) + draw(st.integers(0, 2))


@st.composite
def masks(draw: st.DrawFn, **limits: int) -> tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """A mask (B, L) with holes inside of spans, and the spans' starts and lengths."""
    start, length, width = draw(spans(**limits))
    mask = np.zeros((len(start), width), dtype=np.int64)
    for row, (first, n) in enumerate(zip(start, length, strict=True)):
        mask[row, first : first + n] = draw(st.lists(st.integers(0, 1), min_size=int(n), max_size=int(n)))
        mask[row, [first, first + n - 1]] = 1
    return torch.from_numpy(mask), start, length


@st.composite
def batches(draw: st.DrawFn, **limits: int) -> dict[str, Any]:
    """input_ids, attention_mask, labels, (B, L) int64; padding has token ids too, so that a model would notice it."""
    mask, start, length = draw(masks(**limits))
    ids = torch.from_numpy(np.random.default_rng(draw(st.integers(0, 2**16))).integers(1, VOCABULARY, mask.shape))
    labels = torch.full_like(ids, -100)
    for row, (first, n) in enumerate(zip(start, length, strict=True)):
        chosen = draw(st.lists(st.booleans(), min_size=int(n), max_size=int(n)))
        chosen[0] = False  # predicted from nothing, or from padding
        columns = [first + k for k in range(n) if chosen[k]]
        labels[row, columns] = ids[row, columns]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
