"""What SECURITY.md promises, sentence by sentence: of the source, and of files and models made to do harm.

Elsewhere: what files may be, and how names are shown (`tests/diagnose/test_hostile_input.py`); where a configuration
comes from (`tests/core/test_cli_env.py`); scripts that are launched (`tests/integrations/test_accelerate_launch.py`);
modules that are named (`tests/core/test_verify.py`).
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_padmin import printing
from lightning_padmin.cli import commands as cli
from lightning_padmin.config import accelerate_file
from lightning_padmin.errors import ConfigError

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "lightning_padmin").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])
FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "marshal.loads",
    "joblib.load",
}


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def found(source: str) -> list[str]:
    """Calls that would run or unpickle what they are given."""
    bad = []
    for name, node in calls(source):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        is_plain = name == "torch.load" and options.get("weights_only") == "True"
        unpickles = name.endswith(".load") and options.get("allow_pickle", "False") != "False"
        if (name in FORBIDDEN and not is_plain) or unpickles:
            bad.append(name)
        # A flag of the user may be passed on under its own name; left out, transformers would ask on the terminal.
        needs_word = name.endswith(".from_pretrained")
        trusts = options.get("trust_remote_code", "left open" if needs_word else "False")
        if trusts.rpartition(".")[2] not in ("False", "trust_remote_code") or options.get("shell", "False") != "False":
            bad.append(name)
    return bad


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_evaluated_or_unpickled(path: Path) -> None:
    assert found(path.read_text(encoding="utf-8")) == []


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 50
    assert any("yaml.safe_load" in path.read_text(encoding="utf-8") for path in FILES)


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(name)",
        "subprocess.run(command, shell=True)",
    ],
)
def test_negative_control(source: str) -> None:
    assert found(source)


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 20,
}
EVIL = """open({mark!r}, 'w')
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizer
class C(LlamaConfig): model_type = 'evil'
class M(LlamaForCausalLM): config_class = C
class T(PreTrainedTokenizer): pass
def generate(*_, **__): pass
"""


class Touch:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.mark), "w")


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that only code of others makes; whoever asks on the terminal hears yes."""
    dynamic = pytest.importorskip("transformers.dynamic_module_utils")
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "RAN"


def folder(name: str, mark: Path, **config: Any) -> None:
    """A model's folder with code beside it."""
    if config["model_type"] == "llama":  # with weights, so that nothing else keeps it from being loaded
        transformers = importlib.import_module("transformers")
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(name)
    Path(name).mkdir(exist_ok=True)
    (Path(name) / "config.json").write_text(json.dumps(config))
    (Path(name) / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", None]}})
    )
    (Path(name) / "code.py").write_text(EVIL.format(mark=str(mark)))
    (Path(name) / "custom_generate").mkdir()
    (Path(name) / "custom_generate" / "generate.py").write_text(EVIL.format(mark=str(mark)))


OWN = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
REMOTE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a kind of its own": ({"model_type": "evil", "auto_map": OWN}, ["verify", "evil"]),
    "a kind that transformers has": (LLAMA | {"auto_map": OWN}, ["verify", "evil"]),
    "generation of its own": (LLAMA, ["verify", "evil"]),
    "a kernel of the hub": (LLAMA | {"attn_implementation": "someone/kernel"}, ["verify", "evil"]),
    "a model to be timed": ({"model_type": "evil", "auto_map": OWN}, ["diagnose", "--model", "evil", "--repeats", "1"]),
    "a tokenizer": ({"model_type": "evil", "auto_map": OWN}, ["diagnose", "t.jsonl", "--tokenizer", "evil"]),
}


