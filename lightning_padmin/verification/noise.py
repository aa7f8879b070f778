"""How far rounding alone moves gradients of a batch, and passes in float32 where weights allow.

A limit that is right for every model in half precision hides a fault of a few parts in a hundred, and one that is
right for every model in float32 a fault of some parts in ten thousand. So the limit is measured: the un-split rows
once more with their loss multiplied by a number that changes every mantissa on the way back, and gradients divided by
it. That is the same gradient but for rounding, whatever the loss is. (Rows in another order round nearly everything as
before: that spread is ten to several hundred times smaller than an exact split's.)
"""

from __future__ import annotations

import math

import torch
from torch import nn

from lightning_padmin.distributed import Exchange, all_gather_floats
from lightning_padmin.verification.compare import DOUBT, HALF, HALF_FLOOR, Tolerance
from lightning_padmin.verification.passes import Passes
from lightning_padmin.verification.sketch import Sketches, combine

# Of the loss on the way back. 45 / 64 has few enough digits for bfloat16, so that the factor itself is exact.
FACTOR = 0.703125
# Exact splits of 20 probes of each of three models (one of 30 layers) were at most 2.7 times as far off as this
# spread, most of them once; see examples/benchmarks/noise_limits.py.
_TIMES = 4.0
# In float32 there is room for more between what rounding does and what is a fault: spreads are 3e-7 to 6e-7, exact
# splits at most 2.9 times that. One number that everything is divided by may be rounded by chance as little in both.
_TIMES_IN_FLOAT32 = 64.0


def rounded_otherwise(passes: Passes) -> Sketches:
    """Gradients of the rows as they came, with other roundings on the way: one more pass."""
    return combine([passes.scaled(FACTOR)], [1 / FACTOR])


def measured_limit(spread: float, widest: float, exchange: Exchange) -> float:
    """The limit in half precision, equal on all ranks: between `HALF_FLOOR` and `widest`.

    Args:
        spread: how far this rank's un-split gradients are from those with other roundings.
        widest: the limit for all models.
        exchange: the collective.
    """
    return _limit(_TIMES * spread, HALF_FLOOR, widest, exchange)


def narrowed_limit(spread: float, widest: float, exchange: Exchange) -> float:
    """As `measured_limit`, in float32: between `DOUBT` and `widest`, for a difference that lies there."""
    return _limit(_TIMES_IN_FLOAT32 * spread, DOUBT, widest, exchange)


def is_doubtful(value: float, limit: Tolerance) -> bool:
    """Whether a difference in float32 counts as none, and is larger than those of exact splits."""
    return not limit.is_half and DOUBT < value <= limit.limit


def _limit(measured: float, least: float, widest: float, exchange: Exchange) -> float:
    worst = float(all_gather_floats([measured], exchange).max())
    return widest if math.isnan(worst) else min(max(worst, least), widest)


def may_run_in_float32(module: nn.Module) -> bool:
    """Whether passes without autocast are float32 ones, and change nothing that is compiled.

    Not so where products are allowed to be less exact than float32 is.
    """
    tensors = [*module.parameters(), *module.buffers()]
    is_compiled = any(
        getattr(child, "_compiled_call_impl", None) is not None or hasattr(child, "_orig_mod")
        for child in module.modules()
    )
    is_exact = torch.get_float32_matmul_precision() == "highest"
    return is_exact and not is_compiled and not any(each.dtype in HALF for each in tensors)


__all__ = ["FACTOR", "is_doubtful", "may_run_in_float32", "measured_limit", "narrowed_limit", "rounded_otherwise"]
