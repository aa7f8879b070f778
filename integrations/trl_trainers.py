"""The old path of `lightning_padmin.integrations.trl`."""

from lightning_padmin.integrations.trl import PadMinGRPOTrainer, PadMinMixin, PadMinRLOOTrainer

__all__ = ["PadMinGRPOTrainer", "PadMinMixin", "PadMinRLOOTrainer"]
