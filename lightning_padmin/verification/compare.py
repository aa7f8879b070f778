"""When two computations count as the same, and by how much they differ."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HALF = frozenset({torch.float16, torch.bfloat16})
_LIMIT = 1e-3
# Exact splits in float32 and float64 are below (103 architectures: 2e-6); from here to the limit, see `noise`.
DOUBT = 2e-5
# In half precision the limit is measured (see `noise`), between these. Below the smaller one is what the step's own
# scalars may round away: two halves' means in bfloat16 are each 2^-9 off, and so are the numbers they are divided by.
HALF_FLOOR, HALF_LIMIT = 0.01, 0.1
# Where half precision moves a token to another expert, gradients differ by a part, not by a multiple.
_MOST_FLIPPED = 0.5
# max |difference| / max |reference| up to which two computations of one dtype count as the same, outputs too.
TOLERANCES = {torch.float64: 1e-9, torch.float32: _LIMIT, torch.bfloat16: HALF_LIMIT, torch.float16: HALF_LIMIT}


@dataclass(frozen=True)
class Tolerance:
    """How far apart gradients may be that are the same but for rounding.

    Attributes:
        limit: of max |difference| / max |gradient|.
    """

    limit: float

    @staticmethod
    def for_(dtypes: Collection[torch.dtype], *, saw_half: bool = False) -> Tolerance:
        """That of parameters of these dtypes; `saw_half`: something was computed in half precision."""
        return Tolerance(HALF_LIMIT if saw_half or HALF & set(dtypes) else _LIMIT)

    @property
    def is_half(self) -> bool:
        """Whether it is one for half precision."""
        return self.limit >= HALF_FLOOR

    def if_half(self, saw_half: bool) -> Tolerance:
        """At least that of half precision, where something was computed in it."""
        return Tolerance(max(self.limit, HALF_LIMIT)) if saw_half else self

    def may_be_flips(self, value: float) -> bool:
        """Whether a difference may come of tokens that rounding sends to other experts."""
        return self.is_half and value <= _MOST_FLIPPED

    @property
    def noise(self) -> float:
        """Gradients of a parameter up to this part of the largest of all are rounding."""
        return 0.05 if self.is_half else 1e-4

    @property
    def own_limit(self) -> float:
        """Of a parameter's difference against its own largest entry, where it is above the noise."""
        return min(0.5, 5 * self.limit) if self.is_half else 0.1


def dtypes_of(module: nn.Module) -> set[torch.dtype]:
    """Of its parameters."""
    return {p.dtype for p in module.parameters()}


def relative_difference(found: Tensor, wanted: Tensor, *, nothing: float = 1.0) -> float:
    """Max |found - wanted| / max |wanted|, in float64; nan stays nan.

    Args:
        found: a tensor.
        wanted: of the same shape.
        nothing: what stands in for max |wanted| where that is 0.
    """
    scale = float(wanted.abs().max())
    return float((found.double() - wanted.double()).abs().max()) / (scale or nothing)


__all__ = ["DOUBT", "HALF", "HALF_FLOOR", "HALF_LIMIT", "TOLERANCES", "Tolerance", "dtypes_of", "relative_difference"]
