"""Whether a model keeps the documents of a pack apart: measured on the model itself before anything is packed.

Attention can, where restarting positions reach the function that builds its mask; convolutions, scans and recurrences
run on over the border, and nothing says so. Two comparisons, of outputs and of gradients:

    every second document of a pack, while the tokens of the others are replaced: nothing may change. The shapes are
    the same, so this is exact but for rounding, and sees a leak of a few parts in a million;
    the same documents, each alone and unpadded: as close as the dtype lets two layouts be.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_padmin.architectures import ArchitectureError, has_experts, vocabulary_of
from lightning_padmin.batch import RowTable
from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ConfigError
from lightning_padmin.microbatching import PackMap, PackStyle, pack_layout
from lightning_padmin.planning import Ints, plan_packs
from lightning_padmin.runtime import takes, untouched, warn, without_adapters, without_dropout
from lightning_padmin.verification.compare import HALF, dtypes_of, relative_difference
from lightning_padmin.verification.made_with import MadeWith
from lightning_padmin.verification.sketch import Sketches, combine, difference, largest, sketched_gradients

_logger = logging.getLogger(__name__)
_ALONE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.02, torch.float16: 0.02}
_ROUTED = 0.02
_ROUNDING, _ROUNDING_OF_GRADIENTS = 16, 64  # in units of the dtype's spacing at 1
_MOST_ALONE = 8  # documents that are compared with themselves alone
_MOST_LOGITS = 2**26  # above this hidden states are compared, which logits are made of token by token

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Leak:
    """How much documents of a pack change each other, relative to the largest value.

    Attributes:
        outputs, gradients: largest change when the other documents are replaced.
        outputs_alone, gradients_alone: largest difference to the same documents alone.
        limits: of these four, in this order.
        documents: lengths of the pack that was tried.
        failure: what the model raised instead.
    """

    outputs: float
    gradients: float
    outputs_alone: float
    gradients_alone: float
    limits: tuple[float, float, float, float]
    documents: tuple[int, ...]
    failure: str = ""

    @property
    def is_none(self) -> bool:
        """Whether all four are within their limits."""
        return not self.failure and all(value <= limit for value, limit in zip(self._values, self.limits, strict=True))

    @property
    def _values(self) -> tuple[float, float, float, float]:
        return self.outputs, self.gradients, self.outputs_alone, self.gradients_alone

    def __str__(self) -> str:
        if self.failure:
            return f"the model failed on a pack ({self.failure})"
        if self.is_none:
            worst = max(self.outputs_alone, self.gradients_alone)
            return f"{len(self.documents)} documents of a pack are as they are alone (difference {worst:.1e})"
        if not (self.outputs <= self.limits[0] and self.gradients <= self.limits[1]):
            return (
                f"documents of a pack change each other: with other documents beside them outputs change by "
                f"{self.outputs:.2g} of the largest, gradients by {self.gradients:.2g}"
            )
        return (
            f"documents of a pack are not what they are alone: outputs differ by {self.outputs_alone:.2g} of the "
            f"largest, gradients by {self.gradients_alone:.2g}"
        )


def measure_leak(model: nn.Module, lengths: Sequence[int], style: PackStyle, around: Context = nullcontext) -> Leak:
    """Runs a pack of random tokens through a model; nothing of the model is changed.

    Args:
        model: called as those of transformers are.
        lengths: of the documents, at least two.
        style: what the pack has besides its tokens.
        around: context of each pass (autocast).
    """
    try:
        with untouched(model), without_dropout(model) as watch:
            passes = _Passes(model, lengths, style, around)
            values = passes.changes(), passes.against_alone()
            dtype = torch.bfloat16 if watch.saw_half else passes.dtype
    except (TypeError, ValueError, RuntimeError, LookupError, ImportError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        first = next(iter(str(error).splitlines()), "")
        nan = float("nan")
        return Leak(nan, nan, nan, nan, (0.0,) * 4, tuple(lengths), f"{type(error).__name__}: {first}")
    limits = _limits(dtype, has_experts(model))
    (outputs, gradients), (outputs_alone, gradients_alone) = values
    return Leak(outputs, gradients, outputs_alone, gradients_alone, limits, tuple(lengths))


def _limits(dtype: torch.dtype, routed: bool) -> tuple[float, float, float, float]:
    """Of a `Leak`. Where shapes are the same only kernels that are not deterministic differ, and experts.

    Experts get other numbers of tokens when other documents change, which rounds otherwise; in half precision that
    sends tokens elsewhere.
    """
    spacing = torch.finfo(dtype).eps
    if spacing < 1e-4:
        return _ROUNDING * spacing, _ROUNDING_OF_GRADIENTS * spacing, _ALONE[dtype], _ALONE[dtype]
    return (_ROUTED, 4 * _ROUTED, 4 * _ROUTED, 0.12) if routed else (1e-4, 2 * spacing, _ALONE[dtype], 0.12)


class _Passes:
    """Passes over one pack, in which every second document is watched."""

    def __init__(self, model: nn.Module, lengths: Sequence[int], style: PackStyle, around: Context) -> None:
        self._model, self._around = model, around
        self._device = next(model.parameters()).device
        self._slots = _slots_of(lengths, style)
        self._source = torch.Generator().manual_seed(0)
        vocabulary = vocabulary_of(model)
        tokens = sum(lengths)
        self._callee = model if tokens * vocabulary <= _MOST_LOGITS else _backbone(model)
        self._ids, other = self._draw(tokens, vocabulary), self._draw(tokens, vocabulary)
        offsets = self._slots.offsets
        self._watched = [(int(a), int(b)) for a, b in zip(offsets[1:-1:2], offsets[2::2], strict=False)]
        self._where = torch.zeros(tokens, dtype=torch.bool)
        for begin, end in self._watched:
            self._where[begin:end] = True
        self._changed = torch.where(self._where, self._ids, other)
        self._weights: Tensor | None = None
        self.dtype = torch.float32

    def _draw(self, count: int, vocabulary: int) -> Tensor:
        ids = torch.randint(0, vocabulary, (count,), generator=self._source)
        special = getattr(getattr(self._model, "config", None), "pad_token_id", None)
        return torch.where(ids == special, (ids + 1) % vocabulary, ids) if isinstance(special, int) else ids

    def changes(self) -> tuple[float, float]:
        """Of outputs and gradients of the watched documents, when the others are replaced."""
        first, own = self._pack(self._ids)
        second, other = self._pack(self._changed)
        self._first, self._own = first, own
        return relative_difference(second, first), _relative_gradients(other, own)

    def against_alone(self) -> tuple[float, float]:
        """Of outputs and gradients of the watched documents, against each alone."""
        few = self._watched[:_MOST_ALONE]
        own = self._own if len(few) == len(self._watched) else self._pack(self._ids, few)[1]
        worst, gradients = 0.0, []
        kept = torch.cat([torch.arange(begin, end) for begin, end in self._watched])
        for begin, end in few:
            alone, gradient = self._run(
                self._ids[begin:end], self._known(use_cache=False), slice(0, end - begin), begin
            )
            worst = max(worst, relative_difference(alone, self._first[(kept >= begin) & (kept < end)]))
            gradients.append(gradient)
        return worst, _relative_gradients(combine(gradients, [1.0] * len(gradients)), own)

    def _pack(self, ids: Tensor, watched: Sequence[tuple[int, int]] | None = None) -> tuple[Tensor, Sketches]:
        where = self._where
        if watched is not None:
            where = torch.zeros_like(where)
            for begin, end in watched:
                where[begin:end] = True
        return self._run(ids, self._known(**self._slots.arguments(self._device)), where, 0)

    def _known(self, **arguments: Any) -> dict[str, Any]:
        """Without positions a model that knows none is tried all the same: it shows how much it leaks."""
        return {name: value for name, value in arguments.items() if takes(self._model, name)}

    def _run(
        self, ids: Tensor, arguments: Mapping[str, Any], where: Tensor | slice, begin: int
    ) -> tuple[Tensor, Sketches]:
        """Outputs (tokens, size) at `where`, and the gradient of a random linear function of them."""
        kept: list[Tensor] = []

        def loss() -> Tensor:
            with self._around():
                output = self._callee(input_ids=ids.to(self._device)[None], **arguments)
            values = _tensor_of(output)[0]
            if len(values) != len(ids):
                raise ValueError("its outputs are not one for each token")
            if self._weights is None:
                self.dtype = next(p.dtype for p in self._model.parameters() if p.is_floating_point())
                shape = (len(self._where), *values.shape[1:])
                self._weights = torch.randn(shape, generator=self._source, dtype=torch.float32).to(values.device)
            index = where if isinstance(where, slice) else where.to(values.device)
            chosen = values[index]
            kept[:] = [chosen.detach()]
            weights = self._weights[begin : begin + len(values)][index].to(values)
            return (chosen * weights).sum()

        gradients = sketched_gradients(loss, self._model)
        return kept[0], gradients


def _backbone(model: Any) -> Any:
    """What makes the hidden states; inside of a model with adapters (PEFT) that of the model that has them."""
    inner = without_adapters(model)
    return getattr(inner, "base_model", inner)


def _slots_of(lengths: Sequence[int], style: PackStyle) -> PackMap:
    n = np.array(lengths, np.int64)
    ones = np.ones(len(n), np.int64)
    table = RowTable(np.zeros((len(n), 1), np.int64), n[:, None], n, n, ones.astype(np.float64), (int(n.max()),))
    return pack_layout(table, np.arange(len(n)), style)


def _tensor_of(output: Any) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise TypeError(f"the model returned {type(output).__name__}, which has no logits")
    return first


def _relative_gradients(found: Sketches, wanted: Sketches) -> float:
    scale = largest(wanted) or 1.0
    return difference(found, wanted, dict.fromkeys(wanted, scale))[0]


class PackGate:
    """Decides on the first batch with two documents whether rows are packed; again when the models have changed.

    Args:
        models: the models of transformers that are going to get packs, by name.
        config: the options.
        around: context of a forward pass (autocast).
        say: told the decision of `layout="auto"` once, in words.
        wants_gradients: decides only where gradients are taken: adapters may be switched off elsewhere.
        find: the models as they are now, where `inside` holds others than before.
        inside: what holds the models as attributes.

    Attributes:
        style: what packs have, once they are proven.
        verdict: None until it is known.
        leaks: what was measured, by name of the model.
        changes: how often models have become others since packs were proven: another way to attend, another function
            or module.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        config: PadMinConfig,
        *,
        around: Context = nullcontext,
        say: Callable[[str], None] = lambda words: None,
        wants_gradients: bool = False,
        find: Callable[[], Mapping[str, nn.Module]] | None = None,
        inside: nn.Module | None = None,
    ) -> None:
        self._models, self._config, self._around, self._say = dict(models), config, around, say
        self._wants_gradients, self._proven = wants_gradients, 0
        self._find, self._inside = find, inside
        self._made_with: MadeWith | None = None  # of the proof that stands
        self._since, self.changes = "", 0
        shift = 1 if config.label_shift is None else config.label_shift
        self.style = PackStyle(config.ignore_index, shift)
        self.leaks: dict[str, Leak] = {}
        self.verdict: bool | None = False if config.layout == "pad" else None
        if config.layout == "auto":
            without = [name for name, model in self._models.items() if not has_varlen_kernel(model)]
            if without or not self._models:
                what = (
                    f"{_title(without[0], self._models)} has none" if without else "no model of transformers is known"
                )
                self._decide(False, f"packing is faster only with a fused kernel for variable lengths, and {what}")

    def __call__(self, lengths: Ints) -> bool:
        """Whether rows of these lengths are to be packed.

        Raises:
            ArchitectureError: `layout="pack"`, and documents leak; names the model and the measured leak.
        """
        self._look()
        if self.verdict is False or (self._wants_gradients and not torch.is_grad_enabled()):
            return bool(self.verdict)
        documents = self._documents(lengths)
        # A model may keep documents apart in short packs only, so longer ones are proven anew.
        if len(documents) >= 2 and sum(documents) > self._proven:
            self._prove(self._more(documents))
        return bool(self.verdict)

    def _look(self) -> None:
        """A proof counts for what it was made with."""
        change = None if self._made_with is None else self._made_with.change()
        if change is None:
            return
        self._since = f" ({change} since packs were proven)"
        self.changes += 1
        self._made_with, self._proven = None, 0
        if self.verdict:
            self.verdict = None
        if self._find is not None:
            self._models = dict(self._find())

    @property
    def is_demanded(self) -> bool:
        """Whether rows must be packed or refused."""
        return self._config.layout == "pack"

    def give_up(self, why: str) -> None:
        """Rows are padded from now on."""
        self._decide(False, why)

    def _documents(self, lengths: Ints) -> list[int]:
        """Lengths of the fullest pack; of two rows where packs hold one each and nothing is proven yet."""
        plan = plan_packs(lengths, self._config.token_budget, max_rows=self._config.max_rows)
        packs = [rows for rows in plan.groups if len(rows) > 1]
        if packs:
            return [int(n) for n in lengths[packs[0]]]
        return [] if self.verdict else [int(n) for n in np.sort(lengths)[:2]]

    def _more(self, documents: Sequence[int]) -> list[int]:
        """The same again, up to twice as many tokens, if the budget has room: so there are few proofs in a training."""
        total = sum(documents)
        most = min(2 * total, self._config.token_budget or 2 * total)
        more = list(documents)
        for length in documents:
            if sum(more) < most:
                more.append(min(length, most - sum(more)))
        return more

    def _prove(self, documents: Sequence[int]) -> None:
        before, self.leaks = self.verdict, {}
        made_with = MadeWith(self._models, self._inside)
        for style in self._styles():
            found = {name: self._leak(model, documents, style) for name, model in self._models.items()}
            self.leaks = self.leaks or found
            if all(leak.is_none for leak in found.values()):
                self.leaks, self.style, self._proven, self._made_with = found, style, sum(documents), made_with
                words = "; ".join(f"{_title(name, self._models)}: {leak}" for name, leak in found.items())
                words += self._since
                if before is None:
                    self._decide(True, words)
                return
        name, leak = next((name, leak) for name, leak in self.leaks.items() if not leak.is_none)
        words = f"{_title(name, self._models)}: {leak}{self._since}"
        if self._config.layout == "pack":
            raise ArchitectureError(
                f"layout='pack': {words}. Use layout='pad', which needs nothing of the model and is exact for it"
            )
        self._decide(False, words)

    def _leak(self, model: nn.Module, documents: Sequence[int], style: PackStyle) -> Leak:
        return measure_leak(model, documents, style, nullcontext if _is_whole(model) else self._around)

    def _styles(self) -> list[PackStyle]:
        """What is tried: positions alone, then the numbers of documents for mixers whose kernels read them."""
        models = self._models.values()
        borders = any(has_varlen_kernel(model) for model in models)
        plain = replace(self.style, borders=borders, no_cache=all(takes(model, "use_cache") for model in models))
        numbers = all(takes(model, "seq_idx") for model in models)
        has_kernels = importlib.util.find_spec("causal_conv1d") is not None
        return [plain, replace(plain, seq_idx=True)] if numbers and has_kernels else [plain]

    def _decide(self, packs: bool, why: str) -> None:
        self.verdict = packs
        self._say(f"layout={'pack' if packs else 'pad'!r}: {why}")


