"""What Trainers of transformers and of TRL have alike: an accelerator, a `compute_loss`, and steps that users write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_padmin.architectures import HookWatch, reenters
from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common.topology import Kind, Topology
from lightning_padmin.integrations.common.training import Read
from lightning_padmin.runtime import DATA_OF_TRAINERS, AttributeState, ModuleState, holders_of, replaced
from lightning_padmin.verification import Outcome, check_gradients, own_backward, step_of

# Accelerate's name of a way to distribute -> who sees to gradients
_KINDS: dict[str, Kind] = {"MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "sharded", "DEEPSPEED": "engine"}


def topology_of(trainer: Any) -> Topology:
    """As its accelerator says."""
    accelerator = trainer.accelerator
    kind = _KINDS.get(accelerator.distributed_type.value, "single")
    return Topology(accelerator.process_index, accelerator.num_processes, kind)


def refuse_data_parallel(trainer: Any) -> None:
    """Raises ConfigError for a process with several devices, and for a batch that several processes hold together."""
    count = getattr(trainer.args, "n_gpu", 1)
    if count > 1:
        raise ConfigError(f"n_gpu={count}: DataParallel splits batches by itself. Start one process per device")
    refuse_shared_batches(getattr(trainer, "accelerator", None))


def refuse_shared_batches(accelerator: Any) -> None:
    """Raises ConfigError where processes hold one batch together, whose counts are then not those of all of them."""
    parallelism = getattr(accelerator, "parallelism_config", None)
    shared = [name for name in ("tp", "cp", "sp") if getattr(parallelism, f"{name}_enabled", False)]
    if shared:
        sizes = ", ".join(f"{name}_size={getattr(parallelism, f'{name}_size', '?')}" for name in shared)
        raise ConfigError(
            f"parallelism_config with {sizes}: processes that hold one batch (tp), or parts of its rows (cp, sp), are "
            "not supported. Use data-parallel ones (dp_shard_size, dp_replicate_size), or enabled=False"
        )


# Steps of the user's own.


def own_step(trainer: Any) -> str | None:
    """Which class of the user's has a `training_step`, as words name it; None if no class has."""
    return step_of(*type(trainer).__mro__)


def has_own_step(trainer: Any) -> bool:
    """Whether a step of the user's may act on the gradients of a batch."""
    return _has_step_of_its_own(trainer) or own_step(trainer) is not None


def has_step_in_front(trainer: Any) -> bool:
    """Whether a step of the user's calls ours, and may look at its batch, change it, or act on its gradient."""
    kinds = type(trainer).__mro__
    return _has_step_of_its_own(trainer) or step_of(*kinds[: _place_of_mixin(kinds)]) is not None


def _has_step_of_its_own(trainer: Any) -> bool:
    """Whether an object has another step than its class."""
    step = vars(trainer).get("training_step")
    step = getattr(step, "padmin_stands_for", step)  # which an adapter may stand in for
    return step is not None and getattr(step, "__func__", None) is not type(trainer).training_step


def backward_of_step(trainer: Any) -> str | None:
    """Which step of the user's, called by ours, sends its loss backward itself; None if none does."""
    kinds = type(trainer).__mro__
    return own_backward(*kinds[_place_of_mixin(kinds) :])


def step_without_loss(trainer: Any) -> tuple[str, bool] | None:
    """Which step of the user's asks no `compute_loss` for what it sends backward, as far as its own code says.

    Returns:
        Its name, and whether it can be run without its backward pass, since it moves no optimizer; None if none is.
    """
    kinds = type(trainer).__mro__
    name = own_backward(*kinds)
    if name is None:
        return None
    kind = next(each for each in kinds if step_of(each) == name)
    names = set(vars(kind)["training_step"].__code__.co_names)
    return None if "compute_loss" in names else (name, not names & {"step", "zero_grad", "grad"})


def step_past_mixin(trainer: Any) -> str | None:
    """Which step of the user's stands in front of ours and never calls it; None if none does."""
    kinds = type(trainer).__mro__
    return own_backward(*kinds[: _place_of_mixin(kinds)])


def _place_of_mixin(kinds: tuple[type, ...]) -> int:
    return next(k for k, each in enumerate(kinds) if each.__module__.split(".")[0] == "lightning_padmin")


def look_for_whole_steps(hooks: HookWatch, model: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Before steps of one backward pass each, in which hooks on parameters fire as ever.

    But where checkpoints are passes of their own, they fire once for each chunk.

    Args:
        hooks: looks after them.
        model: what is trained, unwrapped.
        parts: modules that run in chunks.

    Raises:
        GradientHookError: one makes something else of parts of gradients.
    """
    hooks.look(model, list(parts), parameters=reenters(model))


# Passes that are not of the training.


@contextmanager
def untouched_trainer(trainer: Any) -> Iterator[None]:
    """What calls of `compute_loss` inside write into the trainer, and what belongs to it, is put back."""
    state = AttributeState(holders_of(trainer), DATA_OF_TRAINERS)
    try:
        with state.watching():
            yield
    finally:
        state.restore()


# Attributes into which the loop around steps writes.
_OF_LOOP = ("state", "control", "callback_handler", "_tr_loss", "current_flos", "optimizer", "lr_scheduler")


class StepState:
    """What a step of the user's own may write into; entered, it is kept, and left, it is put back.

    Not what the loop around steps writes into: several may come in between. There should be no gradients; they are
    taken away meanwhile.

    Args:
        model: what is trained, unwrapped.
        trainer: whose step it is.
    """

    def __init__(self, model: nn.Module, trainer: Any) -> None:
        self._model, self._trainer = model, trainer
        self._state: ModuleState | None = None

    def __enter__(self) -> None:
        self._state = ModuleState(self._model, [self._trainer], DATA_OF_TRAINERS + _OF_LOOP)

    def watching(self) -> AbstractContextManager[None]:
        """The step runs inside."""
        assert self._state is not None
        return self._state.watching()

    def __exit__(self, *_: object) -> None:
        assert self._state is not None
        own = vars(self._trainer)
        of_loop = {name: own[name] for name in _OF_LOOP if name in own}
        self._state.restore()
        own.update(of_loop)


def check_step(
    trainer: Any,
    topology: Topology,
    loss: Callable[[Any], Tensor],
    read: Read,
    config: PadMinConfig,
    model: nn.Module,
    said: set[str] | None = None,
    **how: Any,
) -> Outcome | None:
    """Gradients of a few rows, split and as they came, through a trainer's own loss; see `check_gradients`.

    Figures that the loss keeps in the trainer, and what it logs itself, are not of the training.

    Args:
        trainer: the trainer.
        topology: of its processes.
        loss: of prepared or plain inputs.
        read: a batch, its schema and its row table.
        config: the declarations that are checked.
        model: what is trained, unwrapped.
        said: filled with the names of what the loss logs.
        how: further arguments of `check_gradients`.
    """
    is_sharded = topology.kind == "sharded"

    def log(logs: Any, *_: Any, **__: Any) -> None:
        if said is not None:
            said.update(map(str, logs))

    with replaced(trainer, log=log):
        return check_gradients(
            loss,
            *read,
            config,
            model,
            exchange=topology.exchange,
            is_sharded=is_sharded,
            holders=holders_of(trainer),
            **how,
        )


__all__ = [
    "StepState",
    "backward_of_step",
    "check_step",
    "has_own_step",
    "has_step_in_front",
    "look_for_whole_steps",
    "own_step",
    "refuse_data_parallel",
    "refuse_shared_batches",
    "step_past_mixin",
    "step_without_loss",
    "topology_of",
    "untouched_trainer",
]
