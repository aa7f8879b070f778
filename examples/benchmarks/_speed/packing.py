"""Rows one after the other in one long row: no padding, but the model must keep them apart.

Attention does if positions restart and there is neither mask nor cache, for then transformers builds a block-diagonal
mask. It is as large as the square of the pack, so kernels for variable lengths (or, on a CPU, one attention call per
document) are faster. Convolutions, scans and other recurrences run on over the border: they leak, and nothing says so.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .workload import IGNORED, Batch, Workload

VARLEN = "benchmark_varlen"
LEAKS = 1e-5  # above this it is no rounding in float32
_Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


def packed(workload: Workload) -> list[Batch]:
    """Packs of (1, n), n within the budget, filled first-fit with falling lengths.

    Position ids restart; the first label of each document is ignored, for it would be predicted from another one.
    """
    batch = workload.batch()
    packs: list[list[int]] = []
    filled: list[int] = []
    totals = workload.totals.tolist()
    for row in sorted(range(len(totals)), key=lambda row: -totals[row]):
        place = next((k for k, tokens in enumerate(filled) if tokens + totals[row] <= workload.budget), len(packs))
        if place == len(packs):
            packs.append([])
            filled.append(0)
        packs[place].append(row)
        filled[place] += totals[row]
    return [_join(batch, rows) for rows in packs]


def _join(batch: Batch, rows: list[int]) -> Batch:
    real = [batch["attention_mask"][row].bool() for row in rows]
    lengths = torch.tensor([int(mask.sum()) for mask in real], device=batch["input_ids"].device)
    labels = [batch["labels"][row][mask] for row, mask in zip(rows, real, strict=True)]
    for document in labels:
        document[0] = IGNORED
    borders = functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return {
        "input_ids": torch.cat([batch["input_ids"][row][mask] for row, mask in zip(rows, real, strict=True)])[None],
        "position_ids": torch.cat([torch.arange(int(n), device=lengths.device) for n in lengths])[None],
        "labels": torch.cat(labels)[None],
        "advantages": batch["advantages"][rows].repeat_interleave(lengths)[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }


@torch.no_grad()
def leak(model: PreTrainedModel, vocabulary: int) -> float:
    """How much the second document of a pack sees of the first: max|difference| / max|logits| against it alone.

    To be measured in float32: in bfloat16 the leak of a short convolution would pass for rounding.
    """
    device = next(model.parameters()).device
    first, second = (torch.randint(1, vocabulary, (1, n), device=device) for n in (24, 40))
    ids = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(24), torch.arange(40)])[None].to(device)
    together = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 24:]
    alone = model(input_ids=second, use_cache=False).logits
    return float((together - alone).abs().max() / alone.abs().max())


@contextmanager
def attention_by_document(model: PreTrainedModel) -> Iterator[None]:
    """While open, the model's attention takes documents from `cu_seq_lens_q`, with the fastest kernel at hand."""
    ALL_ATTENTION_FUNCTIONS.register(VARLEN, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(VARLEN, lambda *args, **options: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(VARLEN)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def kernel_name(model: PreTrainedModel) -> str:
    """Which kernel `attention_by_document` takes for this model where it is."""
    return _kernel(_is_fused(next(model.parameters())))[0]


def _is_fused(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16)


@functools.cache  # an import that fails is slow, and there is a call for every layer
def _kernel(fused: bool) -> tuple[str, _Kernel]:
    """Name and function: flash-attn, else PyTorch's own, else none that is fused."""
    if fused and importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_varlen_func

        return "flash_attn", lambda q, k, v, borders, longest, scale: flash_attn_varlen_func(
            q, k, v, borders, borders, longest, longest, softmax_scale=scale, causal=True
        )
    if fused and importlib.util.find_spec("torch.nn.attention.varlen"):
        from torch.nn.attention.varlen import varlen_attn

        windowed = "window_size" in inspect.signature(varlen_attn).parameters  # is_causal in its first releases
        causal = {"window_size": (-1, 0)} if windowed else {"is_causal": True}
        return "torch varlen_attn", lambda q, k, v, borders, longest, scale: varlen_attn(
            q, k, v, borders, borders, longest, longest, scale=scale, **causal
        )
    return "one call per document", _one_by_one


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float) -> Tensor:
    """What a kernel for variable lengths computes; (tokens, heads, size) in and out."""
    pieces = []
    ends = borders.tolist()
    for start, end in itertools.pairwise(ends):
        query, key, value = (tensor[start:end].transpose(0, 1)[None] for tensor in (q, k, v))
        made = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        pieces.append(made[0].transpose(0, 1))
    return torch.cat(pieces)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers: (1, heads, tokens, size) in, (1, tokens, heads, size) out."""
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    _, kernel = _kernel(_is_fused(query))
    made = kernel(q, k, v, options["cu_seq_lens_q"], options["max_length_q"], scaling)
    return made[None], None
