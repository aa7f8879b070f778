"""Rows of CSV files and of plain text."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from lightning_padmin.diagnose.lines import LONGEST_LINE, Tell, read_lines
from lightning_padmin.diagnose.problems import DiagnoseError, shown
from lightning_padmin.diagnose.tables import CHUNK_CHARACTERS, CHUNK_ROWS, Chunk, Table

MOST_COLUMNS = 100_000


def open_csv(path: Path, tell: Tell | None = None, delimiter: str | None = None) -> Table:
    """A file with a header line; or a single column of numbers without one, called "length".

    Raises:
        DiagnoseError: empty, or a line that has not as many fields as the header.
    """
    rows = _csv_rows(path, None, delimiter)
    _, header = next(rows, (0, []))
    if not header:
        raise DiagnoseError(f"{path}: is empty, it has no rows")
    if len(header) > MOST_COLUMNS:
        raise DiagnoseError(f"{path}, line 1: has {len(header):,} columns; write one row per line, with a header line")
    has_header = not all(_is_number(name) for name in header)
    if not has_header and len(header) > 1:
        raise DiagnoseError(f"{path}, line 1: has numbers and no column names; add a header line")
    names = header if has_header else ["length"]
    _, row = next(rows, (0, [])) if has_header else (1, header)
    if not row:
        raise DiagnoseError(f"{path}: is empty, it has a header line and no rows")
    first = dict(zip(names, row, strict=True))
    return Table(
        str(path), "line", first, lambda fields: _csv_chunks(path, tell, delimiter, names, has_header, fields), True
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _csv_rows(path: Path, tell: Tell | None, delimiter: str | None) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of each row that is not blank, all with as many fields as the first."""
    lines = (text for _, text in read_lines(path, tell))
    head = next(lines, "")
    if delimiter is None:
        delimiter = "\t" if "\t" in head and "," not in head else ";" if ";" in head and "," not in head else ","
    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader(itertools.chain([head], lines), delimiter=delimiter, strict=True)
    count = 0
    try:
        for row in reader:
            if len(row) != count:
                if not row:
                    continue
                if count:
                    raise DiagnoseError(
                        f"{path}, line {reader.line_num}: has {len(row)} fields and the header {count}: {shown(row)}; "
                        "quote fields that contain the separator"
                    )
                count = len(row)
            yield reader.line_num, row
    except csv.Error as error:
        raise DiagnoseError(f"{path}, line {reader.line_num}: is not CSV ({error})") from None


def _csv_chunks(
    path: Path, tell: Tell | None, delimiter: str | None, names: list[str], has_header: bool, fields: Sequence[str]
) -> Iterator[Chunk]:
    for field in fields:
        if names.count(field) > 1:
            raise DiagnoseError(f"{path}, line 1: has {names.count(field)} columns {shown(field)}; rename one of them")
    pick = itemgetter(*(names.index(field) for field in fields))
    rows = _csv_rows(path, tell, delimiter)
    for _ in range(has_header):
        next(rows)
    places: list[int] = []
    picked: list[Any] = []  # a text each, or a tuple where there are several fields
    size = 0
    for place, row in rows:
        places.append(place)
        picked.append(pick(row))
        size += len(picked[-1]) if len(fields) == 1 else sum(map(len, picked[-1]))
        if len(places) == CHUNK_ROWS or size >= CHUNK_CHARACTERS:
            yield _csv_chunk(fields, places, picked)
            places, picked, size = [], [], 0
    if places:
        yield _csv_chunk(fields, places, picked)


def _csv_chunk(fields: Sequence[str], places: list[int], picked: list[Any]) -> Chunk:
    columns = [picked] if len(fields) == 1 else [list(column) for column in zip(*picked, strict=True)]
    return Chunk(places, dict(zip(fields, columns, strict=True)))


def open_text(path: Path, has_tokenizer: bool, tell: Tell | None = None) -> Table:
    """One length per line; with a tokenizer, one text per line.

    Raises:
        DiagnoseError: empty.
    """
    name = "text" if has_tokenizer else "length"
    filled = ((number, line.strip()) for number, line in read_lines(path) if not line.isspace())
    _, first = next(filled, (0, ""))
    if not first:
        raise DiagnoseError(f"{path}: is empty, it has no rows")
    return Table(str(path), "line", {name: first}, lambda fields: _text_chunks(path, tell, name), is_text=True)


def _text_chunks(path: Path, tell: Tell | None, name: str) -> Iterator[Chunk]:
    places: list[int] = []
    texts: list[str] = []
    size = 0
    for number, line in read_lines(path, tell):
        if line.isspace():
            continue
        places.append(number)
        texts.append(line.rstrip("\r\n"))
        size += len(line)
        if len(places) == CHUNK_ROWS or size >= CHUNK_CHARACTERS:
            yield Chunk(places, {name: texts})
            places, texts, size = [], [], 0
    if places:
        yield Chunk(places, {name: texts})
