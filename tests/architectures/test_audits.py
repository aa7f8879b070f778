"""No audit is a false alarm: each architecture trains with all of them, on batches that keep showing something new."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from architectures.cases import PADDINGS, Case
from architectures.zoo import TABLE, Architecture
from support import Module, fit, relative

from lightning_padmin import PadMinCallback
from lightning_padmin.errors import GradientCheckError

pytestmark = pytest.mark.slow


class Trained(Module):
    """Takes steps of length zero, so that each gradient is that of the rows alone."""

    def __init__(self, case: Case) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        self.model, self.case = case.model, [case]

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        (case,) = self.case
        return case.token_mean(case.logits(batch), batch["labels"])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(self.case[0].collected_gradient())


def train(case: Case, how: str) -> tuple[Trained, dict[str, float]]:
    # Where left padding is wrong in stock already, its gradients are no reference.
    paddings = PADDINGS if case.architecture.stock == "exact" else ("right",)
    batches = [case.batch(padding) for padding in ("right", *paddings, "right")]
    batches += [{key: value[[5, 0, 1, 2]] for key, value in batch.items()} for batch in batches]
    given = asdict(case.config(loss_reduction=how, mode="split", audit_every=2))
    options = ("token_budget", "launch_cost", "label_shift", "pad_to_multiple_of", "pad_token_id", "loss_reduction")
    module = Trained(case)
    trainer = fit(module, batches, PadMinCallback(**{name: given[name] for name in (*options, "mode", "audit_every")}))
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("architecture", TABLE, ids=lambda each: each.name.replace(" ", "-").replace(",", ""))
def test_no_false_alarm(architecture: Architecture) -> None:
    case = Case(architecture)
    right, wrong = ("row-mean", "sum") if case.by_row else ("token-mean", "row-mean")
    module, logged = train(case, right)
    for gradient in module.gradients[: len(module.gradients) // 2]:
        assert relative(gradient, case.truth.token_mean) <= 10 * architecture.bound
    assert logged["padmin/micro_batches"] > len(module.gradients)
    assert logged["padmin/audits"] >= (3 if architecture.stock == "exact" else 2)
    assert logged["padmin/audit_worst"] <= 10 * architecture.bound
    if not case.by_row:
        with pytest.raises(GradientCheckError):  # control
            train(Case(architecture), wrong)
