"""What one entry of a batch can be (`Field`), and what is known of a whole batch (`Schema`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, cast, get_args

from lightning_padmin.errors import ConfigError

Axis = Literal["input", "decoder"]
Kind = Literal["row", "position", "column", "unit", "static"]
Fill = float | Literal["continue"] | None
AXES: tuple[Axis, Axis] = ("input", "decoder")


@dataclass(frozen=True)
class Field:
    """What one entry of a batch holds.

    Attributes:
        kind: `"row"`, one slice per row (also lists); `"position"`, one slice per row and position, rolled and
            trimmed; `"column"`, one slice per row (also lists) of integers that are columns of the batch, which move
            with the row when it is rolled (see `columns`); `"unit"`, slices that belong to rows in varying number
            (images, tiles, patches), along the first dimension and in the order of the rows; `"static"`, shared by
            all rows.
        row_dim: the dimension that counts rows.
        position_dims: the dimensions that count positions; empty means the one after `row_dim`.
        axis: which of the two lengths of an encoder-decoder row positions run along, and columns are counted on.
        fill: value of slots beyond the batch's own width; `"continue"` counts on upward (position ids). None:
            unknown, so widths are not rounded beyond that width.
        counts: for units, the entry that says how many belong to each row: a row entry of integers, or another unit
            entry. A slice of several values (a grid of patches) stands for their product.
    """

    kind: Kind = "row"
    row_dim: int = 0
    position_dims: tuple[int, ...] = ()
    axis: Axis = "input"
    fill: Fill = None
    counts: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in get_args(Kind):
            raise ConfigError(f"Field(kind={self.kind!r}): expected 'row', 'position', 'column', 'unit' or 'static'")
        if not isinstance(self.axis, str) or self.axis not in AXES:
            raise ConfigError(f"Field(axis={self.axis!r}): expected 'input' or 'decoder'")
        if not _is_dimension(self.row_dim) or (self.kind == "unit" and self.row_dim != 0):
            raise ConfigError(f"Field(row_dim={self.row_dim!r}): expected an integer of at least 0, and 0 for units")
        if not isinstance(self.position_dims, Iterable) or getattr(self.position_dims, "ndim", 1) != 1:
            raise ConfigError(f"Field(position_dims={self.position_dims!r}): expected a tuple of dimensions")
        dims = tuple(self.position_dims) or ((self.row_dim + 1,) if self.kind == "position" else ())
        object.__setattr__(self, "position_dims", dims)
        if not all(_is_dimension(dim) for dim in dims) or len({self.row_dim, *dims}) != len(dims) + 1:
            raise ConfigError(f"Field(position_dims={self.position_dims!r}): expected dimensions other than row_dim")
        if self.kind != "position" and dims:
            raise ConfigError(f"Field(kind={self.kind!r}, position_dims={dims!r}): only 'position' has position_dims")
        if not (self.counts is None or isinstance(self.counts, str)) or (self.kind == "unit") != bool(self.counts):
            raise ConfigError(
                f"Field(kind={self.kind!r}, counts={self.counts!r}): a 'unit' names in counts the entry that says how "
                "many units each row has; other kinds have no counts"
            )
        known = self.fill is None or isinstance(self.fill, int | float)
        if not known and not (isinstance(self.fill, str) and self.fill == "continue"):
            raise ConfigError(f"Field(fill={self.fill!r}): expected a number, 'continue' or None")


def _is_dimension(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_field(key: str, value: object) -> Field:
    """A `Field` from what a configuration file can say: a Field, the name of a kind, or a mapping of its arguments."""
    where = f"batch_schema[{key!r}]={value!r}"
    if not isinstance(key, str):
        raise ConfigError(f"{where}: expected a string as the key, such as {str(key)!r}")
    if isinstance(value, Field):
        return value
    if not isinstance(value, str | Mapping):
        raise ConfigError(f"{where}: expected a Field, the name of a kind, or a mapping")
    arguments = {"kind": value} if isinstance(value, str) else dict(value)
    unknown = set(arguments) - set(Field.__dataclass_fields__)
    if unknown:
        raise ConfigError(f"{where}: a Field has no argument {min(map(str, unknown))!r}")
    try:
        return Field(**cast("dict[str, Any]", arguments))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


@dataclass(frozen=True)
class Schema:
    """The `Field` of every entry by path, and which entries say where real tokens and losses are.

    Attributes:
        fields: path -> Field, one for each leaf of the batch that is not None.
        rows: number of rows B.
        widths: width of the batch per axis, (L,) or (L, T) for encoder-decoder batches.
        mask: path of the mask of the input axis; decoder_mask, labels, loss_mask likewise, None where absent.
        row_shapes: trailing shape of each row entry that nobody declared, of this batch or of an earlier one.
        guessed: paths of row and column entries of this batch whose kind nobody declared.
    """

    fields: Mapping[str, Field]
    rows: int
    widths: tuple[int, ...]
    mask: str
    decoder_mask: str | None = None
    labels: str | None = None
    loss_mask: str | None = None
    row_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    guessed: frozenset[str] = frozenset()

    @property
    def labels_axis(self) -> Axis:
        """The axis that labels, or else the loss mask, run along; `"input"` where neither has positions."""
        entries = [self.fields[path] for path in (self.labels, self.loss_mask) if path is not None]
        return next((entry.axis for entry in entries if entry.kind == "position"), "input")

    @property
    def can_widen(self) -> bool:
        """Whether every positional entry has a fill, so that widths may be rounded beyond the batch's own."""
        return all(entry.fill is not None for entry in self.fields.values() if entry.kind == "position")

    def slots(self, multiple: int = 1) -> int:
        """Slots of the batch as it came, at the rounded width where rounding may go beyond the batch's own."""
        multiple = multiple if self.can_widen else 1
        return self.rows * sum(math.ceil(width / multiple) * multiple for width in self.widths)
