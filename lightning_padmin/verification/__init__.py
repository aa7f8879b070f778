"""Does training stay the same? Measured on the user's own model, step and data.

Declarations and families (see `architectures`) are not proofs. Here the step itself is run on a few rows, together,
apart and alone, and gradients are compared; what differs is explained in words that name the declaration or module to
change.

    gradient_check  the first-batch check
    passes          how its passes are run, alone or under sharding
    probe           which rows and what padding it runs on
    padding         whether a step reads outputs where rows have padding
    sketch          gradients compared without a copy of them
    noise           how far apart rounding is, in half precision
    compare         how far apart is the same
    explain         findings in words
    leak            whether a model keeps packed rows apart, and who may pack
    made_with       what a proof of packs was made with
    pack_check      the check of the step on packs
    one_loss        a trainer's own step, watched
    equivalence     `verify_equivalence`, for the command line and for tests
"""

from lightning_padmin.errors import OnlyBackwardError
from lightning_padmin.verification.compare import Tolerance, dtypes_of, relative_difference
from lightning_padmin.verification.equivalence import Report, verify_equivalence
from lightning_padmin.verification.gradient_check import Advice, Outcome, check_gradients
from lightning_padmin.verification.leak import PackGate, gate_of, needs_rows, refuse_unproven
from lightning_padmin.verification.one_loss import OneLoss, own_backward, step_of
from lightning_padmin.verification.pack_check import PackCheck
from lightning_padmin.verification.passes import difference_over_ranks, sketched_shards
from lightning_padmin.verification.sketch import (
    Sketches,
    difference,
    scales,
    sizes,
    sketched_gradients,
)

__all__ = [
    "Advice",
    "OneLoss",
    "OnlyBackwardError",
    "Outcome",
    "PackCheck",
    "PackGate",
    "Report",
    "Sketches",
    "Tolerance",
    "check_gradients",
    "difference",
    "difference_over_ranks",
    "dtypes_of",
    "gate_of",
    "needs_rows",
    "own_backward",
    "refuse_unproven",
    "relative_difference",
    "scales",
    "sizes",
    "sketched_gradients",
    "sketched_shards",
    "step_of",
    "verify_equivalence",
]
