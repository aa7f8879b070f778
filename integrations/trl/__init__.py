"""`PadMinMixin` for TRL's trainers: GRPO, RLOO, SFT, DPO, Reward, KTO."""

from lightning_padmin.integrations.trl.mixin import PadMinGRPOTrainer, PadMinMixin, PadMinRLOOTrainer

__all__ = [
    "PadMinGRPOTrainer",
    "PadMinMixin",
    "PadMinRLOOTrainer",
]
