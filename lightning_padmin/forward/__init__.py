"""The model call in chunks: outputs of the whole batch from micro-batches, for losses that need all rows.

Where a loss couples rows, the batch cannot be split before it. Here the model is called on micro-batches, its outputs
are put together as the caller's batch would have given them, and one backward pass runs through all of it.

    padded_forward  `PaddedForward`, a function in the place of a model
    outputs         outputs put together, entry by entry
    kept_logits     models that return logits of the last positions only
    causal_loss     losses that the model itself computes from labels
    calls           which modules have calls that can run in chunks, and what says what is padding in them
    arguments       what the entries of a call are
    places          where outputs of any module have rows and positions
    any_module      calls of a module that nobody knows
    recompute       chunks that run again in the backward pass, in place of what they would keep
    proxy           modules of a training step replaced while it runs
"""

from lightning_padmin.forward.calls import CallSite, call_sites, transformers_models
from lightning_padmin.forward.outputs import tensors
from lightning_padmin.forward.padded_forward import PaddedForward
from lightning_padmin.forward.proxy import Calls, Forwards, chunked

__all__ = [
    "CallSite",
    "Calls",
    "Forwards",
    "PaddedForward",
    "call_sites",
    "chunked",
    "tensors",
    "transformers_models",
]
