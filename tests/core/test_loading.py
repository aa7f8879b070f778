"""Models by name, and the batches and losses that the command line tries them with."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_padmin.architectures.loading import (
    UsageError,
    load_model,
    logits_of,
    packed_logits,
    random_batch,
    refuse_special_files,
    takes,
    takes_positions,
    token_mean,
    vocabulary_of,
    why_not_loaded,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.tokens = nn.Embedding(50, 2), nn.Embedding(7, 2)
        self.seen: dict[str, Any] = {}

    def get_input_embeddings(self) -> nn.Embedding:
        return self.tokens

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, use_cache: Any = None, position_ids: Any = None
    ) -> Any:
        self.seen = {"mask": attention_mask, "use_cache": use_cache, "positions": position_ids}
        return SimpleNamespace(logits=self.tokens(input_ids))


class Plain(nn.Module):
    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, input_ids: Tensor, attention_mask: Any) -> Any:
        return SimpleNamespace(logits=self.logits)


def test_batches_of_random_tokens() -> None:
    batch = random_batch([3, 1, 5], 7, seed=4)
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]]
    ids, labels = batch["input_ids"], batch["labels"]
    real = batch["attention_mask"].bool()
    assert (ids[~real] == 0).all()
    assert ((ids[real] >= 1) & (ids[real] < 7)).all()
    first = torch.tensor([[2], [4], [0]])
    assert (labels.gather(1, first) == -100).all()
    expected = ids.masked_fill(~real, -100).scatter(1, first, -100)
    assert torch.equal(labels, expected)
    assert torch.equal(random_batch([3, 1, 5], 7, seed=4)["input_ids"], ids)
    assert not torch.equal(random_batch([3, 1, 5], 7, seed=5)["input_ids"], ids)


def test_number_of_token_ids() -> None:
    assert vocabulary_of(Model()) == 7
    assert vocabulary_of(nn.Sequential(nn.Linear(1, 1), nn.Embedding(9, 1))) == 9
    assert vocabulary_of(nn.Linear(1, 1)) == 100


def test_logits() -> None:
    model, batch = Model(), random_batch([2, 3], 7, seed=0)
    assert logits_of(model, batch).shape == (2, 3, 2)
    assert (model.seen["use_cache"], model.seen["mask"].tolist()) == (False, batch["attention_mask"].tolist())
    packed_logits(model, batch["input_ids"], torch.arange(3)[None])
    assert (model.seen["use_cache"], model.seen["mask"]) == (False, None)
    assert model.seen["positions"].tolist() == [[0, 1, 2]]
    assert logits_of(Plain(torch.ones(2, 3, 4)), batch).shape == (2, 3, 4)
    for logits, words in (
        (None, "without logits"),
        (torch.ones(2, 3), r"logits of shape \(2, 3\)"),
        ([1], "of type list"),
    ):
        with pytest.raises(UsageError, match=words):
            logits_of(Plain(logits), batch)


def test_arguments() -> None:
    assert takes(Model(), "use_cache")
    assert takes_positions(Model())
    assert not takes(Plain(None), "use_cache")
    assert not takes_positions(Plain(None))
    anything = nn.Module()
    anything.forward = lambda **options: options
    assert takes(anything, "use_cache")
    assert not takes_positions(anything)


def test_token_mean() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 4, 5), torch.tensor([[0, 1, 2, -100], [3, -100, 4, 1]])
    chances = logits.log_softmax(-1)
    targets = [(0, 0, 1), (0, 1, 2), (1, 1, 4), (1, 2, 1)]
    expected = -sum(chances[row, column, target] for row, column, target in targets) / 4
    torch.testing.assert_close(token_mean(logits, labels), expected)


def test_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_models.py").write_text(
        "from torch import nn\n"
        "def alone(): return nn.Linear(2, 3)\n"
        "def pair(): return nn.Linear(2, 3), len\n"
        "def wrong(): return nn.Linear(2, 3), 5\n"
        "def three(): return nn.Linear(2, 3), len, len\n"
        "def nothing(): return None\n"
        "def broken(): raise ValueError('no data')\n"
        "def ends(): raise SystemExit(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(__import__("sys").path)
    module, loss = load_model("some_models:alone")
    assert isinstance(module, nn.Linear)
    assert loss is None
    assert load_model("some_models:pair")[1] is len
    for name, words in [
        ("some_models:wrong", "returned tuple: expected a module or"),
        ("some_models:three", "returned tuple"),
        ("some_models:nothing", "returned NoneType"),
        ("some_models:broken", "raised ValueError: no data"),
        ("some_models:ends", "raised SystemExit: 3"),
        ("some_models:absent", "expected module:function, importable from here"),
        ("no_such_module_here:f", "expected module:function, importable from here"),
    ]:
        with pytest.raises(UsageError, match=words):
            load_model(name)
    assert __import__("sys").path == before


def test_files_that_reading_would_wait_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    refuse_special_files(str(tmp_path))
    refuse_special_files(str(tmp_path / "absent"))
    for name in ("zero", "pipe", "queue"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match=r"pipe' is no regular file"):
        refuse_special_files(str(tmp_path))


def test_why_a_model_is_not_loaded() -> None:
    error = ValueError("give trust_remote_code=True\nto run it")
    assert "--trust-remote-code" in why_not_loaded(error, False)
    assert why_not_loaded(error, True) == "give trust_remote_code=True"
    assert why_not_loaded(ValueError("damaged\nfile"), False) == "damaged"
