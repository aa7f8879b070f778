"""What the adapters share: the same for every framework, and of none."""

from lightning_padmin.integrations.common.deepspeed import accumulation_boundary, find_engine

__all__ = [
    "accumulation_boundary",
    "find_engine",
]
