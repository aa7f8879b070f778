"""What a window of an online trainer shows: a check is a proof for what it has seen, and for nothing else.

Pure, and a closed list: a few names for each entry of the trainer's prepared inputs, and what is padded. What the
*loss* shows is its fingerprint, see `verification.fingerprint`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LEFT, BEHIND, RAGGED = "padding before prompts", "padding behind completions", "rows of several lengths"
OF_PADDING = frozenset({LEFT, BEHIND, RAGGED})
"""What the model's part of a check has to see; the loss sees no prompts."""
_TOKENS = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
_MOST_VALUES = 16
"""Of integers with more values than these, only zeros and signs are told apart."""


def window_facets(entries: Iterable[Mapping[str, Any]]) -> set[str]:
    """What prepared inputs of stock micro-batches show, each by itself: the loss sees one at a time."""
    return {facet for inputs in entries for facet in _of_entry(inputs)}


def token_facets(mask: Tensor, completion: int) -> set[str]:
    """What is padded in a batch.

    Args:
        mask: (B, P + T), prompts padded on the left, completions on the right.
        completion: columns T.
    """
    real = mask != 0
    lengths = real.sum(1)
    flags = [
        (~real[:, :-completion]).any(),
        (~real[:, -completion:]).any(),
        (lengths != lengths[0]).any(),
        (~real[:, -completion:]).all(1).any(),
    ]
    names = (LEFT, BEHIND, RAGGED, "a row without completion tokens")
    return _named(names, flags)


def _of_entry(inputs: Mapping[str, Any]) -> set[str]:
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    found = token_facets(mask, inputs["completion_mask"].shape[1])
    rows = len(mask)
    for name, value in inputs.items():
        if value is None or name in _TOKENS:
            continue
        if isinstance(value, Tensor) and value.ndim <= 2 and not value.is_complex() and value.numel():
            found |= _of_tensor(name, value, rows)
        elif isinstance(value, list | tuple) and len(value) == rows and all(isinstance(each, int) for each in value):
            found |= {f"{name!r}: {word}" for word in _counts(value)}
        else:
            found.add(f"{name!r}: given")
    return found


def _of_tensor(name: str, value: Tensor, rows: int) -> set[str]:
    per_row = value.ndim == 1 and len(value) == rows
    if per_row and not value.is_floating_point():
        distinct = sorted(set(value.tolist()))
        if len(distinct) <= _MOST_VALUES:
            return {f"{name!r}: {each}" for each in distinct}
    wide = value if value.is_floating_point() else value.to(torch.int64)
    flags = [(wide == 0).any(), (wide > 0).any(), (wide < 0).any(), (wide != wide.flatten()[0]).any()]
    words = ["a zero", "a positive number", "a negative number", "not all the same"]
    if wide.is_floating_point():
        flags.append((~wide.isfinite()).any())
        words.append("no number")
    return {f"{name!r}: given", *_named([f"{name!r}: {word}" for word in words], flags)}


def _counts(values: Sequence[int]) -> set[str]:
    """Of images per row, say."""
    return {"none in a row" if each == 0 else "one in a row" if each == 1 else "several in a row" for each in values}


def _named(names: Sequence[str], flags: Sequence[Tensor]) -> set[str]:
    """Those whose flags are set, in one copy from the device."""
    return {name for name, flag in zip(names, torch.stack(list(flags)).tolist(), strict=True) if flag}


__all__ = ["BEHIND", "LEFT", "OF_PADDING", "RAGGED", "token_facets", "window_facets"]
