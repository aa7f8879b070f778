"""Where modules were before they had rooms: old paths, in programs and in pickles, lead to the modules of today.

Importing an old path gives the very module that lies elsewhere now, with a `DeprecationWarning` that names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ROOMS = {
    "runtime": {
        "isolation": "isolation",
        "keeper": "keeper",
        "writes": "writes",
    },
    "batch": {
        "tree": "tree",
        "fields": "fields",
        "schema": "schema",
        "shapes": "validate",
        "units": "units",
        "rows": "row_table",
        "columns": "columns",
        "pool": "pooling",
    },
    "planning": {
        "plan": "plan",
        "planner": "planner",
        "plan_inputs": "inputs",
        "search": "search",
        "shape_set": "shape_buckets",
        "pack_planner": "packs",
        "fit": "cost_fit",
    },
    "config": {
        "arguments": "arguments",
        "wording": "wording",
    },
    "distributed": {
        "peers": "peers",
        "announce": "announcement",
    },
    "architectures": {
        "guards": "findings",
        "noise": "noise",
        "loading": "loading",
        "gradient_hooks": "gradient_hooks",
        "hook_reading": "hook_reading",
        "hook_source": "hook_source",
        "hook_terms": "hook_terms",
    },
    "microbatching": {
        "sequence": "micro_batches",
        "layout": "padded_layout",
        "pack_layout": "packed_layout",
        "memory": "memory",
        "loops": "loop_guard",
        "launch_meter": "timing",
    },
    "verification": {
        "gradient_check": "gradient_check",
        "gradient_passes": "passes",
        "probe": "probe",
        "sketch": "sketch",
        "check_words": "explain",
        "packing": "leak",
        "pack_check": "pack_check",
        "one_loss": "one_loss",
        "verify": "equivalence",
    },
    "forward": {
        "padded_forward": "padded_forward",
        "assemble": "outputs",
        "kept_logits": "kept_logits",
        "model_proxy": "proxy",
        "causal_loss": "causal_loss",
    },
    "cli": {
        "launch": "launch",
    },
    "integrations.common": {
        "deepspeed_boundary": "deepspeed",
    },
    "integrations.lightning": {
        "lightning_check": "check",
        "lightning_loop": "loop",
        "lightning_merge": "log_merge",
    },
    "integrations.trl": {
        "trl_engine": "online",
        "trl_offline": "offline",
        "trl_window": "window",
        "trl_passes": "passes",
        "trl_logprobs": "logprobs",
        "trl_images": "images",
        "trl_check": "check",
        "trl_refusals": "support",
        "trl_stock": "hooks",
    },
}
MOVED = {
    f"lightning_padmin.{'integrations.' * room.startswith('integrations.')}{old}": f"lightning_padmin.{room}.{new}"
    for room, modules in _ROOMS.items()
    for old, new in modules.items()
} | {  # several modules now: the room's door has what was in them
    "lightning_padmin.environment": "lightning_padmin.config",
    "lightning_padmin.microbatch": "lightning_padmin.microbatching",
}


class _ToNewPlace(MetaPathFinder, Loader):
    """Finds the old names, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__  # the import system is about to write its own in there
        warnings.warn(
            f"{spec.name} is {module.__name__} now; the old path goes with 0.3", DeprecationWarning, stacklevel=2
        )
        return module

    def exec_module(self, module: ModuleType) -> None:
        old = module.__spec__
        assert old is not None
        module.__spec__ = old.loader_state


def install() -> None:
    """Has old paths found; once per process."""
    if not any(type(finder).__name__ == _ToNewPlace.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _ToNewPlace())
