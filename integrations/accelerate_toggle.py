"""The old path of `lightning_padmin.integrations.accelerate`."""

from lightning_padmin.integrations.accelerate import PadMin

__all__ = ["PadMin"]
