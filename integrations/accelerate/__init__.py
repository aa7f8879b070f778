"""`PadMin` for loops over Hugging Face Accelerate.

loop  the class, when gradients are reduced and DeepSpeed's engine steps
"""

from lightning_padmin.integrations.accelerate.loop import PadMin

__all__ = [
    "PadMin",
]
