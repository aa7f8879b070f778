"""Chunks whose activations are not kept: each runs again when the backward pass comes to it.

Activation checkpointing (Chen et al., 2016, arXiv:1604.06174) with the chunk as what is checkpointed. For a loss on the
outputs of all chunks that is what is known as gradient caching (Gao et al., 2021, arXiv:2101.06983): outputs of the
whole batch and activations of one chunk at a time, at the price of a second forward pass. The graph stays one, so
there is one backward pass, in which each parameter's gradient is complete once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_padmin.runtime import RandomState


def recomputed(function: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    """What a function returns, without its activations, which it is called again for, with random numbers of this call.

    Args:
        function: of tensors, in containers or not.
        args: its inputs; what is written into them later on is not seen by the second call.
        inputs: the same by name.
    """
    if not torch.is_grad_enabled():
        return function(*args, **inputs)
    given, kept, before = (args, inputs), _copies((args, inputs)), RandomState()
    has_run = False

    def run(*_: Tensor) -> Any:
        nonlocal has_run, given
        if has_run:
            with before.again():
                return function(*kept[0], **kept[1])
        has_run, own, given = True, given, ((), {})
        return function(*own[0], **own[1])

    found: list[Tensor] = []
    _mapped(kept, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    # Tensors are handed over for their device alone, whose autocast is the same in the second call.
    return checkpoint(run, *found[:1], use_reentrant=False, preserve_rng_state=False)


def _copies(node: Any) -> Any:
    return _mapped(node, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def _mapped(node: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Tensors of plain containers; others stay what they are."""
    if isinstance(node, Tensor):
        return function(node)
    if type(node) in (tuple, list):
        return type(node)(_mapped(each, function) for each in node)
    if isinstance(node, Mapping) and type(node) is dict:
        return {name: _mapped(each, function) for name, each in node.items()}
    return node


__all__ = ["recomputed"]
