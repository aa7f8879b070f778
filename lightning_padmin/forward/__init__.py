"""The model call in chunks: outputs of the whole batch from micro-batches, for losses that need all rows.

Where a loss couples rows, the batch cannot be split before it. Here the model is called on micro-batches, its outputs
are put together as the caller's batch would have given them, and one backward pass runs through all of it.

    padded_forward  `PaddedForward`, a function in the place of a model
    outputs         outputs put together, entry by entry
    kept_logits     models that return logits of the last positions only
    causal_loss     losses that the model itself computes from labels
    proxy           modules of a training step replaced while it runs
"""

from lightning_padmin.forward.outputs import tensors
from lightning_padmin.forward.padded_forward import PaddedForward
from lightning_padmin.forward.proxy import Calls, Forwards, chunked, transformers_models

__all__ = [
    "Calls",
    "Forwards",
    "PaddedForward",
    "chunked",
    "tensors",
    "transformers_models",
]
