"""`mode="joint"` of the Trainer: its steps as stock, with calls of models inside of them in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common import Session, Sites, Training, WholeSteps, Words, refuse_data_parallel

_FIX = "Use mode='split' where your loss separates over rows, or PadMinConfig(enabled=False)"


def whole_steps(trainer: Any, session: Session, training: Training) -> WholeSteps:
    """What runs steps of a Trainer, set up.

    Args:
        trainer: of transformers, or of a library that builds on it.
        session: of the mixin.
        training: of the trainer's model.

    Raises:
        ConfigError: nothing is there to run in chunks, or a setting is not supported; names the fix.
        ArchitectureError: outputs of one of the models for a row depend on the rows that run with it.
    """
    refuse_unsupported(trainer, session.config)
    sites = Sites(trainer, session.config)
    found = sites()
    if not found:
        raise ConfigError(
            f"mode='joint' runs calls of modules in chunks, and none in {type(trainer.model).__name__} says what is "
            "padding: it is no model of transformers, and no argument of a forward inside is a mask or lengths by its "
            "name. Declare one, call_masks={'encoder': 'mask'}, or use PadMinConfig(enabled=False)"
        )
    sites.refuse()
    names = ", ".join(f"{name} ({type(site.module).__name__})" for name, site in list(found.items())[:4])
    nothing = (
        f"mode='joint' had nothing to run in chunks: in this step none of {names} was called with padding that a mask "
        "tells, or could take it. It ran as it came"
    )
    words = Words("models", "The loss, or what comes behind the models,", _FIX, nothing)
    return WholeSteps(trainer, session, training, sites=sites, loss_tokens=_LossTokens(trainer), words=words)


def refuse_unsupported(trainer: Any, config: PadMinConfig) -> None:
    """Raises ConfigError for arguments and options that joint steps do not support."""
    if config.layout == "pack":
        raise ConfigError("layout='pack': mode='joint' of the Trainer runs padded chunks. Use layout='pad'")
    if getattr(trainer.args, "torch_compile", False):
        raise ConfigError(
            "torch_compile=True: what is compiled would be left at each call that runs in chunks. Set "
            "torch_compile=False, or mode='split'"
        )
    refuse_data_parallel(trainer)


class _LossTokens:
    """Tokens that carry loss in a batch, where its labels are of tokens; for counts."""

    def __init__(self, trainer: Any) -> None:
        self._shift = int(bool(getattr(trainer, "_loss_shifts_labels", True)))

    def __call__(self, inputs: Any) -> int:
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
            return 0
        return int((labels[:, self._shift :] >= 0).sum())


__all__ = ["refuse_unsupported", "whole_steps"]
