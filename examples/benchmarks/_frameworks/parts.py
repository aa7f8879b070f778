"""Functions of the library whose time is its overhead, those of frameworks and models inside of them, and a control."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
from accelerate import Accelerator
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from trl import GRPOTrainer

from lightning_padmin import PadMinCallback
from lightning_padmin.integrations.accelerate import PadMin
from lightning_padmin.integrations.lightning import loop as lightning_loop
from lightning_padmin.integrations.lightning.check import FirstBatchCheck
from lightning_padmin.integrations.lightning.log_merge import LogRecorder
from lightning_padmin.integrations.trl import hooks as trl_stock
from lightning_padmin.integrations.trl.online import Engine
from lightning_padmin.integrations.trl.passes import Passes
from lightning_padmin.microbatching import layouts, reading
from lightning_padmin.microbatching import weights as micro_weights
from lightning_padmin.microbatching.batcher import MicroBatcher, MicroBatches
from lightning_padmin.microbatching.padded_layout import SlotMap
from lightning_padmin.microbatching.planned import PlannedBatch

from .ledger import CHECK, FRAMEWORK, LOSS, Target

LOOP, LOGS, GATHER, BACK = "loop and hooks", "logs and metrics", "gather", "put back"
PARTS = ("schema", "row table", "plan", "index maps", "agreement", GATHER, BACK, LOOP, LOGS)

_CORE = [
    Target(reading, "schema_of", "schema"),
    Target(reading, "row_table_of", "row table"),
    Target(layouts, "plan_quietly", "plan"),
    Target(PlannedBatch, "mapped", "index maps"),
    Target(MicroBatcher, "_prepare", "agreement"),  # and what else is not one of those above
    Target(MicroBatches, "__getitem__", GATHER),
    Target(MicroBatches, "restore_rows", BACK),
    Target(SlotMap, "restore", BACK),
]
_LIGHTNING = [
    *(Target(PadMinCallback, name, LOOP) for name in ("on_train_batch_start", "_prepare", "_progress", "_guard")),
    Target(PadMinCallback, "on_train_batch_end", LOGS),
    Target(lightning_loop.SplitOptimization, "_make_closure", LOOP),
    Target(lightning_loop._SplitClosure, "closure", LOOP),
    *(Target(LogRecorder, name, LOGS) for name in ("log", "replay", "add_loss")),
    Target(lightning_loop, "merge_outputs", LOGS),
    Target(FirstBatchCheck, "__call__", CHECK),
    # Inside of these:
    Target(_AutomaticOptimization, "_training_step", FRAMEWORK),
    Target(_AutomaticOptimization, "_make_backward_fn", FRAMEWORK, "maker"),
    Target(_AutomaticOptimization, "_make_zero_grad_fn", FRAMEWORK, "maker"),
    Target(_ResultCollection, "log", FRAMEWORK),
]
_TRL = [
    Target(Engine, "_step", LOOP),
    Target(Engine, "scores", LOOP),
    Target(Engine, "metrics", LOGS),
    Target(Engine, "_audit", CHECK),
    Target(Passes, "_loss", LOOP),
    # Inside of these:
    Target(GRPOTrainer, "_prepare_inputs", FRAMEWORK),
    Target(GRPOTrainer, "training_step", FRAMEWORK),
    Target(trl_stock, "plain_training_step", FRAMEWORK),
    Target(GRPOTrainer, "_get_per_token_logps_and_entropies", FRAMEWORK),
    Target(GRPOTrainer, "_compute_loss", LOSS),
]
_ACCELERATE = [
    Target(PadMin, "micro_batches", LOOP, "iterator"),
    Target(PadMin, "_check", LOOP),
    Target(PadMin, "metrics", LOGS),
    Target(Accelerator, "backward", FRAMEWORK),
]
TARGETS = {"lightning": _CORE + _LIGHTNING, "trl": _CORE + _TRL, "accelerate": _CORE + _ACCELERATE}


@contextmanager
def wrong_weights() -> Iterator[None]:
    """Every micro-batch counts 1/K, whatever it holds: gradients are wrong, and the comparison must say so."""
    right = micro_weights.weights
    split = Passes._split

    def weights(*args: Any) -> Any:
        found, shares = right(*args)
        return np.full_like(found, 1 / len(found)), shares

    def same_for_each(self: Passes, chunk: int, scores: Any) -> Tensor:
        batches = self.window.batches
        tokens = batches.table.real_tokens
        share = tokens[batches.slot_maps[chunk].rows].sum() / tokens.sum()
        return split(self, chunk, scores) / (len(batches) * float(share))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(micro_weights, "weights", weights))
        stack.enter_context(mock.patch.object(Passes, "_split", same_for_each))
        yield
