"""What each entry of a batch is: rows, positions, units, or shared by all rows.

Nothing is decided by a coincidence of sizes. An entry is known by its name (the conventions of transformers, table
`_INPUT` below), by what the user declared, or by facts that cannot be otherwise (a scalar has no rows); all else is
an error that names the entry and the declaration that would settle it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch

from lightning_padmin.errors import ConfigError, SchemaError
from lightning_padmin.tree import iter_leaves

Axis = Literal["input", "decoder"]
Kind = Literal["row", "position", "unit", "static"]
AXES: tuple[Axis, Axis] = ("input", "decoder")


@dataclass(frozen=True)
class Field:
    """What one entry of a batch holds.

    Attributes:
        kind: `"row"`, one slice per row (also lists); `"position"`, one slice per row and position, rolled and
            trimmed; `"unit"`, slices that belong to rows in varying number (images, tiles, patches); `"static"`,
            shared by all rows.
        row_dim: the dimension that counts rows.
        position_dims: the dimensions that count positions; empty means the one after `row_dim`.
        axis: which of the two lengths of an encoder-decoder row positions run along.
        fill: value of slots beyond the batch's own width; `"continue"` counts on upward (position ids). None:
            unknown, so widths are not rounded beyond that width.
        counts: for units, the entry that says how many belong to each row: a row entry of integers, or another unit
            entry, each of whose slices stands for the product of its values (grids of patches).
    """

    kind: Kind = "row"
    row_dim: int = 0
    position_dims: tuple[int, ...] = ()
    axis: Axis = "input"
    fill: float | Literal["continue"] | None = None
    counts: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("row", "position", "unit", "static"):
            raise ConfigError(f"Field(kind={self.kind!r}): expected 'row', 'position', 'unit' or 'static'")
        if self.axis not in AXES:
            raise ConfigError(f"Field(axis={self.axis!r}): expected 'input' or 'decoder'")
        if isinstance(self.row_dim, bool) or not isinstance(self.row_dim, int) or self.row_dim < 0:
            raise ConfigError(f"Field(row_dim={self.row_dim!r}): expected an integer of at least 0")
        dims = tuple(self.position_dims) or ((self.row_dim + 1,) if self.kind == "position" else ())
        object.__setattr__(self, "position_dims", dims)
        if len(set(dims)) != len(dims) or any(
            not isinstance(dim, int) or dim < 0 or dim == self.row_dim for dim in dims
        ):
            raise ConfigError(f"Field(position_dims={self.position_dims!r}): expected dimensions other than row_dim")
        if self.kind != "position" and dims:
            raise ConfigError(f"Field(kind={self.kind!r}, position_dims={dims!r}): only 'position' has position_dims")
        if (self.kind == "unit") != (self.counts is not None):
            raise ConfigError(
                f"Field(kind={self.kind!r}, counts={self.counts!r}): a 'unit' names in counts the entry that says how "
                "many units each row has; other kinds have no counts"
            )
        if isinstance(self.fill, str) and self.fill != "continue":
            raise ConfigError(f"Field(fill={self.fill!r}): expected a number, 'continue' or None")


def parse_field(key: str, value: object) -> Field:
    """A `Field` from what a configuration file can say: a Field, the name of a kind, or a mapping of its arguments."""
    if isinstance(value, Field):
        return value
    if isinstance(value, str):
        return Field(kind=cast(Kind, value))
    if isinstance(value, Mapping):
        unknown = set(value) - set(Field.__dataclass_fields__)
        if unknown:
            raise ConfigError(f"batch_schema[{key!r}] has no argument {sorted(unknown)[0]!r} (got {dict(value)!r})")
        arguments = dict(value)
        if "position_dims" in arguments:
            arguments["position_dims"] = tuple(arguments["position_dims"])
        return Field(**arguments)
    raise ConfigError(f"batch_schema[{key!r}]={value!r}: expected a Field, the name of a kind, or a mapping")


@dataclass(frozen=True)
class Schema:
    """The `Field` of every entry by path, and which entries say where real tokens and losses are.

    Attributes:
        fields: path -> Field, one for each leaf of the batch.
        rows: number of rows B.
        widths: width of the batch per axis, (L,) or (L, T) for encoder-decoder batches.
        mask: path of the mask of the input axis; decoder_mask, labels, loss_mask likewise, None where absent.
        row_shapes: trailing shape of each row entry that nobody declared (see `infer_schema`, previous).
    """

    fields: Mapping[str, Field]
    rows: int
    widths: tuple[int, ...]
    mask: str
    decoder_mask: str | None = None
    labels: str | None = None
    loss_mask: str | None = None
    row_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def labels_axis(self) -> Axis:
        """The axis labels run along; `"input"` where there are none."""
        return self.fields[self.labels].axis if self.labels is not None else "input"

    @property
    def can_widen(self) -> bool:
        """Whether every positional entry has a fill, so that widths may be rounded beyond the batch's own."""
        return all(entry.fill is not None for entry in self.fields.values() if entry.kind == "position")


