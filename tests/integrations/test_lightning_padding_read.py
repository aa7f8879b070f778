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


CALLS: list[int] = []  # of the loss, by step; outside of the module, where they are not put back


class FromThirdStep(Logging):
    """Its logged accuracy comes to read padding, which no entry of a batch and no gradient shows."""

    def __init__(self, until: int) -> None:
        super().__init__(True, False)
        self.until = until
        CALLS[:] = [0, 0, 0, 0]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        CALLS[self.global_step] += 1
        self.is_masked = self.global_step < self.until
        return super().loss(batch)


def test_what_reads_padding_later_is_found_when_the_time_has_come() -> None:
    """An audit that is due, of a batch that shows nothing new, takes one pass less, and sees it all the same."""
    fit(FromThirdStep(4), ragged_batches(4), padmin(mode="joint"))
    assert CALLS == [4, 1, 3, 1]
    with pytest.raises(
        GradientCheckError, match=r"audit of step 3 \(looked at in turn.*'accuracy' of the step depends"
    ):
        fit(FromThirdStep(2), ragged_batches(4), padmin(mode="joint"))
    assert CALLS[2] > 3