def gate_of(
    models: Mapping[str, nn.Module],
    config: PadMinConfig,
    around: Context = nullcontext,
    say: Callable[[str], None] | None = None,
    wants_gradients: bool = False,
    find: Callable[[], Mapping[str, nn.Module]] | None = None,
    inside: nn.Module | None = None,
) -> PackGate | None:
    """The gate of these models; None where the options do not ask for packing."""
    if config.layout == "pad":
        return None
    told = say or (warn if config.layout == "auto" else _logger.info)
    return PackGate(models, config, around=around, say=told, wants_gradients=wants_gradients, find=find, inside=inside)


def refuse_unproven(config: PadMinConfig, where: str) -> None:
    """Raises ConfigError for `layout="pack"` in loops whose steps nobody compares with un-packed ones."""
    if config.layout == "pack":
        raise ConfigError(
            f"layout='pack': nothing checks that a loop over {where} hands position ids on. Call the model through "
            "PaddedForward(model, config), which packs inside of the call, or use layout='pad'"
        )


def needs_rows(config: PadMinConfig) -> str | None:
    """Why a training step cannot be given packs, by its declarations: a pack is one row of many documents."""
    if config.loss_reduction not in ("token-mean", "sum"):
        return (
            f"with loss_reduction={config.loss_reduction!r} a step takes means over rows, and a pack is one row of "
            "many documents; mode='joint' packs inside of the model call"
        )
    by_row = [name for name, how in config.log_reduce.items() if how == "row-mean"]
    if by_row:
        return f"log_reduce[{by_row[0]!r}]='row-mean' is a mean over rows, and a pack is one row of many documents"
    return None


def _is_whole(model: nn.Module) -> bool:
    """Whether the model computes in float32 or more where nothing casts it: then a leak shows best without a cast."""
    return not dtypes_of(model) & HALF and not has_varlen_kernel(model)


def has_varlen_kernel(model: nn.Module) -> bool:
    """Whether the model's attention is a fused kernel that reads documents of variable length."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return isinstance(name, str) and "flash" in name and next(model.parameters()).is_cuda


def _title(name: str, models: Mapping[str, nn.Module]) -> str:
    model = models[name]
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with_attention = f", attention {attention!r}" if attention else ""
    return f"{name or 'the model'} ({type(model).__name__}{with_attention})"


__all__ = ["Leak", "PackGate", "gate_of", "has_varlen_kernel", "measure_leak", "needs_rows", "refuse_unproven"]
