"""The options of one plan, in one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_padmin.planning.search import Limits, SlotCost

_NO_LIMIT = 2**40


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """What a plan keeps to, and what it costs; each as the argument of `plan_micro_batches` of that name.

    Attributes:
        max_width: one width per axis.
    """

    token_budget: int | None = None
    pad_to_multiple_of: int = 1
    max_width: Sequence[int] | None = None
    max_rows: int | None = None
    min_micro_batches: int = 1
    launch_cost: int = 128
    method: Literal["optimal", "greedy"] = "optimal"
    cost_multiple_of: int = 1
    attention_width: int | None = None

    @property
    def limits(self) -> Limits:
        """Of one micro-batch, where there is a budget."""
        assert self.token_budget is not None
        slot_cost = SlotCost(self.cost_multiple_of, self.attention_width or 0)
        return Limits(self.token_budget, self.max_rows or self.token_budget, self.launch_cost, slot_cost)

    def undivided(self) -> PlanSpec:
        """All rows in one micro-batch."""
        return replace(self, token_budget=_NO_LIMIT, launch_cost=_NO_LIMIT, max_rows=None)
