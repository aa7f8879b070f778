"""Trainers of sentence-transformers with the mixin, as their documentation has them: no declaration of any entry."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import sentences

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import PadMinWarning
from lightning_padmin.integrations.transformers import PadMinTrainerMixin

pytest.importorskip("sentence_transformers")
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

pytestmark = pytest.mark.slow
JOINT = PadMinConfig(mode="joint", token_budget=160, launch_cost=4)
AUTO = PadMinConfig(token_budget=None, launch_cost=4)
_OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 16,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "optim": "sgd",
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
}


def pooled(how: str = "mean", dropout: float = 0.0) -> Any:
    words = Transformer(sentences.saved(dropout=dropout))
    return SentenceTransformer(modules=[words, Pooling(16, pooling_mode=how)], device="cpu")


def trained(padmin: PadMinConfig | None, loss: Any, data: Any, make: Callable[[], Any] = pooled, **options: Any) -> Any:
    mixin = () if padmin is None else (PadMinTrainerMixin,)
    model = make()
    is_cross = isinstance(model, CrossEncoder)
    base, arguments = (
        (CrossEncoderTrainer, CrossEncoderTrainingArguments)
        if is_cross
        else (SentenceTransformerTrainer, SentenceTransformerTrainingArguments)
    )
    trainer = type("Kind", (*mixin, base), {})(
        model=model,
        args=arguments(output_dir=tempfile.mkdtemp(), **(_OPTIONS | options)),
        train_dataset=data,
        loss=loss(model),
        **({} if padmin is None else {"padmin": padmin}),
    )
    trainer.train()
    return trainer


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def check(loss: Any, data: Any, make: Callable[[], Any] = pooled, **options: Any) -> None:
    """The stock weights, up to rounding, and at most half of the waste; under `mode="auto"` too, which says why."""
    stock = trained(None, loss, data, make, **options)
    moved = float((weights(stock) - torch.cat([p.flatten() for p in make().parameters()])).abs().max())
    assert moved > 1e-3
    with pytest.warns(PadMinWarning, match="mode='auto': from step 1 on, model calls run in chunks"):
        auto = trained(AUTO, loss, data, make, **options)
    for ours in (trained(JOINT, loss, data, make, **options), auto):
        assert float((weights(ours) - weights(stock)).abs().max()) <= 1e-5
        stats = ours.padding_stats
        assert stats.waste <= stats.waste_before / 2
        found, wanted = ([log["loss"] for log in each.state.log_history if "loss" in log] for each in (ours, stock))
        assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("how", ["mean", "cls", "max", "lasttoken"])
def test_in_batch_negatives(how: str) -> None:
    data = sentences.dataset("anchor", "positive", "negative")
    check(losses.MultipleNegativesRankingLoss, data, lambda: pooled(how))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_in_batch_negatives_in_an_order_of_passes_of_their_own(dropout: float) -> None:
    """With dropout, each second pass draws what its first one did, in chunks as without; weights are others then."""
    data = sentences.dataset("anchor", "positive")

    def loss(model: Any) -> Any:
        return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)

    if not dropout:
        check(loss, data)
        return
    ours = trained(JOINT, loss, data, lambda: pooled(dropout=dropout))
    assert ours.padding_stats.waste <= ours.padding_stats.waste_before / 2


def test_scores_of_pairs() -> None:
    check(losses.CoSENTLoss, sentences.dataset("first", "second", "score"))


def test_triplets_of_a_batch() -> None:
    check(losses.BatchAllTripletLoss, sentences.dataset("sentence", "label"))


def test_a_cross_encoder() -> None:
    data = sentences.dataset("first", "second", "score")
    check(BinaryCrossEntropyLoss, data, lambda: CrossEncoder(sentences.saved_classifier(), num_labels=1, device="cpu"))
