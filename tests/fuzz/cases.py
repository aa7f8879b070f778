"""Random batches whose meaning is known beforehand: which entry is what, where each row's tokens are, what it weighs.

hypothesis chooses sizes, features and a seed; what a feature looks like is thrown from the seed and the feature's name,
so that leaving out one feature, as shrinking does, leaves the others as they are.
"""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import BatchEncoding

from lightning_padmin import Field, PadMinConfig

VOCABULARY = 11
NAMES = (
    *("input_ids", "attention_mask", "labels", "loss_mask", "u", "decoder_input_ids", "decoder_attention_mask"),
    *("position_ids", "token_type_ids", "special_tokens_mask", "inputs_embeds", "segments", "spans", "states"),
    *("full_mask", "scores", "group", "flags", "texts", "pairs", "objects", "class_weights", "temperature", "task"),
    *("nothing", "num_images", "image_grid_thw", "pixel_values", "captions", "tokens", "mask", "targets", "surprise"),
)
Record = make_dataclass("Record", [(name, Any, field(default=None)) for name in NAMES])
FrozenRecord = make_dataclass("FrozenRecord", [(name, Any, field(default=None)) for name in NAMES], frozen=True)
NamedBatch = namedtuple("NamedBatch", NAMES, defaults=[None] * len(NAMES))
CONTAINERS = (
    *("dict", "dict", "ordered", "user", "encoding", "dataclass", "frozen", "named", "tuple", "list"),
    *("nested", "nested", "nested user"),
)
FEATURES = (
    *("decoder", "renamed", "loss mask", "row labels", "no labels", "position ids", "known", "declared", "full mask"),
    *("rows", "lists", "static", "units", "grids", "widen", "holes", "empty rows"),
)
MASK_DTYPES = (torch.bool, torch.int64, torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64)


@dataclass
class Entry:
    """One entry of a batch and what it means; `fill` is what slots beyond the batch's width should hold."""

    value: Any
    kind: str
    dims: tuple[int, ...] = (1,)
    row_dim: int = 0
    axis: str = "input"
    fill: Any = None
    counts: str | None = None
    per_row: list[int] = field(default_factory=list)  # units of each row
    known: bool = False  # transformers' name says what it is
    ambiguous: bool = False  # its sizes do not say that it has rows
    silent: bool = False  # nobody says what it is

    def field(self, counts: str | None) -> Field:
        if self.kind == "position":
            return Field("position", self.row_dim, self.dims, self.axis, self.fill)  # type: ignore[arg-type]
        if self.kind == "unit":
            return Field("unit", counts=counts)
        return Field("static") if self.kind == "static" else Field("row", self.row_dim)


