"""What the entries of a call are: its arguments, flattened, and which of their dimensions count rows and positions.

Sizes alone decide nothing: what they suggest are readings that are tried on the call itself (see `any_module`), and
what has been found right once holds for later calls, whose sizes may agree by chance.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_padmin.batch import Field, last_part
from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import AsItCame
from lightning_padmin.forward.calls import CallMask


def leaves(node: object, path: str = "") -> dict[str, Any]:
    """The leaves of arguments or outputs by path."""
    children = _children(node)
    if children is None:
        return {path: node}
    found: dict[str, Any] = {}
    for key, child in children.items():
        found |= leaves(child, f"{path}.{key}" if path else str(key))
    return found


def rebuilt(node: Any, values: Mapping[str, Any], path: str = "") -> Any:
    """The same structure with other leaves; containers of the same types, the original stays as it is."""
    children = _children(node)
    if children is None:
        return values[path]
    made = {key: rebuilt(child, values, f"{path}.{key}" if path else str(key)) for key, child in children.items()}
    new: Any = copy.copy(node)  # keeps the type, the order of its entries, and attributes that are no entries
    if isinstance(node, dict):
        for key, value in made.items():
            dict.__setitem__(new, key, value)
    elif isinstance(node, Mapping):
        return type(node)(made)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(node):  # ModelOutput is both
        for key, value in made.items():
            object.__setattr__(new, key, value)
    if isinstance(node, Mapping) or dataclasses.is_dataclass(node):
        return new
    return node._make(made.values()) if hasattr(node, "_make") else type(node)(made.values())


def _children(node: Any) -> dict[Any, Any] | None:
    """What is inside of a container; None for a leaf. A list without tensors is one: of one entry per row, say."""
    if isinstance(node, Mapping):
        return dict(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    if isinstance(node, PackedSequence) or not isinstance(node, tuple | list):
        return None
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return dict(zip(node._fields, node, strict=True))
    inner = [each for each in node if _children(each) is not None or isinstance(each, Tensor)]
    return dict(enumerate(node)) if inner or (isinstance(node, tuple) and not node) else None


@dataclass(frozen=True)
class Reading:
    """What an entry is.

    Attributes:
        kind: `"row"`, `"position"` or `"static"` as in a `Field`; `"shared"`: positions without rows.
        row_dim: the dimension that counts rows.
        position_dims: those that count positions.
        other: sizes of its other dimensions, -1 in place of those above.
    """

    kind: str
    row_dim: int = 0
    position_dims: tuple[int, ...] = ()
    other: tuple[int, ...] = ()

    @property
    def field(self) -> Field:
        """As the plan has it; what all rows share is not gathered."""
        if self.kind == "row":
            return Field("row", self.row_dim)
        return Field("position", self.row_dim, self.position_dims) if self.kind == "position" else Field("static")

    def fits(self, shape: tuple[int, ...], rows: int, width: int | None) -> bool:
        """Whether a tensor of that shape may be the same in a call of so many rows, at any width if it is None."""
        if len(shape) != len(self.other):
            return False
        along = {shape[dim] for dim in self.position_dims}
        if width is not None and along - {width}:
            return False
        has_rows = self.kind not in ("row", "position") or shape[self.row_dim] == rows
        return has_rows and all(was in (-1, size) for was, size in zip(self.other, shape, strict=True))


Readings = dict[tuple[str, int], list[Reading]]  # path and number of dimensions -> what it was found to be


def reading_of(shape: tuple[int, ...], row_dim: int | None, position_dims: tuple[int, ...]) -> Reading:
    """The reading with these dimensions."""
    dims = {*position_dims, *(() if row_dim is None else (row_dim,))}
    other = tuple(-1 if dim in dims else size for dim, size in enumerate(shape))
    kind = "static" if not dims else "shared" if row_dim is None else "position" if position_dims else "row"
    return Reading(kind, row_dim or 0, position_dims, other)


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of one call.

    Attributes:
        leaves: by path.
        mask: path of what says what is padding.
        kind: of the mask.
        real: (rows, width) bool, the positions that are real.
    """

    leaves: Mapping[str, Any]
    mask: str
    kind: str
    real: Tensor

    @property
    def rows(self) -> int:
        """Of the call."""
        return self.real.shape[0]

    @property
    def width(self) -> int:
        """Of the call."""
        return self.real.shape[1]


def value_at(arguments: Mapping[str, Any], path: str) -> Any:
    """What is there; None where there is nothing."""
    node: Any = arguments
    for name in path.split("."):
        children = _children(node) or {}
        node = next((child for key, child in children.items() if str(key) == name), None)
    return node


def entries_of(arguments: Mapping[str, Any], given: CallMask, known: Readings) -> Entries | None:
    """The entries of a call; None where nothing says what is padding in a way that is understood.

    Raises:
        AsItCame: an entry cannot be taken apart.
    """
    found = leaves(arguments)
    for path, leaf in found.items():
        is_odd = isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_nested or leaf.is_meta)
        if is_odd or isinstance(leaf, PackedSequence):
            raise AsItCame(f"{path!r} is packed, nested or sparse, so its rows are not to be told")
    value = value_at(arguments, given.argument)
    real = _from_lengths(value, found, known) if given.kind == "lengths" else _from_mask(value, given.kind)
    return None if real is None else Entries(found, given.argument, given.kind, real)


