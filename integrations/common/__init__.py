"""What the adapters share: the same for every framework, and of none.

An adapter asks for a `Session`, which it has for its whole life, and for a `Training` of each model, through which its
batches go. It keeps what differs: who calls backward, when gradients are zeroed, how micro-batches map to steps.

session     options, counts, words to the user and to other ranks, the loop that is open
training    one model: what is known of it, its batchers, the way of a batch
topology    how processes lie, and so when they meet
deepspeed   several backward passes where DeepSpeed's engine expects one
empty_loss  losses of 0/0 made a zero in the graph
versions    releases, and private hooks that are not those that were checked
"""

from lightning_padmin.integrations.common.deepspeed import accumulation_boundary, find_engine
from lightning_padmin.integrations.common.empty_loss import collected_outputs, defined, zero_of_parameters
from lightning_padmin.integrations.common.session import Session
from lightning_padmin.integrations.common.topology import Kind, Topology, ddp_of, has_static_graph
from lightning_padmin.integrations.common.training import Training
from lightning_padmin.integrations.common.versions import check_hooks, release, what_changed

__all__ = [
    "Kind",
    "Session",
    "Topology",
    "Training",
    "accumulation_boundary",
    "check_hooks",
    "collected_outputs",
    "ddp_of",
    "defined",
    "find_engine",
    "has_static_graph",
    "release",
    "what_changed",
    "zero_of_parameters",
]
