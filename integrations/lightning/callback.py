"""`PadMinCallback`: padding removed inside of Lightning's automatic optimization."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise ImportError('PadMinCallback needs Lightning: pip install "lightning-padmin[lightning]"') from error

import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from lightning_padmin.batch import Field
from lightning_padmin.config import (
    LogReduction,
    LossReduction,
    PadMinConfig,
    RowWeight,
    option_names,
    refuses_unknown_options,
)
from lightning_padmin.errors import (
    ArchitectureError,
    ConfigError,
    GradientCheckError,
    GradientHookError,
    OutOfMemoryError,
    PeerError,
)
from lightning_padmin.forward import CallSite, Forwards, call_sites, chunked, transformers_models
from lightning_padmin.integrations.common import (
    Ladder,
    Session,
    Topology,
    Training,
    Way,
    reenters,
    stats_as_it_came,
    why_way_is_kept,
)
from lightning_padmin.integrations.lightning import loop as lightning_loop
from lightning_padmin.integrations.lightning.check import OTHER_MASKS, FirstBatchCheck, Losses, pack_gradients
from lightning_padmin.integrations.lightning.loop import AutoOptimization, JointOptimization, SplitOptimization
from lightning_padmin.integrations.lightning.supported import (
    OF_JOINT,
    OF_SPLIT,
    fix_of_hooks,
    heed_architecture,
    refuse_combined_loaders,
    refuse_no_sites,
    refuse_unsupported,
    why_not_pack,
    why_not_split,
)
from lightning_padmin.microbatching import MemoryGuard, MicroBatch, MicroBatcher, MicroBatches
from lightning_padmin.stats import PaddingStats


@refuses_unknown_options
class PadMinCallback(pl.Callback):
    """Rolls, trims and splits every training batch into micro-batches under a token budget.

    `training_step` runs once per micro-batch; gradients, optimizer steps, clipping, accumulation, the returned loss
    and logged values are those of the whole batch. Works with automatic optimization on one device and under DDP.
    Validation is untouched. With manual optimization, training_step loops over `callback.micro_batches(batch)`.

    Args:
        token_budget: most slots (rows x longest row) of one micro-batch; None: the slots of the batch as it came.
        mode: "split", or "joint", which runs the model call in chunks inside of `training_step`, for losses that couple
            rows; "replay" is "joint" with the activations of one chunk at a time, at the price of a second forward
            pass. "auto" is "split" where that is exact, else "joint" where that is ("replay" for batches above the
            budget), else batches run as they came.
        layout: "pack" puts rows behind each other in one long row, where your model was measured not to leak; "auto"
            does where that is proven and faster.
        check: "audit" compares gradients of a few rows, split and as they came, before the first step, on batches that
            show something new, and now and then; "first-batch" until a batch has told.
        audit_every: steps between two audits after those of steps 1, 3, 10, 30 and 100; 0: none after them.
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
        check: Literal["audit", "first-batch", "off"] | bool = "audit",
        audit_every: int = 500,
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
        call_masks: Mapping[str, str] | None = None,
        enabled: bool = True,
        config: PadMinConfig | None = None,
    ) -> None:
        if isinstance(token_budget, PadMinConfig):
            raise ConfigError("PadMinCallback got a PadMinConfig as token_budget: pass it as config=")
        given = {name: value for name, value in locals().items() if name in option_names()}
        given["batch_schema"] = {} if batch_schema is None else batch_schema
        given["log_reduce"] = {} if log_reduce is None else log_reduce
        given["call_masks"] = {} if call_masks is None else call_masks
        self.config = _one_config(PadMinConfig(**given), config)
        self._session = Session(
            "PadMinCallback",
            self.config,
            tell=_tell,
            is_main=_is_first,
            signs=False,
            refusal=MisconfigurationException,
        )
        self.micro_index, self.micro_count = 0, 1
        self._training: Training | None = None
        self._topology = Topology()
        self._restore: Callable[[], None] | None = None
        self._ladder: Ladder | None = None
        self._sites: dict[str, CallSite] = {}  # calls that run in chunks, where batches stay whole
        self._batchers: dict[bool, MicroBatcher] = {}  # for batches that stay whole, and for those that do not
        self._checks: dict[bool, FirstBatchCheck] = {}
        self._checked: weakref.ref[pl.LightningModule] | None = None
        self._checked_joint, self._first_is_open = False, True
        self._loss_tokens: int | None = None
        self._counted = PaddingStats(), PaddingStats()  # before the last batch that was split
        self._logged = set[str]()
        self._trainer: pl.Trainer | None = None
        self._forwards: Forwards = {}  # joint mode: what stands in for models, for the time of a fit
        self._running: MemoryGuard | None = None  # around the passes of the batch that runs
        self._log_every: int | None = None  # steps, of rank 0

    @property
    def stats(self) -> PaddingStats:
        """Counts of this rank, over all fits with this callback."""
        return self._session.stats

    @stats.setter
    def stats(self, stats: PaddingStats) -> None:
        self._session.stats = stats

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuses what cannot be exact, then replaces the optimization loop."""
        # Before the barrier with which Lightning begins a run, behind which all ranks have announced.
        self._session.announce(_log_every_n_steps=str(getattr(trainer, "log_every_n_steps", 0)))
        if not self.config.enabled:
            return
        if self._restore is not None:
            if self._belongs_to_another(trainer):
                raise MisconfigurationException(
                    "this PadMinCallback is in the middle of another Trainer's fit: give each Trainer one of its own"
                )
            self._remove()  # an earlier fit has ended without telling us
        refuse_unsupported(trainer, pl_module, self.config.mode, PadMinCallback)
        self._topology = lightning_loop.topology_of(trainer)
        if self.config.mode != "split" and pl_module.automatic_optimization:
            self._sites = call_sites(pl_module, self.config)
        try:
            self._begin(trainer, pl_module)
        except MisconfigurationException:
            self._remove()
            raise
        if not pl_module.automatic_optimization:
            return
        self._restore = lightning_loop.install(trainer, self._in_place_of)

    def _begin(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Finds out which way the first batch goes; refuses what is known to be another training."""
        mode, may_change = self.config.mode, self.config.mode == "auto" and module.automatic_optimization
        in_chunks = mode in ("joint", "replay")
        if in_chunks:
            refuse_no_sites(self._sites, mode)
        why = None if in_chunks else why_not_split(module, self.config.pad_to_multiple_of)
        if why is not None and not (may_change and self._sites):
            raise MisconfigurationException(why)
        self._training = training = self._make_training(module, joint=in_chunks or why is not None)
        heed_architecture(training)
        self._session.audits.prove_in(lightning_loop.log_folder(trainer))
        self._session.begin()
        self._trainer = trainer
        ways: list[Way] = ["split", "joint", "as it came"] if self._sites else ["split", "as it came"]
        self._ladder = Ladder(
            training,
            ways if may_change else [],
            self.config.token_budget,
            lambda: why_way_is_kept(trainer.strategy.model or module),
            may_replay=lightning_loop.may_replay(trainer),
        )
        if why is not None:
            self._ladder.begin("joint", why)
        try:
            self._look_at_hooks()
        except GradientHookError as error:
            if not (may_change and self._sites) or training.way != "split":
                raise MisconfigurationException(str(error)) from None
            self._ladder.begin("joint", str(error))
            self._look_at_hooks()
        gate = self._session.pack_policy(
            partial(why_not_pack, trainer, module, self.config),
            partial(transformers_models, module),
            trainer.precision_plugin.forward_context,
            say=self._session.tell,
            find=partial(transformers_models, module),
            inside=module,
        )
        if in_chunks or training.way == "split":
            training.use_gate(gate, asks_of_step=training.way == "split")

    @property
    def _batcher(self) -> MicroBatcher:
        """Of the way that batches go now."""
        training, joint = self._training, not self._is_split
        assert training is not None
        if joint not in self._batchers:
            self._batchers[joint] = training.batcher(
                self._config_of(joint), packs_inside=joint, other_masks=None if joint else OTHER_MASKS
            )
        return self._batchers[joint]

    @property
    def _check(self) -> FirstBatchCheck | None:
        """Of the way that batches go now; None outside of a fit, and with manual optimization."""
        training, joint = self._training, not self._is_split
        if training is None or not training.model.automatic_optimization:
            return None
        if joint not in self._checks:
            assert self._trainer is not None
            sites = self._sites if joint else {}
            config, kept = self._config_of(joint), self._forwards
            check = FirstBatchCheck(self._trainer, self._session, training, config, sites, kept, self._tells)
            if self._checked is not None and self._checked() is training.model and joint == self._checked_joint:
                batches = check.batches
                batches.is_due = False  # an earlier fit of this module has told
                batches.first_is_open = batches.first_is_open and self._first_is_open
            self._checks = {joint: check}  # that of a way that was left holds its last batch
        return self._checks[joint]

    @property
    def _is_split(self) -> bool:
        return self._training is None or self._training.way == "split"

    @property
    def _tells(self) -> Callable[[str], None] | None:
        """Told why calls run as they came; where a way was asked for, what cannot be had is an error."""
        return self._session.notices if self.config.mode == "auto" else None

    def _tells_left(self, words: str) -> None:
        """The same of a batch that is about to run."""
        assert self._training is not None
        assert self._ladder is not None
        (self._ladder.refuses_left if self._training.replays else self._session.notices)(words)

    def _config_of(self, joint: bool) -> PadMinConfig:
        """What the loss is reduced to is nobody's concern where it sees whole batches."""
        if not joint:
            return self.config
        layout = self.config.layout if self.config.mode in ("joint", "replay") else "pad"
        return replace(self.config, loss_reduction="row-mean", normalize="rank", layout=layout)

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
            return self._session.loop_as_it_came(batch)
        trainer, training = self._trainer, self._training
        if trainer is None or training is None or self._restore is not None:
            raise MisconfigurationException(
                "micro_batches is for the training_step of a module with automatic_optimization=False, while fit runs"
            )
        planned = training.prepare(batch, self._batcher)

        @contextmanager
        def around(micro: MicroBatch) -> Iterator[None]:
            self._progress(micro.index, micro.count)
            with ExitStack() as stack:
                stack.enter_context(training.around(micro.index, micro.count))
                look = partial(training.look_late, micro.index, micro.count)
                stack.enter_context(lightning_loop.around_backward(trainer, micro.is_last, look))
                stack.enter_context(lightning_loop.synchronised(trainer, micro.is_last))
                yield

        return self._session.loop(planned, around)

    def discard(self) -> None:
        """Gives up a loop over `micro_batches` that was left before its end; call `optimizer.zero_grad()` too."""
        self._session.discard()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuses several loaders at once, known only now, and ranks that are not set up alike."""
        try:
            facts = self._session.agree()
        except ConfigError as error:
            raise MisconfigurationException(str(error)) from None
        if facts:  # metrics are exchanged when rank 0 logs
            self._log_every = int(facts[0]["_log_every_n_steps"])
        if self.config.enabled:
            refuse_combined_loaders(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Refuses batch normalization in training mode, which hooks and other callbacks switch at any time."""
        if self._training is not None:
            try:
                self._training.refuse_batch_statistics()
            except ArchitectureError as error:
                raise MisconfigurationException(str(error)) from None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes the metrics of the batches since the last time, at Lightning's own logging steps."""
        if not self.config.enabled:
            return
        loops = self._session.loops
        if not pl_module.automatic_optimization and loops.never_started:
            loops.never_started = False
            self._session.notices(
                "PadMinCallback did nothing for the first batch: with automatic_optimization=False, loop over "
                "callback.micro_batches(batch) in training_step"
            )
        if lightning_loop.is_logging_step(trainer, self._log_every):
            is_copy = not lightning_loop.has_own_batch(trainer)
            metrics = self._session.metrics(self._topology, is_copy=is_copy)
            _log(trainer, lightning_loop.logging_step(trainer), metrics)
        if lightning_loop.has_more_batches(trainer):
            self._session.goes_on()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tells of names in `log_reduce` that nobody has logged."""
        missing = [name for name in self.config.log_reduce if name not in self._logged]
        if self._logged and missing:
            words = (
                f"log_reduce names {missing[0]!r}, which training_step has not logged in this epoch; it has logged "
                f"{', '.join(sorted(self._logged))}"
            )
            self._session.notices(words, key=words)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes what has not been written yet, so that short runs have metrics too."""
        if self._training is None or not self._session.meter.unlogged.batches:
            return
        is_copy = not lightning_loop.has_own_batch(trainer)
        metrics = self._session.metrics_at_end(self._topology, is_copy=is_copy)
        if metrics is None:
            self._training.notices(
                "not all ranks came to the end of training together, so the padding metrics since the last logging "
                "step are left out: give every rank as many batches (use a DistributedSampler, or drop_last)"
            )
        else:
            _log(trainer, lightning_loop.last_step(trainer), metrics)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leaves the Trainer as it was."""
        if self._belongs_to_another(trainer):
            return
        if isinstance(exception, OutOfMemoryError | PeerError | GradientCheckError):
            pl_module.zero_grad(set_to_none=True)  # of a part of a batch
        elif self._running is not None:
            self._running.give_up()
        self._session.ends_with(exception)
        self._remove()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leaves the Trainer as it was."""
        if not self._belongs_to_another(trainer):
            self._remove()

    def state_dict(self) -> dict[str, Any]:
        """The counters, and what was audited. Nothing else is kept between batches."""
        if not self.config.enabled:
            return {}
        return self._session.state_dict(with_unlogged=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting, on the rank that has written the checkpoint; others begin anew. Audits go on on all."""
        self._session.load_state_dict(state_dict, counts=_is_first())

    def __getstate__(self) -> dict[str, Any]:
        """Copies are not part of a running fit, and do not drag the module along: Lightning sets its `log` here."""
        own = {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}
        running = ("_restore", "_ladder", "_checked", "_trainer", "_training", "_running")
        of_fit: dict[str, Any] = {name: {} for name in ("_forwards", "_sites", "_batchers", "_checks")}
        return own | dict.fromkeys(running) | of_fit | {"_session": copy.copy(self._session)}

    def _belongs_to_another(self, trainer: pl.Trainer) -> bool:
        """Whether a fit inside of a fit, which was refused, has ended."""
        return self._trainer is not None and self._trainer is not trainer and _is_running(self._trainer)

    def _remove(self) -> None:
        if self._restore is not None:
            self._restore()
        check = self._checks.get(not self._is_split)
        if check is not None and check.batches.has_passed:
            self._checked, self._checked_joint = weakref.ref(check.module), not self._is_split
            self._first_is_open = check.batches.first_is_open
        self._session.discard()
        self._session.meter.drop_unlogged()
        self._session.audits.end()
        self._restore = self._ladder = self._trainer = self._training = self._running = None
        self._forwards, self._sites, self._batchers, self._checks = {}, {}, {}, {}

    def _make_training(self, module: pl.LightningModule, *, joint: bool) -> Training:
        training = Training(
            self._session,
            module,
            self._topology,
            fix_of_hooks=partial(fix_of_hooks, module, self.config.mode),
            check=self._before_reading,
            tolerate=OF_JOINT if joint else OF_SPLIT,
            width=self.config.pad_to_multiple_of,
        )
        if self.config.mode != "auto":
            training.way = self.config.mode
        return training

    def _in_place_of(self, stock: Any) -> Any:
        """The loop that stands in for the stock one."""
        training, ladder = self._training, self._ladder
        assert training is not None
        assert ladder is not None
        losses = Losses(lambda: self._check)
        joint = JointOptimization(stock, self._read, self._chunked, lambda: training.around(0, 2), losses)
        if self.config.mode in ("joint", "replay"):
            return joint
        split = SplitOptimization(
            stock,
            self._prepare,
            self._progress,
            dict(self.config.log_reduce),
            self._logged,
            self._guard,
            lambda index, count: training.around(index, count),
            training.look_late,
            losses,
        )
        return split if self.config.mode == "split" else AutoOptimization(stock, split, joint, ladder, self._uncount)

    def _prepare(self, kwargs: OrderedDict[str, Any]) -> MicroBatches:
        training, trainer, batcher, check = self._training, self._trainer, self._batcher, self._check
        batch = kwargs["batch"]
        assert training is not None
        assert trainer is not None
        assert check is not None
        training.prove(
            lambda by: by.read_made_together(lambda: batch),
            partial(pack_gradients, trainer, training, self.config, kwargs),
            batcher,
        )
        micro_batches = training.prepare(batch, batcher)
        check(kwargs, micro_batches.schema, micro_batches.table, batcher.shows_first)
        meter = self._session.meter
        self._counted = meter.total, meter.unlogged
        self._session.count(micro_batches.stats)
        return micro_batches

    def _uncount(self) -> None:
        """The batch that was prepared last runs another way, which counts it."""
        self._session.meter.total, self._session.meter.unlogged = self._counted

    def _guard(self, micro_batches: MicroBatches) -> MemoryGuard:
        assert self._training is not None
        self._running = self._training.guard(micro_batches)
        return self._running

    def _before_reading(self, training: Training) -> None:
        if not training.model.automatic_optimization:
            self._session.loops.refuse_unfinished()
        self._look_at_hooks()

    def _look_at_hooks(self) -> None:
        """Refuses hooks that make something else of parts of gradients; those that are new since the last batch."""
        training = self._training
        assert training is not None
        assert self._trainer is not None
        if training.way == "as it came":
            return
        if training.way == "split":
            training.look(wrapper=self._trainer.strategy.model)
            return
        # One backward pass per batch: hooks on parameters fire as ever, unless checkpoints are passes of their own.
        modules = [site.module for site in self._sites.values()]
        training.look(modules, parameters=any(map(reenters, modules)))

    def _read(self, kwargs: OrderedDict[str, Any]) -> None:
        training, check = self._training, self._check
        assert training is not None
        assert check is not None
        schema, table = training.read(kwargs["batch"], self._batcher)
        if training.is_in_chunks:
            check(kwargs, schema, table)
            self._loss_tokens = int(table.loss_tokens.sum())
        else:
            self._session.count(stats_as_it_came(table))

    @contextmanager
    def _chunked(self) -> Iterator[None]:
        assert self._trainer is not None
        assert self._training is not None
        if not self._training.is_in_chunks:
            yield
            return
        exchange = self._topology.exchange if lightning_loop.has_collective_forwards(self._trainer) else None
        config, gate = self._config_of(joint=True), self._training.gate
        tells, replays = self._tells and self._tells_left, self._training.replays
        kept, verifies = self._forwards, self._training.was_audited
        with chunked(self._sites, config, exchange, gate, kept, tells, False, replays, verifies) as calls:
            yield
        if not calls:
            names = ", ".join(name for name in list(self._sites)[:4])
            words = f"none of {names} was called with padding that a mask tells, or could take it"
            self._session.notices(f"mode={self._training.way!r} had nothing to run in chunks: {words}")
        if self._loss_tokens is not None and calls:  # optimizers that run the closure again run the same batch
            self._session.count(replace(calls.total, loss_tokens=self._loss_tokens))
        self._loss_tokens = None

    def _progress(self, index: int, count: int) -> None:
        self.micro_index, self.micro_count = index, count


def _tell(words: str) -> None:
    rank_zero_info(words)


def _is_first() -> bool:
    return bool(rank_zero_only.rank == 0)


def _log(trainer: pl.Trainer, step: int, metrics: dict[str, float | int]) -> None:
    """Writes metrics; there are none where the loader gave None, or a hook skipped the batches."""
    if not metrics:
        return
    device = trainer.strategy.root_device
    trainer.callback_metrics.update(
        {name: torch.tensor(float(value), device=device) for name, value in metrics.items()}
    )
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)


def _is_running(trainer: pl.Trainer) -> bool:
    return bool(trainer.state.status == TrainerStatus.RUNNING and trainer.state.fn == TrainerFn.FITTING)


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
