"""Whether gradients of shards wait to be reduced; FSDP keeps that where only private attributes tell.

Checked with torch 2.13. FSDP2 notes for each group of parameters whether a backward pass reduces, and keeps gradients
that wait in un-sharded parameters, apart from those that a model shows; the first FSDP keeps un-sharded ones in `.grad`
of its flat parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lightning_padmin.runtime import replaced


@contextmanager
def reducing(model: nn.Module) -> Iterator[bool]:
    """Backward passes inside reduce gradients, whatever the loop has told its model.

    Yields:
        Whether none of an earlier pass is waiting to be reduced, which would be mixed with them.
    """
    first, second = _first_of(model), _second_of(model)
    with ExitStack() as stack:
        for module in first:
            stack.enter_context(replaced(module, _sync_gradients=True))
        for group in second:
            stack.enter_context(replaced(group, reduce_grads=True, all_reduce_grads=True))
        yield not any(map(_waits_in_first, first)) and not any(map(_waits_in_second, second))


def _first_of(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if "_sync_gradients" in vars(each)]


def _second_of(model: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters; older ones have one for each module."""
    # Of the class: wrappers hand their attributes on to what they wrap.
    sharded: list[Any] = [each for each in model.modules() if hasattr(type(each), "_get_fsdp_state")]
    states = [each._get_fsdp_state() for each in sharded]
    several = [
        getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)] for state in states
    ]
    return [group for groups in several for group in groups if group is not None]


def _waits_in_first(module: Any) -> bool:
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    if flat is None or flat.grad is None:
        return False
    shard = getattr(flat, "_local_shard", None)
    return shard is not None and flat.grad.shape != shard.shape


def _waits_in_second(group: Any) -> bool:
    kept = [getattr(getattr(each, "_unsharded_param", None), "grad", None) for each in group.fsdp_params]
    kept += [getattr(each, "unsharded_accumulated_grad", None) for each in group.fsdp_params]  # in another dtype
    return any(each is not None for each in kept)


__all__ = ["reducing"]
