"""The source of a function that may be hooked to gradients, and what its names stand for; nothing is run."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Mapping
from typing import Any

import torch

_TORCH = str(torch.__file__).rsplit("__init__", maxsplit=1)[0]


class Missing:
    """The type of `MISSING`."""


MISSING = Missing()


def function_of(hook: Any) -> tuple[types.FunctionType, list[Any]] | None:
    """The Python function behind something that can be called, and the arguments that it gets before others."""
    before: list[Any] = []
    for _ in range(10):
        if isinstance(hook, functools.partial):
            before = [*hook.args, *before]
            hook = hook.func
        elif isinstance(hook, types.MethodType):
            before = [hook.__self__, *before]
            hook = hook.__func__
        elif isinstance(hook, types.FunctionType):
            inner = getattr(hook, "__wrapped__", None)
            # Decorators of torch (no_grad, compiler.disable) only call what they decorate.
            if inner is None or not hook.__code__.co_filename.startswith(_TORCH):
                return hook, before
            hook = inner
        else:
            method = getattr(type(hook), "__call__", None)  # noqa: B004  # the function, not whether there is one
            if isinstance(hook, type) or not isinstance(method, types.FunctionType):
                return None
            before = [hook, *before]
            hook = method
    return None


def name_of(hook: Any) -> str:
    """Name, module and line of the function behind a hook, for messages."""
    found = function_of(hook)
    if found is None:
        kind = hook if hasattr(hook, "__qualname__") else type(hook)
        return f"{kind.__qualname__} of {kind.__module__}"
    function, code = found[0], found[0].__code__
    file = code.co_filename.rsplit("/", 1)[-1]
    return f"{function.__qualname__} of {function.__module__} ({file}:{code.co_firstlineno})"


def module_of(hook: Any) -> str:
    """The module that a hook's function was written in; "" for what is no Python function."""
    found = function_of(hook)
    return "" if found is None else str(found[0].__module__)


def node_of(function: types.FunctionType) -> ast.FunctionDef | ast.Lambda | None:
    """Its syntax; None where the source is not to be found, or does not fit what was compiled."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename)
    tree = _parsed(code.co_filename, len(lines)) if lines else None
    if tree is None:
        return None
    names = {*code.co_names, *code.co_freevars, *code.co_cellvars}
    found: list[ast.FunctionDef | ast.Lambda] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        elif isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            first = node.lineno
        else:
            continue
        given = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        fits = first == code.co_firstlineno and given == list(code.co_varnames[: code.co_argcount])
        if fits and names <= _names(node) | {"__class__"} and _holds(node, code):
            found.append(node)
    exact = [node for node in found if _used(node) == names] if len(found) > 1 else found
    found = exact or found
    return found[0] if len({ast.dump(node) for node in found}) == 1 else None


@functools.lru_cache(maxsize=64)
def _parsed(filename: str, lines: int) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None


def _holds(node: ast.FunctionDef | ast.Lambda, code: types.CodeType) -> bool:
    """Whether the places of the code are inside of the node; True where Python does not tell them."""
    if isinstance(node, ast.FunctionDef) or not hasattr(code, "co_positions"):
        return True
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    for line, last_line, column, last_column in code.co_positions():
        if line is None or column is None or last_line is None or last_column is None or last_column == 0:
            continue
        if not (start <= (line, column) and (last_line, last_column) <= end):
            return False
    return True


def _names(node: ast.AST) -> set[str]:
    names: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            names.add(each.id)
        elif isinstance(each, ast.Attribute):
            names.add(each.attr)
        elif isinstance(each, ast.arg):
            names.add(each.arg)
        elif isinstance(each, ast.alias):
            names.update((each.name, *each.name.split(".")))
        elif isinstance(each, ast.ImportFrom) and each.module:
            names.add(each.module)
        elif isinstance(each, ast.FunctionDef):
            names.add(each.name)
    return names


def _used(node: ast.FunctionDef | ast.Lambda) -> set[str]:
    arguments = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    return _names(node) - arguments


def member(owner: Any, name: str) -> Any:
    """An attribute, without running properties."""
    if isinstance(owner, types.ModuleType):
        return getattr(owner, name, MISSING)
    for place in ("__dict__", "_modules", "_parameters", "_buffers"):
        try:
            members = object.__getattribute__(owner, place)
        except AttributeError:
            continue
        if isinstance(members, Mapping) and name in members:
            found = members[name]
            return found.__func__ if isinstance(found, staticmethod) else found
    found = inspect.getattr_static(owner, name, MISSING)
    if isinstance(found, types.FunctionType) and not isinstance(owner, type):
        return types.MethodType(found, owner)
    if isinstance(found, staticmethod | classmethod):
        return getattr(owner, name, MISSING)
    return MISSING if isinstance(found, property) or hasattr(type(found), "__get__") else found


def is_library(function: types.FunctionType) -> bool:
    """Whether what a function does is known by its name, or of no concern."""
    root = str(getattr(function, "__module__", "")).split(".")[0]
    return root in ("torch", "numpy", "logging", "lightning_padmin", "builtins", "warnings", "collections")


def is_torch(called: Any) -> bool:
    """Whether it is a function of torch, or a method of its tensors."""
    if called is MISSING:
        return False
    module = str(getattr(called, "__module__", "") or "")
    owner = str(getattr(getattr(called, "__objclass__", None), "__module__", "") or "")
    if isinstance(called, types.BuiltinFunctionType):
        of = str(getattr(called, "__self__", ""))
        return module.startswith("torch") or "torch" in of or "_Variable" in of
    return module.startswith("torch") or owner.startswith("torch")
