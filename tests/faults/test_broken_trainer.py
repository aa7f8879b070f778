"""The Trainer of transformers where something breaks: as the stock Trainer, and the next training is sound."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import without_audits
from torch import Tensor
from transformers import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))

import test_transformers_trainer as cases

POISON = 39  # a token whose embedding is no number; it stands in one row only
MODELS = {"sums": cases.llama, "means": cases.MeanLoss}
IN_ORDER = {"train_sampling_strategy": "sequential", "max_grad_norm": 0.0}


def poisoned(*at: int) -> list[dict[str, Any]]:
    rows = []
    for index, row in enumerate(cases.rows()):
        ids = [min(token, POISON - 1) for token in row["input_ids"]]
        if index in at:
            ids[1] = POISON
        rows.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
    return rows


def train(kind: type, way: str, at: int, **options: Any) -> cases.Record:
    def make() -> Any:
        def poison(module: Any, args: Any, output: Tensor) -> Tensor:
            return torch.where((args[0] == POISON)[..., None], torch.full_like(output, float("nan")), output)

        model = MODELS[way]()
        getattr(model, "inner", model).get_input_embeddings().register_forward_hook(poison)
        return model

    config = None if kind is Trainer else replace(cases.BUDGET, mode="split")
    return cases.train(kind, make, config, data=poisoned(at), trainer_options={}, **(IN_ORDER | options))


@pytest.fixture
def skips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose gradients are not finite are left out."""
    stock = cases.Record.on_pre_optimizer_step

    def on_pre_optimizer_step(self: Any, *args: Any, model: Any = None, **options: Any) -> None:
        stock(self, *args, model=model, **options)
        if not self.gradients[-1].isfinite().all():
            model.zero_grad()

    monkeypatch.setattr(cases.Record, "on_pre_optimizer_step", on_pre_optimizer_step)


def apart(found: cases.Record, wanted: cases.Record) -> float:
    """The worst difference where both are finite; infinite if they are not so in the same places."""
    worst = 0.0
    for a, b in zip(found.gradients, wanted.gradients, strict=True):
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        if b.isfinite().any():
            worst = max(worst, float((a - b)[b.isfinite()].abs().max() / b[b.isfinite()].abs().max()))
    return worst


# Row 0 is in the first batch, which decides whether windows are pooled; row 17 in the middle of the second window.
@pytest.mark.usefixtures("skips")
@pytest.mark.parametrize("row", [0, pytest.param(17, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", MODELS)
def test_steps_that_are_not_finite_are_those_of_stock(way: str, row: int) -> None:
    """Logged losses too, but for broken windows that are pooled: stock leaves out a batch of them, we do a chunk."""
    stock, ours = train(Trainer, way, row), train(cases.Ours, way, row)
    broken = [k for k, gradient in enumerate(stock.gradients) if not gradient.isfinite().all()]
    assert broken == [row // 12, row // 12 + 4]
    assert apart(ours, stock) <= 1e-5
    assert ours.parameters.isfinite().all()
    assert float((ours.parameters - stock.parameters).abs().max()) <= 1e-5
    pairs = list(zip(cases.losses(ours), cases.losses(stock), strict=True))
    for step, (found, wanted) in enumerate(pairs):
        assert found == pytest.approx(wanted, abs=1e-5) or (way == "sums" and step in broken)
    assert len(pairs) == 8
    assert ours.trainer._padmin.pools is (True if way == "sums" else None)
    metrics = [value for log in ours.logs for name, value in without_audits(log).items() if name.startswith("padmin/")]
    # A first batch without gradients does not tell what the loss is, so the first window runs as it came.
    assert len(metrics) == (70 if way == "sums" and row == 0 else 80)
    assert all(value == value for value in metrics)


@pytest.mark.usefixtures("skips")
@pytest.mark.parametrize("way", ["sums", pytest.param("means", marks=pytest.mark.slow)])
def test_without_the_filter_both_log_that_it_is_no_number(way: str) -> None:
    """For good, since the Trainer subtracts what it has logged from its running sum."""
    logged = [cases.losses(train(kind, way, 17, logging_nan_inf_filter=False)) for kind in (cases.Ours, Trainer)]
    assert logged[0] == pytest.approx(logged[1], abs=1e-5, nan_ok=True)
    assert [loss != loss for loss in logged[0]] == [False] + [True] * 7


@pytest.mark.usefixtures("skips")
@pytest.mark.parametrize("way", ["sums", pytest.param("means", marks=pytest.mark.slow)])
def test_another_row_that_is_broken_would_show(way: str) -> None:
    """Negative control."""
    assert apart(train(cases.Ours, way, 5), train(Trainer, way, 17)) == float("inf")


class Broken(Exception):
    pass


def twice(kind: type, where: str) -> type:
    """Trains, breaks at the third optimizer step, and trains again."""

    class Twice(kind):
        is_broken, calls = True, 0

        def train(self) -> Any:
            if where == "loader":
                self.data_collator = self.collate
            with pytest.raises(Broken):
                super().train()
            self.is_broken = False
            assert "compute_loss" not in vars(self)
            return super().train()

        def collate(self, samples: Any) -> Any:
            self.calls += 1
            if self.is_broken and self.calls == 8:
                raise Broken
            return cases.collate(samples)

        def compute_loss(self, *args: Any, **options: Any) -> Any:
            if self.is_broken and where == "chunk" and self.state.global_step == 2:
                self.calls += 1
                if self.calls == 2:
                    raise Broken
            return super().compute_loss(*args, **options)

    return Twice


@pytest.mark.parametrize(
    ("way", "where"),
    [
        ("sums", "chunk"),
        pytest.param("means", "loader", marks=pytest.mark.slow),
        pytest.param("sums", "loader", marks=pytest.mark.slow),
        pytest.param("means", "chunk", marks=pytest.mark.slow),
    ],
)
def test_after_a_failure_the_next_training_is_that_of_stock(way: str, where: str) -> None:
    runs = [
        cases.train(twice(kind, where), MODELS[way], config, trainer_options={})
        for kind, config in ((Trainer, None), (cases.Ours, replace(cases.BUDGET, mode="split")))
    ]
    stock, ours = runs
    assert len(stock.gradients) == len(ours.gradients) == 2 + 8
    assert cases.apart(ours, stock) <= 1e-5
    assert float((ours.parameters - stock.parameters).abs().max()) <= 1e-5
    assert ours.trainer.padding_stats.micro_batches > ours.trainer.padding_stats.batches > 20


@pytest.mark.usefixtures("equal_weights")
def test_weights_of_one_over_k_are_far_off() -> None:
    """Negative control."""
    config = cases.PadMinConfig(token_budget=64, launch_cost=4, pad_token_id=0, check="off")
    runs = [
        cases.train(twice(kind, "chunk"), cases.llama, how, trainer_options={}, num_train_epochs=1)
        for kind, how in ((Trainer, None), (cases.Ours, config))
    ]
    assert cases.apart(*runs[::-1]) > 0.1
