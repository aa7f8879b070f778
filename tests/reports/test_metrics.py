"""Kinds of faults in counts: tokens seen, lengths read from files, counts told to other ranks and to engines."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from support import make_batch

from lightning_padmin import MicroBatcher, PaddingStats, PadMinConfig
from lightning_padmin.cli import commands as cli
from lightning_padmin.diagnose import reading
from lightning_padmin.distributed.collectives import _collective_device
from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common.deepspeed import accumulation_boundary


@pytest.mark.parametrize(
    ("lengths", "width", "prompt", "real", "padded", "loss"),
    [([3, 5], 8, 2, 8, 16, 4), ([2, 2, 9], 10, 1, 13, 30, 10), ([6], 6, 3, 6, 6, 3)],
)
def test_r61_counts_are_of_real_tokens(
    lengths: list[int], width: int, prompt: int, real: int, padded: int, loss: int
) -> None:
    parts = MicroBatcher(PadMinConfig(launch_cost=0)).prepare(make_batch(lengths, width=width, prompt=prompt))
    stats = parts.stats
    assert (stats.real_tokens, stats.slots_before, stats.loss_tokens) == (real, padded, loss)
    assert stats.waste_before == pytest.approx(1 - real / padded)
    run = sum(micro.batch["input_ids"].numel() for micro in parts)
    assert stats.slots == run
    assert stats.waste == pytest.approx(1 - real / run)
    assert padded > real or len(lengths) == 1, "the fault: what the batch has room for"


def test_r61_ratios_are_of_sums_and_nothing_is_zero_by_zero() -> None:
    one = PaddingStats(real_tokens=10, slots=10, slots_before=10)
    other = PaddingStats(real_tokens=10, slots=90, slots_before=90)
    assert (one + other).waste == pytest.approx(0.8)
    assert (one.waste + other.waste) / 2 != pytest.approx(0.8), "the fault: a mean of ratios"
    nothing = PaddingStats()
    assert (nothing.waste, nothing.waste_before, nothing.idle) == (0, 0, 0)


class Words:
    """A tokenizer that counts words."""

    eos_token_id = 0

    def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] * len(text.split()) for text in texts]}

    def apply_chat_template(self, chat: list[dict[str, str]], **_: object) -> str:
        return " ".join(message["content"] for message in chat)


LAZY: dict[str, tuple[list[dict[str, Any]], list[str], int]] = {
    "text": ([{"text": "a b c"}, {"text": "d"}], [], 4),
    "messages": ([{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}], [], 3),
    "prompt and completion, an end mark behind each": ([{"prompt": "a b", "completion": "c d e"}] * 2, [], 12),
    "chosen and rejected": (
        [{"chosen": "a b c", "rejected": "d"}] * 2,
        ["--text-column", "chosen", "--text-column", "rejected"],
        8,
    ),
}


@pytest.mark.parametrize("name", LAZY)
def test_r60_lengths_of_untokenized_rows_are_counted_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, options, tokens = LAZY[name]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["diagnose", str(file)]) == 2, "without a tokenizer, or without a word on which columns count"
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(reading, "load_tokenizer", lambda _: Words())
    assert cli.main(["diagnose", str(file), "--tokenizer", "words", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["lengths"]["tokens"] == tokens
    assert sum(len(row.get("input_ids", ())) for row in rows) == 0, "the fault: lengths of 0, and so no padding"


@pytest.mark.parametrize("text", ["", "[]", '{"input_ids": []}\n', '{"length": 0}\n', '{"note": "none of it"}\n'])
def test_r60_nothing_to_count_is_an_error(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    assert cli.main(["diagnose", str(file)]) == 2
    assert "0%" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "right"), [("cpu:gloo,cuda:nccl", "cpu"), ("gloo", "cpu"), ("cuda:nccl", "cuda"), ("nccl", "cuda")]
)
def test_r52_counts_lie_where_the_backend_moves_them(backend: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backend)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert _collective_device(None).type == right
    assert ("cpu" in backend or backend == "gloo") == (right == "cpu"), "the fault: one device for all backends"


@pytest.mark.parametrize("count", [1, 5, 12])
def test_r52_ranks_speak_once_per_batch(count: int) -> None:
    ranks = Ranks(1)
    batcher = MicroBatcher(PadMinConfig(max_rows=1), exchange=ranks.exchange_of(0))
    assert len(list(batcher.prepare(make_batch([4] * count)))) == count
    assert ranks.calls == [1]


class Engine:
    """A stand-in for ZeRO 1 and 2: a pass at a boundary keeps its own gradient alone, on top of inner passes."""

    def __init__(self) -> None:
        self.optimizer, self.override, self.gradient, self.updates, self.open = None, None, 0.0, [], 0.0

    _is_gradient_accumulation_boundary = property(lambda self: self.override)

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.override is None or self.override

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        self.override = is_boundary

    def backward(self, gradient: float) -> None:
        self.open += gradient
        if self.is_gradient_accumulation_boundary():
            self.gradient, self.open = self.open, 0.0

    def step(self) -> None:
        self.updates.append(self.gradient)


@pytest.mark.parametrize("parts", [[1.0, 2.0, 4.0], [3.0], [0.5, 0.25]])
def test_r38_an_engine_is_told_which_pass_ends_a_batch(parts: list[float]) -> None:
    """Engines of DeepSpeed itself run in tests/distributed/test_deepspeed.py, where it is installed."""
    told, untold = Engine(), Engine()
    for _ in range(2):
        for k, gradient in enumerate(parts):
            with accumulation_boundary(told, is_last=k == len(parts) - 1):
                told.backward(gradient)
            with nullcontext():
                untold.backward(gradient)
        told.step()
        untold.step()
    assert told.updates == [sum(parts)] * 2
    assert (untold.updates == told.updates) == (len(parts) == 1), "the fault: only the last pass is kept"


def test_r38_no_sync_is_refused_there() -> None:
    engine = Engine()
    engine.inside_no_sync_ctxt = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="leave out"), accumulation_boundary(engine, is_last=True):
        pass
