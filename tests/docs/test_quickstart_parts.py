"""The parts of examples/quickstart.py: its problems, its rows, its messages, its picture, and a run on a tiny model."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # as for `python examples/quickstart.py`
quickstart = importlib.import_module("quickstart")
arguments, data, model, problems, report = (
    importlib.import_module(f"_quickstart.{name}") for name in ("arguments", "data", "model", "problems", "report")
)

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def split_words(text: str) -> list[str]:
    """A stand-in for tokens: words, single digits, punctuation, line ends."""
    return re.findall(r"\d|[^\W\d]+|[^\w\s]|\n", text)


def count(text: str) -> int:
    return len(split_words(text))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a chat template; what it does not know becomes one token as well."""
    known = ["<unk>", "<end>", *split_words("".join(problems.BACKGROUND)), *"0123456789.,+-=?:[]", "\n"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(known))}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|[^\W\d]+|[^\w\s]|\n"), "removed", invert=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>", pad_token="<end>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="module")
def tiny_model(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of two small layers."""
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def written() -> list:
    lengths = random.Random(1).sample(data.read_lengths(), 150)
    return list(problems.write_problems(lengths, count, seed=3))


# Problems


def test_every_equation_holds(written):
    for problem in written:
        equations = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", problem.completion)
        assert len(equations) >= len(problem.changes)
        for left, sign, right, result in equations:
            assert int(result) == int(left) + (1 if sign == "+" else -1) * int(right)


def test_the_answer_follows_from_the_changes(written):
    for problem in written:
        stocks = [problem.start + sum(problem.changes[:day]) for day in range(len(problem.changes) + 1)]
        assert min(stocks) > 0
        assert problem.answer == stocks[-1]
        assert re.findall(r"\d+", problem.completion.splitlines()[-1]) == [str(problem.answer)]
        days = re.findall(r"Day (\d+): (\d+) [+-] \d+ = (\d+)", problem.completion)
        assert days == [(str(i + 1), str(a), str(b)) for i, (a, b) in enumerate(pairwise(stocks))]


def test_the_prompt_states_the_start_and_every_change(written):
    gains = {deed for setting in problems.SETTINGS for deed in setting.gain}
    losses = {deed for setting in problems.SETTINGS for deed in setting.loss}
    event = re.compile(r"On (?:each of days (\d+) to (\d+)|both day (\d+) and day (\d+)|day (\d+)), ([^.]*)\.")
    for problem in written:
        assert re.search(rf"(At first there are|counts) {problem.start} ", problem.prompt)
        stated: list[int] = []
        for *days, deed in event.findall(problem.prompt):
            numbers = [int(day) for day in days if day]
            amount = re.search(r"\d+", deed)[0]
            pattern = re.sub("|".join(problems.NAMES), "{name}", deed.replace(amount, "{n}"))
            assert pattern in gains | losses
            stated += [int(amount) if pattern in gains else -int(amount)] * (numbers[-1] - numbers[0] + 1)
        assert tuple(stated) == problem.changes


def test_the_seed_decides():
    def texts(seed: int) -> list[str]:
        return [p.prompt + p.completion for p in problems.write_problems([(80, 120)] * 5, count, seed=seed)]

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)


def assert_close(wanted: np.ndarray, got: np.ndarray) -> None:
    """Most rows within a few tokens, and the same profile."""
    assert np.abs(got - wanted).mean() < 4
    for wanted_side, got_side in zip([*wanted.T, wanted.sum(1)], [*got.T, got.sum(1)], strict=True):
        for percent in (25, 50, 75, 95):
            assert np.percentile(got_side, percent) == pytest.approx(np.percentile(wanted_side, percent), rel=0.06)


def test_lengths_are_the_wanted_ones():
    wanted = data.read_lengths()
    got = problems.write_problems(wanted, count, seed=0, prompt_extra=30, completion_extra=1)
    assert_close(np.array(wanted), np.array([(30 + count(p.prompt), 1 + count(p.completion)) for p in got]))


@pytest.mark.skipif(importlib.util.find_spec(model.PACKAGE) is None, reason="the model package is not installed")
def test_lengths_are_the_wanted_ones_with_the_real_tokenizer():
    real = AutoTokenizer.from_pretrained(model.gguf_folder(), gguf_file=model.GGUF_FILE)
    rows = data.make_rows(data.written_pairs(real, 200, seed=0), real)
    got = [(row["labels"].count(data.IGNORED), len(row["labels"])) for row in rows]
    wanted = data.draw(data.read_lengths(), 200, seed=0)
    assert_close(np.array(wanted), np.array([(prompt, total - prompt) for prompt, total in got]))


def test_the_committed_lengths_are_the_profile_of_gsm8k():
    prompt, completion = np.array(data.read_lengths()).T
    assert len(prompt) == 512
    assert prompt.mean() == pytest.approx(90.3, rel=0.01)
    assert completion.mean() == pytest.approx(125.6, rel=0.01)
    assert np.percentile(completion, 99) == pytest.approx(293, rel=0.05)


# Rows and batches


def test_rows_label_the_completion_and_its_end(tokenizer):
    (row,) = data.make_rows([("The weather is mild.", "Nothing else changes.")], tokenizer)
    labelled = [token for token in row["labels"] if token != data.IGNORED]
    assert tokenizer.decode(labelled).split() == ["Nothing", "else", "changes", ".", "<end>"]
    assert row["input_ids"][-len(labelled) :] == labelled
    assert row["labels"][: -len(labelled)] == [data.IGNORED] * (len(row["labels"]) - len(labelled))


def test_collate_pads_on_the_right_to_the_longest_row():
    rows = [data.Row(input_ids=[5, 6, 7], labels=[-100, 6, 7]), data.Row(input_ids=[8], labels=[8])]
    batch = data.right_pad(pad_token_id=2)(rows)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 2, 2]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[-100, 6, 7], [8, -100, -100]],
    }


def test_draw_repeats_nothing_before_everything_has_come():
    drawn = data.draw(range(5), 12, seed=0)
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == list(range(5))
    assert len(drawn) == 12
    assert drawn == data.draw(range(5), 12, seed=0) != data.draw(range(5), 12, seed=1)


def test_pairs_are_read_from_the_named_fields(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "one", "a": "1"}\n\n{"q": "two", "a": "2", "other": null}\n')
    assert data.read_pairs(file, "q", "a") == [("one", "1"), ("two", "2")]


# Messages


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (None, [], r"--data .*rows.jsonl: cannot be read \(No such file"),
        ("", [], r"--data .*rows.jsonl: the file is empty"),
        ("prompt,completion", [], r"--data .*, line 1: not JSON"),
        ("[1]", [], r"--data .*, line 1: a JSON list; give one JSON object"),
        ('{"question": "a", "answer": "b"}', [], r"--prompt-field prompt: .*no such field; it has question, answer"),
        (
            '{"question": "a", "answer": "b"}',
            ["--prompt-field", "question", "--completion-field", "reply"],
            r"--completion-field reply: .*no such field",
        ),
        ('{"prompt": "a", "completion": 3}', [], r"--completion-field completion: .*line 1 holds 3; name a field"),
        ('{"prompt": " ", "completion": "b"}', [], r"--prompt-field prompt: .*holds ' '"),
    ],
)
def test_bad_data_gets_one_line(content, options, expected, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    assert_refused(["--data", str(file), *options], expected, tmp_path, capsys)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--layers", "some"], r"argument --layers: 'some' is no integer of at least 1; give one, or 'all'"),
        (["--layers", "0"], r"argument --layers: '0'"),
        (["--layers", "3"], r"--layers 3: this model has 2 layers; give 1 to 2, or 'all'"),
        (["--steps", "1"], r"argument --steps: '1' is no integer of at least 2"),
        (["--token-budget", "-5"], r"argument --token-budget: '-5'"),
        (["--stpes", "2"], r"unrecognized arguments: --stpes 2 \(--help"),
        (["--model", "no/such/folder"], r"--model no/such/folder: .* Give a folder written by save_pretrained"),
    ],
)
def test_bad_options_get_one_line(options, expected, tiny_model, tmp_path, capsys):
    assert_refused(["--model", str(tiny_model), *options], expected, tmp_path, capsys)


def assert_refused(options: list[str], expected: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.main([*options, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match("quickstart.py: " + expected, line)


def test_out_must_be_a_folder(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert_refused([], r"--out .*file: .*; name a folder", tmp_path / "file", capsys)


def test_a_model_with_dropout_is_refused(tiny_model, tokenizer, tmp_path, capsys):
    LlamaConfig.from_pretrained(tiny_model, attention_dropout=0.1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert_refused(["--model", str(tmp_path)], r".*dropout \{'attention_dropout': 0.1\}", tmp_path, capsys)


def test_a_missing_model_package_is_named_with_its_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PADMIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model, "PACKAGE", "no_such_package")
    assert_refused([], re.escape("--model: the default model's package is missing: " + model.INSTALL), tmp_path, capsys)


# The cache


def test_an_interrupted_save_leaves_no_cache(tmp_path, monkeypatch):
    def interrupted(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setenv("PADMIN_CACHE", str(tmp_path))
    monkeypatch.setattr(model, "gguf_folder", lambda: tmp_path)
    monkeypatch.setattr(model, "_dequantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.smollm2_folder()
    assert not list(tmp_path.iterdir())

    monkeypatch.setattr(model, "_dequantize", lambda source, target: target.mkdir())
    assert model.smollm2_folder() == model.smollm2_folder() == tmp_path / "smollm2-135m-instruct"


def test_an_unwritable_cache_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PADMIN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(model, "gguf_folder", lambda: tmp_path)
    with pytest.raises(arguments.BadInput, match=r"PADMIN_CACHE=.*file: .*name a writable folder"):
        model.smollm2_folder()


# The report


def result(name: str = "plain", **changes: float) -> report.Result:
    values = {"real_tokens": 60, "slots": 100, "micro_batches": 2, "seconds": 3.0, "final_loss": 1.0}
    return report.Result(name=name, **(values | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"seconds": 2.0},
            r"Same gradients \(within 2.0e-07\), 25% fewer slots \(waste 40% -> 20%\), 1.50 times as fast",
        ),
        ({"seconds": 6.0}, r"Same gradients .* but 2.00 times as slow"),
        ({"gradient_difference": 1e-4}, r"NOT the same training: gradients differ by 1.0e-04"),
        ({"gradient_difference": float("nan")}, r"NOT the same training"),
    ],
)
def test_the_verdict_says_what_happened(changes, expected):
    padmin = result("padmin", **({"slots": 75, "gradient_difference": 2e-7} | changes))
    assert re.match(expected, report.verdict(result(), padmin))


def test_relative_difference_is_of_the_largest_gradient():
    ours, theirs = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([0.0])}, {"a": torch.tensor([1.0, -4.0])}
    assert quickstart.relative_difference(ours, theirs) == float("inf")  # a gradient that the other has not
    theirs["b"] = torch.tensor([0.5])
    assert quickstart.relative_difference(ours, theirs) == 0.125


def test_the_typical_batch_has_the_middle_waste():
    assert report.typical([[9, 1], [9, 9], [9, 6]]) == [9, 6]


def test_the_picture_is_written(tmp_path):
    path = tmp_path / "lengths.png"
    report.draw_batch([300, 20, 280, 40, 35, 90], token_budget=600, path=path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20]) == 1800  # pixels across


# All together


def test_a_whole_run_on_a_tiny_model(tiny_model, tmp_path, capsys):
    rows = [{"question": "The weather is mild. " * n, "answer": "Nothing else changes. " * n} for n in (1, 9, 2, 8, 3)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    options = f"--model {tiny_model} --layers 1 --data {file} --prompt-field question --completion-field answer"
    options += f" --steps 2 --batch-size 8 --token-budget 200 --out {tmp_path}/out"
    assert quickstart.main(options.split()) == 0
    said = capsys.readouterr()
    assert re.search(r"plain +│ +[\d,]+ │ +[\d.]+% │ +2 │", said.out)
    assert re.search(r"padmin +│ .* │ +\d\.\de-0[789] │", said.out)
    assert re.search(r"Same gradients \(within \S+\), \d+% fewer slots", said.out)
    assert said.err == ""
    assert (tmp_path / "out" / "lengths.png").is_file()
