"""What the caller's batch is: nested containers of tensors, flattened, with a role for each entry.

The first step of the path. Everything after it works on roles and row tables, never on containers, so that no other
room has to know what a batch of a given framework looks like. Values are read and checked here, and nowhere changed.

    tree       containers of any kind, flattened and rebuilt
    fields     the roles: rows, positions, units, columns, shared
    schema     which entry has which role
    spec       what the user said of them
    validate   what shapes an entry may have
    columns    entries that hold numbers of columns
    units      entries with several items per row (images)
    row_table  where each row's tokens are and what it weighs: one copy from the device to the host
    pooling    several batches as one
"""

from lightning_padmin.batch.columns import could_be_columns, has_ends, holds_integers, moved, moved_item
from lightning_padmin.batch.fields import AXES, Axis, Field, Schema, parse_field
from lightning_padmin.batch.pooling import pool
from lightning_padmin.batch.row_table import RowTable, measure, row_table_of
from lightning_padmin.batch.schema import infer_schema, schema_of
from lightning_padmin.batch.spec import BatchSpec, LossSpec
from lightning_padmin.batch.tree import FlatBatch, child_of, find_path, flatten, iter_leaves, last_part, map_leaves
from lightning_padmin.batch.units import unit_index

__all__ = [
    "AXES",
    "Axis",
    "BatchSpec",
    "Field",
    "FlatBatch",
    "LossSpec",
    "RowTable",
    "Schema",
    "child_of",
    "could_be_columns",
    "find_path",
    "flatten",
    "has_ends",
    "holds_integers",
    "infer_schema",
    "iter_leaves",
    "last_part",
    "map_leaves",
    "measure",
    "moved",
    "moved_item",
    "parse_field",
    "pool",
    "row_table_of",
    "schema_of",
    "unit_index",
]
