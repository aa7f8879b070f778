"""mode="joint": what a step logs, or a metric that it updates, must not depend on outputs where rows have padding."""

from __future__ import annotations

import pytest
import support
import torch
from support import Module, fit, padmin, ragged_batches
from torch import Tensor
from torchmetrics import MeanMetric
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_padmin.errors import GradientCheckError

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


class Logging(Module):
    """Accuracy over real tokens or over all slots: logged, or in a metric that only the epoch's end reads."""

    def __init__(self, is_masked: bool, in_metric: bool) -> None:
        super().__init__(dtype=torch.float32)
        torch.manual_seed(1)
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=support.VOCABULARY, **SIZES))
        self.is_masked, self.in_metric, self.accuracy = is_masked, in_metric, MeanMetric()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"]
        logits = self.model(input_ids=batch["input_ids"], attention_mask=mask).logits
        hits, weight = (logits.argmax(-1) == batch["input_ids"]).float(), mask if self.is_masked else mask**0
        if self.in_metric:
            self.accuracy.update(hits, weight)
        else:
            self.log("accuracy", (hits * weight).sum() / weight.sum())
        return support.reduce_loss(support.token_losses(logits, batch["labels"]), batch["labels"], self.how)


@pytest.mark.parametrize("in_metric", [False, True])
def test_accuracy_over_padding_is_refused_by_name(in_metric: bool) -> None:
    batches = ragged_batches(1)
    fit(Logging(True, in_metric), batches, padmin(mode="joint"))
    name = "accuracy.mean_value" if in_metric else "accuracy"
    with pytest.raises(GradientCheckError, match=rf"'{name}' of the step depends .*PadMinCallback\(enabled=False\)"):
        fit(Logging(False, in_metric), batches, padmin(mode="joint"))
