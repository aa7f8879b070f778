"""What stands behind `PadMinTrainerMixin`: plans, checks and passes of one Trainer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

try:
    import transformers
    from transformers import Trainer
except ImportError as error:
    raise ImportError("PadMinTrainerMixin needs transformers: pip install transformers accelerate") from error

from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import GradientCheckError, GradientHookError, PeerError, TrainingStepError
from lightning_padmin.integrations.common import (
    MOST_BATCHES,
    Advice,
    FirstBatches,
    OneLoss,
    Outcome,
    Read,
    Session,
    Sites,
    Training,
    WholeSteps,
    check_hooks,
    check_step,
    has_step_in_front,
    own_step,
    reducing,
    refuse_batch_statistics,
    replaced,
    topology_of,
)
from lightning_padmin.integrations.transformers.joint import whole_steps
from lightning_padmin.integrations.transformers.support import refuse_unsupported, why_not_packed
from lightning_padmin.microbatching import (
    MemoryGuard,
    MicroBatch,
    MicroBatcher,
    MicroBatches,
    OutOfMemoryError,
    PackStyle,
)
from lightning_padmin.stats import PaddingStats

_STOP = "use PadMinConfig(enabled=False)"
_COUPLED_ELSEWHERE = (
    "Leave PadMinTrainerMixin out and call the model through lightning_padmin.PaddedForward in your own compute_loss, "
    "taking the loss of its outputs, or " + _STOP
)
_COUPLED = "Run the model in chunks with mode='joint', or " + _STOP
_ONCE = (
    "in on_step_end of a TrainerCallback, or in a training_step of a class in front of the mixin, "
    "class MyTrainer(Mine, PadMinTrainerMixin, Trainer)"
)
_SUM = "A sum over num_items_in_batch"
_FIX_OF_HOOKS = (
    "Do that once per step, in on_pre_optimizer_step of a TrainerCallback (an optimizer that steps in the backward "
    "pass: use it without), or use PadMinConfig(enabled=False)"
)
_FIX_OF_HOOKS_IN_CHUNKS = (
    "It fires once for each chunk here: checkpoint with gradient_checkpointing_kwargs={'use_reentrant': False}, or use "
    "PadMinConfig(enabled=False)"
)
_FIX_OF_STEPS = (
    "Put the class in front of the mixin, class MyTrainer(Mine, PadMinTrainerMixin, Trainer), where its step runs once "
    "per batch; or use PadMinConfig(enabled=False)"
)
# method -> first parameters, as checked with transformers 5.24
_EXPECTED = {
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "compute_loss": ["self", "model", "inputs"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
}
_logger = logging.getLogger(__name__)


class _Share(dict[str, Any]):
    """A stock batch of a window, with the chunks that its step runs in its place."""

    def __init__(self, batch: Any, chunks: MicroBatches, indices: range, guard: MemoryGuard) -> None:
        super().__init__(batch)
        self.chunks, self.indices, self.guard, self.has_run = chunks, indices, guard, False
        self._came = [(name, each, getattr(each, "_version", 0)) for name, each in self.items()]

    @property
    def is_as_it_came(self) -> bool:
        """Whether entries are those that they were, and nobody has written into them."""
        return len(self) == len(self._came) and all(
            self.get(name) is each and getattr(each, "_version", 0) == version for name, each, version in self._came
        )


class Engine:
    """Runs the steps of one Trainer in chunks.

    Args:
        trainer: the Trainer, set up.
        config: the options; with `enabled=False` all that is done is to tell other ranks.

    Attributes:
        config: the options, with what the Trainer knows besides.
        pools: whether the loss is a sum over the targets of all batches of a window; None: that is open.

    Raises:
        ConfigError: the Trainer, its arguments or its version are not supported; names the fix.
        ArchitectureError: the model's outputs for a row depend on the rows that run with it.
    """

    def __init__(self, trainer: Any, config: PadMinConfig) -> None:
        self._trainer, self.config = trainer, config
        self.pools: bool | None = None
        self._first, self._means_have_told = FirstBatches(config.check != "off"), config.check == "off"
        self._as_stock = self._gives_up = False  # whether this window, and all that come, run as they came
        self._dealt = self._lost = 0  # batches whose rows were regrouped, targets that were subtracted
        self._whole: WholeSteps | None = None  # what runs steps in joint mode
        self._topology = topology_of(trainer)
        self._session = Session("PadMinTrainerMixin", config, is_main=lambda: trainer.accelerator.is_main_process)
        self._session.announce()
        if config.enabled:
            self._set_up()

    def _set_up(self) -> None:
        trainer, model = self._trainer, self._trainer.model
        _check_signatures()
        refuse_unsupported(trainer, self.config)
        is_joint = self.config.mode == "joint"
        self._training = Training(
            self._session,
            model,
            self._topology,
            fix_of_hooks=lambda: _FIX_OF_HOOKS if self._whole is None else _FIX_OF_HOOKS_IN_CHUNKS,
            check=self._look_at_hooks,
            tolerate={"batch-norm", "balance-loss"} if is_joint else {"batch-norm"},
        )
        self._session.audits.prove_in(trainer.args.output_dir)
        if is_joint:
            self._run_joint()
            return
        self._training.look()
        self._losses = OneLoss(type(trainer), _FIX_OF_STEPS)
        self._training.findings.refuse()
        sources = (getattr(trainer, "processing_class", None), getattr(model, "config", None))
        known = next((p for each in sources if isinstance(p := getattr(each, "pad_token_id", None), int)), None)
        if self.config.pad_token_id is None and known is not None:
            self.config = replace(self.config, pad_token_id=known)
        gate = self._session.pack_policy(
            lambda: why_not_packed(trainer, self.config),
            lambda: {"model": trainer.accelerator.unwrap_model(model)},
            trainer.compute_loss_context_manager,
            say=self._say if self.config.layout == "auto" else None,
        )
        self._training.use_gate(gate, asks_of_step=True)
        self._batcher = self._training.batcher(self.config)
        # For windows whose loss is a sum over the targets of all batches; None: the first batch is going to tell.
        summed = replace(self.config, loss_reduction="sum")
        self._pooling = self._training.batcher(summed, subtracts_lost=self._subtracts_lost)

    def _run_joint(self) -> None:
        """Steps run whole from now on, with calls of models in chunks."""
        self._whole = whole_steps(self._trainer, self._session, self._training)
        self._training.way = "joint"

    def _look_at_hooks(self, training: Training) -> None:
        """Those that are new, as the ones of an optimizer that `train` has made; the model may be another by then."""
        model = self._trainer.model_wrapped
        training.hooks.look(self._trainer.accelerator.unwrap_model(model), wrapper=model)

    # A training.

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around a training, in which ranks hear why another one has ended."""
        self._session.kept.begin()
        with self._session.telling_others(), ExitStack() as stack:
            if self._whole is not None:  # around steps of classes in front of the mixin, too
                step = self.step_in_place_of(self._trainer.training_step)
                stack.enter_context(replaced(self._trainer, training_step=step))
            yield

    def agree(self) -> None:
        """Once every rank has made its Trainer: all were given the same options. A checkpoint is loaded by now."""
        self._session.agree()
        self._session.kept.resume(self._trainer.state)

    # A window.

    def window(self, batches: list[Any], num_items: Any) -> tuple[list[Any], Any]:
        """The stock batches of a window and the number of its targets, each with the chunks that its step will run."""
        self._dealt = 0
        if self._whole is not None:
            self._whole.before_window(batches, num_items)
            return batches, num_items
        if not self.config.enabled or not batches or num_items is None:
            return batches, num_items
        self._as_stock, self._lost = False, 0
        if has_step_in_front(self._trainer):  # what it hands on is not known yet
            return batches, self._without_lost_of(batches, num_items)
        self._look_at_reduction(batches, num_items)
        if not self.pools:
            return batches, num_items
        self._prove(batches, num_items, self._pooling)
        chunks = self._training.prepare_window(batches, by=self._pooling, min_micro_batches=len(batches))
        self._audit(chunks, num_items, self._pooling)
        self._look_at_first_labels(chunks, num_items, self._pooling)
        guard = self._training.guard(chunks)
        num_items = self._without_lost(num_items, chunks, batches)
        count, self._dealt = len(batches), len(batches)
        parts = [range(k * len(chunks) // count, (k + 1) * len(chunks) // count) for k in range(count)]
        shares = [_Share(batch, chunks, part, guard) for batch, part in zip(batches, parts, strict=True)]
        self._session.count(chunks.stats)
        return list(shares), num_items

    def _without_lost(self, num_items: Any, chunks: MicroBatches, batches: list[Any]) -> Any:
        """The number of targets as in a right-padded window: those predicted from padding are none once rolled.

        Stock counts labels from the second column on, so that in a right-padded batch the first token's is not counted.
        """
        if not self._subtracts_lost or "shift_labels" in batches[0] or not chunks.lost_targets:
            return num_items
        of_all = self._trainer.args.average_tokens_across_devices
        return num_items - (chunks.lost_targets if of_all else chunks.table.lost_targets)

    def _without_lost_of(self, batches: list[Any], num_items: Any) -> Any:
        """The same for batches that are going to be split one by one."""
        if not self._subtracts_lost or "shift_labels" in batches[0]:
            return num_items
        lost = sum(self._training.read(batch, by=self._pooling)[1].lost_targets for batch in batches)
        if self._trainer.args.average_tokens_across_devices:
            lost = int(self._topology.exchange([lost]).sum())
        self._lost = lost
        return num_items - lost if lost else num_items

    @property
    def _subtracts_lost(self) -> bool:
        """Whether the Trainer counts targets as a loss does that shifts labels."""
        return bool(getattr(self._trainer, "_loss_shifts_labels", True))

    # A step.

    def step_in_place_of(self, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`training_step`, which does forward and backward passes of its chunks."""
        if self._whole is not None:
            return self._whole.in_place_of(stock)
        return partial(self._step, stock) if self.config.enabled else stock

    def _step(self, stock: Callable[..., Tensor], model: Any, inputs: Any, num_items: Any) -> Tensor:
        if num_items is not None and self.pools is None and not self._as_stock:
            self._look_at_reduction([inputs], num_items)
        if self._as_stock:
            lost = self._lost if num_items is not None else 0
            return stock(model, inputs, num_items + lost if lost else num_items)
        model.train()
        refuse_batch_statistics(model)
        sums = bool(self.pools) and num_items is not None
        batcher = self._pooling if sums else self._batcher
        if self._dealt:
            self._refuse_changed(model, inputs)
            chunks, indices, guard = inputs.chunks, inputs.indices, inputs.guard
        else:
            self._prove([inputs], num_items, batcher)
            chunks = self._training.prepare(inputs, by=batcher)
            indices, guard = range(len(chunks)), self._training.guard(chunks)
            self._session.count(chunks.stats)
        if self.pools and not sums:
            self._check_means(inputs)
        if self._first.is_due:
            self._check(batcher.read_made_together(lambda: dict(inputs)), num_items, batcher)
        elif not self._dealt:
            self._audit(chunks, num_items, batcher)
        if not self._dealt:
            self._look_at_first_labels(chunks, num_items, batcher)
        return self._run(stock, model, chunks, indices, guard, num_items, sums)

    def _run(
        self,
        stock: Callable[..., Tensor],
        model: Any,
        chunks: MicroBatches,
        indices: range,
        guard: MemoryGuard,
        num_items: Any,
        sums: bool,
    ) -> Tensor:
        """Forward and backward passes of the chunks of one step."""
        total: Any = 0.0
        accelerator = self._trainer.accelerator
        own = accelerator.unwrap_model(model)
        # Where other processes write into gradients, what a step of the user's does with them cannot be told.
        alone = accelerator.distributed_type == DistributedType.NO
        is_part = len(chunks) > 1 and (alone or isinstance(model, DistributedDataParallel))
        try:
            for k in indices:
                hooks = self._training.around(k, len(chunks))
                with guard.around(k), hooks, self._synchronised(model, k == indices[-1]):
                    micro = chunks[k]

                    def heard(loss: Tensor, k: int = k, micro: MicroBatch = micro) -> None:
                        guard.forward_is_done(k)
                        if micro.has_loss and not micro.is_dummy:
                            self._training.hear(loss, micro.rows)

                    with (
                        self._losses.chunk(own, is_part and (alone or k != indices[-1])),
                        self._weighted(micro.weight, heard, num_items if sums else None),
                    ):
                        total = total + stock(model, micro.batch, num_items)
                self._settle(chunks, num_items, is_last=k == len(chunks) - 1)
        except (OutOfMemoryError, PeerError, TrainingStepError, GradientHookError, GradientCheckError):
            model.zero_grad(set_to_none=True)  # gradients of a part of a batch
            raise
        return total  # type: ignore[no-any-return]

    def _refuse_changed(self, model: Any, inputs: Any) -> None:
        """Rows of this window have been regrouped already, so that its batches can run once each, as they came."""
        what = "another batch came"
        if isinstance(inputs, _Share):
            if not inputs.has_run and inputs.is_as_it_came:
                inputs.has_run = True
                return
            what = "a batch came twice" if inputs.has_run else "a batch was written into"
        model.zero_grad(set_to_none=True)
        raise TrainingStepError(
            f"{type(self._trainer).__qualname__}: {what}, after rows of {self._dealt} batches had been regrouped for "
            "their steps. Do that in a training_step of a class in front of the mixin, class MyTrainer(Mine, "
            "PadMinTrainerMixin, Trainer), for which batches are split one by one; or use PadMinConfig(enabled=False)"
        )

    def _weighted(self, weight: float, heard: Callable[[Tensor], None], num_items: Any) -> AbstractContextManager[None]:
        """Has `compute_loss`, whichever class defines it, return its loss times the weight of the chunk.

        Where the loss is a sum over `num_items`, it must get that number.
        """
        trainer = self._trainer
        # Called with all that stock calls it with; what it returns depends on this argument.
        names = list(inspect.signature(Trainer.compute_loss).parameters)[1:]
        position, divisor = names.index("return_outputs"), names.index("num_items_in_batch")

        def finish(result: Any, *args: Any, **options: Any) -> Any:
            returns_outputs = args[position] if len(args) > position else options.get("return_outputs", False)
            heard(result[0] if returns_outputs else result)
            given = args[divisor] if len(args) > divisor else options.get("num_items_in_batch")
            if num_items is not None and (given is None or bool(given != num_items)):
                raise TrainingStepError(
                    f"{own_step(trainer) or 'training_step'} does not hand num_items_in_batch on as it "
                    "is, and the loss is a sum over that number: hand it on, put the class in front of the mixin, "
                    "class MyTrainer(Mine, PadMinTrainerMixin, Trainer), or use PadMinConfig(enabled=False)"
                )
            if returns_outputs:
                return (result[0] * weight, *result[1:])
            return result * weight

        return replaced(trainer, compute_loss=self._losses.of(trainer.compute_loss, finish))

    @contextmanager
    def _synchronised(self, model: Any, is_last: bool) -> Iterator[None]:
        """Gradients are reduced, and DeepSpeed's engine steps, in the last chunk of a step only."""
        accelerator = self._trainer.accelerator
        with ExitStack() as stack:
            if not is_last and self._topology.kind == "ddp":
                stack.enter_context(accelerator.no_sync(model))
            if not is_last and accelerator.distributed_type == DistributedType.DEEPSPEED:
                state = accelerator.gradient_state
                before = state.sync_gradients
                state._set_sync_gradients(False)
                stack.callback(state._set_sync_gradients, before)
            yield

    # What kind of loss it is.

    def _look_at_reduction(self, batches: list[Any], num_items: Any) -> None:
        """Finds out what kind of loss this is, if that is open."""
        if self.pools is None and not self._gives_up:
            self.pools = self._decide(batches, num_items)
        # Neither way to split is known to be right then, so this window runs as it came.
        self._as_stock = self.pools is None
        if self._as_stock and self._first.count == 1 and self._trainer.accelerator.is_main_process:
            _logger.warning(
                "PadMinTrainerMixin: the first window does not tell whether the loss is a sum over num_items_in_batch "
                "(it has no two rows with loss, or no finite gradient), so windows run as they came until one tells"
            )

    def _decide(self, batches: list[Any], num_items: Any) -> bool | None:
        """Whether the loss is a sum over `num_items`: some models take that number and return a mean all the same.

        None where this window cannot tell.
        """
        if not self._first.is_due:
            return True
        self._training.begin_step()
        read = self._pooling.read_window_together(batches)
        try:
            outcome = self._check(read, num_items, self._pooling, is_trial=True)
        except GradientCheckError:
            self._check(self._batcher.read_made_together(lambda: read[0]), num_items, self._batcher)
            return False
        if outcome is not None and outcome.told:
            return True
        self._gives_up = not self._first.is_due
        if self._gives_up:
            found = outcome.words if outcome is not None else f"no batch among {MOST_BATCHES} has two rows with loss"
            self._say(
                f"{found}. So whether the loss is a sum over num_items_in_batch is not known, and batches run as they "
                "came. If it is one, set check='off'"
            )
        return None

    def _check(self, read: Read, num_items: Any, batcher: MicroBatcher, *, is_trial: bool = False) -> Outcome | None:
        """Gradients of a few rows through the Trainer's own `compute_loss`, un-split and split."""
        outcome = self._training.audited(
            lambda: self._gradients(read, num_items, batcher.config, may_stay_untold=is_trial), is_trial=is_trial
        )
        self._first.heard(outcome)
        if outcome is not None and outcome.notable and outcome.told:
            self._say(outcome.words)
        return outcome

    def _audit(self, chunks: MicroBatches, num_items: Any, batcher: MicroBatcher) -> None:
        """Checks a batch, or the rows of a window, that shows something new, or when the time has come."""
        if not self._training.audit_is_due or self._first.is_due:
            return
        read = chunks.source, chunks.schema, chunks.table
        if self._topology.kind != "sharded":
            self._check(read, num_items, batcher)
            return
        with reducing(self._trainer.model_wrapped) as none_waits:
            if none_waits:
                self._check(read, num_items, batcher)
            else:  # in the middle of a window
                self._training.postpone()

    def _settle(self, chunks: MicroBatches, num_items: Any, *, is_last: bool) -> None:
        """Behind a backward pass: checks the rows that are being trained on, where their loss is of a new kind."""
        batcher = self._pooling if self.pools and num_items is not None else self._batcher
        read = chunks.source, chunks.schema, chunks.table

        def audit(rows: Sequence[int]) -> Outcome | None:
            return self._gradients(read, num_items, batcher.config, prefer=rows)

        self._training.settle(audit, is_last=is_last)

    def _check_means(self, inputs: Any) -> None:
        """Checks the first batch that comes without `num_items`, though the loss has been one of a sum over it."""
        if self._means_have_told:
            return
        batcher = self._batcher
        outcome = self._gradients(batcher.read_made_together(lambda: dict(inputs)), None, batcher.config)
        self._means_have_told = outcome is not None and outcome.final

    def _look_at_first_labels(self, chunks: MicroBatches, num_items: Any, batcher: MicroBatcher) -> None:
        """Finds out, on the first batch that can tell, whether the loss takes labels on first tokens as declared."""
        if not self._first.first_is_open or not batcher.shows_first:
            return
        read = chunks.source, chunks.schema, chunks.table
        self._first.heard_of_first_labels(self._gradients(read, num_items, batcher.config, first_labels=True))

    def _prove(self, batches: list[Any], num_items: Any, batcher: MicroBatcher) -> None:
        """Finds out whether the loss takes packed rows; until it is known they are padded."""
        self._training.prove(
            lambda by: by.read_window_together(batches),
            lambda style, read: self._gradients(read, num_items, batcher.config, packs=style),
            by=batcher,
        )

    def _gradients(
        self,
        read: Read,
        num_items: Any,
        config: PadMinConfig,
        packs: PackStyle | None = None,
        first_labels: bool = False,
        prefer: Sequence[int] | None = None,
        may_stay_untold: bool = False,
    ) -> Outcome | None:
        trainer: Any = self._trainer
        accelerator, model = trainer.accelerator, trainer.model_wrapped

        def loss(inputs: Any) -> Tensor:
            prepared = trainer._prepare_inputs(dict(inputs))
            with trainer.compute_loss_context_manager():
                value: Tensor = trainer.compute_loss(model, prepared, num_items_in_batch=num_items)
            return value

        pools = config is self._pooling.config
        own = accelerator.unwrap_model(model)
        if self._topology.kind != "sharded":
            model = own  # DistributedDataParallel would take a call of its wrapper for a step
        return check_step(
            trainer,
            self._topology,
            loss,
            read,
            config,
            own,
            is_half=accelerator.mixed_precision not in ("no", None),
            packs=packs,
            first_labels=first_labels,
            wanted=self._training.wanted,
            values=self._training.values,
            prefer=prefer,
            may_stay_untold=may_stay_untold,
            subtracts_lost=pools and self._subtracts_lost,
            advice=Advice(
                _COUPLED if Sites(trainer, self.config)() else _COUPLED_ELSEWHERE, _STOP, _ONCE, _SUM if pools else None
            ),
        )

    @property
    def _if_coupled(self) -> str:
        return _COUPLED if Sites(self._trainer, self.config)() else _COUPLED_ELSEWHERE

    # Checkpoints.

    def keep(self) -> None:
        """Has what was audited written into checkpoints."""
        self._session.kept.keep(self._trainer.state)

    # Counts, and what is said.

    @property
    def stats(self) -> PaddingStats:
        """Counts of this rank's training passes."""
        return self._session.stats

    def metrics(self) -> dict[str, float | int]:
        """`padmin/*` since the last call, over all ranks, ratios last; to be called on every rank."""
        return self._session.metrics(self._topology)

    def _say(self, words: str) -> None:
        self._session.notices(words, key=words)


def _check_signatures() -> None:
    """Raises ConfigError when this Trainer's methods are not those that were checked."""
    check_hooks(
        [(Trainer, name, expected) for name, expected in _EXPECTED.items()],
        "transformers",
        transformers.__version__,
        "PadMinTrainerMixin was checked with 5.24; use that until it supports this version",
    )


__all__ = ["Engine"]
