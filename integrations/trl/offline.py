"""Padding removed inside of TRL's trainers that learn from a dataset: SFT, DPO, Reward, KTO.

Their losses and metrics may couple rows (pairs of answers, means over all tokens, other rows' completions), so stock
`compute_loss` runs on whole batches, and it is the model's backbone that runs in chunks inside of it. What comes behind
the backbone (the head, log-probs, the balance loss of experts) is the trainer's own code on outputs in its own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common import (
    Session,
    Training,
    WholeSteps,
    Words,
    refuse_data_parallel,
    refuse_noise_of,
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

_WORDS = Words("the backbone", "The loss, or the model behind its backbone,", "Use PadMinConfig(enabled=False)")


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
        self._steps = WholeSteps(
            trainer,
            session,
            self._training,
            sites=lambda: backbones(trainer),
            loss_tokens=trl_stock.loss_tokens,
            words=_WORDS,
            without_trace=partial(trl_stock.without_trace, trainer),
            looks_at_padding=False,
        )
        stock = trl_stock.stock_class(type(trainer))
        if stock is not None and stock.__name__ == "KTOTrainer" and trl_stock.release() < (1, 16):
            session.notices(_LOGITS_OF_KTO)

    def begin(self) -> None:
        """Nothing is kept between trainings."""

    def step_in_place_of(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The stock training step, inside of which the backbones run in chunks."""
        return self._steps.in_place_of(stock)

    def before_window(self, batches: Sequence[Any], num_items_in_batch: Any = None) -> None:
        """Checks a batch where parameters are sharded, see `WholeSteps`."""
        self._steps.before_window(batches, num_items_in_batch)

    def metrics(self) -> dict[str, float | int]:
        """Counts over all ranks since the last time, ratios last. A collective."""
        return self.session.metrics(self._topology)


def backbones(trainer: Any) -> dict[str, nn.Module]:
    """The backbone of the policy and, where there is one, of the reference model, by name.

    Raises:
        ConfigError: a model whose backbone is not to be found.
    """
    return {name: _backbone(name, model) for name, model in trl_stock.models_of(trainer).items()}


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