@pytest.mark.parametrize("kind", REMOTE)
def test_code_beside_a_model_is_not_run_and_nobody_is_asked(
    kind: str, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, arguments = REMOTE[kind]
    folder("evil", mark, **config)
    Path("t.jsonl").write_text('{"text": "hello"}\n')
    capsys.readouterr()
    code = cli.main(arguments)
    assert not mark.exists()
    if config["model_type"] == "llama" and code == 0:
        return  # as a plain model of that kind
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.count("\n") <= 2, printed.err  # transformers may warn in a line of its own
    assert ("--trust-remote-code" in printed.err) == (config["model_type"] == "evil")


@pytest.mark.parametrize("kind", ["a kind of its own", "a tokenizer"])
def test_the_flag_runs_it(kind: str, mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, arguments = REMOTE[kind]
    folder("evil", mark, **config)
    Path("t.jsonl").write_text('{"text": "hello"}\n')
    cli.main([*arguments, "--trust-remote-code"])
    assert mark.exists()


def test_without_a_word_transformers_would_ask(mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with `trust_remote_code` left open, a yes on the terminal runs the code."""
    transformers = pytest.importorskip("transformers")
    folder("evil", mark, model_type="evil", auto_map=OWN)
    stock = transformers.AutoModelForCausalLM.from_pretrained

    def left_open(name: str, *_: Any, **options: Any) -> Any:
        return stock(name, **(options | {"trust_remote_code": None}))

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", left_open)
    cli.main(["verify", "evil"])
    assert mark.exists()


@pytest.mark.parametrize("content", ["code", "a class", "nothing", "half"])
def test_pickled_and_damaged_weights(content: str, mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bin").mkdir()
    Path("bin/config.json").write_text(json.dumps(LLAMA))
    weights = io.BytesIO()
    torch.save({"a": torch.ones(300)}, weights)
    Path("bin/pytorch_model.bin").write_bytes(
        {
            "code": pickle.dumps({"a": Touch(mark)}),
            "a class": pickle.dumps({"a": object}),
            "nothing": b"",
            "half": weights.getvalue()[:400],
        }[content]
    )
    assert cli.main(["verify", "bin"]) == 2
    assert not mark.exists()
    printed = capsys.readouterr()
    assert printed.err.startswith("padmin verify: 'bin' is no folder or hub id of a causal language model (")
    assert printed.err.count("\n") == 1
    if content == "code":
        with open("bin/pytorch_model.bin", "rb") as file:
            pickle.load(file).get("a").close()
        assert mark.exists(), "the control: unpickled, it leaves a mark"


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "tokenizer.json", "a pipe", "deep"])
def test_damaged_folders_are_one_line(damage: str, mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    Path("t.jsonl").write_text('{"text": "hello"}\n')
    Path("model/config.json").write_text(json.dumps(LLAMA))
    match damage:
        case "a pipe":
            os.mkfifo("model/model.safetensors")
        case "deep":
            Path("model/config.json").write_text("[" * 100_000)
        case _:
            Path("model", damage).write_bytes(b"\x1b[2J{")
    words = ["diagnose", "t.jsonl", "--tokenizer"] if damage == "tokenizer.json" else ["verify"]
    assert cli.main([*words, "model"]) == 2
    printed = capsys.readouterr()
    assert "\x1b" not in printed.err
    assert printed.err.strip().splitlines()[-1].startswith(f"padmin {words[0]}: ")


USERS = r"""
import sys, torch
class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.e = torch.nn.Embedding(20, 4)
class Tensors(Base):
    def forward(self, input_ids, attention_mask=None): return self.e(input_ids)
class Nothing(Base):
    def forward(self, input_ids, attention_mask=None, **options): return None
class Bare(torch.nn.Module):
    def forward(self, input_ids, attention_mask=None): return input_ids
class Raises(Base):
    def forward(self, input_ids, attention_mask=None): raise RuntimeError("a\x1b[2Jb\nsecond line")
class Leaves(Base):
    def forward(self, input_ids, attention_mask=None): sys.exit(0)
class Stops(Base):
    def forward(self, input_ids, attention_mask=None): raise KeyboardInterrupt
def raises(): raise ValueError("boom\nsecond line")
def leaves(): sys.exit(0)
def stops(): raise KeyboardInterrupt
def deep(): return deep()
def pair(): return Base(), 3
"""


@pytest.mark.parametrize(
    ("made", "said"),
    {
        "Tensors": "Tensors returns Tensor without logits: expected outputs with .logits",
        "Nothing": "Nothing returns NoneType without logits",
        "Bare": "Bare returns Tensor without logits",
        "Raises": "a\\x1b[2Jb",
        "Leaves": "ended the process (SystemExit: 0)",
        "Stops": "interrupted",
        "raises": "raised ValueError: boom",
        "leaves": "raised SystemExit: 0",
        "stops": "interrupted",
        "deep": "raised RecursionError: maximum recursion depth exceeded",
        "pair": "returned tuple: expected a module",
    }.items(),
)
def test_whatever_the_users_module_does_the_code_is_2(
    made: str, said: str, mark: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("users_modules.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(mark.parent))
    monkeypatch.delitem(sys.modules, "users_modules", raising=False)
    for words in (["verify"], ["diagnose", "--repeats", "1", "--model"]):
        assert cli.main([*words, f"users_modules:{made}"]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert printed.err.startswith(f"padmin {words[0]}: ")
        assert said in printed.err
    monkeypatch.delitem(sys.modules, "users_modules", raising=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", str(2**63)], "--seed 9223372036854775808: expected an integer of 64 bits"),
        (["--seed", "-" + "9" * 4000], "--seed -999"),
        (["--lengths", "5,99999999999"], "are too many to verify"),
        (["--lengths", "5,\x1b[2J"], "--lengths '5,\\"),
    ],
)
def test_impossible_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "users:make", *arguments]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert (printed.count("\n"), printed.count("\x1b")) == (1, 0)
    assert len(printed) < 3000


def test_unknown_arguments_may_be_names_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["diagnose", "a.csv", "\x1b[2Jb.csv"])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert "\\x1b[2Jb.csv" in printed


def test_arrays_are_not_unpickled(mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("lengths.npy", np.array([Touch(mark)], dtype=object), allow_pickle=True)
    assert cli.main(["diagnose", "lengths.npy"]) == 2
    assert not mark.exists()
    assert capsys.readouterr().err.count("\n") == 1
    np.load("lengths.npy", allow_pickle=True)[0].close()
    assert mark.exists(), "the control"


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!python/object/new:os.system"])
def test_yaml_makes_no_objects(tag: str, mark: Path) -> None:
    Path("a.yaml").write_text(f"{tag} ['touch {mark}']")
    with pytest.raises(ConfigError, match=r"a\.yaml: cannot be read as YAML"):
        accelerate_file.load_yaml(Path("a.yaml"))
    assert not mark.exists()


def test_chat_templates_run_in_a_sandbox(mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A template that reaches for Python's own objects is refused, in one line."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    reach = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    words.chat_template = reach
    words.save_pretrained("words")
    Path("chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    assert cli.main(["diagnose", "chats.jsonl", "--tokenizer", "words"]) == 2
    assert "chat template refuses" in capsys.readouterr().err
    jinja2 = importlib.import_module("jinja2")
    assert "class" in jinja2.Template(reach).render(), "the control: outside of the sandbox it gets them"


def test_scripts_of_data_sets_are_never_run(
    mark: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def older(path: str, name: str | None, split: str, streaming: bool, trust_remote_code: bool | None = None) -> Any:
        asked.append(trust_remote_code)
        return [{"length": 3}]

    monkeypatch.setattr(datasets, "load_dataset", older)
    assert cli.main(["diagnose", "some/data", "--trust-remote-code"]) == 0
    assert asked == [False]


def test_nothing_is_sent(mark: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    Path("a.csv").write_text("length\n" + "5\n9\n" * 9)
    assert cli.main(["diagnose", "a.csv"]) == 0
    assert cli.main(["env"]) == 0


def imported(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_no_file_imports_what_speaks_to_the_network() -> None:
    speaking = {"socket", "urllib", "http", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "huggingface_hub"}
    assert imported("import urllib.request\nfrom http import client") & speaking == {"urllib", "http"}
    for path in FILES:
        allowed = {"socket"} if path.name == "peers.py" else set()  # between the processes of one training
        assert imported(path.read_text(encoding="utf-8")) & speaking == allowed, path


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("length", "length"),
        ("größe, 長さ", "größe, 長さ"),
        ("a\x1b[2J", "a\\x1b[2J"),
        ("\x9b2J\x7f", "\\x9b2J\\x7f"),
        ("a\nb\rc\td", "a\\nb\\rc\\td"),
        ("abc\u202egnp.exe", "abc\\u202egnp.exe"),
        ("\u2066x\u2069\u200b\ufeff\u2028", "\\u2066x\\u2069\\u200b\\ufeff\\u2028"),
        ("\udcff\U000e0041", "\\udcff\\U000e0041"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printing.printable(text) == shown
    assert printing.printable_lines(f"{text}") == shown.replace("\\n", "\n")
    assert printing.listed([text]) == shown


def test_printable_is_short() -> None:
    assert printing.printable("x" * 50, 9) == "x" * 9 + "..."
    assert len(printing.printable("\x1b" * 10**6, 100)) <= 203
    assert printing.listed(list(range(30)), 3) == "0, 1, 2 and 27 more"
    assert printing.listed(["y" * 100]) == "y" * 60 + "..."
