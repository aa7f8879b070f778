"""examples/trl_grpo.py and examples/trl_sft_dpo.py on tiny models: they run, and what they say is so."""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("trl")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # as for `python examples/trl_grpo.py`
trl_grpo, trl_sft_dpo = importlib.import_module("trl_grpo"), importlib.import_module("trl_sft_dpo")
probe, report, sums = (importlib.import_module(f"_trl.{name}") for name in ("probe", "report", "sums"))
smollm2 = importlib.import_module("_quickstart.model")

needs_tokenizer = pytest.mark.skipif(
    importlib.util.find_spec(smollm2.PACKAGE) is None, reason=f"needs the tokenizer: {smollm2.INSTALL}"
)
TINY = "--steps 2 --rows 8 --longest 12 --budget 160 --warm-up 4 --threads 1"
SHORT = "--arch lfm2 --steps 2 --rows 4 --budget 512 --threads 1"


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Whole runs


@needs_tokenizer
@pytest.mark.parametrize(
    ("arch", "mode"),
    [
        pytest.param("lfm2", "auto", marks=pytest.mark.slow),
        pytest.param("bamba", "replay", marks=pytest.mark.slow),
        pytest.param("lfm2", "joint", marks=pytest.mark.slow),
    ],
)
def test_grpo(arch: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    records: list[Any] = []
    draw = report.draw_rewards
    monkeypatch.setattr(report, "draw_rewards", lambda *args: (records.extend(args[:2]), draw(*args)))
    picture = tmp_path / "out" / "reward.png"
    assert trl_grpo.main([*TINY.split(), "--arch", arch, "--mode", mode, "--plot", str(picture)]) == 0
    stock, ours = records
    assert probe.steps_alike(ours, stock) == 2
    assert max(report.differences(ours, stock).values()) < 1e-5
    assert ours.values("reward") == stock.values("reward")
    assert ours.real_tokens == stock.real_tokens
    assert ours.slots < stock.slots
    assert all("padmin/waste" in logs for logs in ours.logs)
    assert not any("padmin/waste" in logs for logs in stock.logs)
    assert all(seconds.clock > 0 and seconds.cpu > 0 for record in records for seconds in record.steps)
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert re.search(r"padmin step 2 of 2: reward \d\.\d{3}, waste \d+%", said)
    assert "The same completions in all 2 steps" in said


def few_words() -> PreTrainedTokenizerFast:
    """One token for each word, digit and mark; all words that are not numbers are one token."""
    known = ["<unk>", "<end>", "<pad>", *"0123456789.,+-=?:", "\n"]
    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|[^\W\d]+|[^\w\s]|\n"), "removed", invert=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>", pad_token="<pad>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} . {% endfor %}"
    return fast


@pytest.mark.slow
def test_sft_and_dpo(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With a small vocabulary, since logits are what takes time in small models."""
    tokenizer = few_words()
    make = trl_sft_dpo.policies.random_model
    monkeypatch.setattr(trl_sft_dpo.policies, "load", lambda arch, layers, seed: (make(arch, 2, tokenizer), tokenizer))
    assert trl_sft_dpo.main(SHORT.split()) == 0
    said = capsys.readouterr().out
    for part in said.split("SFT:")[1].split("DPO:"):
        before, after = (
            int(re.search(rf"│ {name} +│ +([\d,]+) │", part)[1].replace(",", "")) for name in ("stock", "padmin")
        )
        assert after < before
        differences = re.search(r"Largest differences: loss (\S+), gradient norm (\S+)\. ", part)
        assert max(map(float, differences.groups())) < 1e-5
        assert re.search(r"│ 2 +│ +\d+\.\d{6} │ +\d+\.\d{6} │ \d\.\de-\d\d", part) or "0.0e+00" in part


# The command line


@pytest.mark.parametrize("example", [trl_grpo, trl_sft_dpo])
def test_help(example: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        example.main(["--help"])
    assert left.value.code == 0
    assert "--budget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("example", "options", "expected"),
    [
        (trl_grpo, "--rows 6", r"trl_grpo\.py: --rows 6: give a multiple of --generations 4\."),
        (trl_grpo, "--arch gpt5", r"trl_grpo\.py: argument --arch: invalid choice.*\(--help lists"),
        (trl_sft_dpo, "--steps 1", r"trl_sft_dpo\.py: argument --steps: '1' is no integer of at least 2"),
    ],
)
def test_bad_options_get_one_line(example: Any, options: str, expected: str, capsys: Any) -> None:
    assert example.main(options.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(expected, line)


# The parts


def test_the_reward_is_for_right_and_brief_answers() -> None:
    texts = ["12", "5 + 7 = 12", "It is 13.", "No idea.", "12 or 13"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    ids = [range(1), range(6), range(4), range(10), range(4)]
    values = sums.reward(10)(completions=completions, completion_ids=ids, answer=[12] * 5)
    assert values == pytest.approx([1.45, 1.2, 0.3, 0.0, 0.3])


def test_problems_and_written_answers() -> None:
    written = sums.problems(50, seed=1)
    assert written == sums.problems(50, seed=1) != sums.problems(50, seed=2)
    assert all(f"{a} + {b}" in text for text, a, b in written)
    right = [
        int(re.findall(r"\d+", answer)[-1]) == a + b
        for (_, answer), (_, a, b) in zip(sums.answers(50, seed=1), written, strict=True)
    ]
    assert 20 < sum(right) < 45


def record(name: str, completions: list[int], rewards: list[float], norm: float = 1.0) -> Any:
    made = probe.Record(name, slots=200, real_tokens=100)
    for completion, reward in zip(completions, rewards, strict=True):
        made.completions.append(((completion,),))
        made.logs.append({"reward": reward, "loss": 0.0, "entropy": 1.0, "grad_norm": norm})
        made.steps.append(probe.Seconds(2.0, 2.0))
    return made


def test_what_is_said_once_sampling_has_gone_apart(tmp_path: Path) -> None:
    stock, ours = record("stock", [1, 2, 3], [0.1, 0.2, 0.3]), record("padmin", [1, 2, 4], [0.1, 0.2, 0.4])
    words = report.verdict(ours, stock)
    assert "The same completions in steps 1 to 2 of 3" in words
    assert "In step 3 another token was drawn" in words
    assert "NOT" not in words
    report.draw_rewards(stock, ours, "title", tmp_path / "apart.png")
    assert (tmp_path / "apart.png").is_file()


def test_what_is_said_of_another_training() -> None:
    stock = record("stock", [1], [0.1])
    assert report.verdict(record("padmin", [1], [0.1], norm=1.1), stock).startswith("NOT the same training. ")
    assert report.verdict(record("padmin", [2], [0.1]), stock).startswith("NOT the same training: the very first")


def test_ends_are_means_of_a_quarter() -> None:
    values = [random.random() for _ in range(12)]
    assert report.ends(values) == pytest.approx((sum(values[:3]) / 3, sum(values[-3:]) / 3))
    assert report.ends([1.0]) == (1.0, 1.0)
