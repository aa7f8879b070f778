"""What `PadMinMixin` refuses, and the mode that the arguments of a trainer call for."""

from __future__ import annotations

from typing import Any

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common import backward_of_step, refuse_data_parallel, refuse_noise_of
from lightning_padmin.integrations.trl import hooks as trl_stock

_ONLINE = {"GRPOTrainer", "RLOOTrainer"}
_OFFLINE = {"SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer"}
SHARDS_WHAT_SEES = (
    "under FSDP and DeepSpeed a model with a vision tower runs as without PadMinMixin: ranks gather the tower's "
    "weights, or reduce its gradients, together, and a chunk without images would not take part. Use DDP"
)
_SHARDED = ("FSDP", "DEEPSPEED")
_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")


def is_offline(kind: type) -> bool:
    """Whether the trainer learns from a dataset, through its own `compute_loss`."""
    names = _stock_names(kind)
    return bool(names & _OFFLINE) and not names & _ONLINE


def refuse_class(kind: type) -> None:
    """Raises ConfigError for trainers that are not known, and for a TRL whose private hooks have changed."""
    trl_stock.check_release()
    stock, names = trl_stock.stock_class(kind), _stock_names(kind)
    if not names & (_ONLINE | _OFFLINE):
        raise ConfigError(
            f"{kind.__name__}: PadMinMixin supports {', '.join(sorted(_ONLINE | _OFFLINE))}, in "
            f"`class {kind.__name__}(PadMinMixin, GRPOTrainer)`; with others use PadMinConfig(enabled=False)"
        )
    if not is_offline(kind):
        assert stock is not None
        trl_stock.check_signatures(stock)


def _stock_names(kind: type) -> set[str]:
    stock = trl_stock.stock_class(kind)
    return {base.__name__ for base in stock.__mro__} if stock is not None else set()


def refuse_config(config: PadMinConfig) -> None:
    """Raises ConfigError for an option that asks for another algorithm than the trainer's, or has no meaning there."""
    refuse_what_needs_many_batches(config)
    if config.normalize == "global":
        raise ConfigError(
            "normalize='global': how the loss is normalised over ranks is the trainer's own (loss_type='dapo' takes "
            "one mean over all ranks). Leave it out"
        )


def refuse_what_needs_many_batches(config: PadMinConfig) -> None:
    """Raises ConfigError for options that remember batches, where passes of several kinds are planned apart."""
    if config.shape_buckets is not None or config.launch_cost == "measured":
        name = "launch_cost" if config.shape_buckets is None else "shape_buckets"
        raise ConfigError(
            f"{name}={getattr(config, name)!r} is not for trainers of TRL, whose passes with and without gradients are "
            "planned apart: leave shape_buckets out, and give launch_cost as a number (padmin diagnose --model)"
        )


def refuse_trainer(trainer: Any) -> None:
    """Raises ConfigError for arguments, models and ways to distribute that are not supported."""
    trl_stock.check_attributes(trainer)
    refuse_noise_of(trainer)
    args = trainer.args
    refuse_data_parallel(trainer)
    if getattr(args, "use_liger_kernel", False) or getattr(args, "use_liger_loss", False):
        raise ConfigError("use_liger_kernel=True: losses of Liger do not ask for log-probs. Set it to False")
    kind = trl_stock.distributed_type(trainer)
    if kind not in _DISTRIBUTED:
        raise ConfigError(f"distributed_type={kind}: PadMinMixin knows one device, DDP, FSDP and DeepSpeed")
    for name, adapter in (getattr(trainer.model, "peft_config", None) or {}).items():
        if getattr(adapter, "is_prompt_learning", False):
            raise ConfigError(
                f"PEFT adapter {name!r} ({type(adapter).__name__}) puts virtual tokens before every row, whose columns "
                "are then not those of the batch. Use LoRA"
            )


def shards_what_sees(trainer: Any) -> bool:
    """Whether rows may have images, under FSDP or DeepSpeed."""
    return bool(getattr(trainer, "_is_vlm", False)) and trl_stock.distributed_type(trainer) in _SHARDED


def why_not_packed(trainer: Any) -> str | None:
    """What speaks against rows in packs; None: nothing that can be seen from here."""
    kind = trl_stock.distributed_type(trainer)
    if kind in _SHARDED:
        return f"under {kind} the passes of the leak test are collective, which was not tried"
    if hasattr(getattr(trainer, "processing_class", None), "image_processor"):
        return "a trainer with a processor may get images, whose rows are not packed"
    return None


def choose_mode(trainer: Any, wanted: str) -> tuple[str, str]:
    """The mode as far as arguments tell, and why where it is not what one would expect."""
    if getattr(trainer, "aux_loss_enabled", False):
        why = "the balance loss of experts is taken over all rows of a micro-batch together"
        if wanted in ("split", "replay"):
            raise ConfigError(
                f"mode={wanted!r}: {why}. Set mode='joint' or mode='auto', or router_aux_loss_coef=0 in the model's "
                "configuration"
            )
        return "joint", why if wanted == "auto" else ""
    name = backward_of_step(trainer)
    if name is not None:
        why = f"{name} sends its loss backward itself, and runs for a whole micro-batch alone"
        if wanted in ("split", "replay"):
            raise ConfigError(
                f"mode={wanted!r}: {why}. Set mode='joint' or mode='auto', or have it call super().training_step"
            )
        return "joint", why if wanted == "auto" else ""
    quantile = getattr(trainer, "top_entropy_quantile", 1.0)
    if quantile < 1.0 and wanted in ("auto", "split"):
        why = f"top_entropy_quantile={quantile} takes a quantile over the rows of a micro-batch"
        if wanted == "split":
            raise ConfigError(f"mode='split': {why}. Set mode='replay' or mode='auto'")
        return "replay", why
    return ("split" if wanted == "auto" else wanted), ""
