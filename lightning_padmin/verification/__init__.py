"""Does training stay the same? Measured on the user's own model, step and data.

Declarations and families (see `architectures`) are not proofs. Here the step itself is run on a few rows, together,
apart and alone, and gradients are compared; what differs is explained in words that name the declaration or module to
change.

    gradient_check  the check of one batch
    passes          how its passes are run, alone or under sharding
    rows            which rows it runs on
    probe           and in which ways
    agreed_probe    as many on all ranks
    writes          what a step writes once per call
    padding         whether a step reads outputs where rows have padding
    sketch          gradients compared without a copy of them
    noise           how far apart rounding is, in half precision
    compare         how far apart is the same
    column_check    numbers of columns that nobody has declared
    explain         what a check tries, and what it may find
    words           findings as sentences
    leak            whether a model keeps packed rows apart, and who may pack
    made_with       what a proof of packs was made with
    pack_check      the check of the step on packs
    one_loss        a trainer's own step, watched
    facets          what a batch shows, so that a proof holds for no more than that
    ledger          what was shown to checks, and when the next one is due
    proof           a file with a line for each of them
    fingerprints    what kind of loss a batch had, told from its autograd graph
    equivalence     `verify_equivalence`, for the command line and for tests
"""

from lightning_padmin.errors import OnlyBackwardError
from lightning_padmin.verification.compare import Tolerance, dtypes_of, relative_difference
from lightning_padmin.verification.equivalence import Report, verify_equivalence
from lightning_padmin.verification.facets import (
    Values,
    batch_facets,
    model_facets,
    parts_of,
    plain_facets,
    reasons,
    row_facets,
)
from lightning_padmin.verification.fingerprints import Fact, Fingerprint, fingerprint, what_changed
from lightning_padmin.verification.gradient_check import (
    Advice,
    Outcome,
    check_gradients,
    is_from_check,
    was_raised_in_check,
)
from lightning_padmin.verification.leak import PackGate, gate_of, needs_rows, refuse_unproven
from lightning_padmin.verification.ledger import MOST_FACETS, WAYS, Ledger
from lightning_padmin.verification.noise import FACTOR, is_doubtful, narrowed_limit
from lightning_padmin.verification.one_loss import OneLoss, own_backward, step_of
from lightning_padmin.verification.pack_check import PackCheck
from lightning_padmin.verification.padding import GRADIENTS, STILL, Heard, Logged, filled, moved
from lightning_padmin.verification.passes import difference_over_ranks, sketched_shards
from lightning_padmin.verification.proof import Proof
from lightning_padmin.verification.sketch import (
    Sketches,
    difference,
    largest,
    scales,
    sizes,
    sketched_gradients,
)
from lightning_padmin.verification.writes import States, advanced, may_have_advanced, states
from lightning_padmin.verification.writes import named as named_paths

__all__ = [
    "FACTOR",
    "GRADIENTS",
    "MOST_FACETS",
    "STILL",
    "WAYS",
    "Advice",
    "Fact",
    "Fingerprint",
    "Heard",
    "Ledger",
    "Logged",
    "OneLoss",
    "OnlyBackwardError",
    "Outcome",
    "PackCheck",
    "PackGate",
    "Proof",
    "Report",
    "Sketches",
    "States",
    "Tolerance",
    "Values",
    "advanced",
    "batch_facets",
    "check_gradients",
    "difference",
    "difference_over_ranks",
    "dtypes_of",
    "filled",
    "fingerprint",
    "gate_of",
    "is_doubtful",
    "is_from_check",
    "largest",
    "may_have_advanced",
    "model_facets",
    "moved",
    "named_paths",
    "narrowed_limit",
    "needs_rows",
    "own_backward",
    "parts_of",
    "plain_facets",
    "reasons",
    "refuse_unproven",
    "relative_difference",
    "row_facets",
    "scales",
    "sizes",
    "sketched_gradients",
    "sketched_shards",
    "states",
    "step_of",
    "verify_equivalence",
    "was_raised_in_check",
    "what_changed",
]
