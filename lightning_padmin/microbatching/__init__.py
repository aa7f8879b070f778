"""A batch becomes micro-batches whose weighted losses add up to the batch's own.

The middle of the path: schema and row table come in, a plan is made, ranks agree on the number of micro-batches, each
is gathered straight from the caller's batch through one index map, and the weights make the gradient that of the un-
split batch.

    batcher        the steps in order: `MicroBatcher.prepare(batch)`
    api            the same as functions
    micro_batches  the result, iterated once
    reading        flatten, infer, measure
    planned        a planned batch: what ranks are told of it, and what it becomes
    layouts        padding, packing and bounded shapes, behind one protocol
    padded_layout  index maps of padded micro-batches
    packed_layout  index maps of packed ones
    agreement      what ranks tell each other of their batches
    weights        what each micro-batch counts
    pack_policy    who decides whether rows are packed
    memory         a batch that ran out of memory is planned again
    loop_guard     loops of one's own that leave out a micro-batch
    timing         what a launch costs, measured
"""

from lightning_padmin.errors import OutOfMemoryError
from lightning_padmin.microbatching.api import CompactBatch, compact, iter_micro_batches
from lightning_padmin.microbatching.batcher import MicroBatcher
from lightning_padmin.microbatching.loop_guard import LoopGuard
from lightning_padmin.microbatching.memory import MemoryGuard
from lightning_padmin.microbatching.micro_batches import MicroBatch, MicroBatches, sync_on_last
from lightning_padmin.microbatching.pack_policy import PackPolicy
from lightning_padmin.microbatching.packed_layout import PackMap, PackStyle, pack_layout
from lightning_padmin.microbatching.padded_layout import SlotMap, pad_layout

__all__ = [
    "CompactBatch",
    "LoopGuard",
    "MemoryGuard",
    "MicroBatch",
    "MicroBatcher",
    "MicroBatches",
    "OutOfMemoryError",
    "PackMap",
    "PackPolicy",
    "PackStyle",
    "SlotMap",
    "compact",
    "iter_micro_batches",
    "pack_layout",
    "pad_layout",
    "sync_on_last",
]
