"""Running a loss for its gradient alone: without dropout, and with everything that it touches put back afterwards."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Attributes that every module has; parameters and buffers are kept apart, hooks and children are not state.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MOST_ITEMS = 10_000  # of a container: a larger one is data, not what a training step writes into


class NoDropout(TorchFunctionMode):
    """Switches dropout off where it is called: `eval()` would do more, fused mixers take another path there."""

    _PLAIN = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dropout returns its input; attention runs with probability 0."""
        kwargs = dict(kwargs or {})
        if function in self._PLAIN:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return function(*args, **kwargs)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Gradients, buffers, attributes and random state are put back afterwards, whatever happens.

    Attributes are those of the module and its children; what is inside of containers and tensors is put back in place,
    what is inside of other objects is not.
    """
    gradients = [(p, p.grad) for p in module.parameters()]
    for p, _ in gradients:
        p.grad = None  # what is accumulated inside must not go into these
    kept = [put_back for child in module.modules() for put_back in (_kept_buffers(child), _kept_attributes(child))]
    states = random_states()
    try:
        yield
    finally:
        _set_random_states(states)
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for put_back in kept:
                put_back()


def random_states() -> dict[str, Any]:
    """State of every generator that a training step may draw from: Python, numpy, torch's CPU and accelerators."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        states[accelerator.type] = getattr(torch, accelerator.type).get_rng_state()
    return states


def same_random_states(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether nothing was drawn between the two."""
    return all(_same(first[key], second[key]) for key in first)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, tuple):
        return all(_same(a, b) for a, b in zip(first, second, strict=True))
    return bool(np.array_equal(first, second))


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    for kind in states.keys() - {"python", "numpy", "cpu"}:
        getattr(torch, kind).set_rng_state(states[kind])


def _kept_buffers(module: nn.Module) -> Callable[[], None]:
    buffers = dict(module._buffers)  # some models register new ones in their forward pass
    inner = [_kept_tensor(buffer) for buffer in buffers.values() if buffer is not None]

    def restore() -> None:
        module._buffers.clear()
        module._buffers.update(buffers)
        for put_back in inner:
            put_back()

    return restore


def _kept_attributes(module: nn.Module) -> Callable[[], None]:
    """A function that puts the module's own attributes back."""
    names = [name for name in vars(module) if name not in _OF_EVERY_MODULE]
    kept = {name: (vars(module)[name], _kept(vars(module)[name], set())) for name in names}

    def restore() -> None:
        attributes = vars(module)
        for name in [each for each in attributes if each not in kept and each not in _OF_EVERY_MODULE]:
            del attributes[name]
        for name, (value, put_back) in kept.items():
            put_back()
            attributes[name] = value

    return restore


def _kept(value: Any, seen: set[int]) -> Callable[[], None]:
    """A function that puts the contents of a container or tensor back in place."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return _kept_tensor(value)
    is_container = isinstance(value, list | deque | set | MutableMapping)
    if not is_container or id(value) in seen or len(value) > _MOST_ITEMS:
        return lambda: None
    seen.add(id(value))
    items = dict(value) if isinstance(value, MutableMapping) else list(value)
    inner = [_kept(item, seen) for item in (items.values() if isinstance(items, dict) else items)]

    def restore() -> None:
        value.clear()
        getattr(value, "extend" if isinstance(value, list | deque) else "update")(items)
        for put_back in inner:
            put_back()

    return restore


def _kept_tensor(tensor: Tensor) -> Callable[[], None]:
    if tensor.is_inference():  # nobody can write into it here
        return lambda: None
    copy, version = tensor.detach().clone(), tensor._version

    def restore() -> None:
        if tensor._version != version:
            tensor.detach().copy_(copy)

    return restore
