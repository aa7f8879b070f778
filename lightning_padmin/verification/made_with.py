"""What a proof about models was made with, so that it counts for that alone.

A leak test has run certain modules, with certain functions and one way to attend. Whoever puts another one in
(`set_attn_implementation`, a configuration, a kernel written over a function, a module replaced) has another model.
What was there is remembered as entries of dictionaries, which are cheap to look at again: a few tenths of a millisecond
for a thousand modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn import functional as F

from lightning_padmin.runtime import attention_inside

_NOTHING: Any = object()
# Of configurations and modules: what says how tokens attend.
_WORDS = ("attn", "attention", "causal", "window", "layer_types")
_PLAIN = (str, int, float, bool, tuple, list, type(None))
# Their classes call what they have inside, which is looked at itself.
_FRAMES = ("torch", "transformers", "peft", "accelerate", "lightning", "trl")
_OWN_CODE = ("transformers.models.", "transformers_modules.")
_MOST_FUNCTIONS = 2000


class MadeWith:
    """What models consist of now.

    Args:
        models: by name; their wrappers and hooks are not looked at.
        inside: what holds the models as attributes, whose entries may be replaced; None where nothing does.
    """

    def __init__(self, models: Mapping[str, nn.Module], inside: nn.Module | None = None) -> None:
        self._entries: list[tuple[Mapping[str, Any], str, Any, str]] = []
        self._kinds: list[tuple[nn.Module, type, str]] = []
        self._children: list[tuple[Mapping[str, Any], int, str]] = []
        self._seen: set[Any] = set()
        self._models = dict(models)
        self._watch(vars(F), "scaled_dot_product_attention", "torch.nn.functional.scaled_dot_product_attention")
        for name, model in self._models.items():
            if inside is not None:
                self._path(inside, name)
            for path, module in model.named_modules(prefix=name):
                self._module(module, path or type(module).__name__)
        self._seen = set()

    def change(self) -> str | None:
        """The first that is not as it was, in words; None where all is."""
        for module, kind, path in self._kinds:
            if type(module) is not kind:
                return f"{path} is a {type(module).__name__}, no {kind.__name__},"
        for children, count, path in self._children:
            if len(children) != count:
                return f"{path} has modules put in or taken out"
        for entries, name, value, path in self._entries:
            now = entries.get(name, _NOTHING)
            if now is not value and not _is_same(now, value):
                return f"{path} was {_title(value)}, is {_title(now)}"
        return None

    def __deepcopy__(self, memo: Any) -> MadeWith:
        return _of_another()

    def __reduce__(self) -> Any:
        return _of_another, ()

    def _watch(self, entries: Mapping[str, Any], name: str, path: str) -> None:
        value = _plain(entries.get(name, _NOTHING))
        self._entries.append((entries, name, list(value) if isinstance(value, list) else value, path))

    def _path(self, inside: nn.Module, name: str) -> None:
        """From what holds a model down to it."""
        module: Any = inside
        for part in name.split("."):
            if part not in getattr(module, "_modules", {}):
                return
            self._watch(module._modules, part, name)
            module = module._modules[part]

    def _module(self, module: nn.Module, path: str) -> None:
        self._kinds.append((module, type(module), path))
        self._children.append((module._modules, len(module._modules), path))
        for name in module._modules:
            self._watch(module._modules, name, f"{path}.{name}")
        own = vars(module)
        self._watch(own, "forward", f"{path}.forward")
        self._function(own.get("forward"))
        self._settings(own, path)
        config = own.get("config")
        if config is not None:
            self._watch(own, "config", f"{path}.config")
            if self._is_new(config) and hasattr(config, "__dict__"):
                for name in ("_attn_implementation_internal", "_attn_implementation"):
                    if name not in vars(config):
                        self._watch(vars(config), name, f"{path}.config.{name}")
                self._settings(vars(config), f"{path}.config")
        for kind in type(module).__mro__:
            if kind is nn.Module:
                break
            self._class(kind)

    def _settings(self, own: Mapping[str, Any], path: str) -> None:
        for name, value in own.items():
            if isinstance(value, _PLAIN) and any(word in name for word in _WORDS) and "output" not in name:
                self._watch(own, name, f"{path}.{name}")

    def _class(self, kind: type) -> None:
        if not self._is_new(kind):
            return
        self._watch(vars(kind), "forward", f"{kind.__name__}.forward")
        if kind.__module__.split(".")[0] in _FRAMES and not kind.__module__.startswith(_OWN_CODE):
            return
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType | staticmethod | classmethod):
                if name != "forward":
                    self._watch(vars(kind), name, f"{kind.__name__}.{name}")
                self._function(value)

    def _function(self, function: Any) -> None:
        """What a function calls by its global names, and what those call that are of its file or make masks."""
        function = _plain(function)
        if isinstance(function, MethodType | staticmethod | classmethod):
            function = function.__func__
        if isinstance(function, partial):
            self._function(function.func)
        if not isinstance(function, FunctionType) or not self._is_new(function) or len(self._seen) > _MOST_FUNCTIONS:
            return
        for cell in function.__closure__ or ():
            try:
                inner = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self._function(inner)
        entries = function.__globals__
        for name in _names(function.__code__):
            value = entries.get(name, _NOTHING)
            if hasattr(value, "_global_mapping") and hasattr(value, "_local_mapping"):
                self._registry(value, name)
            elif value is not _NOTHING and callable(value):
                if self._is_new((id(entries), name)):
                    self._watch(entries, name, f"{function.__module__}.{name}")
                of = getattr(value, "__module__", None) or ""
                if of == function.__module__ or "mask" in of or "attention" in of:
                    self._function(value)

    def _registry(self, registry: Any, title: str) -> None:
        """The functions of transformers that go by the name of an attention."""
        if not self._is_new(registry):
            return
        for entries in (registry._global_mapping, registry._local_mapping):
            for name in {*registry._global_mapping, *registry._local_mapping}:
                self._watch(entries, name, f"{title}[{name!r}]")
                self._function(entries.get(name))

    def _is_new(self, what: Any) -> bool:
        key = what if isinstance(what, tuple) else id(what)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _of_another() -> MadeWith:
    """Of a copy: what it was made with is not there."""
    found = MadeWith({})
    found._entries = [({}, "", None, "a copy")]
    return found


def _is_same(now: Any, value: Any) -> bool:
    """Apart from what this library has put around it for a while, and of settings that are not objects of their own."""
    if isinstance(now, _PLAIN):
        return type(now) is type(value) and bool(now == value)
    now = _plain(now)
    return now is value or (isinstance(now, MethodType) and isinstance(value, MethodType) and now == value)


def _plain(value: Any) -> Any:
    """What stands there for others than this library."""
    value = attention_inside(value)
    while "padmin_stands_for" in getattr(value, "__dict__", ()):
        own = vars(value)["padmin_stands_for"]
        value = _NOTHING if own is None else own
    return value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _title(value: Any) -> str:
    if value is _NOTHING:
        return "nothing"
    if isinstance(value, _PLAIN):
        return repr(value)[:80]
    return getattr(value, "__qualname__", None) or type(value).__name__


__all__ = ["MadeWith"]
