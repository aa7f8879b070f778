"""Outputs of a model that ran in chunks, put together in the layout of the batch."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_padmin.batch import AXES, Axis
from lightning_padmin.errors import BatchError
from lightning_padmin.forward.kept_logits import KeptLogits
from lightning_padmin.microbatching import MicroBatches
from lightning_padmin.runtime import is_padding_filled

OutputKind = Literal["position", "row", "flat", "drop"]
# Outputs of transformers' models by name and number of dimensions; "flat" is (rows x positions, ...).
_KNOWN: dict[tuple[str, int], OutputKind] = {
    ("logits", 3): "position",
    ("logits", 2): "row",
    ("last_hidden_state", 3): "position",
    ("encoder_last_hidden_state", 3): "position",
    ("hidden_states", 3): "position",
    ("pooler_output", 2): "row",
    ("start_logits", 2): "position",
    ("end_logits", 2): "position",
    ("router_logits", 2): "flat",
}
Shape = tuple[int, ...]
Proof = tuple[OutputKind, Axis]
Proofs = MutableMapping[tuple[str, int], Proof]  # place in the outputs and number of dimensions -> what it is
_PROOFS: WeakKeyDictionary[nn.Module, Proofs] = WeakKeyDictionary()
_CACHES = ("cache", "past_key_values", "cache_params", "state", "rnn_state", "mems")


def proofs_of(model: Any) -> Proofs:
    """What has been proven of a model's outputs so far; calls whose chunks prove nothing may rely on it."""
    return _PROOFS.setdefault(model, {}) if isinstance(model, nn.Module) else {}


