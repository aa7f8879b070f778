"""`PadMinTrainerMixin` for the Trainer of transformers and its subclasses."""

from lightning_padmin.integrations.transformers.mixin import PadMinTrainerMixin

__all__ = [
    "PadMinTrainerMixin",
]
