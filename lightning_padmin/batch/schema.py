"""What each entry of a batch is: rows, positions, units, or shared by all rows.

Nothing is decided by a coincidence of sizes. An entry is known by its name (the conventions of transformers, table
`_INPUT` below), by what the user declared, or by facts that cannot be otherwise (a scalar has no rows); all else is
an error that names the entry and the declaration that would settle it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lightning_padmin.batch.columns import KNOWN as _COLUMNS
from lightning_padmin.batch.columns import holds_integers
from lightning_padmin.batch.fields import AXES, Axis, Field, Fill, Kind, Schema, parse_field
from lightning_padmin.batch.spec import BatchSpec
from lightning_padmin.batch.tree import (
    FlatBatch,
    Paths,
    check_rebuildable,
    find_path,
    last_part,
    parent_of,
    tensors_in,
)
from lightning_padmin.batch.validate import check_plain, check_shape, with_owner
from lightning_padmin.errors import SchemaError
from lightning_padmin.printing import listed

__all__ = ["AXES", "Axis", "Field", "Kind", "Schema", "find_path", "infer_schema", "parse_field", "schema_of"]

# Names that transformers' tokenizers, collators and models use. All run along the sequence; value = fill.
_INPUT: dict[str, Fill] = {
    "input_ids": None,  # replaced by pad_token_id where that is known
    "inputs_embeds": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "special_tokens_mask": 1,
    "position_ids": "continue",
}
_MASK_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_IMAGES = ("image_grid_thw", "video_grid_thw", "image_sizes", "spatial_shapes", "pixel_attention_mask")
_DECODER: dict[str, Fill] = {
    "decoder_input_ids": None,
    "decoder_inputs_embeds": 0,
    "decoder_attention_mask": 0,
}


def infer_schema(
    batch: Any,
    overrides: Mapping[str, Field] | None = None,
    static_keys: Sequence[str] = (),
    *,
    mask_key: str = "attention_mask",
    labels_key: str | None = "labels",
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
        overrides: declared fields by path, or by last part of a path where that is unique. The path of an inner node
            declares every entry below it.
        static_keys: entries shared by all rows.
        mask_key: the (B, L) entry that is nonzero on real tokens; padding is never guessed from token ids.
        labels_key: the entry with labels; may be absent from the batch. None: labels do not say what carries loss.
        decoder_mask_key: the (B, T) mask of the decoder axis; may be absent.
        loss_mask_key: an extra (B, L) entry that selects or weighs loss tokens.
        ignore_index: label without loss, the fill of labels.
        pad_token_id: the fill of token ids; None if unknown.
        encoder_decoder: the model is one, so labels run along the decoder axis even when both widths coincide.
        previous: the schema of an earlier batch. An entry that nobody declared and that was taken for rows there,
            while none of its dimensions was as wide as that batch, does not follow the width.

    Raises:
        SchemaError: no mask, an entry that is ambiguous or has the wrong number of rows, or a declaration that does
            not fit its entry.
    """
    spec = BatchSpec(
        mask_key=mask_key,
        labels_key=labels_key,
        decoder_mask_key=decoder_mask_key,
        loss_mask_key=loss_mask_key,
        fields=dict(overrides or {}),
        static_keys=tuple(static_keys),
        ignore_index=ignore_index,
        pad_token_id=pad_token_id,
    )
    return schema_of(FlatBatch.of(batch, spec.paths), spec, encoder_decoder=encoder_decoder, previous=previous)


