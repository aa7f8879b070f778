"""Memory as it is now: copied where somebody writes into it, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_padmin.runtime.patching import Shared

_FREE_BYTES, _FREE_SHARE = 2**20, 100  # so much, or a hundredth of everything, is copied at once
# Batch norms write into these, and the schemas of older kernels do not say so.
_UNDECLARED = frozenset({"running_mean", "running_var"})
# What hands memory to code that no dispatch mode sees.
_ESCAPES: tuple[Any, ...] = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)

# The stance of the compiler is the process's.
_eager = Shared(lambda: torch.compiler.set_stance("force_eager"))


def is_freed(tensor: Tensor) -> bool:
    """Whether its memory is gone, as that of a parameter which is gathered on demand; to read it would crash."""
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    except (RuntimeError, NotImplementedError):  # it has none of its own
        return True


@dataclass
class _Kept:
    storage: torch.UntypedStorage
    is_weight: bool
    copy: torch.UntypedStorage | None = None
    at_once: bool = False
    written: bool = False

    def keep(self) -> None:
        """Copies it, but for the second time."""
        if self.copy is None and self.storage.nbytes():  # else freed meanwhile: a shard that is gathered on demand
            self.copy = self.storage.clone()  # type: ignore[no-untyped-call]

    @property
    def has_changed(self) -> bool:
        """Whether it was written into, as far as that is known without waiting for a device."""
        if self.copy is None or self.written or not self.at_once or self.storage.device.type != "cpu":
            return self.written
        is_as_long = self.copy.nbytes() == self.storage.nbytes()
        return is_as_long and not torch.equal(_bytes(self.storage), _bytes(self.copy))

    def put_back(self) -> None:
        """Nothing happens where nothing was written, or where whoever owns the storage gave it another size."""
        copy = self.copy
        if copy is None or not (self.at_once or self.written) or copy.nbytes() != self.storage.nbytes():
            return
        self.written = False
        # Memory of the host may be mapped read-only.
        if self.storage.device.type != "cpu" or not torch.equal(_bytes(self.storage), _bytes(copy)):
            self.storage.copy_(copy, False)


class Writes:
    """What is in the storages of some tensors, at no cost for those that nobody writes into.

    A copy is made before the first operation that writes into a storage, through whatever view of it, `.data`
    included, as long as `watching` is on. Small ones are copied at once, so that writes which no operator of torch
    makes are undone too. Not seen are writes into large ones by kernels that are no operators, and by other threads.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def protect(self, tensor: Tensor, is_weight: bool = False) -> None:
        """Adds the storages of a tensor, before `settle`."""
        for storage in _storages(tensor):
            self._kept.setdefault(storage._cdata, _Kept(storage, is_weight))

    def settle(self) -> None:
        """Copies small storages, those of weights last, up to 1 MiB or a hundredth of all."""
        left = max(_FREE_BYTES, sum(kept.storage.nbytes() for kept in self._kept.values()) // _FREE_SHARE)
        for kept in sorted(self._kept.values(), key=lambda kept: (kept.is_weight, kept.storage.nbytes())):
            if kept.storage.nbytes() <= left:
                left -= kept.storage.nbytes()
                kept.keep()
                kept.at_once = True

    @property
    def copied(self) -> int:
        """Bytes that copies take."""
        return sum(kept.copy.nbytes() for kept in self._kept.values() if kept.copy is not None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copies what is written into inside. Compiled code runs eagerly: its kernels are no operators."""
        if not self._kept:
            yield
            return
        with _eager.on(), _Escapes(self.note), _Watch(self.note):
            yield

    def note(self, value: Any) -> None:
        """A tensor, or a list of them, is about to be written into."""
        if isinstance(value, Tensor):
            for storage in _storages(value):
                kept = self._kept.get(storage._cdata)
                if kept is not None:
                    kept.keep()
                    kept.written = True
        elif isinstance(value, list | tuple):
            for each in value:
                self.note(each)

    def has_written(self, tensor: Tensor) -> bool:
        """Whether somebody has written into one of its storages, or may have, since they were put back."""
        kept = (self._kept.get(storage._cdata) for storage in _storages(tensor))
        return any(each.has_changed for each in kept if each is not None)

    def put_back(self, tensor: Tensor) -> None:
        """Puts the storages of one tensor back."""
        for storage in _storages(tensor):
            if storage._cdata in self._kept:
                self._kept[storage._cdata].put_back()

    def restore(self) -> None:
        """Puts everything back; may be called again."""
        for kept in self._kept.values():
            kept.put_back()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of tensors that operators write into, before they do."""

    supports_higher_order_operators = True

    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        _allow_higher_order_operators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, name in _written(func):
            if name in kwargs:
                self._note(kwargs[name])
            elif place < len(args):
                self._note(args[place])
        return func(*args, **kwargs)


class _Escapes(TorchFunctionMode):
    """Tells of tensors whose memory is handed to others, as if that were a write."""

    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _ESCAPES:
            self._note(args[0])
        return function(*args, **(kwargs or {}))


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operator writes into; of higher-order ones nothing is known."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()

    def is_written(argument: Any) -> bool:
        alias = argument.alias_info
        return argument.name in _UNDECLARED if alias is None else bool(alias.is_write)

    return tuple((place, each.name) for place, each in enumerate(schema.arguments) if is_written(each))


def _allow_higher_order_operators() -> None:
    """Where modes do not declare that they let such operators pass (flex attention), each operator is told."""
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    for operator in list(getattr(torch._ops, "_higher_order_ops", {}).values()):
        if _Watch not in operator.python_key_table:
            operator.py_impl(_Watch)(lambda mode, *args, _run=operator, **kwargs: _run(*args, **kwargs))


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Of a tensor, or of the tensors that it is made of (shards, quantized weights, sparse ones); none without data."""
    for plain in _plain(tensor):
        try:
            storage = plain.untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # opaque layouts, lazy parameters
            continue
        if storage.device.type != "meta":
            yield storage


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor is made of others."""
    return bool(is_traceable_wrapper_subclass(tensor))


def is_lazy(tensor: Tensor) -> bool:
    """Whether a parameter or buffer has no shape yet."""
    return isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer)


def _plain(tensor: Any) -> Iterator[Tensor]:
    if is_wrapper(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for each in inner:
            if isinstance(each, Tensor):  # distributed ones name their mesh too
                yield from _plain(each)
    elif is_lazy(tensor):
        return
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
