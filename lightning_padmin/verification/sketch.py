"""Gradients of a loss as small sketches, each gradient freed as soon as it is there.

A sketch is linear, so sketches of micro-batches can be weighted and summed afterwards in every way that is to be
tried. It is the count sketch of Charikar, Chen and Farach-Colton (2002) with coordinate i in bucket i mod m: within a
bucket, coordinates are summed with random signs, so a difference anywhere shows in its bucket, and divided by the root
of their number, so buckets are of the size of entries. Parameters of at most m entries keep every entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_padmin.errors import OnlyBackwardError
from lightning_padmin.verification.compare import Tolerance

_BUCKETS = 1024  # and so many rows at once: a gradient in half precision is widened piece by piece

Sketches = dict[str, Tensor]


def sketch(tensor: Tensor, seed: int) -> Tensor:
    """(min(n, m),) buckets of a tensor of n entries; in float32, or float64 for float64."""
    flat = (tensor.to_dense() if tensor.is_sparse else tensor).detach().reshape(-1)
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    buckets = min(_BUCKETS, flat.numel())
    rows = math.ceil(flat.numel() / max(buckets, 1))
    if rows <= 1:
        return flat.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    signs, turning = _signs(rows, generator, flat), _signs(2 * _BUCKETS, generator, flat)
    # Row i of m entries is multiplied by signs[i] and by `turning` from place i on, so that two rows never cancel in
    # all buckets at once.
    turned = turning.as_strided((_BUCKETS, _BUCKETS), (1, 1))
    total = torch.zeros(buckets, dtype=dtype, device=flat.device)
    for start in range(0, rows, _BUCKETS):
        piece = flat[start * buckets : (start + _BUCKETS) * buckets].to(dtype)
        piece = nn.functional.pad(piece, (0, -len(piece) % buckets)).view(-1, buckets)
        total += signs[start : start + len(piece)].to(dtype) @ (piece * turned[: len(piece)])
    return total / math.sqrt(rows)


def _signs(count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    return (torch.randint(0, 2, (count,), generator=generator) * 2 - 1).to(like.device, torch.float32)


def sketched_gradients(
    loss: Callable[[], Tensor], module: nn.Module, *, by_backward: bool = False, again: bool = True
) -> Sketches:
    """Sketch of the gradient of each trained parameter, by name; zeros where the loss does not reach it.

    `.grad` is as it was afterwards, and no accumulation hook runs (so a DistributedDataParallel around the module does
    not take notice), but for models with re-entrant checkpointing, which only know `backward`. There a parameter's
    gradient comes in parts, one for each checkpointed call and one for what runs outside.

    Args:
        loss: gives the loss.
        module: its parameters.
        by_backward: do not try without.
        again: whether `loss` may be called a second time if it turns out late that only `backward` will do.

    Raises:
        OnlyBackwardError: a second call would be needed; put back what the first one wrote, and set `by_backward`.
    """
    found: Sketches = {}

    def hook(name: str, index: int) -> Callable[[Tensor], Tensor | None]:
        def take(gradient: Tensor) -> Tensor | None:
            _add(found, name, sketch(gradient, index))
            # What autograd goes on with takes no memory.
            return None if gradient.is_sparse else gradient.new_zeros(()).expand(gradient.shape)

        return take

    with torch.enable_grad():
        value = loss()
        # Only now: the step may take gradients of its own, and switch parameters on and off.
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        handles = [p.register_hook(hook(name, index)) for index, (name, p) in enumerate(named)]  # type: ignore[no-untyped-call]
        try:
            if not _send_backward(value, [p for _, p in named], by_backward):
                del value
                if not again:
                    raise OnlyBackwardError
                found.clear()
                _send_backward(loss(), [p for _, p in named], True)
        finally:
            for handle in handles:
                handle.remove()
    return found | {name: no_gradient(p) for name, p in named if name not in found}


def _add(found: Sketches, name: str, part: Tensor) -> None:
    found[name] = found[name] + part if name in found else part


def no_gradient(parameter: Tensor) -> Tensor:
    """The sketch of zeros."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(min(_BUCKETS, parameter.numel()), dtype=dtype, device=parameter.device)


