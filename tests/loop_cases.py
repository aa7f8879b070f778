"""Loops of one's own on two ranks, whose losses `pad.backward` checks: what the workers of both frameworks run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import support
import torch
from torch import Tensor

Batch = dict[str, Tensor]
LATE = 4  # batches before something new comes
EACH = [24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2]  # rows of each rank
Step = Callable[[Batch, int, Callable[[Any], Tensor]], Any]
Make = Callable[[str, str], tuple[Any, Any, Step, Callable[[], Tensor]]]
"""check ("" for stock), loss_reduction -> model, pad, one batch's step, the parameters."""


def batches(rank: int, count: int = 6) -> list[Batch]:
    """The same rows every time, so that nothing else is new."""
    own = EACH[rank]
    return [support.make_batch(own, seed=rank) | {"kind": torch.zeros(len(own)).long()} for _ in range(count)]


def with_rare(rank: int) -> list[Batch]:
    """A class that comes late, and on the last rank only."""
    found = batches(rank)
    if rank == 1:
        found[LATE]["kind"][1] = 2
    return found


def exact(model: Any, batch: Batch, index: int, rank: int) -> Tensor:
    losses = support.token_losses(model(batch["input_ids"]), batch["labels"])
    return support.reduce_loss(losses, batch["labels"], "token-mean")


def by_class(model: Any, batch: Batch, index: int, rank: int) -> Tensor:
    weight = torch.tensor([1.0, 1.0, 20.0])[batch["kind"]][:, None] * (batch["labels"][:, 1:] != -100)
    losses = support.token_losses(model(batch["input_ids"]), batch["labels"])
    return (losses * weight).sum() / weight.sum()


def late(model: Any, batch: Batch, index: int, rank: int) -> Tensor:
    """A term that couples rows comes late, and on the last rank only."""
    losses = support.token_losses(model(batch["input_ids"]), batch["labels"])
    mean = support.reduce_loss(losses, batch["labels"], "token-mean")
    return mean + torch.logsumexp(losses.sum(1) / 10, 0) if rank == 1 and index >= LATE else mean


def carry_out(
    make: Make, rank: int, loss: Callable[..., Tensor], data: Sequence[Batch], check: str, reduction: str = "token-mean"
) -> dict[str, Any]:
    model, pad, step, parameters = make(check, reduction)
    found: dict[str, Any] = {"error": "", "before": []}
    for index, batch in enumerate(data):
        found["before"].append(parameters())
        try:
            step(batch, index, lambda micro, index=index: loss(model, micro, index, rank))
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
            break
    found["parameters"] = parameters()
    if pad is not None:
        ledger = pad._training(model).ledger
        found["audits"] = [each.step for each in ledger.record] if ledger is not None else []
    return found


def audits(make: Make, rank: int) -> dict[str, Any]:
    """Each case with checks, and what the negative controls do."""
    return {
        "stock": carry_out(make, rank, exact, with_rare(rank), ""),
        "exact": carry_out(make, rank, exact, with_rare(rank), "audit"),
        "wrong": carry_out(make, rank, exact, batches(rank), "audit", "row-mean"),
        "rare": carry_out(make, rank, by_class, with_rare(rank), "audit"),
        "rare unseen": carry_out(make, rank, by_class, with_rare(rank), "first-batch"),
        "late": carry_out(make, rank, late, batches(rank, 8), "audit"),
        "late unseen": carry_out(make, rank, late, batches(rank), "first-batch"),
    }


def assert_audited(ranks: Sequence[dict[str, Any]], bound: float) -> None:
    """Both ranks go on, or both end, with the same words.

    Args:
        ranks: what `audits` returned on each.
        bound: of parameters, relative.
    """
    # At the next batch: it is known behind a pass. Or at once, where the batch is looked at anyway; or one later, where
    # gradients of shards wait to be reduced, which a check would mix with its own.
    steps = (LATE + 1, LATE + 2, LATE + 3)
    late_at = next((step for step in steps if f"audit of step {step} " in ranks[0]["late"]["error"]), 0)
    for found in ranks:
        stock, ours = (found[name]["parameters"] for name in ("stock", "exact"))
        assert not found["exact"]["error"]
        assert support.relative(ours, stock) <= bound
        assert "set loss_reduction='token-mean'" in found["wrong"]["error"]
        assert len(found["wrong"]["before"]) == 1
        assert found["rare"]["error"].startswith(f"GradientCheckError: audit of step {LATE + 1} ")
        assert found["late"]["error"].startswith(f"GradientCheckError: audit of step {late_at} ")
        for name in ("wrong", "rare", "late"):  # the refused batch was not trained on
            assert torch.equal(found[name]["parameters"], found[name]["before"][-1])
        for name in ("rare unseen", "late unseen"):
            assert not found[name]["error"]
    first, second = ranks
    # A facet that comes on one rank is looked at on both.
    assert first["exact"]["audits"] == second["exact"]["audits"]
    assert {1, 3, LATE + 1} <= set(first["exact"]["audits"])
    assert "'kind' is 2" in second["rare"]["error"]
    assert late_at == LATE + 1 or "another kind of loss" in second["late"]["error"]
