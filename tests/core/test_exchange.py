"""Ranks that agree: equal counts, dummies, a mean over all ranks, and errors that everybody hears of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from ranks import Ranks
from support import TinyLM, make_batch, relative
from torch import Tensor

from lightning_padmin import MicroBatcher, MicroBatches, PadMinConfig, PadMinError, PadMinWarning
from lightning_padmin.distributed import collectives as exchanges
from lightning_padmin.distributed.collectives import exchange_all, exchange_alone, raise_together, world_size
from lightning_padmin.errors import BatchError, ConfigError, PeerError, PlanError, SchemaError

BUDGET = {"token_budget": 8, "launch_cost": 0}


def prepare_on_ranks(batches: Sequence[Any], config: PadMinConfig | None = None, **options: Any) -> list[Any]:
    """`MicroBatches`, or the exception, of every rank."""
    ranks = Ranks(len(batches))
    config = config or PadMinConfig(**(BUDGET | options))

    def work(rank: int) -> MicroBatches | Exception:
        try:
            return MicroBatcher(config, exchange=ranks.exchange_of(rank)).prepare(batches[rank])
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(batches)) as pool:
        results = list(pool.map(work, range(len(batches))))
    assert ranks.calls == [1] * len(batches), "one exchange per batch, also where a batch is refused"
    return results


# --- Counts. ---


def test_all_ranks_run_as_many_micro_batches_as_the_busiest() -> None:
    busy, light = prepare_on_ranks([make_batch([8, 8, 8]), make_batch([2, 2, 2])])
    assert (len(busy), len(light)) == (3, 3)
    assert (len(busy.plan), len(light.plan)) == (3, 3)  # cut further, so that no dummy is needed
    assert [micro.is_dummy for micro in light] == [False] * 3
    assert sorted(np.concatenate([micro.rows for micro in light]).tolist()) == [0, 1, 2]


def test_a_rank_that_runs_out_of_rows_runs_dummies() -> None:
    batches = [make_batch([8, 8, 8, 8], seed=1), make_batch([4, 3], seed=2)]
    busy, light = prepare_on_ranks(batches)
    assert (len(busy), len(light), len(light.plan)) == (4, 4, 2)
    assert [micro.is_dummy for micro in light] == [False, False, True, True]
    assert [micro.is_last for micro in light] == [False, False, False, True]
    assert light.weights.tolist() == pytest.approx([3 / 5, 2 / 5, 0, 0])
    assert light.shares.tolist() == light.weights.tolist()
    assert (light.stats.dummies, light.stats.micro_batches, light.stats.slots) == (2, 4, 4 + 3 + 3 + 3)
    assert (busy.stats.wait_slots, light.stats.wait_slots) == (0, 32 - 7)
    assert (light.stats.rows, light.stats.real_tokens, light.stats.loss_tokens) == (2, 7, 5)
    # Dummies are copies of a real row: a loss that can be computed, gradients of exactly zero.
    model = TinyLM().double()
    for micro in light[2:]:
        assert micro.rows.tolist() == [1]
        model.zero_grad()
        loss = support.reduce_loss(
            support.token_losses(model(micro.batch["input_ids"]), micro.batch["labels"]),
            micro.batch["labels"],
            "token-mean",
        )
        assert loss > 0
        (loss * micro.weight).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None and (gradient == 0).all() for gradient in gradients)
    # They are left out of outputs.
    ids = light.restore([micro.batch["input_ids"] for micro in light])
    assert torch.equal(ids, batches[1]["input_ids"])
    assert light.restore_rows([micro.batch["input_ids"].sum(1) for micro in light]).tolist() == ids.sum(1).tolist()


@pytest.mark.parametrize("how", ["token-mean", "row-mean", "sum"])
def test_gradients_averaged_over_ranks_are_those_of_the_un_split_batches(how: str) -> None:
    batches = [make_batch([8, 8, 5, 2, 8], seed=1), make_batch([3, 4], seed=2), make_batch([2, 7, 7], seed=3)]
    model = TinyLM().double()

    def gradient_of(parts: Any) -> Tensor:
        model.zero_grad()
        for batch, weight in parts:
            losses = support.token_losses(model(batch["input_ids"]), batch["labels"])
            (support.reduce_loss(losses, batch["labels"], how) * weight).backward()
        return support.flat_gradient(model)

    prepared = prepare_on_ranks(batches, loss_reduction=how)
    assert len({len(micro_batches) for micro_batches in prepared}) == 1
    assert any(micro.is_dummy for micro_batches in prepared for micro in micro_batches)
    split = torch.stack([gradient_of([tuple(micro) for micro in micro_batches]) for micro_batches in prepared]).mean(0)
    whole = torch.stack([gradient_of([(batch, 1.0)]) for batch in batches]).mean(0)
    assert relative(split, whole) <= 1e-9


def test_dummies_are_rows_with_loss() -> None:
    """The shortest row may have none, and its mean loss would be 0/0."""
    light = make_batch([4, 1, 2, 3], without_loss=[1, 2])
    for how in ("token-mean", "row-mean", "sum"):
        prepared = prepare_on_ranks([make_batch([8] * 9), light], loss_reduction=how)[1]
        dummies = [micro for micro in prepared if micro.is_dummy]
        assert dummies
        for micro in dummies:
            assert (micro.batch["labels"][:, 1:] != -100).any()
            assert micro.batch["attention_mask"].any()
            assert micro.rows.tolist() == [3]


def test_dummies_of_a_rank_without_any_loss_have_a_token() -> None:
    light = make_batch([3, 2], without_loss=[0, 1])
    light["attention_mask"][1] = 0
    with pytest.warns(PadMinWarning, match="no loss tokens"):
        prepared = prepare_on_ranks([make_batch([8] * 5), light])[1]
    assert all(micro.batch["attention_mask"].any() for micro in prepared if micro.is_dummy)
    assert prepared.weights.tolist() == prepared.shares.tolist()
    assert prepared.shares.sum() == pytest.approx(1)


# --- Means over all ranks. ---


def rank_losses(prepared: Sequence[MicroBatches], token_loss: Sequence[float]) -> list[float]:
    """Each rank's weighted sum of mean losses, where every target of rank r has the loss token_loss[r]."""
    return [sum(weight * loss for weight in p.weights) for p, loss in zip(prepared, token_loss, strict=True)]