def _from_mask(value: Any, kind: str) -> Tensor | None:
    """(rows, width) of a mask (rows, width), or (rows, choices, ..., width), whose rows are as long as any choice."""
    if not isinstance(value, Tensor) or value.ndim < 2 or 0 in value.shape:
        return None
    if value.is_floating_point():  # of torch's own layers: what is added to scores
        of_padding = 1.0 if kind == "mask" else float("-inf")
        if bool(((value != 0) & (value != of_padding)).any()):
            return None
    elif value.dtype != torch.bool and bool((value < 0).any()):
        return None
    if value.ndim > 2 and value.shape[-1] in value.shape[1:-1]:
        return None  # of queries and keys
    real = (value == 0) if kind == "padding" else (value != 0)
    return real.flatten(1, -2).any(dim=1) if real.ndim > 2 else real


def _from_lengths(value: Any, found: Mapping[str, Any], known: Readings) -> Tensor | None:
    if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
        value = torch.tensor(value)
    if not isinstance(value, Tensor) or value.ndim != 1 or not len(value):
        return None
    if value.is_floating_point() or value.dtype == torch.bool:
        return None
    shortest, longest = int(value.min()), int(value.max())
    if shortest < 1:
        return None
    width = _width(found, len(value), longest, known)
    return torch.arange(width, device=value.device) < value[:, None]


def _width(found: Mapping[str, Any], rows: int, longest: int, known: Readings) -> int:
    tensors = {path: leaf for path, leaf in found.items() if isinstance(leaf, Tensor) and leaf.ndim > 1}
    for path, leaf in tensors.items():
        for reading in known.get((path, leaf.ndim), []):
            if reading.position_dims and reading.fits(tuple(leaf.shape), rows, None):
                return int(leaf.shape[reading.position_dims[0]])
    sizes = set[int]()
    for leaf in tensors.values():
        if rows in leaf.shape:
            rest = list(leaf.shape)
            rest.remove(rows)
            sizes |= {size for size in rest if size >= longest}
    if longest in sizes:
        return longest
    if len(sizes) == 1:
        return sizes.pop()
    raise AsItCame(f"the longest row has {longest} positions, and no dimension of its inputs is as wide")


class Variant(NamedTuple):
    """What else has the size of a width.

    Attributes:
        squares: in an entry with rows and positions it counts positions too; else features.
        tables: in an entry without rows it does not count positions: all calls share it.
    """

    squares: bool
    tables: bool


VARIANTS = [Variant(squares, tables) for tables in (False, True) for squares in (False, True)]


def readings_of(entries: Entries, known: Readings, config: PadMinConfig, variant: Variant) -> dict[str, Reading]:
    """What each tensor of a call is, and each list of one item per row; still to be proven.

    Args:
        entries: of the call.
        known: what was right in earlier calls, which decides where it fits.
        config: its declarations of entries decide before.
        variant: how to read what else has the size of a width.

    Raises:
        AsItCame: sizes leave more than one reading that could be meant.
    """
    found: dict[str, Reading] = {}
    for path, leaf in entries.leaves.items():
        if isinstance(leaf, list | tuple) and len(leaf) == entries.rows:
            found[path] = Reading("row")
        elif isinstance(leaf, Tensor):
            found[path] = _reading(path, tuple(leaf.shape), entries, known, config, variant)
    return found


def _reading(
    path: str, shape: tuple[int, ...], entries: Entries, known: Readings, config: PadMinConfig, variant: Variant
) -> Reading:
    rows, width = entries.rows, entries.width
    if path == entries.mask:
        return reading_of(shape, 0, () if entries.kind == "lengths" else (len(shape) - 1,))
    declared = _declared(path, config)
    if declared is not None:
        own = reading_of(shape, declared.row_dim if declared.kind != "static" else None, declared.position_dims)
        if max((declared.row_dim, *declared.position_dims)) < len(shape) and own.fits(shape, rows, width):
            return own
    for before in known.get((path, len(shape)), []):
        if before.fits(shape, rows, width):
            return before
    by_row = [dim for dim, size in enumerate(shape) if size == rows]
    along = [dim for dim, size in enumerate(shape) if size == width]
    if not by_row:
        return reading_of(shape, None, () if variant.tables else tuple(along))
    for row_dim, position_dim in ((0, 1), (1, 0)):  # in front, where both are: the rest may be features
        if shape[row_dim : row_dim + 1] == (rows,) and shape[position_dim : position_dim + 1] == (width,):
            more = [dim for dim in along if dim > 1] if variant.squares else []
            return reading_of(shape, row_dim, (position_dim, *more))
    if len(by_row) == 1 and (rows != width or len(shape) == 1) and len(along) <= 1:
        return reading_of(shape, by_row[0], tuple(dim for dim in along if dim != by_row[0]))
    raise AsItCame(
        f"{path!r} has shape {shape} in a call of {rows} rows and width {width}, where sizes agree that may count "
        f"other things. Declare batch_schema={{{last_part(path)!r}: Field('position', row_dim=..., "
        "position_dims=(...,))}, 'row', or static_keys, or have a batch of other sizes come first"
    )


def _declared(path: str, config: PadMinConfig) -> Field | None:
    name = last_part(path)
    if path in config.static_keys or name in config.static_keys:
        return Field("static")
    field = config.fields.get(path, config.fields.get(name))
    return field if field is not None and field.kind in ("row", "position", "static") else None