@dataclass(repr=False)
class Case:
    """A batch, the options that go with it, and the answers. Entries go by name; `paths` says where they are."""

    seed: str
    rows: int
    widths: tuple[int, ...]
    features: frozenset[str]
    entries: dict[str, Entry] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, str | None] = field(default_factory=dict)  # ids, mask, labels, loss_mask, decoder_mask, ...
    spans: list[list[tuple[int, int]]] = field(default_factory=list)  # per axis and row: start, length
    how: str = "token-mean"
    shift: int = 1
    encoder_decoder: bool = False
    container: str = "dict"
    batch: Any = None
    paths: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        """How to make it again, which says more than fifty tensors."""
        made = f"make_case({self.seed}, {self.rows}, {self.widths[0]}, {set(self.features) or '{}'}, {self.widths[-1]})"
        return f"{made}  # {self.container}, {self.options}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every field

    def dice(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")

    @property
    def ignore(self) -> int:
        return int(self.options.get("ignore_index", -100))

    @property
    def config(self) -> PadMinConfig:
        return PadMinConfig(**self.options)

    def role(self, name: str) -> Entry | None:
        found = self.roles.get(name)
        return None if found is None else self.entries[found]


def lookup(batch: Any, path: str) -> Any:
    """The entry of a path, in any of the containers of `pack`."""
    for part in path.split("."):
        if isinstance(batch, Mapping):
            batch = batch[part]
        elif isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
            batch = batch[int(part)]
        else:
            batch = getattr(batch, part)
    return batch


def span_of(values: list[Any]) -> tuple[int, int]:
    """Start and length of a row: from its first to its last value that is not 0; one slot if there is none."""
    real = [column for column, value in enumerate(values) if value != 0]
    return (real[0], real[-1] - real[0] + 1) if real else (0, 1)


def _mask(dice: random.Random, rows: int, width: int, holes: bool, empty: bool, flush: bool = False) -> list[list[int]]:
    side = "right" if flush else dice.choice(["left", "right", "both", "mixed", "none", "right", "left"])
    table = []
    for row in range(rows):
        length = width if side == "none" else dice.randint(1, width)
        here = dice.choice(["left", "right", "both"]) if side == "mixed" else side
        start = {"left": width - length, "both": dice.randint(0, width - length)}.get(here, 0)
        inside = [int(not holes or dice.random() < 0.7) for _ in range(length)]
        inside[0] = inside[-1] = 1
        if empty and row and dice.random() < 0.3:  # the first row stays: a batch without any token is refused
            inside = [0] * length
        table.append([0] * start + inside + [0] * (width - start - length))
    if dice.random() < 0.5:
        dice.shuffle(table)
    return table


def _tensor(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = int(np.prod(shape))
    return torch.tensor([dice.randint(0, 9) for _ in range(size)], dtype=dtype).reshape(shape)


def make_case(
    seed: int | str,
    rows: int,
    width: int,
    features: Iterable[str],
    decoder_width: int = 3,
    *,
    how: str | None = None,
    change: Callable[[Case], None] | None = None,
) -> Case:
    """A batch that must be understood, unless `change` does something to its entries before they are packed.

    `how` is the loss's reduction, where the batch has what that needs.
    """
    case = Case(str(seed), rows, (width, decoder_width) if "decoder" in features else (width,), frozenset(features))
    dice = case.dice("core")
    on = features.__contains__
    case.container = case.dice("kind").choice(CONTAINERS)
    _core(case, dice, on, how)
    for name, add in _EXTRAS.items():
        if on(name):
            add(case, case.dice(name))
    _options(case, case.dice("options"), on)
    if change is not None:
        change(case)
    pack(case, case.dice("container"))
    return case


def _core(case: Case, dice: random.Random, on: Callable[[str], bool], how: str | None) -> None:
    entries, roles, rows, width = case.entries, case.roles, case.rows, case.widths[0]
    renamed = on("renamed")
    ids, mask, labels = ("tokens", "mask", "targets") if renamed else ("input_ids", "attention_mask", "labels")
    pad = dice.choice([None, 0, 7])
    table = _mask(dice, rows, width, on("holes"), on("empty rows"))
    case.spans.append([span_of(values) for values in table])
    mask_dtype = dice.choice(MASK_DTYPES)
    scale = dice.choice([1, 1, 1, 2]) if mask_dtype != torch.bool else 1
    ids_dtype = dice.choice([torch.int64, torch.int64, torch.int32, torch.int16, torch.uint8])
    # Padding has ids too, so that a model would notice it.
    entries[ids] = Entry(_tensor(dice, (rows, width), ids_dtype), "position", fill=pad, known=not renamed)
    mask_tensor = torch.tensor(table).mul(scale).to(mask_dtype)
    entries[mask] = Entry(mask_tensor, "position", fill=0, known=True)
    roles.update(ids=ids, mask=mask, labels=None, loss_mask=None, decoder_mask=None, decoder_ids=None, u=None)
    if pad is not None:
        case.options["pad_token_id"] = pad
    axis, table, spans = "input", table, case.spans[0]
    if on("decoder"):
        axis, table, spans = _decoder(case, dice, on, pad)
    case.shift = int(axis == "input") if on("row labels") or dice.random() < 0.5 else dice.choice([0, 1])
    if case.shift != int(axis == "input") or dice.random() < 0.5:
        case.options["label_shift"] = case.shift
    if on("row labels") and not on("decoder"):
        _row_labels(case, dice, labels)
    elif not on("no labels") or (on("decoder") and roles["decoder_mask"] is None):
        _token_labels(case, dice, labels, axis, spans)
    if on("loss mask") and not on("row labels"):
        kept = [
            [
                int(value and first <= column < first + length and dice.random() < 0.7)
                for column, value in enumerate(row)
            ]
            for row, (first, length) in zip(table, case.spans[-1], strict=True)
        ]
        dtype = dice.choice([torch.bool, torch.int64, torch.float32, torch.float64])
        weights = torch.tensor(kept)
        if dtype.is_floating_point and dice.random() < 0.5:
            weights = weights * torch.tensor([[dice.choice([0.25, 0.5, 1, 3]) for _ in values] for values in kept])
        entries["loss_mask"] = Entry(weights.to(dtype), "position", axis=axis, fill=0, known=True)
        roles["loss_mask"] = "loss_mask"
    hows = ["row-mean", "sum", "function"]
    if roles["labels"] or roles["loss_mask"]:
        hows += ["token-mean"] * 3
    elif axis == "input" and dice.random() < 0.5:  # every attended token carries loss
        roles["loss_mask"], hows = mask, ["token-mean"]
    case.how = how if how in hows else dice.choice(hows)
    if case.how == "function":
        weights = [dice.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(rows)]
        weights[dice.randrange(rows)] = 2.0
        entries["u"] = Entry(torch.tensor(weights), "row")
        roles["u"] = "u"


def _decoder(case: Case, dice: random.Random, on: Callable[[str], bool], pad: int | None) -> tuple[str, Any, Any]:
    rows, width = case.rows, case.widths[1]
    with_mask, with_ids = dice.random() < 0.6, dice.random() < 0.6
    table = _mask(dice, rows, width, on("holes") and with_mask, False, flush=not with_mask)
    case.encoder_decoder = True
    if with_mask:
        dtype = dice.choice(MASK_DTYPES)
        mask = torch.tensor(table).to(dtype)
        case.entries["decoder_attention_mask"] = Entry(mask, "position", axis="decoder", fill=0, known=True)
        case.roles["decoder_mask"] = "decoder_attention_mask"
    if with_ids:
        ids = _tensor(dice, (rows, width), torch.int64)
        case.entries["decoder_input_ids"] = Entry(ids, "position", axis="decoder", fill=pad, known=True)
        case.roles["decoder_ids"] = "decoder_input_ids"
    case.spans.append([span_of(values) for values in table])
    return "decoder", table, case.spans[1]


def _token_labels(case: Case, dice: random.Random, name: str, axis: str, spans: list[tuple[int, int]]) -> None:
    ignore = dice.choice([-100, -100, -1, 0, 99])
    width = case.widths[-1] if axis == "decoder" else case.widths[0]
    table = [[ignore] * width for _ in spans]
    for row, (start, length) in enumerate(spans):
        empty = case.roles["mask"] and axis == "input" and not case.role("mask").value[row].any()  # type: ignore[union-attr]
        share = dice.choice([0.0, 0.4, 0.8, 1.0])
        for column in range(start, start + length):
            if not empty and dice.random() < share:
                table[row][column] = dice.randint(1, VOCABULARY - 1)
    if axis == "decoder" and case.roles["decoder_mask"] is None:
        # Without a decoder mask a row ends at its last label.
        case.spans[1] = [
            (0, max([column + 1 for column, value in enumerate(values) if value != ignore], default=1))
            for values in table
        ]
    small = torch.int8 if ignore < 0 else torch.uint8
    dtype = dice.choice([torch.int64, torch.int64, torch.int32, torch.int16, small])
    case.entries[name] = Entry(torch.tensor(table, dtype=dtype), "position", axis=axis, fill=ignore, known=True)
    case.roles["labels"] = name
    if ignore != -100:
        case.options["ignore_index"] = ignore


def _row_labels(case: Case, dice: random.Random, name: str) -> None:
    shape = (case.rows,) if dice.random() < 0.7 else (case.rows, 2)
    labels = _tensor(dice, shape, torch.int64)
    labels[_tensor(dice, shape, torch.int64) < 2] = -100
    case.entries[name] = Entry(labels, "row", ambiguous=len(shape) == 2)
    case.roles["labels"] = name


def _position_ids(case: Case, dice: random.Random) -> None:
    rows, width = case.rows, case.widths[0]
    start = torch.tensor([first for first, _ in case.spans[0]])
    ids = (torch.arange(width) - start[:, None]).clamp(min=0)
    if dice.random() < 0.4:
        ids = torch.stack([ids, ids + 1, ids * 2])
        case.entries["position_ids"] = Entry(ids, "position", (2,), 1, fill="continue", known=True)
    else:
        case.entries["position_ids"] = Entry(ids.to(torch.int32), "position", fill="continue", known=True)
    assert ids.shape[-2:] == (rows, width)


def _known(case: Case, dice: random.Random) -> None:
    shape = (case.rows, case.widths[0])
    if dice.random() < 0.6:
        value = _tensor(dice, shape, torch.int64)
        case.entries["token_type_ids"] = Entry(value, "position", fill=0, known=True)
    if dice.random() < 0.5:
        value = _tensor(dice, shape, torch.bool)
        case.entries["special_tokens_mask"] = Entry(value, "position", fill=1, known=True)
    if dice.random() < 0.4:
        value = _tensor(dice, (*shape, dice.choice([2, *shape])), torch.float32)
        case.entries["inputs_embeds"] = Entry(value, "position", fill=0, known=True)


def _declared(case: Case, dice: random.Random) -> None:
    rows, width = case.rows, case.widths[0]
    extra, fill = dice.choice([2, rows, width]), dice.choice([None, 0, 5])
    value: Any = _tensor(dice, (rows, width), dice.choice([torch.int64, torch.float16, torch.bool]))
    if dice.random() < 0.4:
        value = value.numpy()
    case.entries["segments"] = Entry(value, "position", fill=fill)
    shape, dims, row_dim = dice.choice(
        [
            ((rows, width, extra), (1,), 0),
            ((extra, rows, width), (2,), 1),
            ((width, rows), (0,), 1),
            ((rows, extra, width), (2,), 0),
            ((rows, width, width), (1, 2), 0),
        ]
    )
    value = _tensor(dice, shape, torch.float32)
    if dice.random() < 0.3:
        value = value.numpy()
    case.entries["states"] = Entry(value, "position", dims, row_dim, fill=fill)
    if len(case.widths) == 2 and dice.random() < 0.5:
        value = _tensor(dice, (rows, case.widths[1]), torch.int64)
        case.entries["spans"] = Entry(value, "position", axis="decoder", fill=fill)


def _full_mask(case: Case, dice: random.Random) -> None:
    """(B, L, L) or (B, 1, L, L) beside the mask that says what is real, under the name that models know."""
    rows, width = case.rows, case.widths[0]
    shape = (rows, width, width) if dice.random() < 0.5 else (rows, dice.choice([1, 2]), width, width)
    additive = dice.random() < 0.5
    value = _tensor(dice, shape, torch.float32 if additive else torch.bool)
    low = float(torch.finfo(torch.float32).min) if additive else 0
    known = case.roles["mask"] != "attention_mask"
    name = "attention_mask" if known else "full_mask"
    case.entries[name] = Entry(value, "position", (len(shape) - 2, len(shape) - 1), fill=low, known=known)


def _row_extras(case: Case, dice: random.Random) -> None:
    case.entries["group"] = Entry(_tensor(dice, (case.rows,), torch.int64), "row")
    extra = dice.choice([1, 2, 5, case.rows, case.widths[0], case.widths[0] + 1])
    value: Any = _tensor(dice, (case.rows, extra), torch.float32)
    if dice.random() < 0.3:
        value = value.numpy()
    case.entries["scores"] = Entry(value, "row")
    if dice.random() < 0.3:
        value = _tensor(dice, (2, case.rows), torch.float32)
        case.entries["flags"] = Entry(value, "row", row_dim=1, ambiguous=True)


def _lists(case: Case, dice: random.Random) -> None:
    case.entries["texts"] = Entry([f"row {row}" for row in range(case.rows)], "row")
    if dice.random() < 0.5:
        case.entries["pairs"] = Entry(tuple((row, str(row)) for row in range(case.rows)), "row")
    if dice.random() < 0.5:
        case.entries["objects"] = Entry([{"id": row, "x": [row]} for row in range(case.rows)], "row")


def _static(case: Case, dice: random.Random) -> None:
    shape = dice.choice([(3,), (case.rows,), (case.widths[0],), (case.rows, case.widths[0]), (2, 3)])
    case.entries["class_weights"] = Entry(_tensor(dice, shape, torch.float32), "static", ambiguous=True)
    case.entries["temperature"] = Entry(torch.tensor(0.5), "static")
    case.entries["task"] = Entry(dice.choice(["chat", 3, 0.5, True]), "static")
    case.entries["nothing"] = Entry(None, "static")


def _units(case: Case, dice: random.Random) -> None:
    counts = [dice.choice([0, 0, 1, 2, 3]) for _ in range(case.rows)]
    owner: Any = torch.tensor(counts)
    if dice.random() < 0.3:
        owner = dice.choice([owner.to(torch.uint8), owner.numpy(), counts])
    case.entries["num_images"] = Entry(owner, "row")
    if dice.random() < 0.3:
        labels = [f"image {k}" for k in range(sum(counts))]
        case.entries["captions"] = Entry(labels, "unit", counts="num_images", per_row=counts)
    value: Any = _tensor(dice, (sum(counts), 2), torch.float32)
    case.entries["pixel_values"] = Entry(value, "unit", counts="num_images", per_row=counts)


def _grids(case: Case, dice: random.Random) -> None:
    """Images per row, and patches per image as the product of a grid."""
    case.entries.pop("captions", None)
    counts = [dice.choice([0, 1, 2]) for _ in range(case.rows)]
    grids = [[1, dice.randint(1, 2), dice.randint(0, 2)] for _ in range(sum(counts))]
    patches, image = [], 0
    for count in counts:
        patches.append(sum(grid[1] * grid[2] for grid in grids[image : image + count]))
        image += count
    case.entries["num_images"] = Entry(torch.tensor(counts), "row")
    grid = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
    case.entries["image_grid_thw"] = Entry(grid, "unit", counts="num_images", per_row=counts)
    value = _tensor(dice, (sum(patches), 2), torch.float32)
    case.entries["pixel_values"] = Entry(value, "unit", counts="image_grid_thw", per_row=patches)


_EXTRAS: dict[str, Callable[[Case, random.Random], None]] = {
    "position ids": _position_ids,
    "known": _known,
    "declared": _declared,
    "full mask": _full_mask,
    "rows": _row_extras,
    "lists": _lists,
    "static": _static,
    "units": _units,
    "grids": _grids,
}


def _options(case: Case, dice: random.Random, on: Callable[[str], bool]) -> None:
    slots = case.rows * sum(case.widths)
    case.options |= {
        "token_budget": dice.choice([None, 1, 10**9, *[dice.randint(1, max(1, slots)) for _ in range(6)]]),
        "launch_cost": dice.choice([0, 0, 1, 4, 128, 1000]),
        "max_rows": dice.choice([None, None, 1, 2, 3]),
        "cost_multiple_of": dice.choice([None, None, 1, 4, 8]),
        "method": dice.choice(["optimal", "optimal", "greedy"]),
        "normalize": dice.choice(["rank", "global"]),
        "pad_to_multiple_of": dice.choice([2, 3, 8, 16]) if on("widen") else 1,
    }


def pack(case: Case, dice: random.Random) -> None:
    """Puts the entries into a container and writes the options that name them."""
    names = list(case.entries)
    if dice.random() < 0.5:
        dice.shuffle(names)
    values = {name: case.entries[name].value for name in names}
    kind = case.container
    if kind in ("tuple", "list"):
        case.paths = {name: str(k) for k, name in enumerate(names)}
        case.batch = tuple(values.values()) if kind == "tuple" else list(values.values())
    elif kind.startswith("nested"):
        inner, extra = ({}, {}) if kind == "nested" else (UserDict(), OrderedDict())  # type: ignore[var-annotated]
        case.batch = dice.choice([dict, OrderedDict, UserDict])({"inputs": inner, "extra": {"deep": extra}})
        for name, value in values.items():
            where = dice.choice(["", "inputs.", "extra.deep."])
            {"": case.batch, "inputs.": inner, "extra.deep.": extra}[where][name] = value
            case.paths[name] = where + name
    else:
        make = {"ordered": OrderedDict, "user": UserDict, "encoding": BatchEncoding, "dict": dict}
        classes = {"dataclass": Record, "frozen": FrozenRecord, "named": NamedBatch}
        case.batch = make[kind](values) if kind in make else classes[kind](**values)
        case.paths = {name: name for name in names}
    _declare(case, dice, kind in ("tuple", "list"))


def _declare(case: Case, dice: random.Random, by_number: bool) -> None:
    paths, roles, schema, static = case.paths, case.roles, {}, []
    for role, option, default in (
        ("mask", "mask_key", "attention_mask"),
        ("labels", "labels_key", "labels"),
        ("decoder_mask", "decoder_mask_key", "decoder_attention_mask"),
        ("loss_mask", "loss_mask_key", None),
    ):
        name = roles[role]
        if name is not None and (by_number or name != default or dice.random() < 0.2):
            case.options[option] = paths[name] if by_number or dice.random() < 0.5 else name
    if roles["labels"] is None and roles["loss_mask"] is not None and roles["mask"] == roles["loss_mask"]:
        case.options["labels_key"] = None
    for name, entry in case.entries.items():
        key = paths[name] if by_number or dice.random() < 0.5 else name
        if entry.silent or (entry.kind == "static" and getattr(entry.value, "ndim", 0) == 0):
            continue
        if entry.kind == "static":
            static.append(key) if dice.random() < 0.5 else schema.update({key: "static"})
        elif _must_be_declared(case, entry, by_number) or (not entry.known and dice.random() < 0.2):
            counts = None
            if entry.counts is not None:
                counts = paths[entry.counts] if by_number or dice.random() < 0.5 else entry.counts
            schema[key] = entry.field(counts)
    if schema:
        case.options["batch_schema"] = schema
    if static:
        case.options["static_keys"] = static
    case.options["loss_reduction"] = case.how
    if case.how == "function":
        path = paths[str(roles["u"])]
        case.options["loss_reduction"] = lambda batch: lookup(batch, path)


def _must_be_declared(case: Case, entry: Entry, by_number: bool) -> bool:
    """Whether nothing but a declaration says what it is."""
    if entry.kind in ("position", "unit"):
        is_role = any(entry is case.role(role) for role in ("mask", "labels", "decoder_mask", "loss_mask"))
        return not is_role and (by_number or not entry.known)
    if not hasattr(entry.value, "ndim"):
        return False  # lists of one entry per row
    near = {size + step for size in case.widths for step in (-1, 0, 1)}
    return entry.ambiguous or not near.isdisjoint(entry.value.shape)


@dataclass(frozen=True)
class Sizes:
    """What `make_case` is called with."""

    seed: int
    rows: int
    width: int
    features: frozenset[str]
    decoder_width: int

    def make(self, **options: Any) -> Case:
        return make_case(self.seed, self.rows, self.width, self.features, self.decoder_width, **options)


@st.composite
def sizes(draw: st.DrawFn, max_rows: int = 6, max_width: int = 8) -> Sizes:
    """Sizes and features. hypothesis likes zeros, so most are mixed with the seed; when shrinking that ends first."""
    seed, mixed = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([False, True, True, True]))
    dice = random.Random(f"{seed} sizes")
    far = dice.getrandbits if mixed else lambda bits: 0
    rows = 1 + (draw(st.integers(0, max_rows - 1)) + far(16)) % max_rows
    width = 1 + (draw(st.integers(0, max_width - 1)) + far(16)) % max_width
    bits = draw(st.integers(0, ALL)) ^ (far(len(FEATURES)) & far(len(FEATURES)))
    if mixed:
        bits &= far(len(FEATURES)) | far(len(FEATURES)) & far(len(FEATURES))  # a few features, not half of all
    return Sizes(seed, rows, width, chosen(bits), draw(st.sampled_from([width, 1, 2, 5, 7])))


def cases() -> st.SearchStrategy[Case]:
    """Cases that must be understood."""
    return sizes().map(Sizes.make)


ALL = 2 ** len(FEATURES) - 1


def chosen(bits: int) -> frozenset[str]:
    return frozenset(name for k, name in enumerate(FEATURES) if bits >> k & 1)
