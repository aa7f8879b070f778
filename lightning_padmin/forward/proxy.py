"""Modules inside of somebody's training step, run in chunks without a change to that step."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType, MethodType
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_padmin.config import PadMinConfig
from lightning_padmin.distributed import Exchange, exchange_alone
from lightning_padmin.errors import AsItCame, BatchError, OutOfMemoryError, PadMinError
from lightning_padmin.forward.any_module import AnyCalls, hooked_inside
from lightning_padmin.forward.calls import CallSite, transformers_models
from lightning_padmin.forward.causal_loss import CausalLoss
from lightning_padmin.forward.padded_forward import PaddedForward
from lightning_padmin.forward.recompute import recomputed
from lightning_padmin.runtime import Notices, RandomState, replaced, shards, takes
from lightning_padmin.stats import PaddingStats
from lightning_padmin.verification import PackGate

# What transformers calls them, whatever the entries of the batch are called.
_MASK, _LABELS, _DECODER_MASK = "attention_mask", "labels", "decoder_attention_mask"
_CHECKPOINTED = "it is called inside of torch.utils.checkpoint, which runs it again outside of the step"
_TARGETS = ("label", "start_positions", "end_positions", "return_loss")

Forwards: TypeAlias = "dict[tuple[int, str], PaddedForward | AnyCalls]"
"""What stands in for modules, by the module's identity and the name of its mask ("" where it may have several)."""


@contextmanager
def chunked(
    models: Mapping[str, nn.Module | CallSite],
    config: PadMinConfig,
    exchange: Exchange | None = None,
    gate: PackGate | None = None,
    kept: Forwards | None = None,
    tell: Callable[[str], None] | None = None,
    anew: bool = False,
    replays: bool = False,
    verifies: bool = False,
) -> Iterator[Calls]:
    """While the context is open, calls of these modules run in chunks.

    Those of models of transformers are calls of a `PaddedForward` in joint mode; those of any other module, see
    `call_sites`, are what `any_module` says. Calls inside of a call that runs in chunks run as they are.

    Args:
        models: by any name; models of transformers, or what `call_sites` has found.
        config: the options.
        exchange: the collective, where every rank must run the same number of chunks.
        gate: decides whether rows are packed.
        kept: filled with what stands in for each module, and used again where it is there already; so that what is
            said once, and what is remembered of earlier calls, holds for a whole training. Only for equal options.
        tell: told why a call runs as it came, once for each reason. Without it a model of transformers raises where
            its call cannot be taken; and what holds for other modules, and for models where their backbones are among
            the sites, is a warning.
        anew: whether calls of modules that nobody knows are proven again: for audits, since what was proven of a
            module holds for the attributes and buffers that it had.
        replays: whether a chunk's activations are not kept, and it runs again in the backward pass; see `recomputed`.
            Calls without padding run in chunks then, too.
        verifies: whether such chunks make sure of the module's weights, too.

    Yields:
        The `PaddingStats` of each call that ran in chunks.
    """
    run = _Run(config, exchange, gate, {} if kept is None else kept, tell, anew, replays, verifies)
    with ExitStack() as stack:
        for name, each in models.items():
            site = each if isinstance(each, CallSite) else CallSite(name, each)
            proxy = _ModelProxy(site, run) if site.is_model else _AnyProxy(site, run)
            stack.enter_context(proxy.installed())
        yield run.calls