# Names that transformers' tokenizers, collators and models use. All run along the sequence; value = fill.
_INPUT: dict[str, float | Literal["continue"] | None] = {
    "input_ids": None,  # replaced by pad_token_id where that is known
    "inputs_embeds": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "special_tokens_mask": 1,
    "position_ids": "continue",
}
_DECODER: dict[str, float | Literal["continue"] | None] = {
    "decoder_input_ids": None,
    "decoder_inputs_embeds": 0,
    "decoder_attention_mask": 0,
}


def find_path(key: str, paths: Sequence[str], option: str) -> str | None:
    """The path that `key` names: itself, else the one path whose last part it is; None if there is none.

    Raises:
        SchemaError: several paths end in `key`.
    """
    if key in paths:
        return key
    ends = [path for path in paths if path.rsplit(".", 1)[-1] == key]
    if len(ends) > 1:
        raise SchemaError(f"{option}={key!r} names several entries: {', '.join(ends)}. Give the whole path of one")
    return ends[0] if ends else None


def infer_schema(
    batch: Any,
    overrides: Mapping[str, Field] | None = None,
    static_keys: Sequence[str] = (),
    *,
    mask_key: str = "attention_mask",
    labels_key: str = "labels",
    decoder_mask_key: str = "decoder_attention_mask",
    loss_mask_key: str | None = None,
    ignore_index: int = -100,
    pad_token_id: int | None = None,
    encoder_decoder: bool = False,
    previous: Schema | None = None,
) -> Schema:
    """The schema of a batch.

    Args:
        batch: mapping, dataclass, named tuple, list or tuple, nested at will, of tensors, arrays, lists and scalars.
        overrides: declared fields by path, or by last part of a path where that is unique.
        static_keys: entries shared by all rows.
        mask_key: the (B, L) entry that is nonzero on real tokens; padding is never guessed from token ids.
        labels_key: the entry with labels; may be absent from the batch.
        decoder_mask_key: the (B, T) mask of the decoder axis; may be absent.
        loss_mask_key: an extra (B, L) entry that selects or weighs loss tokens.
        ignore_index: label without loss, the fill of labels.
        pad_token_id: the fill of token ids; None if unknown.
        encoder_decoder: the model is one, so labels run along the decoder axis even when both widths coincide.
        previous: the schema of an earlier batch. An undeclared row entry that had a trailing shape there while the
            batch had another width has shown that its shape does not follow the width.

    Raises:
        SchemaError: no mask, an entry that is ambiguous or has the wrong number of rows, or a declaration that does
            not fit its entry.
    """
    inference = _Inference(batch, dict(overrides or {}), tuple(static_keys), previous)
    mask = inference.find("mask_key", mask_key)
    if mask is None:
        raise SchemaError(
            f"mask_key={mask_key!r}: the batch has no such entry (it has {', '.join(inference.leaves) or 'none'}). "
            "Padding is never guessed from token ids: have the collate function return the mask, or name the entry "
            "that holds it"
        )
    inference.read_mask(mask, mask_key)
    decoder_mask = inference.find("decoder_mask_key", decoder_mask_key)
    labels = inference.find("labels_key", labels_key)
    loss_mask = inference.find("loss_mask_key", loss_mask_key) if loss_mask_key is not None else None
    if loss_mask_key is not None and loss_mask is None:
        raise SchemaError(f"loss_mask_key={loss_mask_key!r}: the batch has no such entry")
    inference.read_decoder(decoder_mask, labels, encoder_decoder)
    side: Axis = "input" if inference.decoder_width is None else "decoder"
    roles: dict[str, tuple[Axis, float]] = {mask: ("input", 0)}
    if decoder_mask is not None:
        roles[decoder_mask] = ("decoder", 0)
    if loss_mask is not None:
        roles[loss_mask] = (side, 0)
    if labels is not None:
        roles[labels] = (side, ignore_index)
    fields = {path: inference.field(path, roles, pad_token_id, labels) for path in inference.leaves}
    widths = (inference.width,) if inference.decoder_width is None else (inference.width, inference.decoder_width)
    return Schema(fields, inference.rows, widths, mask, decoder_mask, labels, loss_mask, inference.row_shapes)