def _send_backward(value: Tensor, parameters: Sequence[nn.Parameter], by_backward: bool) -> bool:
    """Whether that went well; if not, nothing but `backward` will do."""
    if not value.requires_grad or not parameters:  # nothing that is trained takes part
        return True
    leaves, is_checkpointed = _look_through(value)
    # A hook on the loss may run a graph of its own, as where gradients are cached.
    is_apart = not {id(each) for each in leaves} & {id(each) for each in parameters}
    with _kept_gradients([*parameters, *leaves]):
        is_switched = not all(each.requires_grad for each in parameters)  # by the step, as where adapters take turns
        if by_backward or is_checkpointed or is_apart or is_switched:
            torch.autograd.backward(value)
            return True
        try:
            torch.autograd.grad(value, parameters, allow_unused=True)
        except RuntimeError as error:
            if "heckpoint" not in str(error):
                raise
            return False
    return True


def _look_through(value: Tensor) -> tuple[list[Tensor], bool]:
    """The leaves that a graph shows, and whether it has re-entrant checkpoints: those run a graph of their own."""
    leaves, is_checkpointed = [], False
    seen: set[Any] = set()
    waiting: list[Any] = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_checkpointed = is_checkpointed or "heckpoint" in node.name()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting.extend(each for each, _ in node.next_functions)
    return leaves, is_checkpointed


@contextmanager
def _kept_gradients(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Nothing is accumulated into `.grad` inside, at most one gradient at a time: some checkpoints do that unasked."""

    def drop(tensor: Tensor) -> None:
        tensor.grad = None

    unique = list({id(each): each for each in tensors}.values())
    before = [each.grad for each in unique]
    for each in unique:
        each.grad = None
    with_hook = [each for each in unique if each.requires_grad]
    handles = [each.register_post_accumulate_grad_hook(drop) for each in with_hook]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for each, gradient in zip(unique, before, strict=True):
            each.grad = gradient


def combine(parts: Sequence[Sketches], weights: Sequence[float]) -> Sketches:
    """The weighted sum of sketches of the same parameters."""
    pairs = list(zip(parts, weights, strict=True))
    return {name: torch.stack([part[name] * weight for part, weight in pairs]).sum(0) for name in parts[0]}


def difference(found: Sketches, wanted: Sketches, scales: Mapping[str, float]) -> tuple[float, str]:
    """The worst |found - wanted| / scale over all parameters, and the parameter where it is; nan stays nan."""
    worst = {
        name: float((found[name] - wanted[name]).abs().max()) / scales[name] for name in wanted if wanted[name].numel()
    }
    if not worst:
        return 0.0, ""
    name = max(worst, key=lambda each: math.inf if math.isnan(worst[each]) else worst[each])
    return worst[name], name


def scales(sizes: Mapping[str, float], limit: float) -> dict[str, float]:
    """What a difference of each parameter is held against, so that one `limit` is right for all.

    The largest gradient of all, since some gradients are zero but for rounding (key biases). But gradients of a part of
    the model can be small and wholly wrong, which an optimizer that divides by their size would not forgive: those
    above the noise are held against their own largest entry too, with a limit of their own.

    Args:
        sizes: largest absolute gradient of each parameter.
        limit: of the comparison, see `Tolerance`.
    """
    overall = max(sizes.values(), default=0.0) or 1.0
    tolerance = Tolerance(limit)
    return {
        name: min(overall, size * tolerance.own_limit / limit) if size > tolerance.noise * overall else overall
        for name, size in sizes.items()
    }


def sizes(sketches: Sketches) -> dict[str, float]:
    """Largest absolute value of each parameter's sketch."""
    return {name: float(each.abs().max()) if each.numel() else 0.0 for name, each in sketches.items()}


def largest(sketches: Mapping[str, Tensor]) -> float:
    """The largest absolute value; nan if there is one."""
    values = [float(each.abs().max()) for each in sketches.values() if each.numel()]
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)


def best_weights(parts: Sequence[Sketches], wanted: Sketches) -> list[float]:
    """Weights w, one for each part, for which the sum of w x part comes closest to `wanted` (least squares)."""
    matrix = torch.stack([_joined(part) for part in parts], dim=1)
    solution: Any = torch.linalg.lstsq(matrix, _joined(wanted)[:, None], driver="gelsd").solution
    return [float(weight) for weight in solution[:, 0]]


def _joined(sketches: Sketches) -> Tensor:
    return torch.cat([sketches[name].double().cpu() for name in sorted(sketches)])
