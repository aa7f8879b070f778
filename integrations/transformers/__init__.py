"""`PadMinTrainerMixin` for the Trainer of transformers and its subclasses."""

from lightning_padmin.integrations.transformers.trainer import PadMinTrainerMixin

__all__ = [
    "PadMinTrainerMixin",
]
