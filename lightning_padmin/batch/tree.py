"""Walking and rebuilding batches of any container type without touching the caller's objects.

A batch is a tree. Its inner nodes are mappings, dataclasses, named tuples and (at the top) lists and tuples; its
leaves are tensors, arrays, lists of per-row objects, strings, numbers and None. A leaf is named by its path, keys
joined by dots: `"inputs.attention_mask"`, or `"0"` for the first entry of a tuple batch.

A list or tuple below the top is a leaf (one entry per row, or shared by all rows) unless somebody names a path
inside of it, in which case it is an inner node like the others.

Everything here takes time in proportion to the entries, and a batch may have `DEEPEST` levels and `MOST` entries.
"""

from __future__ import annotations

import copy
import dataclasses
from bisect import bisect_left
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lightning_padmin.errors import SchemaError
from lightning_padmin.printing import listed, printable

DEEPEST = 100  # levels; frameworks that move batches to a device give up at some three hundred
MOST = 1_000_000  # entries: a few containers within each other several times may stand for any number


def join(path: str, key: object) -> str:
    """Path of a child: `join("inputs", "labels") == "inputs.labels"`."""
    return f"{path}.{key}" if path else str(key)


def last_part(path: str) -> str:
    """The entry's own name: `last_part("inputs.labels") == "labels"`."""
    return path.rsplit(".", 1)[-1]


class Paths:
    """Paths that are looked up many times: by themselves, by their last part, and by what they lie in."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.all = dict.fromkeys(paths)

    @cached_property
    def _by_end(self) -> dict[str, list[str]]:
        ends: dict[str, list[str]] = {}
        for path in self.all:
            ends.setdefault(last_part(path), []).append(path)
        return ends

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.all)

    def ending_in(self, key: str) -> list[str]:
        """Those whose last part, or parts, are `key`."""
        return [path for path in self._by_end.get(last_part(key), []) if path == key or path.endswith("." + key)]

    def below(self, key: str) -> list[str]:
        """Those inside of the node `key`, sorted."""
        start = end = bisect_left(self._sorted, key + ".")
        while end < len(self._sorted) and self._sorted[end].startswith(key + "."):
            end += 1
        return self._sorted[start:end]

    def has_below(self, key: str) -> bool:
        """Whether any lies inside of the node `key`."""
        first = bisect_left(self._sorted, key + ".")
        return first < len(self._sorted) and self._sorted[first].startswith(key + ".")


def parent_of(path: str) -> str:
    """The path of the node that an entry is in: `parent_of("inputs.labels") == "inputs"`; "" at the top."""
    return path.rpartition(".")[0]


def find_path(key: str, paths: Paths | Sequence[str], option: str) -> str | None:
    """The path that `key` names: itself, else the one path whose last part or parts it is; None if there is none.

    Raises:
        SchemaError: several paths end in `key`.
    """
    paths = paths if isinstance(paths, Paths) else Paths(paths)
    if key in paths.all:
        return key
    ends = paths.ending_in(key)
    if len(ends) > 1:
        raise SchemaError(f"{option}={key!r} names several entries: {listed(ends)}. Give the whole path of one")
    return ends[0] if ends else None


def _is_named_tuple(node: object) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _children(node: Any, path: str, named: Paths) -> list[tuple[object, Any]] | None:
    """Key and value of each child of an inner node, None for a leaf."""
    if isinstance(node, Mapping):
        return list(node.items())
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        return [(name, getattr(node, name)) for name in names if hasattr(node, name)]  # init=False may be unset
    if _is_named_tuple(node):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, list | tuple) and (not path or (path not in named.all and named.has_below(path))):
        return list(enumerate(node))
    return None


def child_of(node: Any, name: str) -> Any:
    """The child of an inner node under one part of a path."""
    if isinstance(node, Mapping):
        return next(value for key, value in node.items() if str(key) == name)
    if isinstance(node, list | tuple) and not _is_named_tuple(node):
        return node[int(name)]
    return getattr(node, name)


@dataclasses.dataclass(frozen=True, eq=False)
class TreeSpec:
    """A batch without its leaves: what it is made anew from.

    Attributes:
        container: the inner node as it came; it is only read.
        children: of each key, the path of a leaf, or the node inside.
    """

    container: Any
    children: dict[object, str | TreeSpec]

    def unflatten(self, leaves: Mapping[str, Any]) -> Any:
        """A new batch of the same types, with these leaves by path; the original stays as it is."""
        values = {
            key: leaves[child] if isinstance(child, str) else child.unflatten(leaves)
            for key, child in self.children.items()
        }
        return _rebuild(self.container, values)


def flatten(batch: Any, named: Collection[str] = ()) -> tuple[dict[str, Any], TreeSpec]:
    """The leaves of a batch by path, in the batch's own order, and what is left of it without them.

    Args:
        batch: the batch; a mapping, dataclass, named tuple, list or tuple.
        named: paths that a user declared; a list or tuple above one of them is walked into.

    Raises:
        SchemaError: the batch itself is not a container, two leaves share a path, a container lies within itself, or
            there are more than `DEEPEST` levels or `MOST` entries.
    """
    known = Paths(named)
    if _children(batch, "", known) is None:
        raise SchemaError(
            f"batch of type {type(batch).__name__}: expected a mapping, dataclass, named tuple, list or tuple of "
            "tensors; have the collate function return one of these"
        )
    leaves: dict[str, Any] = {}
    top = TreeSpec(None, {})
    # Path, node, the nodes that it lies in, and where it goes: a container's children, under which key.
    stack: list[tuple[str, Any, tuple[Any, ...], TreeSpec, object]] = [("", batch, (), top, "")]
    while stack:
        path, node, above, parent, name = stack.pop()
        children = _children(node, path, known)
        if children is None:
            if path in leaves:
                raise SchemaError(f"two entries of the batch have the path {path!r}: rename one of them")
            leaves[path] = node
            parent.children[name] = path
            continue
        _check_nesting(path, node, above)
        if len(leaves) + len(stack) + len(children) > MOST:
            raise _too_many(path)
        above = (*above, node)
        spec = parent.children[name] = TreeSpec(node, {})
        stack.extend((join(path, key), value, above, spec, key) for key, value in reversed(children))
    whole = top.children[""]
    assert isinstance(whole, TreeSpec)
    return leaves, whole


def iter_leaves(batch: Any, named: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Path and value of every leaf, see `flatten`."""
    yield from flatten(batch, named)[0].items()


