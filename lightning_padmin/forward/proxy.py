"""A model inside of somebody's training step, run in chunks without a change to that step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_padmin.config import PadMinConfig
from lightning_padmin.distributed import Exchange
from lightning_padmin.forward.padded_forward import PaddedForward
from lightning_padmin.runtime import replaced, takes
from lightning_padmin.stats import PaddingStats
from lightning_padmin.verification import PackGate

# What transformers calls them, whatever the entries of the batch are called.
_MASK, _LABELS = "attention_mask", "labels"


def transformers_models(module: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules inside of `module` that are models of transformers, or look like one, by name."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        inside = any(name.startswith(outer + ".") for outer in found)
        has_config = isinstance(getattr(getattr(child, "config", None), "model_type", None), str)
        if name and not inside and has_config and takes(child, _MASK, by_name=True):
            found[name] = child
    return found


@contextmanager
def chunked(
    models: dict[str, nn.Module],
    config: PadMinConfig,
    exchange: Exchange | None = None,
    gate: PackGate | None = None,
    kept: Forwards | None = None,
) -> Iterator[Calls]:
    """While the context is open, calls of these models are those of a `PaddedForward` in joint mode.

    Args:
        models: by any name.
        config: the options.
        exchange: the collective, where every rank must run the same number of chunks.
        gate: decides whether rows are packed.
        kept: filled with what stands in for each model, and used again where it is there already; so that what is said
            once, and what is remembered of earlier calls, holds for a whole training. Only for equal options.

    Yields:
        The `PaddingStats` of each call.
    """
    calls = Calls()
    with ExitStack() as stack:
        for model in models.values():
            proxy = _Proxy(model, config, exchange, gate, calls.append, {} if kept is None else kept)
            stack.enter_context(proxy.installed())
        yield calls


Forwards = dict[tuple[int, str], PaddedForward]
"""What stands in for models, by the model's identity and the name of its mask."""


class Calls(list[PaddingStats]):
    """What each call of a model cost."""

    @property
    def total(self) -> PaddingStats:
        """All calls of one batch together: slots add up, the batch and its rows count once."""
        if not self:
            return PaddingStats()
        others = [replace(stats, batches=0, rows=0) for stats in self[1:]]
        return sum(others, self[0])


class _Proxy:
    """Stands in for the `forward` of one model."""

    def __init__(
        self,
        model: nn.Module,
        config: PadMinConfig,
        exchange: Exchange | None,
        gate: PackGate | None,
        on_call: Callable[[PaddingStats], None],
        kept: Forwards,
    ) -> None:
        self._gate, self._kept = gate, kept
        self._model, self._original, self._on_call = model, model.forward, on_call
        # Without a gate it is decided that rows are padded; a call must not make one of its own.
        layout = "pad" if gate is None else config.layout
        self._config, self._exchange = replace(config, labels_key=_LABELS, layout=layout), exchange
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._inside = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        @torch.compiler.disable  # type: ignore[untyped-decorator]  # planning is no work for a compiler
        @functools.wraps(self._original)  # whoever looks for the model's own function finds it
        def forward(*args: Any, **inputs: Any) -> Any:
            return self._forward(*args, **inputs)

        # Its own, for who asks what a model's forward is.
        forward.padmin_stands_for = vars(self._model).get("forward")
        with replaced(self._model, forward=forward):
            yield

    def _forward(self, *args: Any, **inputs: Any) -> Any:
        inputs = dict(zip(self._parameters, args, strict=False)) | inputs
        # Chunks come back here; and generation has caches, which belong to whole batches.
        if self._inside or inputs.get("use_cache") or inputs.get("past_key_values") is not None:
            return self._original(**inputs)
        own_name = self._config.mask_key if inputs.get(self._config.mask_key) is not None else _MASK
        if inputs.get(own_name) is None:  # nothing says what is padding
            return self._original(**inputs)
        if inputs.get(_LABELS) is None:  # backbones are passed on what only the head reads
            inputs.pop("num_items_in_batch", None)
        padded = self._padded(own_name)
        self._inside = True
        try:
            outputs = padded(**inputs)
            assert padded.micro_batches is not None
            self._on_call(padded.micro_batches.stats)
        finally:
            self._inside = False
            padded.micro_batches = None  # the batch is not to live until the next call
        return outputs

    def _padded(self, mask: str) -> PaddedForward:
        key = id(self._model), mask
        if key not in self._kept:
            config = replace(self._config, mask_key=mask)
            made = PaddedForward(self._model, config, exchange=self._exchange, gate=self._gate)
            for other in self._kept.values():  # a training says a thing once, not for each of its models
                made.speaks_with(other)
            self._kept[key] = made
        return self._kept[key]