def test_a_global_mean_counts_every_token_once() -> None:
    """Rank 0: one target, loss 3.0. Rank 1: nine targets, loss 1.0. (3 + 9) / 10 = 1.2; a mean of means is 2.0."""
    batches = [make_batch([2]), make_batch([3, 5, 4])]
    assert [int((b["labels"][:, 1:] != -100).sum()) for b in batches] == [1, 9]
    for normalize, wanted in (("global", 1.2), ("rank", 2.0)):
        losses = rank_losses(prepare_on_ranks(batches, normalize=normalize), [3.0, 1.0])
        assert sum(losses) / 2 == pytest.approx(wanted, abs=1e-12)
    assert rank_losses(prepare_on_ranks(batches, normalize="global"), [3.0, 1.0]) == pytest.approx([0.6, 1.8])


def test_a_global_mean_over_rows_and_with_weights_of_the_user() -> None:
    batches = [make_batch([2, 3]), make_batch([4, 3, 2, 5, 2, 2])]
    weights = [
        prepared.weights.sum() for prepared in prepare_on_ranks(batches, normalize="global", loss_reduction="row-mean")
    ]
    assert weights == pytest.approx([2 / 4, 6 / 4])
    for rank, batch in enumerate(batches):
        batch["u"] = torch.full((len(batch["labels"]),), 0.1 + rank, dtype=torch.float64)
    config = PadMinConfig(**BUDGET, normalize="global", loss_reduction=lambda batch: batch["u"])
    weights = [prepared.weights.sum() for prepared in prepare_on_ranks(batches, config)]
    assert weights == pytest.approx([0.2 / 3.4, 6.6 / 3.4], rel=1e-15)  # the totals travel as the bits of a float64
    for prepared in prepare_on_ranks(batches, normalize="global", loss_reduction="sum"):
        assert [micro.weight for micro in prepared] == [float(not micro.is_dummy) for micro in prepared]


