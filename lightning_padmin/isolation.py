"""Running a loss for its gradient alone: without dropout, and with what it writes into put back afterwards."""

from __future__ import annotations

import contextlib
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Attributes that every module has; parameters and buffers are kept apart, hooks and children are not state.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Subclasses of these may refuse to be emptied and filled again, or do more than that.
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_MOST_ITEMS = 100_000  # of all containers together; what is larger is data, not what a training step writes into
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_HALF = (torch.float16, torch.bfloat16)
_STOCK_ATTENTION: Any = F.scaled_dot_product_attention
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class _Watch(TorchFunctionMode):
    """Switches dropout off where it is called, and notices half precision.

    `eval()` would do more: fused mixers take another path there.
    """

    _PLAIN = (*(getattr(F, name) for name in _DROPOUTS), torch.dropout)

    def __init__(self) -> None:
        super().__init__()
        self.saw_half = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dropout returns a copy of its input; attention runs with probability 0."""
        kwargs = dict(kwargs or {})
        if function in self._PLAIN:
            result = _kept_whole(*args, **kwargs)
        elif function is _STOCK_ATTENTION:
            result = _attention(function, *args, **kwargs)
        else:
            result = function(*args, **kwargs)
        self.saw_half = self.saw_half or (isinstance(result, Tensor) and result.dtype in _HALF)
        return result


def _kept_whole(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # A copy, as dropout gives one: what follows may write into it.
    return input.clone()


def _attention(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    elif "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0
    return function(*args, **kwargs)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[_Watch]:
    """No dropout inside, in forward passes and where checkpointing computes them again; recurrent layers included.

    Yields:
        An object whose `saw_half` tells whether anything was computed in half precision.
    """
    watch = _Watch()
    with ExitStack() as stack:
        # The mode is not on where a backward pass computes a forward pass again, nor inside of functions that handle
        # modes themselves; these look the functions up by name.
        for name in _DROPOUTS:
            stack.enter_context(mock.patch.object(F, name, _kept_whole))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", partial(_attention, _STOCK_ATTENTION)))
        for child in module.modules():
            if isinstance(child, nn.RNNBase) and child.dropout:
                stack.enter_context(mock.patch.object(child, "dropout", 0.0))
        stack.enter_context(watch)
        yield watch


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """What `ModuleState` keeps is put back afterwards, whatever happens."""
    state = ModuleState(module)
    try:
        yield
    finally:
        state.restore()


class ModuleState:
    """What a training step may write into, as it is now: gradients, buffers, attributes, random state.

    Kept are gradients, which are taken away until `restore`; buffers and frozen parameters; attributes of the module
    and its children, and what is inside of tensors, arrays, generators and plain containers among them, however deep,
    up to some 100,000 items. Not kept is what is inside of other objects, nor anything outside of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._gradients = [(p, p.grad) for p in module.parameters()]
        for p, _ in self._gradients:
            p.grad = None  # what is accumulated meanwhile must not go into these
        self._random = random_states()
        keeper = _Keeper()
        self._undo = [keeper.tensor(p.data) for p in module.parameters() if not p.requires_grad]
        for child in module.modules():
            self._undo += [keeper.buffers(child), keeper.attributes(child)]

    def restore(self) -> None:
        """Puts everything back; may be called again."""
        _set_random_states(self._random)
        for p, gradient in self._gradients:
            p.grad = gradient
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def clear(self) -> None:
        """Puts everything back but the gradients, which stay away for the next pass."""
        self.restore()
        for p, _ in self._gradients:
            p.grad = None


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


class _Keeper:
    """Makes functions that put things back as they are now."""

    def __init__(self) -> None:
        self._left = _MOST_ITEMS
        self._seen: set[int] = set()

    def buffers(self, module: nn.Module) -> Callable[[], None]:
        buffers = dict(module._buffers)  # some models register new ones in their forward pass
        inner = [self.tensor(buffer) for buffer in buffers.values() if buffer is not None]

        def undo() -> None:
            if not _identical(module._buffers, buffers):
                module._buffers.clear()
                module._buffers.update(buffers)
            for each in inner:
                each()

        return undo

    def attributes(self, module: nn.Module) -> Callable[[], None]:
        kept = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        inner = [each for value in kept.values() if (each := self.value(value)) is not None]

        def undo() -> None:
            attributes = vars(module)
            for name in [each for each in attributes if each not in kept and each not in _OF_EVERY_MODULE]:
                del attributes[name]
            for each in inner:
                each()
            attributes.update(kept)

        return undo

    def value(self, value: Any) -> Callable[[], None] | None:
        if isinstance(value, _SCALARS) or id(value) in self._seen:
            return None
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            return self.tensor(value)
        if isinstance(value, np.ndarray):
            return _array(value)
        if isinstance(value, torch.Generator):
            return _with(value.set_state, value.get_state())
        if isinstance(value, np.random.Generator):
            return _with(lambda state: setattr(value.bit_generator, "state", state), value.bit_generator.state)
        if isinstance(value, random.Random):
            return _with(value.setstate, value.getstate())
        return self._container(value) if type(value) in _CONTAINERS and len(value) <= self._left else None

    def tensor(self, tensor: Tensor) -> Callable[[], None]:
        is_weight = not tensor.is_floating_point() and tensor.numel() > 2**20  # quantized: large, and not written into
        if tensor.is_inference() or is_weight:
            return lambda: None
        copy = tensor.detach().clone()

        def undo() -> None:
            if not _equal(tensor, copy):
                tensor.detach().copy_(copy)

        return undo

    def _container(self, value: Any) -> Callable[[], None]:
        self._seen.add(id(value))
        self._left -= len(value)
        is_map = isinstance(value, dict)
        items: Any = dict(value) if is_map else list(value)
        inner = [each for item in (items.values() if is_map else items) if (each := self.value(item)) is not None]

        def undo() -> None:
            if not _identical(value, items):
                value.clear()
                getattr(value, "extend" if isinstance(value, list | deque) else "update")(items)
            for each in inner:
                each()

        return undo


def _identical(found: Any, kept: Any) -> bool:
    """Whether a container holds the very objects that it held."""
    if len(found) != len(kept) or isinstance(found, set):
        return isinstance(found, set) and found == set(kept)
    if isinstance(found, dict):
        return all(a is b for a, b in zip(found, kept, strict=True)) and all(found[key] is kept[key] for key in kept)
    return all(a is b for a, b in zip(found, kept, strict=True))


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and bool(torch.equal(first.detach(), second))


def _array(array: np.ndarray) -> Callable[[], None]:
    copy = array.copy()

    def undo() -> None:
        if array.flags.writeable:
            array[...] = copy

    return undo


def _with(setter: Callable[[Any], Any], state: Any) -> Callable[[], None]:
    def undo() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # a generator that has been closed meanwhile
            setter(state)

    return undo
