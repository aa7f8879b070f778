"""`PadMinCallback` for PyTorch Lightning's `Trainer`."""

from lightning_padmin.integrations.lightning.callback import PadMinCallback

__all__ = [
    "PadMinCallback",
]
