"""`PadMinCallback`: padding removed inside of Lightning's automatic optimization."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise ImportError('PadMinCallback needs Lightning: pip install "lightning-padmin[lightning]"') from error

import numpy as np
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from numpy.typing import NDArray
from torch import nn

from lightning_padmin.architectures import (
    Finding,
    GradientHookError,
    HookWatch,
    batch_statistics,
    inspect_model,
    is_encoder_decoder,
    name_of,
    read_hook,
    reenters,
    row_limit,
    scan_chunk,
    with_scan_chunk,
)
from lightning_padmin.batch import Field
from lightning_padmin.config import (
    LogReduction,
    LossReduction,
    PadMinConfig,
    RowWeight,
    option_names,
    refuses_unknown_options,
)
from lightning_padmin.distributed import (
    Announcement,
    Exchange,
    announce,
    board_alone,
    board_of_all,
    exchange_all,
    exchange_alone,
    exchange_at_end,
    explain,
    forget_last_words,
    go_on,
)
from lightning_padmin.errors import ConfigError, PadMinWarning, PeerError
from lightning_padmin.forward import Forwards, chunked, transformers_models
from lightning_padmin.integrations.common import find_engine
from lightning_padmin.integrations.lightning import loop as lightning_loop
from lightning_padmin.integrations.lightning.check import OTHER_MASKS, FirstBatchCheck, pack_gradients, tell
from lightning_padmin.integrations.lightning.loop import JointOptimization, SplitOptimization
from lightning_padmin.microbatching import (
    LoopGuard,
    MemoryGuard,
    MicroBatch,
    MicroBatcher,
    MicroBatches,
    OutOfMemoryError,
)
from lightning_padmin.stats import PaddingStats
from lightning_padmin.verification import PackCheck, PackGate, gate_of, needs_rows

# Subclasses of strategies that are supported.
_UNKNOWN_KINDS = (XLAStrategy, SingleDeviceXLAStrategy)


@refuses_unknown_options
class PadMinCallback(pl.Callback):
    """Rolls, trims and splits every training batch into micro-batches under a token budget.

    `training_step` runs once per micro-batch; gradients, optimizer steps, clipping, accumulation, the returned loss
    and logged values are those of the whole batch. Works with automatic optimization on one device and under DDP.
    Validation is untouched. With manual optimization, training_step loops over `callback.micro_batches(batch)`.

    Args:
        token_budget: most slots (rows x longest row) of one micro-batch; None: the slots of the batch as it came.
        mode: "split", or "joint", which runs the model call in chunks inside of `training_step`, for losses that couple
            rows; "auto" is "split", and refuses what that would change.
        layout: "pack" puts rows behind each other in one long row, where your model was measured not to leak; "auto"
            does where that is proven and faster.
        check: "first-batch" compares gradients of a few rows, split and as they came, before the first step.
        loss_reduction: how `training_step` reduces its loss: "token-mean", "row-mean", "sum", or a function
            batch -> (rows,) row weights. It must be true: a wrong one trains something else.
        enabled: False leaves no trace.
        config: a `PadMinConfig` in place of single options. All other options are explained there.

    Attributes:
        stats: `PaddingStats` of this rank, over all fits with this callback. Checkpoints keep those of rank 0.
        micro_index, micro_count: which micro-batch runs, for hooks that fire once for each.

    Raises:
        ConfigError: an option is unknown or malformed.
        MisconfigurationException: at the start of `fit`, for a set-up that cannot be split exactly; names the fix.
        PadMinError: for a batch that is malformed, on all ranks, before its first forward pass.

    Example:
        >>> trainer = Trainer(callbacks=[PadMinCallback(token_budget=16_384)])
    """

    def __init__(
        self,
        token_budget: int | None = 16_384,
        *,
        mode: Literal["auto", "split", "joint", "replay"] = "auto",
        layout: Literal["pad", "pack", "auto"] = "pad",
        check: Literal["first-batch", "off"] | bool = "first-batch",
        loss_reduction: LossReduction | RowWeight = "token-mean",
        normalize: Literal["rank", "global"] = "rank",
        label_shift: int | None = None,
        ignore_index: int = -100,
        pad_token_id: int | None = None,
        mask_key: str = "attention_mask",
        labels_key: str | None = "labels",
        decoder_mask_key: str = "decoder_attention_mask",
        loss_mask_key: str | None = None,
        batch_schema: Mapping[str, Field | str | Mapping[str, Any]] | None = None,
        static_keys: Sequence[str] = (),
        pad_to_multiple_of: int = 1,
        shape_buckets: int | None = None,
        max_rows: int | None = None,
        cost_multiple_of: int | None = None,
        attention_width: int | None = None,
        launch_cost: int | Literal["measured"] = 128,
        method: Literal["optimal", "greedy"] = "optimal",
        log_prefix: str = "padmin/",
        log_reduce: Mapping[str, LogReduction] | None = None,
        enabled: bool = True,
        config: PadMinConfig | None = None,
    ) -> None:
        if isinstance(token_budget, PadMinConfig):
            raise ConfigError("PadMinCallback got a PadMinConfig as token_budget: pass it as config=")
        given = {name: value for name, value in locals().items() if name in option_names()}
        given["batch_schema"] = {} if batch_schema is None else batch_schema
        given["log_reduce"] = {} if log_reduce is None else log_reduce
        self.config = _one_config(PadMinConfig(**given), config)
        self.stats = PaddingStats()
        self.micro_index, self.micro_count = 0, 1
        self._since_log = PaddingStats()
        self._batcher: MicroBatcher | None = None
        self._exchange: Exchange = exchange_alone
        self._restore: Callable[[], None] | None = None
        self._check: FirstBatchCheck | None = None
        self._pack_check: PackCheck | None = None
        self._checked: weakref.ref[pl.LightningModule] | None = None
        self._first_is_open = True
        self._loss_tokens: int | None = None
        self._loops, self._told, self._logged = LoopGuard(), set[str](), set[str]()
        self._row_limit: int | None = None
        self._gate: PackGate | None = None
        self._trainer: pl.Trainer | None = None
        self._hooks: HookWatch | None = None
        self._forwards: Forwards = {}  # joint mode: what stands in for models, for the time of a fit
        self._running: MemoryGuard | None = None  # around the passes of the batch that runs
        self._announced: Announcement | None = None
        self._log_every: int | None = None  # steps, of rank 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuses what cannot be exact, then replaces the optimization loop."""
        self._announce(trainer)
        if not self.config.enabled:
            return
        if self._restore is not None:
            if self._trainer is not None and self._trainer is not trainer and _is_running(self._trainer):
                raise MisconfigurationException(
                    "this PadMinCallback is in the middle of another Trainer's fit: give each Trainer one of its own"
                )
            self._remove()  # an earlier fit has ended without telling us
        _refuse_unsupported(trainer, pl_module, self.config.mode)
        findings = _heed_architecture(pl_module, self.config.mode, self.config.pad_to_multiple_of)
        corrects, self._row_limit = any(each.severity == "correct" for each in findings), row_limit(findings)
        self._exchange = exchange_all if trainer.world_size > 1 else exchange_alone
        forget_last_words()
        self._trainer = trainer
        self._hooks = HookWatch(partial(_fix_of_hooks, pl_module, self.config.mode))
        try:
            self._look_at_hooks(pl_module)
        except GradientHookError as error:
            self._remove()
            raise MisconfigurationException(str(error)) from None
        self._gate = _pack_gate(trainer, pl_module, self.config)
        if not pl_module.automatic_optimization:
            self._batcher = self._make_batcher(self.config, pl_module)
            return
        joint = self.config.mode == "joint"
        models = transformers_models(pl_module) if joint else {}
        if joint and not models:
            raise MisconfigurationException(
                "mode='joint' runs the model call in chunks, but the module has no attribute that looks like a model "
                "of transformers (a config with model_type, attention_mask in its forward): call your model through "
                "lightning_padmin.PaddedForward in training_step, and leave the callback out"
            )
        # What the loss is reduced to is nobody's concern where the loss sees whole batches.
        config = replace(self.config, loss_reduction="row-mean", normalize="rank") if joint else self.config
        self._batcher = self._make_batcher(config, pl_module)
        self._forwards = {}
        self._check = FirstBatchCheck(
            trainer, config, self._exchange, models, corrects=corrects, gate=self._gate, kept=self._forwards
        )
        if self._gate is not None and not joint:
            self._pack_check = PackCheck(self._gate, self._exchange, tell)
        if self._checked is not None and self._checked() is pl_module:
            self._check.is_due = False  # an earlier fit of this module has told
            self._check.first_is_open = self._check.first_is_open and self._first_is_open
        self._restore = lightning_loop.install(
            trainer,
            lambda stock: (
                JointOptimization(stock, self._read, lambda: self._chunked(models), lambda: self._around_hooks(0, 2))
                if joint
                else SplitOptimization(
                    stock,
                    self._prepare,
                    self._progress,
                    dict(self.config.log_reduce),
                    self._logged,
                    self._guard,
                    self._around_hooks,
                    self._look_late,
                )
            ),
        )

    def _announce(self, trainer: pl.Trainer) -> None:
        """Before the barrier with which Lightning begins a run, behind which all ranks have announced."""
        every = str(getattr(trainer, "log_every_n_steps", 0))
        self._announced = announce("PadMinCallback", self.config, _log_every_n_steps=every)

    def _agree(self, trainer: pl.Trainer) -> None:
        """Refuses ranks whose options differ, or that have no callback; metrics are exchanged when rank 0 logs."""
        if self._announced is None:
            return
        announced, self._announced = self._announced, None
        try:
            facts = announced.agree()
        except ConfigError as error:
            raise MisconfigurationException(str(error)) from None
        self._log_every = int(facts[0]["_log_every_n_steps"])

    def micro_batches(self, batch: Any) -> Iterator[MicroBatch]:
        """For manual optimization: the micro-batches of a batch, inside of training_step.

        The batch is planned, and all ranks agree, before this method returns. Forward pass and `manual_backward` both
        belong into the body of the loop, which must run to its end; under DDP gradients are reduced in the last one.

        Args:
            batch: what training_step got; it is only read.

        Returns:
            An iterator; unpack each item as `micro, weight`. With `enabled=False` the batch itself, with weight 1.0.

        Raises:
            PadMinError: on every rank when any rank has a batch that cannot be planned, or where the loop over the
                previous batch was left before its end.
            MisconfigurationException: called outside of a fit, or with automatic optimization.

        Example:
            >>> def training_step(self, batch, batch_idx):
            ...     for micro, weight in self.padmin.micro_batches(batch):
            ...         self.manual_backward(self.model(**micro).loss * weight)
            ...     self.optimizers().step()
            ...     self.optimizers().zero_grad()
        """
        if not self.config.enabled:
            return iter([MicroBatch(batch, 1.0, np.empty(0, dtype=np.int64), 0, 1)])
        trainer = self._trainer
        if trainer is None or self._batcher is None or self._restore is not None:
            raise MisconfigurationException(
                "micro_batches is for the training_step of a module with automatic_optimization=False, while fit runs"
            )
        planned = self._batcher.prepare(batch, may_pack=False)

        @contextmanager
        def around(micro: MicroBatch) -> Iterator[None]:
            self._progress(micro.index, micro.count)
            with ExitStack() as stack:
                stack.enter_context(self._around_hooks(micro.index, micro.count))
                look = partial(self._look_late, micro.index, micro.count)
                stack.enter_context(lightning_loop.around_backward(trainer, micro.is_last, look))
                stack.enter_context(lightning_loop.synchronised(trainer, micro.is_last))
                yield

        return self._loops.start(planned, around, partial(self._count, planned.stats))

    def discard(self) -> None:
        """Gives up a loop over `micro_batches` that was left before its end; call `optimizer.zero_grad()` too."""
        self._loops.discard()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuses several loaders at once, known only now, and ranks that are not set up alike."""
        self._agree(trainer)
        if self.config.enabled:
            _refuse_combined_loaders(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Refuses batch normalization in training mode, which hooks and other callbacks switch at any time."""
        if self.config.enabled:
            wrong = batch_statistics(pl_module)
            if wrong is not None:
                raise MisconfigurationException(wrong)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes the metrics of the batches since the last time, at Lightning's own logging steps."""
        if self.config.enabled and not pl_module.automatic_optimization and self._loops.never_started:
            self._loops.never_started = False
            rank_zero_warn(
                "PadMinCallback did nothing for the first batch: with automatic_optimization=False, loop over "
                "callback.micro_batches(batch) in training_step",
                category=PadMinWarning,
            )
        if self.config.enabled and lightning_loop.is_logging_step(trainer, self._log_every):
            self._log(trainer, lightning_loop.logging_step(trainer), self._exchange(self._counts_to_log(trainer)))
        if self.config.enabled and lightning_loop.has_more_batches(trainer):
            go_on()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tells of names in `log_reduce` that nobody has logged."""
        missing = [name for name in self.config.log_reduce if name not in self._logged]
        if self._logged and missing:
            self._tell_once(
                f"log_reduce names {missing[0]!r}, which training_step has not logged in this epoch; it has logged "
                f"{', '.join(sorted(self._logged))}"
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes what has not been written yet, so that short runs have metrics too."""
        if self.config.enabled and self._since_log.batches:
            gather = exchange_at_end if trainer.world_size > 1 else exchange_alone
            counts = gather(self._counts_to_log(trainer))
            if counts is None:
                rank_zero_warn(
                    "not all ranks came to the end of training together, so the padding metrics since the last logging "
                    "step are left out: give every rank as many batches (use a DistributedSampler, or drop_last)"
                )
            else:
                self._log(trainer, lightning_loop.last_step(trainer), counts)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leaves the Trainer as it was."""
        if self._belongs_to_another(trainer):
            return
        if isinstance(exception, OutOfMemoryError | PeerError):
            pl_module.zero_grad(set_to_none=True)  # of a part of a batch
        elif self._running is not None:
            self._running.give_up()
        if self.config.enabled:
            explain(exception)
        self._announced = None
        self._remove()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leaves the Trainer as it was."""
        if not self._belongs_to_another(trainer):
            self._remove()

    def state_dict(self) -> dict[str, Any]:
        """The counters. Nothing else is kept between batches."""
        if not self.config.enabled:
            return {}
        return {"stats": self.stats.state_dict(), "since_log": self._since_log.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting, on the rank that has written the checkpoint; others begin anew."""
        if rank_zero_only.rank != 0:
            return
        for name, stats in (("stats", self.stats), ("since_log", self._since_log)):
            if name in state_dict:
                stats.load_state_dict(state_dict[name])

    def __getstate__(self) -> dict[str, Any]:
        """Copies are not part of a running fit, and do not drag the module along: Lightning sets its `log` here."""
        own = {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}
        return own | {
            "_restore": None,
            "_batcher": None,
            "_check": None,
            "_checked": None,
            "_trainer": None,
            "_gate": None,
            "_pack_check": None,
            "_hooks": None,
            "_forwards": {},
            "_running": None,
            "_announced": None,
            "_loops": LoopGuard(),
        }

    def _belongs_to_another(self, trainer: pl.Trainer) -> bool:
        """Whether a fit inside of a fit, which was refused, has ended."""
        return self._trainer is not None and self._trainer is not trainer and _is_running(self._trainer)

    def _remove(self) -> None:
        if self._restore is not None:
            self._restore()
        if self._check is not None and self._check.has_passed:
            self._checked, self._first_is_open = weakref.ref(self._check.module), self._check.first_is_open
        self._loops.discard()
        self._since_log = PaddingStats()
        self._restore = self._batcher = self._check = self._trainer = self._gate = self._pack_check = None
        self._hooks = self._running = None
        self._forwards = {}

    def _prepare(self, kwargs: OrderedDict[str, Any]) -> MicroBatches:
        assert self._batcher is not None
        assert self._check is not None
        if self._pack_check is not None and self._pack_check.is_due:
            assert self._trainer is not None
            arguments = (self._trainer, self.config, self._exchange, kwargs, self._batcher, self._pack_check)
            pack_gradients(*arguments)
        may_pack = self._pack_check is not None and self._pack_check.has_passed
        micro_batches = self._batcher.prepare(kwargs["batch"], may_pack=may_pack)
        if self._batcher.has_changed and self._pack_check is not None:
            self._pack_check.again()
        self._check(kwargs, micro_batches.schema, micro_batches.table, self._batcher.shows_first)
        self._count(micro_batches.stats)
        return micro_batches

    def _guard(self, micro_batches: MicroBatches) -> MemoryGuard:
        assert self._trainer is not None
        tells = lightning_loop.has_passes_of_its_own(self._trainer)
        board = board_of_all() if tells and micro_batches.grows else board_alone
        self._running = MemoryGuard(micro_batches, board, self._trainer.global_rank)
        return self._running

    def _make_batcher(self, config: PadMinConfig, module: pl.LightningModule) -> MicroBatcher:
        def check() -> None:
            if not module.automatic_optimization:
                self._loops.refuse_unfinished()
            self._look_at_hooks(module)

        return MicroBatcher(
            with_scan_chunk(config, module),
            exchange=self._exchange,
            encoder_decoder=is_encoder_decoder(module),
            before_reading=check,
            row_limit=self._row_limit,
            gate=self._gate,
            asks_of_step=True,
            packs_inside=self.config.mode == "joint",
            other_masks=None if self.config.mode == "joint" else OTHER_MASKS,
        )

    def _look_at_hooks(self, module: pl.LightningModule) -> None:
        """Refuses hooks that make something else of parts of gradients; those that are new since the last batch."""
        assert self._trainer is not None
        assert self._hooks is not None
        if self.config.mode != "joint":
            self._hooks.look(module, wrapper=self._trainer.strategy.model)
            return
        # One backward pass per batch: hooks on parameters fire as ever, unless checkpoints are passes of their own.
        models = transformers_models(module)
        self._hooks.look(module, models.values(), parameters=any(map(reenters, models.values())))

    def _around_hooks(self, index: int, count: int) -> AbstractContextManager[None]:
        assert self._hooks is not None
        return self._hooks.around(index, count)

    def _look_late(self, index: int, count: int) -> None:
        assert self._hooks is not None
        assert self._trainer is not None
        self._hooks.look_late(self._trainer.lightning_module, index, count)

    def _count(self, stats: PaddingStats) -> None:
        self.stats = self.stats + stats
        self._since_log = self._since_log + stats

    def _read(self, kwargs: OrderedDict[str, Any]) -> None:
        assert self._batcher is not None
        assert self._check is not None
        schema, table = self._batcher.read_together(kwargs["batch"])
        self._check(kwargs, schema, table)
        self._loss_tokens = int(table.loss_tokens.sum())

    @contextmanager
    def _chunked(self, models: dict[str, nn.Module]) -> Iterator[None]:
        assert self._trainer is not None
        exchange = self._exchange if lightning_loop.has_collective_forwards(self._trainer) else None
        with chunked(models, self.config, exchange, self._gate, self._forwards) as calls:
            yield
        if not calls:
            self._tell_once(
                "mode='joint' had nothing to run in chunks: no model of transformers was called with an attention_mask"
            )
        if self._loss_tokens is not None and calls:  # optimizers that run the closure again run the same batch
            self._count(replace(calls.total, loss_tokens=self._loss_tokens))
        self._loss_tokens = None

    def _tell_once(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            rank_zero_warn(words, category=PadMinWarning)

    def _progress(self, index: int, count: int) -> None:
        self.micro_index, self.micro_count = index, count

    def _counts_to_log(self, trainer: pl.Trainer) -> list[int]:
        """Ranks of one tensor-parallel group share a batch, which counts once."""
        own = self._since_log if lightning_loop.has_own_batch(trainer) else PaddingStats()
        return own.as_counts()

    def _log(self, trainer: pl.Trainer, step: int, counts: NDArray[np.int64]) -> None:
        """Merges the (world, n) counts of all ranks, then takes the ratios."""
        merged = PaddingStats.merge_ranks(counts)
        self._since_log = PaddingStats()
        if not merged.batches:  # the loader gave None, or a hook skipped them
            return
        metrics = merged.metrics(self.config.log_prefix)
        device = trainer.strategy.root_device
        trainer.callback_metrics.update(
            {name: torch.tensor(float(value), device=device) for name, value in metrics.items()}
        )
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)


def _one_config(options: PadMinConfig, config: PadMinConfig | None) -> PadMinConfig:
    if config is None:
        return options
    if not isinstance(config, PadMinConfig):
        raise ConfigError(f"config={config!r}: expected a PadMinConfig")
    if options != PadMinConfig():
        changed = [name for name in option_names() if getattr(options, name) != getattr(PadMinConfig(), name)]
        raise ConfigError(
            f"PadMinCallback got config and {changed[0]}={getattr(options, changed[0])!r}: put it into the config"
        )
    return config


def _refuse_unsupported(trainer: pl.Trainer, module: pl.LightningModule, mode: str) -> None:
    if not isinstance(trainer, pl.Trainer):
        raise MisconfigurationException(
            f"PadMinCallback belongs to lightning.pytorch, but this Trainer comes from {type(trainer).__module__}: "
            "import Trainer and LightningModule from lightning.pytorch"
        )
    lightning_loop.check_signatures()
    if sum(isinstance(c, PadMinCallback) and c.config.enabled for c in trainer.callbacks) > 1:
        raise MisconfigurationException("the Trainer has two PadMinCallbacks: a batch can be split once. Remove one")
    if not module.automatic_optimization and mode == "joint":
        raise MisconfigurationException(
            "mode='joint' needs automatic optimization, but this module has automatic_optimization=False: call your "
            "model through lightning_padmin.PaddedForward in training_step, and leave the callback out"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            "training_step(dataloader_iter) fetches its own batches, which PadMinCallback cannot see: take `batch`"
        )
    if mode == "replay":
        raise MisconfigurationException(
            "mode='replay' needs a second backward pass that Lightning's automatic optimization has no place for: use "
            "mode='joint', or lightning_padmin.PaddedForward(model, config, mode='replay') in your own loop"
        )
    if mode != "joint":
        _refuse_own_backward(module)
    strategy = trainer.strategy
    known = SingleDeviceStrategy | DDPStrategy | FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy
    if not isinstance(strategy, known) or isinstance(strategy, _UNKNOWN_KINDS):
        raise MisconfigurationException(
            f"PadMinCallback does not support {type(strategy).__name__}: use one device, 'ddp', FSDPStrategy, "
            "ModelParallelStrategy (FSDP2) or DeepSpeedStrategy"
        )
    if isinstance(strategy, DeepSpeedStrategy):
        find_engine(strategy)  # checks its version and its modes


def _refuse_own_backward(module: pl.LightningModule) -> None:
    """A `backward` of the module's own runs once per micro-batch too."""
    own = type(module).backward
    if own is pl.LightningModule.backward:
        return
    reading = read_hook(module.backward, gradients=())
    if reading.steps:
        why = reading.why or "writes into gradients"
        raise MisconfigurationException(
            f"{type(module).__name__}.backward {why}: {name_of(own)}. It runs once per micro-batch, on a part of the "
            "gradient: do that in on_after_backward, which comes once per batch"
        )


def _fix_of_hooks(module: pl.LightningModule, mode: str) -> str:
    if mode == "joint":
        return "Checkpoint with use_reentrant=False (then it fires once per batch)"
    fix = "Do that once per batch: in on_after_backward or on_before_optimizer_step (steps: configure_optimizers)"
    if not module.automatic_optimization:
        return "Do that once per batch, behind the loop over micro_batches"
    models = transformers_models(module)
    return fix + (", or use mode='joint'" if models and not any(map(reenters, models.values())) else "")


def _is_running(trainer: pl.Trainer) -> bool:
    return bool(trainer.state.status == TrainerStatus.RUNNING and trainer.state.fn == TrainerFn.FITTING)


def _pack_gate(trainer: pl.Trainer, module: pl.LightningModule, config: PadMinConfig) -> PackGate | None:
    """What decides whether rows are packed; None where they are not.

    Raises:
        MisconfigurationException: `layout="pack"` where it cannot be proven that training does not change.
    """
    if config.layout == "pad":
        return None
    models = transformers_models(module)
    why = None
    if not models:
        why = "the module has no attribute that looks like a model of transformers, whose documents could be kept apart"
    elif not module.automatic_optimization:
        why = "with manual optimization nothing checks that your step hands position ids on"
    elif config.check == "off" and config.mode != "joint":
        why = "check='off' would leave unproven that your step hands position ids on"
    elif lightning_loop.is_sharded(trainer) or isinstance(trainer.strategy, DeepSpeedStrategy):
        why = f"under {type(trainer.strategy).__name__} the passes of the leak test are collective, which was not tried"
    elif config.mode != "joint":
        why = needs_rows(config)
    if why is not None and config.layout == "pack":
        raise MisconfigurationException(f"layout='pack': {why}. Use layout='pad'")
    if why is not None:
        rank_zero_info(f"PadMinCallback: layout='pad': {why}")
        return None
    around = trainer.precision_plugin.forward_context

    def tell_first_rank(words: str) -> None:
        rank_zero_info(f"PadMinCallback: {words}")

    return gate_of(models, config, around, tell_first_rank, find=partial(transformers_models, module), inside=module)


def _heed_architecture(module: pl.LightningModule, mode: str, width: int) -> list[Finding]:
    """Refuses models that cannot be split. Batch normalization may still be frozen, and rows may be short enough."""
    findings = inspect_model(module)
    for finding in findings:
        if finding.rule == "chunked-width" and width % (scan_chunk(module) or 1):
            raise MisconfigurationException(f"{finding.where}: {finding.reason}")
        balance = finding.rule == "balance-loss"
        later = finding.rule == "batch-norm" or finding.exact_up_to is not None or (balance and mode == "joint")
        if finding.severity == "refuse" and not later:
            also = ". PadMinCallback(mode='joint') does the former" if balance else ""
            raise MisconfigurationException(f"{finding.where}: {finding.reason}{also}")
        if finding.severity != "refuse":
            rank_zero_info(f"PadMinCallback: {finding.where}: {finding.reason}")
    return findings


def _refuse_combined_loaders(trainer: pl.Trainer) -> None:
    loader = trainer.train_dataloader
    if isinstance(loader, CombinedLoader | dict | list | tuple):
        raise MisconfigurationException(
            f"the training loader is a {type(loader).__name__} of several loaders, and a batch of batches cannot be "
            "planned as one: use one loader (a ConcatDataset, say), or PadMinCallback(enabled=False)"
        )
