"""`PadMinTrainerMixin`: padding removed inside of the Trainer of transformers.

    class MyTrainer(PadMinTrainerMixin, Trainer): ...
    trainer = MyTrainer(..., padmin=PadMinConfig(token_budget=16_384))

Where the loss is a sum over the number of targets of the whole accumulation window (`num_items_in_batch`, as models of
transformers take it), every partition of the window's rows is exact: they are pooled, planned together, and dealt over
the same number of steps. Where it is a mean over each batch, each batch is split by itself.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

try:
    import transformers
    from transformers import Trainer
except ImportError as error:
    raise ImportError("PadMinTrainerMixin needs transformers: pip install transformers accelerate") from error

import numpy as np
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_padmin.announce import Announcement, announce
from lightning_padmin.config import PadMinConfig
from lightning_padmin.distributed import (
    Exchange,
    board_alone,
    board_of_all,
    exchange_all,
    exchange_alone,
    telling_others,
)
from lightning_padmin.environment import resolve_for_class
from lightning_padmin.errors import ConfigError, GradientCheckError, PadMinWarning, PeerError, TrainingStepError
from lightning_padmin.fields import Schema
from lightning_padmin.gradient_check import Advice, Outcome, check_gradients
from lightning_padmin.gradient_hooks import GradientHookError, HookWatch
from lightning_padmin.guards import (
    ArchitectureError,
    batch_statistics,
    inspect_model,
    is_encoder_decoder,
    row_limit,
    with_scan_chunk,
)
from lightning_padmin.isolation import holders_of
from lightning_padmin.memory import MemoryGuard, OutOfMemoryError
from lightning_padmin.microbatch import MicroBatcher
from lightning_padmin.noise import refuse_noise_of
from lightning_padmin.one_loss import OneLoss, step_of
from lightning_padmin.pack_check import PackCheck
from lightning_padmin.pack_layout import PackStyle
from lightning_padmin.packing import PackGate, gate_of, needs_rows
from lightning_padmin.rows import RowTable
from lightning_padmin.sequence import MicroBatches
from lightning_padmin.stats import PaddingStats

_MOST_BATCHES = 100
_STOP = "use PadMinConfig(enabled=False)"
_COUPLED = (
    "Leave PadMinTrainerMixin out and call the model through lightning_padmin.PaddedForward in your own compute_loss, "
    "taking the loss of its outputs, or " + _STOP
)
_SUM = "A sum over num_items_in_batch"
# method -> first parameters, as checked with transformers 5.24
_EXPECTED = {
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "compute_loss": ["self", "model", "inputs"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
}


_FIX_OF_HOOKS = (
    "Do that once per step, in on_pre_optimizer_step of a TrainerCallback (an optimizer that steps in the backward "
    "pass: use it without), or use PadMinConfig(enabled=False)"
)
_FIX_OF_STEPS = (
    "Put the class in front of the mixin, class MyTrainer(Mine, PadMinTrainerMixin, Trainer), where its step runs once "
    "per batch; or use PadMinConfig(enabled=False)"
)
_logger = logging.getLogger(__name__)


class _Share(dict[str, Any]):
    """A stock batch of a window, with the chunks that its step runs in its place."""

    chunks: MicroBatches
    indices: range
    guard: MemoryGuard
    has_run: bool
    came: list[tuple[str, Any, int]]

    @property
    def is_as_it_came(self) -> bool:
        """Whether entries are those that they were, and nobody has written into them."""
        return len(self) == len(self.came) and all(
            self.get(name) is each and getattr(each, "_version", 0) == version for name, each, version in self.came
        )


class PadMinTrainerMixin:
    """Put before `Trainer`; takes the keyword `padmin`, a `PadMinConfig`.

    Without it: `PADMIN_*` variables, then the file of `accelerate launch`, then the defaults.

    Gradients, optimizer steps, the logged loss and evaluation are those of the Trainer without it.

    Attributes:
        padding_stats: `PaddingStats` of this rank's training passes.

    Raises:
        ConfigError: the Trainer, its arguments or its version are not supported; names the fix.
        ArchitectureError: the model's outputs for a row depend on the rows that run with it.
        PadMinError: for a batch that is malformed, on all ranks, before its first forward pass.
    """

    def __init__(self, *args: Any, padmin: PadMinConfig | None = None, **options: Any) -> None:
        self._padmin = resolve_for_class(padmin)
        self._padmin_told = self._padmin.check == "off"
        self._padmin_checked, self._padmin_as_stock = 0, False
        self._padmin_dealt = self._padmin_lost = 0  # batches whose rows were regrouped, targets that were subtracted
        self._padmin_first_is_open, self._padmin_first_batches = not self._padmin_told, 0
        self._padmin_means_told = self._padmin_told
        self.padding_stats = PaddingStats()
        self._padmin_since_log = PaddingStats()
        super().__init__(*args, **options)
        self._padmin_announced: Announcement | None = announce("PadMinTrainerMixin", self._padmin)
        if self._padmin.enabled:
            self._padmin_set_up()

    def _padmin_set_up(self) -> None:
        _check_signatures(type(self))
        _refuse_unsupported(self)
        model: Any = self.model  # type: ignore[attr-defined]
        self._padmin_hooks = HookWatch(_FIX_OF_HOOKS)
        self._padmin_hooks.look(model)
        self._padmin_losses = OneLoss(type(self), _FIX_OF_STEPS)
        findings = inspect_model(model)
        for finding in findings:
            if finding.severity == "refuse" and finding.rule != "batch-norm" and finding.exact_up_to is None:
                raise ArchitectureError(f"{finding.where}: {finding.reason}")
        config = with_scan_chunk(self._padmin, model)
        sources = (getattr(self, "processing_class", None), getattr(model, "config", None))
        known = next((p for each in sources if isinstance(p := getattr(each, "pad_token_id", None), int)), None)
        if config.pad_token_id is None and known is not None:
            config = replace(config, pad_token_id=known)
        self._padmin = config
        self._padmin_gate = gate = _pack_gate(self, config)
        self._padmin_packs = None if gate is None else PackCheck(gate, self._padmin_exchange, self._padmin_say)
        self._padmin_batcher = self._padmin_make_batcher(config, row_limit(findings))
        # For windows whose loss is a sum over the targets of all batches; None: the first batch is going to tell.
        summed = replace(config, loss_reduction="sum")
        self._padmin_pooling = self._padmin_make_batcher(summed, row_limit(findings), is_pooling=True)
        self._padmin_pools: bool | None = None

    def _padmin_make_batcher(self, config: PadMinConfig, limit: int | None, is_pooling: bool = False) -> MicroBatcher:
        encoder_decoder = is_encoder_decoder(self.model)  # type: ignore[attr-defined]
        exchange = self._padmin_exchange
        gate = self._padmin_gate
        return MicroBatcher(
            config,
            exchange=exchange,
            encoder_decoder=encoder_decoder,
            before_reading=self._padmin_look_at_hooks,
            row_limit=limit,
            gate=gate,
            may_pack=False,
            subtracts_lost=is_pooling and self._padmin_subtracts_lost,
        )

    def _padmin_look_at_hooks(self) -> None:
        """Those that are new, as the ones of an optimizer that `train` has made."""
        model: Any = self.model_wrapped  # type: ignore[attr-defined]
        self._padmin_hooks.look(self.accelerator.unwrap_model(model), wrapper=model)  # type: ignore[attr-defined]

    def _padmin_guard(self, chunks: MicroBatches) -> MemoryGuard:
        """Only with DistributedDataParallel do ranks meet in the last pass alone."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        tells = accelerator.distributed_type in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
        board = board_of_all() if tells and chunks.grows else board_alone
        return MemoryGuard(chunks, board, accelerator.process_index)

    @property
    def _padmin_exchange(self) -> Exchange:
        return exchange_all if self.accelerator.num_processes > 1 else exchange_alone  # type: ignore[attr-defined]

    def train(self, *args: Any, **options: Any) -> Any:
        """Stock; ranks hear why another one has ended."""
        announced = self._padmin_announced
        explaining = nullcontext() if announced is None else announced.explaining()
        with explaining, telling_others() if self._padmin.enabled else nullcontext():
            return super().train(*args, **options)  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Stock; each batch comes with the chunks that its step is going to run."""
        if self._padmin_announced is not None:  # by now every rank has made its Trainer
            announced, self._padmin_announced = self._padmin_announced, None
            announced.agree()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        self._padmin_dealt = 0
        if not self._padmin.enabled or not batches or num_items is None:
            return batches, num_items
        self._padmin_as_stock, self._padmin_lost = False, 0
        if self._padmin_step_in_front:  # what it hands on is not known yet
            return batches, self._padmin_without_lost_of(batches, num_items)
        self._padmin_look_at_reduction(batches, num_items)
        if not self._padmin_pools:
            return batches, num_items
        self._padmin_prove(batches, num_items, self._padmin_pooling)
        self._padmin_pooling.min_micro_batches = len(batches)
        chunks = self._padmin_pooling.prepare_window(batches)
        self._padmin_look_at_models(self._padmin_pooling)
        self._padmin_look_at_first_labels(chunks, num_items, self._padmin_pooling)
        guard = self._padmin_guard(chunks)
        num_items = self._padmin_without_lost(num_items, chunks, batches)
        shares, self._padmin_dealt = [], len(batches)
        for step, batch in enumerate(batches):
            share = _Share(batch)
            share.chunks, share.guard, share.has_run = chunks, guard, False
            share.came = [(name, each, getattr(each, "_version", 0)) for name, each in share.items()]
            share.indices = range(step * len(chunks) // len(batches), (step + 1) * len(chunks) // len(batches))
            shares.append(share)
        self._padmin_count(chunks.stats)
        return shares, num_items

    def _padmin_look_at_reduction(self, batches: list[Any], num_items: Any) -> None:
        """Finds out what kind of loss this is, if that is open."""
        if self._padmin_pools is None and self._padmin_checked < _MOST_BATCHES:
            self._padmin_pools = self._padmin_decide(batches, num_items)
        # Neither way to split is known to be right then, so this window runs as it came.
        self._padmin_as_stock = self._padmin_pools is None
        if self._padmin_as_stock and self._padmin_checked == 1 and self.accelerator.is_main_process:  # type: ignore[attr-defined]
            _logger.warning(
                "PadMinTrainerMixin: the first window does not tell whether the loss is a sum over num_items_in_batch "
                "(it has no two rows with loss, or no finite gradient), so windows run as they came until one tells"
            )

    def _padmin_without_lost(self, num_items: Any, chunks: MicroBatches, batches: list[Any]) -> Any:
        """The number of targets as in a right-padded window: those predicted from padding are none once rolled.

        Stock counts labels from the second column on, so that in a right-padded batch the first token's is not counted.
        """
        if not self._padmin_subtracts_lost or "shift_labels" in batches[0] or not chunks.lost_targets:
            return num_items
        of_all = self.args.average_tokens_across_devices  # type: ignore[attr-defined]
        return num_items - (chunks.lost_targets if of_all else chunks.table.lost_targets)

    def _padmin_without_lost_of(self, batches: list[Any], num_items: Any) -> Any:
        """The same for batches that are going to be split one by one."""
        if not self._padmin_subtracts_lost or "shift_labels" in batches[0]:
            return num_items
        lost = sum(self._padmin_pooling.read_together(batch)[1].lost_targets for batch in batches)
        if self.args.average_tokens_across_devices:  # type: ignore[attr-defined]
            lost = int(self._padmin_exchange([lost]).sum())
        self._padmin_lost = lost
        return num_items - lost if lost else num_items

    @property
    def _padmin_step_in_front(self) -> bool:
        """Whether a step of the user's calls ours, and may look at its batch, change it, or act on its gradient."""
        if "training_step" in vars(self):
            return True
        kinds = type(self).__mro__
        return step_of(*kinds[: kinds.index(PadMinTrainerMixin)]) is not None

    @property
    def _padmin_subtracts_lost(self) -> bool:
        """Whether the Trainer counts targets as a loss does that shifts labels."""
        return bool(getattr(self, "_loss_shifts_labels", True))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One stock step: forward and backward passes of its chunks."""
        stock = super().training_step  # type: ignore[misc]
        if not self._padmin.enabled:
            return stock(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        if num_items_in_batch is not None and self._padmin_pools is None and not self._padmin_as_stock:
            self._padmin_look_at_reduction([inputs], num_items_in_batch)
        if self._padmin_as_stock:
            lost = self._padmin_lost if num_items_in_batch is not None else 0
            return stock(model, inputs, num_items_in_batch + lost if lost else num_items_in_batch)  # type: ignore[no-any-return]
        model.train()
        wrong = batch_statistics(model)
        if wrong is not None:
            raise ArchitectureError(wrong)
        sums = bool(self._padmin_pools) and num_items_in_batch is not None
        batcher = self._padmin_pooling if sums else self._padmin_batcher
        if self._padmin_dealt:
            self._padmin_refuse_changed(model, inputs)
            chunks, indices, guard = inputs.chunks, inputs.indices, inputs.guard
        else:
            batcher.min_micro_batches = 1
            self._padmin_prove([inputs], num_items_in_batch, batcher)
            chunks = batcher.prepare(inputs)
            self._padmin_look_at_models(batcher)
            indices, guard = range(len(chunks)), self._padmin_guard(chunks)
            self._padmin_count(chunks.stats)
        if self._padmin_pools and not sums:
            self._padmin_check_means(inputs)
        if not self._padmin_told:
            self._padmin_check(batcher.read_made_together(lambda: dict(inputs)), num_items_in_batch, batcher)
        if not self._padmin_dealt:
            self._padmin_look_at_first_labels(chunks, num_items_in_batch, batcher)
        total: Any = 0.0
        own = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        # Where other processes write into gradients, what a step of the user's does with them cannot be told.
        alone = self.accelerator.distributed_type == DistributedType.NO  # type: ignore[attr-defined]
        is_part = len(chunks) > 1 and (alone or isinstance(model, DistributedDataParallel))
        try:
            for k in indices:
                hooks = self._padmin_hooks.around(k, len(chunks))
                with guard.around(k), hooks, self._padmin_synchronised(model, k == indices[-1]):
                    micro = chunks[k]
                    with (
                        self._padmin_losses.chunk(own, is_part and (alone or k != indices[-1])),
                        self._padmin_weighted(
                            micro.weight, partial(guard.forward_is_done, k), num_items_in_batch if sums else None
                        ),
                    ):
                        total = total + stock(model, micro.batch, num_items_in_batch)
        except (OutOfMemoryError, PeerError, TrainingStepError, GradientHookError):
            model.zero_grad(set_to_none=True)  # gradients of a part of a batch
            raise
        return total  # type: ignore[no-any-return]

    def _padmin_refuse_changed(self, model: Any, inputs: Any) -> None:
        """Rows of this window have been regrouped already, so that its batches can run once each, as they came."""
        what = "another batch came"
        if isinstance(inputs, _Share):
            if not inputs.has_run and inputs.is_as_it_came:
                inputs.has_run = True
                return
            what = "a batch came twice" if inputs.has_run else "a batch was written into"
        model.zero_grad(set_to_none=True)
        raise TrainingStepError(
            f"{type(self).__qualname__}: {what}, after rows of {self._padmin_dealt} batches had been regrouped for "
            "their steps. Do that in a training_step of a class in front of the mixin, class MyTrainer(Mine, "
            "PadMinTrainerMixin, Trainer), for which batches are split one by one; or use PadMinConfig(enabled=False)"
        )

    @contextmanager
    def _padmin_weighted(self, weight: float, forward_is_done: Callable[[], None], num_items: Any) -> Iterator[None]:
        """Has `compute_loss`, whichever class defines it, return its loss times the weight of the chunk.

        Where the loss is a sum over `num_items`, it must get that number.
        """
        own = vars(self).get("compute_loss")
        stock = self.compute_loss  # type: ignore[attr-defined]
        # Called with all that stock calls it with; what it returns depends on this argument.
        names = list(inspect.signature(Trainer.compute_loss).parameters)[1:]
        position, divisor = names.index("return_outputs"), names.index("num_items_in_batch")

        def finish(result: Any, *args: Any, **options: Any) -> Any:
            forward_is_done()
            given = args[divisor] if len(args) > divisor else options.get("num_items_in_batch")
            if num_items is not None and (given is None or bool(given != num_items)):
                raise TrainingStepError(
                    f"{step_of(*type(self).__mro__) or 'training_step'} does not hand num_items_in_batch on as it is, "
                    "and the loss is a sum over that number: hand it on, put the class in front of the mixin, class "
                    "MyTrainer(Mine, PadMinTrainerMixin, Trainer), or use PadMinConfig(enabled=False)"
                )
            if args[position] if len(args) > position else options.get("return_outputs", False):
                return (result[0] * weight, *result[1:])
            return result * weight

        vars(self)["compute_loss"] = self._padmin_losses.of(stock, finish)
        try:
            yield
        finally:
            del vars(self)["compute_loss"]
            if own is not None:
                vars(self)["compute_loss"] = own

    @contextmanager
    def _padmin_synchronised(self, model: Any, is_last: bool) -> Iterator[None]:
        """Gradients are reduced, and DeepSpeed's engine steps, in the last chunk of a step only."""
        accelerator = self.accelerator  # type: ignore[attr-defined]
        with ExitStack() as stack:
            if not is_last and accelerator.distributed_type in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
                stack.enter_context(accelerator.no_sync(model))
            if not is_last and accelerator.distributed_type == DistributedType.DEEPSPEED:
                state = accelerator.gradient_state
                before = state.sync_gradients
                state._set_sync_gradients(False)
                stack.callback(state._set_sync_gradients, before)
            yield

    def _padmin_check_means(self, inputs: Any) -> None:
        """Checks the first batch that comes without `num_items`, though the loss has been one of a sum over it."""
        if self._padmin_means_told:
            return
        batcher = self._padmin_batcher
        outcome = self._padmin_gradients(batcher.read_made_together(lambda: dict(inputs)), None, batcher.config)
        self._padmin_means_told = outcome is not None and outcome.final

    def _padmin_look_at_first_labels(self, chunks: MicroBatches, num_items: Any, batcher: MicroBatcher) -> None:
        """Finds out, on the first batch that can tell, whether the loss takes labels on first tokens as declared."""
        if not self._padmin_first_is_open or not batcher.shows_first:
            return
        self._padmin_first_batches += 1
        read = chunks.source, chunks.schema, chunks.table
        outcome = self._padmin_gradients(read, num_items, batcher.config, first_labels=True)
        told = outcome is not None and outcome.tells_first
        self._padmin_first_is_open = not told and self._padmin_first_batches < _MOST_BATCHES

    def _padmin_decide(self, batches: list[Any], num_items: Any) -> bool | None:
        """Whether the loss is a sum over `num_items`: some models take that number and return a mean all the same.

        None where this window cannot tell.
        """
        if self._padmin_told:
            return True
        read = self._padmin_pooling.read_window_together(batches)
        try:
            outcome = self._padmin_check(read, num_items, self._padmin_pooling)
        except GradientCheckError:
            self._padmin_check(
                self._padmin_batcher.read_made_together(lambda: read[0]), num_items, self._padmin_batcher
            )
            return False
        if outcome is not None and outcome.told:
            return True
        final = outcome is not None and outcome.final
        self._padmin_told = False
        self._padmin_checked = _MOST_BATCHES if final else self._padmin_checked
        if self._padmin_checked >= _MOST_BATCHES:
            found = outcome.words if outcome is not None else f"no batch among {_MOST_BATCHES} has two rows with loss"
            self._padmin_say(
                f"{found}. So whether the loss is a sum over num_items_in_batch is not known, and batches run as they "
                "came. If it is one, set check='off'"
            )
        return None

    def _padmin_say(self, words: str) -> None:
        if self.accelerator.is_main_process:  # type: ignore[attr-defined]
            warnings.warn(f"PadMinTrainerMixin: {words}", PadMinWarning, stacklevel=3)

    def _padmin_prove(self, batches: list[Any], num_items: Any, batcher: MicroBatcher) -> None:
        """Finds out whether the loss takes packed rows; until it is known they are padded."""
        check = self._padmin_packs
        if check is None or not check.is_due:
            return
        read = batcher.read_window_together(batches)
        passed = check(
            batcher.pack_style, lambda style: self._padmin_gradients(read, num_items, batcher.config, packs=style)
        )
        self._padmin_batcher.may_pack = self._padmin_pooling.may_pack = passed

    def _padmin_look_at_models(self, batcher: MicroBatcher) -> None:
        """Packs are proven anew for models that have become others."""
        if batcher.has_changed and self._padmin_packs is not None:
            self._padmin_packs.again()
            self._padmin_batcher.may_pack = self._padmin_pooling.may_pack = False

    def _padmin_check(
        self, read: tuple[Any, Schema, RowTable], num_items: Any, batcher: MicroBatcher
    ) -> Outcome | None:
        """Gradients of a few rows through the Trainer's own `compute_loss`, un-split and split."""
        outcome = self._padmin_gradients(read, num_items, batcher.config)
        self._padmin_checked += 1
        self._padmin_told = (outcome is not None and outcome.final) or self._padmin_checked >= _MOST_BATCHES
        if outcome is not None and (outcome.tells_first or (outcome.final and not outcome.told)):
            self._padmin_first_is_open = False
        if outcome is not None and outcome.notable and outcome.told:
            self._padmin_say(outcome.words)
        return outcome

    def _padmin_gradients(
        self,
        read: tuple[Any, Schema, RowTable],
        num_items: Any,
        config: PadMinConfig,
        packs: PackStyle | None = None,
        first_labels: bool = False,
    ) -> Outcome | None:
        batch, schema, table = read
        model: Any = self.model_wrapped  # type: ignore[attr-defined]

        def loss(inputs: Any) -> Tensor:
            prepared = self._prepare_inputs(dict(inputs))  # type: ignore[attr-defined]
            with self.compute_loss_context_manager():  # type: ignore[attr-defined]
                compute_loss: Any = self.compute_loss  # type: ignore[attr-defined]
                value: Tensor = compute_loss(model, prepared, num_items_in_batch=num_items)
            return value

        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        pools = config is self._padmin_pooling.config
        own = accelerator.unwrap_model(model)
        sharded = accelerator.distributed_type == DistributedType.FSDP
        if not sharded:
            model = own  # DistributedDataParallel would take a call of its wrapper for a step
        # What compute_loss logs itself is not of the training.
        with mock.patch.object(self, "log", return_value=None):
            return check_gradients(
                loss,
                batch,
                schema,
                table,
                config,
                own,
                tolerance=0.1 if accelerator.mixed_precision not in ("no", None) else None,
                exchange=self._padmin_exchange,
                is_sharded=sharded,
                packs=packs,
                holders=holders_of(self),  # figures that compute_loss keeps in the Trainer are not those of the check
                first_labels=first_labels,
                subtracts_lost=pools and self._padmin_subtracts_lost,
                advice=Advice(_COUPLED, _STOP, _SUM if pools else None),
            )

    def _padmin_count(self, stats: PaddingStats) -> None:
        self.padding_stats = self.padding_stats + stats
        self._padmin_since_log = self._padmin_since_log + stats

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Adds `padmin/*`: counts of the training passes since the last time, over all ranks, ratios last."""
        if self._padmin.enabled and "loss" in logs:
            merged = PaddingStats.merge_ranks(np.asarray(self._padmin_exchange(self._padmin_since_log.as_counts())))
            self._padmin_since_log = PaddingStats()
            if merged.batches:
                logs.update(merged.metrics(self._padmin.log_prefix))
        super().log(logs, *args, **options)  # type: ignore[misc]


def _pack_gate(trainer: Any, config: PadMinConfig) -> PackGate | None:
    """What decides whether rows are packed; None where they are not.

    Raises:
        ConfigError: `layout="pack"` where that is not supported, or would stay unproven.
    """
    if config.layout == "pad":
        return None
    accelerator, why = trainer.accelerator, None
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        how = accelerator.distributed_type.value
        why = f"under {how} the passes of the leak test are collective, which was not tried"
    elif config.check == "off":
        why = "check='off' would leave unproven that your loss takes packed rows"
    elif trainer.label_smoother is not None:
        why = "with label_smoothing_factor the first label of each document would not be left out"
    else:
        why = needs_rows(config)
    if why is not None and config.layout == "pack":
        raise ConfigError(f"layout='pack': {why}. Use layout='pad'")
    if why is not None:
        return None
    model = accelerator.unwrap_model(trainer.model)
    told = trainer._padmin_say if config.layout == "auto" else None
    return gate_of({"model": model}, config, trainer.compute_loss_context_manager, told)


def _check_signatures(kind: type) -> None:
    """Raises ConfigError when this Trainer's methods are not those that were checked."""
    for name, expected in _EXPECTED.items():
        function = getattr(Trainer, name, None)
        found = list(inspect.signature(function).parameters) if function is not None else None
        if found is None or found[: len(expected)] != expected:
            where = f"Trainer.{name} " + ("is gone" if found is None else f"takes {found}")
            raise ConfigError(
                f"transformers {transformers.__version__}: {where}, expected {expected}. PadMinTrainerMixin was "
                "checked with 5.24; use that until it supports this version"
            )


