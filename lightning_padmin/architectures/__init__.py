"""What is known of a model before it runs: its modules, its configuration, its hooks, its code.

Some architectures mix rows or read padding by design, some hooks see gradients they must not see in parts. These are
found without a forward pass and refused by name; what only a pass can tell is found in `verification`.

    findings        families and modules that mix rows, need widths or lengths
    screening       which of these refuse, for a way of running the model
    noise           noise whose scale depends on the width
    gradient_hooks  hooks on gradients: accepted, watched or refused
    hook_reading, hook_source, hook_terms   what a hook does, from its source; it is never run
    loading         models for the command line, and batches to try them on
"""

from lightning_padmin.architectures.findings import (
    Finding,
    batch_statistics,
    has_experts,
    inspect_model,
    is_encoder_decoder,
    row_limit,
    scan_chunk,
    with_scan_chunk,
)
from lightning_padmin.architectures.gradient_hooks import HookWatch, reenters, without_user_hooks
from lightning_padmin.architectures.hook_reading import read_hook
from lightning_padmin.architectures.hook_source import name_of
from lightning_padmin.architectures.loading import (
    load_model,
    load_step,
    logits_of,
    packed_logits,
    random_batch,
    refuse_special_files,
    takes_positions,
    token_mean,
    vocabulary_of,
    why_not_loaded,
)
from lightning_padmin.architectures.noise import refuse_noise_of
from lightning_padmin.architectures.screening import Findings, Tolerable, refuse_batch_statistics, screen, words_of
from lightning_padmin.errors import ArchitectureError, GradientHookError, UsageError

__all__ = [
    "ArchitectureError",
    "Finding",
    "Findings",
    "GradientHookError",
    "HookWatch",
    "Tolerable",
    "UsageError",
    "batch_statistics",
    "has_experts",
    "inspect_model",
    "is_encoder_decoder",
    "load_model",
    "load_step",
    "logits_of",
    "name_of",
    "packed_logits",
    "random_batch",
    "read_hook",
    "reenters",
    "refuse_batch_statistics",
    "refuse_noise_of",
    "refuse_special_files",
    "row_limit",
    "scan_chunk",
    "screen",
    "takes_positions",
    "token_mean",
    "vocabulary_of",
    "why_not_loaded",
    "with_scan_chunk",
    "without_user_hooks",
    "words_of",
]