def schema_of(
    batch: FlatBatch, spec: BatchSpec, *, encoder_decoder: bool = False, previous: Schema | None = None
) -> Schema:
    """`infer_schema` of a batch that has been flattened, with `spec.paths` named."""
    found = _Inference(batch.leaves, spec, previous)
    mask_key, labels_key, loss_mask_key = spec.mask_key, spec.labels_key, spec.loss_mask_key
    mask = found.mask(mask_key)
    decoder_mask = found.role("decoder_mask_key", spec.decoder_mask_key)
    labels = found.labels(labels_key)
    loss_mask = found.role("loss_mask_key", loss_mask_key) if loss_mask_key is not None else None
    if loss_mask_key is not None and loss_mask is None:
        raise SchemaError(f"loss_mask_key={loss_mask_key!r}: the batch has no such entry")
    found.read_decoder(decoder_mask, labels, encoder_decoder)
    if decoder_mask is not None and last_part(decoder_mask) in _INPUT and parent_of(decoder_mask) != parent_of(mask):
        found.decoder_node = parent_of(decoder_mask)
    side: Axis = "input" if found.decoder_width is None else "decoder"
    if labels in found.declared and found.declared[labels].kind == "position":
        side = found.declared[labels].axis
    roles: dict[str, tuple[Axis, Fill]] = {mask: ("input", 0)}
    if decoder_mask is not None:
        roles[decoder_mask] = ("decoder", 0)
    if loss_mask is not None:
        roles[loss_mask] = (side, 0)
    # Labels that do not say what carries loss run along positions all the same.
    along = found.labels("labels") if labels_key is None else labels
    if along is not None and found.leaves[along].ndim != 1:  # (B,) is one label per row: classification
        roles[along] = (side, spec.ignore_index)
    present = [path for path, leaf in found.leaves.items() if leaf is not None]
    fields = {path: found.field(path, roles, spec.pad_token_id) for path in present}
    for path, (axis, _) in roles.items():
        if path != along or fields[path].kind not in ("row", "column"):
            check_plain(path, found.leaves[path], fields[path], axis)
    paths = Paths(fields)
    fields = {path: with_owner(path, fields, paths) for path in fields}
    check_rebuildable(batch)
    widths = (found.width,) if found.decoder_width is None else (found.width, found.decoder_width)
    by_row = {path for path in fields if fields[path].kind in ("row", "column")}
    guessed = frozenset(by_row - {*found.declared, labels})
    return Schema(fields, found.rows, widths, mask, decoder_mask, labels, loss_mask, found.row_shapes, guessed)


def _check_holds(path: str, leaf: Any, pad_token_id: int) -> None:
    """Raises SchemaError for a filler that the entry's type cannot hold."""
    integral = isinstance(leaf, torch.Tensor) and not (
        leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool
    )
    if integral and pad_token_id > torch.iinfo(leaf.dtype).max:
        raise SchemaError(f"pad_token_id={pad_token_id}: {path!r} is {leaf.dtype}, which cannot hold it")


