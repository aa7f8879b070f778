"""`PadMinTrainerMixin` for the Trainer of transformers and its subclasses.

trainer  the class
"""

from lightning_padmin.integrations.transformers.trainer import PadMinTrainerMixin

__all__ = [
    "PadMinTrainerMixin",
]