class Assembler:
    """Puts the outputs of all chunks together in the layout of the batch.

    An output is known by its name, by declaration, or by shapes that can have one reading only: chunks of different
    rows and widths. Whatever is claimed must hold for all chunks.
    """

    def __init__(
        self,
        batches: MicroBatches,
        declared: Mapping[str, OutputKind],
        inputs: Mapping[str, Any],
        model: Any,
        proofs: Proofs | None = None,
        kept: KeptLogits | None = None,
    ) -> None:
        self._batches, self._declared, self._inputs, self._model = batches, declared, inputs, model
        self._proofs, self._kept = {} if proofs is None else proofs, kept
        self._mask_key = batches.schema.mask
        real = batches.slot_maps[: len(batches.plan)]
        self._rows = [slots.shape[0] for slots in real]
        axes = AXES[: len(batches.schema.widths)]
        self._widths: dict[Axis, list[int]] = {axis: [s.widths[k] for s in real] for k, axis in enumerate(axes)}
        packed = batches.plan.is_packed
        self._columns = [] if kept is None else [next(iter(kept.argument(s, packed).values()), 0) for s in real]

    def join(self, results: Sequence[Any]) -> Any:
        """The outputs of the whole batch from those of the chunks (dummies last)."""
        first = results[0]
        if self._kept is not None and not (isinstance(first, Mapping) and isinstance(first.get("logits"), Tensor)):
            name = self._kept.name
            raise BatchError(f"{name}: the outputs are {type(first).__name__} without 'logits': leave {name} out")
        return self._join("", "", results)

    def _join(self, path: str, place: str, parts: Sequence[Any]) -> Any:
        first = parts[0]
        if isinstance(first, Tensor):
            return self._tensor(path, place, parts)
        if isinstance(first, Mapping):
            if self._is_dropped(path, [set(part) if isinstance(part, Mapping) else None for part in parts]):
                return None
            keys = [key for key in first if key not in _CACHES and key != "aux_loss"]
            values = {key: self._join(str(key), f"{place}.{key}", [part[key] for part in parts]) for key in keys}
            if "aux_loss" in first:
                values["aux_loss"] = self._balance_loss(values.get("router_logits"))
            return like(first, values)
        if isinstance(first, tuple | list):
            if self._is_dropped(path, [len(part) if isinstance(part, tuple | list) else None for part in parts]):
                return None
            joined = [self._join(path, f"{place}[{k}]", [part[k] for part in parts]) for k in range(len(first))]
            return type(first)(joined) if not hasattr(first, "_fields") else type(first)(*joined)
        if first is None or all(part is first or _equal(part, first) for part in parts):
            return first
        if self._declared.get(path) == "drop":
            return None
        raise BatchError(
            f"output {path!r} is {type(first).__name__}, which cannot be put together: outputs={{{path!r}: 'drop'}}"
        )

    def _is_dropped(self, path: str, found: Sequence[Any]) -> bool:
        """Whether chunks with other keys or numbers of entries (one for each row, say) are left out, as declared.

        Raises:
            BatchError: there are such, and nothing is declared.
        """
        if all(each == found[0] for each in found):
            return False
        if self._declared.get(path) != "drop":
            raise BatchError(
                f"output {path!r} has other entries in each chunk ({found[:3]}), which cannot be put together: have "
                f"the model return tensors, or outputs={{{path!r}: 'drop'}}"
            )
        return True

    def _tensor(self, path: str, place: str, parts: Sequence[Any]) -> Tensor | None:
        if self._kept is not None and path == "logits":
            return self._with_dummies(self._put(partial(self._kept.restore, self._batches), parts), parts)
        kind, axis = self._kind(path, place, parts)
        if kind == "drop":
            return None
        if kind == "flat":
            rows = [slots.shape[0] for slots in self._batches.slot_maps]
            shaped = [part.view(n, -1, *part.shape[1:]) for part, n in zip(parts, rows, strict=True)]
            return self._with_dummies(self._put(self._batches.restore, shaped), parts).flatten(0, 1)
        if kind == "row":
            if self._batches.plan.is_packed:
                raise BatchError(f"output {path!r} has one value per row, and packs have no rows: use layout='pad'")
            return self._with_dummies(self._batches.restore_rows(parts), parts)
        return self._with_dummies(self._put(partial(self._batches.restore, axis=axis), parts), parts)

    def _put(self, restore: Callable[[Sequence[Tensor]], Tensor], parts: Sequence[Tensor]) -> Tensor:
        """The whole batch's, with zeros where rows have padding; with values of other slots while a check asks."""
        joined = restore(parts)
        if not (is_padding_filled() and joined.is_floating_point()):
            return joined
        with torch.no_grad():
            real = restore([part.new_ones(part.shape[:2]) for part in parts]) != 0
            values = joined[real]
            places = (~real).nonzero(as_tuple=True)
            taken = torch.arange(len(places[0]), device=joined.device) % max(len(values), 1)
        return joined.index_put(places, values[taken]) if len(values) else joined

    def _axis(self, path: str) -> Axis:
        """Outputs of an encoder-decoder run along the decoder, but for those that are named the encoder's."""
        decoder = len(self._batches.schema.widths) == 2 and not path.startswith("encoder_")
        return "decoder" if decoder else "input"

    def _with_dummies(self, joined: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Dummies stay in the graph: every rank must run as many backward passes as forward ones."""
        dummies = [dummy for dummy in parts[len(self._batches.plan) :] if dummy.requires_grad]
        if not dummies or not torch.is_grad_enabled():
            return joined
        attached: Tensor = _Attach.apply(joined, *dummies)  # type: ignore[no-untyped-call]
        return attached

    def _kind(self, path: str, place: str, parts: Sequence[Any]) -> Proof:
        """What an output is, and the axis that its positions run along.

        Raises:
            BatchError: it is not known, or not what its name or a declaration says.
        """
        real = parts[: len(self._rows)]
        shapes = [tuple(part.shape) if isinstance(part, Tensor) else () for part in real]
        declared = self._declared.get(path)
        named = declared or _KNOWN.get((path, parts[0].ndim))
        if named == "row" and declared is None and self._may_be_positions(path, shapes):
            named = None
        if named is None:
            proof = self._proven(shapes, self._proofs.get((place, parts[0].ndim)), place)
            if proof is not None:
                return proof
            raise BatchError(f"output {path!r} has {self._found(shapes)}: say what it is, {_fix(path)}")
        own = self._axis(path)
        axes = [own] if declared is None else [own, *(axis for axis in self._widths if axis != own)]
        for axis in axes:
            if self._holds(named, axis, shapes, least=0 if declared is None else 1):
                return named, axis
        by = "its name" if declared is None else "declaration"
        raise BatchError(f"output {path!r} is {named!r} by {by}, but has {self._found(shapes)}: {_fix(path)}")

    def _found(self, shapes: Sequence[Shape]) -> str:
        chunks = list(zip(self._rows, *self._widths.values(), strict=True))
        return f"shapes {list(shapes[:4])} in chunks of {chunks[:4]} (rows, width)"

    def _may_be_positions(self, path: str, shapes: Sequence[Shape]) -> bool:
        """Whether (rows, x) named `logits` may as well be one value per token; models of transformers have classes."""
        known = isinstance(getattr(getattr(self._model, "config", None), "model_type", None), str)
        return path == "logits" and not known and any(self._follows(shapes, axis) for axis in self._widths)

    def _holds(self, kind: OutputKind, axis: Axis, shapes: Sequence[Shape], least: int) -> bool:
        """Whether all chunks have the shape that a kind says; positions may lack the last `least`."""
        pairs = list(zip(shapes, self._rows, self._widths[axis], strict=True))
        if kind == "drop":
            return True
        if kind == "row":
            return all(s[:1] == (n,) for s, n, _ in pairs) and _same(s[1:] for s in shapes)
        if kind == "flat":
            return all(s[:1] == (n * w,) for s, n, w in pairs) and _same(s[1:] for s in shapes)
        if not all(len(s) > 1 and s[0] == n and 0 <= w - s[1] <= least for s, n, w in pairs):
            return False
        return _same(w - s[1] for s, _, w in pairs) and _same(s[2:] for s in shapes)

    def _follows(self, shapes: Sequence[Shape], axis: Axis) -> bool:
        return all(len(s) > 1 and s[1] == w for s, w in zip(shapes, self._widths[axis], strict=True))

    def _proven(self, shapes: Sequence[Shape], before: Proof | None, place: str) -> Proof | None:
        """What shapes prove, in this call or in one before; None where sizes may agree by chance."""
        found = self._read(shapes)
        if found is None:
            fits = before is not None and self._holds(*before, shapes, least=0)
            return before if fits else None
        proof, is_proven = found
        if before is not None and proof != before:
            return None
        if is_proven:
            self._proofs[place, len(shapes[0])] = proof
        return proof

    def _read(self, shapes: Sequence[Shape]) -> tuple[Proof, bool] | None:
        """The one reading of shapes, and whether it is proven for other calls too."""
        rows = list(zip(shapes, self._rows, strict=True))
        if not _same(len(shape) for shape in shapes) or not all(shape[:1] == (n,) for shape, n in rows):
            return None
        along: list[Axis] = [axis for axis in self._widths if self._follows(shapes, axis)]
        if along:
            widths = self._widths[along[0]]
            varied = len(set(widths)) > 1 and len(along) == 1 and widths != self._rows
            return (("position", along[0]), True) if varied and _same(s[2:] for s in shapes) else None
        if not _same(shape[1:] for shape in shapes) or self._may_be_columns(shapes):
            return None
        if len(shapes) == 1:  # rows of a single chunk stay where they are, whatever the first dimension counts
            return ("row", "input"), False
        varied = len(set(self._rows)) > 1
        alone = not varied and self._rows[0] == 1 and len(shapes[0]) == 1  # a total has one value in each chunk too
        if not varied and (alone or self._rows[0] in shapes[0][1:]):
            return None
        return ("row", "input"), varied

    def _may_be_columns(self, shapes: Sequence[Shape]) -> bool:
        """Whether a dimension that is equal in all chunks may count columns: all chunks have that width, or nearly."""
        sizes = set(shapes[0][1:])
        near = {width + off for widths in self._widths.values() for width in set(widths) for off in (-1, 0, 1)}
        alike = all(len(set(widths)) == 1 for widths in self._widths.values())
        kept = len(set(self._columns)) == 1 and self._columns[0] in sizes
        return (alike and not sizes.isdisjoint(near)) or kept

    def _balance_loss(self, router_logits: Any) -> Tensor:
        """The balance loss of the experts over the whole batch, by the model's own function.

        It is not linear in the rows, so a mean over chunks would be another number.
        """
        for child in self._model.modules() if isinstance(self._model, nn.Module) else ():
            function = getattr(sys.modules[type(child).__module__], "load_balancing_loss_func", None)
            experts, top_k = getattr(child, "num_experts", None), getattr(child, "num_experts_per_tok", None)
            if function is not None and router_logits is not None and experts and top_k:
                loss: Tensor = function(router_logits, experts, top_k, self._inputs.get(self._mask_key))
                return loss
        raise BatchError(
            "the model returned 'aux_loss' of each chunk, and the loss of the whole batch cannot be found from them: "
            "set output_router_logits=False, or take that loss of the router logits yourself"
        )


class _Attach(torch.autograd.Function):
    """The first tensor itself; a backward pass through it brings zeros to the others, whatever their values are.

    No copy, and one that may be written into: it is marked as if it had been.
    """

    @staticmethod
    def forward(joined: Tensor, *dummies: Tensor) -> Tensor:
        return joined

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.dummies = [(dummy.shape, dummy.dtype, dummy.device) for dummy in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.dummies)
        return gradient, *zeros


def _fix(path: str) -> str:
    return f"outputs={{{path!r}: 'position'}}, 'row', 'flat' or 'drop'"


def _same(values: Iterable[Any]) -> bool:
    return len(set(values)) == 1


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays
        return False


def like(mapping: Any, values: dict[Any, Any]) -> Any:
    """A mapping of the same type; ModelOutput is an ordered dictionary and a dataclass that takes keywords."""
    keywords = isinstance(mapping, OrderedDict) and hasattr(mapping, "__dataclass_fields__")
    return type(mapping)(**values) if keywords else type(mapping)(values)


def map_tensors(node: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor replaced; caches left out."""
    if isinstance(node, Tensor):
        return function(node)
    if isinstance(node, Mapping):
        values = {key: map_tensors(value, function) for key, value in node.items() if key not in _CACHES}
        return like(node, values)
    if isinstance(node, tuple | list):
        values_ = [map_tensors(value, function) for value in node]
        return type(node)(values_) if not hasattr(node, "_fields") else type(node)(*values_)
    return node


def tensors(node: Any) -> list[Tensor]:
    """All tensors of a structure, in order; caches left out."""
    found: list[Tensor] = []
    map_tensors(node, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found
