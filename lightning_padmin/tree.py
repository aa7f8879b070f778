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
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lightning_padmin.errors import SchemaError


def join(path: str, key: object) -> str:
    """Path of a child: `join("inputs", "labels") == "inputs.labels"`."""
    return f"{path}.{key}" if path else str(key)


def last_part(path: str) -> str:
    """The entry's own name: `last_part("inputs.labels") == "labels"`."""
    return path.rsplit(".", 1)[-1]


def parent_of(path: str) -> str:
    """The path of the node that an entry is in: `parent_of("inputs.labels") == "inputs"`; "" at the top."""
    return path.rpartition(".")[0]


def find_path(key: str, paths: Sequence[str], option: str) -> str | None:
    """The path that `key` names: itself, else the one path whose last part or parts it is; None if there is none.

    Raises:
        SchemaError: several paths end in `key`.
    """
    if key in paths:
        return key
    ends = [path for path in paths if path.endswith("." + key)]
    if len(ends) > 1:
        raise SchemaError(f"{option}={key!r} names several entries: {', '.join(ends)}. Give the whole path of one")
    return ends[0] if ends else None


def _is_named_tuple(node: object) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _children(node: Any, path: str, named: Collection[str]) -> list[tuple[object, Any]] | None:
    """Key and value of each child of an inner node, None for a leaf."""
    if isinstance(node, Mapping):
        return list(node.items())
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        return [(name, getattr(node, name)) for name in names if hasattr(node, name)]  # init=False may be unset
    if _is_named_tuple(node):
        return list(zip(node._fields, node, strict=True))
    opened = not path or (path not in named and any(name.startswith(path + ".") for name in named))
    if isinstance(node, list | tuple) and opened:
        return list(enumerate(node))
    return None


def child_of(node: Any, name: str) -> Any:
    """The child of an inner node under one part of a path."""
    if isinstance(node, Mapping):
        return next(value for key, value in node.items() if str(key) == name)
    if isinstance(node, list | tuple) and not _is_named_tuple(node):
        return node[int(name)]
    return getattr(node, name)


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


def check_rebuildable(batch: Any, named: Collection[str] = ()) -> None:
    """Raises SchemaError for a batch with a container that cannot be made anew, before anything depends on it."""
    try:
        map_leaves(batch, lambda path, leaf: leaf, named)
    except (TypeError, AttributeError, ValueError) as error:
        raise SchemaError(
            f"batch of type {type(batch).__name__}: one of its containers cannot be rebuilt with other entries "
            f"({error}): have the collate function return dictionaries, dataclasses or tuples"
        ) from error


def tensors_in(leaf: Any) -> Iterator[torch.Tensor | np.ndarray]:
    """The tensors and arrays of a list's items or an object's attributes, however deep.

    A list inside of another is judged by its first item, since it may hold one number per token.
    """
    items = leaf if isinstance(leaf, list | tuple) else getattr(leaf, "__dict__", {}).values()
    yield from _tensors_in(list(items))


def _tensors_in(items: Sequence[Any]) -> Iterator[torch.Tensor | np.ndarray]:
    for item in items:
        if isinstance(item, torch.Tensor | np.ndarray):
            yield item
        else:
            children = item[:1] if type(item) in (list, tuple) else [v for _, v in _children(item, "", ()) or []]
            yield from _tensors_in(children)


def _map(node: Any, path: str, function: Callable[[str, Any], Any], named: Collection[str]) -> Any:
    children = _children(node, path, named)
    if children is None:
        return function(path, node)
    values = {key: _map(value, join(path, key), function, named) for key, value in children}
    return _rebuild(node, values)


def _rebuild(node: Any, values: dict[Any, Any]) -> Any:
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, values)
    if dataclasses.is_dataclass(node):
        new = copy.copy(node)  # a constructor would refuse fields with init=False and run __post_init__ again
        attributes: dict[str, Any] = getattr(new, "__dict__", {})
        for name in list(attributes):
            if isinstance(getattr(type(new), name, None), cached_property):
                del attributes[name]  # computed from the whole batch
        for key, value in values.items():
            object.__setattr__(new, key, value)
        return new
    if _is_named_tuple(node):
        return node._make(values.values())
    return type(node)(values.values())


def _rebuild_mapping(node: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    # A shallow copy keeps what a constructor would lose: default factories, attributes. Those of `dict` and `UserDict`
    # (transformers' BatchEncoding is one) copy their items; another class may keep them in an attribute, which the
    # copy must not share with the caller's object.
    if not isinstance(node, MutableMapping) or not (isinstance(node, dict) or hasattr(node, "__dict__")):
        return type(node)(values)  # type: ignore[call-arg]
    new = copy.copy(node)
    if not isinstance(node, dict | UserDict):
        new.__dict__.update({name: copy.copy(value) for name, value in vars(new).items() if isinstance(value, dict)})
    if getattr(new, "_encodings", None) is not None:
        new._encodings = None  # type: ignore[attr-defined]  # what BatchEncoding knows of the rows in their old order
    for key, value in values.items():
        new[key] = value
    return new
