"""Every kind of source gives the same lengths."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_padmin.diagnose import json_rows, lines, reading, tables
from lightning_padmin.diagnose.fields import Columns
from lightning_padmin.diagnose.problems import DiagnoseError
from lightning_padmin.diagnose.reading import Source, read_lengths

ROWS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
LENGTHS = [3, 1, 5]
IDS = [{"input_ids": row, "note": "a, b"} for row in ROWS]
# The second row's mask leaves out nothing; the others a leading and a trailing token.
MASKED = [
    {"input_ids": [0, *row, 0], "attention_mask": [0, *[1] * len(row), 0]} if row != [8] else
    {"input_ids": row, "attention_mask": [1]}
    for row in ROWS
]  # fmt: skip


class WordTokenizer:
    """Counts words; special tokens are one at the start."""

    eos_token_id = 0

    def __call__(self, texts: list[str], add_special_tokens: bool, **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] * (len(text.split()) + add_special_tokens) for text in texts]}

    def apply_chat_template(self, chat: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        said = [f"<{message['role']}> {message['content']}" for message in chat]
        return " ".join([*said, *["<assistant>"] * add_generation_prompt])


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(reading, "load_tokenizer", lambda name: WordTokenizer())
    return "words"


def _jsonl(rows: list[object]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


FILES = {
    "ids.jsonl": _jsonl(IDS),
    "blank_lines.jsonl": b"\n" + _jsonl(IDS).replace(b"\n", b"\n\n"),
    "masked.jsonl": _jsonl(MASKED),
    "bare_ids.jsonl": _jsonl(ROWS),
    "bare_lengths.jsonl": _jsonl(LENGTHS),
    "column.jsonl": _jsonl([{"length": n, "text": "x"} for n in LENGTHS]),
    "floats.jsonl": _jsonl([{"length": float(n)} for n in LENGTHS]),
    "array.json": json.dumps(IDS, indent=1).encode(),
    "one_line.json": json.dumps(IDS).encode(),
    "array_of_lengths.json": json.dumps(LENGTHS).encode(),
    "array_of_ids.json": json.dumps(ROWS).encode(),
    "lines_in.json": _jsonl(IDS),
    "packed.jsonl.gz": gzip.compress(_jsonl(IDS)),
    "bom.jsonl": b"\xef\xbb\xbf" + _jsonl(IDS),
    "column.csv": b'note,length\n"a, b\nc",3\nd,1\n\ne,5\n',
    "no_end.csv": b"length\r\n3\r\n1\r\n5",
    "no_header.csv": b"3\n1\n5\n",
    "floats.csv": b"length\n3.0\n1.0\n5.0\n",
    "semicolon.csv": b"a;length\n1;3\n2;1\n3;5\n",
    "column.tsv": b"note\tlength\na, b\t3\nc\t1\nd\t5\n",
    "column.csv.gz": gzip.compress(b"length\n3\n1\n5\n"),
    "lengths.txt": b"3\n1\n\n5\n",
}


@pytest.mark.parametrize("name", FILES)
def test_text_formats(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    found = read_lengths(Source(name=str(tmp_path / name)))
    assert found.table.tolist() == [[3], [1], [5]]
    assert found.table.dtype == np.int32


@pytest.mark.parametrize("kind", ["ids", "masked", "length"])
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_arrow_formats(kind: str, suffix: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = {"ids": IDS, "masked": MASKED, "length": [{"length": n} for n in LENGTHS]}[kind]
    table, path = pyarrow.Table.from_pylist(rows), tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        from pyarrow import parquet

        parquet.write_table(table, path, row_group_size=2)
    else:
        writer = pyarrow.ipc.new_stream if suffix == "arrow" else pyarrow.ipc.new_file
        with writer(str(path), table.schema) as file:
            file.write_table(table, max_chunksize=2)
    assert read_lengths(Source(name=str(path))).table.tolist() == [[3], [1], [5]]


def test_saved_data_set_and_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one, two = datasets.Dataset.from_list(IDS), datasets.Dataset.from_list(MASKED[:1])
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=one, test=two).save_to_disk(tmp_path / "both")
    one.select([2, 0]).save_to_disk(tmp_path / "selected")
    assert read_lengths(Source(name=str(tmp_path / "one"))).table.tolist() == [[3], [1], [5]]
    assert read_lengths(Source(name=str(tmp_path / "both"))).table.tolist() == [[3], [1], [5]]
    assert read_lengths(Source(name=str(tmp_path / "both"), split="test")).table.tolist() == [[3]]
    assert read_lengths(Source(name=str(tmp_path / "selected"))).table.tolist() == [[5], [3]]
    with pytest.raises(DiagnoseError, match=r"has no split 'dev', it has train, test; choose one with --split"):
        read_lengths(Source(name=str(tmp_path / "both"), split="dev"))


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2)])
def test_npy(shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.arange(1, 1 + np.prod(shape)).reshape(shape).astype(np.uint16)
    np.save(tmp_path / "lengths.npy", array)
    found = read_lengths(Source(name=str(tmp_path / "lengths.npy")))
    assert found.table.tolist() == array.reshape(3, -1).tolist()


PAIRS = {
    "numbers.csv": b"prompt_tokens,completion_tokens\n2,3\n4,1\n",
    "ids.jsonl": _jsonl(
        [{"prompt_ids": [1, 2], "completion_ids": [3, 4, 5]}, {"prompt_ids": [1] * 4, "completion_ids": [7]}]
    ),
    "named.csv": b"p,c,length\n2,3,9\n4,1,9\n",
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_prompts_and_completions_stay_apart(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(PAIRS[name])
    columns = Columns(prompt="p", completion="c") if name == "named.csv" else Columns()
    found = read_lengths(Source(name=str(tmp_path / name), columns=columns))
    assert found.table.tolist() == [[2, 3], [4, 1]]
    assert found.total.tolist() == [5, 5]


def test_text_is_tokenized(words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(_jsonl([{"a": "one two", "b": "three"}, {"a": "one", "b": "two three four"}]))

    def read(**options: object) -> list[list[int]]:
        columns = Columns(has_tokenizer=True, **options)  # type: ignore[arg-type]
        return read_lengths(Source(name=str(path), tokenizer=words, columns=columns)).table.tolist()

    assert read(text=("a",)) == [[3], [2]]  # with one special token
    assert read(text=("a", "b")) == [[5], [6]]
    assert read(prompt="a", completion="b") == [[3, 2], [2, 4]]  # completions without it, and with an end mark
    assert read(prompt="a", completion="b", chat=True) == [[4, 2], [3, 4]]


def test_chats_are_put_through_the_template(words: str, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "one two"}]
    answered = [*asked, {"role": "assistant", "content": "three"}]
    path = tmp_path / "chats.jsonl"
    path.write_bytes(_jsonl([{"messages": answered}, {"messages": asked}]))
    found = read_lengths(Source(name=str(path), tokenizer=words, columns=Columns(has_tokenizer=True)))
    # <user> one two <assistant> three; an unanswered chat has the opening of its answer.
    assert found.table.tolist() == [[5], [4]]


def test_lines_of_text_are_rows_if_there_is_a_tokenizer(words: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one two three\n\nfour\n")
    source = Source(name=str(tmp_path / "book.txt"), tokenizer=words, columns=Columns(has_tokenizer=True))
    assert read_lengths(source).table.tolist() == [[4], [2]]


def test_numbers_in_a_csv_file_may_be_answers(words: str, tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("q,a\nhow many,42\nand now,7 or 8\n")
    columns = Columns(prompt="q", completion="a", has_tokenizer=True)
    source = Source(name=str(tmp_path / "qa.csv"), tokenizer=words, columns=columns)
    assert read_lengths(source).table.tolist() == [[3, 2], [3, 4]]


def test_rows_over_several_chunks_and_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows keep their order and none is lost where a chunk of rows, or a block of text, ends."""
    monkeypatch.setattr(tables, "CHUNK_ROWS", 7)
    rng = np.random.default_rng(0)
    wanted = rng.integers(1, 40, 100).tolist()
    rows = [{"input_ids": list(range(10_000, 10_000 + n)), "note": "],[{"} for n in wanted]
    whole = json.dumps(rows)

    def blocks(path: Path, tell: object = None):  # type: ignore[no-untyped-def]
        yield from (whole[i : i + 50] for i in range(0, len(whole), 50))

    monkeypatch.setattr(json_rows, "read_blocks", blocks)
    (tmp_path / "array.json").write_text(whole)
    (tmp_path / "lines.jsonl").write_bytes(_jsonl(rows))
    assert read_lengths(Source(name=str(tmp_path / "array.json"))).table[:, 0].tolist() == wanted
    assert read_lengths(Source(name=str(tmp_path / "lines.jsonl"))).table[:, 0].tolist() == wanted


