"""What processes that are started anew have to import by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_padmin import MicroBatcher, PadMinConfig, compact


def rows_weigh_their_length(batch: Any) -> Tensor:
    return batch["attention_mask"].sum(1)


def plan_of(batch: Any, config: PadMinConfig) -> tuple[list[list[int]], list[float]]:
    prepared = MicroBatcher(config).prepare(batch)
    return [group.tolist() for group in prepared.plan.groups], prepared.weights.tolist()


def in_a_new_process(queue: Any, batch: Any, config: PadMinConfig, callback: Any) -> None:
    queue.put((config, callback.config, callback.stats, plan_of(batch, config), plan_of(batch, callback.config)))


class Collate:
    """Rows padded to `width`, then rolled and trimmed by the library inside of the loader's process."""

    def __init__(self, config: PadMinConfig) -> None:
        self.config = config

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        compacted: dict[str, Tensor] = compact(batch, self.config).batch
        return compacted
