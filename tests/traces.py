"""Everything that can be seen of modules and trainers, as one flat table, to be compared before and after."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MOST = 20_000

Table = dict[str, Any]


def seen_of(*roots: object) -> Table:
    """What stands in the attributes of these, however deep, and the random state of the process."""
    return dict(_walk(roots)) | {
        "random/python": hash(random.getstate()),
        "random/numpy": hash(np.random.get_state()[1].tobytes()) + np.random.get_state()[2],
        "random/torch": _content(torch.get_rng_state()),
    }


def changed(before: Table, after: Table) -> list[str]:
    """Places where the two differ."""
    return sorted(place for place in before.keys() | after.keys() if before.get(place) != after.get(place))


def _walk(roots: tuple[object, ...]) -> Iterator[tuple[str, Any]]:
    waiting: list[tuple[str, Any]] = [(f"{k}:{type(root).__name__}", root) for k, root in enumerate(roots)]
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MOST:
        place, value = waiting.pop(0)
        if isinstance(value, _ATOMS):
            yield place, value if value == value else "nan"
            continue
        yield place, (type(value).__qualname__, id(value))
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            yield f"{place} is", (tuple(value.shape), str(value.dtype), value.requires_grad, _content(value))
            if value.is_leaf:
                waiting.append((f"{place}.grad", value.grad))
            yield f"{place} hooks", [id(hook) for hook in (value._backward_hooks or {}).values()]
        elif isinstance(value, np.ndarray):
            yield f"{place} is", (value.shape, value.tobytes() if value.dtype != object else id(value))
        elif isinstance(value, torch.Generator):
            yield f"{place} is", _content(value.get_state())
        elif isinstance(value, dict):
            yield f"{place} keys", [repr(key) if isinstance(key, _ATOMS) else id(key) for key in value]
            waiting += [
                (f"{place}[{key!r}]" if isinstance(key, _ATOMS) else place, each) for key, each in value.items()
            ]
        elif isinstance(value, set | frozenset):
            yield f"{place} is", sorted(map(repr, value))
        elif isinstance(value, list | tuple) or type(value).__name__ == "deque":
            yield f"{place} length", len(value)
            waiting += [(f"{place}[{k}]", each) for k, each in enumerate(value)]
        if _is_looked_into(value):
            waiting += [(f"{place}.{name}", each) for name, each in vars(value).items()]


def _is_looked_into(value: Any) -> bool:
    if (
        not hasattr(value, "__dict__")
        or isinstance(value, type)
        or (callable(value) and not isinstance(value, nn.Module))
    ):
        return False
    package = type(value).__module__.partition(".")[0]
    kept = isinstance(value, nn.Module) or type(value).__name__.endswith(("Config", "Trainer", "TrainerState"))
    return kept or package.startswith(("test_", "offline_cases", "support", "trl_cases", "tests"))


def _content(tensor: Tensor) -> Any:
    if tensor.device.type == "meta":
        return "meta"
    plain = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return (
        hash(plain.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        if plain.numel() and plain.ndim
        else str(plain)
    )
