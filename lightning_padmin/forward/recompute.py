"""Chunks whose activations are not kept: each runs again when the backward pass comes to it.

Activation checkpointing (Chen et al., 2016, arXiv:1604.06174) with the chunk as what is checkpointed. For a loss on the
outputs of all chunks that is what is known as gradient caching (Gao et al., 2021, arXiv:2101.06983): outputs of the
whole batch and activations of one chunk at a time, at the price of a second forward pass. The graph stays one, so
there is one backward pass, in which each parameter's gradient is complete once.

The second pass finds the module as the first one did: random numbers, training flags, which parameters are trained,
numbers and names among attributes (the adapter that is active, a counter), and buffers of one number. What a step does
to weights between the two is not undone, but noticed where that is asked for.

Where parameters are sharded (FSDP), modules inside gather them for the second pass as for the first, so that it is
collective too: ranks run equally many chunks, whose backward passes come in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_padmin.errors import TrainingStepError
from lightning_padmin.runtime import RandomState, shards

_PLAIN = (bool, int, float, str, type(None), list, tuple)
_MISSING = object()


def recomputed(
    function: Callable[..., Any],
    module: nn.Module,
    args: Sequence[Any],
    inputs: Mapping[str, Any],
    *,
    verifies: bool = False,
) -> Any:
    """What a function returns, without its activations, which it is called again for.

    Args:
        function: of tensors, in containers or not.
        module: what it calls.
        args: its inputs; what is written into them later on is not seen by the second call.
        inputs: the same by name.
        verifies: whether the second call makes sure that weights are what they were; reads all of them twice.

    Raises:
        TrainingStepError: in the backward pass: they are not.
    """
    if not torch.is_grad_enabled():
        return function(*args, **inputs)
    given: tuple[Any, Any] = tuple(args), dict(inputs)
    kept, random, state = _copies(given), RandomState(), _State(module)
    weights, has_run = _Weights(module) if verifies else None, False

    def run(*_: Tensor) -> Any:
        nonlocal has_run, given
        if has_run:
            if weights is not None and weights.have_changed:
                raise TrainingStepError(
                    f"mode='replay': weights of {type(module).__name__} were written into between its forward pass and "
                    "the backward pass, for which it runs again. Do that behind the backward pass, or use mode='joint'"
                )
            with random.again(), state.again():
                return function(*kept[0], **kept[1])
        has_run, own, given = True, given, ((), {})
        return function(*own[0], **own[1])

    found: list[Tensor] = []
    _mapped(kept, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    # A pass that stops when it has what is needed would leave modules that gather their parameters in the middle.
    with set_checkpoint_early_stop(False) if _is_sharded(module) else nullcontext():
        # Tensors are handed over for their device alone, whose autocast is the same in the second call.
        return checkpoint(run, *found, use_reentrant=False, preserve_rng_state=False)


class _Weights:
    """Sums and norms of what is trained of a module; of nothing else, which may be quantized.

    Of what is sharded, those of this rank's shards, as far as they can be had: what is gathered comes and goes.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad and p.is_floating_point()]
        if _is_sharded(module):
            parameters = [p.to_local() for p in parameters if hasattr(p, "to_local")]
        self._parameters = [p for p in parameters if p.numel()]
        self._before = self._told()

    def _told(self) -> list[Tensor]:
        """(2, P) for each device."""
        told: dict[torch.device, list[Tensor]] = {}
        for each in self._parameters:
            wide = torch.float32 if each.device.type == "mps" else torch.float64
            numbers = each.detach().sum(dtype=wide), each.detach().norm(dtype=wide)
            told.setdefault(each.device, []).append(torch.stack(numbers))
        return [torch.stack(each, dim=1).cpu() for each in told.values()]

    @property
    def have_changed(self) -> bool:
        """Beyond the rounding of a sum whose order is not the same on another thread; nan is the same as nan."""
        pairs = zip(self._before, self._told(), strict=True)
        return any(bool(((now - then).abs() > 1e-6 * then[1]).any()) for then, now in pairs)


def _is_sharded(module: nn.Module) -> bool:
    """Whether parameters are gathered and given up again while it runs."""
    return any(hasattr(p, "to_local") or hasattr(p, "_fsdp_flattened") for p in module.parameters()) or any(
        shards(each, first=True) for each in module.modules()
    )


class _State:
    """What a module is like, where that is cheap to tell."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept, self._trained, self._numbers = self._attributes(), self._flags(), self._copied()

    @contextmanager
    def again(self) -> Iterator[None]:
        """As it was then; afterwards as it is now."""
        now = self._attributes(), self._flags(), self._copied()
        _put(self._kept, self._trained, self._numbers)
        try:
            yield
        finally:
            _put(*now)

    def _attributes(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        # A wrapper's attributes are of the passes that run.
        modules = self._module.modules()
        spaces = [vars(each) for each in modules if not shards(each, first=True)]
        return [(space, {name: each for name, each in space.items() if type(each) in _PLAIN}) for space in spaces]

    def _flags(self) -> list[tuple[nn.Parameter, bool]]:
        return [(each, each.requires_grad) for each in self._module.parameters()]

    def _copied(self) -> list[tuple[Tensor, Tensor]]:
        return [(each, each.detach().clone()) for each in self._module.buffers() if each.numel() == 1]


def _put(
    attributes: list[tuple[dict[str, Any], dict[str, Any]]],
    flags: list[tuple[nn.Parameter, bool]],
    numbers: list[tuple[Tensor, Tensor]],
) -> None:
    for space, kept in attributes:
        for name, value in kept.items():
            if space.get(name, _MISSING) is not value:
                space[name] = value
    for parameter, flag in flags:
        if parameter.requires_grad is not flag:
            parameter.requires_grad_(flag)
    for number, value in numbers:
        number.data.copy_(value)  # unseen by those who keep it for the backward pass


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
