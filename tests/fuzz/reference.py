"""What micro-batches must be, written with plain loops over rows and columns; shares nothing with the library."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuzz.cases import Case, Entry, lookup
from lightning_padmin import MicroBatch, MicroBatches
from lightning_padmin.microbatching import compact


def snapshot(case: Case) -> dict[str, Any]:
    return {name: _copy(entry.value) for name, entry in case.entries.items()}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def check_unchanged(case: Case, before: Mapping[str, Any]) -> None:
    """The caller's objects are still in the caller's batch, bit for bit what they were."""
    for name, entry in case.entries.items():
        assert lookup(case.batch, case.paths[name]) is entry.value, name
        assert same(entry.value, before[name]), name


def same(a: Any, b: Any) -> bool:
    """Type, dtype, shape and every bit."""
    if isinstance(a, Tensor):
        bits = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return bits and bool(torch.equal(a, b) or torch.equal(a.isnan(), b.isnan()))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)


def widths_of(case: Case, rows: list[int]) -> list[int]:
    """Width of a micro-batch per axis: its longest row, rounded up, but no wider than the batch without fillers."""
    multiple = case.options.get("pad_to_multiple_of", 1)
    widen = all(entry.fill is not None for entry in case.entries.values() if entry.kind == "position")
    found = []
    for spans, width in zip(case.spans, case.widths, strict=True):
        longest = max(spans[row][1] for row in rows)
        rounded = math.ceil(longest / multiple) * multiple
        found.append(rounded if widen else min(rounded, width))
    return found


def check_micro_batches(case: Case, found: MicroBatches) -> None:
    """Partition, limits, contents, containers, and outputs put back."""
    micros = list(found)
    real = [micro for micro in micros if not micro.is_dummy]
    assert sorted(row for micro in real for row in micro.rows.tolist()) == list(range(case.rows))
    assert [micro.index for micro in micros] == list(range(len(found)))
    assert micros[-1].is_last
    assert [micro.weight for micro in micros if micro.is_dummy] == [0.0] * (len(micros) - len(real))
    slots = 0
    for micro in micros:
        rows = micro.rows.tolist()
        widths = widths_of(case, rows)
        slots += len(rows) * sum(widths)
        if not micro.is_dummy:
            _check_limits(case, found, rows, widths)
        check_micro_batch(case, micro, widths)
    assert found.stats.slots == slots
    assert found.stats.slots_before == case.rows * sum(case.widths)
    assert found.stats.dummies == len(micros) - len(real)
    assert found.table.start.T.tolist() == [[start for start, _ in spans] for spans in case.spans]
    assert found.table.length.T.tolist() == [[length for _, length in spans] for spans in case.spans]


def check_loosely(case: Case, found: MicroBatches, changed: set[str]) -> None:
    """What holds even where some entries are not what the case says: nothing crashes, and the others are right."""
    assert sorted(row for slots in found.slot_maps for row in slots.rows.tolist()) == list(range(case.rows))
    skip = changed | {name for name, entry in case.entries.items() if entry.counts in changed}
    for micro, slots in zip(found, found.slot_maps, strict=True):
        if skip.isdisjoint({case.roles["mask"], case.roles["decoder_mask"], case.roles["labels"]}):
            check_micro_batch(case, micro, list(slots.widths), frozenset(skip))


def _check_limits(case: Case, found: MicroBatches, rows: list[int], widths: list[int]) -> None:
    options, area = case.options, len(rows) * sum(widths)
    budget = options["token_budget"]
    if budget is None:
        budget = case.rows * sum(widths_of_batch(case))
    excused = "rows without loss" in found.plan.notice
    assert area <= budget or len(rows) == 1 or excused, (area, budget)
    assert area <= budget or found.plan.notice
    assert options["max_rows"] is None or len(rows) <= options["max_rows"] or excused


def widths_of_batch(case: Case) -> list[int]:
    """Widths of the batch as it came, rounded up where that is possible."""
    multiple = case.options.get("pad_to_multiple_of", 1)
    if any(entry.fill is None for entry in case.entries.values() if entry.kind == "position"):
        multiple = 1
    return [math.ceil(width / multiple) * multiple for width in case.widths]


def check_micro_batch(case: Case, micro: MicroBatch, widths: list[int], skip: frozenset[str] = frozenset()) -> None:
    same_containers(case.batch, micro.batch)
    rows = micro.rows.tolist()
    for name, entry in case.entries.items():
        if name in skip:
            continue
        got = lookup(micro.batch, case.paths[name])
        if entry.kind == "static":
            assert got is entry.value, name
            continue
        assert type(got) is type(entry.value), name
        assert getattr(got, "dtype", None) == getattr(entry.value, "dtype", None), name
        if entry.kind == "row":
            assert slices(got, entry.row_dim) == [slices(entry.value, entry.row_dim)[row] for row in rows], name
        elif entry.kind == "unit":
            ends = list(itertools.accumulate(entry.per_row))
            units = [unit for row in rows for unit in range(ends[row] - entry.per_row[row], ends[row])]
            assert slices(got, 0) == [slices(entry.value, 0)[unit] for unit in units], name
        else:
            _check_positions(case, name, entry, got, rows, widths)


def slices(value: Any, dim: int) -> list[Any]:
    """Each row of an entry as something that compares."""
    if isinstance(value, Tensor):
        value = value.numpy()
    return np.moveaxis(value, dim, 0).tolist() if isinstance(value, np.ndarray) else list(value)


def _check_positions(case: Case, name: str, entry: Entry, got: Any, rows: list[int], widths: list[int]) -> None:
    axis = ("input", "decoder").index(entry.axis)
    width, source_width = widths[axis], case.widths[axis]
    shape = list(entry.value.shape)
    shape[entry.row_dim] = len(rows)
    for dim in entry.dims:
        shape[dim] = width
    assert list(got.shape) == shape, name
    taken, source = (np.moveaxis(np.asarray(x), (entry.row_dim, *entry.dims), (0, *range(1, 1 + len(entry.dims)))) for x
                     in (got, entry.value))  # fmt: skip
    taken, source = taken.tolist(), source.tolist()
    for i, row in enumerate(rows):
        start, length = case.spans[axis][row]
        for place in itertools.product(range(width), repeat=len(entry.dims)):
            value, theirs = taken[i], source[row]
            for j in place:
                value = value[j]
            if max(place) >= source_width:
                theirs = (
                    type(value)(entry.fill) if not isinstance(value, list | str) and entry.fill != "continue" else None
                )
            else:
                for j in place:
                    theirs = theirs[(start + j) % source_width]  # behind a row stands the row's own padding
            if entry.fill == "continue":
                end = length if len(rows) == 1 else source_width
                if place[0] >= end:
                    last = source[row][(start + end - 1) % source_width]
                    steps = place[0] - end + 1
                    theirs = [x + steps for x in last] if isinstance(last, list) else last + steps
            elif max(place) >= source_width and isinstance(value, list):
                assert set(_flat(value)) == {entry.fill}, (name, row, place)
                continue
            assert value == theirs, (name, row, place, value, theirs)
            if max(place) >= length and name in (case.roles["mask"], case.roles["decoder_mask"]):
                assert value == 0, (name, row, place)
            if place[0] >= length and name == case.roles["labels"]:
                assert value == case.ignore, (name, row, place)


def _flat(value: Any) -> list[Any]:
    return [x for part in value for x in _flat(part)] if isinstance(value, list) else [value]


def same_containers(ours: Any, theirs: Any) -> None:
    """The same types with the same keys in the same order, all the way down."""
    assert type(ours) is type(theirs)
    if isinstance(ours, Mapping):
        assert list(ours) == list(theirs)
        for key, value in ours.items():
            if isinstance(value, Mapping):
                same_containers(value, theirs[key])
    elif dataclasses.is_dataclass(ours):
        assert list(vars(ours)) == list(vars(theirs))
    else:
        assert len(ours) == len(theirs)


def check_restored(case: Case, found: MicroBatches) -> None:
    """Outputs in the batch's layout: every real token where it was, the filler elsewhere, rows in their order."""
    name = str(case.roles["ids"])
    ids = case.entries[name].value
    outputs = [lookup(micro.batch, case.paths[name]).long() for micro in found]
    numbers = [torch.as_tensor(micro.rows) for micro in found]
    assert found.restore_rows(numbers).tolist() == list(range(case.rows))
    if case.dice("restore").random() < 0.5:
        _check_spans(case, ids, found.restore(outputs, fill=-7))
        return
    # The last columns alone, as models return that compute logits of a few positions only.
    _check_spans(case, ids, found.restore([output[:, 1:] for output in outputs], first_column=1, fill=-7), first=1)


