"""Kinds of faults in taking a batch apart: positions, images, strings, and how many rows there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import BUDGET, Memory, Module, fit, make_batch, padmin
from torch import Tensor

from lightning_padmin import Field, MicroBatcher, PadMinConfig, compact
from lightning_padmin.errors import SchemaError

ONE_BY_ONE = PadMinConfig(loss_reduction="row-mean", max_rows=1)


def masked(lengths: list[int], width: int | None = None, left: bool = False) -> dict[str, Tensor]:
    width = width or max(lengths)
    mask = torch.tensor([[0] * (width - n) + [1] * n if left else [1] * n + [0] * (width - n) for n in lengths])
    return {"input_ids": mask * 7, "attention_mask": mask}


def looks_packed(positions: Tensor) -> bool:
    """As attention kernels for packed rows read position ids: a 0 behind the first column begins a document."""
    return bool((positions[..., 1:] == 0).any() or (positions.diff(dim=-1) != 1).any())


TAILS = [
    # position ids of one row as they came, its mask, and what one row of that width has to get
    ([0, 1, 2, 0, 0], [1, 1, 1, 0, 0], [0, 1, 2, 3, 4]),
    ([0, 1, 2, 2, 2], [1, 1, 1, 0, 0], [0, 1, 2, 3, 4]),
    ([0, 0, 0, 1, 2], [0, 0, 1, 1, 1], [0, 1, 2, 3, 4]),
    ([1, 1, 1, 0, 1], [0, 0, 0, 1, 1], [0, 1, 2, 3, 4]),
]


@pytest.mark.parametrize(("came", "mask", "right"), TAILS)
def test_r14_positions_go_on_behind_a_row_that_is_alone(came: list[int], mask: list[int], right: list[int]) -> None:
    batch = {"input_ids": torch.tensor([mask]) * 7, "attention_mask": torch.tensor([mask])}
    config = PadMinConfig(loss_reduction="row-mean", pad_to_multiple_of=5)
    (micro,) = MicroBatcher(config).prepare(batch | {"position_ids": torch.tensor([came])})
    assert micro.batch["position_ids"].tolist() == [right]
    assert not looks_packed(micro.batch["position_ids"])
    start = mask.index(1)
    naive = torch.tensor([came[start:] + came[:start]])  # the fault: rolled like any other entry
    assert looks_packed(naive)


@pytest.mark.parametrize("positions", [[0, 1, 2, 0, 1], [0, 0, 1, 2, 0], [3, 4, 0, 1, 2]])
def test_r14_packed_rows_stay_as_they_are(positions: list[int]) -> None:
    rows = torch.tensor([positions, [0, 1, 2, 3, 4]])
    batch = masked([5, 5]) | {"position_ids": rows}
    for micro in MicroBatcher(ONE_BY_ONE).prepare(batch):
        assert micro.batch["position_ids"].tolist() == rows[micro.rows].tolist()
    counted = torch.arange(5)  # the fault: numbered anew
    assert counted.tolist() != positions


@pytest.mark.parametrize("lengths", [[3, 5], [2, 2, 6], [4]])
def test_r14_positions_that_nobody_gave_are_not_invented(lengths: list[int]) -> None:
    batch = masked(lengths, width=8, left=True)
    assert set(compact(batch).batch) == {"input_ids", "attention_mask"}
    for micro in MicroBatcher(ONE_BY_ONE).prepare(batch):
        assert set(micro.batch) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(("lengths", "width"), [([4, 6], 6), ([4, 6, 5], 6), ([5], 6), ([3, 3, 3], 3)])
def test_r17_positions_of_three_axes_have_rows_in_the_middle(lengths: list[int], width: int) -> None:
    """With three rows all of (3, rows, width) fit as rows: the name decides, not sizes."""
    batch = masked(lengths, width, left=True)
    rows = len(lengths)
    positions = torch.arange(3 * rows * width).view(3, rows, width)
    for micro in MicroBatcher(ONE_BY_ONE).prepare(batch | {"position_ids": positions}):
        row, n = int(micro.rows[0]), lengths[micro.rows[0]]
        assert micro.batch["position_ids"].shape == (3, 1, n)
        assert torch.equal(micro.batch["position_ids"][:, 0], positions[:, row, width - n :])
        naive = positions[min(row, 2) : min(row, 2) + 1, ..., :n]  # the fault: rows in the first dimension
        assert naive.shape != (3, 1, n)


@pytest.mark.parametrize("lengths", [[4, 6], [6, 4, 5]])
def test_r17_two_rows_together_keep_their_own_three_axes(lengths: list[int]) -> None:
    batch = masked(lengths, left=True)
    positions = torch.arange(3 * len(lengths) * 6).view(3, len(lengths), 6)
    rolled = compact(batch | {"position_ids": positions}).batch["position_ids"]
    assert rolled.shape == positions.shape
    for row, n in enumerate(lengths):
        assert torch.equal(rolled[:, row, :n], positions[:, row, 6 - n :])
    assert not torch.equal(rolled, positions), "the fault: left as they came, beside ids that were rolled"


IMAGES = {"image_grid_thw": Field("unit", counts="num_images"), "pixel_values": Field("unit", counts="image_grid_thw")}
GRIDS = [
    ([2, 5], [1, 1], [[1, 2, 2], [1, 4, 4]]),
    ([3, 5, 4], [2, 0, 1], [[1, 2, 2], [1, 1, 2], [1, 3, 1]]),
    ([6, 2, 2], [0, 3, 1], [[1, 1, 1], [1, 2, 2], [1, 1, 3], [2, 1, 2]]),
]


@pytest.mark.parametrize(("lengths", "images", "grids"), GRIDS)
def test_r18_patches_go_with_the_row_that_they_belong_to(lengths: Any, images: Any, grids: Any) -> None:
    grid = torch.tensor(grids)
    patches = grid.prod(dim=1)
    owner = torch.arange(len(images)).repeat_interleave(torch.tensor(images))  # of each image: its row
    pixels = owner.repeat_interleave(patches)[:, None].float()  # of each patch: its row
    batch = masked(lengths) | {"num_images": torch.tensor(images), "image_grid_thw": grid, "pixel_values": pixels}
    config = PadMinConfig(loss_reduction="row-mean", max_rows=1, batch_schema=IMAGES)
    micro_batches = MicroBatcher(config).prepare(batch)
    faults = 0
    for micro in micro_batches:
        row = int(micro.rows[0])
        assert micro.batch["pixel_values"].flatten().tolist() == [row] * int(patches[owner == row].sum())
        assert torch.equal(micro.batch["image_grid_thw"], grid[owner == row])
        naive = pixels[torch.as_tensor(micro.rows)]  # the fault: patches indexed by row
        faults += not torch.equal(naive, micro.batch["pixel_values"])
    assert faults
    assert sum(len(micro.batch["pixel_values"]) for micro in micro_batches) == len(pixels)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 4, 2, 2)])
def test_r18_one_picture_per_row_is_indexed_plainly(shape: tuple[int, ...]) -> None:
    pixels = torch.arange(torch.Size(shape).numel()).view(shape)
    config = PadMinConfig(loss_reduction="row-mean", max_rows=1, batch_schema={"pixel_values": "row"})
    for micro in MicroBatcher(config).prepare(masked([2, 5]) | {"pixel_values": pixels}):
        assert torch.equal(micro.batch["pixel_values"], pixels[micro.rows])


@pytest.mark.parametrize("units", [20, 2, 3])
def test_r18_pictures_of_an_unknown_layout_are_refused(units: int) -> None:
    with pytest.raises(SchemaError, match="'pixel_values' has shape"):
        compact(masked([2, 5]) | {"pixel_values": torch.zeros(units, 6)})


OTHER = {"task": "qa", "flag": True, "extra": None, "n": torch.tensor(3), "choices": ["x", "y", "z", "u", "v"]}


@pytest.mark.parametrize("lengths", [[3, 1], [1, 3, 2], [2, 4, 1, 1]])
def test_r34_what_is_no_row_is_shared(lengths: list[int]) -> None:
    names = [f"row {k}" for k in range(len(lengths))]
    for micro in MicroBatcher(ONE_BY_ONE).prepare(masked(lengths) | {"names": names} | OTHER):
        assert micro.batch["names"] == [names[micro.rows[0]]]
        for key, value in OTHER.items():
            assert micro.batch[key] is value, key
    assert OTHER["task"][:1] == "q", "the fault: whatever can be sliced is"
    with pytest.raises((TypeError, IndexError)):
        [value[:1] for value in (OTHER["flag"], OTHER["n"])]


@pytest.mark.parametrize("words", ["", "q", "ab", "abc"])
def test_r34_a_string_of_as_many_letters_as_rows_is_still_shared(words: str) -> None:
    rows = max(len(words), 1)
    for micro in MicroBatcher(ONE_BY_ONE).prepare(masked([2] * rows) | {"task": words}):
        assert micro.batch["task"] == words


def first_size(batch: Any) -> int:
    """The fault of R49: the length of the first thing that has one."""

    def leaves(value: Any) -> Iterator[int]:
        if isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                yield from leaves(each)
        elif isinstance(value, str | Tensor):
            yield len(value)

    return next(leaves(batch))


SEQUENCES = {"seqs": [torch.zeros(50), torch.zeros(7), torch.zeros(9)], "y": torch.zeros(3)}
FIRST = {
    "sequences": (SEQUENCES, [5, 2, 1], {}),
    "a string": ({"task": "answer the question"}, [3, 2], {}),
    "patches": (
        {"pixel_values": torch.zeros(20, 2), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 4]])},
        [3, 2],
        {"pixel_values": Field("unit", counts="image_grid_thw"), "image_grid_thw": "row"},
    ),
    "a table": ({"class_weights": torch.ones(11)}, [4, 1, 1, 1], {"class_weights": "static"}),
}


@pytest.mark.parametrize("name", FIRST)
def test_r49_the_mask_says_how_many_rows_there_are(name: str) -> None:
    first, lengths, schema = FIRST[name]
    batch = first | masked(lengths)
    config = PadMinConfig(loss_reduction="row-mean", max_rows=1, batch_schema=schema)
    micro_batches = MicroBatcher(config).prepare(batch)
    assert micro_batches.stats.rows == len(lengths) == len(micro_batches)
    assert first_size(batch) != len(lengths)


@pytest.mark.parametrize("shape", [(4,), (2, 5), (7, 7)])
def test_r49_entries_that_disagree_are_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(SchemaError, match=r"'y' has shape .* but the batch has 3 rows"):
        compact(masked([3, 2, 1]) | {"y": torch.zeros(shape)})


@pytest.mark.parametrize("first", [50, 2, 23])
def test_r49_logged_means_do_not_depend_on_what_comes_first(first: int) -> None:
    """Per step; epoch means weigh batches by what Lightning takes for their size, with and without the callback."""
    values = {}
    for table in (None, torch.ones(first)):
        shared = {} if table is None else {"table": table}
        batches = [shared | make_batch([24, 20, 6, 6, 3], seed=seed) for seed in (0, 1)]
        memory = Memory()
        fit(Module(), batches, padmin(static_keys=["table"]), logger=memory, log_every_n_steps=1)
        values[table is None] = [row["loss_step"] for _, row in memory.of("") if "loss_step" in row]
    assert len(values[True]) == 2
    assert values[False] == values[True]
    mean_of_means = []
    for batch in batches:
        module = Module()
        parts = MicroBatcher(PadMinConfig(token_budget=BUDGET, launch_cost=4, static_keys=["table"])).prepare(batch)
        mean_of_means.append(sum(float(module.loss(part.batch).detach()) for part in parts) / len(parts))
    assert abs(mean_of_means[0] - values[True][0]) > 1e-3, "the fault: every micro-batch weighs the same"
