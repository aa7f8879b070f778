"""One policy update: a pass of the reference model without gradients, then forward and backward of the policy.

The loss is that of GRPO: clipped ratios times advantages, plus a divergence from the reference model, as a mean over
all tokens of all completions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from .methods import MicroBatches
from .workload import Batch, loss_tokens

_PACKS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_INPUTS = ("input_ids", "attention_mask", *_PACKS)
_BETA, _CLIP = 0.04, 0.2


def reference_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with weights that differ a little, so that the divergence is not zero."""
    reference = copy.deepcopy(model).requires_grad_(False)
    source = torch.Generator(device=next(reference.parameters()).device).manual_seed(1)
    for weight in reference.parameters():
        noise = torch.randn(weight.shape, generator=source, device=weight.device, dtype=torch.float32)
        weight.data += (0.002 * noise).to(weight.dtype)
    return reference


def log_probs(model: PreTrainedModel, micro: Batch) -> Tensor:
    """(B, L - 1) log-probability of each label; whatever where there is none."""
    inputs: dict[str, Any] = {name: micro[name] for name in _INPUTS if name in micro}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    wanted = micro["labels"][:, 1:].clamp(min=0)
    return -functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)


def loss_of(own: Tensor, reference: Tensor, micro: Batch) -> Tensor:
    """The mean over the loss tokens of one micro-batch."""
    carries = loss_tokens(micro)
    advantages = micro["advantages"]
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages[:, 1:]  # by row, or by token of a pack
    ratio = torch.exp(own - own.detach())
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantages)
    gap = reference - own
    divergence = torch.exp(gap) - gap - 1
    return ((_BETA * divergence - gain) * carries).sum() / carries.sum()


def policy_update(model: PreTrainedModel, reference: PreTrainedModel, micro_batches: MicroBatches) -> None:
    """Leaves the gradient of the whole batch on the model."""
    with torch.no_grad():
        theirs = [log_probs(reference, micro) for micro, _ in micro_batches]
    model.zero_grad(set_to_none=True)
    for (micro, weight), their in zip(micro_batches, theirs, strict=True):
        (loss_of(log_probs(model, micro), their, micro) * weight).backward()


def gradient(model: PreTrainedModel) -> list[Tensor]:
    """A copy of what is on the model."""
    return [weight.grad.float().clone() for weight in model.parameters() if weight.grad is not None]


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """max|difference| / max|gradient| over all parameters."""
    worst = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    return worst / max(float(b.abs().max()) for b in theirs)


def saved_bytes(model: PreTrainedModel, micro: Batch) -> int:
    """Bytes that the forward pass of one micro-batch keeps for its backward pass, each storage once."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}  # alive until the end, or an address could be used twice

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        own = log_probs(model, micro)
        loss_of(own, own.detach(), micro)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in weights)
