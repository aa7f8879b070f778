"""The peak of what a step allocates, above what is there before it: weights and the caller's batches."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn


def peak(work: Callable[[], object], model: nn.Module) -> int:
    """Bytes; activations, gradients, micro-batches and what kernels take meanwhile. Gradients are dropped before."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return int(torch.cuda.max_memory_allocated() - before)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    return int(torch.tensor([size for _, size in changes] or [0]).cumsum(0).max())


def notices(size: int = 4_000_000) -> bool:
    """Whether the measurement sees a tensor that comes and goes, and another one only once."""

    def work() -> Tensor:
        for _ in range(3):
            torch.empty(size, dtype=torch.uint8).fill_(1)
        return torch.zeros(size // 2, dtype=torch.uint8)

    return size <= peak(work, nn.Module()) < 1.5 * size
