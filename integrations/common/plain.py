"""Batches that nobody has given roles, as collators of trainers make them: how large they are, and what of it is real.

What tells is a mask by its name, else token ids, wherever they lie: `attention_mask`, `anchor_attention_mask`,
`input_ids_chosen`, (rows, choices, positions).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_padmin.batch import iter_leaves, last_part, map_leaves
from lightning_padmin.errors import SchemaError
from lightning_padmin.stats import PaddingStats


def slots_of(batch: Any) -> int:
    """Rows x positions of a batch, by its shapes: of its masks, else of its token ids, else of its largest entry."""
    leaves = _leaves(batch)
    told, _ = _telling(leaves)
    if told:
        return sum(each.numel() for each in told)
    return max((each.shape[0] * each.shape[1] for each in leaves.values() if each.ndim > 1), default=0)


def plain_stats(batch: Any) -> PaddingStats:
    """What such a batch costs as it came; where it has no mask, all of it counts as real."""
    told, are_masks = _telling(_leaves(batch))
    if not told:
        return PaddingStats(batches=1, micro_batches=1, slots_before=slots_of(batch), slots=slots_of(batch))
    slots = sum(each.numel() for each in told)
    lengths = [(each != 0).sum(-1) if are_masks else each.new_full(each.shape[:-1], each.shape[-1]) for each in told]
    return PaddingStats(
        batches=1,
        rows=len(told[0]),
        real_tokens=sum(int(each.sum()) for each in lengths),
        slots_before=slots,
        slots=slots,
        micro_batches=1,
        longest_row=max(int(each.max()) for each in lengths),
    )


def len_of(batch: Any) -> int:
    """Rows of a batch all of whose entries have as many; 0 where they have not, or there are none."""
    sizes = {leaf.shape[0] for leaf in _leaves(batch).values() if leaf.ndim}
    return sizes.pop() if len(sizes) == 1 else 0


def few_rows(batch: Any, number: int) -> Any:
    """So many rows of all lengths of a batch of `len_of` rows, the shortest and the longest among them.

    Args:
        batch: it is only read.
        number: of rows.
    """
    count = len_of(batch)
    told, are_masks = _telling(_leaves(batch))
    length = sum((each.flatten(1) != 0).sum(1).cpu() for each in told) if are_masks else torch.arange(count)
    order = torch.as_tensor(length).argsort(stable=True)
    rows = order[torch.linspace(0, count - 1, number).round().long()].sort().values

    def cut(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf[rows.to(leaf.device)]
        return [leaf[row] for row in rows.tolist()] if isinstance(leaf, list) and len(leaf) == count else leaf

    return map_leaves(batch, cut)


def _leaves(batch: Any) -> dict[str, Tensor]:
    try:
        return {path: leaf for path, leaf in iter_leaves(batch) if isinstance(leaf, Tensor) and leaf.numel()}
    except SchemaError:  # of a kind that nobody can look into
        return {}


def _telling(leaves: dict[str, Tensor]) -> tuple[list[Tensor], bool]:
    """Masks, or else token ids, and whether they are masks."""
    for word in ("attention_mask", "input_ids"):
        # A mask of four dimensions says which pairs attend, and lies beside one that says what is padding.
        told = [leaf for path, leaf in leaves.items() if word in last_part(path) and leaf.ndim in (2, 3)]
        if told:
            return told, word == "attention_mask"
    return [], False


__all__ = ["few_rows", "len_of", "plain_stats", "slots_of"]
