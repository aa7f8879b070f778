"""DeepSpeed: several backward passes where the engine expects one.

The engine does not count backward passes. It counts its own `step()` calls, and from that count tells whether a
backward pass *ends an accumulation window*: with `gradient_accumulation_steps=1` every one does. ZeRO-1 and ZeRO-2
take the gradient of such a pass for the complete one and forget what earlier passes reduced, without an error. So of
the passes that stand for one batch all but the last must be declared inner ones:

    engine = find_engine(strategy)
    for micro, weight in micro_batches:
        with accumulation_boundary(engine, is_last=micro.is_last):
            engine.backward(loss(engine(micro)) * weight)
    engine.step()  # one per batch, as without this library

Everything else follows from `step()` being called once per batch: `gradient_accumulation_steps` counts batches and
divides each loss of a batch alike, the loss scale changes only in `step()`, and clipping sees the accumulated
gradient. Two conditions: passes are not inside of `engine.no_sync()`, and each loss depends on what the model returned
(a zero made of the parameters does not: the engine never hears of its backward pass, and ZeRO-2 trains something else).

No framework is imported here, DeepSpeed included: where it is not loaded, there is no engine.

Checked with deepspeed 0.16.9, 0.19.0 and 0.19.8 (where 0.16.9 added up passes by itself, telling it does no harm).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common.versions import release, what_changed

__all__ = ["accumulation_boundary", "before_boundary", "check_engine", "drop_gradients", "find_engine", "find_prepared"]

CHECKED = "0.16.9, 0.19.0 and 0.19.8"
# method of the engine, its first parameters; backward is wrapped, so that its own cannot be seen
_METHODS: dict[str, list[str]] = {
    "backward": [],
    "step": ["self"],
    "is_gradient_accumulation_boundary": ["self"],
    "set_gradient_accumulation_boundary": ["self", "is_boundary"],
    "gradient_accumulation_steps": ["self"],
}
# The override itself has no public reader; None in it means that the engine counts.
_ATTRIBUTES = ("_is_gradient_accumulation_boundary", "micro_steps", "optimizer")
# Where strategies, Fabric's and Accelerate's wrappers, and torch.compile keep what they wrap.
_HOLDERS = ("model", "_deepspeed_engine", "_forward_module", "engine", "_orig_mod")
# Measured with 0.16.9: a window of four batches is off by most of the gradient, without this library too. In a window
# of one batch only the last pass would be kept. The code is the same up to 0.18.9.
_OFFLOAD_ACCUMULATES = (0, 19, 0)


@contextmanager
def accumulation_boundary(engine: Any, *, is_last: bool) -> Iterator[None]:
    """Around forward and backward pass of one micro-batch; `engine.step()` comes after the last one, outside of it.

    The last pass ends the engine's window exactly if the un-split batch would have: the engine is asked. What it and
    its ZeRO optimizer had noted before is put back at the end, an error in the body included, so that `step()` decides
    as it always does. Gradients that were accumulated before such an error stay in the engine, as after any pass.

    Args:
        engine: what `find_engine` returned.
        is_last: no further pass of this batch follows. Where `step()` is not called after every batch, false also for
            the last pass of a batch without a `step()`.

    Raises:
        ConfigError: inside of `engine.no_sync()`, which ZeRO-2 and ZeRO-3 refuse, in which older engines leave losses
            undivided, and from which a last pass is never reduced.
    """
    if getattr(engine, "inside_no_sync_ctxt", False):
        raise ConfigError(f"{_version()}: leave out engine.no_sync() where accumulation_boundary is used")
    if not _is_managed(engine):
        # step() alone is the boundary, however many passes come before it. Only global_samples counts each of them.
        yield
        return
    optimizer = engine.optimizer
    override, mirrored = engine._is_gradient_accumulation_boundary, _mirrored(optimizer)
    # Set for the last pass too: a loss that does not depend on the model's output never reaches the hook in which the
    # engine tells its optimizer.
    engine.set_gradient_accumulation_boundary(bool(is_last and engine.is_gradient_accumulation_boundary()))
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(override)
        if mirrored is not None:
            _mirror(optimizer, mirrored)


@contextmanager
def before_boundary(accelerator: Any) -> Iterator[None]:
    """Around a pass that does not end a window, where Accelerate's `backward` tells the engine, and has it step."""
    state = accelerator.gradient_state
    before = state.sync_gradients
    state._set_sync_gradients(False)
    try:
        yield
    finally:
        state._set_sync_gradients(before)


def drop_gradients(model: Any) -> None:
    """Empties the gradients of a part of a batch, which an engine keeps in more places than one.

    Args:
        model: as it is wrapped. Where it is no engine of DeepSpeed, this is `model.zero_grad(set_to_none=True)`.
    """
    if not _is_engine(model):
        model.zero_grad(set_to_none=True)
        return
    model.zero_grad()
    optimizer = model.optimizer
    if callable(getattr(optimizer, "zero_grad", None)):
        optimizer.zero_grad()
    for name in ("all_grad_tensors", "averaged_gradients"):  # of ZeRO-1 and ZeRO-2
        if isinstance(getattr(optimizer, name, None), dict):
            getattr(optimizer, name).clear()


