"""RLOO with the mixin against RLOO without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import trl_cases as cases


@pytest.mark.parametrize("mode", ["split", "joint", "replay"])
@pytest.mark.parametrize(
    ("beta", "iterations"),
    [pytest.param(0.0, 1, marks=pytest.mark.slow), (0.2, 1), pytest.param(0.05, 2, marks=pytest.mark.slow)],
)
def test_gradients_and_metrics(mode: str, beta: float, iterations: int) -> None:
    options = {"beta": beta, "num_iterations": iterations}
    wanted = cases.stock(options, cases.STOCK_RLOO)
    found = cases.train(cases.OURS_RLOO, options, cases.padmin(mode))
    cases.same(found, wanted)
    assert found.largest <= 96


@pytest.mark.parametrize(
    "more",
    [
        {"steps_per_generation": 4, "gradient_accumulation_steps": 4},
        {"mask_truncated_completions": True, "per_device_train_batch_size": 2, "num_generations": 2},
        {"steps_per_generation": 6, "gradient_accumulation_steps": 4, "normalize_advantages": True},
    ],
    ids=["long windows", "truncated", "uneven windows"],
)
@pytest.mark.parametrize("mode", ["split", pytest.param("replay", marks=pytest.mark.slow)])
def test_options(mode: str, more: dict[str, Any]) -> None:
    options = {"beta": 0.05} | more
    cases.same(cases.train(cases.OURS_RLOO, options, cases.padmin(mode)), cases.stock(options, cases.STOCK_RLOO))


@pytest.mark.slow
def test_rows_that_have_not_run_yet_overflow_nothing() -> None:
    """Long rows have sums of log-probs whose exponential is infinite in float32: the reported loss must not be."""

    class Far:
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            self.smallest = min(getattr(self, "smallest", 0.0), float(output["old_logps"].min()))
            return output

    def sharp() -> torch.nn.Module:
        return cases.scaled(cases.qwen2(), 2.0)

    stock, ours = cases.trainers(cases.RLOOTrainer, Far)
    wanted, found = cases.train(stock, {}, None, sharp), cases.train(ours, {}, cases.padmin("split"), sharp)
    assert found.trainer.smallest < -100
    cases.same(found, wanted, bound=1e-4)
