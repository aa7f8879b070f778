"""Lines of a text file, in bounded memory, each with its number; gzip is unpacked on the way."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from lightning_padmin.diagnose.problems import DiagnoseError, first_line, refuse_special, shown

LONGEST_LINE = 64 * 2**20
_GZIP = b"\x1f\x8b"
_MOST_UNPACKED, _MOST_TIMES = 256 * 2**20, 100  # text of data sets is packed to a third, of numbers to a tenth
_EVERY = 4096  # lines between two reports of progress

# Told how many bytes of the file have been read.
Tell = Callable[[int], None]


def read_lines(path: Path, tell: Tell | None = None) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of each line, counted from 1, line ends included.

    Args:
        path: a UTF-8 file, or a gzip of one.
        tell: called now and then with the number of bytes read from the disk.

    Raises:
        DiagnoseError: the file cannot be opened or unpacked; or a line is longer than 64 MB, has NUL bytes or is not
            UTF-8. Names file, line and fix.
    """
    number = 0
    with _open(path) as (raw, unpacked):
        try:
            # One call of `readline` per line and little else: files have tens of millions of them.
            for line in iter(partial(unpacked.readline, LONGEST_LINE + 1), b""):
                number += 1
                if number % _EVERY == 0 and tell is not None:
                    tell(raw.tell())
                if number % _EVERY == 0 or len(line) > 2**20:
                    _refuse_bomb(path, raw, unpacked)
                if len(line) > LONGEST_LINE or b"\0" in line:
                    raise DiagnoseError(f"{path}, line {number}: {_not_read(line)}")
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    bad = shown(line[error.start : error.start + 8])
                    raise DiagnoseError(
                        f"{path}, line {number}: is not UTF-8 at byte {error.start} ({bad}); save it as UTF-8"
                    ) from None
        except (OSError, EOFError, zlib.error) as error:
            raise DiagnoseError(f"{path}, line {number + 1}: cannot be read ({first_line(error)})") from error


def _refuse_bomb(path: Path, raw: IO[bytes], unpacked: IO[bytes]) -> None:
    """Raises DiagnoseError for a gzip file that unpacks to far more than data does."""
    if unpacked is not raw and unpacked.tell() > max(_MOST_UNPACKED, _MOST_TIMES * raw.tell()):
        raise DiagnoseError(f"{path}: unpacks to more than {_MOST_TIMES} times its size; unpack it if you trust it")


def _not_read(line: bytes) -> str:
    if len(line) > LONGEST_LINE:
        return f"is longer than {LONGEST_LINE // 2**20} MB; write one row per line, or use Parquet"
    return "is binary, or not UTF-8 text; --format says what kind of file it is"


def read_blocks(path: Path, tell: Tell | None = None) -> Iterator[str]:
    """Yields the text of a file in blocks of about 1 MB, wherever its lines end.

    Raises:
        DiagnoseError: as `read_lines`.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = 0
    with _open(path) as (raw, unpacked):
        while True:
            try:
                block = unpacked.read(2**20)
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError:
                raise DiagnoseError(f"{path}: is not UTF-8 after {done} bytes; save it as UTF-8") from None
            except (OSError, EOFError, zlib.error) as error:
                raise DiagnoseError(f"{path}: cannot be read after {done} bytes ({first_line(error)})") from error
            if "\0" in text:
                raise DiagnoseError(f"{path}: is binary, or not UTF-8 text; --format says what kind of file it is")
            if not block:
                return
            done += len(block)
            _refuse_bomb(path, raw, unpacked)
            if tell is not None:
                tell(raw.tell())
            yield text


def first_character(path: Path) -> str:
    """The first character that is no white space; empty for a file without one.

    Raises:
        DiagnoseError: as `read_lines`.
    """
    for _, line in read_lines(path):
        if text := line.strip():
            return text[0]
    return ""


class _open:
    """The file and what it holds, unpacked, as a context; one error for all that can go wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> tuple[IO[bytes], IO[bytes]]:
        refuse_special(self.path)
        try:
            self.raw: IO[bytes] = self.path.open("rb")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else first_line(error)
            raise DiagnoseError(f"{self.path}: cannot be opened ({why})") from error
        self.unpacked: Any = self.raw
        magic = self.raw.read(2)
        self.raw.seek(0)
        if magic == _GZIP:
            self.unpacked = gzip.GzipFile(fileobj=self.raw)
        elif self.path.suffix == ".gz":
            self.raw.close()
            raise DiagnoseError(f"{self.path}: is named .gz and is no gzip file; rename it or pack it with gzip")
        return self.raw, self.unpacked

    def __exit__(self, *_: object) -> None:
        self.raw.close()