def find_prepared(accelerator: Any, model: Any) -> Any:
    """The engine that Accelerate has made of a model, see `find_engine`, and that it tells of boundaries.

    Raises:
        ConfigError: there is none; see also `find_engine`.
    """
    engine = find_engine(model)
    if engine is None:
        raise ConfigError(f"model={type(model).__name__}: expected the engine that accelerator.prepare returned")
    if "sync_gradients" not in inspect.signature(accelerator.deepspeed_engine_wrapped.backward).parameters:
        raise ConfigError(
            "DeepSpeed: this version of Accelerate does not tell backward passes that end a window from others; 1.10.1 "
            "and 1.15 were checked"
        )
    return engine


def find_engine(holder: Any) -> Any:
    """The DeepSpeed engine that is, or is kept by, a model, a strategy or a wrapper; checked by `check_engine`.

    Args:
        holder: a strategy of Lightning or Fabric after it has set up the model, a model that Fabric, Accelerate or
            torch.compile has wrapped, or the engine.

    Returns:
        The engine, or None where there is no DeepSpeed.

    Raises:
        ConfigError: `holder` belongs to DeepSpeed, but no engine is to be found, or not one that can be told.
    """
    for candidate in (holder, *(getattr(holder, name, None) for name in _HOLDERS)):
        if _is_engine(candidate):
            check_engine(candidate)
            return candidate
    if any("deepspeed" in base.__name__.lower() for base in type(holder).__mro__):
        raise ConfigError(
            f"{_version()}: {type(holder).__name__} holds no DeepSpeedEngine (looked at: {', '.join(_HOLDERS)}), so "
            "it cannot be told which backward pass is a batch's last. Was the model set up before?"
        )
    return None


def _is_engine(candidate: Any) -> bool:
    kind = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    return isinstance(kind, type) and isinstance(candidate, kind)


def check_engine(engine: Any) -> None:
    """Refuses engines on which `accumulation_boundary` would be wrong, or was never tried.

    Raises:
        ConfigError: the engine has another interface than the versions that were checked, or runs in a mode in which
            a backward pass counts as a batch whatever it is told.
    """
    missing = [*_unlike_checked(engine), *(name for name in _ATTRIBUTES if not hasattr(engine, name))]
    if missing:
        raise ConfigError(
            f"{_version()}: {type(engine).__name__} differs from the versions that were checked ({CHECKED}): "
            f"{'; '.join(missing)} missing or changed. Use one of these until it is supported"
        )
    reason = _refusal(engine)
    if reason is not None:
        raise ConfigError(f"{_version()}: {reason}")


def _unlike_checked(engine: Any) -> Iterator[str]:
    for name, expected in _METHODS.items():
        if what_changed(type(engine), name, expected) is not None:
            yield f"{name}({', '.join(expected)})"


def _refusal(engine: Any) -> str | None:
    if any(base.__name__ == "PipelineEngine" for base in type(engine).__mro__):
        return "a PipelineEngine cuts batches itself, in train_batch: pipeline parallelism cannot be split from outside"
    if getattr(engine, "zenflow", False):
        return "ZenFlow takes every backward pass for a batch: leave zenflow out of zero_optimization"
    is_deepcompile = getattr(engine, "is_deepcompile_enabled", None)
    if is_deepcompile is not None and is_deepcompile():
        return "DeepCompile reduces gradients in compiled graphs, which was not checked: set deepcompile to false"
    if (
        getattr(engine.optimizer, "cpu_offload", False)
        and release(_version().removeprefix("deepspeed ")) < _OFFLOAD_ACCUMULATES
    ):
        oldest = ".".join(map(str, _OFFLOAD_ACCUMULATES))
        return (
            "ZeRO-1/2 with offload_optimizer loses gradients of a window of several passes: use "
            f"deepspeed>={oldest}, ZeRO-3, or no offloading"
        )
    return None


def _is_managed(engine: Any) -> bool:
    """Whether the engine counts windows itself, as it always did before 0.19."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return managed is None or bool(managed())


def _mirrored(optimizer: Any) -> bool | None:
    """A ZeRO optimizer's own copy of the boundary (a method in newer versions); None for other optimizers."""
    value = getattr(optimizer, "is_gradient_accumulation_boundary", None)
    return value() if callable(value) else value


def _mirror(optimizer: Any, is_boundary: bool) -> None:
    if hasattr(optimizer, "set_gradient_accumulation_boundary"):
        optimizer.set_gradient_accumulation_boundary(is_boundary)
    else:
        optimizer.is_gradient_accumulation_boundary = is_boundary


def _version() -> str:
    return f"deepspeed {_number()}".strip()


def _number() -> str:
    return str(getattr(sys.modules.get("deepspeed"), "__version__", "(not imported)"))
