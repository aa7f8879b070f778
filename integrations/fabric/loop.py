"""`FabricPadMin`: the micro-batches of a batch in a training loop written with Lightning Fabric.

Only Fabric's public interface is used. Everything that can fail, and the one collective, come before the first
micro-batch; from then on a loop only gathers rows and decides whether gradients are reduced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

try:
    from lightning.fabric import Fabric
except ImportError as error:
    raise ImportError('FabricPadMin needs Lightning: pip install "lightning-padmin[lightning]"') from error

from lightning.fabric import wrappers
from lightning.fabric.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
)
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.fabric.wrappers import is_wrapped
from torch import Tensor, nn

from lightning_padmin.config import PadMinConfig, as_config
from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common import (
    Kind,
    LossCheck,
    LossChecks,
    LossFunction,
    Session,
    Shared,
    Topology,
    Training,
    has_static_graph,
    replaced,
    run_loop,
)
from lightning_padmin.microbatching import MicroBatch
from lightning_padmin.stats import PaddingStats

__all__ = ["FabricPadMin", "micro_batched_backward"]

# Fabric's flag is the process's.
_backwards_are_ours = Shared(lambda: replaced(wrappers, _in_fabric_backward=True))
_FIX_OF_HOOKS = "Do that once per batch, behind the loop over micro_batches and before optimizer.step()"


class FabricPadMin:
    """Rolls, trims and splits the batches of a Fabric training loop into micro-batches under a token budget.

    Gradients, clipping and optimizer steps are those of the whole batch. One object per training loop; it counts, and
    remembers what it has already checked. Works on one device, with DDP, FSDP, and ModelParallelStrategy (FSDP2).

    Args:
        fabric: the `Fabric` of the loop; it may still have to be launched.
        config: the options; default: `PadMinConfig()`. With `enabled=False` every batch comes back as it is.
        defer_sync: True: gradients are reduced over ranks in the last micro-batch of a step only. False: in every
            micro-batch, which gives the same gradients. None: True for DDP, where deferring costs nothing, and False
            for FSDP, which while it waits holds un-sharded gradients of the whole model on every device.
            ModelParallelStrategy cannot defer safely: what it has not reduced yet survives `zero_grad`.
        proof_dir: the folder below which rank 0 writes a line for each audit, `padmin/proof.jsonl`. None: nowhere.

    Attributes:
        stats: `PaddingStats` of this rank, over all batches whose loop ran to its end.

    Raises:
        ConfigError: `fabric`, `config` or `defer_sync` is something else, or the strategy is not supported.

    Example:
        >>> pad = FabricPadMin(fabric, PadMinConfig(token_budget=16_384))
        >>> for batch in loader:
        ...     for micro, weight in pad.micro_batches(batch, model):
        ...         fabric.backward(model(**micro).loss * weight)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> fabric.log_dict(pad.metrics(), step)
    """

    def __init__(
        self,
        fabric: Fabric,
        config: PadMinConfig | None = None,
        *,
        defer_sync: bool | None = None,
        proof_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.config = as_config(config)
        if not isinstance(fabric, Fabric):
            raise ConfigError(
                f"fabric={fabric!r}: expected a lightning.fabric.Fabric (with a Trainer use PadMinCallback, in a plain "
                "loop iter_micro_batches)"
            )
        if not isinstance(defer_sync, bool | None):
            raise ConfigError(f"defer_sync={defer_sync!r}: expected True, False or None")
        if not isinstance(proof_dir, str | os.PathLike | None):
            raise ConfigError(f"proof_dir={proof_dir!r}: expected the path of a folder, or None")
        self._session = Session("FabricPadMin", self.config, tell=_tell)
        self._session.audits.prove_in(proof_dir)
        is_half = False
        if self.config.enabled:
            _refuse_strategy(fabric.strategy, defer_sync)
            self._session.refuse_packs("FabricPadMin.micro_batches")
            is_half = not fabric.strategy.precision.precision.startswith(("32", "64"))
        self.fabric = fabric
        self._checks = LossChecks(self._session, self._quiet, is_half)
        self._defer_sync = not _is_sharded(fabric) if defer_sync is None else defer_sync

    @property
    def stats(self) -> PaddingStats:
        """Counts of this rank, over all batches whose loop ran to its end."""
        return self._session.stats

    @stats.setter
    def stats(self, stats: PaddingStats) -> None:
        self._session.stats = stats

    def micro_batches(self, batch: Any, model: nn.Module, *, is_accumulating: bool = False) -> Iterator[MicroBatch]:
        """The micro-batches of one batch, for one forward pass and one `fabric.backward(loss * weight)` each.

        The batch is planned, and all ranks agree, before this method returns. Forward and backward pass both belong
        into the body of the loop, which must run to its end: whether gradients are reduced is switched around it.
        Nobody checks whether losses are what the options declare: `backward` does, this loop cannot.

        Args:
            batch: this rank's batch, on its device; it is only read.
            model: what `fabric.setup` or `fabric.setup_module` returned.
            is_accumulating: more batches follow before the optimizer steps. Where reducing gradients is deferred (see
                `defer_sync`), no micro-batch of this batch reduces them, so the last batch of a step must be given
                False. Divide the losses by the number of batches yourself, as without this library.

        Returns:
            An iterator; unpack each item as `micro, weight`. With `enabled=False` the batch itself, with weight 1.0.

        Raises:
            ConfigError: `model` was not set up by Fabric, or `is_accumulating` is no bool.
            PadMinError: on every rank when any rank has a batch that cannot be planned, a model that cannot be split
                (batch normalization in training mode, say), or a previous loop that was left before its end.
        """
        return self._start(batch, model, is_accumulating)[0]

    def backward(self, batch: Any, model: nn.Module, loss_fn: LossFunction, *, is_accumulating: bool = False) -> Tensor:
        """The loop over `micro_batches` with its backward passes, for a loss that is all there is to a step.

        Unlike a loop of your own it is checked: gradients of a few rows, split and as they came, before the first
        batch that can tell is sent backward, and with `check="audit"` before later ones that show something new, and
        now and then. `loss_fn` is called for that too; what it writes into the model and into variables that it
        names is put back. And it gets over a batch without any loss tokens, whose mean loss is 0/0: gradients of
        zero then flow back from the tensors that calling `model` gave, so that no rank waits for another.

        Args:
            batch: this rank's batch, on its device; it is only read.
            model: what `fabric.setup` or `fabric.setup_module` returned.
            loss_fn: takes a micro-batch of the batch's own type, calls `model`, returns the loss, one number.
            is_accumulating: as for `micro_batches`.

        Returns:
            (), the loss of the whole batch on this rank, detached.

        Raises:
            ConfigError: `loss_fn` returns something else, besides what `micro_batches` refuses.
            GradientCheckError: splitting is not exact for this loss; names the fix. Before the batch is sent
                backward gradients stay as they are, those of batches before it in the same step included. Where the
                kind of the loss gives it away, that is known behind a backward pass only: gradients are of a part of
                the batch then, and all of `model` are dropped, as by `model.zero_grad(set_to_none=True)`.
            PadMinError: as `micro_batches` does, before the first call of `loss_fn`.
        """
        steps, check = self._start(batch, model, is_accumulating, loss_fn)
        return run_loop(steps, check, loss_fn, self.fabric.backward)

    def _start(
        self, batch: Any, model: nn.Module, is_accumulating: bool, loss_fn: LossFunction | None = None
    ) -> tuple[Iterator[MicroBatch], LossCheck | None]:
        """The loop, and what checks losses in it; None where nothing is split."""
        if not isinstance(is_accumulating, bool):
            raise ConfigError(f"is_accumulating={is_accumulating!r}: expected True or False")
        if not is_wrapped(model) or not isinstance(model, nn.Module):
            raise ConfigError(
                f"model={type(model).__name__}: expected what Fabric returned: model = fabric.setup_module(model)"
            )
        self._session.agree_in_loop()  # a rank that splits would wait for one that does not
        # With a static graph DistributedDataParallel cannot be told to wait.
        may_wait = self._defer_sync and not has_static_graph(model)
        training = self._training(model) if self.config.enabled else None

        @contextmanager
        def around(micro: MicroBatch) -> Iterator[None]:
            with ExitStack() as stack:
                if training is not None:
                    stack.enter_context(training.around(micro.index, micro.count))
                if may_wait and (is_accumulating or not micro.is_last):
                    stack.enter_context(self.fabric.no_backward_sync(model))
                yield

        if training is None:
            return self._session.loop_as_it_came(batch, around), None
        check = self._checks.of(training)
        planned = check.prepare(batch) if loss_fn is None else check.prepare_for(batch, loss_fn)
        self._mend_synchronisation(model)
        return self._session.loop(planned, around), check

    def discard(self) -> None:
        """Forgets a loop that was left before its end on purpose, and lets gradients be reduced again.

        After an error that you survive (a batch that ran out of memory, say): this, and `optimizer.zero_grad()`. If
        other ranks finished that batch, they wait for this one's gradients; that cannot be mended here.
        """
        self._session.discard()

    def metrics(self) -> dict[str, float | int]:
        """What the batches since the last call cost: counts over all ranks first, ratios last.

        A collective: call it on every rank, between batches.

        Returns:
            `padmin/waste` and the others (with the prefix `log_prefix`), the same on every rank, ready for
            `fabric.log_dict`. Empty where no batch has been finished, and with `enabled=False`.
        """
        return self._session.metrics(self._topology)

    def state_dict(self) -> dict[str, Any]:
        """The counters and what was audited, so that this object can be part of the state given to `fabric.save`."""
        return self._session.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on counting.

        Raises:
            PadMinError: a count is unknown or no integer, or a record of audits is malformed.
        """
        self._session.load_state_dict(state_dict)

    def _training(self, model: nn.Module) -> Training:
        """One per model, since an encoder-decoder's labels run along the decoder."""
        return self._session.training(
            model,
            lambda: Training(
                self._session,
                _original(model),
                self._topology,
                fix_of_hooks=_FIX_OF_HOOKS,
                wrapper=model,
                check=self._check,
            ),
        )

    def _quiet(self) -> AbstractContextManager[None]:
        """Backward passes inside need not go through `fabric.backward`, which scales losses and steps engines."""
        return _backwards_are_ours.on()

    def _check(self, training: Training) -> None:
        """What must hold before a batch is read; all ranks hear of an error."""
        self._session.loops.refuse_unfinished()
        training.check()

    @property
    def _topology(self) -> Topology:
        """As it is once Fabric is launched."""
        fabric, strategy = self.fabric, self.fabric.strategy
        kind: Kind = "sharded" if _is_sharded(fabric) else "ddp" if isinstance(strategy, DDPStrategy) else "single"
        group = None
        if fabric.world_size > 1 and isinstance(strategy, ModelParallelStrategy):
            # Ranks of one tensor-parallel group share a batch, which is to be counted once.
            group = strategy.device_mesh["data_parallel"].get_group()
        return Topology(fabric.global_rank, fabric.world_size, kind, group=group)

    def _mend_synchronisation(self, model: nn.Module) -> None:
        """Fabric's context for FSDP2, entered with enabled=False, leaves gradients un-reduced for good when it ends.

        That is how its documentation accumulates, so a training loop may well have done it before. Ended after
        enabled=True, the context has them reduced again.
        """
        if isinstance(self.fabric.strategy, ModelParallelStrategy):
            with self.fabric.no_backward_sync(model):
                pass


