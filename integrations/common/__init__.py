"""What the adapters share: the same for every framework, and of none.

deepspeed   several backward passes where DeepSpeed's engine expects one
empty_loss  losses of 0/0 made a zero in the graph
versions    releases, and private hooks that are not those that were checked
"""

from lightning_padmin.integrations.common.deepspeed import accumulation_boundary, find_engine
from lightning_padmin.integrations.common.empty_loss import collected_outputs, defined, zero_of_parameters
from lightning_padmin.integrations.common.versions import check_hooks, release, what_changed

__all__ = [
    "accumulation_boundary",
    "check_hooks",
    "collected_outputs",
    "defined",
    "find_engine",
    "release",
    "what_changed",
    "zero_of_parameters",
]
