"""Writes `public_names.json`, the list of what users import, from the code as it is: `python tests/public_names.py`.

Run it when a name is added on purpose. Names and pickles that are in the list already stay in it, so that nothing
disappears unnoticed: take a line out by hand to give a name up.
"""

from __future__ import annotations

import ast
import base64
import importlib
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("public_names.json")
# Modules that people import from: the public ones, and those whose classes reach them in errors, reports and pickles.
MODULES = (
    *("arguments", "cli", "config", "distributed", "environment", "errors", "fields", "gradient_hooks", "guards"),
    *("launch", "layout", "memory", "microbatch", "padded_forward", "plan", "planner", "rows", "run", "sampler"),
    *("schema", "sequence", "stats", "verify", "diagnose", "diagnose.command", "diagnose.report"),
    *(f"integrations.{name}" for name in ("accelerate", "lightning", "transformers", "trl")),
    "integrations.accelerate_toggle",
    "integrations.fabric",
    "integrations.lightning_callback",
    "integrations.transformers_trainer",
    "integrations.trl_trainers",
)


def names_of(module: Any) -> list[str]:
    """`__all__`, and public names that the module itself defines: classes, functions, types, constants."""
    found = set(getattr(module, "__all__", ()))
    for node in ast.parse(inspect.getsource(module)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        names = [getattr(each, "name", getattr(each, "id", "_")) for each in targets]
        found |= {str(name) for name in names if not str(name).startswith("_") and len(name) > 1}  # T is nobody's
    return sorted(found)


def objects() -> dict[str, Any]:
    """What users keep in pickles: configurations in checkpoints and worker arguments, errors that cross processes."""
    from lightning_padmin import Field, PaddingStats, PadMinArguments, PadMinConfig, PadMinWarning
    from lightning_padmin.architectures import ArchitectureError, Finding
    from lightning_padmin.batch import Schema
    from lightning_padmin.errors import BatchError, ConfigError, GradientCheckError, PadMinError, PeerError

    field = Field("position", position_dims=(1,), fill=0)
    return {
        "config": PadMinConfig(token_budget=8192, batch_schema={"segments": field}, log_reduce={"rows": "sum"}),
        "field": field,
        "schema": Schema({"input_ids": field}, 2, (3,), "attention_mask", labels="labels"),
        "stats": PaddingStats(batches=1, rows=2, real_tokens=3, slots=4, slots_before=6, micro_batches=2),
        "arguments": PadMinArguments(padmin_token_budget=8192),
        "finding": Finding("batch-norm", "refuse", "norm (BatchNorm1d)", "its statistics depend on rows"),
        "errors": [kind("words") for kind in (PadMinError, ConfigError, BatchError, GradientCheckError, PeerError)],
        "architecture error": ArchitectureError("words"),
        "warning": PadMinWarning("words"),
    }


def main() -> None:
    known = json.loads(LIST.read_text()) if LIST.exists() else {"names": {}, "pickles": {}}
    for name in ("", *MODULES):
        path = f"lightning_padmin.{name}".rstrip(".")
        found = set(names_of(importlib.import_module(path)))
        known["names"][path] = sorted(found | set(known["names"].get(path, ())))
    for name, each in objects().items():
        kept = known["pickles"].setdefault(name, base64.b64encode(pickle.dumps(each, protocol=4)).decode())
        assert kept
    LIST.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
