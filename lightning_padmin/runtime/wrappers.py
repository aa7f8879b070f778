"""What lies inside of wrappers, which are known by what they have, not by their class; and what a function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_COMPILED, _WRAPPED = "_orig_mod", "module"
_SHARDS = ("FullyShardedDataParallel", "FSDPModule")


def unwrap(model: Any, *, compiled: bool = True, through: Callable[[Any], bool] = lambda wrapper: True) -> Any:
    """The model inside of DistributedDataParallel, FSDP, DeepSpeed, Fabric and torch.compile.

    Args:
        model: a module; anything else is returned as it is.
        compiled: whether to look into what torch.compile has made.
        through: whether to look into a wrapper; the first that is refused is returned.
    """
    names = (_COMPILED, _WRAPPED) if compiled else (_WRAPPED,)
    while isinstance(model, nn.Module) and through(model):
        inner = next((each for name in names if isinstance(each := getattr(model, name, None), nn.Module)), None)
        if inner is None:
            break
        model = inner
    return model


def shards(module: nn.Module, *, first: bool = False) -> bool:
    """Whether a module gathers its parameters when it is called (FSDP), known by name: importing those takes seconds.

    Args:
        module: itself, not what is inside.
        first: whether only the first FSDP counts, which is a wrapper.
    """
    names = _SHARDS[:1] if first else _SHARDS
    return any(kind.__name__ in names and kind.__module__.startswith("torch.") for kind in type(module).__mro__)


def without_adapters(model: Any) -> Any:
    """The model that adapters of PEFT are put on, or the model itself."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def layers(model: Any) -> Iterator[Any]:
    """A model, then what it wraps, from the outside in, adapters included; each once."""
    seen: list[Any] = []
    while not any(model is each for each in seen):
        seen.append(model)
        yield model
        if not isinstance(model, nn.Module):
            return
        inner = without_adapters(model)
        names = (_WRAPPED, _COMPILED) if inner is model else ()
        model = next((each for name in names if isinstance(each := getattr(model, name, None), nn.Module)), inner)


def takes(function: Any, name: str, *, by_name: bool = False) -> bool:
    """Whether a function, or a module's forward, takes an argument of that name.

    Args:
        function: a module counts as its `forward`.
        name: of the argument.
        by_name: True: only if it is named; by default one that takes all names takes this one too.

    Raises:
        TypeError, ValueError: it has no signature.
    """
    parameters = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
    passed_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return name in parameters or (passed_on and not by_name)
