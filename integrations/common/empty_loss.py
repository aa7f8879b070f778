"""Losses of 0/0, of a micro-batch in which no token carries loss: zero in their place, and still in the graph.

A derivative of 0/0 is not finite either, so zeros must start further down. Where depends on who waits for gradients:
strategies that gather weights or reduce gradients in hooks wait at what modules have returned; others at parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def collected_outputs(modules: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Finite tensors with a gradient that these modules return meanwhile."""
    found: list[Tensor] = []

    def collect(module: nn.Module, arguments: Any, outputs: Any) -> None:
        found.extend(leaf for leaf in _tensors(outputs) if leaf.requires_grad and bool(torch.isfinite(leaf).all()))

    handles = [module.register_forward_hook(collect) for module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def defined(loss: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """The loss; where it is not finite, a zero that is connected to these outputs, if there are any."""
    if not outputs or bool(torch.isfinite(loss).all()):
        return loss
    return torch.stack([(output * 0).sum().to(loss) for output in outputs]).sum()


def zero_of_parameters(parameters: Iterable[Tensor], like: Tensor) -> Tensor:
    """A zero that is connected to every parameter that is trained, so that each rank reduces every gradient."""
    terms = [(p.reshape(-1)[:1].sum() * 0).to(like) for p in parameters if p.requires_grad]
    return torch.stack(terms).sum()


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Those inside of mappings, lists, tuples and dataclasses; objects of other kinds are not looked into."""
    stack, seen = [outputs], list[Any]()
    while stack:
        node = stack.pop()
        if isinstance(node, Tensor):
            yield node
            continue
        if any(node is each for each in seen):
            continue
        if isinstance(node, Mapping):
            parts = list(node.values())
        elif isinstance(node, list | tuple):
            parts = list(node)
        elif dataclasses.is_dataclass(node) and not isinstance(node, type):
            parts = [getattr(node, field.name, None) for field in dataclasses.fields(node)]
        else:
            continue
        seen.append(node)
        stack.extend(reversed(parts))
