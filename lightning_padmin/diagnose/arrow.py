"""Parquet and Arrow files, and folders that `datasets.save_to_disk` has written, batch by batch through pyarrow."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_padmin.diagnose.problems import DiagnoseError, first_line, needed, refuse_special, shown
from lightning_padmin.diagnose.tables import Chunk, Table
from lightning_padmin.printing import listed

_ROWS = 1024  # at once: rows of token ids may be long
_MOST_VALUES, _VALUES_PER_BYTE = 2**27, 64  # token ids and lengths that differ take more than a bit each


def open_arrow(files: Sequence[Path], source: str) -> Table:
    """Rows of one or more Parquet or Arrow files, as one table; rows are counted from 1 through all files.

    Raises:
        DiagnoseError: pyarrow is missing, a file cannot be read, or there are no rows.
    """
    pyarrow = needed("pyarrow", f"reading {source}")
    for batch in _batches(pyarrow, files, None):
        if batch.num_rows:
            first: Mapping[str, Any] = batch.slice(0, 1).to_pylist()[0]
            return Table(source, "row", first, lambda fields: _chunks(pyarrow, files, fields))
    raise DiagnoseError(f"{source}: is empty, it has no rows")


def _chunks(pyarrow: Any, files: Sequence[Path], fields: Sequence[str]) -> Iterator[Chunk]:
    done = 0
    for batch in _batches(pyarrow, files, list(fields)):
        # Arrow files come in batches of any size.
        for start in range(0, batch.num_rows, _ROWS):
            piece = batch.slice(start, _ROWS)
            yield Chunk(range(done + 1, done + 1 + piece.num_rows), {field: piece.column(field) for field in fields})
            done += piece.num_rows


def _batches(pyarrow: Any, files: Sequence[Path], fields: list[str] | None) -> Iterator[Any]:
    for path in files:
        refuse_special(path)
        try:
            with path.open("rb") as file:
                is_parquet = file.read(4) == b"PAR1"
            for batch in _parquet(path, fields) if is_parquet else _ipc(pyarrow, path):
                batch = batch.select(batch.schema.names if fields is None else fields)
                # Damaged offsets would be followed to anywhere in memory.
                batch.validate(full=True)
                yield batch
        except (OSError, KeyError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            kind = "Parquet nor Arrow" if not isinstance(error, FileNotFoundError) else "there"
            raise DiagnoseError(f"{path}: is neither {kind}, or damaged ({first_line(error)})") from error


def _parquet(path: Path, fields: list[str] | None) -> Iterator[Any]:
    parquet = needed("pyarrow.parquet", f"reading {path}")
    with parquet.ParquetFile(path, memory_map=True) as file:
        _refuse_bomb(path, file.metadata)
        yield from file.iter_batches(_ROWS, columns=fields)


def _refuse_bomb(path: Path, metadata: Any) -> None:
    """Raises DiagnoseError for a file of a few bytes that says it has billions of values, which are all the same."""
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    values = sum(group.column(index).num_values for group in groups for index in range(group.num_columns))
    if values > max(_MOST_VALUES, _VALUES_PER_BYTE * path.stat().st_size):
        raise DiagnoseError(
            f"{path}: has {values:,} values in {path.stat().st_size:,} bytes; it is damaged, or no data"
        )


def _ipc(pyarrow: Any, path: Path) -> Iterator[Any]:
    """The file format, or the stream format, in which `datasets` writes."""
    with pyarrow.memory_map(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(file)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(file)


def saved_files(folder: Path, split: str | None) -> tuple[list[Path], str] | None:
    """The Arrow files of a folder written by `save_to_disk`, in order, and the folder of the split.

    Args:
        folder: of a Dataset or a DatasetDict.
        split: which one of a DatasetDict; None: "train", or the only one.

    Returns:
        None if it is no such folder.

    Raises:
        DiagnoseError: the split is not there, or the folder's own notes cannot be read.
    """
    if (folder / "dataset_dict.json").is_file():
        found = _json(folder / "dataset_dict.json").get("splits", [])
        splits = [str(each) for each in found] if isinstance(found, list) else []
        wanted = split or (splits[0] if len(splits) == 1 else "train")
        if wanted not in splits:
            raise DiagnoseError(f"{folder}: has no split {wanted!r}, it has {listed(splits)}; choose one with --split")
        folder = _inside(folder, wanted)
    if not (folder / "state.json").is_file():
        return None
    state = _json(folder / "state.json")
    if state.get("_indices_files"):
        raise DiagnoseError(f"{folder}: has rows selected by an index; flatten_indices() before save_to_disk")
    try:
        names = [str(each["filename"]) for each in state.get("_data_files", [])]
    except (TypeError, KeyError) as error:
        raise DiagnoseError(f"{folder}: its state.json does not name its files; save the data set again") from error
    return [_inside(folder, name) for name in names], str(folder)


def _inside(folder: Path, name: str) -> Path:
    """A file or folder right inside of a folder, which a note in it names."""
    if name in ("", ".", "..") or "/" in name or os.sep in name:
        raise DiagnoseError(f"{folder}: names {shown(name)} as its own, which is elsewhere; save the data set again")
    return folder / name


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise DiagnoseError(f"{path}: cannot be read ({first_line(error)}); save the data set again") from error
    if not isinstance(found, dict):
        raise DiagnoseError(f"{path}: is no JSON object; save the data set again")
    return found
