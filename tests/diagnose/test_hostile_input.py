"""Files made to do harm: to the terminal, to memory, to patience. One line and code 2, or a report, within seconds."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_padmin import errors
from lightning_padmin.cli import commands as cli
from lightning_padmin.config import accelerate_file
from lightning_padmin.diagnose import lines, reading
from lightning_padmin.errors import ConfigError

ESC = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\u200b"
RAW = set("\x1b\x07\x9b\u202e\u2066\u200b")


def _seen(outcome, code):
    found, out, err = outcome
    assert found == code
    assert not RAW & set(out + err)
    if code == 2:
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("padmin diagnose: ")
        assert len(err) < 3000
    return out + err


# name: (file name, content, arguments, code)
TEXTS = {
    "column, good": ("a.csv", f"{ESC},length\nx,5\nx,9\n", ["--length-column", "length"], 0),
    "column used": ("a.csv", f"{ESC},b\n5,1\n9,1\n", ["--length-column", ESC], 0),
    "column unknown": ("a.csv", f"{ESC},b\nx,x\n", [], 2),
    "column asked for": ("a.csv", "a,b\nx,x\n", ["--length-column", ESC], 2),
    "name of the file": (f"{ESC}.csv".replace("/", ""), "length\n5\n9\n", [], 0),
    "name of a bad file": (f"{ESC}.csv", "length\nx\n", [], 2),
    "value of a csv": ("a.csv", f"length\n{ESC}\n", [], 2),
    "value of json": ("a.jsonl", json.dumps({"length": ESC}) + "\n", [], 2),
    "key of json": ("a.jsonl", json.dumps({ESC: 5}) + "\n", [], 2),
    "key missing later": ("a.jsonl", '{"length": 3}\n' + json.dumps({ESC: 5}) + "\n", [], 2),
    "broken json": ("a.jsonl", f'{{"length": {ESC}\n', [], 2),
    "line ends in a column": ("a.csv", '"le\nngth\nPadding is nothing",b\nx,5\n', ["--length-column", "b"], 0),
    "line ends in an error": ("a.csv", '"a\nb\rc",d\nx,y\n', [], 2),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_escape_sequences_do_not_reach_the_terminal(kind, diagnose, tmp_path):
    name, content, arguments, code = TEXTS[kind]
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    printed = _seen(diagnose(tmp_path / name, *arguments), code)
    if kind == "column used":
        assert r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\u200b" in printed
    if code == 0:
        as_json = _seen(diagnose(tmp_path / name, *arguments, "--json"), 0)
        assert json.loads(as_json)["data"]["source"].endswith(name)


def test_without_the_guard_they_would(diagnose, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "printable", lambda text, limit=None: text)
    monkeypatch.setattr(cli, "say", lambda text, file: print(text, file=file))
    monkeypatch.setattr(errors, "printable_lines", str)
    (tmp_path / "a.txt").write_text("x\n")
    _, _, err = diagnose(tmp_path / "a.txt", "--format", "csv", "--tokenizer", tmp_path / ESC)
    assert RAW & set(err)


def test_logs_and_models(diagnose, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{ESC}.csv").write_text(f"step,{ESC}/waste,step_time\n1,0.5,1.0\n2,0.4,1.1\n", encoding="utf-8")
    printed = _seen(diagnose("--log", f"{ESC}.csv"), 0)
    assert r"\x1b[2J" in printed
    _seen(diagnose("--log", f"{ESC}.csv", "--time-column", f"{ESC}z"), 2)
    _seen(diagnose("--model", f"{ESC}:make"), 2)
    _seen(diagnose("--model", ESC), 2)


def test_progress_shows_names_as_they_may_be(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    from lightning_padmin.diagnose import command

    told = []
    monkeypatch.setattr(command, "progress", lambda name, total: told.append(name) or _Nothing())
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{ESC}.csv").write_text("length\n5\n9\n")
    assert cli.main(["diagnose", f"{ESC}.csv"]) == 0
    assert not RAW & set("".join(told))
    assert len(told[0]) < 200


class _Nothing:
    def __enter__(self):
        return lambda done: None

    def __exit__(self, *_):
        pass


def test_names_that_are_no_utf8(diagnose, tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff\xfe.csv"
    with open(path, "wb") as file:
        file.write(b"length\n5\n9\n")
    assert r"\udcff\udcfe.csv: 2 rows" in _seen(diagnose(os.fsdecode(path)), 0)


DEEP = "[" * 100_000
JSON = {
    "deep line": ("a.jsonl", DEEP + "\n", 2, "too many levels"),
    "deep in a row": ("a.jsonl", '{"length": 3, "x": ' + DEEP + "\n", 2, "too many levels"),
    "deep array": ("a.json", DEEP + "]" * 100_000, 2, "too many levels"),
    "deep objects": ("a.json", "[" + '{"a":' * 50_000, 2, "too many levels"),
    "deep second row": ("a.jsonl", '{"length": 3}\n' + DEEP + "\n", 2, "line 2: is not JSON (too many levels)"),
    "deep but read": ("a.jsonl", '{"length": ' + "[" * 900 + "]" * 900 + "}\n", 2, "none of the columns length"),
    "deep in the second row": ("a.txt", "3\n" + "[" * 99_999 + "\n", 2, "line 2: length is '[[["),
    "digits": ("a.jsonl", '{"length": ' + "9" * 5000 + "}\n", 2, "Exceeds the limit"),
    "digits in an array": ("a.json", "[" + "9" * 5000 + "]", 2, "Exceeds the limit"),
    "large exponent": ("a.jsonl", '{"length": 1e999}\n', 2, "length is inf"),
    "not a number": ("a.json", "[NaN]", 2, "length is nan"),
    "endless": ("a.json", "[-Infinity]", 2, "length is -inf"),
    "twice the same key": ("a.jsonl", '{"length": 3, "length": 4}\n' * 2, 0, "2 rows, 8 tokens"),
    "byte order mark": ("a.jsonl", '\ufeff{"length": 3}\n' * 1 + '{"length": 3}\n', 0, "2 rows, 6 tokens"),
    "NUL": ("a.jsonl", '{"length": 3, "a": "\0"}\n', 2, "is binary"),
    "digits of csv": ("a.csv", "length\n" + "9" * 5000 + "\n", 2, "length is inf"),
    "two columns of a name": ("a.csv", "length,length\n5,6\n", 2, "has 2 columns 'length'; rename one"),
    "two others of a name": ("a.csv", "length,a,a\n5,6,7\n", 0, "1 rows, 5 tokens"),
    "many columns": ("a.csv", ",".join(map(str, range(200_000))) + "x\n", 2, "has 200,000 columns"),
    "some columns": (
        "a.csv",
        ",".join(f"c{k}" for k in range(50_000)) + "\n" + "5," * 49_999 + "5\n",
        2,
        "49,980 more",
    ),
    "many keys": ("a.jsonl", json.dumps({f"k{i}": 1 for i in range(50_000)}) + "\n", 2, "49,980 more"),
    "long name": ("a.csv", "x" * 10**6 + ",b\n1,2\n", 2, "x" * 60 + "..., b is known"),
}


@pytest.mark.parametrize("kind", JSON)
def test_odd_values_and_large_lines(kind, diagnose, tmp_path):
    name, content, code, said = JSON[kind]
    (tmp_path / name).write_bytes(content.encode())
    started = time.process_time()
    assert said in _seen(diagnose(tmp_path / name), code)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("content", [DEEP, '{"log_history": ' + DEEP, '{"a": 1}\n' + DEEP, "a,b\n1\n", "\0"])
def test_logs_made_to_do_harm(content, diagnose, tmp_path):
    (tmp_path / "log.json").write_text(content)
    _seen(diagnose("--log", tmp_path / "log.json"), 2)


def test_logs_of_many_columns(diagnose, tmp_path):
    names = [f"k{k}/padmin/waste" for k in range(60_000)]
    (tmp_path / "log.csv").write_text(",".join(names) + "\n")
    started = time.process_time()
    _seen(diagnose("--log", tmp_path / "log.csv"), 2)
    (tmp_path / "log.csv").write_text(",".join(names) + "\n" + ",".join("1" * len(names)) + "\n")
    printed = diagnose("--log", tmp_path / "log.csv", "--time-column", "none")
    assert len(_seen(printed, 2)) < 3000
    assert time.process_time() - started < 10


def _special(kind, path):
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link to a pipe":
            os.mkfifo(path.with_name("pipe"))
            path.symlink_to(path.with_name("pipe"))
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                here = os.getcwd()
                os.chdir(path.parent)  # names of sockets are short
                server.bind(path.name)
                os.chdir(here)
        case "link to a device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "link to nowhere":
            path.symlink_to(path.with_name("nowhere"))


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "socket", "link to a device", "folder", "link to nowhere"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt", ".npy", ".parquet", ".gz"])
def test_what_is_no_regular_file_is_refused(kind, suffix, diagnose, tmp_path):
    path = tmp_path / f"a{suffix}"
    _special(kind, path)
    _seen(diagnose(path), 2)
    if kind not in ("folder", "link to nowhere"):
        assert "and no regular file" in diagnose(path)[2]
        assert "and no regular file" in _seen(diagnose("--log", path), 2)
    else:
        _seen(diagnose("--log", path), 2)


def test_devices_by_name(diagnose):
    assert "/dev/zero: is a device" in _seen(diagnose("/dev/zero", "--format", "csv"), 2)


def test_a_redirected_standard_input_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("length\n5\n9\n")
    with (tmp_path / "a.csv").open() as file:
        words = [sys.executable, "-m", "lightning_padmin.cli", "diagnose", "/dev/stdin", "--format", "csv"]
        run = subprocess.run(words, stdin=file, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    assert "/dev/stdin: 2 rows, 14 tokens" in run.stdout


@pytest.mark.parametrize("state", ["[" * 100_000, '{"_data_files": 3}', '{"_data_files": [{}]}', "{"])
def test_notes_of_saved_data_sets(state, diagnose, tmp_path):
    (tmp_path / "state.json").write_text(state)
    _seen(diagnose(tmp_path), 2)


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "..", "a/b.arrow", "pipe"])
def test_saved_data_sets_read_their_own_files(name, diagnose, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    said = _seen(diagnose(tmp_path), 2)
    assert ("regular file" if name == "pipe" else "which is elsewhere") in said
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": [name, 3, None]}))
    if name != "pipe":
        assert "which is elsewhere" in _seen(diagnose(tmp_path, "--split", name), 2)


@pytest.mark.parametrize(("name", "line"), [("a.jsonl.gz", b'{"length": 3}\n'), ("a.json.gz", b"[" + b"3,\n" * 8)])
def test_gzip_bombs(name, line, diagnose, tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_MOST_UNPACKED", 2**20)
    (tmp_path / name).write_bytes(gzip.compress(line * 2**20))
    assert "unpacks to more than 100 times its size" in _seen(diagnose(tmp_path / name), 2)
    (tmp_path / name).write_bytes(gzip.compress(line * 2**12))
    assert "unpacks to" not in "".join(map(str, diagnose(tmp_path / name)))


def test_parquet_bombs(diagnose, tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    from lightning_padmin.diagnose import arrow

    monkeypatch.setattr(arrow, "_MOST_VALUES", 2**16)
    parquet.write_table(pyarrow.table({"length": np.full(10**6, 7)}), tmp_path / "a.parquet")
    assert "has 1,000,000 values in" in _seen(diagnose(tmp_path / "a.parquet"), 2)
    parquet.write_table(pyarrow.table({"length": np.arange(10**5) % 999 + 1}), tmp_path / "a.parquet")
    _seen(diagnose(tmp_path / "a.parquet"), 0)


@pytest.mark.parametrize(
    "error", [MemoryError(), RecursionError("deep"), OverflowError(f"{ESC}\nsecond line"), KeyboardInterrupt()]
)
def test_whatever_is_raised_is_one_line_and_2(error, diagnose, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr("lightning_padmin.diagnose.command.read_lengths", broken)
    (tmp_path / "a.csv").write_text("length\n5\n")
    _seen(diagnose(tmp_path / "a.csv"), 2)


def _bomb(how):
    first = "k0: &a0 {x: 1}\n" if how == "merge" else "k0: &a0 [x]\n"
    again = "{{<<: [{}]}}" if how == "merge" else "[{}]"
    return first + "".join(f"k{k}: &a{k} {again.format(', '.join([f'*a{k - 1}'] * 9))}\n" for k in range(1, 12))


YAML = {
    "lists": _bomb("list"),
    "merged": _bomb("merge"),
    "within itself": "a: &a [*a]\n",
    "many": "".join(f"k{k}: 1\n" for k in range(12_000)),
    "long": "a: 1\n" * 60_000,
    "digits": "a: 1" + ":1" * 50_000,
    "deep": "[" * 100_000,
    "text": "\x1b[2J",
}


@pytest.mark.parametrize("kind", YAML)
def test_yaml_made_to_do_harm(kind, tmp_path, monkeypatch, capsys):
    file = tmp_path / f"{ESC}.yaml"
    file.write_text(YAML[kind], encoding="utf-8")
    started = time.process_time()
    with pytest.raises(ConfigError, match=r"\.yaml: (has more than|cannot be read)") as caught:
        accelerate_file.load_yaml(file)
    assert time.process_time() - started < 5
    assert not RAW & set(str(caught.value))
    monkeypatch.setenv("PADMIN_CONFIG_FILE", str(file))
    assert cli.main(["env"]) == 1
    assert not RAW & set(capsys.readouterr().out)


def test_yaml_with_aliases_that_people_write(tmp_path):
    (tmp_path / "a.yaml").write_text("x: &x {a: 1}\ny: *x\nz: {<<: *x, b: 2}\n")
    assert accelerate_file.load_yaml(tmp_path / "a.yaml") == {"x": {"a": 1}, "y": {"a": 1}, "z": {"a": 1, "b": 2}}


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "socket", "link to a device", "folder"])
def test_yaml_is_a_regular_file(kind, tmp_path):
    _special(kind, tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="is a folder, pipe or device and no file"):
        accelerate_file.load_yaml(tmp_path / "a.yaml")


def test_tokenizers_with_a_pipe_inside(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(Exception, match="is no regular file"):
        reading.load_tokenizer(str(tmp_path))
    assert Path(tmp_path / "tokenizer.json").exists()
