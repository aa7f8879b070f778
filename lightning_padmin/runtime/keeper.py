"""Functions that put Python objects back as they are now: modules, containers, and objects of users' own classes.

A step may write into everything that can be reached from the module that it trains, and from the trainer that runs it.
What belongs to somebody else may be in the middle of something, and is left alone. Put back are

- modules: parameters, buffers, children, hooks, flags, attributes, the class;
- Python's containers, namespaces, tensors, arrays and random generators;
- optimizers, schedulers and scalers that a step may use by itself (a discriminator's);
- objects of users' own classes; not the classes themselves.

A class is a user's own if it stands neither in the standard library nor in an installed package, unless that package
is the one that the module or the trainer comes from and no framework. Its bases must be users' own too, or containers,
or bring no state (an abstract class, a protocol, a callback). An object that holds a lock, a thread, a process, a queue
or a file may be at work in the background, and is left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import heapq
import itertools
import os
import random
import sys
import sysconfig
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Generic, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lightning_padmin.runtime.changes import MISSING, Change, Look, below, names_of, of_mapping
from lightning_padmin.runtime.writes import Writes, is_lazy, is_wrapper

Undo = Callable[[], None]

# Attributes that every module has: what is inside of their containers are hooks, and modules and tensors of their own.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Which parameters stand in a module changes while they are gathered; whoever does that puts them back, and hooks the
# saving of the module at the first step.
_OF_SHARDING = frozenset(each for each in _OF_EVERY_MODULE if each == "_parameters" or "state_dict" in each)
# Others, in which ZeRO-3 counts the passes of a module whose parameters it gathers.
_OF_ZERO = frozenset(
    {"applied_pre_backward_ref_cnt", "ds_grads_remaining", "ds_recompute_parameters", "pre_bwd_fn", "post_bwd_fn"}
)
# Of those of every module, the ones in which a step may put others.
_PARTS = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
# Subclasses are emptied and filled by these: their own methods may refuse that, or do more.
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
_SPACES = (SimpleNamespace, argparse.Namespace)
_PLAIN = (object, *_CONTAINERS, *_SPACES, UserDict, UserList, Generic, Protocol)
_MOST_ITEMS = 100_000  # of all containers together; what is larger is data, not what a training step writes into
_ARRAY_BYTES = 2**24  # of all arrays together, unless a hundredth of the weights is more; larger ones are data too
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, FunctionType, MethodType, ModuleType, enum.Enum)
_AT_WORK = frozenset(
    {"threading", "_thread", "multiprocessing", "queue", "_queue", "asyncio", "concurrent", "subprocess", "_io", "io"}
    | {"socket", "_socket", "selectors", "weakref", "sqlite3"}
)
_FRAMEWORKS = frozenset(
    {"torch", "torchvision", "torchaudio", "torchmetrics", "numpy", "transformers", "tokenizers", "datasets", "trl"}
    | {"peft", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "deepspeed"}
    | {"bitsandbytes", "diffusers", "timm", "sentence_transformers", "evaluate", "vllm", __name__.partition(".")[0]}
)
_STANDARD = frozenset(sys.stdlib_module_names) | {"builtins"}
_INSTALLED = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib", "stdlib")})


class Keeper:
    """Makes the functions.

    Args:
        writes: takes the memory of tensors.
        root: the module that is trained; modules that hold it (wrappers, parents) are left alone.
        holders: objects whose attributes are kept besides, of whatever class.
        skip: attributes of holders that are data; they are put back, what is inside of them is not.
        most_items: of all containers together.
        with_models: whether modules that are found on the way and have parameters are kept.
        tells: whether there are `looks`.

    Attributes:
        undo: the functions.
        looks: functions that tell what differs now, and where; not of random generators, flags and hooks, of
            torchmetrics objects, which frameworks look after, of what libraries keep in a holder, and of attributes
            that a class names in `padmin_per_call`.
        restarts: functions that put back random generators, and what `looks` leave out.
        leaves: parameters and other tensors that gradients may be accumulated into.
    """

    def __init__(
        self,
        writes: Writes,
        root: nn.Module | None = None,
        holders: Sequence[object] = (),
        *,
        skip: Collection[str] = (),
        most_items: int = _MOST_ITEMS,
        with_models: bool = True,
        tells: bool = True,
    ) -> None:
        self.undo: list[Undo] = []
        self.looks: list[Look] = []
        self.restarts: list[Undo] = []
        self.leaves: list[Tensor] = []
        self._writes, self._root, self._left, self._with_models = writes, root, most_items, with_models
        self._seen: set[int] = {id(each) for each in holders}
        self._waiting: list[tuple[int, int, Any, str | None]] = []
        self._order = itertools.count()
        kinds = [type(each) for each in (root, *holders) if each is not None]
        self._packages = {_package(kind) for each in kinds for kind in each.__mro__} - _FRAMEWORKS - _STANDARD
        self._array_bytes, self._is_sharded = _ARRAY_BYTES, root is not None and is_sharded(root)
        if root is not None:
            self._array_bytes = max(_ARRAY_BYTES, sum(p.nbytes for p in root.parameters() if not is_lazy(p)) // 100)
            self._modules(root, 0, "" if tells else None)
        for holder in holders:
            kind: Any = type(holder)
            # What belongs to the first holder is often of a library's class, which cannot say so itself.
            unnamed = _per_call(holders[0]) | _libraries(kind) if tells else frozenset()
            self._attributes(holder, 0, kind.__name__ if tells else None, frozenset(skip), unnamed)
        # What has few things beside it and above it first, so that data does not take the place of figures.
        while self._waiting:
            crowd, _, value, path = heapq.heappop(self._waiting)
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._value(value, crowd, path)

    def _keep(self, undo: Undo, path: str | None) -> None:
        self.undo.append(undo)
        if path is None:
            self.restarts.append(undo)

    def _later(self, value: Any, crowd: int, path: str | None, name: object, is_attribute: bool = True) -> None:
        if not isinstance(value, _ATOMS) and id(value) not in self._seen:
            heapq.heappush(self._waiting, (crowd, next(self._order), value, below(path, name, is_attribute)))

    def _value(self, value: Any, crowd: int, path: str | None) -> None:
        if isinstance(value, nn.Module):
            if self._is_part(value):
                self._modules(value, crowd, path)
        elif isinstance(value, Tensor):
            self._tensor(value, isinstance(value, nn.Parameter), path)
        elif isinstance(value, np.ndarray):
            self._array(value, path)
        elif isinstance(value, _GENERATORS):
            self._generator(value)
        elif type(value) in _CONTAINERS:
            self._container(value, crowd, path)
        elif isinstance(value, tuple):
            self._items(dict(enumerate(value)), crowd, path)
        elif type(value) in _SPACES:
            self._attributes(value, crowd, path)
        elif isinstance(value, _OF_TRAINING):  # what they write elsewhere is told there
            self._attributes(value, crowd, None)
        elif self._is_own(type(value)) and not _is_at_work(value):
            base = next((each for each in _BASES if isinstance(value, each)), None)
            if base is not None:
                self._container(value, crowd, path, base)
            self._attributes(value, crowd, path)

    def _is_part(self, module: nn.Module) -> bool:
        if self._root is not None and any(child is self._root for child in module.modules()):
            return False
        return self._with_models or next(module.parameters(), None) is None

    def _modules(self, root: nn.Module, crowd: int, path: str | None) -> None:
        unnamed: set[int] = set()
        for name, module in root.named_modules():
            if _is_metric(module):
                unnamed.update(map(id, module.modules()))
            where = path if not name else below(path, name)
            where = None if id(module) in unnamed else where
            self._seen.add(id(module))
            self._module(module, crowd, where)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and id(tensor) not in self._seen:
                    self._seen.add(id(tensor))
                    per_call = key in _per_call(module)
                    self._tensor(tensor, isinstance(tensor, nn.Parameter), None if per_call else below(where, key))

    def _module(self, module: nn.Module, crowd: int, path: str | None) -> None:
        kind, kept = type(module), dict(vars(module))
        names = _OF_EVERY_MODULE - (_OF_SHARDING if self._is_sharded else frozenset())
        inner = [
            _refill(value, _base(value)) for name, value in kept.items() if name in names and type(value) in _CONTAINERS
        ]
        per_call = _per_call(module)
        for name, value in kept.items():
            if name not in _OF_EVERY_MODULE:
                self._later(value, crowd + len(kept), None if name in per_call else path, name)

        def undo() -> None:
            if type(module) is not kind:  # a lazy module that took shape
                module.__class__ = kind
            _set_attributes(vars(module), kept)
            for each in inner:
                each()

        self._keep(undo, path)
        if path is not None and per_call:
            self.restarts.append(lambda: _set_some(vars(module), kept, per_call - _OF_EVERY_MODULE))
        if path is not None:
            parts = [(each, dict(vars(module)[each])) for each in _PARTS if each in names]

            def look() -> Iterator[Change]:
                attributes = vars(module)
                yield from of_mapping(path, attributes, kept, attributes.__setitem__, _OF_EVERY_MODULE | per_call)
                for name, held in parts:
                    yield from of_mapping(path, attributes[name], held, attributes[name].__setitem__, per_call)

            self.looks.append(look)

    def _tensor(self, tensor: Tensor, is_weight: bool, path: str | None) -> None:
        if not is_lazy(tensor):
            self._writes.protect(tensor, is_weight)
        if tensor.is_leaf and (tensor.requires_grad or is_weight):
            self.leaves.append(tensor)
        kind, flag, alias = type(tensor), tensor.requires_grad, tensor.data

        def undo() -> None:
            if not (is_weight and self._is_sharded) and _has_moved(tensor, alias):
                tensor.data = alias
            if type(tensor) is not kind:
                tensor.__class__ = kind
            if tensor.is_leaf and tensor.requires_grad is not flag:
                tensor.requires_grad_(flag)

        self._keep(undo, path)
        if path is None:
            self.restarts.append(lambda: self._writes.put_back(alias))
        # What gathers parameters writes into them, but not into shards that are tensors of their own.
        if path is not None and not (is_weight and self._is_sharded and not hasattr(tensor, "to_local")):

            def look() -> Iterator[Change]:
                if self._writes.has_written(alias) or _has_moved(tensor, alias):
                    yield Change(path, tensor, tensor)

            self.looks.append(look)

    def _array(self, array: np.ndarray, path: str | None) -> None:
        self._array_bytes -= array.nbytes
        if isinstance(array, np.memmap) or self._array_bytes < 0 or not array.flags.writeable:
            return
        copy = array.copy()

        def undo() -> None:
            if array.flags.writeable:
                array[...] = copy

        self._keep(undo, path)
        if path is not None:

            def look() -> Iterator[Change]:
                if not _same_arrays(array, copy):
                    yield Change(path, array, array)

            self.looks.append(look)

    def _generator(self, value: Any) -> None:
        setter: Callable[[Any], Any]
        state: Any
        if isinstance(value, torch.Generator):
            setter, state = value.set_state, value.get_state()
        elif isinstance(value, random.Random):
            setter, state = value.setstate, value.getstate()
        elif isinstance(value, np.random.RandomState):
            setter, state = value.set_state, value.get_state()
        else:
            setter, state = partial(setattr, value.bit_generator, "state"), value.bit_generator.state

        def undo() -> None:
            with contextlib.suppress(RuntimeError, ValueError):  # a generator that has been closed meanwhile
                setter(state)

        self.undo.append(undo)
        self.restarts.append(undo)

    def _container(self, value: Any, crowd: int, path: str | None, base: Any = None) -> None:
        base = base or _base(value)
        if base.__len__(value) <= self._left:
            self._keep(_refill(value, base), path)
            if path is not None:
                self.looks.append(_look_into(value, base, path))
            self._items(_entries(value, base), crowd, path)

    def _items(self, entries: dict[Any, Any], crowd: int, path: str | None) -> None:
        if len(entries) <= self._left:
            self._left -= len(entries)
            for key, each in entries.items():
                self._later(each, crowd + len(entries), path, key, is_attribute=False)

    def _attributes(
        self,
        holder: Any,
        crowd: int,
        path: str | None,
        skip: Collection[str] = (),
        unnamed: frozenset[str] = frozenset(),
    ) -> None:
        attributes = getattr(holder, "__dict__", None)
        if type(attributes) is dict:
            kept = dict(attributes)
            unnamed |= _per_call(holder)
            for name, value in kept.items():
                if name not in skip:
                    self._later(value, crowd + len(kept), None if name in unnamed else path, name)
            self._keep(lambda: _set_attributes(attributes, kept), path)
            if path is not None:
                self.restarts.append(lambda: _set_some(attributes, kept, unnamed))
                self.looks.append(lambda: of_mapping(path, attributes, kept, attributes.__setitem__, unnamed))
        for kind in type(holder).__mro__:
            for slot in [each for each in vars(kind).values() if isinstance(each, MemberDescriptorType)]:
                self._slot(holder, slot, crowd, path)

    def _slot(self, holder: Any, slot: MemberDescriptorType, crowd: int, path: str | None) -> None:
        with contextlib.suppress(AttributeError, TypeError):  # empty, or read-only as those of builtin types
            value = slot.__get__(holder, type(holder))
            slot.__set__(holder, value)
            self._later(value, crowd + 1, path, slot.__name__)
            self._keep(lambda: slot.__set__(holder, value), path)
            where = below(path, slot.__name__)
            if where is not None:

                def look() -> Iterator[Change]:
                    now = getattr(holder, slot.__name__, MISSING)
                    if now is not value:
                        yield Change(where, value, now, lambda other: slot.__set__(holder, other))

                self.looks.append(look)

    def _is_own(self, kind: type) -> bool:
        """Whether its objects are put back, see above."""
        return self._stands_with_users(kind) and all(
            self._stands_with_users(base) or base in _PLAIN or "__init__" not in vars(base) for base in kind.__mro__[1:]
        )

    def _stands_with_users(self, kind: type) -> bool:
        package = _package(kind)
        if package in _STANDARD or package in _FRAMEWORKS:
            return False
        return package in self._packages or not _is_installed(package)


_OF_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def is_sharded(root: nn.Module) -> bool:
    """Whether parameters are gathered and given up again while a step runs (FSDP, ZeRO-3)."""
    if any("_is_fsdp_managed_module" in vars(module) for module in root.modules()):
        return True
    return any(
        hasattr(p, "ds_id") or hasattr(p, "to_local") or hasattr(p, "_fsdp_flattened") for p in root.parameters()
    )


def _package(kind: type) -> str:
    return str(getattr(kind, "__module__", "") or "").partition(".")[0]


@cache
def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and os.path.realpath(file).startswith(_INSTALLED)


def is_library(kind: type) -> bool:
    """Whether a class is of the standard library, a framework or another installed package."""
    package = _package(kind)
    return package in _STANDARD or package in _FRAMEWORKS or _is_installed(package)


@cache
def _libraries(kind: Any) -> frozenset[str]:
    """What the methods of its bases in libraries give to objects of a class."""
    return frozenset().union(*(_names_of_library(each) for each in kind.__mro__ if is_library(each)))


@cache
def _names_of_library(kind: type) -> frozenset[str]:
    return frozenset(names_of(kind))


def _per_call(holder: Any) -> frozenset[str]:
    """Attributes that are meant to be written whenever a step is called."""
    declared = frozenset(name for kind in type(holder).__mro__ for name in vars(kind).get("padmin_per_call", ()))
    return declared | _OF_ZERO if "ds_id" in getattr(holder, "__dict__", ()) else declared


def _is_metric(module: nn.Module) -> bool:
    return any(_package(kind) == "torchmetrics" for kind in type(module).__mro__)


def _is_at_work(value: Any) -> bool:
    attributes = getattr(value, "__dict__", None)
    return type(attributes) is dict and any(_package(type(each)) in _AT_WORK for each in attributes.values())


def _has_moved(tensor: Tensor, alias: Tensor) -> bool:
    """Whether a tensor is another part of memory, or of another shape, than it was."""
    if is_lazy(alias) or is_wrapper(alias) or alias.layout is not torch.strided:
        return type(tensor.data) is not type(alias)
    if is_wrapper(tensor) or tensor.layout is not torch.strided:
        return True
    try:
        places = [(each.dtype, each.shape, each.stride(), each.storage_offset()) for each in (tensor, alias)]
        return places[0] != places[1] or tensor.untyped_storage()._cdata != alias.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return False


def _set_attributes(attributes: dict[str, Any], kept: dict[str, Any]) -> None:
    for name in [each for each in attributes if each not in kept]:
        del attributes[name]
    attributes.update(kept)


def _set_some(attributes: dict[str, Any], kept: dict[str, Any], names: Collection[str]) -> None:
    for name in names:
        if name in kept:
            attributes[name] = kept[name]
        else:
            attributes.pop(name, None)


def _base(value: Any) -> Any:
    return next(each for each in _BASES if isinstance(value, each))


def _entries(value: Any, base: Any) -> dict[Any, Any]:
    return dict(base.items(value)) if issubclass(base, dict) else dict(enumerate(base.__iter__(value)))


def _look_into(value: Any, base: Any, path: str) -> Look:
    """Of a dictionary each entry by itself, of other containers the whole."""
    items = _entries(value, base)

    def look() -> Iterator[Change]:
        if issubclass(base, dict):
            put = partial(base.__setitem__, value)
            yield from of_mapping(path, _entries(value, base), items, put, is_attribute=False)
        elif not _identical(value, list(items.values()), base):
            yield Change(path, list(items.values()), value)

    return look


def _same_arrays(first: np.ndarray, second: np.ndarray) -> bool:
    if first.dtype.hasobject:
        return all(a is b for a, b in zip(first.flat, second.flat, strict=True))
    return bool((first == second).all() if first.dtype.kind not in "fc" else np.array_equal(first, second, True))


def _refill(value: Any, base: Any) -> Undo:
    """Puts the very objects back that a container holds."""
    items: Any = dict(base.items(value)) if issubclass(base, dict) else list(base.__iter__(value))

    def undo() -> None:
        if _identical(value, items, base):
            return
        base.clear(value)
        (base.extend if base in (list, deque) else base.update)(value, items)

    return undo


def _identical(value: Any, items: Any, base: Any) -> bool:
    if base.__len__(value) != len(items):
        return False
    if base is set:
        return set(base.__iter__(value)) == set(items)
    if issubclass(base, dict):
        found: Iterator[tuple[Any, Any]] = base.items(value)
        return all(a is b and x is y for (a, x), (b, y) in zip(found, items.items(), strict=True))
    return all(a is b for a, b in zip(base.__iter__(value), items, strict=True))
