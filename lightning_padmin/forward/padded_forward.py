"""`PaddedForward`: a model call that is chunked inside, so that any loss sees one batch.

    joint     the chunks' outputs are put back in the caller's layout and keep one graph: exact for every loss
    replay    chunks run without a graph first, the loss is taken on leaves, then each chunk runs again and is sent
              backward on its own (gradient caching): the same gradients, activations of one chunk at a time

Unlike split micro-batches neither needs to know how the loss is reduced, nor that it separates over rows. Labels may
be among the inputs where the model's own loss can be taken of the whole batch's logits: causal models of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lightning_padmin.architectures import refuse_batch_statistics, screen
from lightning_padmin.batch import iter_leaves, last_part, map_leaves
from lightning_padmin.config import PadMinConfig, as_config
from lightning_padmin.distributed import Exchange
from lightning_padmin.errors import BatchError, ConfigError
from lightning_padmin.forward.causal_loss import CausalLoss
from lightning_padmin.forward.kept_logits import KeptLogits
from lightning_padmin.forward.outputs import Assembler, OutputKind, map_tensors, proofs_of, tensors
from lightning_padmin.microbatching import MicroBatch, MicroBatcher, MicroBatches
from lightning_padmin.runtime import RandomState, takes, unwrap
from lightning_padmin.verification import PackGate, gate_of

NoSync = Callable[[], AbstractContextManager[Any]]
_MODES = ("joint", "replay")


class PaddedForward:
    """Calls a model in length-sorted chunks under the token budget; returns outputs in the caller's layout.

    Args:
        model: a module or function that takes a batch by keyword and returns a tensor, tuple, mapping or ModelOutput.
        config: the options; those about budget, rounding, keys and schema count here.
        mode: `"joint"` or `"replay"`.
        no_sync: e.g. `ddp.no_sync`; entered for every chunk's forward pass but the last (and, in replay, its backward
            pass), so that gradients are reduced once. Leave it out under FSDP and ZeRO.
        exchange: the collective, where every rank must run the same number of chunks (FSDP); default: this one alone.
        gate: what decides whether rows are packed, where it has been made already; default: one for this model.
        outputs: what outputs with other names are: `"position"`, `"row"`, `"flat"` (rows x positions in one dimension)
            or `"drop"`. Without it they are what the shapes of chunks of different rows and widths prove, or refused.

    Attributes:
        micro_batches: those of the last call, with `.plan` and `.stats`.

    Raises:
        ConfigError: an option is malformed.
        ArchitectureError: the model's outputs for a row depend on the rows that run with it.

    Example:
        >>> outputs = PaddedForward(model, PadMinConfig(token_budget=8192))(**inputs)
        >>> loss = any_loss(outputs.logits, labels)  # padding slots hold zeros
        >>> loss = PaddedForward(causal_model, PadMinConfig(token_budget=8192))(**inputs, labels=labels).loss
    """

    def __init__(
        self,
        model: Callable[..., Any],
        config: PadMinConfig | None = None,
        mode: Literal["joint", "replay"] = "joint",
        no_sync: NoSync | None = None,
        *,
        exchange: Exchange | None = None,
        gate: PackGate | None = None,
        outputs: Mapping[str, OutputKind] | None = None,
    ) -> None:
        if mode not in _MODES:
            raise ConfigError(f"mode={mode!r}: expected one of {', '.join(map(repr, _MODES))}")
        self.model, self.mode, self.no_sync = model, mode, no_sync
        findings = screen(model, tolerate={"batch-norm", "balance-loss"})  # that loss is taken of all rows
        findings.refuse()
        self.config = findings.options(as_config(config).without_loss())
        self.micro_batches: MicroBatches | None = None
        if gate is None and isinstance(model, nn.Module):
            gate = gate_of({"": unwrap(model, compiled=False)}, self.config)
        self._batcher = MicroBatcher(self.config, exchange=exchange, row_limit=findings.row_limit, gate=gate)
        self._outputs, self._proofs = dict(outputs or {}), proofs_of(model)
        self._takes_use_cache = _takes(model, "use_cache")
        self._pending: list[_Chunk] = []

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Outputs of the model for the whole batch, in the batch's own layout; padding slots hold zeros.

        With `labels` among the inputs of a causal model of transformers (and `num_items_in_batch`, if it divides by
        that) the output has the model's own `loss` of the whole batch, its balance loss of experts included.

        Raises:
            BatchError: inputs by position, `logits_to_keep` where rows end in padding, labels for a model whose loss
                cannot be taken of the outputs, outputs that cannot be put back, or (replay) a call whose predecessor
                has not been sent backward.
            PadMinError: the batch cannot be planned.
        """
        self._refuse(args)
        refuse_batch_statistics(self.model)
        self.config = named_as(self.config, inputs)
        has_labels = self.config.labels_key is not None and inputs.get(self.config.labels_key) is not None
        kept = KeptLogits.taken_from(inputs, self.model, has_labels)
        own_loss = CausalLoss.of(self.model, self.config, inputs) if has_labels else None
        if self._takes_use_cache:
            inputs.setdefault("use_cache", False)  # a cache of chunks belongs to no row of the batch
        batches = self._batcher.prepare_made(lambda: self._checked(inputs, kept), names=self.config.batch)
        self.micro_batches = batches
        replayed = self.mode == "replay" and torch.is_grad_enabled()
        pending: list[_Chunk] = []
        results = []
        for micro, slots in zip(batches, batches.slot_maps, strict=True):
            first = _FirstPass() if replayed else None
            more = {} if kept is None else kept.argument(slots, batches.plan.is_packed)
            again = replace(micro, batch=_copy_of(micro.batch)) if replayed else micro  # before anything writes to it
            with self._unsynchronised(micro), torch.no_grad() if replayed else nullcontext():
                result = self._run(micro, more)
            if first is not None:
                leaves = _Leaves()
                result = map_tensors(result, leaves.make)
                pending.append(_Chunk(again, leaves.tensors, first, more))
            results.append(result)
        outputs = Assembler(batches, self._outputs, inputs, self.model, self._proofs, kept).join(results)
        if own_loss is not None:
            outputs = own_loss.add(outputs, batches.table)
        self._pending = pending  # only now: had anything raised, there would be nothing to send backward
        return outputs

    def speaks_with(self, other: PaddedForward) -> None:
        """What one of the two has said, the other does not say again."""
        self._batcher.speaks_with(other._batcher)

    def _checked(self, inputs: dict[str, Any], kept: KeptLogits | None) -> dict[str, Any]:
        if kept is not None:
            kept.check(inputs.get(self.config.mask_key))
        return inputs

    def _run(self, micro: MicroBatch, more: Mapping[str, Any]) -> Any:
        """Calls the model with one chunk; labels were there to be checked, their loss is that of the whole batch."""
        key = self.config.labels_key
        given = {name: value for name, value in micro.batch.items() if name != key or value is None}
        return self.model(**given, **more)

    def backward_pending(self) -> None:
        """Replay: sends the gradients that the loss left on the outputs backward through the model, chunk by chunk.

        Call it once after `loss.backward()`. Random state is that of the first pass in each chunk, and afterwards what
        it was before.
        """
        pending, self._pending = self._pending, []
        after = RandomState()
        try:
            for chunk in pending:
                self._backward(chunk)
        finally:
            after.restore()

    def _backward(self, chunk: _Chunk) -> None:
        with self._unsynchronised(chunk.micro), torch.enable_grad():
            with chunk.first.again():
                again = tensors(self._run(chunk.micro, chunk.more))
            outputs, gradients = [], []
            for output, leaf in zip(again, chunk.leaves, strict=True):
                if output.requires_grad:
                    outputs.append(output)
                    # A chunk that no loss reached still takes part, or ranks would wait for its gradients.
                    gradients.append(leaf.grad if leaf.grad is not None else torch.zeros_like(output))
            torch.autograd.backward(outputs, gradients)

    def _unsynchronised(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        return nullcontext() if micro.is_last or self.no_sync is None else self.no_sync()

    def _refuse(self, args: Sequence[Any]) -> None:
        if args:
            raise BatchError(f"PaddedForward got {len(args)} inputs by position: pass every input by its name")
        if self._pending:
            raise BatchError("the last call was not sent backward: call backward_pending() after loss.backward()")


@dataclass(frozen=True, eq=False)
class _Chunk:
    """What replay keeps of one chunk: inputs, output leaves, and how its first pass ran."""

    micro: MicroBatch
    leaves: list[Tensor]
    first: _FirstPass
    more: Mapping[str, Any]


def _copy_of(batch: Any) -> Any:
    """Inputs of a second pass that nobody else can write to, with their graph.

    A batch that is one chunk as it came is the caller's own, which may be a buffer that the next batch goes to; so is,
    in other chunks, what all rows share and lists of tensors. And the first pass may write to its inputs. A version
    counter would not see writes through `.data` or from another process, so all is copied, as gathering would.
    """
    return map_leaves(batch, lambda path, leaf: _copied(leaf))


def _copied(node: Any) -> Any:
    if isinstance(node, Tensor):
        return node.clone()
    if isinstance(node, np.ndarray):
        return node.copy()
    if type(node) is dict:
        return {key: _copied(value) for key, value in node.items()}
    return type(node)(map(_copied, node)) if type(node) in (list, tuple) else node


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


class _FirstPass:
    """Random state and autocast of a chunk's first pass, for its second."""

    def __init__(self) -> None:
        self._random = RandomState()
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] + ([accelerator.type] if accelerator is not None else [])
        self._casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same random numbers and dtypes inside; the random state is left as the pass leaves it."""
        self._random.restore()
        with ExitStack() as stack:
            for kind, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype))
            yield


def named_as(config: PadMinConfig, inputs: Mapping[str, Any]) -> PadMinConfig:
    """The options with names of a batch's entries as a model call has them: `inputs.segments` comes as `segments`.

    Labels and a loss mask may stay with the loss, which sees the whole batch.
    """
    roles = ("mask_key", "labels_key", "decoder_mask_key", "loss_mask_key")
    keys = [key for key in (getattr(config, role) for role in roles) if key is not None]
    keys += [*config.batch_schema, *config.static_keys]
    paths = tuple(path for path, _ in iter_leaves(inputs, keys)) if any("." in key for key in keys) else tuple(inputs)

    def name(key: str) -> str:
        is_there = key in paths or any(path.endswith("." + key) or path.startswith(key + ".") for path in paths)
        return last_part(key) if not is_there and last_part(key) in inputs else key

    changed: dict[str, Any] = {role: name(getattr(config, role)) for role in roles if getattr(config, role) is not None}
    of_roles = set(changed.values())
    for role in ("labels_key", "loss_mask_key"):
        key = changed.get(role)
        if key not in (None, "labels") and not any(path == key or path.endswith(f".{key}") for path in paths):
            changed[role] = None
    schema: dict[str, Any] = {}
    for key, entry in config.fields.items():  # `positive.attention_mask` says nothing of the call's own mask
        new = name(key)
        if new == key or (new not in of_roles and new not in config.batch_schema):
            schema.setdefault(new, entry)
    static = [name(key) for key in config.static_keys if name(key) not in schema and name(key) not in of_roles]
    return replace(config, **changed, batch_schema=schema, static_keys=static)


def _takes(model: Any, name: str) -> bool:
    """Whether the model takes an argument; one that takes all names, only if its configuration knows this one."""
    model = unwrap(model, compiled=False)
    passed_on = takes(model, name) and hasattr(getattr(model, "config", None), name)
    return takes(model, name, by_name=True) or passed_on