@dataclasses.dataclass(frozen=True, eq=False)
class FlatBatch:
    """A batch that has been walked through once: every later step takes this in its place.

    Attributes:
        whole: the batch, of the caller's type; it is only read.
        leaves: its leaves by path.
        spec: what is left of it without them.
    """

    whole: Any
    leaves: Mapping[str, Any]
    spec: TreeSpec

    @staticmethod
    def of(batch: Any, named: Collection[str] = ()) -> FlatBatch:
        """`flatten`, unless that has been done already."""
        return batch if isinstance(batch, FlatBatch) else FlatBatch(batch, *flatten(batch, named))

    def with_leaves(self, leaves: Mapping[str, Any]) -> FlatBatch:
        """A batch of the same types with other leaves."""
        return FlatBatch(self.spec.unflatten(leaves), leaves, self.spec)

    def map(self, function: Callable[[str, Any], Any]) -> Any:
        """A new batch of the same types, each leaf replaced by `function(path, leaf)`; the original stays as it is."""
        return self.spec.unflatten({path: function(path, leaf) for path, leaf in self.leaves.items()})


def _check_nesting(path: str, node: Any, above: tuple[Any, ...]) -> None:
    if any(node is each for each in above):  # not by `id`, which a mapping that makes its entries anew may use twice
        raise SchemaError(f"{_short(path)} is a {type(node).__name__} that lies within itself: have it hold data only")
    if len(above) >= DEEPEST:
        raise SchemaError(f"{_short(path)} lies more than {DEEPEST} levels deep in the batch: make the batch flatter")


def _too_many(path: str) -> SchemaError:
    return SchemaError(f"the batch has more than {MOST:,} entries, at {_short(path)}: put them into tensors or lists")


def _short(path: str) -> str:
    return f"'{printable(path, 80)}'"


def map_leaves(batch: Any, function: Callable[[str, Any], Any], named: Collection[str] = ()) -> Any:
    """`FlatBatch.map` of a batch.

    Raises:
        SchemaError: as `flatten`.
    """
    return FlatBatch.of(batch, named).map(function)


def check_rebuildable(batch: Any, named: Collection[str] = ()) -> None:
    """Raises SchemaError for a batch with a container that cannot be made anew, before anything depends on it."""
    flat = FlatBatch.of(batch, named)
    try:
        flat.spec.unflatten(flat.leaves)
    except (TypeError, AttributeError, ValueError) as error:
        raise SchemaError(
            f"batch of type {type(flat.whole).__name__}: one of its containers cannot be rebuilt with other entries "
            f"({error}): have the collate function return dictionaries, dataclasses or tuples"
        ) from error


def tensors_in(leaf: Any, path: str = "") -> Iterator[torch.Tensor | np.ndarray]:
    """The tensors and arrays of a list's items or an object's attributes, however deep.

    A list inside of another is judged by its first item, since it may hold one number per token.

    Raises:
        SchemaError: of the leaf of that path, as `iter_leaves`.
    """
    items = leaf if isinstance(leaf, list | tuple) else getattr(leaf, "__dict__", {}).values()
    stack: list[tuple[Any, tuple[Any, ...]]] = [(item, (leaf,)) for item in reversed(list(items))]
    met = 0
    while stack:
        item, above = stack.pop()
        if isinstance(item, torch.Tensor | np.ndarray):
            yield item
            continue
        children = item[:1] if type(item) in (list, tuple) else [v for _, v in _children(item, "", _NONE) or []]
        if children:
            _check_nesting(path, item, above)
            met += len(children)
            if met > MOST:
                raise _too_many(path)
            above = (*above, item)
            stack.extend((child, above) for child in reversed(children))


_NONE = Paths(())


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
