"""Every private hook of TRL and of transformers' Trainer that the mixin needs, in one place.

Checked with TRL 1.16.0 and 0.29.0 (some of it with 1.0 and 1.4) and transformers 5.24. What is used:
`_get_per_token_logps_and_entropies` (the one function that all log-probs of the online trainers come from),
`_buffered_inputs` and `_step` (where a trainer stands in the batch that it has generated), `compute_loss`, and the
metrics that a call of it appends.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import trl
from torch import Tensor, nn
from transformers import Trainer

from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common import check_hooks, has_own_step, replaced, untouched_trainer
from lightning_padmin.integrations.common import release as release_of

LOG_PROBS = "_get_per_token_logps_and_entropies"
OLDEST = (0, 29)
CHECKED = "1.16.0"
# method -> first parameters
_EXPECTED = {
    LOG_PROBS: ["self", "model", "input_ids", "attention_mask", "logits_to_keep"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "compute_loss": ["self", "model", "inputs"],
    "_prepare_inputs": ["self"],
    "compute_loss_context_manager": ["self"],
}
_ADVICE = (
    f"PadMinMixin was checked with {CHECKED}: use that, or PadMinConfig(enabled=False), until it supports this version"
)
POSITIONS = ("token_type_ids", "mm_token_type_ids")


def stock_class(kind: type) -> type | None:
    """TRL's own class that a trainer is made of; None if there is none."""
    return next((each for each in kind.__mro__ if each.__module__.split(".")[0] == "trl"), None)


def release() -> tuple[int, ...]:
    """Of this TRL."""
    return release_of(trl.__version__)


def check_release() -> None:
    """Raises ConfigError for a TRL older than the oldest that is supported."""
    if release() < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"trl {trl.__version__} is installed, and PadMinMixin needs trl>={wanted}: pip install -U 'trl>={wanted}'"
        )


def check_signatures(stock: type) -> None:
    """Raises ConfigError when this TRL's private hooks are not those that were checked."""
    check_hooks([(stock, name, expected) for name, expected in _EXPECTED.items()], "trl", trl.__version__, _ADVICE)


def check_attributes(trainer: Any) -> None:
    """Raises ConfigError when a trainer does not keep what the mixin reads."""
    for name in ("_buffered_inputs", "_step", "_metrics"):
        if not hasattr(trainer, name):
            raise ConfigError(f"trl {trl.__version__}: {type(trainer).__name__}.{name} is gone, expected it. {_ADVICE}")


def distributed_type(trainer: Any) -> str:
    """NO, MULTI_GPU, FSDP, ..., as accelerate calls them."""
    name: str = trainer.accelerator.distributed_type.value
    return name


def models_of(trainer: Any) -> dict[str, nn.Module]:
    """The policy and, where there is one, the reference model, by name."""
    models = {name: getattr(trainer, name, None) for name in ("model", "ref_model")}
    return {name: trainer.accelerator.unwrap_model(model) for name, model in models.items() if model is not None}


def upcoming(trainer: Any, inputs: Mapping[str, Any], position: int) -> Sequence[Mapping[str, Any]]:
    """The stock micro-batches from this one on, up to the optimizer step or the end of the generated batch.

    Args:
        trainer: of TRL.
        inputs: the prepared inputs of this step.
        position: this step's place in its accumulation window.
    """
    buffered = trainer._buffered_inputs
    # A step of the user's may act on the gradients of the rows that it has got.
    if buffered is None or has_own_step(trainer) or prepares_itself(type(trainer)):
        return [inputs]
    first = trainer._step % trainer.args.steps_per_generation
    left = max(trainer.current_gradient_accumulation_steps - position, 1)
    entries: Sequence[Mapping[str, Any]] = buffered[first : first + left]
    return entries if entries and entries[0] is inputs else [inputs]


def prepares_itself(kind: type) -> bool:
    """Whether a class of the user's changes prepared inputs, which it has not done yet for the steps to come."""
    packages = ("trl", "transformers", "lightning_padmin")
    return any(
        "_prepare_inputs" in vars(each) for each in kind.__mro__ if each.__module__.split(".")[0] not in packages
    )


def optional_names(stock: Any) -> list[str]:
    """Names of what the log-prob function takes behind its four required arguments."""
    return list(inspect.signature(stock).parameters)[len(_EXPECTED[LOG_PROBS]) - 1 :]


def count_time(trainer: Any, seconds: float) -> None:
    """Adds to the `step_time` that is logged, which the stock step measures for what runs inside of it alone."""
    if hasattr(trainer, "_current_train_step_time"):
        trainer._current_train_step_time += seconds


def plain_training_step(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
    """Forward and backward pass alone, without what the trainer counts once per step."""
    loss: Tensor = Trainer.training_step(trainer, model, inputs, num_items_in_batch)
    return loss


@contextmanager
def without_trace(trainer: Any) -> Iterator[None]:
    """Calls of the stock loss inside leave no metric, log and attribute, however deep, and run no collective."""
    with untouched_trainer(trainer):
        trainer.log = lambda *_, **__: None
        trainer.accelerator = _Alone(trainer.accelerator)
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        yield


def as_if_synchronising(trainer: Any, ends_window: bool) -> AbstractContextManager[None]:
    """Calls of the stock loss inside find an accelerator that is, or is not, at the end of an accumulation window."""
    return replaced(trainer, accelerator=_Stand(trainer.accelerator, ends_window))


class _Stand:
    """An accelerator that stands elsewhere in its accumulation window."""

    def __init__(self, accelerator: Any, sync_gradients: bool) -> None:
        self._accelerator, self.sync_gradients = accelerator, sync_gradients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


class _Alone(_Stand):
    """An accelerator whose collectives are those of one process, never at the end of an accumulation window."""

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator, sync_gradients=False)

    def gather(self, value: Any) -> Any:
        return value

    def gather_for_metrics(self, value: Any, *args: Any, **options: Any) -> Any:
        return value

    def reduce(self, value: Any, *args: Any, **options: Any) -> Any:
        return value

    def pad_across_processes(self, value: Any, *args: Any, **options: Any) -> Any:
        return value


def loss_tokens(inputs: Any) -> int:
    """Tokens that carry loss in a batch of a trainer that learns from a dataset, after the shift; 0 where none do.

    Labels of SFT, completion masks of DPO and KTO (labels of completions before 1.16); a reward is of a row.
    """
    for name, outside in (
        ("shift_labels", -100),
        ("completion_mask", 0),
        ("completion_labels", -100),
        ("labels", -100),
    ):
        values = inputs.get(name) if isinstance(inputs, Mapping) else None
        if isinstance(values, Tensor) and values.ndim == 2:
            return int((values[:, int(name != "shift_labels") :] != outside).sum())
    return 0


def tokens_of(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Prompts and completions of a prepared batch side by side, (B, P + T), as stock `compute_loss` joins them."""
    joined = {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
    }
    return joined | {name: inputs[name] for name in POSITIONS if inputs.get(name) is not None}
