"""A source - file, folder or data set of the hub - as the lengths of its rows."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_padmin.architectures import UsageError, refuse_special_files, why_not_loaded
from lightning_padmin.diagnose.arrow import open_arrow, saved_files
from lightning_padmin.diagnose.csv_rows import open_csv, open_text
from lightning_padmin.diagnose.fields import Columns, Part, choose_parts
from lightning_padmin.diagnose.json_rows import open_json
from lightning_padmin.diagnose.lines import Tell
from lightning_padmin.diagnose.measure import measured
from lightning_padmin.diagnose.problems import DiagnoseError, first_line, needed, refuse_special
from lightning_padmin.diagnose.tables import Chunk, Table, table_of_records
from lightning_padmin.printing import guard_logs

Lens: TypeAlias = NDArray[np.int32]
FORMATS: Mapping[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "text": (".txt",),
    "npy": (".npy",),
}
_SUFFIXES = {suffix: name for name, suffixes in FORMATS.items() for suffix in suffixes}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of the rows of a source, in its order.

    Attributes:
        table: (n, 1) int32 in tokens, or (n, 2): prompt and completion.
        source: file, folder or hub id.
        how: what was measured, in words.
        skipped: rows of 0 tokens that were left out.
    """

    table: Lens
    source: str = "lengths"
    how: str = "lengths as given"
    skipped: int = 0

    @property
    def total(self) -> NDArray[np.int64]:
        """(n,) tokens of each row, parts added."""
        total: NDArray[np.int64] = self.table.sum(axis=1, dtype=np.int64)
        return total


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where rows are and how to read them.

    Attributes:
        name: file, folder or hub id.
        columns: what the user says of the columns.
        tokenizer: folder or hub id of a tokenizer; needed for text.
        format: a key of `FORMATS`; None: by the file's suffix.
        split, subset: of a hub data set, or the split of a saved DatasetDict.
        skip_empty: leave out rows of 0 tokens, which are an error otherwise.
        trust_remote_code: whether Python code that lies beside the tokenizer may run.
    """

    name: str
    columns: Columns = field(default_factory=Columns)
    tokenizer: str | None = None
    format: str | None = None
    split: str | None = None
    subset: str | None = None
    skip_empty: bool = False
    trust_remote_code: bool = False


def read_lengths(source: Source, tell: Tell | None = None) -> Lengths:
    """Reads the length of every row; of a file only a small piece is in memory at a time.

    Args:
        source: what to read.
        tell: called now and then with the number of bytes read.

    Raises:
        DiagnoseError: the source cannot be read, or a row has no length; one line that names file, row, value and fix.
    """
    path = Path(source.name)
    refuse_special(path)
    if source.format == "npy" or (source.format is None and path.suffix == ".npy"):
        return _from_npy(path)
    trust = {"trust_remote_code": True} if source.trust_remote_code else {}
    tokenizer = None if source.tokenizer is None else load_tokenizer(source.tokenizer, **trust)
    has_end_mark = getattr(tokenizer, "eos_token_id", None) is not None
    table = open_table(source, tell)
    parts = choose_parts(table, source.columns, has_end_mark)
    pieces, skipped = [], 0
    for lengths, empty in measured(table, parts, tokenizer, source.skip_empty):
        pieces.append(lengths)
        skipped += empty
    rows = np.concatenate(pieces)
    if not len(rows):
        raise DiagnoseError(f"{table.source}: all {skipped} rows have 0 tokens; name the right column")
    return Lengths(rows, table.source, _how(parts, source.tokenizer), skipped)


def _how(parts: Sequence[Part], tokenizer: str | None) -> str:
    words = {
        "number": "lengths in {}",
        "ids": "token ids in {}",
        "masked ids": "attended tokens of {}",
        "text": f"tokens of {{}}, counted with {tokenizer}",
        "chat text": f"tokens of {{}} as a chat, counted with {tokenizer}",
        "completion text": f"tokens of {{}}, counted with {tokenizer}",
        "messages": f"tokens of the chats in {{}}, counted with {tokenizer}",
    }
    end = {0: "", 1: " and an end mark"}
    return "; ".join(words[part.kind].format(part.named) + end[part.extra] for part in parts)


def open_table(source: Source, tell: Tell | None = None) -> Table:
    """Opens a source and looks at its first row.

    Raises:
        DiagnoseError: it is not there, of an unknown kind, or empty.
    """
    path = Path(source.name)
    if path.is_dir():
        return _open_folder(path, source, tell)
    if path.exists():
        return _open_file(path, source, tell)
    looks_like_file = path.is_absolute() or _suffix(path) in _SUFFIXES or not _HUB_ID.fullmatch(source.name)
    if looks_like_file or source.format is not None:
        raise DiagnoseError(f"{source.name}: there is no such file or folder; check the path")
    return _open_hub(source)


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _open_file(path: Path, source: Source, tell: Tell | None) -> Table:
    kind = source.format or _SUFFIXES.get(_suffix(path))
    if kind in ("parquet", "arrow"):
        if path.suffix == ".gz":
            raise DiagnoseError(f"{path}: {kind} files packed with gzip are not read; unpack it")
        return open_arrow([path], str(path))
    if kind == "jsonl":
        return open_json(path, tell)
    if kind == "csv":
        return open_csv(path, tell, "\t" if _suffix(path) == ".tsv" else None)
    if kind == "text":
        return open_text(path, source.tokenizer is not None, tell)
    known = " ".join(_SUFFIXES)
    raise DiagnoseError(f"{path}: is of an unknown kind; known suffixes are {known}, or say --format")


def _open_folder(folder: Path, source: Source, tell: Tell | None) -> Table:
    """What `save_to_disk` wrote, or data files of one kind."""
    saved = saved_files(folder, source.split)
    if saved is not None:
        return open_arrow(saved[0], saved[1])
    files = sorted(path for path in folder.iterdir() if path.is_file() and _suffix(path) in _SUFFIXES)
    kinds = {_SUFFIXES[_suffix(path)] for path in files} & {"parquet", "arrow"}
    if len(kinds) != 1 or len(files) != sum(_SUFFIXES[_suffix(path)] in kinds for path in files):
        raise DiagnoseError(
            f"{folder}: is neither a folder of datasets.save_to_disk nor one of Parquet files only; name one file"
        )
    return open_arrow(files, str(folder))


def _open_hub(source: Source) -> Table:
    """Rows of a hub data set, streamed."""
    datasets = needed("datasets", f"{source.name} is no file here, and reading it from the hub")
    split = source.split or "train"
    # Releases before 4 run a data set's own script if they are told to, and ask if nothing is said.
    options = {"trust_remote_code": False} if _asks(datasets.load_dataset) else {}
    # Its attempts to reach the hub are told line by line; one line at the end says as much.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    guard_logs("datasets")
    try:
        rows = datasets.load_dataset(source.name, source.subset, split=split, streaming=True, **options)
        next(iter(rows))
    except Exception as error:  # of many kinds: network, rights, a script, an unknown split
        raise DiagnoseError(
            f"{source.name}: is no file here, and the hub's data set with split {split!r} cannot be read "
            f"({first_line(error)}); check the name, --split and --subset"
        ) from error

    def records() -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        try:
            for index, row in enumerate(rows):
                # The size of a row is not known; this one makes chunks of 256 rows.
                yield index + 1, 2**15, row
        except Exception as error:
            raise DiagnoseError(f"{source.name}: reading from the hub broke off ({first_line(error)})") from error

    return table_of_records(source.name, "row", records)


def _asks(load: Any) -> bool:
    return "trust_remote_code" in inspect.signature(load).parameters


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """A tokenizer of transformers.

    Args:
        name: folder or hub id.
        trust_remote_code: whether Python code that lies beside it may run. Nobody is asked.

    Raises:
        DiagnoseError: transformers is missing, or there is no such tokenizer.
    """
    transformers = needed("transformers", f"--tokenizer {name}")
    try:
        refuse_special_files(name)
        guard_logs("transformers", "huggingface_hub")
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except UsageError as error:
        raise DiagnoseError(f"--tokenizer {error}") from error
    except Exception as error:  # of many kinds, by what is wrong with the folder or the network
        why = why_not_loaded(error, trust_remote_code)
        raise DiagnoseError(f"--tokenizer {name}: is no folder or hub id of a tokenizer ({why})") from error


def _from_npy(path: Path) -> Lengths:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header is parsed as Python, with whatever that raises
        raise DiagnoseError(f"{path}: cannot be read as an array of numpy ({first_line(error)})") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        what = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise DiagnoseError(f"{path}: has {what}; expected integers (rows,), or (rows, 2) for prompt and completion")
    table = array[:, None] if array.ndim == 1 else array
    if table.shape[1] not in (1, 2) or not len(table):
        raise DiagnoseError(
            f"{path}: has shape {array.shape}; expected (rows,), or (rows, 2) for prompt and completion"
        )

    def chunks(fields: Sequence[str]) -> Iterator[Chunk]:
        for start in range(0, len(table), 2**16):
            piece = table[start : start + 2**16]
            yield Chunk(range(start + 1, start + 1 + len(piece)), {f: piece[:, int(f)].tolist() for f in fields})

    names = [str(column) for column in range(table.shape[1])]
    parts = [Part((name,), "number") for name in names]
    opened = Table(str(path), "row", dict.fromkeys(names, 0), chunks)
    rows = np.concatenate([lengths for lengths, _ in measured(opened, parts, None)])
    return Lengths(rows, str(path), "lengths as given")
