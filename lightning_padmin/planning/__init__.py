"""Which rows run together, at what width: integers in, a plan out.

Needs numpy only, and knows neither tensors nor models: every plan can be made, tested and drawn without a GPU.

    inputs         lengths and limits, checked
    spec           the options of one plan
    search         the partition of sorted rows (dynamic programming), and the greedy one
    planner        `plan_micro_batches` and the plan of packs
    plan           the result
    packs          first-fit decreasing bins
    shape_buckets  few shapes over a whole run (rounding itself: `search.round_up`)
    cost_fit       the cost of a launch and of width, from measured times
"""

from lightning_padmin.planning.cost_fit import Fit, Shape, fit_times, largest_budget
from lightning_padmin.planning.plan import Plan
from lightning_padmin.planning.planner import plan_micro_batches, plan_packs, plan_quietly
from lightning_padmin.planning.search import Ints, Limits, SlotCost, round_up
from lightning_padmin.planning.shape_buckets import ShapeSet, choose_shapes
from lightning_padmin.planning.spec import PlanSpec

__all__ = [
    "Fit",
    "Ints",
    "Limits",
    "Plan",
    "PlanSpec",
    "Shape",
    "ShapeSet",
    "SlotCost",
    "choose_shapes",
    "fit_times",
    "largest_budget",
    "plan_micro_batches",
    "plan_packs",
    "plan_quietly",
    "round_up",
]