def test_a_global_mean_with_a_rank_that_has_no_loss() -> None:
    with pytest.warns(PadMinWarning, match="no loss tokens"):
        prepared = prepare_on_ranks([make_batch([4, 2]), make_batch([3], without_loss=[0])], normalize="global")
    assert prepared[0].weights.sum() == pytest.approx(2)  # times 1/2 for the average over ranks
    assert prepared[1].weights.tolist() == [0] * len(prepared[0])


def test_a_global_mean_where_no_rank_has_loss() -> None:
    batches = [make_batch([4, 2], without_loss=[0, 1]), make_batch([3], without_loss=[0])]
    with pytest.warns(PadMinWarning, match="no loss tokens"):
        prepared = prepare_on_ranks(batches, normalize="global")
    assert [each.weights.sum() for each in prepared] == pytest.approx([1, 1])
    assert all(micro.weight == 0 for each in prepared for micro in each if micro.is_dummy)


@pytest.mark.parametrize("normalize", ["rank", "global"])
@pytest.mark.filterwarnings("ignore:a batch has no loss tokens")
def test_a_penalty_of_a_rank_without_loss_counts_as_in_its_whole_batch(normalize: str) -> None:
    """Mean over ranks of (guarded token mean + per-row penalty): with rank means, rank 1 adds its penalty."""
    batches = [make_batch([6, 5, 2]), make_batch([7, 3, 3, 2], without_loss=range(4))]

    def loss(batch: dict[str, torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
        valid = batch["labels"][:, 1:] != -100
        mean = (scale * batch["labels"][:, 1:] * valid).sum() / valid.sum().clamp(min=1)
        return mean + (scale**2 * batch["attention_mask"].sum(1)).mean() + 3 * scale

    def gradient(parts: Any) -> float:
        scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        sum(loss(batch, scale) * weight for batch, weight in parts).backward()
        return float(scale.grad)  # type: ignore[arg-type]

    prepared = prepare_on_ranks(batches, normalize=normalize)
    stock, ours = gradient([(batches[1], 1.0)]), gradient(prepared[1])
    assert len(prepared[1]) > 1
    assert stock == pytest.approx(3 + 3 * 15 / 4)
    assert ours == (pytest.approx(stock, rel=1e-12) if normalize == "rank" else 0.0)


# --- Errors. ---


def failing_weights(batch: Any) -> Tensor:
    if len(batch["labels"]) == 1:
        raise RuntimeError("a bug of the user's")
    return torch.ones(len(batch["labels"]))


@pytest.mark.parametrize(
    ("bad", "kind", "reason", "options"),
    [
        ({"labels": torch.ones(1, 2)}, SchemaError, "SchemaError", {}),
        (make_batch([2]) | {"attention_mask": torch.zeros(1, 2)}, BatchError, "BatchError", {}),
        ([], SchemaError, "SchemaError", {}),
        (make_batch([2]), RuntimeError, "an error", {"loss_reduction": failing_weights}),
        (make_batch([2]) | {"x": {"a": 1, "b": object()}, "attention_mask": "1 1"}, SchemaError, "SchemaError", {}),
    ],
)
def test_an_error_on_one_rank_raises_on_all_of_them(bad: Any, kind: type[Exception], reason: str, options: Any) -> None:
    good = make_batch([4, 2])
    results = prepare_on_ranks([good, bad, good], **options)
    assert type(results[1]) is kind
    for result in (results[0], results[2]):
        assert type(result) is PeerError
        assert str(result) == f"rank 1 refused its batch ({reason}); its message stands in that rank's log"
    assert all(isinstance(result, MicroBatches) for result in prepare_on_ranks([good, good, good], **options))


def test_errors_on_several_ranks() -> None:
    results = prepare_on_ranks([{"a": 1}, make_batch([2]), make_batch([2]) | {"attention_mask": torch.zeros(1, 2)}])
    assert [type(result) for result in results] == [SchemaError, PeerError, BatchError]
    assert "rank 0, 2 refused its batch (SchemaError)" in str(results[1])


def test_warnings_that_are_errors_raise_on_all_ranks() -> None:
    """Told after the exchange, they would leave the other ranks waiting in the first forward pass."""
    told = make_batch([3, 3], without_loss=[0, 1])
    results = prepare_on_ranks([make_batch([3, 3]), told])
    assert [type(result) for result in results] == [PeerError, PadMinWarning]


def test_raise_together() -> None:
    raise_together(None, np.zeros(3, dtype=np.int64))
    own = ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        raise_together(own, np.array([0, 9]))
    for error in (ConfigError, SchemaError, BatchError, PlanError):
        with pytest.raises(PeerError, match=rf"rank 1 refused its batch \({error.__name__}\)"):
            raise_together(None, np.array([0, error.code]))
    codes = [error.code for error in (PadMinError, ConfigError, SchemaError, BatchError, PlanError, PeerError)]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes


# --- The collective. ---


def test_alone() -> None:
    large = [2**62 + 1, -(2**63), 0]
    for exchange in (exchange_alone, exchange_all):
        table = exchange(large)
        assert table.dtype == np.int64
        assert table.tolist() == [large]
    assert exchange_alone(np.array([1, 2])).tolist() == [[1, 2]]
    assert world_size() == 1
    (micro,) = MicroBatcher(PadMinConfig(), exchange=exchange_all).prepare(make_batch([3]))
    assert micro.count == 1


@pytest.mark.parametrize(
    ("backends", "accelerator", "device"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", "cpu"),
        ("gloo", "cuda", "cpu"),
        ("mpi", "cuda", "cpu"),
        ("cuda:nccl", "cuda", "cuda"),
        ("xpu:xccl", "xpu", "xpu"),
        ("cuda:nccl", None, "cpu"),
    ],
)
def test_integers_travel_on_a_device_of_the_backend(
    monkeypatch: pytest.MonkeyPatch, backends: str, accelerator: str | None, device: str
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    current = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: current)
    assert exchanges._collective_device(None) == torch.device(device)


TWO_PROCESSES = """
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist
from lightning_padmin import MicroBatcher, PadMinConfig
from lightning_padmin.distributed.collectives import exchange_all, world_size

def batch(*lengths):
    mask = torch.tensor([[1] * n + [0] * (max(lengths) - n) for n in lengths])
    return {"attention_mask": mask, "labels": torch.where(mask > 0, 5, -100)}

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2, timeout=timedelta(seconds=50))
found = {"world": world_size()}
large = [[2**62 + 1, -(2**63), 2**63 - 1, 0], [2**53 + 1, -1, 7, 2**31]][rank]
found["large"] = exchange_all(large).tolist()
alone = [dist.new_group([0]), dist.new_group([1])]
found["group of one"] = exchange_all([rank], alone[rank]).tolist()
batcher = MicroBatcher(PadMinConfig(token_budget=8, launch_cost=0), exchange=exchange_all)
batches = [batch(8, 8, 8, 8), batch(4, 3)]
micro_batches = batcher.prepare(batches[rank])
found["counts"] = [len(micro_batches), len(micro_batches.plan)]
try:
    batcher.prepare(batches[rank] if rank == 0 else {"attention_mask": torch.zeros(1, 1)})
except Exception as error:
    found["error"] = [type(error).__name__, str(error)]
found["after"] = len(batcher.prepare(batches[rank]))
dist.destroy_process_group()
print(json.dumps(found))
"""


def test_two_real_processes(tmp_path: Path) -> None:
    command, store = [sys.executable, "-c", TWO_PROCESSES], str(tmp_path / "store")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank), store], **pipes) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], [errors for _, errors in outputs]
    first, second = (json.loads(printed.splitlines()[-1]) for printed, _ in outputs)
    both = [[2**62 + 1, -(2**63), 2**63 - 1, 0], [2**53 + 1, -1, 7, 2**31]]
    assert first["large"] == second["large"] == both
    assert first["world"] == second["world"] == 2
    assert (first["group of one"], second["group of one"]) == ([[0]], [[1]])
    assert (first["counts"], second["counts"]) == ([4, 4], [4, 2])
    assert first["error"] == [
        "PeerError",
        "rank 1 refused its batch (BatchError); its message stands in that rank's log",
    ]
    assert second["error"][0] == "BatchError"
    assert first["after"] == second["after"] == 4
