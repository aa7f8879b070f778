"""Random numbers that depend on the row alone: with them a step that draws is a function of its rows, and can be told.

Torch's draws are replaced by values that do not depend on where a row stands in a batch. Draws of one number or of
something else than rows are constants. A permutation is the reverse order, so that rows which are mixed by it are seen
to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_padmin.runtime.random_state import RandomState

_CONSTANT = 0.37
Values = Callable[[Tensor, dict[str, Any]], Tensor]


class Draws:
    """The draws of several passes of one step, in order.

    Args:
        by_row: of each draw of a pass, whether its first dimension is rows; none: all are constants.
    """

    def __init__(self, by_row: Sequence[bool] = ()) -> None:
        self._by_row = by_row
        self._seen: list[tuple[int, list[int]]] = []

    @contextmanager
    def of(self, rows: Sequence[int], starts: Sequence[int], width: int) -> Iterator[None]:
        """One pass runs inside.

        Args:
            rows: which rows, as they are numbered in all passes.
            starts: the column of each one's first token.
            width: columns.
        """
        pass_ = _Pass(rows, starts, width, self._by_row)
        self._seen.append((len(rows), pass_.sizes))
        with pass_:
            yield

    @property
    def by_row(self) -> list[bool]:
        """Of each draw of a pass, whether its first dimension was the rows in every pass; empty where none was."""
        counts = {len(sizes) for _, sizes in self._seen}
        if len(counts) != 1 or len({rows for rows, _ in self._seen}) == 1:
            return []
        found = [all(sizes[k] == rows for rows, sizes in self._seen) for k in range(counts.pop())]
        return found if any(found) else []


class _Pass(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, rows: Sequence[int], starts: Sequence[int], width: int, by_row: Sequence[bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows, self._starts, self._width, self._by_row = rows, starts, width, by_row
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        values = _VALUES.get(schema.name.removeprefix("aten::").rstrip("_"))
        if values is None:
            return func(*args, **kwargs)
        state = RandomState()
        result = func(*args, **kwargs)
        state.restore()
        if not isinstance(result, Tensor):
            return result
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        if schema.name == "aten::bernoulli_":
            given.setdefault("p", 0.5)
        return result.copy_(values(self._uniform(result), given))

    def _uniform(self, like: Tensor) -> Tensor:
        """Numbers in (0, 1)."""
        shape, place = like.shape, len(self.sizes)
        self.sizes.append(shape[0] if shape else -1)
        is_by_row = place < len(self._by_row) and self._by_row[place] and len(shape) > 0 and shape[0] == len(self._rows)
        if not is_by_row:
            return torch.full(shape, _CONSTANT, dtype=torch.float64, device=like.device)

        def along(values: Tensor, *dims: int) -> Tensor:
            sizes = [values.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]
            return values.reshape(sizes)

        rows, starts = (
            torch.as_tensor(each, dtype=torch.float64, device=like.device) for each in (self._rows, self._starts)
        )
        seed = along(rows + 1, 0) * 0.7548776662466927
        for d in range(1, len(shape)):
            places = torch.arange(shape[d], dtype=torch.float64, device=like.device)
            factor = 0.5698402909980532 / d
            if d == 1 and abs(shape[1] - self._width) <= 1:
                seed = seed + along((places - starts[:, None]), 0, 1) * factor
            else:
                seed = seed + along(places, d) * factor
        mixed = torch.sin(seed * 12.9898) * 43758.5453
        return (mixed - mixed.floor()).expand(shape).clamp(1e-6, 1 - 1e-6)


def _normal(u: Tensor, given: dict[str, Any]) -> Tensor:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    return cast(Tensor, mean + std * torch.erfinv(2 * u - 1) * math.sqrt(2))


def _scaled(u: Tensor, given: dict[str, Any]) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return cast(Tensor, low + (high - low) * u)


def _integers(u: Tensor, given: dict[str, Any]) -> Tensor:
    low = given.get("low", given.get("from")) or 0
    high = given.get("high", given.get("to"))
    return torch.floor(low + ((1 << 10) if high is None else high - low) * u)


def _bernoulli(u: Tensor, given: dict[str, Any]) -> Tensor:
    p = given.get("p")
    return cast(Tensor, u < (given["self"] if p is None else p)).double()


def _exponential(u: Tensor, given: dict[str, Any]) -> Tensor:
    return cast(Tensor, -torch.log1p(-u) / given.get("lambd", 1.0))


def _reversed(u: Tensor, given: dict[str, Any]) -> Tensor:
    return torch.arange(u.numel() - 1, -1, -1, device=u.device)


def _likeliest(u: Tensor, given: dict[str, Any]) -> Tensor:
    weights, count = given["self"], u.shape[-1]
    order = weights.sort(dim=-1, descending=True, stable=True).indices
    repeats = -(-count // order.shape[-1])
    return torch.cat([order] * repeats, dim=-1)[..., :count]


_VALUES: dict[str, Values] = {
    "rand": lambda u, _: u,
    "rand_like": lambda u, _: u,
    "uniform": _scaled,
    "randn": _normal,
    "randn_like": _normal,
    "normal": _normal,
    "randint": _integers,
    "randint_like": _integers,
    "random": _integers,
    "bernoulli": _bernoulli,
    "exponential": _exponential,
    "randperm": _reversed,
    "multinomial": _likeliest,
}


__all__ = ["Draws"]
