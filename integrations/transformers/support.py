"""What `PadMinTrainerMixin` refuses before anything runs."""

from __future__ import annotations

from typing import Any

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ArchitectureError, ConfigError, PadMinError
from lightning_padmin.integrations.common import (
    Tolerable,
    Way,
    needs_rows,
    refuse_data_parallel,
    refuse_noise_of,
    screen,
    step_past_mixin,
)

# Findings about models that are no refusal; see `screen`.
SPLIT: frozenset[Tolerable] = frozenset({"batch-norm"})
JOINT: frozenset[Tolerable] = SPLIT | {"balance-loss"}


def refuse_unsupported(trainer: Any, config: PadMinConfig) -> None:
    """Raises ConfigError for trainers, arguments and options that are not supported; see also `known_before`."""
    if type(trainer).__module__.startswith("trl."):
        raise ConfigError(f"{type(trainer).__name__} is a trainer of TRL: use PadMinMixin of integrations.trl")
    if config.mode != "auto":
        refuse_noise_of(trainer)
    refuse_data_parallel(trainer)
    kind = trainer.accelerator.distributed_type.value
    if config.mode == "replay" and kind == "DEEPSPEED":
        raise ConfigError(
            f"mode='replay' under {kind}: chunks that run again would gather parameters in the middle of the backward "
            "pass, which was not tried. Use mode='joint'"
        )
    if config.normalize != "rank":
        raise ConfigError("normalize='global' is the Trainer's own average_tokens_across_devices: set that")
    why = _why_not_split(trainer) if config.mode == "split" else None
    if why is not None:
        raise ConfigError(why)


def _why_not_split(trainer: Any) -> str | None:
    """Which argument speaks against it, in words. Steps run once, and losses are whole, in joint mode."""
    args = trainer.args
    name = str(getattr(args.optim, "value", args.optim))
    if name.endswith("_layerwise") or name in ("lomo", "adalomo"):
        other = name.removesuffix("_layerwise") if name.endswith("_layerwise") else "adafactor"
        return (
            f"optim={name!r} takes its steps in the backward pass, which runs once per part of a batch here. Use one "
            f"that does not (optim={other!r}), or mode='joint'"
        )
    if trainer.label_smoother is not None and not trainer.model_accepts_loss_kwargs:
        return (
            f"label_smoothing_factor={args.label_smoothing_factor}: this model's loss is a mean over each batch, and "
            "the smoothed one is a mean of its own. Set label_smoothing_factor=0, or mode='joint'"
        )
    return None


def known_before(trainer: Any) -> list[tuple[Way, PadMinError]]:
    """What is known before the first batch to make splitting another training: the next way, and why."""
    found: list[tuple[Way, PadMinError]] = []
    try:
        refuse_noise_of(trainer)
    except ConfigError as error:
        found.append(("as it came", error))
    why = _why_not_split(trainer)
    if why is not None:
        found.append(("joint", ConfigError(why)))
    step = step_past_mixin(trainer)
    if step is not None:
        words = f"{step} takes its loss by itself, and never calls PadMinTrainerMixin.training_step"
        found.append(("joint", ConfigError(words)))
    for each in screen(trainer.model, tolerate=SPLIT).refused[:1]:
        found.append(("joint", ArchitectureError(f"{each.where}: {each.reason}")))
    return found


def why_not_packed(trainer: Any, config: PadMinConfig) -> str | None:
    """What speaks against rows in packs; None: nothing that can be seen from here."""
    kind = trainer.accelerator.distributed_type.value
    if kind in ("FSDP", "DEEPSPEED"):
        return f"under {kind} the passes of the leak test are collective, which was not tried"
    if config.check == "off":
        return "check='off' would leave unproven that your loss takes packed rows"
    if trainer.label_smoother is not None:
        return "with label_smoothing_factor the first label of each document would not be left out"
    return needs_rows(config)
