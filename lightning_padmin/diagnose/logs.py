"""Metrics logs: how long steps take, and what padding they report.

Lightning's `metrics.csv`, `trainer_state.json` of transformers, and any JSONL or CSV with a row per logging step.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_padmin.diagnose.csv_rows import MOST_COLUMNS
from lightning_padmin.diagnose.lines import LONGEST_LINE, read_lines
from lightning_padmin.diagnose.problems import DiagnoseError, refuse_special, shown
from lightning_padmin.printing import listed

# Names of a step's time in seconds, the most exact first; a prefix such as "train/" may stand before them.
TIME_COLUMNS = ("step_time", "step_seconds", "seconds_per_step", "time_per_step", "train_step_time", "iteration_time")
_PREFIXES = ("", "train/", "time/", "perf/", "timing/", "train_")
_SUFFIXES = ("", "_step")

Entry = tuple[str, Mapping[str, Any]]  # where it stands, its values


@dataclass(frozen=True)
class Times:
    """Seconds per step.

    Attributes:
        column: where they were.
        count: logged values.
        mean, median, p10, p90: of them, in seconds.
        spread: standard deviation over mean.
    """

    column: str
    count: int
    mean: float
    median: float
    p10: float
    p90: float
    spread: float


@dataclass(frozen=True)
class Padding:
    """Padding by counts.

    Attributes:
        source: the columns, in words.
        entries: log entries that had them.
        real: sum of real tokens (or of a number proportional to it).
        slots: sum of slots, in the same unit.
    """

    source: str
    entries: int
    real: float
    slots: float

    @property
    def waste(self) -> float:
        """1 - real / slots."""
        return 1 - self.real / self.slots


@dataclass(frozen=True)
class LogReport:
    """What `padmin diagnose --log FILE` has found.

    Attributes:
        source: the file.
        entries: rows of the log.
        times: None if no column is a step time.
        before: padding of the batches as they came.
        after: padding of what was run, with lightning-padmin.
        completions: padding of completions alone, by TRL's mean and longest length.
        ratios: columns of waste without the counts that could merge them, with (least, most).
        columns: names of all numbers.
    """

    source: str
    entries: int
    times: Times | None
    before: Padding | None
    after: Padding | None
    completions: Padding | None
    ratios: tuple[tuple[str, float, float], ...]
    columns: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = asdict(self)
        for name in ("before", "after", "completions"):
            each = getattr(self, name)
            if each is not None:
                found[name]["waste"] = each.waste
        return found


def read_log(path: Path, time_column: str | None = None) -> LogReport:
    """Reads a log and merges what it says.

    Args:
        path: `metrics.csv`, `trainer_state.json`, or a JSONL or CSV file.
        time_column: seconds per step; None: one with a well-known name.

    Raises:
        DiagnoseError: the file cannot be read, has no entries, or a value of the step time is no positive number.
    """
    entries = list(_entries(path))
    if not entries:
        raise DiagnoseError(f"{path}: is empty, it has no log entries")
    names = list(dict.fromkeys(name for _, entry in entries for name in entry))
    column = time_column if time_column is not None else _time_column(names)
    if time_column is not None and time_column not in names:
        raise DiagnoseError(f"--time-column {time_column}: {path} has no such column, it has {listed(names)}")
    return LogReport(
        str(path),
        len(entries),
        None if column is None else _times(entries, column),
        _merged(entries, names, "waste_before"),
        _merged(entries, names, "waste"),
        _completions(entries, names),
        tuple(_bare_ratios(entries, names)),
        tuple(names),
    )


def _entries(path: Path) -> Iterator[Entry]:
    refuse_special(path, "--log ")
    if not path.is_file():
        raise DiagnoseError(f"--log {path}: there is no such file; check the path")
    lines = read_lines(path)
    _, head = next(lines, (0, ""))
    if head.lstrip()[:1] in ("{", "["):
        yield from _json_entries(path)
        return
    csv.field_size_limit(LONGEST_LINE)
    reader = csv.DictReader(itertools.chain([head], (line for _, line in lines)), strict=True)
    try:
        if len(reader.fieldnames or ()) > MOST_COLUMNS:
            raise DiagnoseError(f"{path}, line 1: has {len(reader.fieldnames or ()):,} columns, which is no log")
        for row in reader:
            if None in row or None in row.values():
                raise DiagnoseError(f"{path}, line {reader.line_num}: has another number of fields than the header")
            # Loggers leave fields empty at steps that did not log them.
            yield f"{path}, line {reader.line_num}", {name: text for name, text in row.items() if text != ""}
    except csv.Error as error:
        raise DiagnoseError(f"{path}, line {reader.line_num}: is not CSV ({error})") from None


def _json_entries(path: Path) -> Iterator[Entry]:
    """One object per line, or one document: `log_history` of a trainer state, or a list of entries."""
    texts = list(read_lines(path))
    try:
        document = json.loads("".join(text for _, text in texts))
    except (ValueError, RecursionError):
        for number, text in texts:
            if not text.isspace():
                yield f"{path}, line {number}", _object(text, f"{path}, line {number}")
        return
    history = document.get("log_history", [document]) if isinstance(document, dict) else document
    if not isinstance(history, list) or not all(isinstance(each, dict) for each in history):
        raise DiagnoseError(f"{path}: is no log; expected log_history, or a list of entries")
    for index, each in enumerate(history, start=1):
        yield f"{path}, entry {index}", each


def _object(text: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise DiagnoseError(f"{where}: is not JSON: {shown(text.strip())}; the file may be cut off") from None
    if not isinstance(value, dict):
        raise DiagnoseError(f"{where}: is {shown(value)}; a log has one object per line")
    return value


def _time_column(names: Sequence[str]) -> str | None:
    candidates = (f"{p}{name}{s}" for name in TIME_COLUMNS for p in _PREFIXES for s in _SUFFIXES)
    return next((each for each in candidates if each in names), None)


def _number(where: str, name: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DiagnoseError(f"{where}: {name} is {shown(value)}, expected a number")
    return number


def _times(entries: Sequence[Entry], column: str) -> Times:
    seconds = []
    for where, entry in entries:
        if column in entry:
            value = _number(where, column, entry[column])
            if value <= 0:
                raise DiagnoseError(f"{where}: {column} is {value:g}, which is no duration; name another --time-column")
            seconds.append(value)
    found = np.array(seconds)
    p10, median, p90 = np.percentile(found, [10, 50, 90]).tolist()
    mean = float(found.mean())
    spread = float(found.std(ddof=1)) / mean if len(found) > 1 else 0.0
    return Times(column, len(found), mean, median, p10, p90, spread)


def _padmin_names(names: Sequence[str], wanted: Sequence[str]) -> list[str] | None:
    """The columns of this library's metrics, whatever a logger has put around their names."""
    there = set(names)
    for suffix in _SUFFIXES:
        for prefix in dict.fromkeys(name.partition("padmin/")[0] for name in names if "padmin/" in name):
            found = [f"{prefix}padmin/{each}{suffix}" for each in wanted]
            if all(each in there for each in found):
                return found
    return None


