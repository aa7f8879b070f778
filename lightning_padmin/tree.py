"""Walking and rebuilding batches of any container type without touching the caller's objects.

A batch is a tree. Its inner nodes are mappings, dataclasses, named tuples and (at the top) lists and tuples; its
leaves are tensors, arrays, lists of per-row objects, strings, numbers and None. A leaf is named by its path, keys
joined by dots: `"inputs.attention_mask"`, or `"0"` for the first entry of a tuple batch.

A list or tuple below the top is a leaf (one entry per row, or shared by all rows) unless somebody names a path
inside of it, in which case it is an inner node like the others.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any

from lightning_padmin.errors import SchemaError


def join(path: str, key: object) -> str:
    """Path of a child: `join("inputs", "labels") == "inputs.labels"`."""
    return f"{path}.{key}" if path else str(key)


def _is_named_tuple(node: object) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _children(node: Any, path: str, named: Collection[str]) -> list[tuple[object, Any]] | None:
    """Key and value of each child of an inner node, None for a leaf."""
    if isinstance(node, Mapping):
        return list(node.items())
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    if _is_named_tuple(node):
        return list(zip(node._fields, node, strict=True))
    opened = not path or any(name.startswith(path + ".") for name in named)
    if isinstance(node, list | tuple) and opened:
        return list(enumerate(node))
    return None


def iter_leaves(batch: Any, named: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Path and value of every leaf, in the batch's own order.

    Args:
        batch: the batch; a mapping, dataclass, named tuple, list or tuple.
        named: paths that a user declared; a list or tuple above one of them is walked into.

    Raises:
        SchemaError: the batch itself is not a container, or two leaves share a path.
    """
    if _children(batch, "", named) is None:
        raise SchemaError(
            f"batch of type {type(batch).__name__}: expected a mapping, dataclass, named tuple, list or tuple of "
            "tensors; have the collate function return one of these"
        )
    seen: set[str] = set()
    stack: list[tuple[str, Any]] = [("", batch)]
    while stack:
        path, node = stack.pop()
        children = _children(node, path, named)
        if children is None:
            if path in seen:
                raise SchemaError(f"two entries of the batch have the path {path!r}: rename one of them")
            seen.add(path)
            yield path, node
        else:
            stack.extend((join(path, key), value) for key, value in reversed(children))


def map_leaves(batch: Any, function: Callable[[str, Any], Any], named: Collection[str] = ()) -> Any:
    """A new batch of the same types, each leaf replaced by `function(path, leaf)`; the original stays as it is."""
    return _map(batch, "", function, named)


def _map(node: Any, path: str, function: Callable[[str, Any], Any], named: Collection[str]) -> Any:
    children = _children(node, path, named)
    if children is None:
        return function(path, node)
    values = {key: _map(value, join(path, key), function, named) for key, value in children}
    return _rebuild(node, values)


def _rebuild(node: Any, values: dict[Any, Any]) -> Any:
    # Shallow copies keep what a constructor would lose: default factories, encodings, fields with init=False.
    new: Any
    if isinstance(node, UserDict):  # transformers' BatchEncoding is one; a shallow copy would share its dictionary
        new = copy.copy(node)
        new.data = dict(values)
        return new
    if isinstance(node, MutableMapping):
        new = copy.copy(node)
        new.update(values)
        return new
    if isinstance(node, Mapping):
        return type(node)(values)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(node):
        new = copy.copy(node)
        for key, value in values.items():
            object.__setattr__(new, key, value)
        return new
    if _is_named_tuple(node):
        return type(node)(*values.values())
    return type(node)(values.values())
