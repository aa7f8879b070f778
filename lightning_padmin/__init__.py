"""lightning-padmin: padding removed before tensors reach the model, with the gradients of the un-split batch.

The path of a batch, one room per step; a room imports only rooms above it in this list, and only through its door:

    printing, errors        text of others as a terminal may show it; every error, warning and code
    runtime                 state that a pass may change, put back; things said once
    batch                   which entry holds rows, positions, units; where each row's tokens are, what it weighs
    planning                which rows go together, at what width
    config                  the options, and where they were found
    distributed, stats      ranks agree, or all raise; counts of padding
    architectures, sampler  what is known of a model before it runs; batches of similar lengths
    microbatching           the steps in order: `MicroBatcher.prepare(batch)`
    verification            does training stay the same? measured
    forward                 the model call in chunks
    diagnose, run, cli      what padding costs on your data; other people's scripts; the command line
    integrations            one folder per framework
"""

from typing import TYPE_CHECKING, Any

from lightning_padmin import _moved
from lightning_padmin._version import __version__ as __version__
from lightning_padmin.batch import Field
from lightning_padmin.config import PadMinArguments, PadMinConfig
from lightning_padmin.errors import PadMinError, PadMinWarning
from lightning_padmin.forward import PaddedForward
from lightning_padmin.microbatching import (
    MicroBatch,
    MicroBatcher,
    MicroBatches,
    compact,
    iter_micro_batches,
    sync_on_last,
)
from lightning_padmin.planning import Plan, plan_micro_batches
from lightning_padmin.sampler import LengthBucketBatchSampler
from lightning_padmin.stats import PaddingStats
from lightning_padmin.verification import Report, verify_equivalence

if TYPE_CHECKING:
    from lightning_padmin.integrations.lightning import PadMinCallback

_moved.install()

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
    from lightning_padmin.integrations.lightning import PadMinCallback

    return PadMinCallback
