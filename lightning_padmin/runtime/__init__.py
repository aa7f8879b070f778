"""Python and torch as a program finds them: state that a pass may change, put back afterwards.

A check or a replay runs the user's own model more often than training does. Whatever such a pass writes - buffers,
random states, counters in objects of the user - must be as it was when it ends. No other room knows how; this one
knows nothing of batches, losses or frameworks.

    isolation  the context managers that others use
    keeper     which objects are looked at, and how each kind is put back
    notices    what the user is told: once, and at a line of the user's own
    writes     memory copied at the first write into it
"""

from lightning_padmin.runtime.isolation import (
    DATA_OF_TRAINERS,
    AttributeState,
    ModuleState,
    holders_of,
    random_states,
    same_random_states,
    untouched,
    without_dropout,
)
from lightning_padmin.runtime.notices import How, Notices, warn

__all__ = [
    "DATA_OF_TRAINERS",
    "AttributeState",
    "How",
    "ModuleState",
    "Notices",
    "holders_of",
    "random_states",
    "same_random_states",
    "untouched",
    "warn",
    "without_dropout",
]