def test_empty_rows_are_left_out_only_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(_jsonl([{"input_ids": [1, 2]}, {"input_ids": []}, {"input_ids": [3]}]))
    found = read_lengths(Source(name=str(path), skip_empty=True))
    assert (found.table[:, 0].tolist(), found.skipped) == ([2, 1], 1)
    with pytest.raises(DiagnoseError, match=r"rows.jsonl, line 2: input_ids has 0 tokens; .* --skip-empty"):
        read_lengths(Source(name=str(path)))


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lines, "_EVERY", 10)
    (tmp_path / "lengths.txt").write_text("12\n" * 1000)
    told: list[int] = []
    read_lengths(Source(name=str(tmp_path / "lengths.txt")), told.append)
    assert len(told) == 100
    assert told == sorted(told)
    assert told[-1] == 3000


WITHOUT_OPTIONAL_PACKAGES = """
import contextlib, io, json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyarrow", "datasets", "rich", "matplotlib", "transformers"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
from lightning_padmin.cli.commands import main
found = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(["diagnose", *arguments])
    found.append([code, output.getvalue(), errors.getvalue()])
print(json.dumps(found))
"""
NEEDED = [
    (["rows.parquet"], "reading rows.parquet needs pyarrow"),
    (["some/data"], "some/data is no file here, and reading it from the hub needs datasets"),
    (["lengths.csv", "--plot", "a.png"], "--plot needs matplotlib"),
    (["text.jsonl", "--tokenizer", "gpt2"], "--tokenizer gpt2 needs transformers"),
]


