"""`mode="joint"` of the Trainer: its steps as stock, with calls of models inside of them in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ArchitectureError, ConfigError
from lightning_padmin.integrations.common import Ladder, Session, Sites, Training, WholeSteps, Words, step_without_loss

_FIX = "Use mode='split' where your loss separates over rows, or PadMinConfig(enabled=False)"


def whole_steps(trainer: Any, session: Session, training: Training, ladder: Ladder | None = None) -> WholeSteps:
    """What runs steps of a Trainer, set up.

    Args:
        trainer: of transformers, or of a library that builds on it.
        session: of the mixin.
        training: of the trainer's model.
        ladder: under `mode="auto"`, says which way steps go.
    """
    sites = Sites(trainer, session.config)
    names = ", ".join(f"{name} ({type(site.module).__name__})" for name, site in list(sites().items())[:4])
    nothing = (
        f"mode='joint' had nothing to run in chunks: in this step none of {names} was called with padding that a mask "
        "tells, or could take it. It ran as it came"
    )
    words = Words("models", "The loss, or what comes behind the models,", _FIX, nothing)
    return WholeSteps(
        trainer,
        session,
        training,
        sites=sites,
        loss_tokens=_LossTokens(trainer),
        words=words,
        ladder=ladder,
        own_loss=None if ladder is None else step_without_loss(trainer),
    )


def refuse_unsupported(trainer: Any, config: PadMinConfig) -> None:
    """Refuses what cannot run jointly.

    Raises:
        ConfigError: nothing is there to run in chunks, or a setting is not supported; names the fix.
        ArchitectureError: outputs of one of the models for a row depend on the rows that run with it.
    """
    if config.layout == "pack":
        raise ConfigError("layout='pack': mode='joint' of the Trainer runs padded chunks. Use layout='pad'")
    why = why_not_joint(trainer, config)
    if why is not None:
        raise why


def why_not_joint(trainer: Any, config: PadMinConfig) -> ConfigError | ArchitectureError | None:
    """What is known before the first batch to speak against it."""
    if getattr(trainer.args, "torch_compile", False):
        return ConfigError(
            "torch_compile=True: what is compiled would be left at each call that runs in chunks. Set "
            "torch_compile=False, or mode='split'"
        )
    sites = Sites(trainer, config)
    if not sites():
        return ConfigError(
            f"mode='joint' runs calls of modules in chunks, and none in {type(trainer.model).__name__} says what is "
            "padding: it is no model of transformers, and no argument of a forward inside is a mask or lengths by its "
            "name. Declare one, call_masks={'encoder': 'mask'}, or use PadMinConfig(enabled=False)"
        )
    try:
        sites.refuse()
    except ArchitectureError as error:
        return error
    return None


class _LossTokens:
    """Tokens that carry loss in a batch, where its labels are of tokens; for counts."""

    def __init__(self, trainer: Any) -> None:
        self._shift = int(bool(getattr(trainer, "_loss_shifts_labels", True)))

    def __call__(self, inputs: Any) -> int:
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
            return 0
        return int((labels[:, self._shift :] >= 0).sum())


__all__ = ["refuse_unsupported", "whole_steps", "why_not_joint"]
