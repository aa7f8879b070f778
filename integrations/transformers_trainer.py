"""The old path of `lightning_padmin.integrations.transformers`."""

from lightning_padmin.integrations.transformers import PadMinTrainerMixin

__all__ = ["PadMinTrainerMixin"]
