"""Padding removed inside of TRL's trainers that learn from a dataset: SFT, DPO, Reward, KTO.

Their losses and metrics may couple rows (pairs of answers, means over all tokens, other rows' completions), so stock
`compute_loss` runs on whole batches, and it is the model's backbone that runs in chunks inside of it. What comes behind
the backbone (the head, log-probs, the balance loss of experts) is the trainer's own code on outputs in its own layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_padmin.architectures import (
    ArchitectureError,
    HookWatch,
    inspect_model,
    reenters,
    refuse_noise_of,
    with_scan_chunk,
    without_user_hooks,
)
from lightning_padmin.config import PadMinConfig
from lightning_padmin.distributed import Exchange, exchange_all, exchange_alone
from lightning_padmin.errors import ConfigError, GradientCheckError, PadMinWarning
from lightning_padmin.forward import Calls, Forwards, chunked
from lightning_padmin.integrations.trl import hooks as trl_stock
from lightning_padmin.integrations.trl.support import refuse_what_needs_many_batches
from lightning_padmin.runtime import DATA_OF_TRAINERS, ModuleState, holders_of, without_dropout
from lightning_padmin.stats import PaddingStats
from lightning_padmin.verification import (
    OnlyBackwardError,
    Sketches,
    difference,
    difference_over_ranks,
    scales,
    sizes,
    sketched_gradients,
    sketched_shards,
)

_SHARDED = ("FSDP", "DEEPSPEED")

_LOGITS_OF_KTO = (
    "KTO before TRL 1.16 logs logits/chosen and logits/rejected as means over padding too, where there are zeros now: "
    "these two differ from those without PadMinMixin. Gradients and all other metrics do not"
)
_FIX_OF_HOOKS = (
    "It fires once for each chunk here: checkpoint with gradient_checkpointing_kwargs={'use_reentrant': False}, or use "
    "PadMinConfig(enabled=False)"
)


class OfflineEngine:
    """Runs the backbones of one trainer in chunks.

    Args:
        trainer: an SFT, DPO, Reward or KTO trainer, set up.
        config: the options.

    Attributes:
        stats: counts of this rank's training passes.

    Raises:
        ConfigError: a mode, model or setting that is not supported; names the fix.
        ArchitectureError: the model's outputs for a row depend on the rows that run with it.
    """

    def __init__(self, trainer: Any, config: PadMinConfig) -> None:
        _refuse_unsupported(trainer, config)
        self._trainer = trainer
        self._hooks = HookWatch(_FIX_OF_HOOKS)
        backbones(trainer)  # refuses now, not in the first step
        for finding in inspect_model(trainer.accelerator.unwrap_model(trainer.model)):
            later = finding.rule == "balance-loss" or finding.exact_up_to is not None
            if finding.severity == "refuse" and not later:
                raise ArchitectureError(f"{finding.where}: {finding.reason}")
        config = replace(config, loss_reduction="row-mean", normalize="rank", layout="pad")
        self._config = with_scan_chunk(config, trainer.model)
        self.stats, self._since_log = PaddingStats(), PaddingStats()
        self._forwards: Forwards = {}
        self._checked = config.check == "off" or self._is_sharded
        self._sharded_check_is_due = config.check != "off" and self._is_sharded
        stock = trl_stock.stock_class(type(trainer))
        reads_padding = stock is not None and stock.__name__ == "KTOTrainer" and trl_stock.release() < (1, 16)
        if reads_padding and trainer.accelerator.is_main_process:
            warnings.warn(f"PadMinMixin: {_LOGITS_OF_KTO}", PadMinWarning, stacklevel=4)

    def reset(self) -> None:
        """Nothing is kept between steps."""

    def step_in_place_of(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The stock training step, inside of which the backbones run in chunks."""

        def training_step(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            own, inside = self._trainer.accelerator.unwrap_model(model), backbones(self._trainer)
            self._hooks.look(own, [inside["model"]], parameters=reenters(own))
            if not self._checked:
                self._checked = True
                self._check(inputs, *args, **options)
            with self._hooks.around(0, 2), self._chunked(inside) as calls:
                result = stock(model, inputs, *args, **options)
            stats = replace(calls.total, loss_tokens=trl_stock.loss_tokens(inputs))
            self.stats, self._since_log = self.stats + stats, self._since_log + stats
            return result

        return training_step

    def _chunked(self, inside: dict[str, nn.Module]) -> AbstractContextManager[Calls]:
        """In the check as in training, so that what is said once is."""
        return chunked(inside, self._config, self._exchange, kept=self._forwards)

    def _check(self, inputs: Any, num_items_in_batch: Any = None) -> None:
        """Gradients of the first batch with and without chunks, before it is trained on; raises on all ranks.

        A loss that reads padding would be another one: padding slots of the backbone's outputs hold zeros.
        """
        trainer, module = self._trainer, self._trainer.accelerator.unwrap_model(self._trainer.model)
        prepared = trainer._prepare_inputs(inputs)
        state = ModuleState(module, holders_of(trainer), DATA_OF_TRAINERS)
        by_backward = False

        def loss() -> Any:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(module, dict(prepared), num_items_in_batch=num_items_in_batch)

        module.train()
        sketches: list[Sketches] = []
        half = bool({p.dtype for p in module.parameters()} & {torch.float16, torch.bfloat16})
        ways: list[Callable[[], Any]] = [nullcontext, lambda: self._chunked(backbones(trainer))]
        try:
            while len(sketches) < len(ways):
                within, no_hooks = ways[len(sketches)](), without_user_hooks(module)
                alone = trl_stock.without_trace(trainer)
                with state.watching(), alone, no_hooks, without_dropout(module) as watch, within:
                    try:
                        sketches.append(sketched_gradients(loss, module, by_backward=by_backward, again=False))
                    except OnlyBackwardError:  # once more, when what this attempt wrote has been put back
                        by_backward = True
                half = half or watch.saw_half
                state.clear()
        finally:
            state.restore()
        limit = 0.1 if half else 1e-3
        value, name = difference(sketches[1], sketches[0], scales(sizes(sketches[0]), limit))
        bits = int(np.float64(value).view(np.int64))
        exchange = exchange_all if trainer.accelerator.num_processes > 1 else exchange_alone
        worst = float(exchange([bits]).view(np.float64).max())
        _refuse_difference(worst, limit, f"on this rank most in {name!r}")

    def before_window(self, batches: Sequence[Any], num_items_in_batch: Any = None) -> None:
        """Checks the first batch where parameters are sharded: passes are collective, and gradients are reduced.

        Not in the training step, which may run where their reduction waits for the end of a window.
        """
        if not (self._sharded_check_is_due and batches):
            return
        self._sharded_check_is_due = False
        if trl_stock.distributed_type(self._trainer) == "FSDP":
            self._check_shards(batches[0], num_items_in_batch)
        elif self._trainer.accelerator.is_main_process:
            warnings.warn(
                f"PadMinMixin: under DeepSpeed the first batch of {type(self._trainer).__name__} is not checked (its "
                "engine takes every backward pass for a step's). A few steps on one device, or under DDP or FSDP, tell "
                "whether your loss reads padding; check='off' silences this",
                PadMinWarning,
                stacklevel=4,
            )

    def _check_shards(self, inputs: Any, num_items_in_batch: Any) -> None:
        """`_check` on shards: each rank sketches its own, and differences are taken over all ranks."""
        trainer, model = self._trainer, self._trainer.model_wrapped
        prepared, state = trainer._prepare_inputs(inputs), ModuleState(model)
        model.train()
        half = bool({p.dtype for p in model.parameters()} & {torch.float16, torch.bfloat16})
        sketches = []
        try:
            for within in (nullcontext(), self._chunked(backbones(trainer))):
                no_hooks = without_user_hooks(model)
                with trl_stock.without_trace(trainer), no_hooks, without_dropout(model) as watch, within:
                    with torch.enable_grad(), trainer.compute_loss_context_manager():
                        loss = trainer.compute_loss(model, dict(prepared), num_items_in_batch=num_items_in_batch)
                    torch.autograd.backward(loss)
                    sketches.append(sketched_shards(model))
                half = half or watch.saw_half
                state.clear()
        finally:
            state.restore()
        half = bool(exchange_all([half]).any())
        limit = 0.1 if half else 1e-3
        worst, name = difference_over_ranks(sketches[1], sketches[0], limit, exchange_all)
        _refuse_difference(worst, limit, f"most in {name.replace('_fsdp_wrapped_module.', '')!r}")

    @property
    def _is_sharded(self) -> bool:
        return str(self._trainer.accelerator.distributed_type).rsplit(".", maxsplit=1)[-1] in _SHARDED

    @property
    def _exchange(self) -> Exchange:
        """Ranks run equally many chunks only where forward passes are collective."""
        return exchange_all if self._is_sharded else exchange_alone

    def metrics(self) -> dict[str, float | int]:
        """Counts over all ranks since the last time, ratios last. A collective."""
        exchange = exchange_all if self._trainer.accelerator.num_processes > 1 else exchange_alone
        merged = PaddingStats.merge_ranks(np.asarray(exchange(self._since_log.as_counts())))
        self._since_log = PaddingStats()
        return merged.metrics(self._config.log_prefix) if merged.batches else {}


def backbones(trainer: Any) -> dict[str, nn.Module]:
    """The backbone of the policy and, where there is one, of the reference model, by name.

    Raises:
        ConfigError: a model whose backbone is not to be found.
    """
    unwrap = trainer.accelerator.unwrap_model
    models = {"model": trainer.model, "ref_model": getattr(trainer, "ref_model", None)}
    return {name: _backbone(name, unwrap(model)) for name, model in models.items() if model is not None}


def _refuse_difference(worst: float, limit: float, where: str) -> None:
    if not worst <= limit:
        raise GradientCheckError(
            f"first-batch check: gradients with the backbone in chunks differ from the stock ones: relative "
            f"difference {worst:.2g} (limit {limit:.0e}), {where}. The loss, or the model behind its backbone, reads "
            "padding. Use PadMinConfig(enabled=False)"
        )


def _backbone(name: str, model: Any) -> nn.Module:
    get_base = getattr(model, "get_base_model", None)  # of PEFT
    model = get_base() if callable(get_base) else model
    inner = getattr(model, "base_model", None)
    if not isinstance(inner, nn.Module) or inner is model:
        raise ConfigError(
            f"{name}={type(model).__name__}: its backbone (base_model) is not to be found, so it cannot run in chunks. "
            "Use a model of transformers, or PadMinConfig(enabled=False)"
        )
    return inner


def _refuse_unsupported(trainer: Any, config: PadMinConfig) -> None:
    name, args = type(trainer).__name__, trainer.args
    if config.mode not in ("auto", "joint"):
        raise ConfigError(
            f"mode={config.mode!r}: {name} needs its whole batch (pairs, metrics over all tokens), so its backbone "
            "runs in chunks inside of its loss. Set mode='joint' or mode='auto'"
        )
    refuse_what_needs_many_batches(config)
    refuse_noise_of(trainer)
    if config.layout == "pack":
        raise ConfigError(
            f"layout='pack': the backbone of {name} runs in padded chunks. SFTTrainer packs by itself (packing=True, "
            "without padmin); elsewhere use layout='pad'"
        )
    for option in ("packing", "padding_free"):
        if getattr(args, option, False):
            raise ConfigError(f"{option}=True leaves no padding to remove. Set {option}=False, or leave padmin out")
    if getattr(args, "use_liger_kernel", False):
        raise ConfigError("use_liger_kernel=True: Liger's loss runs the backbone by itself. Set it to False")
    if getattr(args, "n_gpu", 1) > 1:
        raise ConfigError(f"n_gpu={args.n_gpu}: DataParallel splits batches by itself. Start one process per device")
