"""What stands behind `PadMinTrainerMixin`: plans, checks and passes of one Trainer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

try:
    import transformers
    from transformers import Trainer
except ImportError as error:
    raise ImportError("PadMinTrainerMixin needs transformers: pip install transformers accelerate") from error

from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import (
    GradientCheckError,
    GradientHookError,
    PadMinError,
    PeerError,
    TrainingStepError,
)
from lightning_padmin.integrations.common import (
    MOST_BATCHES,
    Advice,
    BeforeStep,
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
    drop_gradients,
    has_step_in_front,
    own_step,
    reducing,
    refuse_batch_statistics,
    replaced,
    topology_of,
)
from lightning_padmin.integrations.transformers.auto import Auto, Window
from lightning_padmin.integrations.transformers.joint import refuse_unsupported as refuse_joint
from lightning_padmin.integrations.transformers.joint import whole_steps
from lightning_padmin.integrations.transformers.support import (
    JOINT,
    SPLIT,
    known_before,
    refuse_unsupported,
    why_not_packed,
)
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
        self.source = batch
        self.chunks, self.indices, self.guard, self.has_run = chunks, indices, guard, False
        self._came = [(name, each, getattr(each, "_version", 0)) for name, each in self.items()]

    @property
    def is_as_it_came(self) -> bool:
        """Whether entries are those that they were, and nobody has written into them."""
        return len(self) == len(self._came) and all(
            self.get(name) is each and getattr(each, "_version", 0) == version for name, each, version in self._came
        )


class _Parts(NamedTuple):
    """The chunks that a step runs: of a batch, or of a window.

    Attributes:
        chunks: all of them.
        indices: those of this step.
        guard: what stands around their passes.
        sums: whether the loss is a sum over the number of targets of the window.
    """

    chunks: MicroBatches
    indices: range
    guard: MemoryGuard
    sums: bool


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
        self._joint: WholeSteps | None = None  # what runs steps in joint mode
        self._auto: Auto | None = None
        self._window: Window | None = None  # whose rows were dealt over its steps
        self._before: BeforeStep | None = None  # while a step runs that may have to go another way
        self._has_looked = False  # whether this window was checked
        self._logged = set[str]()  # names that the loss has logged in a check
        self._topology = topology_of(trainer)
        self._session = Session("PadMinTrainerMixin", config, is_main=lambda: trainer.accelerator.is_main_process)
        self._session.announce()
        if config.enabled:
            self._set_up()

    def _set_up(self) -> None:
        trainer, model = self._trainer, self._trainer.model
        _check_signatures()
        refuse_unsupported(trainer, self.config)
        is_joint, is_auto = self.config.mode in ("joint", "replay"), self.config.mode == "auto"
        if is_joint:
            refuse_joint(trainer, self.config)
        known = known_before(trainer) if is_auto else []
        self._training = Training(
            self._session,
            model,
            self._topology,
            fix_of_hooks=lambda: _FIX_OF_HOOKS if self._is_split else _FIX_OF_HOOKS_IN_CHUNKS,
            check=self._look_at_hooks,
            tolerate=JOINT if is_joint or known else SPLIT,
        )
        self._session.audits.prove_in(trainer.args.output_dir)
        if is_joint:
            self._joint = whole_steps(trainer, self._session, self._training)
            self._training.way = self.config.mode
            return
        if is_auto:
            self._auto = Auto(trainer, self._session, self._training, known)
        self._look_at_first_hooks()
        if self._is_split:
            self._set_up_to_split()

    def _look_at_first_hooks(self) -> None:
        try:
            self._training.look()
        except GradientHookError as error:
            if self._auto is None:
                raise
            self._auto.begin_at("joint", error)

    def _set_up_to_split(self) -> None:
        trainer, model = self._trainer, self._trainer.model
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

    @property
    def _is_split(self) -> bool:
        return self._joint is None and (self._auto is None or self._auto.is_split)

    def _look_at_hooks(self, training: Training) -> None:
        """Those that are new, as the ones of an optimizer that `train` has made; the model may be another by then."""
        model = self._trainer.model_wrapped
        training.hooks.look(self._trainer.accelerator.unwrap_model(model), wrapper=model)

    # A training.

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around a training, in which ranks hear why another one has ended."""
        self._session.kept.begin()
        if self._auto is not None:
            self._auto.begin()
        with self._session.telling_others(), ExitStack() as stack:
            if self._joint is not None or self._auto is not None:  # around steps of classes in front of the mixin, too
                step = self._in_front(self._trainer.training_step)
                stack.enter_context(replaced(self._trainer, training_step=step))
            yield

    def agree(self) -> None:
        """Once every rank has made its Trainer: all were given the same options. A checkpoint is loaded by now."""
        self._session.agree()
        self._session.kept.resume(self._trainer.state)

    # A window.

    def window(self, batches: list[Any], num_items: Any) -> tuple[list[Any], Any]:
        """The stock batches of a window and the number of its targets, each with the chunks that its step will run."""
        self._dealt, self._window = 0, None
        if not self.config.enabled or not batches:
            return batches, num_items
        if self._joint is not None:
            self._joint.before_window(batches, num_items)
            return batches, num_items
        if self._auto is None:
            return self._split_window(batches, num_items)
        # What a step in front hands on is not known yet.
        by = None if not self._is_split or has_step_in_front(self._trainer) else self._batcher_of(num_items)
        self._auto.batches = batches
        self._auto.first_window(None if by is None else by.read)
        if self._is_split:
            try:
                return self._split_window(batches, num_items)
            except PadMinError as error:
                self._auto.go_over(error)
        self._auto.whole.before_window(batches, num_items)
        return batches, num_items

    def _batcher_of(self, num_items: Any) -> MicroBatcher:
        return self._batcher if num_items is None or self.pools is False else self._pooling

    def _split_window(self, batches: list[Any], num_items: Any) -> tuple[list[Any], Any]:
        if num_items is None:
            return batches, num_items
        self._as_stock, self._lost, self._has_looked = False, 0, False
        if has_step_in_front(self._trainer):  # what it hands on is not known yet
            return batches, self._without_lost_of(batches, num_items)
        self._look_at_reduction(batches, num_items)
        if not self.pools:
            return batches, num_items
        self._prove(batches, num_items, self._pooling)
        chunks = self._training.prepare_window(batches, by=self._pooling, min_micro_batches=len(batches))
        if self._first.is_due and not self._has_looked:
            self._check((chunks.source, chunks.schema, chunks.table), num_items, self._pooling)
        else:
            self._audit(chunks, num_items, self._pooling)
        self._look_at_first_labels(chunks, num_items, self._pooling)
        guard = self._training.guard(chunks)
        meter = self._session.meter
        self._window = Window(batches, num_items, (meter.total, meter.unlogged))
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
        if self._joint is not None:
            return self._joint.in_place_of(stock)
        if not self.config.enabled:
            return stock
        return partial(self._step if self._auto is None else self._step_of_auto, stock)

    def _in_front(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The Trainer's step, with those of classes in front of the mixin, which are one where steps stay whole."""
        if self._joint is not None:
            return self._joint.in_place_of(own)

        @wraps(own)
        def training_step(model: Any, inputs: Any, *args: Any, **options: Any) -> Tensor:
            step = own if self._is_split else partial(self._step_of_whole, own)
            return step(model, inputs, *args, **options)

        training_step.padmin_stands_for = own  # type: ignore[attr-defined]
        return training_step

    def _step(self, stock: Callable[..., Tensor], model: Any, inputs: Any, num_items: Any) -> Tensor:
        parts = self._parts(model, inputs, num_items)
        if parts is None:
            return stock(model, inputs, self._of_stock(num_items))
        return self._run(stock, model, parts, num_items)

    def _of_stock(self, num_items: Any) -> Any:
        """The Trainer's own number of targets."""
        return num_items + self._lost if num_items is not None and self._lost else num_items

    def _parts(self, model: Any, inputs: Any, num_items: Any) -> _Parts | None:
        """The chunks of a step, checked; None: it runs as stock."""
        if num_items is not None and self.pools is None and not self._as_stock:
            self._look_at_reduction([inputs], num_items)
        if self._as_stock:
            return None
        model.train()
        refuse_batch_statistics(model)
        sums = bool(self.pools) and num_items is not None
        batcher = self._pooling if sums else self._batcher
        if self._dealt:
            self._refuse_changed(model, inputs)
            return _Parts(inputs.chunks, inputs.indices, inputs.guard, sums)
        self._prove([inputs], num_items, batcher)
        chunks = self._training.prepare(inputs, by=batcher)
        guard = self._training.guard(chunks)
        if self.pools and not sums:
            self._check_means(inputs)
        if self._first.is_due:
            self._check(batcher.read_made_together(lambda: dict(inputs)), num_items, batcher)
        else:
            self._audit(chunks, num_items, batcher)
        self._look_at_first_labels(chunks, num_items, batcher)
        self._session.count(chunks.stats)
        return _Parts(chunks, range(len(chunks)), guard, sums)

    # A step that may go another way.

    def _step_of_auto(self, stock: Callable[..., Tensor], model: Any, inputs: Any, num_items: Any) -> Any:
        auto, meter = self._auto, self._session.meter
        assert auto is not None
        if not self._is_split:
            return self._step_of_whole(stock, model, inputs, num_items)
        if self._window is None:
            auto.batches = [inputs]
        auto.first_window(None)  # should nobody have asked for it
        window, counted = self._window, (meter.total, meter.unlogged)
        try:
            parts = self._parts(model, inputs, num_items)
        except PadMinError as error:
            if self._dealt or self._lost:  # a part of the window has run, or has been told another number of targets
                raise
            auto.go_over(error)
            return self._step_of_whole(stock, model, inputs, num_items)
        if parts is None:
            return stock(model, inputs, self._of_stock(num_items))
        auto.ladder.heard()
        try:
            with (
                auto.watching(self._trainer.accelerator.unwrap_model(model), window) as self._before,
                auto.logs_of_parts(len(parts.chunks), self._before is not None),
            ):
                loss = self._run(stock, model, parts, num_items)
        except Exception as error:
            before, reason = self._before, auto.reason_of(error, len(parts.chunks))
            if before is None or reason is None or self._lost or not before.can_be_had_back:
                raise
            before.restore()
            auto.go_over(reason)
            meter.total, meter.unlogged = counted if window is None else window.before
            return self._from_beginning(stock, model, inputs, num_items)
        finally:
            self._before = None
        if window is not None:
            window.sent.append(loss.detach())
        return loss

    def _from_beginning(self, stock: Callable[..., Tensor], model: Any, inputs: Any, num_items: Any) -> Any:
        """A batch that was to be split; where rows of its window were dealt, with the batches before it."""
        window = self._window
        if window is None:
            return self._step_of_whole(stock, model, inputs, num_items)
        batches = window.batches[: len(window.sent) + 1]
        losses = [self._step_of_whole(stock, model, batch, window.num_items) for batch in batches]
        return sum(losses) - sum(window.sent)  # the Trainer adds up what steps return

    def _step_of_whole(self, stock: Callable[..., Tensor], model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        assert self._auto is not None
        step = self._auto.whole.in_place_of(stock)
        if isinstance(inputs, _Share) and self._window is not None:  # whose rows were dealt
            return step(model, inputs.source if inputs.is_as_it_came else dict(inputs), self._window.num_items)
        return step(model, inputs, *args, **options)

    def _run(
        self,
        stock: Callable[..., Tensor],
        model: Any,
        parts: _Parts,
        num_items: Any,
    ) -> Tensor:
        """Forward and backward passes of the chunks of one step."""
        total: Any = 0.0
        chunks, indices, guard, sums = parts
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
                        if self._before is not None:
                            self._before.heed(self._training.hears_news)

                    with (
                        self._losses.chunk(own, is_part and (alone or k != indices[-1])),
                        self._weighted(micro.weight, heard, num_items if sums else None),
                    ):
                        total = total + stock(model, micro.batch, num_items)
                self._settle(chunks, num_items, is_last=k == len(chunks) - 1)
        except (OutOfMemoryError, PeerError, TrainingStepError, GradientHookError, GradientCheckError):
            drop_gradients(model)  # of a part of a batch
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
        drop_gradients(model)
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
        self._refuse_logs()
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
        self._has_looked = True
        outcome = self._training.audited(
            lambda: self._gradients(read, num_items, batcher.config, may_stay_untold=is_trial), is_trial=is_trial
        )
        self._first.heard(outcome)
        if not is_trial:
            self._refuse_logs()
        if outcome is not None and outcome.notable and outcome.told:
            self._say(outcome.words)
        return outcome

    def _refuse_logs(self) -> None:
        if self._auto is not None:
            self._auto.refuse_logs(self._logged)

    def _audit(self, chunks: MicroBatches, num_items: Any, batcher: MicroBatcher) -> None:
        """Checks a batch, or the rows of a window, that shows something new, or when the time has come."""
        if not self._training.audit_is_due or self._first.is_due or self._training.was_audited:
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
        self._logged = set()
        return check_step(
            trainer,
            self._topology,
            loss,
            read,
            config,
            own,
            said=self._logged,
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
