"""`PadMinMixin` for TRL's trainers: GRPO, RLOO, SFT, DPO, Reward, KTO.

mixin     the class; it hands everything on to an engine
online    GRPO and RLOO: plans, modes, where a trainer is in its window
offline   SFT, DPO, Reward, KTO: backbones in chunks inside of their losses
window    the batches whose rows are planned together
passes    the training pass, chunk by chunk
logprobs  log-probs in chunks, put back (not by `forward.outputs`)
audits    which windows are looked at, and what these looks have seen
facets    what a window shows
check     does the loss separate over rows, does it read padding?
model_check  does the model compute a row in a chunk as alone?
support   what is refused
images    rows with images
hooks     TRL's private methods, compared with those that were checked
"""

from lightning_padmin.integrations.trl.mixin import PadMinGRPOTrainer, PadMinMixin, PadMinRLOOTrainer

__all__ = [
    "PadMinGRPOTrainer",
    "PadMinMixin",
    "PadMinRLOOTrainer",
]
