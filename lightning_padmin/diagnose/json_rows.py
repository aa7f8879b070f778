"""Rows of JSON: one value per line, or one array of all rows, read piece by piece."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_padmin.diagnose.lines import LONGEST_LINE, Tell, first_character, read_blocks, read_lines
from lightning_padmin.diagnose.problems import DiagnoseError, first_line, shown
from lightning_padmin.diagnose.tables import Records, Table, table_of_records

_SEPARATORS = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()


def open_json(path: Path, tell: Tell | None = None) -> Table:
    """One JSON value per line, or one array of all rows; a row is an object, a length, token ids or a text.

    Raises:
        DiagnoseError: empty, or no JSON; names the line or row.
    """
    if first_character(path) == "[" and not _is_row_per_line(path):
        return table_of_records(str(path), "row", lambda: _array_records(path, tell))
    return table_of_records(str(path), "line", lambda: _line_records(path, tell))


def _is_row_per_line(path: Path) -> bool:
    """Whether lines are arrays of token ids: the first one is a whole array of numbers, and another follows."""
    lines = [text for _, text in itertools.islice(((n, t) for n, t in read_lines(path) if t.strip()), 2)]
    try:
        first = json.loads(lines[0])
    except (ValueError, RecursionError):
        return False
    return len(lines) > 1 and all(isinstance(each, int) for each in first)


def _line_records(path: Path, tell: Tell | None) -> Records:
    for number, line in read_lines(path, tell):
        if line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DiagnoseError(_no_json(path, number, line, error)) from None
        yield number, len(line), _as_record(value, f"{path}, line {number}")


def _no_json(path: Path, number: int, line: str, error: Exception) -> str:
    reason = _reason(error)
    fix = "write one row per line" if line.strip() in "{[" else "one JSON object per line was expected"
    if not line.endswith("\n"):
        fix = "the last line may be cut off"
    return f"{path}, line {number}: is not JSON ({reason}) in {shown(line.strip())}; {fix}"


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "too many levels" if isinstance(error, RecursionError) else first_line(error)  # a number of too many digits


def _as_record(value: Any, where: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, bool) or value is None:
        raise DiagnoseError(f"{where}: is {json.dumps(value)}; a row is an object, a length, token ids or a text")
    name = "input_ids" if isinstance(value, list) else "text" if isinstance(value, str) else "length"
    return {name: value}


def _array_records(path: Path, tell: Tell | None) -> Records:
    """Elements of the array, each parsed as soon as its text is there, so the whole is never in memory."""
    blocks = read_blocks(path, tell)
    text, at, place = next(blocks).lstrip()[1:], 0, 0
    while True:
        at = _separators_end(text, at)
        if text[at : at + 1] == "]":
            if rest := "".join([text[at + 1 :], *itertools.islice(blocks, 1)]).strip():
                raise DiagnoseError(f"{path}: goes on after the array, with {shown(rest)}; write one row per line")
            return
        value, end, reason = _element(text, at)
        if end < len(text):
            place += 1
            yield place, end - at, _as_record(value, f"{path}, row {place}")
            at = end
            continue
        # Cut off by the end of the block, it may be. As much again is read each time, so long elements stay linear.
        text, at = text[at:], 0
        more = list(_at_least(blocks, len(text)))
        if not more or len(text) > LONGEST_LINE:
            found = f"{shown(text)} is no whole row ({reason})" if text else "the file ends and the array does not"
            raise DiagnoseError(f"{path}, row {place + 1}: {found}; it is damaged or cut off there")
        text = "".join([text, *more])


def _separators_end(text: str, at: int) -> int:
    match = _SEPARATORS.match(text, at)
    return match.end() if match else at


def _element(text: str, at: int) -> tuple[Any, int, str]:
    """The JSON value that begins there, its end, and what is wrong; the end of the text if it is not whole."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        return None, len(text), _reason(error)
    return value, end, "the file ends there"


def _at_least(blocks: Iterator[str], size: int) -> Iterator[str]:
    read = 0
    for block in blocks:
        yield block
        read += len(block)
        if read >= size:
            return