def micro_batched_backward(
    fabric: Fabric, model: nn.Module, batch: Any, loss_fn: LossFunction, config: PadMinConfig | None = None
) -> Tensor:
    """Forward and backward passes for one batch, split into micro-batches; see `FabricPadMin.backward`.

    Nothing is remembered between calls, so the loss is not checked: that would cost more than the batch, each time. In
    a training loop make one `FabricPadMin` and call its `backward`, which checks it, inspects the model once, says each
    warning once, and has metrics.

    Args:
        fabric: the `Fabric` that has set up `model`.
        model: what `fabric.setup` or `fabric.setup_module` returned.
        batch: this rank's batch, on its device; it is only read.
        loss_fn: takes a micro-batch of the batch's own type, calls `model`, returns the loss, one number.
        config: the options; default: `PadMinConfig()`.

    Returns:
        (), the loss of the whole batch on this rank, detached.

    Raises:
        PadMinError: before the first call of `loss_fn`, on every rank when any rank has one.
    """
    return FabricPadMin(fabric, replace(as_config(config), check="off")).backward(batch, model, loss_fn)


def _refuse_strategy(strategy: object, defer_sync: bool | None) -> None:
    name = type(strategy).__name__
    if isinstance(strategy, ModelParallelStrategy) and defer_sync:
        raise ConfigError(
            f"defer_sync=True with {name}: FSDP2 keeps gradients that it has not reduced where zero_grad does not "
            "reach, so a batch that is given up (after an error, say) would be part of the next step. Leave defer_sync "
            "out: reducing in every micro-batch gives the same gradients"
        )
    if isinstance(strategy, DeepSpeedStrategy):
        raise ConfigError(
            f"strategy={name}: DeepSpeed's engine counts backward passes and reduces gradients after a fixed number of "
            "them (gradient_accumulation_steps), while the number of micro-batches differs from batch to batch. Use "
            "DDPStrategy, FSDPStrategy or ModelParallelStrategy, or PadMinConfig(enabled=False)"
        )
    known = SingleDeviceStrategy | DDPStrategy | FSDPStrategy | ModelParallelStrategy
    if not isinstance(strategy, known) or isinstance(strategy, SingleDeviceXLAStrategy):
        raise ConfigError(
            f"strategy={name}: FabricPadMin does not know when it reduces gradients, so it cannot promise those of the "
            "whole batch. Use one device, DDPStrategy, FSDPStrategy or ModelParallelStrategy, or "
            "PadMinConfig(enabled=False)"
        )


def _is_sharded(fabric: Fabric) -> bool:
    return isinstance(fabric.strategy, FSDPStrategy | ModelParallelStrategy)


def _tell(words: str) -> None:
    rank_zero_info(words)


def _original(model: nn.Module) -> nn.Module:
    """The user's own module inside of what Fabric returned (compiled or not)."""
    module = model.module
    assert isinstance(module, nn.Module)
    return module