class _Inference:
    """One run of `infer_schema`: the leaves and what has been found out so far."""

    def __init__(
        self, batch: Any, overrides: dict[str, Field], static_keys: tuple[str, ...], previous: Schema | None
    ) -> None:
        self.leaves: dict[str, Any] = dict(iter_leaves(batch, [*overrides, *static_keys]))
        self.declared: dict[str, Field] = {}
        for key, entry in [*overrides.items(), *((key, Field("static")) for key in static_keys)]:
            # A declared entry may be absent: image keys, say, are missing from batches without images.
            path = find_path(key, tuple(self.leaves), "batch_schema key")
            if path is not None:
                self.declared[path] = entry
        self.row_shapes: dict[str, tuple[int, ...]] = dict(previous.row_shapes) if previous is not None else {}
        self.rows = self.width = 0
        self.decoder_width: int | None = None

    def find(self, option: str, key: str) -> str | None:
        return find_path(key, tuple(self.leaves), option)

    def read_mask(self, path: str, key: str) -> None:
        mask = self.leaves[path]
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise SchemaError(
                f"mask_key={key!r}: {path!r} is {shape}, expected a tensor (rows, width) that is nonzero on real "
                "tokens; a 4-D attention mask may stay in the batch beside it"
            )
        if 0 in mask.shape:
            raise SchemaError(f"mask_key={key!r}: {path!r} has shape {tuple(mask.shape)}: the batch is empty")
        self.rows, self.width = mask.shape

    def read_decoder(self, decoder_mask: str | None, labels: str | None, encoder_decoder: bool) -> None:
        """Whether there is a decoder axis, and its width."""
        sides = [path for path in self.leaves if path.rsplit(".", 1)[-1] in _DECODER or path == decoder_mask]
        sides += [path for path, entry in self.declared.items() if entry.axis == "decoder"]
        if not sides and not encoder_decoder:
            return
        if labels is not None and labels not in sides:
            sides.append(labels)
        widths = {path: self._width_of(path) for path in sides if isinstance(self.leaves[path], torch.Tensor)}
        widths = {path: width for path, width in widths.items() if width is not None}
        if not widths:
            return
        if len(set(widths.values())) > 1:
            raise SchemaError(f"entries of the decoder axis have different widths: {widths}")
        if decoder_mask is None and labels is None:
            raise SchemaError(
                f"{next(iter(widths))!r} runs along a decoder axis, but neither a decoder mask nor labels say where "
                "its padding is: add the mask to the batch (option decoder_mask_key)"
            )
        self.decoder_width = next(iter(widths.values()))

    def _width_of(self, path: str) -> int | None:
        tensor, declared = self.leaves[path], self.declared.get(path)
        dim = declared.position_dims[0] if declared is not None and declared.position_dims else 1
        return int(tensor.shape[dim]) if tensor.ndim > dim else None

    def field(
        self, path: str, roles: Mapping[str, tuple[Axis, float]], pad_token_id: int | None, labels: str | None
    ) -> Field:
        """The field of one leaf."""
        leaf, name = self.leaves[path], path.rsplit(".", 1)[-1]
        if path in self.declared:
            entry = self.declared[path]
            if entry.kind == "position" and entry.fill is None and path in roles:
                entry = replace(entry, fill=roles[path][1])
            return self._checked(path, leaf, entry)
        if path in roles:
            if not isinstance(leaf, torch.Tensor):
                raise SchemaError(f"{path!r} is {type(leaf).__name__}, expected a tensor")
            if path == labels and leaf.ndim == 1:  # one label per row: classification
                return self._checked(path, leaf, Field("row"))
            return self._positional(path, leaf, *roles[path])
        if not isinstance(leaf, torch.Tensor | np.ndarray):
            return self._list_or_object(path, leaf)
        if leaf.ndim == 0:
            return Field("static")
        if name in _INPUT or name in _DECODER:
            fill = pad_token_id if name in ("input_ids", "decoder_input_ids") else (_INPUT | _DECODER)[name]
            return self._positional(path, leaf, "input" if name in _INPUT else "decoder", fill)
        return self._unknown(path, leaf)

    def _positional(self, path: str, leaf: Any, axis: Axis, fill: float | Literal["continue"] | None) -> Field:
        name = path.rsplit(".", 1)[-1]
        if name == "position_ids" and leaf.ndim == 3:  # (3, B, L): temporal, height and width positions
            entry = Field("position", 1, (2,), axis, fill)
        elif name == "attention_mask" and leaf.ndim == 4:  # (B, heads or 1, L, L): queries and keys
            additive = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            entry = Field("position", 0, (2, 3), axis, float(torch.finfo(leaf.dtype).min) if additive else 0)
        else:
            entry = Field("position", 0, (1,), axis, fill)
        return self._checked(path, leaf, entry)

    def _checked(self, path: str, leaf: Any, entry: Field) -> Field:
        """The field, if the leaf has the shape that it claims."""
        if entry.kind == "static":
            return entry
        if entry.kind == "row" and isinstance(leaf, list | tuple):
            if len(leaf) != self.rows:
                raise SchemaError(f"{path!r} has {len(leaf)} entries but the batch has {self.rows} rows")
            return entry
        if not isinstance(leaf, torch.Tensor | np.ndarray):
            raise SchemaError(f"{path!r} is {type(leaf).__name__} but is declared {entry.kind!r}: expected a tensor")
        shape = tuple(leaf.shape)
        if entry.kind == "unit":
            if self.find("counts", str(entry.counts)) is None:
                raise SchemaError(f"{path!r} is declared with counts={entry.counts!r}: the batch has no such entry")
            return entry
        width = self.width if entry.axis == "input" else self.decoder_width
        if width is None:
            raise SchemaError(f"{path!r} runs along the decoder axis, but no entry says how wide that is")
        wanted = {entry.row_dim: self.rows} | dict.fromkeys(entry.position_dims, width)
        for dim, size in wanted.items():
            if leaf.ndim <= dim or shape[dim] != size:
                where = f"{size} rows" if dim == entry.row_dim else f"width {size}"
                raise SchemaError(
                    f"{path!r} has shape {shape}, expected {where} in dimension {dim}, as the mask has. If it lies "
                    f"otherwise, declare it: batch_schema={{{path!r}: Field(...)}}; if labels run along the decoder "
                    f"of an encoder-decoder model: Field('position', axis='decoder')"
                )
        return entry

    def _list_or_object(self, path: str, leaf: Any) -> Field:
        if not isinstance(leaf, list | tuple):
            return Field("static")  # None, strings, numbers, flags, objects without rows
        tensors = [item for item in leaf if isinstance(item, torch.Tensor | np.ndarray)]
        if tensors and all(item.ndim > 0 and item.shape[0] == self.rows for item in tensors):
            raise SchemaError(
                f"{path!r} is a {type(leaf).__name__} of {len(leaf)} tensors with {self.rows} rows each: is it one "
                f"entry per row or a container of row entries? Declare batch_schema={{{path!r}: 'row'}}, or what "
                f"each of its tensors is: {{'{path}.0': ...}}"
            )
        return Field("row") if len(leaf) == self.rows else Field("static")

    def _unknown(self, path: str, leaf: Any) -> Field:
        shape = tuple(leaf.shape)
        widths = {self.width, self.decoder_width} - {None}
        declare = (
            f"batch_schema={{{path!r}: Field('position', position_dims=...)}} if it runs along the sequence, 'row' if "
            f"it does not, or static_keys=[{path!r}] if all rows share it; if it selects loss tokens, "
            f"loss_mask_key={path!r}"
        )
        if shape[0] != self.rows:
            raise SchemaError(f"{path!r} has shape {shape} but the batch has {self.rows} rows. Declare {declare}")
        if not widths.isdisjoint(shape[1:]) and not self._seen_with_another_width(path, shape[1:]):
            raise SchemaError(
                f"{path!r} has shape {shape}, one of whose dimensions is as wide as the batch. Declare {declare}"
            )
        self.row_shapes[path] = shape[1:]
        return Field("row")

    def _seen_with_another_width(self, path: str, trailing: tuple[int, ...]) -> bool:
        return self.row_shapes.get(path) == trailing
