"""What `PadMinCallback` refuses of a Trainer and its module, and why it does not pack."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_padmin.config import PadMinConfig
from lightning_padmin.forward import transformers_models
from lightning_padmin.integrations.common import (
    Tolerable,
    Training,
    acts_on_gradients,
    find_engine,
    is_linear,
    needs_rows,
    reenters,
    screen,
)
from lightning_padmin.integrations.lightning.loop import check_signatures, is_sharded, may_replay

# Findings about models that are no refusal; see `screen`. Joint mode takes the balance loss of all rows.
OF_SPLIT: frozenset[Tolerable] = frozenset({"batch-norm"})
OF_JOINT: frozenset[Tolerable] = OF_SPLIT | {"balance-loss"}
# Subclasses of strategies that are supported.
_UNKNOWN_KINDS = (XLAStrategy, SingleDeviceXLAStrategy)


def refuse_unsupported(trainer: pl.Trainer, module: pl.LightningModule, mode: str, callback: type[Any]) -> None:
    """Raises MisconfigurationException for a set-up that cannot be split exactly; `callback` is the class that asks."""
    if not isinstance(trainer, pl.Trainer):
        raise MisconfigurationException(
            f"PadMinCallback belongs to lightning.pytorch, but this Trainer comes from {type(trainer).__module__}: "
            "import Trainer and LightningModule from lightning.pytorch"
        )
    check_signatures()
    if sum(isinstance(each, callback) and each.config.enabled for each in trainer.callbacks) > 1:
        raise MisconfigurationException("the Trainer has two PadMinCallbacks: a batch can be split once. Remove one")
    if not module.automatic_optimization and mode in ("joint", "replay"):
        raise MisconfigurationException(
            f"mode={mode!r} needs automatic optimization, but this module has automatic_optimization=False: call your "
            "model through lightning_padmin.PaddedForward in training_step, and leave the callback out"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            "training_step(dataloader_iter) fetches its own batches, which PadMinCallback cannot see: take `batch`"
        )
    strategy = trainer.strategy
    known = SingleDeviceStrategy | DDPStrategy | FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy
    if not isinstance(strategy, known) or isinstance(strategy, _UNKNOWN_KINDS):
        raise MisconfigurationException(
            f"PadMinCallback does not support {type(strategy).__name__}: use one device, 'ddp', FSDPStrategy, "
            "ModelParallelStrategy (FSDP2) or DeepSpeedStrategy"
        )
    if isinstance(strategy, DeepSpeedStrategy):
        find_engine(strategy)  # checks its version and its modes
    if mode == "replay" and not may_replay(trainer):
        raise MisconfigurationException(
            f"mode='replay' under {type(strategy).__name__}: chunks that run again would gather parameters in the "
            "middle of the backward pass, which was not tried. Use mode='joint'"
        )


def why_not_split(module: pl.LightningModule, width: int) -> str | None:
    """What is known before the first batch to make splitting another training, in words.

    A `backward` of the module's own would run once per micro-batch; a loss of experts' loads is none of rows.
    """
    own = type(module).backward
    found = None if own is pl.LightningModule.backward else acts_on_gradients(module.backward, own)
    if found is not None:
        return (
            f"{type(module).__name__}.backward {found}. It runs once per micro-batch, on a part of the "
            "gradient: do that in on_after_backward, which comes once per batch"
        )
    if own is not pl.LightningModule.backward and not is_linear(module.backward, module):
        return (
            f"{type(module).__name__}.backward makes something else of a part of the loss than of the whole (it is not "
            "linear in the loss). It runs once per micro-batch: do that in training_step"
        )
    refused = screen(module, tolerate=OF_SPLIT, width=width).refused
    return None if not refused else _words_of(refused[0])


def refuse_no_sites(sites: object, mode: str) -> None:
    """Raises MisconfigurationException: this mode has no modules whose calls it could run in chunks."""
    if not sites:
        raise MisconfigurationException(
            f"mode={mode!r} runs calls of models in chunks, but the module has no attribute that looks like a model "
            "of transformers (a config with model_type, attention_mask in its forward), and none whose call says what "
            "is padding: name an argument that does in call_masks, as in call_masks={'encoder': 'mask'}, or call your "
            "model through lightning_padmin.PaddedForward in training_step, and leave the callback out"
        )


def refuse_combined_loaders(trainer: pl.Trainer) -> None:
    """Raises MisconfigurationException for batches of several loaders."""
    loader = trainer.train_dataloader
    if isinstance(loader, CombinedLoader | dict | list | tuple):
        raise MisconfigurationException(
            f"the training loader is a {type(loader).__name__} of several loaders, and a batch of batches cannot be "
            "planned as one: use one loader (a ConcatDataset, say), or PadMinCallback(enabled=False)"
        )


def heed_architecture(training: Training) -> None:
    """Refuses models that cannot be split. Batch normalization may still be frozen, and rows may be short enough."""
    for finding in training.findings.refused:
        raise MisconfigurationException(_words_of(finding))
    training.heed()


def _words_of(finding: Any) -> str:
    also = ". PadMinCallback(mode='joint') does the former" if finding.rule == "balance-loss" else ""
    return f"{finding.where}: {finding.reason}{also}"


def fix_of_hooks(module: pl.LightningModule, mode: str) -> str:
    """What the user may do instead of a hook on gradients."""
    if mode in ("joint", "replay"):
        return "Checkpoint with use_reentrant=False (then it fires once per batch)"
    fix = "Do that once per batch: in on_after_backward or on_before_optimizer_step (steps: configure_optimizers)"
    if not module.automatic_optimization:
        return "Do that once per batch, behind the loop over micro_batches"
    models = transformers_models(module)
    return fix + (", or use mode='joint'" if models and not any(map(reenters, models.values())) else "")


def why_not_pack(trainer: pl.Trainer, module: pl.LightningModule, config: PadMinConfig) -> str | None:
    """Why it could not be proven that training on packs stays the same; None: it could."""
    if not transformers_models(module):
        return (
            "the module has no attribute that looks like a model of transformers, whose documents could be kept apart"
        )
    if not module.automatic_optimization:
        return "with manual optimization nothing checks that your step hands position ids on"
    if config.check == "off" and config.mode not in ("joint", "replay"):
        return "check='off' would leave unproven that your step hands position ids on"
    if is_sharded(trainer) or isinstance(trainer.strategy, DeepSpeedStrategy):
        return (
            f"under {type(trainer.strategy).__name__} the passes of the leak test are collective, which was not tried"
        )
    return needs_rows(config) if config.mode not in ("joint", "replay") else None
