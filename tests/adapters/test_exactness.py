"""Every scenario on every adapter: the stock run's gradients, weights and logs, or a refusal by name.

With a control each: weights of 1/K, or rows put back in another order where there are no weights, are far off. The
table and what it expects stand in `contract.py`; plans, messages and refusals in `golden.json` (see `record.py`).
"""

from __future__ import annotations

import copy
import functools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from adapters import contract, record
from adapters.contract import Equal, NotApplicable, Outcome, Refused, Repeatable, Scenario, Unseen

GOLDEN: dict[str, Any] = json.loads(record.GOLDEN.read_text())
HOLDS = GOLDEN["versions"] == record.versions()
SCENARIOS = {each.name: each for each in contract.SCENARIOS}
# Tried every time: one adapter with whole batches, one with a loop, and of the others what they do by themselves.
QUICK = {
    "lightning": set(SCENARIOS) - {"greedy plans", "widths rounded", "accumulation 3, two steps"},
    "fabric": {
        "left padding",
        "rows without loss tokens",
        "accumulation 3",
        "row weights",
        "shape buckets",
        "resume",
        "packs",
    },
    "lightning-manual": {"right padding", "clipping by norm", "packs"},
    "lightning-joint": {"mixed padding", "accumulation 3", "shape buckets", "a loss that couples rows", "switched off"},
    "accelerate": {"mixed padding", "accumulation 3", "clipping by norm", "resume", "packs", "switched off"},
    "accelerate-toggle": {"right padding", "switched off"},
    "trainer": {
        *("mixed padding", "accumulation 3", "sum", "row mean", "switched off", "bfloat16 autocast"),
        *("a model that reads padding", "batch normalization"),
    },
    "trainer-zero-edit": {"right padding"},
    "grpo-split": {"right padding", "a loss that couples rows"},
    "sft": {"right padding", "batch normalization"},
}


CASES = [
    pytest.param(scenario, name, marks=[] if scenario in QUICK.get(name, ()) else [pytest.mark.slow])
    for name in contract.NAMES
    for scenario in SCENARIOS
    if not isinstance(SCENARIOS[scenario].of(name), NotApplicable)
]


@functools.cache
def stock(scenario: str, name: str) -> Outcome:
    """What happens without this library."""
    out = contract.carry_out(contract.adapter(name), SCENARIOS[scenario], ours=False)
    assert out.error is None
    assert not out.metrics
    assert not out.messages
    return out


def bound(scenario: Scenario, name: str) -> float:
    """Trainers of TRL run in float32."""
    return max(scenario.bound, 2e-5) if name in contract.TRL and scenario.bound > 0 else scenario.bound


def same(scenario: Scenario, name: str, found: Outcome, wanted: Outcome) -> None:
    most = bound(scenario, name)
    assert contract.difference(found, wanted) <= most
    # The Trainer keeps its running loss in float32.
    assert contract.log_difference(found, wanted) <= (max(most, 2e-6) if "trainer" in name else most)
    assert math.isfinite(float(found.weights.sum()))


@pytest.mark.parametrize(("scenario", "name"), CASES)
def test_as_expected(scenario: str, name: str) -> None:
    case, adapter = SCENARIOS[scenario], contract.adapter(name)
    expected, found = case.of(name), contract.carry_out(adapter, case)
    if HOLDS:
        told = GOLDEN["entries"][f"{scenario} | {name}"]
        assert record.golden_entry(record.entry(found)) == told
    if isinstance(expected, Refused):
        assert found.error is not None
        assert found.error[0] == expected.error
        return
    assert found.error is None
    if isinstance(expected, Repeatable):
        again = contract.carry_out(adapter, case)
        assert contract.difference(again, found) == 0
        assert contract.difference(found, stock(scenario, name)) > 1e-3, "nothing is random"
        return
    if isinstance(expected, Unseen):
        assert contract.difference(found, stock(scenario, name)) > 0.05
        return
    assert isinstance(expected, Equal)
    same(case, name, found, stock(scenario, name))
    if case.options.get("enabled", True):
        assert found.counts["batches"] > 0
        assert found.metrics
        assert (found.counts["micro_batches"] > found.counts["batches"]) is not expected.unsplit
    else:
        assert not found.metrics
    if expected.fault is not None:
        wrong = contract.carry_out(adapter, case, fault=expected.fault)
        if wrong.error is not None and case.options.get("layout") == "pack":
            assert wrong.error[0] == "GradientCheckError"
            return
        assert wrong.error is None
        assert contract.difference(wrong, stock(scenario, name)) > 0.05


@pytest.mark.parametrize("name", ["fabric", "accelerate"])
@pytest.mark.parametrize("scenario", ["a model that reads padding", "a loss that couples rows", "right padding"])
def test_what_a_loop_does_not_see_its_backward_refuses(scenario: str, name: str) -> None:
    loop: Any = copy.copy(contract.adapter(name))

    def batch(case: Scenario, ours: bool, model: Any, optimizer: Any, batch: Any, index: int, out: Outcome) -> None:
        loop.pad.backward(batch, model, lambda micro: case.loss_of(model, micro))
        out.step(model.parameters())
        optimizer.step()
        optimizer.zero_grad()

    loop.batch = batch
    case, explicit = SCENARIOS[scenario], SCENARIOS[scenario].options | {"mode": "split"}
    found = contract.carry_out(loop, replace(case, options=explicit))
    assert (found.error or ("",))[0] == ("" if scenario == "right padding" else "GradientCheckError")
    by_itself = contract.carry_out(loop, case)  # replays what is larger than the budget
    if scenario == "a model that reads padding":
        assert (by_itself.error or ("",))[0] == "GradientCheckError"
    else:
        assert by_itself.error is None
        assert contract.difference(by_itself, stock(scenario, name)) <= case.bound


def test_the_table_is_complete() -> None:
    """Every adapter is in every row, and golden.json has what the table has."""
    keys = {
        f"{each.name} | {name}"
        for each in contract.SCENARIOS
        for name in contract.NAMES
        if not isinstance(each.of(name), NotApplicable)
    }
    assert keys == set(GOLDEN["entries"])
    assert len(SCENARIOS) == len(contract.SCENARIOS)


def test_a_fault_is_taken_back() -> None:
    case, adapter = SCENARIOS["right padding"], contract.adapter("fabric")
    contract.carry_out(adapter, case, fault="weights")
    again = contract.carry_out(adapter, case)
    assert contract.difference(again, stock("right padding", "fabric")) <= case.bound
    assert torch.equal(again.weights, contract.carry_out(adapter, case).weights)
