"""`padmin prove`: what checkpoints and files of audits say, one step more, and files made to do harm."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.cli import checkpoints
from lightning_padmin.cli import commands as cli
from lightning_padmin.verification import Ledger, Proof


def state_of(*audits: tuple[int, float, set[str]]) -> dict[str, Any]:
    ledger = Ledger()
    for step, difference, facets in audits:
        while ledger.step < step:
            ledger.begin_step()
        ledger.passed(difference, facets)
    return ledger.state_dict() | {"given_up": ["several of 'images' in a row"]}


AUDITS = [state_of((1, 2e-7, {"left padding", "'labels' is 3"}), (3, 4e-7, set()))]
COUNTS = {"stats": {"batches": 3}, "audits": AUDITS}


def lightning(path: Path) -> Path:
    torch.save({"state_dict": {"a": torch.ones(2)}, "callbacks": {"PadMinCallback": COUNTS}}, path / "last.ckpt")
    return path / "last.ckpt"


def fabric(path: Path) -> Path:
    torch.save({"model": {"a": torch.ones(2)}, "pad": COUNTS, "step": 3}, path / "state.pt")
    return path / "state.pt"


def trainer(path: Path) -> Path:
    kept = {"PadMinAudits": {"args": {}, "attributes": {"audits": AUDITS}}}
    (path / "trainer_state.json").write_text(json.dumps({"log_history": [{"loss": 1}], "stateful_callbacks": kept}))
    return path


def accelerate(path: Path) -> Path:
    torch.save({"scheduler": 1}, path / "custom_checkpoint_0.pkl")
    torch.save(COUNTS, path / "custom_checkpoint_1.pkl")
    return path


@pytest.mark.parametrize("make", [lightning, fabric, trainer, accelerate])
def test_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    assert cli.main(["prove", str(path)]) == 0
    text = capsys.readouterr().out
    assert "2 audits passed in 3 steps; worst relative difference 4.0e-07." in text
    assert "Seen (2): 'labels' is 3, left padding" in text
    assert "Looked for in vain (1): several of 'images' in a row" in text
    assert [line.split() for line in text.splitlines() if line.startswith(("1 ", "3 "))] == [
        ["1", "2.0e-07", "2"],
        ["3", "4.0e-07", "0"],
    ]
    assert cli.main(["prove", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["trainings"]
    assert (found["steps"], found["audits"], found["worst"]) == (3, 2, 4e-7)


def test_a_file_of_audits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (1, 2):
        proof = Proof(tmp_path, {"options": PadMinConfig()}, pytest.fail)
        proof.add("audit", step=run, way="split", facets=["a"], rows=4, difference=run * 1e-7, limit=1e-3, slots=64)
        proof.add("could not tell", step=run + 1, way="split", facets=["b"], words="", given_up=["b"])
    with proof.path.open("a") as file:
        file.write('{"kind": "aud')
    for where in (tmp_path, tmp_path / "padmin", proof.path):
        assert cli.main(["prove", str(where)]) == 0
        text = capsys.readouterr().out
        assert "2 audits passed up to step 3; worst relative difference 2.0e-07; started 2 times; lines that" in text
        assert "Looked for in vain (1): b" in text
    assert "2     split     4     64     2.0e-07  1e-03    1\n3     split" in text
    Proof(tmp_path, {}, pytest.fail).add("refused", step=9, way="split", facets=["c"], words="audit of step 9: \x1b[2J")
    assert cli.main(["prove", str(tmp_path)]) == 1
    assert "Refused at step 9: audit of step 9: \\x1b[2J" in capsys.readouterr().out


# One step more.


class Tied(nn.Module):
    """A head that shares its weights with the embedding, as safetensors leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(support.VOCABULARY, 8)
        self.head = nn.Linear(8, support.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def step(kind: type[nn.Module], reads_padding: bool = False, *more: Any) -> Any:
    torch.manual_seed(5)
    module = kind().double()
    seen.append(module)

    def loss(batch: Any) -> Tensor:
        losses = support.token_losses(module(batch["input_ids"]), batch["labels"])
        value = support.reduce_loss(losses, batch["labels"], "token-mean")
        return value + (module.embedding.weight.sum() * batch["input_ids"].shape[1] if reads_padding else 0)

    return module, loss, support.make_batch([9, 4, 3, 2], width=12), *more


seen: list[nn.Module] = []


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> str:
    module: Any = types.ModuleType("users_step")
    module.right = lambda: step(support.TinyLM)
    module.tied = lambda: step(Tied)
    module.padding = lambda: step(Tied, True)
    module.configured = lambda: step(Tied, False, PadMinConfig(loss_reduction="row-mean"))
    module.pair = lambda: step(Tied)[:2]
    module.odd = lambda: (1, 2, 3)
    monkeypatch.setitem(sys.modules, "users_step", module)
    return "users_step"


def test_one_step_more(tmp_path: Path, users: str, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(1)
    weights = support.TinyLM().double().state_dict()
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": weights, "callbacks": {"PadMinCallback": COUNTS}}, path)
    assert cli.main(["prove", str(path), "--step", f"{users}:right"]) == 0
    text = capsys.readouterr().out
    assert "EXACT    gradients of the split batch against the batch as it came" in text
    assert torch.equal(seen[-1].state_dict()["head.weight"], weights["head.weight"])  # those of the checkpoint
    assert cli.main(["prove", str(path), "--step", f"{users}:right", "--loss-reduction", "sum", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["step"]["is_exact"] is False
    # Of a Trainer, whose weights lie beside, under the name of a wrapper; a tied one is not there.
    tied = {"module.embedding.weight": Tied().double().embedding.weight.detach()}
    safetensors.save_file(tied, trainer(tmp_path) / "model.safetensors")
    assert cli.main(["prove", str(tmp_path), "--step", f"{users}:tied"]) == 0
    assert torch.equal(seen[-1].head.weight, tied["module.embedding.weight"])
    assert cli.main(["prove", str(tmp_path), "--step", f"{users}:configured"]) == 1
    capsys.readouterr()
    assert cli.main(["prove", str(tmp_path), "--step", f"{users}:padding"]) == 1
    assert "training would change" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "users_step:pair"], "expected (module, function batch -> loss, batch)"),
        (["--step", "users_step:odd"], "returned (int, int, int)"),
        (["--step", "users_step:absent"], "expected module:function"),
        (["--step", "users_step:configured", "--token-budget", "8"], "--token-budget: users_step:configured returns a"),
        (["--step", "users_step:right"], "has no weights of a TinyLM"),
    ],
)
def test_steps_that_cannot_be_taken(
    tmp_path: Path, users: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["prove", str(lightning(tmp_path)), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


# Files made to do harm, and others.


class Touch:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


def nothing(path: Path) -> Path:
    return path / "absent.ckpt"


def empty(path: Path) -> Path:
    return path


def evil(path: Path) -> Path:
    torch.save({"callbacks": {"PadMinCallback": COUNTS}, "more": Touch(path / "RAN")}, path / "evil.ckpt")
    return path / "evil.ckpt"


def damaged(path: Path) -> Path:
    whole = lightning(path).read_bytes()
    (path / "last.ckpt").write_bytes(whole[: len(whole) // 2])
    return path / "last.ckpt"


def deep(path: Path) -> Path:
    (path / "trainer_state.json").write_text("[" * 100_000)
    return path


def long(path: Path) -> Path:
    (path / "trainer_state.json").write_text(" " * 2**21 + "{}")
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path / "pipe.ckpt")
    return path / "pipe.ckpt"


def without(path: Path) -> Path:
    torch.save({"state_dict": {}, "audits": [1, 2]}, path / "last.ckpt")
    return path / "last.ckpt"


def malformed(path: Path) -> Path:
    torch.save({"audits": [AUDITS[0] | {"step": "\x1b[2J"}]}, path / "last.ckpt")
    return path / "last.ckpt"


def other_lines(path: Path) -> Path:
    (path / "rows.jsonl").write_text('{"text": "a"}\n')
    return path / "rows.jsonl"


def odd_lines(path: Path) -> Path:
    (path / "rows.jsonl").write_text('{"kind": "audit", "step": 1, "facets": {"\\u001b[2J": 1}}\n')
    return path / "rows.jsonl"


def nothing_passed(path: Path) -> Path:
    torch.save({"audits": [Ledger().state_dict()]}, path / "last.ckpt")
    return path / "last.ckpt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "there is no such file"),
        (empty, "is no checkpoint"),
        (evil, "not unpickled"),
        (damaged, "cannot be read as a checkpoint"),
        (deep, "too many levels"),
        (long, "is longer than 1 MB"),
        (pipe, "is a pipe"),
        (without, "has no record of audits"),
        (malformed, "audits of a checkpoint cannot be read"),
        (other_lines, "it has no kind"),
        (odd_lines, "is no line of audits"),
        (nothing_passed, "no audit has passed"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    message: str,
) -> None:
    monkeypatch.setattr(checkpoints, "_MOST_TEXT", 2**20)
    assert cli.main(["prove", str(make(tmp_path))]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert "\x1b" not in error
    assert not (tmp_path / "RAN").exists()


def test_names_of_facets_reach_the_terminal_in_plain_letters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = state_of((1, 1e-7, {"\x1b]0;title\x07", "‮reversed", "long" * 10_000}))
    torch.save({"audits": [state, AUDITS[0]]}, tmp_path / "last.ckpt")
    assert cli.main(["prove", str(tmp_path / "last.ckpt")]) == 0
    text = capsys.readouterr().out
    assert not {"\x1b", "\x07", "‮"} & set(text)
    assert "last.ckpt, training 2 of 2" in text
    assert max(map(len, text.splitlines())) < 2_000


def test_weight_files_lie_in_the_folder(tmp_path: Path, users: str, capsys: pytest.CaptureFixture[str]) -> None:
    index = {"weight_map": {"embedding.weight": "../elsewhere.safetensors"}}
    (trainer(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cli.main(["prove", str(tmp_path), "--step", f"{users}:tied"]) == 2
    assert "outside of its folder" in capsys.readouterr().err
