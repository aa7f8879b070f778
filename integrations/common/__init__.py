"""What the adapters share: the same for every framework, and of none.

An adapter asks for a `Session`, which it has for its whole life, and for a `Training` of each model, through which its
batches go. It keeps what differs: who calls backward, when gradients are zeroed, how micro-batches map to steps.

    session      options, counts, words to the user and to other ranks, the loop that is open
    training     one model: what is known of it, its batchers, the way of a batch
    audits       ledgers of what was audited, for metrics, checkpoints and the file of proof
    first_batch  which of the first batches are checked
    topology     how processes lie, and so when they meet
    trainers     what Trainers of transformers and of TRL have alike
    loops        `backward` of loops of the user's own: losses, and the checks of these
    shards       gradients of shards that wait to be reduced
    ways         from one way of running batches to the next
    two_ways     gradients of one loss in two ways
    plain        sizes of batches that nobody has given roles
    whole_steps  steps of Trainers as stock, with calls of models inside in chunks
    isolated     what a model gives for some rows by themselves
    deepspeed    several backward passes where DeepSpeed's engine expects one
    empty_loss   losses of 0/0 made a zero in the graph
    versions     releases, and private hooks that are not those that were checked
    backward     what a function would do to parts of gradients
"""

from lightning_padmin.architectures import Tolerable, refuse_batch_statistics, refuse_noise_of, screen
from lightning_padmin.integrations.common.audits import Audits as SessionAudits
from lightning_padmin.integrations.common.backward import acts_on_gradients, is_linear, reenters
from lightning_padmin.integrations.common.deepspeed import (
    accumulation_boundary,
    before_boundary,
    drop_gradients,
    find_engine,
    find_prepared,
)
from lightning_padmin.integrations.common.empty_loss import collected_outputs, defined, zero_of_parameters
from lightning_padmin.integrations.common.first_batch import MOST_BATCHES, FirstBatches
from lightning_padmin.integrations.common.isolated import Isolated, Seen, added
from lightning_padmin.integrations.common.loops import LossCheck, LossChecks, LossFunction, run_loop
from lightning_padmin.integrations.common.plain import plain_stats, slots_of
from lightning_padmin.integrations.common.session import Session
from lightning_padmin.integrations.common.shards import reducing
from lightning_padmin.integrations.common.topology import Kind, Topology, ddp_of, has_static_graph
from lightning_padmin.integrations.common.trainers import (
    StepState,
    backward_of_step,
    check_step,
    has_own_step,
    has_step_in_front,
    look_for_whole_steps,
    own_step,
    refuse_data_parallel,
    refuse_shared_batches,
    step_past_mixin,
    step_without_loss,
    topology_of,
    untouched_trainer,
)
from lightning_padmin.integrations.common.training import Read, Training
from lightning_padmin.integrations.common.two_ways import Apart, apart
from lightning_padmin.integrations.common.versions import check_hooks, release, what_changed
from lightning_padmin.integrations.common.ways import (
    BeforeStep,
    Ladder,
    Way,
    reason_of,
    stats_as_it_came,
    too_large,
    why_way_is_kept,
)
from lightning_padmin.integrations.common.whole_steps import Sites, WholeSteps, Words
from lightning_padmin.runtime import RandomState, Shared, replaced
from lightning_padmin.verification import Advice, Fingerprint, Ledger, OneLoss, Outcome, fingerprint, needs_rows
from lightning_padmin.verification import what_changed as new_in_loss

__all__ = [
    "MOST_BATCHES",
    "Advice",
    "Apart",
    "BeforeStep",
    "Fingerprint",
    "FirstBatches",
    "Isolated",
    "Kind",
    "Ladder",
    "Ledger",
    "LossCheck",
    "LossChecks",
    "LossFunction",
    "OneLoss",
    "Outcome",
    "RandomState",
    "Read",
    "Seen",
    "Session",
    "SessionAudits",
    "Shared",
    "Sites",
    "StepState",
    "Tolerable",
    "Topology",
    "Training",
    "Way",
    "WholeSteps",
    "Words",
    "accumulation_boundary",
    "acts_on_gradients",
    "added",
    "apart",
    "backward_of_step",
    "before_boundary",
    "check_hooks",
    "check_step",
    "collected_outputs",
    "ddp_of",
    "defined",
    "drop_gradients",
    "find_engine",
    "find_prepared",
    "fingerprint",
    "has_own_step",
    "has_static_graph",
    "has_step_in_front",
    "is_linear",
    "look_for_whole_steps",
    "needs_rows",
    "new_in_loss",
    "own_step",
    "plain_stats",
    "reason_of",
    "reducing",
    "reenters",
    "refuse_batch_statistics",
    "refuse_data_parallel",
    "refuse_noise_of",
    "refuse_shared_batches",
    "release",
    "replaced",
    "run_loop",
    "screen",
    "slots_of",
    "stats_as_it_came",
    "step_past_mixin",
    "step_without_loss",
    "too_large",
    "topology_of",
    "untouched_trainer",
    "what_changed",
    "why_way_is_kept",
    "zero_of_parameters",
]
