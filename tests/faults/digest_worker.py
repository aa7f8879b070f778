"""Prints digests of plans, gathered tensors and gradients, which no process may compute otherwise: `... SEED`."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_padmin import MicroBatcher, PadMinConfig, compact, iter_micro_batches
from lightning_padmin.batch.tree import iter_leaves

CONFIG = PadMinConfig(
    token_budget=40, launch_cost=3, pad_to_multiple_of=2, pad_token_id=0, batch_schema={"weight_of": "row"}
)
ROWS = 24


def batch(seed: int) -> dict[str, Any]:
    """Nested, with names, sets of rows that tie in length, and rows without loss."""
    source = torch.Generator().manual_seed(seed)
    length = torch.randint(1, 12, (ROWS,), generator=source)
    start = torch.randint(0, 3, (ROWS,), generator=source)
    column = torch.arange(14)
    mask = (column >= start[:, None]) & (column < (start + length)[:, None])
    ids = torch.randint(1, 30, mask.shape, generator=source) * mask
    labels = torch.where(mask & (column > start[:, None]), ids, -100)
    labels[::5] = -100
    return {
        "input_ids": ids,
        "inner": {"attention_mask": mask, "names": [f"row {k}" for k in range(ROWS)]},
        "labels": labels,
        "weight_of": torch.rand(ROWS, generator=source),
        "temperature": 0.7,
    }


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.drop, self.head = nn.Embedding(30, 8), nn.Dropout(0.2), nn.Linear(8, 30)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.drop(self.embedding(ids)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def of(*values: Any) -> str:
    """A digest of tensors, arrays and whatever prints the same."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(np.asarray(value).tobytes() if isinstance(value, Tensor | np.ndarray) else repr(value).encode())
    return digest.hexdigest()


def digests(made: Any) -> dict[str, str]:
    """Plan, weights, gathered entries (paths, values, order), the batch made compact, gradients with dropout."""
    planned = MicroBatcher(CONFIG).prepare(made)
    leaves = [each for micro in planned for each in iter_leaves(micro.batch)]
    model = Model()
    for micro, weight in iter_micro_batches(made, CONFIG):
        loss = model(micro["input_ids"], micro["labels"])
        if torch.isfinite(loss):
            (loss * weight).backward()
    return {
        "plan": of(*planned.plan.groups, planned.plan.widths),
        "weights": of(planned.weights),
        "entries": of(*[part for leaf in leaves for part in leaf]),
        "compact": of(*[part for leaf in iter_leaves(compact(made, CONFIG).batch) for part in leaf]),
        "gradients": of(*[p.grad for p in model.parameters()]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, value in digests(batch(int(sys.argv[1]))).items():
        print(name, value)
    print("order of a set", list({f"key {k}" for k in range(20)}))  # what does depend on the hash seed
