"""Images of multimodal rows, handed along with their rows.

TRL keeps images behind each other, whatever row they belong to, and says how many each row has:

    TRL    pixel_values (18, d)           image_grid_thw (3, 3)      num_images [2, 0, 1]
    here   [(10, d), (0, d), (8, d)]      [(2, 3), (0, 3), (1, 3)]              [2, 0, 1]

`by_row` cuts, `joined` puts the rows of a chunk together again. Whose tensors count what is known by name, as in TRL's
own slicing (1.16): patches, images, tiles, or rows padded to the same number of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_padmin.batch import Field
from lightning_padmin.errors import BatchError
from lightning_padmin.integrations.trl.hooks import POSITIONS, release
from lightning_padmin.microbatching import SlotMap

COUNTS = ("num_images", "num_tiles")
_TENSORS = (
    "pixel_values",
    "image_grid_thw",
    "image_position_ids",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
)
NAMES = (*_TENSORS, *COUNTS)
_OLDEST = (1, 16)
FIELDS: dict[str, Field] = dict.fromkeys(NAMES, Field("row"))
"""What the lists of `by_row` are: one entry per row."""


def by_row(inputs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The entries of `NAMES`, cut into one item per row; empty without images.

    Args:
        inputs: prepared inputs of a trainer, or keyword arguments of its log-prob function; only read.

    Raises:
        BatchError: counts do not fit the tensors, or are missing; TRL is too old.
    """
    tensors = {name: inputs[name] for name in _TENSORS if inputs.get(name) is not None}
    if not tensors:
        return {}
    if release() < _OLDEST:
        raise BatchError(
            f"{', '.join(tensors)}: how releases before TRL 1.16 hand images over was not checked. Upgrade TRL, or "
            "use PadMinConfig(enabled=False)"
        )
    counts = {name: list(map(int, inputs[name])) for name in COUNTS if inputs.get(name) is not None}
    if "num_images" not in counts or "pixel_values" not in tensors:
        raise BatchError(f"{', '.join(tensors)}: without 'num_images' and 'pixel_values' nobody knows whose they are")
    sizes = _units(tensors, counts)
    return {name: _cut(name, tensor, sizes[name]) for name, tensor in tensors.items()} | counts


def pooled_by_row(batches: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """`by_row` of several batches with the same entries, behind each other."""
    each = [by_row(inputs) for inputs in batches]
    return {name: [item for rows in each for item in rows[name]] for name in each[0]}


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raises BatchError for tensors, such as those of videos, that TRL's log-prob function (1.16) does not take."""
    known = (*NAMES, *POSITIONS)
    for name, value in options.items():
        if name not in known and isinstance(value, Tensor | list | tuple):
            raise BatchError(
                f"{name!r} is handed to the log-prob function, and how it belongs to rows is not known. Leave it "
                "out, or use PadMinConfig(enabled=False)"
            )


def _units(tensors: Mapping[str, Tensor], counts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """How many slices of each tensor belong to each row."""
    images, rows = counts["num_images"], [1] * len(counts["num_images"])
    units = dict.fromkeys(tensors, images)
    if "image_grid_thw" in tensors:
        units["pixel_values"] = _patches(tensors["image_grid_thw"], images)
    elif "image_position_ids" in tensors:
        pass
    elif "num_tiles" in counts:
        units |= dict.fromkeys(("pixel_values", "pixel_attention_mask", "spatial_shapes"), counts["num_tiles"])
    elif "spatial_shapes" in tensors:
        raise BatchError("'spatial_shapes' are those of tiles: without 'num_tiles' nobody knows whose they are")
    elif "pixel_attention_mask" in tensors or len(tensors["pixel_values"]) != sum(images):
        units |= dict.fromkeys(("pixel_values", "pixel_attention_mask"), rows)
        _refuse_mixed_up(tensors, images)
    return units


def _patches(grids: Tensor, images: Sequence[int]) -> list[int]:
    each = grids.prod(dim=-1).tolist()
    return [sum(each[begin:end]) for begin, end in pairwise(accumulate(images, initial=0))]


def _refuse_mixed_up(tensors: Mapping[str, Tensor], images: Sequence[int]) -> None:
    """Raises BatchError where pixels and their mask, both padded to one number of images per row, are of other rows.

    TRL takes such pixels for images behind each other when there are as many images as rows in what it generated, and
    then shuffles the mask alone.
    """
    mask = tensors.get("pixel_attention_mask")
    if mask is None or all(count == 1 for count in images):
        return
    shown = [each.flatten(2).any(-1) if each.ndim > 3 else None for each in (tensors["pixel_values"], mask)]
    if shown[0] is None or shown[1] is None or not torch.equal(shown[0], shown[1]):
        raise BatchError(
            "'pixel_values' and 'pixel_attention_mask' are not of the same rows: TRL (1.16) mixes them up when it has "
            "generated for as many images as rows, not one for each. Give each row one image, or change the batch size"
        )


def _cut(name: str, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    if min(sizes) < 0 or sum(sizes) != len(tensor):
        raise BatchError(f"{name!r} has {len(tensor)} slices, but the batch's counts give its rows {list(sizes)}")
    return list(torch.split(tensor, list(sizes)))


def joined(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch whose images are behind each other, as the trainer's log-prob function takes them.

    Rows without any image come without image entries: models fail on images of which there are none.
    """
    plain = {name: value for name, value in batch.items() if name not in FIELDS}
    if not any(batch.get("num_images", ())):
        return plain
    counts = {name: batch[name] for name in COUNTS if name in batch}
    return plain | {name: torch.cat(batch[name]) for name in _TENSORS if name in batch} | counts


def in_order(chunks: Sequence[SlotMap], images: Sequence[int] | None) -> list[int]:
    """The order in which chunks run: as planned, but one with images last if there is any.

    Where only the last backward pass reduces gradients over ranks, it must reach the parameters of the vision tower.

    Args:
        chunks: their index maps.
        images: how many each row of the batch has; None without images.
    """
    order = list(range(len(chunks)))
    seeing = [k for k in order if images is not None and any(images[row] for row in chunks[k].rows)]
    return [k for k in order if k != seeing[-1]] + seeing[-1:] if seeing else order
