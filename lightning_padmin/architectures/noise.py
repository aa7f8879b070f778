"""Noise whose size depends on the width of the call, as NEFTune puts on embeddings.

Its size is alpha / sqrt(width x dim) of the call that it is added in. Removing padding makes calls narrower, so the
noise would be larger than without: another training, which no comparison of gradients shows, since noise differs from
call to call anyway. It is known by the names that transformers and TRL give it, and read from the source of hooks and
of `forward` functions that are the user's own.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_padmin.architectures.hook_source import function_of, node_of
from lightning_padmin.errors import ConfigError

_ALPHA = "neftune_noise_alpha"
_DRAWS = {"uniform_", "normal_", "rand_like", "randn_like", "rand", "randn", "uniform", "normal", "standard_normal"}
_ROOTS = {"sqrt", "rsqrt", "pow", "isqrt"}
_LIBRARIES = {"torch", "transformers", "peft", "lightning_padmin", "trl", "accelerate", "lightning", "deepspeed"}


def noise_by_width(module: nn.Module) -> str | None:
    """What adds noise by the width of the call when this module (not its children) runs; None: nothing does."""
    alpha = getattr(module, _ALPHA, None)
    if alpha:
        return f"{_ALPHA}={alpha}"
    off = hasattr(module, _ALPHA)
    for function in _functions(module):
        name = getattr(function, "__name__", type(function).__name__)
        if "neftune" in name.lower():
            if not off:
                return f"hook {name}"
        elif (found := noise_in(function)) is not None:
            return found
    return None


def noise_in(function: Any) -> str | None:
    """What adds noise by the width of the call in a function of the user's own; None: nothing does."""
    if not _is_own(function) or not _scales_noise(function):
        return None
    return f"noise in {getattr(function, '__qualname__', function)}"


def refuse_noise_of(trainer: Any) -> None:
    """Raises ConfigError for a trainer whose arguments, or own methods, put noise on embeddings by the width."""
    alpha = getattr(trainer.args, _ALPHA, None) or getattr(trainer, _ALPHA, None)
    if alpha:
        raise ConfigError(noise_words(type(trainer.args).__name__, f"{_ALPHA}={alpha}"))
    for name in ("compute_loss", "training_step"):
        method = getattr(type(trainer), name, None)
        found = None if method is None else noise_in(method)
        if found is not None:
            raise ConfigError(noise_words(type(trainer).__name__, found))


def noise_words(where: str, what: str) -> str:
    """Why it is refused."""
    return (
        f"{where} has {what}: the size of this noise depends on the width of the call (alpha / sqrt(width x dim)), and "
        f"without padding calls are narrower, so training would change. Switch it off ({_ALPHA}=None), or use "
        "enabled=False"
    )


def _functions(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()
    for name in ("forward", "training_step"):
        own = vars(module).get(name)
        if own is not None or hasattr(type(module), name):
            yield own if own is not None else getattr(type(module), name)


def _is_own(function: Any) -> bool:
    found = function_of(function)
    return found is not None and str(found[0].__module__).split(".")[0] not in _LIBRARIES


def _scales_noise(function: Any) -> bool:
    found = function_of(function)
    return found is not None and _reads_width_for_noise(found[0].__code__, found[0])


@functools.lru_cache(maxsize=1024)
def _of_code(code: types.CodeType) -> list[bool]:
    return []


def _reads_width_for_noise(code: types.CodeType, function: types.FunctionType) -> bool:
    known = _of_code(code)  # the source of a function is read once
    if not known:
        known.append(_has_random_draw(code) and _divides_by_width(function))
    return known[0]


def _has_random_draw(code: types.CodeType) -> bool:
    return bool(_DRAWS & set(code.co_names))


def _divides_by_width(function: types.FunctionType) -> bool:
    """Whether something is divided by the size of another dimension than the last, or by a root of it."""
    node = node_of(function)
    if node is None:
        return False
    sizes: set[str] = set()
    for _ in range(3):  # names made of names
        for each in ast.walk(node):
            if isinstance(each, ast.Assign) and _tells_size(each.value, sizes):
                sizes.update(name for target in each.targets for name in _sizes_in(target))
    for each in ast.walk(node):
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div) and _tells_size(each.right, sizes):
            return True
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Pow) and _tells_size(each.left, sizes):
            return True
        is_root = isinstance(each, ast.Call) and _called(each) in _ROOTS
        if is_root and isinstance(each, ast.Call) and any(_tells_size(part, sizes) for part in (each.func, *each.args)):
            return True
    return False


def _sizes_in(target: ast.expr) -> Iterator[str]:
    """Names that a size is assigned to; of `rows, width, dim = x.shape` not the last."""
    parts = target.elts[:-1] if isinstance(target, ast.Tuple) and len(target.elts) > 2 else [target]
    yield from (each.id for part in parts for each in ast.walk(part) if isinstance(each, ast.Name))


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _tells_size(node: ast.AST, names: set[str]) -> bool:
    """Whether the size of a call is in an expression; the last dimension alone is the model's own."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return not _is_last(node.slice)
    if isinstance(node, ast.Call) and _called(node) in ("size", "numel"):
        return _called(node) == "numel" or not (node.args and _is_last(node.args[0]))
    if isinstance(node, ast.Attribute) and node.attr == "shape":
        return True
    if isinstance(node, ast.Call) and _called(node) in _DRAWS | {"zeros", "ones", "empty", "view", "reshape", "expand"}:
        return False  # a shape for what is made, not a factor
    return any(_tells_size(child, names) for child in ast.iter_child_nodes(node))


def _is_last(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant) and node.operand.value == 1


__all__ = ["noise_by_width", "noise_in", "noise_words", "refuse_noise_of"]
