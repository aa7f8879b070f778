"""What the adapters share: the same for every framework, and of none.

An adapter asks for a `Session`, which it has for its whole life, and for a `Training` of each model, through which its
batches go. It keeps what differs: who calls backward, when gradients are zeroed, how micro-batches map to steps.

session     options, counts, words to the user and to other ranks, the loop that is open
training    one model: what is known of it, its batchers, the way of a batch
first_batch which of the first batches are checked
topology    how processes lie, and so when they meet
deepspeed   several backward passes where DeepSpeed's engine expects one
empty_loss  losses of 0/0 made a zero in the graph
versions    releases, and private hooks that are not those that were checked
backward    what a function would do to parts of gradients
"""

from lightning_padmin.integrations.common.backward import acts_on_gradients, reenters
from lightning_padmin.integrations.common.deepspeed import accumulation_boundary, find_engine
from lightning_padmin.integrations.common.empty_loss import collected_outputs, defined, zero_of_parameters
from lightning_padmin.integrations.common.first_batch import FirstBatches
from lightning_padmin.integrations.common.session import Session
from lightning_padmin.integrations.common.topology import Kind, Topology, ddp_of, has_static_graph
from lightning_padmin.integrations.common.training import Read, Training
from lightning_padmin.integrations.common.versions import check_hooks, release, what_changed
from lightning_padmin.runtime import replaced
from lightning_padmin.verification import Advice, Outcome, needs_rows

__all__ = [
    "Advice",
    "FirstBatches",
    "Kind",
    "Outcome",
    "Read",
    "Session",
    "Topology",
    "Training",
    "accumulation_boundary",
    "acts_on_gradients",
    "check_hooks",
    "collected_outputs",
    "ddp_of",
    "defined",
    "find_engine",
    "has_static_graph",
    "needs_rows",
    "reenters",
    "release",
    "replaced",
    "what_changed",
    "zero_of_parameters",
]
