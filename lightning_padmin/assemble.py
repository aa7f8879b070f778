"""Outputs of a model that ran in chunks, put together in the layout of the batch."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_padmin.errors import BatchError
from lightning_padmin.fields import Axis
from lightning_padmin.sequence import MicroBatches

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
_CACHES = ("cache", "past_key_values", "cache_params", "state", "rnn_state", "mems")


class Assembler:
    """Puts the outputs of all chunks together in the layout of the batch."""

    def __init__(
        self, batches: MicroBatches, declared: Mapping[str, OutputKind], inputs: Mapping[str, Any], model: Any
    ) -> None:
        self._batches, self._declared, self._inputs, self._model = batches, declared, inputs, model
        self._mask_key = batches.schema.mask
        real = batches.slot_maps[: len(batches.plan)]
        self._rows, self._widths = (list(sizes) for sizes in zip(*(slots.shape for slots in real), strict=True))

    def join(self, path: str, parts: Sequence[Any]) -> Any:
        """One output from those of the chunks (dummies last)."""
        first = parts[0]
        if isinstance(first, Tensor):
            return self._tensor(path, parts)
        if isinstance(first, Mapping):
            keys = [key for key in first if key not in _CACHES and key != "aux_loss"]
            values = {key: self.join(str(key), [part[key] for part in parts]) for key in keys}
            if "aux_loss" in first:
                values["aux_loss"] = self._balance_loss(values.get("router_logits"))
            return like(first, values)
        if isinstance(first, tuple | list):
            joined = [self.join(path, [part[k] for part in parts]) for k in range(len(first))]
            return type(first)(joined) if not hasattr(first, "_fields") else type(first)(*joined)
        if first is None or all(part == first for part in parts):
            return first
        raise BatchError(
            f"output {path!r} is {type(first).__name__}, which cannot be put together: outputs={{{path!r}: 'drop'}}"
        )

    def _tensor(self, path: str, parts: Sequence[Any]) -> Tensor | None:
        kind = self._kind(path, parts)
        if kind == "drop":
            return None
        if kind == "flat":
            rows = [slots.shape[0] for slots in self._batches.slot_maps]
            shaped = [part.view(n, -1, *part.shape[1:]) for part, n in zip(parts, rows, strict=True)]
            return self._with_dummies(self._batches.restore(shaped), parts).flatten(0, 1)
        if kind == "row":
            if self._batches.plan.is_packed:
                raise BatchError(f"output {path!r} has one value per row, and packs have no rows: use layout='pad'")
            return self._with_dummies(self._batches.restore_rows(parts), parts)
        return self._with_dummies(self._batches.restore(parts, axis=self._axis(path)), parts)

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

    def _kind(self, path: str, parts: Sequence[Tensor]) -> OutputKind:
        shapes = [tuple(part.shape) for part in parts[: len(self._rows)]]
        kind = self._declared.get(path) or _KNOWN.get((path, parts[0].ndim)) or self._proven(shapes)
        if kind is None:
            chunks = list(zip(self._rows, self._widths, strict=True))
            raise BatchError(
                f"output {path!r} has shapes {shapes[:4]} in chunks of {chunks[:4]} (rows, width): say what it is, "
                f"outputs={{{path!r}: 'position'}}, 'row', 'flat' or 'drop'"
            )
        return kind

    def _proven(self, shapes: Sequence[tuple[int, ...]]) -> OutputKind | None:
        """What shapes prove; nothing where chunks of one width let two readings agree."""
        if any(not shape for shape in shapes):
            return None
        by_row = all(shape[0] == n for shape, n in zip(shapes, self._rows, strict=True))
        follows = by_row and all(len(s) > 1 and s[1] == w for s, w in zip(shapes, self._widths, strict=True))
        if follows:
            return "position" if len(set(self._widths)) > 1 else None
        if by_row and len({shape[1:] for shape in shapes}) == 1:
            return "row"
        return None

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
