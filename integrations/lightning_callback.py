"""The old path of `lightning_padmin.integrations.lightning`."""

from lightning_padmin.integrations.lightning import PadMinCallback

__all__ = ["PadMinCallback"]
