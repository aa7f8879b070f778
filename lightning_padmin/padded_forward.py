"""`PaddedForward`: a model call that is chunked inside, so that any loss sees one batch.

    joint     the chunks' outputs are put back in the caller's layout and keep one graph: exact for every loss
    replay    chunks run without a graph first, the loss is taken on leaves, then each chunk runs again and is sent
              backward on its own (gradient caching): the same gradients, activations of one chunk at a time

Unlike split micro-batches neither needs to know how the loss is reduced, nor that it separates over rows.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_padmin.config import PadMinConfig, as_config
from lightning_padmin.distributed import Exchange
from lightning_padmin.errors import BatchError, ConfigError
from lightning_padmin.fields import Axis
from lightning_padmin.microbatch import MicroBatcher
from lightning_padmin.sequence import MicroBatch, MicroBatches

OutputKind = Literal["position", "row", "flat", "drop"]
NoSync = Callable[[], AbstractContextManager[Any]]
_MODES = ("joint", "replay")
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


class PaddedForward:
    """Calls a model in length-sorted chunks under the token budget; returns outputs in the caller's layout.

    Args:
        model: a module or function that takes a batch by keyword and returns a tensor, tuple, mapping or ModelOutput.
        config: the options; those about budget, rounding, keys and schema count here.
        mode: `"joint"` or `"replay"`.
        no_sync: e.g. `ddp.no_sync`; entered for every chunk's forward pass but the last (and, in replay, its backward
            pass), so that gradients are reduced once. Leave it out under FSDP and ZeRO.
        exchange: the collective, where every rank must run the same number of chunks (FSDP); default: this one alone.
        outputs: what outputs with other names are: `"position"`, `"row"`, `"flat"` (rows x positions in one dimension)
            or `"drop"`.

    Attributes:
        micro_batches: those of the last call, with `.plan` and `.stats`.

    Raises:
        ConfigError: an option is malformed.

    Example:
        >>> outputs = PaddedForward(model, PadMinConfig(token_budget=8192))(**inputs)
        >>> loss = any_loss(outputs.logits, labels)  # padding slots hold zeros
    """

    def __init__(
        self,
        model: Callable[..., Any],
        config: PadMinConfig | None = None,
        mode: Literal["joint", "replay"] = "joint",
        no_sync: NoSync | None = None,
        *,
        exchange: Exchange | None = None,
        outputs: Mapping[str, OutputKind] | None = None,
    ) -> None:
        if mode not in _MODES:
            raise ConfigError(f"mode={mode!r}: expected one of {', '.join(map(repr, _MODES))}")
        self.model, self.mode, self.no_sync = model, mode, no_sync
        self.config = replace(as_config(config), loss_reduction="row-mean", normalize="rank")
        self.micro_batches: MicroBatches | None = None
        self._batcher = MicroBatcher(self.config, exchange=exchange)
        self._outputs = dict(outputs or {})
        self._takes_use_cache = _takes(model, "use_cache")
        self._pending: list[_Chunk] = []

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Outputs of the model for the whole batch, in the batch's own layout; padding slots hold zeros.

        Raises:
            BatchError: inputs by position, labels among the inputs, outputs that cannot be put back, or (replay) a
                call whose predecessor has not been sent backward.
            PadMinError: the batch cannot be planned.
        """
        self._refuse(args, inputs)
        if self._takes_use_cache:
            inputs.setdefault("use_cache", False)  # a cache of chunks belongs to no row of the batch
        batches = self._batcher.prepare(inputs)
        self.micro_batches = batches
        replayed = self.mode == "replay" and torch.is_grad_enabled()
        pending: list[_Chunk] = []
        results = []
        for micro in batches:
            state = _RandomState.now() if replayed else None
            with self._unsynchronised(micro), torch.no_grad() if replayed else nullcontext():
                result = self.model(**micro.batch)
            if state is not None:
                leaves = _Leaves()
                result = _map_tensors(result, leaves.make)
                pending.append(_Chunk(micro, leaves.tensors, state))
            results.append(result)
        self._pending = pending  # only now: had a chunk raised, there would be nothing to send backward
        return _Assembler(batches, self._outputs, inputs, self.model).join("", results)

    def backward_pending(self) -> None:
        """Replay: sends the gradients that the loss left on the outputs backward through the model, chunk by chunk.

        Call it once after `loss.backward()`. Random state is that of the first pass in each chunk, and afterwards what
        it was before.
        """
        pending, self._pending = self._pending, []
        after = _RandomState.now()
        try:
            for chunk in pending:
                self._backward(chunk)
        finally:
            after.restore()

    def _backward(self, chunk: _Chunk) -> None:
        with self._unsynchronised(chunk.micro), torch.enable_grad():
            chunk.state.restore()
            with chunk.state.autocast():
                again = _tensors(self.model(**chunk.micro.batch))
            outputs, gradients = [], []
            for output, leaf in zip(again, chunk.leaves, strict=True):
                if output.requires_grad:
                    outputs.append(output)
                    # A chunk that no loss reached still takes part, or ranks would wait for its gradients.
                    gradients.append(leaf.grad if leaf.grad is not None else torch.zeros_like(output))
            torch.autograd.backward(outputs, gradients)

    def _unsynchronised(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        return nullcontext() if micro.is_last or self.no_sync is None else self.no_sync()

    def _refuse(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> None:
        if args:
            raise BatchError(f"PaddedForward got {len(args)} inputs by position: pass every input by its name")
        if inputs.get(self.config.labels_key) is not None:
            raise BatchError(
                f"{self.config.labels_key!r} is among the inputs, so the model would take its loss chunk by chunk: "
                "leave it out and take the loss of the outputs (model.loss_function for transformers' models)"
            )
        if self._pending:
            raise BatchError("the last call was not sent backward: call backward_pending() after loss.backward()")


@dataclass(frozen=True, eq=False)
class _Chunk:
    """What replay keeps of one chunk: inputs by index, output leaves, and the random state of its first pass."""

    micro: MicroBatch
    leaves: list[Tensor]
    state: _RandomState


class _Leaves:
    """Makes leaves of outputs that came without a graph."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def make(self, output: Tensor) -> Tensor:
        leaf = output.detach()
        if leaf.is_floating_point():
            leaf.requires_grad_()
        self.tensors.append(leaf)
        return leaf


@dataclass(frozen=True, eq=False)
class _RandomState:
    """Random state of the CPU and the current accelerator, and the autocast that was on."""

    cpu: Tensor
    device: Tensor | None
    casts: tuple[tuple[str, torch.dtype], ...]

    @staticmethod
    def now() -> _RandomState:
        accelerator = torch.accelerator.current_accelerator()
        device = getattr(torch, accelerator.type).get_rng_state() if accelerator is not None else None
        kinds = ["cpu"] + ([accelerator.type] if accelerator is not None else [])
        on = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        return _RandomState(torch.get_rng_state(), device, tuple(on))

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and self.device is not None:
            getattr(torch, accelerator.type).set_rng_state(self.device)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype))
            yield


class _Assembler:
    """Puts the outputs of all chunks together in the layout of the batch."""

    def __init__(
        self, batches: MicroBatches, declared: Mapping[str, OutputKind], inputs: Mapping[str, Any], model: Any
    ) -> None:
        self._batches, self._declared, self._inputs, self._model = batches, declared, inputs, model
        self._mask_key = batches.schema.mask
        real = batches.slot_maps[: len(batches.plan)]
        self._rows = [len(slots) for slots in real]
        self._widths = [slots.widths[0] for slots in real]

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
            return _like(first, values)
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
            rows = [len(slots) for slots in self._batches.slot_maps]
            shaped = [part.view(n, -1, *part.shape[1:]) for part, n in zip(parts, rows, strict=True)]
            return self._with_dummies(self._batches.restore(shaped), parts).flatten(0, 1)
        if kind == "row":
            return self._with_dummies(self._batches.restore_rows(parts), parts)
        return self._with_dummies(self._batches.restore(parts, axis=self._axis(path)), parts)

    def _axis(self, path: str) -> Axis:
        """Outputs of an encoder-decoder run along the decoder, but for those that are named the encoder's."""
        decoder = len(self._batches.schema.widths) == 2 and not path.startswith("encoder_")
        return "decoder" if decoder else "input"

    def _with_dummies(self, joined: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Dummies stay in the graph: every rank must run as many backward passes as forward ones."""
        for dummy in parts[len(self._batches.plan) :]:
            if dummy.requires_grad:
                joined = joined + dummy.sum() * 0
        return joined

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


def _like(mapping: Any, values: dict[Any, Any]) -> Any:
    """A mapping of the same type; ModelOutput is an ordered dictionary and a dataclass that takes keywords."""
    keywords = isinstance(mapping, OrderedDict) and hasattr(mapping, "__dataclass_fields__")
    return type(mapping)(**values) if keywords else type(mapping)(values)


def _map_tensors(node: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(node, Tensor):
        return function(node)
    if isinstance(node, Mapping):
        values = {key: _map_tensors(value, function) for key, value in node.items() if key not in _CACHES}
        return _like(node, values)
    if isinstance(node, tuple | list):
        values_ = [_map_tensors(value, function) for value in node]
        return type(node)(values_) if not hasattr(node, "_fields") else type(node)(*values_)
    return node


def _tensors(node: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map_tensors(node, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _takes(model: Any, name: str) -> bool:
    while isinstance(model, nn.Module) and isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner  # DistributedDataParallel and its like
    function = model.forward if isinstance(model, nn.Module) else model
    parameters = inspect.signature(function).parameters
    passed_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return name in parameters or (passed_on and hasattr(getattr(model, "config", None), name))
