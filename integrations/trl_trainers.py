"""The old path of `lightning_padmin.integrations.trl`."""

from lightning_padmin.integrations.trl import PadMinMixin

__all__ = ["PadMinMixin"]
