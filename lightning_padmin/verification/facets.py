"""What a batch shows: a gradient check is a proof for what its rows have shown, and for nothing else.

A facet is a short text, such as `"'labels' is 3"` or `"rows without loss"`. The list of kinds is closed, so that a
training has few of them: values of entries are told apart only where there are few. What a *loss* shows is another
question, see `fingerprint`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_padmin.batch import RowTable, Schema

Rows = NDArray[np.bool_]
MOST_VALUES = 16
"""Of an entry with more different values, in one batch or in all so far, only the extremes are told apart."""
_MOST_ITEMS = 16  # of one row, in an entry that is looked at by value
_LOWEST, _HIGHEST = " varies, lowest", " varies, highest"
_MOST_LABEL = 1024  # labels of tokens above are of a vocabulary


class Values:
    """Which values the entries of a training have had: numbers of rows are few in one batch, and many in an epoch.

    Attributes:
        dropped: facets that are none any more, since it has turned out that their entry has many values.
    """

    def __init__(self) -> None:
        self._known: dict[str, set[str] | None] = {}  # None: many
        self.dropped: set[str] = set()

    def told(self, facets: Collection[str], prefix: str) -> bool:
        """Whether values of an entry are still told apart, with those of another batch.

        Args:
            facets: one for each value that the batch has, by name.
            prefix: what is the same for all values of the entry.
        """
        known = self._known.setdefault(prefix, set())
        if known is None:
            return False
        known.update(facets)
        if len(known) <= MOST_VALUES:
            return True
        self.many(prefix)
        return False

    def many(self, prefix: str) -> None:
        """The entry has many values."""
        self.dropped |= self._known.get(prefix) or set()
        self._known[prefix] = None


def row_facets(
    leaves: Mapping[str, Any], schema: Schema, table: RowTable, values: Values | None = None
) -> dict[str, Rows]:
    """Which rows show what.

    One copy from the device to the host, of entries with at most 16 numbers per row, and one of labels per token.

    Args:
        leaves: the entries of the batch, by path.
        schema: its schema.
        table: its row table.
        values: of the batches before, which this one's are added to.

    Returns:
        Facet -> (B,) bool, the rows that show it; a facet that no row shows is left out.
    """
    padded = (table.start + table.length < np.array(table.widths)).any(axis=1)
    found = {
        "left padding": (table.start > 0).any(axis=1),
        "padding behind rows": padded,
    }
    if table.counts_loss:
        found["rows without loss"] = table.loss_tokens == 0
    if len(table.first_weight):
        found["a label on first tokens"] = table.first_weight > 0
    for path, counts in table.units.items():
        found |= {f"{path!r} in a row": counts > 0, f"several of {path!r} in a row": counts > 1}
    values = Values() if values is None else values
    for path, numbers in _values(leaves, schema).items():
        found |= _of_values(path, numbers, values)
    found |= _of_tokens(leaves, schema, values)
    return {name: np.asarray(rows) for name, rows in found.items() if rows.any()}


def reasons(facets: Collection[str]) -> set[str]:
    """Those that are reasons to check a batch. Each has a lowest row, which may be too long; they help to choose."""
    return {facet for facet in facets if not facet.endswith((_LOWEST, _HIGHEST))}


def batch_facets(leaves: Mapping[str, Any], schema: Schema, values: Values | None = None) -> set[str]:
    """What a batch shows beside its rows.

    Args:
        leaves: its entries, by path.
        schema: its schema.
        values: of the batches before, which this one's are added to.
    """
    found, values = set(), Values() if values is None else values
    for path, field in schema.fields.items():
        leaf = leaves.get(path)
        if isinstance(leaf, Tensor):
            found.add(f"{path!r} is {str(leaf.dtype).removeprefix('torch.')}")
        elif field.kind == "static" and (leaf is None or isinstance(leaf, bool | str)):
            found.add(_of_static(path, leaf, values))
        elif field.kind == "static" and isinstance(leaf, int | float):
            found.add(f"{path!r} is {'0' if leaf == 0 else 'not 0'}")
        else:
            found.add(f"{path!r} is there")
    return found


def plain_facets(batch: Mapping[str, Any], values: Values | None = None) -> set[str]:
    """What a flat batch shows whose entries nobody has given roles, told by masks of two dimensions and by vectors.

    Args:
        batch: entries by name, as collators of trainers make them.
        values: of the batches before, which this one's are added to.
    """
    found, values = set(), Values() if values is None else values
    for name, leaf in batch.items():
        if not isinstance(leaf, Tensor):
            is_told = isinstance(leaf, bool | str)
            found.add(_of_static(name, leaf, values) if is_told else f"{name!r} is there")
            continue
        found.add(f"{name!r} is {str(leaf.dtype).removeprefix('torch.')}")
        if not leaf.numel() or leaf.is_complex() or leaf.is_quantized:
            continue
        if leaf.ndim == 2 and name.endswith("mask"):
            zero = leaf.detach() == 0
            ends = torch.stack([zero[:, 0].any(), zero[:, -1].any(), zero.all(dim=1).any()]).tolist()
            told = ("begins with zeros", "ends with zeros", "has rows of zeros")
            found |= {f"{name!r} {what}" for what, holds in zip(told, ends, strict=True) if holds}
        elif leaf.ndim == 1:
            numbers = _as_integers(leaf.detach()[:, None].double().cpu().numpy(), leaf)
            found |= {facet for facet, rows in _of_values(name, numbers, values).items() if rows.any()}
        elif leaf.ndim == 2 and name.endswith("labels") and not leaf.is_floating_point():
            found |= {"rows without labels"} if bool((leaf < 0).all(dim=1).any()) else set()
            found |= set(_of_labels(name, leaf, values))
    return found


def model_facets(modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> set[str]:
    """What the model is like: which parameters are trained, and which modules are in training mode."""
    trained = hash(tuple(each.requires_grad for each in parameters))
    modes = hash(tuple(each.training for each in modules))
    return {f"other parameters are trained ({trained:x})", f"other modules are in training mode ({modes:x})"}


def parts_of(model: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """All modules and all parameters, each once; five times as fast as the iterators of modules, which name them."""
    modules: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is None or id(module) in modules:
            continue
        modules[id(module)] = module
        left.extend(module._modules.values())
        parameters |= {id(each): each for each in module._parameters.values() if each is not None}
    return list(modules.values()), list(parameters.values())


def _of_static(path: str, leaf: bool | str | None, values: Values) -> str:
    facet, prefix = f"{path!r} is {leaf!r}"[:120], f"{path!r} is "
    return facet if values.told([facet], prefix) else f"{path!r} varies"


def _values(leaves: Mapping[str, Any], schema: Schema) -> dict[str, NDArray[Any]]:
    """(B, n) values of row entries with few numbers, or few texts, per row."""
    found: dict[str, NDArray[Any]] = {}
    tensors: dict[str, Tensor] = {}
    for path, field in schema.fields.items():
        leaf = leaves.get(path)
        if field.kind != "row":
            continue
        if isinstance(leaf, Tensor) and not leaf.is_complex() and not leaf.is_quantized:
            rows = leaf.detach().movedim(field.row_dim, 0).reshape(schema.rows, -1) if leaf.numel() else None
            if rows is not None and rows.shape[1] <= _MOST_ITEMS:
                tensors[path] = rows
        elif (
            isinstance(leaf, list | tuple)
            and len(leaf) == schema.rows
            and all(isinstance(each, bool | int | float | str) for each in leaf)
        ):
            found[path] = _numbered(leaf)
    by_device: dict[torch.device, list[str]] = {}
    for path, rows in tensors.items():
        by_device.setdefault(rows.device, []).append(path)
    for paths in by_device.values():
        # float64 holds each of these but large integers, for which it is enough to be many.
        host = torch.cat([tensors[path].double() for path in paths], dim=1).cpu().numpy()
        ends = np.cumsum([tensors[path].shape[1] for path in paths])[:-1]
        found |= dict(zip(paths, np.split(host, ends, axis=1), strict=True))
    return {path: _as_integers(each, leaves[path]) for path, each in found.items()}


def _numbered(texts: Sequence[Hashable]) -> NDArray[Any]:
    if all(isinstance(each, int | float) for each in texts):
        return np.array(texts, dtype=np.float64)[:, None]
    return np.array([str(each)[:40] for each in texts])[:, None]


def _as_integers(values: NDArray[Any], leaf: Any) -> NDArray[Any]:
    is_integer = isinstance(leaf, Tensor) and not leaf.is_floating_point()
    return values.astype(np.int64) if is_integer else values


def _of_values(path: str, values: NDArray[Any], before: Values) -> dict[str, Rows]:
    """Each value of integers and texts where there are few, else the extremes; of floats whether they are 0, vary."""
    distinct = np.unique(values)
    if values.dtype.kind in "iU":
        told = _each(f"{path!r} is ", values, distinct, before)
        if told is not None:
            return told
        if values.dtype.kind == "U":
            return {f"{path!r} varies": np.ones(len(values), dtype=bool)}
    found = {f"{path!r} is 0": (values == 0).any(axis=1), f"{path!r} is not 0": (values != 0).any(axis=1)}
    found[f"{path!r} is below 0"] = (values < 0).any(axis=1)
    found[f"{path!r} is no number"] = ~np.isfinite(values).all(axis=1)
    if len(distinct) > 1:
        low, high = np.nanmin(values), np.nanmax(values)
        found |= {
            f"{path!r}{_LOWEST}": (values == low).any(axis=1),
            f"{path!r}{_HIGHEST}": (values == high).any(axis=1),
            f"{path!r} varies, low": (values - low < high - values).any(axis=1),
            f"{path!r} varies, high": (values - low > high - values).any(axis=1),
        }
    return found


def _each(prefix: str, values: NDArray[Any], distinct: NDArray[Any], before: Values) -> dict[str, Rows] | None:
    """Rows that have each value; None where there are many values."""
    if len(distinct) > MOST_VALUES:
        before.many(prefix)
        return None
    facets = {f"{prefix}{value}": value for value in distinct.tolist()}
    if not before.told(facets, prefix):
        return None
    return {facet: (values == value).any(axis=1) for facet, value in facets.items()}


def _of_tokens(leaves: Mapping[str, Any], schema: Schema, before: Values) -> dict[str, Rows]:
    """Values of labels per token where there are few, as in tagging; of a loss mask, whether weights vary."""
    found: dict[str, Rows] = {}
    for path in (schema.labels, schema.loss_mask):
        leaf = None if path is None else leaves.get(path)
        field = None if path is None else schema.fields.get(path)
        if not isinstance(leaf, Tensor) or field is None or field.kind != "position" or field.row_dim != 0:
            continue
        rows = leaf.detach().reshape(schema.rows, -1)
        if not rows.numel():
            continue
        if rows.is_floating_point():
            values = rows.double()
            fraction = ((values != 0) & (values != 1)).any(dim=1).cpu().numpy()
            found |= {f"{path!r} weighs tokens": fraction}
        elif rows.dtype != torch.bool:
            found |= _of_labels(path, rows, before)
    return found


def _of_labels(path: str | None, rows: Tensor, before: Values) -> dict[str, Rows]:
    if int(rows.amax()) > _MOST_LABEL:
        return {}
    values = rows.cpu().numpy()
    return _each(f"{path!r} has ", values, np.unique(values[values >= 0]), before) or {}


__all__ = ["MOST_VALUES", "Values", "batch_facets", "model_facets", "parts_of", "plain_facets", "reasons", "row_facets"]