def check_compact(case: Case) -> None:
    small = compact(case.batch, case.config)
    ids = lookup(small.batch, case.paths[str(case.roles["ids"])])
    assert list(ids.shape) == [case.rows, widths_of(case, list(range(case.rows)))[0]]
    _check_spans(case, case.entries[str(case.roles["ids"])].value, small.restore(ids.long(), fill=-7))
    same_containers(case.batch, small.batch)


def _check_spans(case: Case, ids: Tensor, restored: Tensor, first: int = 0) -> None:
    ours, theirs = ids.tolist(), restored.tolist()
    for row, (start, length) in enumerate(case.spans[0]):
        for column in range(case.widths[0]):
            inside = start + first <= column < start + length
            assert theirs[row][column] == (ours[row][column] if inside else -7), (row, column)


def what(case: Case, found: MicroBatches) -> Counter[str]:
    """What an example was, for the summary: a property that never meets more than one micro-batch shows nothing."""
    return Counter(
        {
            "split": int(len(found) > 1),
            "rolled": int(any(start for spans in case.spans for start, _ in spans)),
            "widened": int(widths_of_batch(case) != list(case.widths)),
            "encoder-decoder": int(len(case.widths) == 2),
            "units": int(any(entry.kind == "unit" for entry in case.entries.values())),
            "over budget": int(bool(found.plan.notice)),
        }
    )
