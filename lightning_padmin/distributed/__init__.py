"""What ranks tell each other: the room that runs collectives.

Ranks must take the same decisions or all end. The few things they have to agree on per batch go through one all-
gather of integers; what one of them dies of goes through connections and a store that need no collective.

    collectives   exchanges of integers, boards, errors raised together, words about ended ranks
    peers         a rank that ends is heard of at once, with its reason
    announcement  options compared before the first batch
"""

from lightning_padmin.distributed.announcement import PATIENCE_OF_LOOPS, Announcement, announce
from lightning_padmin.distributed.collectives import (
    Board,
    Exchange,
    agree,
    all_gather_floats,
    as_floats,
    as_integer,
    board_alone,
    board_of_all,
    exchange_all,
    exchange_alone,
    exchange_at_end,
    explain,
    forget_last_words,
    go_on,
    group_store,
    heard_of_others,
    is_broken_connection,
    last_words,
    peer_watch,
    raise_together,
    telling_others,
    together,
    world_size,
)

__all__ = [
    "PATIENCE_OF_LOOPS",
    "Announcement",
    "Board",
    "Exchange",
    "agree",
    "all_gather_floats",
    "announce",
    "as_floats",
    "as_integer",
    "board_alone",
    "board_of_all",
    "exchange_all",
    "exchange_alone",
    "exchange_at_end",
    "explain",
    "forget_last_words",
    "go_on",
    "group_store",
    "heard_of_others",
    "is_broken_connection",
    "last_words",
    "peer_watch",
    "raise_together",
    "telling_others",
    "together",
    "world_size",
]