class _Inference:
    """One run of `schema_of`: the leaves and what has been found out so far."""

    def __init__(self, leaves: Mapping[str, Any], spec: BatchSpec, previous: Schema | None) -> None:
        self.leaves = leaves
        self.paths = Paths(self.leaves)
        self.decoder_node: str | None = None  # where names of the input axis are those of the decoder's
        self.declared: dict[str, Field] = {}
        for key, entry in [*spec.fields.items(), *((key, Field("static")) for key in spec.static_keys)]:
            # A declared entry may be absent: image keys, say, are missing from batches without images.
            path = find_path(key, self.paths, "batch_schema key")
            self.declared |= dict.fromkeys(self.paths.below(key) if path is None else [path], entry)
        self.row_shapes: dict[str, tuple[int, ...]] = dict(previous.row_shapes) if previous is not None else {}
        self.rows = self.width = 0
        self.decoder_width: int | None = None

    def role(self, option: str, key: str) -> str | None:
        """Path of the tensor that an option names, None if the batch has none."""
        path = find_path(key, self.paths, option)
        if path is None or self.leaves[path] is None:
            return None
        leaf = self.leaves[path]
        if not isinstance(leaf, torch.Tensor):
            raise SchemaError(f"{option}={key!r}: {path!r} is {type(leaf).__name__}, expected a tensor")
        if option != "labels_key" and leaf.dtype not in _MASK_DTYPES:
            raise SchemaError(f"{option}={key!r}: {path!r} is {leaf.dtype}, expected bool, integers or floating point")
        return self._dense(path)

    def _dense(self, path: str) -> str:
        leaf = self.leaves[path]
        if isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
            raise SchemaError(f"{path!r} is a sparse or nested tensor: make it dense, or a list of one tensor per row")
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            raise SchemaError(f"{path!r} is a tensor without values (device 'meta'): move the batch to a device first")
        return path

    def mask(self, key: str) -> str:
        """Path of the mask; sets the number of rows and the width."""
        path = self.role("mask_key", key)
        if path is None:
            raise SchemaError(
                f"mask_key={key!r}: the batch has no such entry (it has {listed(self.leaves) or 'none'}). "
                "Padding is never guessed from token ids: have the collate function return the mask, or name the entry "
                "that holds it"
            )
        mask = self.leaves[path]
        if mask.ndim != 2:
            raise SchemaError(
                f"mask_key={key!r}: {path!r} has shape {tuple(mask.shape)}, expected (rows, width), nonzero on real "
                "tokens; a 4-D attention mask may stay in the batch beside it"
            )
        if 0 in mask.shape:
            raise SchemaError(f"mask_key={key!r}: {path!r} has shape {tuple(mask.shape)}: the batch is empty")
        self.rows, self.width = mask.shape
        return path

    def labels(self, key: str | None) -> str | None:
        """Path of the labels, None if there are none that loss tokens could be counted from."""
        if key is None:
            return None
        path = find_path(key, self.paths, "labels_key")
        if path in self.declared:
            countable = isinstance(self.leaves[path], torch.Tensor) and self.declared[path].kind in (
                *("row", "column", "position"),
            )
            return path if countable else None  # declared as something else: class names, say
        path = self.role("labels_key", key)
        if path is None and key != "labels" and key not in self.leaves:
            raise SchemaError(f"labels_key={key!r}: the batch has no such entry (it has {listed(self.leaves)})")
        if path is not None and self.leaves[path].ndim == 2 and self.leaves[path].is_floating_point():
            raise SchemaError(
                f"labels_key={key!r}: {path!r} is floating point of shape {tuple(self.leaves[path].shape)}. Declare "
                f"batch_schema={{{path!r}: 'row'}} if it has one slice per row, 'position' if one value per token"
            )
        return path

    def read_decoder(self, decoder_mask: str | None, labels: str | None, encoder_decoder: bool) -> None:
        """Whether there is a decoder axis, and its width."""
        sides = [path for path in self.leaves if last_part(path) in _DECODER or path == decoder_mask]
        sides += [path for path, entry in self.declared.items() if (entry.axis, entry.kind) == ("decoder", "position")]
        sides = [path for path in sides if self.leaves[path] is not None]  # an optional entry that is not there
        if not sides and not encoder_decoder:
            return
        if labels is not None and labels not in self.declared:
            sides.append(labels)
        widths = {
            path: self._width_of(path) for path in sides if isinstance(self.leaves[path], torch.Tensor | np.ndarray)
        }
        widths = {path: width for path, width in widths.items() if width is not None}
        if not widths:
            return
        if len(set(widths.values())) > 1:
            raise SchemaError(f"entries of the decoder axis have different widths: {widths}")
        if decoder_mask is None and labels not in widths:
            raise SchemaError(
                f"{next(iter(widths))!r} runs along a decoder axis, but neither a decoder mask nor labels say where "
                "its padding is: add the mask to the batch (option decoder_mask_key)"
            )
        self.decoder_width = next(iter(widths.values()))

    def _width_of(self, path: str) -> int | None:
        tensor, declared = self.leaves[self._dense(path)], self.declared.get(path, Field("position"))
        dim = declared.position_dims[0] if declared.position_dims else tensor.ndim
        return int(tensor.shape[dim]) if tensor.ndim > dim else None

    def field(self, path: str, roles: Mapping[str, tuple[Axis, Fill]], pad_token_id: int | None) -> Field:
        """The field of one leaf."""
        if path in self.declared and self.declared[path].kind == "static":
            return self.declared[path]
        leaf, name = self.leaves[self._dense(path)], last_part(path)
        known = roles.get(path)
        if known is None and name in _INPUT | _DECODER:
            is_ids = name in ("input_ids", "decoder_input_ids")
            fill = pad_token_id if is_ids else (_INPUT | _DECODER)[name]
            if is_ids and pad_token_id is not None:
                _check_holds(path, leaf, pad_token_id)
            known = ("input" if name in _INPUT and not self._is_of_decoder(path) else "decoder", fill)
        if path in self.declared:
            entry = self.declared[path]
            if entry.kind == "position" and entry.fill is None and known is not None:
                entry = replace(entry, fill=known[1])
            return self._checked(path, leaf, entry)
        if known is not None:
            return self._positional(path, leaf, *known)
        if name in _COLUMNS and self._may_hold_columns(leaf):
            return Field("column")
        if not isinstance(leaf, torch.Tensor | np.ndarray):
            return self._list_or_object(path, leaf)
        return Field("static") if leaf.ndim == 0 else self._tensor(path, leaf)

    def _may_hold_columns(self, leaf: Any) -> bool:
        """Whether an entry of such a name is what transformers means by it: integers per row, as few as one likes."""
        if not holds_integers(leaf) or not isinstance(leaf, torch.Tensor | np.ndarray):
            return holds_integers(leaf) and len(leaf) == self.rows
        return leaf.ndim > 0 and leaf.shape[0] == self.rows and self.width not in leaf.shape[1:]

    def _is_of_decoder(self, path: str) -> bool:
        """Whether an entry is beside the decoder's mask, in a node of its own: `decoder.input_ids`."""
        return bool(self.decoder_node) and path.startswith(f"{self.decoder_node}.")

    def _positional(self, path: str, leaf: Any, axis: Axis, fill: Fill) -> Field:
        name, ndim = last_part(path), getattr(leaf, "ndim", 0)
        if name == "position_ids" and ndim == 3:  # (3, B, L): temporal, height and width positions
            entry = Field("position", 1, (2,), axis, fill)
        elif name == "attention_mask" and ndim in (3, 4):  # (B, L, L) or (B, heads or 1, L, L): queries and keys
            additive = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            low = float(torch.finfo(leaf.dtype).min) if additive else 0
            entry = Field("position", 0, (ndim - 2, ndim - 1), axis, low)
        else:
            entry = Field("position", 0, (1,), axis, fill)
        return self._checked(path, leaf, entry)

    def _checked(self, path: str, leaf: Any, entry: Field) -> Field:
        return check_shape(path, leaf, entry, self.rows, {"input": self.width, "decoder": self.decoder_width})

    def _list_or_object(self, path: str, leaf: Any) -> Field:
        """Lists of one entry per row; what cannot have rows is shared by all."""
        if isinstance(leaf, str | bytes):
            return Field("static")
        has_rows = [item.shape[0] == self.rows for item in tensors_in(leaf, path) if item.ndim > 0]
        if not isinstance(leaf, list | tuple):
            if has_rows or (hasattr(leaf, "__len__") and hasattr(leaf, "__getitem__")):
                raise SchemaError(
                    f"{path!r} is a {type(leaf).__name__}, which may have rows: make it a list, tensor, mapping or "
                    f"dataclass, or declare static_keys=[{path!r}] if all rows share it"
                )
            return Field("static")  # strings, numbers, flags, objects without rows
        if len(leaf) != self.rows:
            ambiguous = any(has_rows)
        else:
            ambiguous = bool(has_rows) and all(has_rows) and path not in self.row_shapes
        if ambiguous:
            raise SchemaError(
                f"{path!r} is a {type(leaf).__name__} of {len(leaf)} entries with tensors of {self.rows} rows: is it "
                f"one entry per row or a container of row entries? Declare batch_schema={{{path!r}: 'row'}}, or what "
                f"each of its entries is: {{'{path}.0': ...}}; static_keys=[{path!r}] if all rows share it"
            )
        if len(leaf) != self.rows:
            return Field("static")
        self.row_shapes[path] = ()
        return Field("row")

    def _tensor(self, path: str, leaf: Any) -> Field:
        """A tensor that is known neither by name nor by declaration: rows, unless it might follow the width."""
        shape = tuple(leaf.shape)
        declare = (
            f"batch_schema={{{path!r}: 'position'}} if it runs along the sequence, 'row' if "
            f"it does not, 'column' if its values are numbers of columns, Field('unit', counts=...) if rows have "
            f"several slices of it (images), or "
            f"static_keys=[{path!r}] if all rows share it; if it selects loss tokens, loss_mask_key={path!r}"
        )
        if shape[0] != self.rows:
            raise SchemaError(f"{path!r} has shape {shape} but the batch has {self.rows} rows. Declare {declare}")
        if last_part(path).startswith("pixel_values") or last_part(path) in _IMAGES:
            raise SchemaError(
                f"{path!r} has shape {shape}: images belong to rows in some number, which sizes cannot tell. Declare "
                f"batch_schema={{{path!r}: 'row'}} if every row has one, else Field('unit', counts=...)"
            )
        widths = [width for width in (self.width, self.decoder_width) if width is not None]
        # As many rows as columns: a vector of positions looks like one of rows, a table like a batch.
        follows = self.rows in widths or any(size in widths for size in shape[1:])
        # Off by one: values of the next token, or ids before they are shifted.
        follows |= len(shape) == 2 and not {shape[1] - 1, shape[1] + 1}.isdisjoint(widths)
        if follows and len(self.row_shapes.get(path, shape)) != len(shape) - 1:
            raise SchemaError(
                f"{path!r} has shape {shape}, one of whose dimensions is as wide as the batch, or off by one. Declare "
                f"{declare}"
            )
        self.row_shapes[path] = shape[1:]
        return Field("row")
