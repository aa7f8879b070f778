"""`PadMin` for loops over Hugging Face Accelerate."""

from lightning_padmin.integrations.accelerate.loop import PadMin

__all__ = [
    "PadMin",
]
