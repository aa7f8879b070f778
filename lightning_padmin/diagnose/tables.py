"""Rows of a source as chunks of columns: what all formats are read into.

file -> Table (column names, the first row) -> chunks of the wanted columns -> lengths (measure.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_padmin.diagnose.problems import DiagnoseError
from lightning_padmin.printing import listed

CHUNK_ROWS = 8192
CHUNK_CHARACTERS = 8 * 2**20  # token ids take some ten times as much memory as Python integers


@dataclass(frozen=True)
class Chunk:
    """Some rows.

    Attributes:
        places: line or row number of each row, counted from 1.
        columns: values of each wanted column, as a list, or as an array of pyarrow.
    """

    places: Sequence[int]
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A source of rows that has been opened and not yet read.

    Attributes:
        source: for messages.
        unit: what places count: "line" or "row".
        first: the first row, by column.
        chunks: reads the columns named, from the start.
        is_text: values are text even where they are numbers (CSV).
    """

    source: str
    unit: str
    first: Mapping[str, Any]
    chunks: Callable[[Sequence[str]], Iterator[Chunk]]
    is_text: bool = False

    def where(self, place: int) -> str:
        """A row, for messages."""
        return f"{self.source}, {self.unit} {place}"


Records = Iterable[tuple[int, int, Mapping[str, Any]]]  # place, characters, row


def table_of_records(source: str, unit: str, records: Callable[[], Records]) -> Table:
    """A table of rows that come one by one as mappings.

    Raises:
        DiagnoseError: there is no row.
    """
    for _, _, first in records():
        return Table(source, unit, first, lambda fields: _in_chunks(source, unit, records(), fields))
    raise DiagnoseError(f"{source}: is empty, it has no rows")


def _in_chunks(source: str, unit: str, records: Records, fields: Sequence[str]) -> Iterator[Chunk]:
    places: list[int] = []
    columns: dict[str, list[Any]] = {field: [] for field in fields}
    size = 0
    for place, characters, record in records:
        for field, column in columns.items():
            if field not in record:
                has = listed(record) or "nothing"
                raise DiagnoseError(f"{source}, {unit} {place}: has no {field!r}, it has {has}; every row needs it")
            column.append(record[field])
        places.append(place)
        size += characters
        if len(places) == CHUNK_ROWS or size >= CHUNK_CHARACTERS:
            yield Chunk(places, columns)
            places, columns, size = [], {field: [] for field in fields}, 0
    if places:
        yield Chunk(places, columns)
