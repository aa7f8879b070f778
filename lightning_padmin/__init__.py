"""lightning-padmin: padding removed before tensors reach the model, with the gradients of the un-split batch.

The path of a batch, one module per step:

    schema       which entry holds rows, positions, units, or is shared
    rows         where each row's real tokens are and what it weighs in the loss (one device-to-host copy)
    planner      which rows go together, at what width
    distributed  all ranks agree on the number of micro-batches, or all raise
    layout       each micro-batch gathered straight from the caller's batch, outputs put back
    microbatch   the steps above in order: `MicroBatcher.prepare(batch)`
"""

from typing import TYPE_CHECKING, Any

from lightning_padmin.arguments import PadMinArguments
from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import PadMinError, PadMinWarning
from lightning_padmin.microbatch import (
    MicroBatch,
    MicroBatcher,
    MicroBatches,
    compact,
    iter_micro_batches,
    sync_on_last,
)
from lightning_padmin.padded_forward import PaddedForward
from lightning_padmin.plan import Plan
from lightning_padmin.planner import plan_micro_batches
from lightning_padmin.sampler import LengthBucketBatchSampler
from lightning_padmin.schema import Field
from lightning_padmin.stats import PaddingStats
from lightning_padmin.verify import Report, verify_equivalence

if TYPE_CHECKING:
    from lightning_padmin.integrations.lightning_callback import PadMinCallback

__version__ = "0.1.0"

__all__ = [
    "Field",
    "LengthBucketBatchSampler",
    "MicroBatch",
    "MicroBatcher",
    "MicroBatches",
    "PadMinArguments",
    "PadMinCallback",
    "PadMinConfig",
    "PadMinError",
    "PadMinWarning",
    "PaddedForward",
    "PaddingStats",
    "Plan",
    "Report",
    "compact",
    "iter_micro_batches",
    "plan_micro_batches",
    "sync_on_last",
    "verify_equivalence",
]


def __getattr__(name: str) -> Any:
    # The core needs torch and numpy only; the callback is loaded when it is asked for.
    if name != "PadMinCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_padmin.integrations.lightning_callback import PadMinCallback

    return PadMinCallback