def test_core_dependencies_are_enough_for_json_and_csv(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("length\n3\n1\n5\n")
    (tmp_path / "rows.jsonl").write_bytes(_jsonl(IDS))
    (tmp_path / "text.jsonl").write_bytes(_jsonl([{"text": "a"}]))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    wanted = [["lengths.csv"], ["rows.jsonl"], *(arguments for arguments, _ in NEEDED)]
    command = [sys.executable, "-c", WITHOUT_OPTIONAL_PACKAGES, json.dumps(wanted)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    csv, rows, *others = json.loads(done.stdout)
    for code, output, errors in (csv, rows):
        assert (code, errors) == (0, "")
        assert "3 rows, 9 tokens" in output
    for (_, said), (code, _, errors) in zip(NEEDED, others, strict=True):
        assert code == 2
        assert errors == f'padmin diagnose: {said}: pip install "lightning-padmin[diagnose]"\n'


@pytest.mark.slow
def test_ten_million_rows_take_little_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "lengths.csv").open("w") as file:
        file.write("length\n")
        for _ in range(100):
            file.write("\n".join(map(str, rng.integers(1, 2000, 100_000).tolist())) + "\n")
    # Not getrusage, whose peak is that of the process which started this one if that was larger.
    code = (
        "import re, sys; from lightning_padmin.cli.commands import main; code = main(sys.argv[1:]);"
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "diagnose", str(tmp_path / "lengths.csv")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "10,000,000 rows" in done.stdout
    assert int(done.stderr) * 1024 < 2**30
