"""Padding removed inside of TRL's trainers that learn from a dataset: SFT, DPO, Reward, KTO.

Their losses and metrics may couple rows (pairs of answers, means over all tokens, other rows' completions), so stock
`compute_loss` runs on whole batches, and it is the model's backbone that runs in chunks inside of it. What comes behind
the backbone (the head, log-probs, the balance loss of experts) is the trainer's own code on outputs in its own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from torch import nn

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ConfigError, GradientCheckError
from lightning_padmin.forward import Calls, Forwards, chunked
from lightning_padmin.integrations.common import (
    Apart,
    Outcome,
    Session,
    Topology,
    Training,
    apart,
    apart_on_shards,
    look_for_whole_steps,
    refuse_data_parallel,
    refuse_noise_of,
    replaced,
    topology_of,
)
from lightning_padmin.integrations.trl import hooks as trl_stock
from lightning_padmin.integrations.trl.support import refuse_what_needs_many_batches

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
        session: of the mixin.

    Attributes:
        session: the same.

    Raises:
        ConfigError: a mode, model or setting that is not supported; names the fix.
        ArchitectureError: the model's outputs for a row depend on the rows that run with it.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        config = session.config
        _refuse_unsupported(trainer, config)
        backbones(trainer)  # refuses now, not in the first step
        self._trainer, self.session, self._topology = trainer, session, topology_of(trainer)
        self._training = Training(
            session,
            trainer.accelerator.unwrap_model(trainer.model),
            self._topology,
            fix_of_hooks=_FIX_OF_HOOKS,
            tolerate={"balance-loss"},
        )
        self._training.way = "joint"
        self._training.findings.refuse()
        config = replace(config, loss_reduction="row-mean", normalize="rank", layout="pad")
        self._config = self._training.findings.options(config)
        self._forwards: Forwards = {}
        self._is_sharded = self._topology.kind in ("sharded", "engine")
        # Ranks run equally many chunks only where forward passes are collective.
        self._exchange = self._topology.exchange if self._is_sharded else Topology().exchange
        self._checked = config.check == "off" or self._is_sharded
        self._sharded_check_is_due = config.check != "off" and self._is_sharded
        stock = trl_stock.stock_class(type(trainer))
        if stock is not None and stock.__name__ == "KTOTrainer" and trl_stock.release() < (1, 16):
            session.notices(_LOGITS_OF_KTO)

    def begin(self) -> None:
        """Nothing is kept between trainings."""

    def step_in_place_of(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The stock training step, inside of which the backbones run in chunks."""

        def training_step(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            own, inside = self._trainer.accelerator.unwrap_model(model), backbones(self._trainer)
            look_for_whole_steps(self._training.hooks, own, [inside["model"]])
            came = dict(inputs)
            is_due = not self._is_sharded and self._training.to_audit([came]) is not None
            if is_due or not self._checked:
                self._checked = True
                self._training.audited(lambda: self._check(came, *args, **options))
            heard = self._hearing(self._trainer.compute_loss)
            hears = replaced(self._trainer, compute_loss=heard)
            with self._training.around(0, 2), self._chunked(inside) as calls, hears:
                result = stock(model, inputs, *args, **options)
            if not self._is_sharded:
                self._settle(own, lambda: self._check(came, *args, **options))
            self.session.count(replace(calls.total, loss_tokens=trl_stock.loss_tokens(inputs)))
            return result

        return training_step

    def _hearing(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compute_loss)
        def heard(*args: Any, **options: Any) -> Any:
            result = compute_loss(*args, **options)
            self._training.hear(result[0] if isinstance(result, tuple) else result)
            return result

        return heard

    def _settle(self, model: nn.Module, check: Callable[[], Outcome]) -> None:
        try:
            self._training.settle(lambda rows: check())
        except GradientCheckError:
            model.zero_grad(set_to_none=True)  # which are of another loss than stock's
            raise

    def _chunked(self, inside: dict[str, nn.Module]) -> AbstractContextManager[Calls]:
        """In the check as in training, so that what is said once is."""
        return chunked(inside, self._config, self._exchange, kept=self._forwards)

    def _check(self, inputs: Any, num_items_in_batch: Any = None) -> Outcome:
        """Gradients of a batch with and without chunks, before it is trained on; raises on all ranks.

        A loss that reads padding would be another one: padding slots of the backbone's outputs hold zeros.
        """
        module = self._trainer.accelerator.unwrap_model(self._trainer.model)
        loss, without_trace = self._loss_of(module, inputs, num_items_in_batch), self._without_trace
        exchange = self._topology.exchange
        found = apart(loss, module, self._ways, trainer=self._trainer, without_trace=without_trace, exchange=exchange)
        return _judged(found)

    def before_window(self, batches: Sequence[Any], num_items_in_batch: Any = None) -> None:
        """Checks a batch where parameters are sharded: passes are collective, and gradients are reduced.

        Not in the training step, which may run where their reduction waits for the end of a window.
        """
        if not (self._is_sharded and batches):
            return
        most = self._training.to_audit(batches)
        if most is None and not self._sharded_check_is_due:
            return
        if trl_stock.distributed_type(self._trainer) == "FSDP":
            self._training.audited(lambda: self._check_shards(batches[most or 0], num_items_in_batch))
        elif self._sharded_check_is_due:
            self.session.notices(
                f"under DeepSpeed the first batch of {type(self._trainer).__name__} is not checked (its engine takes "
                "every backward pass for a step's). A few steps on one device, or under DDP or FSDP, tell whether your "
                "loss reads padding; check='off' silences this"
            )
        self._sharded_check_is_due = False

    def _check_shards(self, inputs: Any, num_items_in_batch: Any) -> Outcome:
        """`_check` on shards: each rank sketches its own, and differences are taken over all ranks."""
        model = self._trainer.model_wrapped
        loss = self._loss_of(model, inputs, num_items_in_batch)
        exchange = self._topology.exchange
        found = apart_on_shards(loss, model, self._ways, without_trace=self._without_trace, exchange=exchange)
        return _judged(found)

    def _loss_of(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Callable[[], Any]:
        """The trainer's own loss of a batch, which is prepared now."""
        trainer = self._trainer
        prepared = trainer._prepare_inputs(inputs)

        def loss() -> Any:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(model, dict(prepared), num_items_in_batch=num_items_in_batch)

        return loss

    @property
    def _ways(self) -> list[Callable[[], AbstractContextManager[Any]]]:
        return [nullcontext, lambda: self._chunked(backbones(self._trainer))]

    @property
    def _without_trace(self) -> Callable[[], AbstractContextManager[None]]:
        return partial(trl_stock.without_trace, self._trainer)

    def metrics(self) -> dict[str, float | int]:
        """Counts over all ranks since the last time, ratios last. A collective."""
        return self.session.metrics(self._topology)


def backbones(trainer: Any) -> dict[str, nn.Module]:
    """The backbone of the policy and, where there is one, of the reference model, by name.

    Raises:
        ConfigError: a model whose backbone is not to be found.
    """
    return {name: _backbone(name, model) for name, model in trl_stock.models_of(trainer).items()}


def _judged(found: Apart) -> Outcome:
    if found.is_too_far:
        raise GradientCheckError(
            f"first-batch check: gradients with the backbone in chunks differ from the stock ones: relative "
            f"difference {found.value:.2g} (limit {found.limit:.0e}), {found.where}. The loss, or the model behind its "
            "backbone, reads padding. Use PadMinConfig(enabled=False)"
        )
    words = f"gradients with the backbone in chunks are the stock ones (relative difference {found.value:.1e})"
    return Outcome(found.value, True, True, False, words, losses=found.losses, limit=found.limit)


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
    refuse_data_parallel(trainer)
