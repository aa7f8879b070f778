"""examples/benchmarks in a very small setting: what they compare is the same training, and the numbers add up."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))  # as for `python .../planner.py`
policy_update, planner, gpu = (importlib.import_module(name) for name in ("policy_update", "planner", "gpu"))
methods, models, packing, partitions, timing, update, workload = (
    importlib.import_module(f"_speed.{name}")
    for name in ("methods", "models", "packing", "partitions", "timing", "update", "workload")
)

TINY = "--rows 6 --scale 64 --budget 64 --hidden 32 --layers 2 --vocabulary 32 --repeats 1"


@pytest.fixture(autouse=True)
def _settings() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    file = tmp_path / "numbers.json"
    code = policy_update.main([*TINY.split(), "--threads", "1", "--json", str(file), *arguments])
    return code, json.loads(file.read_text())


# The policy update


def test_all_methods_train_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "out" / "speed.png"
    code, (block,) = run(tmp_path, "--model", "qwen2", "--sweep", "--plot", str(picture))
    assert code == 0
    assert block["is_exact"]
    assert 0 < block["largest_gradient_difference"] < 1e-5
    rows = {row["method"]: row for row in block["methods"]}
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["memory_bytes"] > 0
        assert len(row["turns"]) == 1
        if row["method"] != methods.RECTANGLE:
            assert row["gradient_difference"] < 1e-5
            assert row["real_share"] == pytest.approx(block["real_tokens"] / row["slots"])
    slots = [rows[name]["slots"] for name in ("configured maximum", "generation-wide padding", "trim per micro-batch")]
    assert slots[0] == 6 * (4096 // 64 + 8192 // 64)
    assert slots == sorted(slots, reverse=True)
    assert rows[methods.DEFAULT]["slots"] <= rows[methods.GREEDY]["slots"] <= slots[1]
    assert rows["each row alone"]["slots"] == block["real_tokens"] == rows["packed, block-diagonal mask"]["slots"]
    assert rows["each row alone"]["micro_batches"] == 6
    assert block["real_tokens"] <= rows[methods.RECTANGLE]["slots"] < block["real_tokens"] + 6
    assert rows[methods.RECTANGLE]["speed"] == 1
    swept = [cost for row in rows.values() for cost in row["launch_costs"]]
    assert sorted(swept) == sorted(policy_update.SWEEP)
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "perfect rectangle" in said
    assert "times the speed of the greedy budget" in said


def test_hybrids_leak_when_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, blocks = run(tmp_path, "--model", "lfm2", "bamba", "qwen3-next", "--slow-repeats", "0")
    assert code == 0
    for block in blocks:
        assert block["leak"] > packing.LEAKS
        assert not any(row["method"].startswith("packed") for row in block["methods"])
        assert all(row["slots"] for row in block["methods"])
        names = {row["method"] for row in block["methods"]}
        assert names.isdisjoint({"configured maximum", "generation-wide padding"})  # the slow ones
        assert names >= set(policy_update.COMPARED)
    assert "leaks" in capsys.readouterr().out


def test_wrong_weights_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "weighted", lambda parts: [(part, 1 / len(parts)) for part in parts])
    code, (block,) = run(tmp_path, "--model", "qwen2", "--slow-repeats", "1")
    assert code == 1
    assert block["largest_gradient_difference"] > 0.01


def test_out_of_memory_is_a_row_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(workload: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(packing, "packed", fails)
    code, (block,) = run(tmp_path, "--model", "qwen2")
    assert code == 0
    assert [row["failure"] for row in block["methods"] if row["method"].startswith("packed")] == ["out of memory"] * 2
    assert "out of memory" in capsys.readouterr().out


def test_documents_of_a_pack_are_kept_apart() -> None:
    """Log-probs inside of a pack, with both kinds of attention, are those of each row alone."""
    model = models.build("qwen2", 32, 2, 32)
    assert packing.leak(model, 32) < 1e-5
    load = workload.Workload(np.array([[3, 5], [2, 9], [4, 1]]), (8, 16), 1, 32, 32)
    (pack,) = packing.packed(load)  # longest first
    assert pack["cu_seq_lens_q"].tolist() == [0, 11, 19, 24]
    parts = methods.by_rows(load.batch(), 1)
    alone = torch.cat([update.log_probs(model, methods.trim(parts[row][0]))[0] for row in (1, 0, 2)])
    inside = [k for k in range(23) if k + 1 not in (11, 19)]
    torch.testing.assert_close(update.log_probs(model, pack)[0, inside], alone)
    with packing.attention_by_document(model):
        torch.testing.assert_close(update.log_probs(model, pack)[0, inside], alone)
    assert model.config._attn_implementation == "sdpa"
    labels = pack["labels"][0]
    assert int((labels != workload.IGNORED).sum()) == 15
    assert all(labels[start] == workload.IGNORED for start in (0, 11, 19))


def test_pytorchs_kernel_is_called_as_its_signature_says(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    signature = inspect.signature(varlen.varlen_attn)

    def stand_in(*args: Any, **options: Any) -> torch.Tensor:
        given = signature.bind(*args, **options).arguments
        assert given.get("window_size", (-1, 0)) == (-1, 0)
        assert given["cu_seq_q"] is given["cu_seq_k"]
        assert given["max_q"] == given["max_k"] == 5
        q, k, v = given["query"], given["key"], given["value"]
        return packing._one_by_one(q, k, v, given["cu_seq_q"], given["max_q"], given["scale"])

    stand_in.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flash_attn" else name)
    name, kernel = packing._kernel.__wrapped__(True)
    assert name == "torch varlen_attn"
    q, k, v = torch.randn(3, 8, 2, 4)
    made = kernel(q, k, v, torch.tensor([0, 5, 8], dtype=torch.int32), 5, 0.5)
    second = [tensor[5:].transpose(0, 1) for tensor in (q, k, v)]
    truth = torch.nn.functional.scaled_dot_product_attention(*second, is_causal=True, scale=0.5)
    torch.testing.assert_close(made[5:].transpose(0, 1), truth)


def test_an_interrupt_ends_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update_once, left = timing.policy_update, iter([True] * 30)

    def interrupted(*arguments: Any) -> None:
        if not next(left, False):
            raise KeyboardInterrupt
        update_once(*arguments)

    monkeypatch.setattr(timing, "policy_update", interrupted)
    code, (block,) = run(
        tmp_path, *["--model", "qwen2", "--repeats", "9", "--skip", "configured", "packed", "each", "trim"]
    )
    assert code == 0
    assert {row["method"] for row in block["methods"]} >= set(policy_update.COMPARED)
    turns = [len(row["turns"]) for row in block["methods"]]
    assert 1 <= min(turns) <= max(turns) < 9


def test_draws_are_those_of_the_published_numbers() -> None:
    lengths = workload.draw(workload.read_lengths(workload.FILES["rl"]), 128, 8, seed=3)
    load = workload.Workload(lengths, (512, 1024), 4, 4096, 1024)
    assert load.real_tokens == 16_121
    assert load.batch()["input_ids"].numel() == 111_872
    assert load.rectangle().real_tokens == 16_128


# The planner


def test_planner_is_the_cheapest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    quick = "--rows 16 --draws 2 --small 20 --sizes 8 32 --repeats 1 --json"
    assert planner.main([*quick.split(), str(file)]) == 0
    facts = json.loads(file.read_text())
    assert facts["small_wrong"] == 0
    assert [row["rows"] for row in facts["times"]] == [8, 32, 8, 32]
    assert all(row["least"] >= 1 for row in facts["costs"])
    assert all(set(row["times_ours"]) == set(planner.RIVALS) for row in facts["costs"])
    assert "20 of 20 small batches" in capsys.readouterr().out


def test_a_cheaper_planner_is_told_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(partitions, "cost", lambda groups, lengths, launch_cost: 1)
    assert planner.main(["--rows", "8", "--draws", "1", "--small", "0", "--sizes", "8", "--repeats", "1"]) == 1
    assert "another planner is cheaper on: RL, 8 rows" in capsys.readouterr().err


def test_other_planners() -> None:
    lengths = np.array([4, 5, 6, 7, 8])
    sums = sorted(int(lengths[group].sum()) for group in partitions._largest_differences(lengths, 2))
    assert sums == [14, 16]  # the textbook's example of this method; the best is 15, 15
    assert partitions.first_fit(lengths, 16) == [[4, 3], [2, 1], [0]]
    assert partitions.in_order(lengths, 16) == [[0, 1], [2, 3], [4]]
    assert partitions.strided(lengths, 24) == [[4, 2, 0], [3, 1]]
    assert sum(1 for _ in partitions._partitions(list(range(6)))) == 203  # Bell's number
    assert partitions.exhaustive(np.array([10, 10, 1]), 20, 2) == 20 + 2 + 1 + 2
    assert partitions.balanced(np.array([50, 1]), 10) == [[0], [1]]  # over the budget, so alone


# The GPU


def test_gpu_without_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_gpu_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The same code, but for the kernels."""
    monkeypatch.setattr(gpu, "EXACT", f"{TINY} --dtype float32")
    assert gpu.main([*TINY.split(), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "float32" in said
    assert "bfloat16" in said
