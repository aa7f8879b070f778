"""What can be wrong with a batch or its declarations, and which names the refusal may then call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fuzz.cases import Case, Entry
from lightning_padmin import Field

Names = tuple[str, ...]


@dataclass
class Wrong:
    """One mutation: entries whose meaning has changed, what a refusal may name, and whether it has to be refused."""

    changed: set[str]
    names: Names
    must: bool


def _mask(case: Case, value: Any) -> Wrong:
    mask = str(case.roles["mask"])
    case.entries[mask].value = value
    return Wrong({mask}, (mask, "mask_key"), True)


def mask_of_zeros(case: Case, dice: random.Random) -> Wrong:
    return _mask(case, torch.zeros_like(case.entries[str(case.roles["mask"])].value))


def mask_negative_or_nan(case: Case, dice: random.Random) -> Wrong:
    mask = case.entries[str(case.roles["mask"])].value.to(torch.float64)
    mask[dice.randrange(case.rows), dice.randrange(case.widths[0])] = dice.choice([-1.0, -1e9, float("nan")])
    return _mask(case, mask)


def mask_infinite(case: Case, dice: random.Random) -> Wrong:
    mask = case.entries[str(case.roles["mask"])].value.to(torch.float64)
    wrong = _mask(case, torch.where(mask > 0, torch.inf, mask))
    wrong.must = False
    return wrong


def mask_of_another_shape(case: Case, dice: random.Random) -> Wrong:
    mask = case.entries[str(case.roles["mask"])].value
    return _mask(case, dice.choice([mask[..., None], mask[0], mask[:, :0], mask[:0], mask.sum(), mask[None, None]]))


def mask_of_another_type(case: Case, dice: random.Random) -> Wrong:
    mask = case.entries[str(case.roles["mask"])].value
    return _mask(
        case, dice.choice([mask.numpy(), mask.tolist(), None, "mask", 1, mask.to(torch.complex64), mask.to_sparse()])
    )


def mask_absent(case: Case, dice: random.Random) -> Wrong:
    mask = str(case.roles["mask"])
    case.roles["loss_mask"] = None if case.roles["loss_mask"] == mask else case.roles["loss_mask"]
    case.roles["mask"] = None
    del case.entries[mask]
    return Wrong({mask}, ("mask_key",), True)


def labels_on_padding(case: Case, dice: random.Random) -> Wrong | None:
    labels = case.role("labels")
    if labels is None or labels.kind != "position" or (labels.axis == "decoder" and not case.roles["decoder_mask"]):
        return None
    spans = case.spans[-1]
    outside = [
        (row, column)
        for row, (start, length) in enumerate(spans)
        for column in range(labels.value.shape[1])
        if not start <= column < start + length
    ]
    if not outside:
        return None
    labels.value[dice.choice(outside)] = 3
    return Wrong({str(case.roles["labels"])}, (str(case.roles["labels"]),), True)


def labels_of_another_shape(case: Case, dice: random.Random) -> Wrong | None:
    labels, name = case.role("labels"), str(case.roles["labels"])
    if labels is None or labels.kind != "position" or case.encoder_decoder:
        return None
    value = labels.value
    wide = torch.cat([value, value], 1)[:, : value.shape[1] + 1]
    labels.value = dice.choice([wide, value[:, 1:], torch.cat([value, value[:1]]), value[:-1], value[..., None]])
    return Wrong({name}, (name,), True)


def labels_of_floats(case: Case, dice: random.Random) -> Wrong | None:
    labels, name = case.role("labels"), str(case.roles["labels"])
    if labels is None or labels.kind != "position":
        return None
    labels.value = labels.value.double()
    return Wrong({name}, (name,), True)


def _surprise(case: Case, value: Any, must: bool = True) -> Wrong:
    case.entries["surprise"] = Entry(value, "static", silent=True)
    return Wrong({"surprise"}, ("surprise",), must)


def undeclared_as_wide_as_the_batch(case: Case, dice: random.Random) -> Wrong:
    width, rows = case.widths[0], case.rows
    shapes = [(rows, width), (rows, width, 2), (rows, 2, width), (rows, width + 1), (rows, width - 1)]
    value: Any = torch.zeros(dice.choice(shapes))
    return _surprise(case, value.numpy() if dice.random() < 0.3 else value)


def undeclared_of_other_rows(case: Case, dice: random.Random) -> Wrong:
    return _surprise(case, torch.zeros(dice.choice([(case.rows + 1, 9), (case.rows + 1,), (0, 4), (2 * case.rows, 9)])))


def undeclared_square(case: Case, dice: random.Random) -> Wrong | None:
    if case.rows not in case.widths:
        return None
    return _surprise(case, torch.zeros(case.rows))


def sparse_entry(case: Case, dice: random.Random) -> Wrong | None:
    fitting = [
        name
        for name, entry in case.entries.items()
        if entry.kind != "static" and isinstance(entry.value, torch.Tensor) and entry.value.ndim
    ]
    name = dice.choice(fitting)
    case.entries[name].value = case.entries[name].value.to_sparse()
    return Wrong({name}, (name, "loss_reduction", "counts"), case.roles["u"] != name)


def wrong_counts(case: Case, dice: random.Random) -> Wrong | None:
    if "num_images" not in case.entries:
        return None
    entry = case.entries["num_images"]
    counts = torch.as_tensor(entry.value).clone().long()
    kind = dice.randrange(4)
    if kind == 0:
        counts[0] += 1
    elif kind == 1:
        counts[0], counts[-1] = -1, counts[0] + counts[-1] + 1
    elif kind == 2:
        counts = counts.double()
    entry.value = [f"{count} images" for count in counts] if kind == 3 else counts
    return Wrong({"num_images"}, ("num_images", "pixel_values", "captions", "image_grid_thw"), True)


def wrong_loss_mask(case: Case, dice: random.Random) -> Wrong | None:
    name = case.roles["loss_mask"]
    if name in (None, case.roles["mask"]):
        return None
    value = case.entries[str(name)].value.double()
    value[dice.randrange(case.rows), 0] = dice.choice([-1.0, float("nan"), float("inf")])
    case.entries[str(name)].value = value
    return Wrong({str(name)}, (str(name),), True)


def own_divisor(case: Case, dice: random.Random) -> Wrong:
    case.entries["num_items_in_batch"] = Entry(torch.tensor(4), "static")
    case.container = "dict"
    return Wrong(set(), ("num_items_in_batch",), case.how != "sum")


def anything(case: Case, dice: random.Random) -> Wrong:
    """Any entry replaced by any object."""
    name = dice.choice(list(case.entries))
    case.entries[name].value = garbage(case, dice)
    return Wrong({name}, (*case.entries, "mask_key", "loss_reduction"), False)


def garbage(case: Case, dice: random.Random) -> Any:
    rows, width = case.rows, case.widths[0]
    return dice.choice(
        [
            *(None, 0, -1.5, "text", b"bytes", "", [], (), {}, set(), {1, 2}, object(), range(rows), Ellipsis, int),
            *([None] * rows, ["a"] * (rows + 1), [[1] * width] * rows, [torch.zeros(rows)] * rows, [[]], ((),) * rows),
            *({"a": torch.zeros(rows)}, {"a": {"b": None}}, {1: "x"}, {"": torch.zeros(rows, 9)}, {None: None}),
            *(np.zeros((rows, width)), np.array(["a"] * rows), np.array([None] * rows), np.float32(1), np.zeros(())),
            *(np.zeros((rows, width), dtype="datetime64[s]"), np.zeros(rows, dtype=[("a", "i4")])),
            *(torch.zeros(()), torch.zeros(0), torch.zeros(rows), torch.zeros(rows, width), torch.zeros(width, rows)),
            *(torch.zeros(rows, width, dtype=torch.complex64), torch.ones(rows, width, dtype=torch.bfloat16)),
            *(torch.full((rows, width), torch.nan), torch.full((rows, width), -5), torch.zeros(rows, 0)),
            *(
                torch.zeros(rows, width).to_sparse(),
                torch.zeros(1).expand(rows, width),
                torch.zeros(rows, width)[:, ::2],
            ),
            *(torch.zeros(rows, width, requires_grad=True), torch.zeros(rows, width, dtype=torch.uint16)),
            *(
                np.zeros((rows, width), dtype=np.uint32),
                np.zeros((rows, width))[::-1],
                np.zeros((rows, 9), dtype=object),
            ),
            *(torch.zeros(rows, width).numpy().astype(">f4"), torch.nn.Linear(1, 1), iter([1]), ValueError("x")),
        ]
    )


BEFORE: tuple[Callable[[Case, random.Random], Wrong | None], ...] = (
    *(mask_of_zeros, mask_negative_or_nan, mask_infinite, mask_of_another_shape, mask_of_another_type, mask_absent),
    *(labels_on_padding, labels_of_another_shape, labels_of_floats, wrong_counts, wrong_loss_mask, own_divisor),
    *(undeclared_as_wide_as_the_batch, undeclared_of_other_rows, undeclared_square, sparse_entry),
    *(anything, anything, anything, anything),
)


# --- After packing: options, and the batch as a whole. ---


def key_without_entry(case: Case, dice: random.Random) -> Wrong:
    option = dice.choice(["mask_key", "labels_key", "loss_mask_key"])
    case.options[option] = "no_such_entry"
    return Wrong(set(), (option,), True)


def no_batch(case: Case, dice: random.Random) -> Wrong:
    case.batch = dice.choice([None, 5, "text", torch.zeros(2, 2), {1}, iter([]), [], {}, (), object(), [[]], {"a": 1}])
    return Wrong(set(), ("batch", "mask_key"), True)


def row_weights_of_another_kind(case: Case, dice: random.Random) -> Wrong:
    rows = case.rows
    weights = dice.choice(
        [
            *(None, 1.0, [1.0] * rows, np.ones(rows), torch.ones(rows + 1), torch.ones(rows, 1), torch.tensor(1.0)),
            *(torch.full((rows,), -1.0), torch.full((rows,), torch.nan), torch.full((rows,), torch.inf)),
        ]
    )
    case.options["loss_reduction"] = lambda batch: weights
    return Wrong(set(), ("loss_reduction",), "num_items_in_batch" not in case.entries)


def declared_otherwise(case: Case, dice: random.Random) -> Wrong:
    """An entry declared as something that it may not be."""
    name = dice.choice(list(case.entries))
    kind = dice.choice(["row", "position", "unit", "static"])
    row_dim = dice.choice([0, 0, 1, 2, 9]) if kind != "unit" else 0
    dims = tuple(dice.sample([d for d in (0, 1, 2, 3, 9) if d != row_dim], dice.choice([0, 1, 2])))
    made = Field(
        kind,  # type: ignore[arg-type]
        row_dim,
        dims if kind == "position" else (),
        dice.choice(["input", "decoder"]) if kind == "position" else "input",  # type: ignore[arg-type]
        dice.choice([None, 0, 3, -1, 0.5, "continue"]),
        dice.choice([*case.paths.values(), "no_such_entry"]) if kind == "unit" else None,
    )
    others = {k: v for k, v in case.options.get("batch_schema", {}).items() if k not in (name, case.paths[name])}
    case.options["batch_schema"] = others | {case.paths[name]: made}
    case.options["static_keys"] = [k for k in case.options.get("static_keys", ()) if k not in (name, case.paths[name])]
    changed = {name} | ({str(case.roles["labels"])} if made.axis == "decoder" else set())  # labels go with it
    dependents = {other for other, entry in case.entries.items() if entry.counts == name}
    return Wrong(
        changed | dependents, (*case.entries, "loss_reduction", "pad_to_multiple_of", "decoder_mask_key"), False
    )


def two_of_one_path(case: Case, dice: random.Random) -> Wrong | None:
    if not case.container.startswith("nested"):
        return None
    case.batch["inputs"]["surprise"] = case.batch["inputs.surprise"] = 1
    return Wrong(set(), ("surprise",), True)


AFTER: tuple[Callable[[Case, random.Random], Wrong | None], ...] = (
    *(key_without_entry, no_batch, row_weights_of_another_kind, two_of_one_path),
    *(declared_otherwise, declared_otherwise, declared_otherwise),
)
