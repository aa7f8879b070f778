"""SetFit, whose trainer makes one of sentence-transformers inside of it: the mixin goes into that."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from programs import sentences

from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.transformers import PadMinTrainerMixin

pytest.importorskip("setfit")
import setfit.trainer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression

pytestmark = pytest.mark.slow
Stock = setfit.trainer.BCSentenceTransformersTrainer


class Padded(PadMinTrainerMixin, Stock):  # type: ignore[misc, valid-type]
    """As a program of the user's has it."""

    mode = "joint"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, padmin=PadMinConfig(mode=self.mode, token_budget=480, launch_cost=4), **options)


def trained(loss: Any) -> tuple[Any, torch.Tensor]:
    body = SentenceTransformer(modules=[Transformer(sentences.saved()), Pooling(16)], device="cpu")
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), batch_size=16, max_steps=6, body_learning_rate=1e-2, loss=loss, report_to="none"
    )
    data = sentences.dataset("text", "label", count=24)
    model = SetFitModel(model_body=body, model_head=LogisticRegression())
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.st_trainer.args.optim = "sgd"  # AdamW makes steps of what is zero but for rounding
    trainer.train()
    return trainer, torch.cat([p.detach().flatten() for p in body.parameters()])


@pytest.mark.filterwarnings("ignore:PadMinTrainerMixin. mode='auto'. from step 1 on, model calls run in chunks")
@pytest.mark.parametrize("mode", ["joint", "auto"])
@pytest.mark.parametrize("loss", [losses.CosineSimilarityLoss, losses.BatchAllTripletLoss])
def test_weights_are_the_stock_ones(loss: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Padded, "mode", mode)
    _, wanted = trained(loss)
    monkeypatch.setattr(setfit.trainer, "BCSentenceTransformersTrainer", Padded)
    ours, found = trained(loss)
    assert float((found - wanted).abs().max()) <= 1e-5
    stats = ours.st_trainer.padding_stats
    assert stats.waste <= stats.waste_before / 2