class Calls(list[PaddingStats]):
    """What each call in chunks cost.

    Attributes:
        chunked: how many calls of each site ran in chunks, by name.
        as_they_came: how many with a mask did not, though they have padding.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.chunked, self.as_they_came = Counter[str](), Counter[str]()

    @property
    def total(self) -> PaddingStats:
        """All calls of one batch together: slots add up, the batch and its rows count once."""
        if not self:
            return PaddingStats()
        others = [replace(stats, batches=0, rows=0) for stats in self[1:]]
        return sum(others, self[0])


@dataclass(eq=False)
class _Run:
    """What proxies of one context share."""

    config: PadMinConfig
    exchange: Exchange | None
    gate: PackGate | None
    kept: Forwards
    tell: Callable[[str], None] | None
    anew: bool
    replays: bool
    verifies: bool
    calls: Calls = field(default_factory=Calls)
    running: object = None  # the proxy whose chunks run

    @property
    def is_alone(self) -> bool:
        """Whether other ranks need not hear of what is decided here."""
        return self.exchange is None or self.exchange is exchange_alone

    @contextmanager
    def inside(self, what: object) -> Iterator[None]:
        """Chunks run: they come back through the modules that stand in for themselves."""
        outside, self.running = self.running, what
        try:
            yield
        finally:
            self.running = outside

    def took(self, site: CallSite, stats: PaddingStats) -> None:
        self.calls.append(stats)
        self.calls.chunked[site.name] += 1

    def left(self, site: CallSite, why: str) -> None:
        """A call runs as it came; says why, once."""
        self.calls.as_they_came[site.name] += 1
        words = f"calls of {site.name!r} ({type(site.module).__name__}) run as they came, with their padding: {why}"
        if self.tell is not None:
            self.tell(words)
        else:
            _TOLD.setdefault(site.module, Notices())(words)


class _Here(threading.local):
    """How many chunks this thread is inside of: one that runs again may do so while another context is open."""

    chunks = 0


_here = _Here()
_TOLD: WeakKeyDictionary[nn.Module, Notices] = WeakKeyDictionary()


class _StandIn:
    """A function in the place of a module's `forward`. Copies of the module have their own.

    Args:
        function: what is called.
        module: whose.

    Attributes:
        padmin_stands_for: what the module itself had there, for who asks what a model's forward is.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        functools.update_wrapper(self, module.forward)  # whoever looks for the module's own function finds it
        self.padmin_stands_for = vars(module).get("forward")
        self._module = module
        self._call = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # planning is no work for it

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self._call(*args, **inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """What stands in the copy of the module: a method of its own, and not of the one that was copied."""
        copied = memo.get(id(self._module))
        if self.padmin_stands_for is not None:
            return copy.deepcopy(self.padmin_stands_for, memo)
        return self._module.forward if copied is None else MethodType(type(copied).forward, copied)


class _Proxy:
    """Stands in for the `forward` of one module."""

    def __init__(self, site: CallSite, run: _Run) -> None:
        self._site, self._run, self._model, self._original = site, run, site.module, site.module.forward

    @contextmanager
    def installed(self) -> Iterator[None]:
        def forward(*args: Any, **inputs: Any) -> Any:
            if _here.chunks or self._run.running not in (None, self):
                return self._original(*args, **inputs)
            return self._forward(*args, **inputs) if self._run.running is None else self._chunk(*args, **inputs)

        with replaced(self._model, forward=_StandIn(forward, self._model)):
            yield

    def _forward(self, *args: Any, **inputs: Any) -> Any:
        raise NotImplementedError

    def _chunk(self, *args: Any, **inputs: Any) -> Any:
        """The module's own call, with one chunk."""
        original = self._original

        def chunk(*args: Any, **inputs: Any) -> Any:
            _here.chunks += 1
            try:
                return original(*args, **inputs)
            finally:
                _here.chunks -= 1

        if not self._run.replays:
            return chunk(*args, **inputs)
        return recomputed(chunk, self._model, args, inputs, verifies=self._run.verifies)

    def _tried(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> tuple[Any] | None:
        """Outputs of a call that has been proven to be the same in chunks; None where there is nothing to remove.

        Raises:
            AsItCame: there is, and it cannot run in chunks.
        """
        try:
            bound = inspect.signature(self._original).bind(*args, **inputs)
        except TypeError:  # which the module's own call says
            return None
        calls = cast("AnyCalls", self._kept("", lambda: AnyCalls(self._site, self._run.config)))
        given = calls.mask_of(bound.arguments)
        if given is None:
            return None
        if not self._run.is_alone and _is_collective(self._model):
            raise AsItCame("its parameters are sharded, and only models of transformers run in chunks then")
        if _is_checkpointed():
            raise AsItCame(_CHECKPOINTED)
        before = RandomState()
        try:
            with self._run.inside(self):
                result = calls.run(self._chunk, bound, given, anew=self._run.anew, always=self._run.replays)
        except OutOfMemoryError:
            raise
        except (AsItCame, PadMinError) as refused:
            before.restore()
            raise AsItCame(str(refused)) from None
        if result is None:
            return None
        outputs, batches = result
        self._run.took(self._site, batches.stats)
        return (outputs,)

    def _kept(self, mask: str, make: Callable[[], PaddedForward | AnyCalls]) -> PaddedForward | AnyCalls:
        kept, key = self._run.kept, (id(self._model), mask)
        if key not in kept:
            made: Any = make()
            for other in kept.values():  # a training says a thing once, not for each of its models
                made.speaks_with(other)
            kept[key] = made
        return kept[key]


class _AnyProxy(_Proxy):
    """Of a module that is no model of transformers."""

    def _forward(self, *args: Any, **inputs: Any) -> Any:
        why = ""
        try:
            found = self._tried(args, inputs)
            if found is not None:
                return found[0]
        except AsItCame as refused:
            why = str(refused)
        if why:
            self._run.left(self._site, why)
        return self._original(*args, **inputs)


class _ModelProxy(_Proxy):
    """Of a model of transformers."""

    def __init__(self, site: CallSite, run: _Run) -> None:
        super().__init__(site, run)
        # Without a gate it is decided that rows are padded; a call must not make one of its own.
        layout = "pad" if run.gate is None else run.config.layout
        self._config = replace(run.config, labels_key=_LABELS, layout=layout)
        self._parameters = list(inspect.signature(self._model.forward).parameters)

    def _forward(self, *args: Any, **inputs: Any) -> Any:
        inputs = dict(zip(self._parameters, args, strict=False)) | inputs
        if inputs.get("use_cache") or inputs.get("past_key_values") is not None:  # caches belong to whole batches
            return self._original(**inputs)
        own_name = self._config.mask_key if inputs.get(self._config.mask_key) is not None else _MASK
        mask = inputs.get(own_name)
        if mask is None:  # nothing says what is padding
            return self._original(**inputs)
        # A hook of the user's inside must not hear of both passes of a chunk.
        is_hooked = self._run.replays and hooked_inside(self._model) is not None
        if self._run.tell is None and not self._site.has_inside and not is_hooked:
            try:
                return self._in_chunks(own_name, dict(inputs))
            except _Refused as refused:
                raise refused.error from None
        why = self._why_not(own_name, inputs)
        if why is None:
            try:
                return self._in_chunks(own_name, self._with_decoder_mask(inputs))
            except _Refused as refused:
                why = str(refused)
            try:  # entries and outputs may be others than its library's
                found = self._tried((), inputs)
                if found is not None:
                    return found[0]
            except AsItCame:
                pass
        if why:
            self._run.left(self._site, why)
        return self._original(**inputs)

    def _in_chunks(self, own_name: str, inputs: dict[str, Any]) -> Any:
        if inputs.get(_LABELS) is None:  # backbones are passed on what only the head reads
            inputs.pop("num_items_in_batch", None)
        before = RandomState()
        padded = self._padded(own_name)
        try:
            with self._run.inside(self):
                outputs = padded(**inputs)
            assert padded.micro_batches is not None
            self._run.took(self._site, padded.micro_batches.stats)
        except OutOfMemoryError:
            raise
        except PadMinError as error:
            if padded.micro_batches is not None and not self._run.is_alone:
                raise  # other ranks have run their chunks, and go on
            before.restore()
            raise _Refused(error) from error
        finally:
            padded.micro_batches = None  # the batch is not to live until the next call
        return outputs

    def _why_not(self, own_name: str, inputs: Mapping[str, Any]) -> str | None:
        """Why a call runs as it came, "" where there is nothing to say; None where it may run in chunks."""
        mask = inputs[own_name]
        if not isinstance(mask, Tensor) or (mask.ndim != 2 and self._site.has_inside):
            return ""
        if self._run.is_alone and not self._run.replays and bool((mask == 1).all()):
            return ""
        if _is_checkpointed():
            return _CHECKPOINTED
        asks = self._run.tell is not None or self._run.replays
        hooked = hooked_inside(self._model) if asks else None
        if hooked is not None:
            return hooked
        inside = "" if self._site.has_inside else "the model would take its loss of each chunk: call it without "
        for name, value in inputs.items():
            is_target = any(part in name for part in _TARGETS) and name != _LABELS
            if is_target and value is not None and value is not False:
                return inside and inside + repr(name)
        if inputs.get(_LABELS) is not None:
            try:
                CausalLoss.of(self._model, replace(self._config, mask_key=own_name), dict(inputs))
            except BatchError as refused:
                return "" if self._site.has_inside else str(refused)
        return None

    def _with_decoder_mask(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Without a mask all slots of a decoder count: then it is one of ones."""
        given = [inputs.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds")]
        tokens = next((each for each in given if isinstance(each, Tensor)), None)
        added = dict(inputs)
        is_open = tokens is not None and inputs.get(_DECODER_MASK) is None and inputs.get(_LABELS) is None
        if is_open and takes(self._model, _DECODER_MASK, by_name=True):
            assert tokens is not None
            added[_DECODER_MASK] = tokens.new_ones(tokens.shape[:2], dtype=torch.long)
        return added

    def _padded(self, mask: str) -> PaddedForward:
        def make() -> PaddedForward:
            config = replace(self._config, mask_key=mask)
            return PaddedForward(self._model, config, exchange=self._run.exchange, gate=self._run.gate)

        return cast("PaddedForward", self._kept(mask, make))


class _Refused(Exception):
    """A model's call that could not run in chunks; nothing is left of the attempt."""

    def __init__(self, error: PadMinError) -> None:
        super().__init__(str(error))
        self.error = error


def _is_collective(module: nn.Module) -> bool:
    """Whether parameters are gathered by a module inside; those that one around it has gathered are there."""
    return any(map(shards, module.modules())) or any(hasattr(each, "ds_id") for each in module.parameters())


def _is_checkpointed() -> bool:
    """Whether this call runs inside of `torch.utils.checkpoint`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("checkpoint.py") and "torch" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


__all__ = ["Calls", "Forwards", "chunked", "transformers_models"]
