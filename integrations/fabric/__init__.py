"""`FabricPadMin` for loops over Lightning Fabric.

loop  the class, and when gradients are reduced
"""

from lightning_padmin.integrations.common import LossFunction
from lightning_padmin.integrations.fabric.loop import FabricPadMin, micro_batched_backward

__all__ = [
    "FabricPadMin",
    "LossFunction",
    "micro_batched_backward",
]