def _refuse_unsupported(trainer: Any) -> None:
    args = trainer.args
    if type(trainer).__module__.startswith("trl."):
        raise ConfigError(f"{type(trainer).__name__} is a trainer of TRL: use PadMinMixin of trl_trainers")
    refuse_noise_of(trainer)
    name = str(getattr(args.optim, "value", args.optim))
    if name.endswith("_layerwise") or name in ("lomo", "adalomo"):
        other = name.removesuffix("_layerwise") if name.endswith("_layerwise") else "adafactor"
        raise ConfigError(
            f"optim={name!r} takes its steps in the backward pass, which runs once per part of a batch here. Use one "
            f"that does not (optim={other!r})"
        )
    if trainer.label_smoother is not None and not trainer.model_accepts_loss_kwargs:
        raise ConfigError(
            f"label_smoothing_factor={args.label_smoothing_factor}: this model's loss is a mean over each batch, and "
            "the smoothed one is a mean of its own. Set label_smoothing_factor=0"
        )
    if getattr(args, "n_gpu", 1) > 1:
        raise ConfigError(f"n_gpu={args.n_gpu}: DataParallel splits batches by itself. Start one process per device")
    if trainer._padmin.mode not in ("auto", "split"):
        raise ConfigError(
            f"mode={trainer._padmin.mode!r}: PadMinTrainerMixin splits batches. Use mode='split', or call the model "
            "through lightning_padmin.PaddedForward in your own compute_loss"
        )
    if trainer._padmin.normalize != "rank":
        raise ConfigError("normalize='global' is the Trainer's own average_tokens_across_devices: set that")


__all__ = ["PadMinTrainerMixin"]
