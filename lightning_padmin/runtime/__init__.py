"""Python and torch as a program finds them: state that a pass may change, put back afterwards.

A check or a replay runs the user's own model more often than training does. Whatever such a pass writes - buffers,
random states, counters in objects of the user - must be as it was when it ends. No other room knows how; this one
knows nothing of batches, losses or frameworks.

    isolation     the context managers that others use
    autocast      left out, wherever it is entered
    keeper        which objects are looked at, and how each kind is put back
    changes       what differs, by name
    writes        memory copied at the first write into it
    random_state  random generators put back
    padding       what stands in slots of outputs that are padding
    draws         random numbers that depend on the row alone
    patching      attributes replaced for a while
    wrappers      what lies inside of them, and what a function takes
    notices       what the user is told: once, and at a line of the user's own
"""

from lightning_padmin.runtime.autocast import without_autocast
from lightning_padmin.runtime.changes import MISSING, Change
from lightning_padmin.runtime.draws import Draws
from lightning_padmin.runtime.isolation import (
    DATA_OF_TRAINERS,
    AttributeState,
    ModuleState,
    attention_inside,
    holders_of,
    untouched,
    without_dropout,
)
from lightning_padmin.runtime.keeper import is_library
from lightning_padmin.runtime.notices import How, Notices, warn
from lightning_padmin.runtime.padding import is_padding_filled, padding_filled
from lightning_padmin.runtime.patching import Shared, replaced
from lightning_padmin.runtime.random_state import RandomState
from lightning_padmin.runtime.wrappers import layers, shards, takes, unwrap, without_adapters
from lightning_padmin.runtime.writes import is_freed

__all__ = [
    "DATA_OF_TRAINERS",
    "MISSING",
    "AttributeState",
    "Change",
    "Draws",
    "How",
    "ModuleState",
    "Notices",
    "RandomState",
    "Shared",
    "attention_inside",
    "holders_of",
    "is_freed",
    "is_library",
    "is_padding_filled",
    "layers",
    "padding_filled",
    "replaced",
    "shards",
    "takes",
    "untouched",
    "unwrap",
    "warn",
    "without_adapters",
    "without_autocast",
    "without_dropout",
]
