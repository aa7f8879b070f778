"""Whatever cannot be read is one line that names it, and exit code 2. Nothing becomes 0% of padding."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections import Counter

import numpy as np
import pytest

GOOD = b'{"length": 3}\n'

# name: (bytes, arguments, what the line says after the file's name)
FILES: dict[str, tuple[bytes, list[str], str]] = {
    "empty.jsonl": (b"", [], ": is empty, it has no rows"),
    "blank.jsonl": (b"\n \n", [], ": is empty, it has no rows"),
    "empty.csv": (b"", [], ": is empty, it has no rows"),
    "header_only.csv": (b"length\n", [], ": is empty, it has a header line and no rows"),
    "empty.txt": (b"", [], ": is empty, it has no rows"),
    "empty.json": (b"[]", [], ": is empty, it has no rows"),
    "empty.jsonl.gz": (gzip.compress(b""), [], ": is empty, it has no rows"),
    "empty.npy": (b"", [], ": cannot be read as an array of numpy"),
    "empty.parquet": (b"", [], ": is neither Parquet nor Arrow, or damaged"),
    "cut.jsonl": (GOOD + b'{"length": ', [], ", line 2: is not JSON (Expecting value) in '{\"length\":'"),
    "cut.json": (b'[{"length": 3}, {"len', [], ", row 2: '{\"len' is no whole row"),
    "open.json": (b'[{"length": 3}', [], ", row 1: '{\"length\": 3}' is no whole row (the file ends there)"),
    "comma.json": (b'[{"length": 3},\n', [], ", row 2: the file ends and the array does not"),
    "more.json": (b"[3, 4] 5", [], ": goes on after the array, with '5'"),
    "document.json": (b'{\n "length": 3\n}\n', [], ", line 1: is not JSON (Expecting property name"),
    "cut.csv": (b'length,note\n3,"a\n', [], ": is not CSV (unexpected end of data)"),
    "cut.jsonl.gz": (gzip.compress(GOOD * 999)[:-20], [], "cannot be read ("),
    "not_gzip.jsonl.gz": (GOOD, [], ": is named .gz and is no gzip file"),
    "tar_inside.csv.gz": (gzip.compress(b"a\0\0b\n"), [], ", line 1: is binary, or not UTF-8 text"),
    "binary.jsonl": (bytes(range(256)), [], ", line 1: is binary, or not UTF-8 text"),
    "utf16.csv": ("length\n3\n".encode("utf-16"), [], ", line 1: is binary, or not UTF-8 text"),
    "latin.jsonl": (GOOD + b'{"length": 3, "a": "\xe9"}\n', [], ", line 2: is not UTF-8 at byte 20"),
    "text_in.parquet": (GOOD, [], ": is neither Parquet nor Arrow, or damaged"),
    "unknown.xyz": (GOOD, [], ": is of an unknown kind; known suffixes are .jsonl"),
    "no_column.jsonl": (GOOD, ["--length-column", "size"], " has no such column, it has length"),
    "unknown_columns.csv": (b"a,b\n1,2\n", [], ": none of the columns a, b is known; name one with --length-column"),
    "two_choices.jsonl": (GOOD, ["--length-column", "length", "--text-column", "a"], "more than one kind of column"),
    "half_a_pair.jsonl": (GOOD, ["--prompt-field", "length"], "--prompt-field and --completion-field go together"),
    "later.jsonl": (GOOD + b'{"size": 3}\n', [], ", line 2: has no 'length', it has size"),
    "negative.csv": (b"length\n3\n-4\n", [], ", line 3: length is -4, a negative length"),
    "negative.txt": (b"3\n-4\n", [], ", line 2: length is -4, a negative length"),
    "zero.csv": (b"length\n3\n0\n", [], ", line 3: length has 0 tokens"),
    "zero_prompt.csv": (b"prompt_tokens,completion_tokens\n3,1\n0,2\n", [], ", line 3: prompt_tokens has 0 tokens"),
    "nan.csv": (b"length\n3\nnan\n", [], ", line 3: length is nan, expected a whole number of tokens"),
    "nan.jsonl": (GOOD + b'{"length": NaN}\n', [], ", line 2: length is nan, expected a whole number of tokens"),
    "infinite.jsonl": (GOOD + b'{"length": Infinity}\n', [], ", line 2: length is inf, expected"),
    "half.csv": (b"length\n3\n2.5\n", [], ", line 3: length is 2.5, expected a whole number of tokens"),
    "missing.csv": (b"length,a\n3,1\n,1\n", [], ", line 3: length is '', expected a whole number of tokens"),
    "bool.jsonl": (GOOD + b'{"length": true}\n', [], ", line 2: length is True, expected a whole number of tokens"),
    "bool.csv": (b"length\n3\nTrue\n", [], ", line 3: length is 'True', expected a whole number"),
    "null.jsonl": (GOOD + b'{"length": null}\n', [], ", line 2: length is None, expected"),
    "text.jsonl": (GOOD + b'{"length": "3"}\n', [], ", line 2: length is '3', expected a whole number of tokens"),
    "list.jsonl": (GOOD + b'{"length": [3]}\n', [], ", line 2: length is [3], expected a whole number of tokens"),
    "huge.jsonl": (GOOD + b'{"length": 99999999999999999999}\n', [], ", line 2: length is 99999999999999999999"),
    "large.csv": (b"length\n3\n3000000000\n", [], ", line 3: length is 3000000000"),
    "mixed_rows.jsonl": (GOOD + b"true\n", [], ", line 2: is true; a row is an object, a length, token ids or a text"),
    "no_ids.jsonl": (b'{"input_ids": []}\n', [], ", line 1: input_ids has 0 tokens"),
    "nested.jsonl": (b'{"input_ids": [[1, 2]]}\n', [], ", line 1: input_ids is [[1, 2]], expected a list of integers"),
    "text_ids.jsonl": (b'{"input_ids": [1]}\n{"input_ids": "abc"}\n', [], ", line 2: input_ids is 'abc', expected"),
    "float_ids.jsonl": (b'{"input_ids": [1.5]}\n', [], ", line 1: input_ids is [1.5], expected a list of integers"),
    "short_mask.jsonl": (b'{"input_ids": [1, 2], "attention_mask": [1]}\n', [], "an attention_mask of 2 values"),
    "odd_mask.jsonl": (b'{"input_ids": [1], "attention_mask": [2]}\n', [], "expected an attention_mask of 0 and 1"),
    "no_mask.jsonl": (b'{"input_ids": [1], "attention_mask": [0]}\n', [], "input_ids + attention_mask has 0 tokens"),
    "words.jsonl": (b'{"text": "abc"}\n', [], ": text is text; --tokenizer MODEL is needed to count its tokens"),
    "ragged.csv": (b"a,length\n1,3\n2\n", [], ", line 3: has 1 fields and the header 2"),
    "numbers.csv": (b"1,2\n3,4\n", [], ", line 1: has numbers and no column names"),
    "word.txt": (b"3\nabc\n", [], ", line 2: length is 'abc', expected a whole number of tokens"),
    "all_empty.jsonl": (b'{"input_ids": []}\n', ["--skip-empty"], ": all 1 rows have 0 tokens"),
}  # fmt: skip


def _refused(outcome: tuple[int, str, str], said: str) -> None:
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("padmin diagnose: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("name", FILES)
def test_bad_files(name, diagnose, tmp_path):
    content, arguments, said = FILES[name]
    (tmp_path / name).write_bytes(content)
    outcome = diagnose(tmp_path / name, *arguments)
    _refused(outcome, said)
    assert name in outcome[2] or not said.startswith((":", ",", " "))


def test_good_file_is_read(diagnose, tmp_path):
    (tmp_path / "good.jsonl").write_bytes(GOOD * 2)
    code, out, err = diagnose(tmp_path / "good.jsonl")
    assert (code, err) == (0, "")
    assert "good.jsonl: 2 rows, 6 tokens (lengths in length)" in out


def test_line_over_64_megabytes(diagnose, tmp_path):
    (tmp_path / "long.jsonl").write_bytes(GOOD + b"1" * (64 * 2**20 + 1))
    _refused(diagnose(tmp_path / "long.jsonl"), "long.jsonl, line 2: is longer than 64 MB; write one row per line")


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([1.0, 2.0]), "has float64 of shape (2,)"),
        (np.array([True]), "has bool of shape (1,)"),
        (np.zeros((2, 3), int), "has shape (2, 3)"),
        (np.zeros(0, int), "has shape (0,)"),
        (np.array([3, 0]), ", row 2: 0 has 0 tokens"),
        (np.array([3, -1]), ", row 2: 0 is -1, a negative length"),
    ],
)
def test_bad_arrays(array, said, diagnose, tmp_path):
    np.save(tmp_path / "lengths.npy", array)
    _refused(diagnose(tmp_path / "lengths.npy"), said)


def test_bad_values_in_parquet(diagnose, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for column, values, said in (
        ("length", [3, None], ", row 2: length is None, expected a whole number"),
        ("length", [3.0, float("nan")], ", row 2: length is nan, expected a whole number"),
        ("length", [3, 0], ", row 2: length has 0 tokens"),
        ("input_ids", [[1], None], ", row 2: input_ids is None, expected a list of integers"),
        ("input_ids", [["a"], ["b"]], ", row 1: input_ids is ['a'], expected a list of integers"),
    ):
        parquet.write_table(pyarrow.table({column: values}), tmp_path / "rows.parquet")
        _refused(diagnose(tmp_path / "rows.parquet"), said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to look at; give a file of rows or lengths, --log FILE, or --model MODEL"),
        (["nowhere.jsonl"], "nowhere.jsonl: there is no such file or folder; check the path"),
        (["no/where/at/all"], "no/where/at/all: there is no such file or folder"),
        (["--log", "nowhere.csv"], "--log nowhere.csv: there is no such file; check the path"),
        (["--model", "nowhere:make"], "--model 'nowhere:make': No module named 'nowhere'"),
        (["--log", "x", "--plot", "a.png"], "--plot draws lengths"),
        (["good.jsonl", "--batch-size", "0"], "--batch-size 0: expected an integer of at least 1"),
        (["good.jsonl", "--launch-cost", "-1"], "--launch-cost -1: expected an integer of at least 0"),
        (["good.jsonl", "--budgets", "0,5"], "--budgets 0: expected an integer of at least 1"),
        (["good.jsonl", "--batching", "fixed"], "--batching fixed needs --max-length"),
        (["good.jsonl", "--plot", "a.nothing"], "--plot a.nothing: cannot be written"),
        (["."], "is neither a folder of datasets.save_to_disk nor one of Parquet files only"),
    ],
)
def test_bad_arguments(arguments, said, diagnose, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_bytes(GOOD * 9)
    _refused(diagnose(*arguments), said)


def test_hub_out_of_reach_is_one_line(diagnose, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    outcome = diagnose("some/data", "--split", "test")
    _refused(outcome, "some/data: is no file here, and the hub's data set with split 'test' cannot be read (no route);")


def test_hub_rows_are_streamed(data, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(*arguments, **options):
        asked.append((arguments, options))
        return [{"input_ids": [1, 2]}, {"input_ids": [3]}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert data("some/data", "--subset", "main")["lengths"]["tokens"] == 3
    assert asked == [(("some/data", "main"), {"split": "train", "streaming": True})]


def test_tokenizer_that_is_not_there(diagnose, tmp_path):
    (tmp_path / "text.jsonl").write_bytes(json.dumps({"text": "abc"}).encode())
    outcome = diagnose(tmp_path / "text.jsonl", "--tokenizer", tmp_path / "nothing")
    _refused(outcome, "nothing: is no folder or hub id of a tokenizer (")


def _whole_files():
    rows = [{"input_ids": list(range(1, 2 + k % 7)), "length": 1 + k, "text": "abc é"} for k in range(30)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files = {
        "rows.jsonl": lines,
        "rows.json": json.dumps(rows).encode(),
        "rows.jsonl.gz": gzip.compress(lines),
        "rows.csv": b"length,note\n" + b'12,"a,b"\n' * 30,
        "rows.txt": b"12\n" * 30,
    }
    array = io.BytesIO()
    np.save(array, np.arange(1, 50))
    files["rows.npy"] = array.getvalue()
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return files
    table = pyarrow.Table.from_pylist(rows)
    stream, packed = io.BytesIO(), io.BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    parquet.write_table(table, packed)
    return files | {"rows.arrow": stream.getvalue(), "rows.parquet": packed.getvalue()}


def _damaged(content, rng):
    """Some bytes changed, cut off, put in, or taken out."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(content) + 1)
        match rng.randrange(4):
            case 0:
                content[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del content[at:]
            case 2:
                content[at:at] = rng.choice([b'"', b"{", b"[", b"\n", b"-1", b"null", b",", b"\0", b"\xff", b"9" * 30])
            case 3:
                del content[at : at + rng.randrange(10)]
    return bytes(content)


def test_damaged_files_give_a_report_or_one_line(diagnose, tmp_path):
    rng, files, codes = random.Random(0), _whole_files(), Counter()
    for turn in range(400):
        name = list(files)[turn % len(files)]
        (tmp_path / name).write_bytes(_damaged(files[name], rng))
        code, out, err = diagnose(tmp_path / name, "--steps", 2, "--batch-size", 4)
        codes[code] += 1
        assert (code == 0 and not err) or (code == 2 and not out and err.count("\n") == 1), name
    assert codes[0] > 10
    assert codes[2] > 100
