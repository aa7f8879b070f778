"""`PadMinCallback` for PyTorch Lightning's `Trainer`.

callback   the callback: options, life of a fit, metrics
loop       the optimization loops that stand in for Lightning's; its private methods
check      the first-batch check on a `training_step`
log_merge  what a step logs in parts, merged to what it would have logged
supported  what is refused
"""

from lightning_padmin.integrations.lightning.callback import PadMinCallback

__all__ = [
    "PadMinCallback",
]