def _merged(entries: Sequence[Entry], names: Sequence[str], kind: str) -> Padding | None:
    """Padding over the whole log, by counts: a mean of logged ratios would weight short steps like long ones."""
    wanted = ["real_tokens", "slots"] if kind == "waste" else ["real_tokens", "waste_before"]
    columns = _padmin_names(names, wanted)
    if columns is None:
        return None
    real = slots = 0.0
    count = 0
    for where, entry in entries:
        if all(column in entry for column in columns):
            tokens, other = (_number(where, column, entry[column]) for column in columns)
            # Slots as the batches came are not logged; the ratio and its tokens give them back.
            own = other if kind == "waste" else tokens / (1 - other) if other < 1 else math.nan
            if not 0 < tokens <= own * (1 + 1e-6):
                raise DiagnoseError(f"{where}: {columns[0]} {tokens:g} and {columns[1]} {other:g} do not go together")
            real, slots, count = real + tokens, slots + own, count + 1
    return Padding(" and ".join(columns), count, real, slots) if count else None


def _completions(entries: Sequence[Entry], names: Sequence[str]) -> Padding | None:
    """TRL's GRPO logs the mean and the longest completion of a generation; padded to the longest, the ratio is full.

    Each entry stands for equally many rows, so sums of means and of maxima make a ratio of counts.
    """
    columns = ("completions/mean_length", "completions/max_length")
    if not set(columns) <= set(names):
        return None
    pairs = [
        (_number(where, columns[0], entry[columns[0]]), _number(where, columns[1], entry[columns[1]]))
        for where, entry in entries
        if set(columns) <= set(entry)
    ]
    real, slots = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    return Padding(" and ".join(columns), len(pairs), real, slots) if pairs and slots else None


def _bare_ratios(entries: Sequence[Entry], names: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    """Columns of waste whose counts were not logged: their range is told, their mean would be wrong."""
    needed = {"waste": ["real_tokens", "slots"], "waste_before": ["real_tokens", "waste_before"]}
    merged = {last: _padmin_names(names, wanted) is not None for last, wanted in needed.items()}
    for name in names:
        last = name.rpartition("/")[2].removesuffix("_step")
        if last in ("waste", "waste_before", "padding_ratio", "padding_waste", "pad_ratio"):
            if "padmin/" in name and merged.get(last, False):
                continue
            values = [_number(where, name, entry[name]) for where, entry in entries if name in entry]
            yield name, min(values), max(values)
