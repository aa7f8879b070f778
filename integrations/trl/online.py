"""What stands behind `PadMinMixin`: plans, modes, and where a trainer is in its accumulation window."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ConfigError, GradientHookError, PadMinError, PeerError, TrainingStepError
from lightning_padmin.integrations.common import (
    Isolated,
    OneLoss,
    Session,
    Training,
    before_boundary,
    drop_gradients,
    find_prepared,
    look_for_whole_steps,
    refuse_batch_statistics,
    replaced,
    topology_of,
)
from lightning_padmin.integrations.trl import hooks as trl_stock
from lightning_padmin.integrations.trl import images as trl_images
from lightning_padmin.integrations.trl.audits import Audits, keys_of_losses
from lightning_padmin.integrations.trl.check import READS_PADDING, Verdict, refuse_readers_of_padding, separates
from lightning_padmin.integrations.trl.facets import token_facets, window_facets
from lightning_padmin.integrations.trl.logprobs import (
    Given,
    Scores,
    StockFunction,
    first_tokens,
    score_all,
    score_chunk,
)
from lightning_padmin.integrations.trl.model_check import ModelCheck, Status
from lightning_padmin.integrations.trl.passes import Passes, StockLoss
from lightning_padmin.integrations.trl.support import (
    SHARDS_WHAT_SEES,
    choose_mode,
    refuse_config,
    refuse_trainer,
    shards_what_sees,
    why_not_packed,
)
from lightning_padmin.integrations.trl.window import Window
from lightning_padmin.microbatching import MicroBatcher, MicroBatches, OutOfMemoryError

_COUPLES = "gradients of the loss at the log-probs change by {:.2g} when rows are split, so it couples rows"
_NOT_OF_LOG_PROBS = (
    "the loss has a part that does not come from the log-probs of its rows: it runs the model itself, asks for "
    "log-probs twice, penalises parameters, or draws random numbers"
)

_NOT_POOLED = (
    "your class has its own _prepare_inputs, and what it makes of later micro-batches is not known in time: rows of "
    "each are regrouped by themselves, not those of the whole accumulation window, which would leave less padding"
)
_FIX_OF_STEPS = "Set mode='joint', where its step runs as without PadMinMixin, or use PadMinConfig(enabled=False)"


class Engine:
    """Runs the passes of one trainer in chunks.

    Args:
        trainer: of TRL, fully constructed.
        session: of the mixin; options about names of entries and the reduction of the loss do not matter: both are
            TRL's.
        stock_scores: the trainer's own log-prob function.

    Attributes:
        session: of the mixin.
        mode: `"split"`, `"joint"` or `"replay"`.
    """

    def __init__(self, trainer: Any, session: Session, stock_scores: StockFunction) -> None:
        config = session.config
        refuse_config(config)
        refuse_trainer(trainer)
        self._trainer, self._wanted, self._stock_scores = trainer, config.mode, stock_scores
        self.session, self._topology = session, topology_of(trainer)
        self._training = Training(
            session,
            trainer.model,
            self._topology,
            fix_of_hooks=self._fix_of_hooks,
            check=lambda training: None,  # hooks and modes of modules are looked at in the step
            tolerate={"balance-loss"},
        )
        findings = self._training.findings
        findings.refuse()
        self._agreed_on_hooks = False
        self._losses = OneLoss(type(trainer), _FIX_OF_STEPS)
        self._config = findings.options(_for_rows(config))
        self._batchers: dict[int, MicroBatcher] = {}
        gate = session.pack_policy(
            lambda: why_not_packed(trainer),
            lambda: trl_stock.models_of(trainer),
            trainer.accelerator.autocast,
            say=self._say if config.layout == "auto" else None,
            wants_gradients=True,
        )
        self._training.use_gate(gate, asks_of_step=False)
        self.mode, why = choose_mode(trainer, config.mode)
        self._audits = Audits(config, session.audits)
        self._training.ledger = None  # windows are looked at here, and losses of their own
        self._may_read_padding = config.check != "off"
        self._must_not_be_split = False  # found where one chunk held all rows, so that it made no difference
        self._rest = 0
        self._kinds: tuple[tuple[torch.dtype, torch.device] | None, ...] = ()
        self._as_stock = shards_what_sees(trainer)
        self._given: Given | None = None
        self._engine: Any = None  # of DeepSpeed, once it was looked at
        self.reset()
        corrected = [each for each in findings.told if each.severity == "correct"]
        self._is_corrected = bool(corrected)  # what left padding does to this model is known, and said
        for finding in corrected:
            self._say(f"{finding.where}: {finding.reason}")
        if self._as_stock:
            self._say(SHARDS_WHAT_SEES)
        elif why:
            self._say(f"mode={self.mode!r}: {why}")

    def begin(self) -> None:
        """A training begins."""
        self.reset()
        self._audits.begin()
        self._must_not_be_split = False
        self._may_read_padding = self.session.config.check != "off"

    def reset(self) -> None:
        """Forgets the window that is under way."""
        self._passes: Passes | None = None
        self._position = 0  # of the next step in its accumulation window

    # Forward passes: reference, old policy, and training in joint mode.

    def scores(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **options: Any
    ) -> tuple[Any, ...]:
        """The log-prob function, in chunks."""
        stock = self._stock_scores
        given = self._given
        if self._as_stock:
            return stock(model, input_ids, attention_mask, logits_to_keep, *args, **options)
        if args:
            options = dict(zip(trl_stock.optional_names(stock), args, strict=False)) | options
        if given is not None and given.is_for(model, input_ids):
            trl_images.refuse_unknown(options)
            return given.take()
        rows = options.pop("batch_size", None) or len(input_ids)
        along = {name: options.pop(name, None) for name in (*trl_images.NAMES, *trl_stock.POSITIONS)}
        images: dict[str, list[Any]] = {}

        def tokens() -> dict[str, Any]:
            trl_images.refuse_unknown(options)
            images.update(trl_images.by_row(along))
            positions = {name: along[name] for name in trl_stock.POSITIONS if along[name] is not None}
            return {"input_ids": input_ids, "attention_mask": attention_mask, **positions, **images}

        # The balance loss of experts is one of all rows together.
        is_whole = bool(options.get("compute_aux_loss"))
        training = torch.is_grad_enabled()
        no_sync = self._no_sync_of(model) if training else None
        budget = self._budget(rows * input_ids.shape[1])
        if training:
            self._audits.ask(lambda: token_facets(attention_mask, logits_to_keep), loss=False)
        batcher = self._batcher(0)
        batches = self._training.prepare_made(tokens, by=batcher, token_budget=budget, is_whole=is_whole)
        self._look_at_prompts(first_tokens(batches.table, logits_to_keep))
        order = trl_images.in_order(batches.slot_maps, images.get("num_images"))
        if training and self._audits.are_due(batcher.audits):
            with self._audits.noted(batches, lambda: self.mode, self._topology.rank):
                self._look_at_model(model, batches, logits_to_keep, budget, loss=False)
        guard = self._training.guard(batches, tells=False)
        outputs = score_all(stock, model, batches, logits_to_keep, options, order, guard, no_sync)
        if training:
            completion = attention_mask[:, -logits_to_keep:]
            self.session.count(replace(batches.stats, loss_tokens=int(completion.sum())))
            if self._may_read_padding and not completion.all():
                self._may_read_padding = self._audits.stands  # else the first pass that can tell does
                outputs = (*refuse_readers_of_padding(outputs[:2], completion == 0), *outputs[2:])
        return outputs

    def _look_at_prompts(self, first: np.ndarray[Any, Any]) -> None:
        if (first < 1).any():
            self._say(
                "a row has an empty prompt: its first completion token was predicted from padding, and rolled it has "
                "nothing before it, so its log-prob is not that of the trainer without PadMinMixin"
            )

    def _batcher(self, steps: int) -> MicroBatcher:
        """One for windows of so many steps, kept between batches, so that it says things once.

        Passes that only score (0) have one of their own: those that train take more memory.
        """
        if steps not in self._batchers:
            self._batchers[steps] = self._training.batcher(
                self._config, encoder_decoder=False, wants_audit=self._audits.wants
            )
        return self._batchers[steps]

    def _budget(self, slots: int) -> int:
        """Most slots of a micro-batch, where stock puts so many through at once."""
        return self._config.token_budget if self._config.token_budget is not None else slots

    def _no_sync_of(self, model: Any) -> Callable[[], AbstractContextManager[Any]] | None:
        """Only DistributedDataParallel is told to wait with passes; FSDP reduces in every backward pass."""
        if self._topology.kind != "ddp":
            return None
        return partial(self._trainer.accelerator.no_sync, model)

    # The training pass, chunk by chunk.

    def step_in_place_of(self, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`training_step`, which does the current step's share of the window."""
        if self._as_stock:
            return stock
        return partial(self._whole_step if self.mode == "joint" else self._step, stock)

    def _whole_step(self, stock: Callable[..., Tensor], model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Joint: one backward pass for a stock micro-batch."""
        self._look_at_engine(model)
        refuse_batch_statistics(model)
        own = self._trainer.accelerator.unwrap_model(model)
        look_for_whole_steps(self._training.hooks, own, [own])
        with self._training.around(0, 2):
            return stock(model, inputs, num_items_in_batch)

    def _look_at_engine(self, model: Any) -> None:
        """Raises ConfigError for an engine of DeepSpeed whose steps cannot be told from its passes."""
        if self._topology.kind == "engine" and self._engine is not model:
            self._engine = find_prepared(self._trainer.accelerator, model)

    def _hooks_call_for_joint(self, model: Any) -> bool:
        """Whether a hook acts on whole gradients, so that the window has to run in joint mode."""
        error: GradientHookError | None = None
        try:
            self._training.hooks.look(self._trainer.accelerator.unwrap_model(model), wrapper=model)
        except GradientHookError as caught:
            error = caught
        found = [int(error is not None)]
        if not self._agreed_on_hooks:  # later on, ranks do the same by themselves
            self._agreed_on_hooks = True
            found = self._topology.exchange(found)[:, 0].tolist()
        if not any(found):
            return False
        if self._wanted != "auto":
            raise error or PeerError("another rank refused a hook on gradients; its message stands in that rank's log")
        self.mode = "joint"
        self._say(f"mode='joint': {error or 'another rank has a hook on gradients'}")
        return True

    def _fix_of_hooks(self) -> str:
        if self.mode == "joint":
            return "Checkpoint with gradient_checkpointing_kwargs={'use_reentrant': False}"
        return "" if self._wanted == "auto" else "Set mode='joint' or mode='auto'"

    def _step(self, stock: Callable[..., Tensor], model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        self._look_at_engine(model)
        refuse_batch_statistics(model)
        if self._passes is None and self._hooks_call_for_joint(model):
            return self._whole_step(stock, model, inputs, num_items_in_batch)
        trainer, began = self._trainer, time.perf_counter()
        ends = trainer.accelerator.sync_gradients
        try:
            _to_training_mode(trainer, model)
            inputs = trainer._prepare_inputs(inputs)
            if self._passes is None:
                self._passes = self._open(model, inputs, num_items_in_batch)
            # Inputs are prepared once per step, though a step has several passes.
            with replaced(trainer, _prepare_inputs=lambda prepared: prepared):
                if self._passes is not None:
                    loss = self._run_chunks(stock, model, inputs, num_items_in_batch, began)
                else:
                    trl_stock.count_time(trainer, time.perf_counter() - began)
                    loss = stock(model, inputs, num_items_in_batch)
        except BaseException as error:
            self.reset()
            if isinstance(error, OutOfMemoryError | PeerError | TrainingStepError | GradientHookError):
                drop_gradients(model)  # of a part of a batch
            raise
        self._position = 0 if ends else self._position + 1
        return loss

    def _run_chunks(
        self, stock: Callable[..., Tensor], model: Any, inputs: Any, num_items_in_batch: Any, began: float
    ) -> Tensor:
        passes, trainer = self._passes, self._trainer
        assert passes is not None
        window = passes.window
        if window.entries[window.step].inputs is not inputs:
            raise PadMinError(
                "the trainer's generated batch was replaced in the middle of an accumulation window, whose rows have "
                "been regrouped already. Use mode='joint'"
            )
        chunks = window.chunks()
        own = trainer.accelerator.unwrap_model(model)

        @contextmanager
        def around(chunk: int) -> Iterator[None]:
            compute_loss = self._losses.of(passes.loss_of(chunk))
            hooks = self._training.around(window.order.index(chunk), len(window.order))
            with passes.guard.around(chunk), hooks, replaced(trainer, compute_loss=compute_loss):
                yield

        for chunk in chunks[:-1]:
            with around(chunk), self._waiting(model):
                trl_stock.plain_training_step(trainer, model, inputs, num_items_in_batch)
        trl_stock.count_time(trainer, time.perf_counter() - began)
        with around(chunks[-1]), self._losses.chunk(own):
            loss = stock(model, inputs, num_items_in_batch)
        window.step += 1
        if window.step == len(window.entries):
            self._passes = None
        return loss

    def _waiting(self, model: Any) -> AbstractContextManager[Any]:
        """Around a pass behind which there are others: gradients are not reduced, an engine does not step."""
        if self._topology.kind == "engine":
            return before_boundary(self._trainer.accelerator)
        return (self._no_sync_of(model) or nullcontext)()

    def _open(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any) -> Passes | None:
        """The passes of the window that begins with this step; None if it has to run in joint mode."""
        trainer = self._trainer
        entries = trl_stock.upcoming(trainer, inputs, self._position)
        if trl_stock.prepares_itself(type(trainer)):
            self._say(_NOT_POOLED)
        slots = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        # As it is now: while chunks run, an attribute of the trainer stands in its place.
        loss = partial(self._stock_loss, trainer.compute_loss, num_items_in_batch, model)
        self._audits.ask(lambda: self._facets(entries, loss), loss=True)
        batcher = self._batcher(len(entries))
        prepare = partial(self._training.prepare_made, by=batcher)
        window = Window(entries, prepare, self._budget(slots))
        self._look_at_prompts(first_tokens(window.batches.table, window.completion))
        guard = self._training.guard(window.batches, last=window.order[-1])
        score = partial(self._score, model, window)
        passes = Passes(trainer, window, score, loss, guard, self._hear if self._audits.stands else None)
        if self._audits.are_due(batcher.audits) or (self._must_not_be_split and len(window.batches) > 1):
            with self._audits.noted(window.batches, lambda: self.mode, self._topology.rank):
                self._audit(model, passes, self._budget(slots))
            if self.mode == "joint":
                return None
        if self.mode == "replay":
            passes.take_gradients(ends_window=self._ends_with(window))
        self.session.count(window.stats)
        return passes

    def _ends_with(self, window: Window) -> bool:
        """Whether an optimizer step follows upon the window."""
        steps: int = self._trainer.current_gradient_accumulation_steps
        return self._position + len(window.entries) == steps

    def _score(self, model: Any, window: Window, chunk: int) -> Scores:
        scores = score_chunk(
            self._stock_scores,
            model,
            window.batches[chunk],
            window.batches.slot_maps[chunk],
            window.completion,
            {"compute_entropy": True},
        )
        self._rest = len(scores.rest)
        self._kinds = tuple(None if each is None else (each.dtype, each.device) for each in scores.per_token)
        return scores

    def _stock_loss(
        self, compute_loss: Any, num_items_in_batch: Any, model: Any, inputs: Mapping[str, Any], values: Any
    ) -> tuple[Tensor, Given]:
        """The trainer's own loss of one stock micro-batch, with these log-probs and entropies."""
        given = Given(model, (*values, *[None] * self._rest))
        before, self._given = self._given, given
        try:
            with self._trainer.compute_loss_context_manager():
                return compute_loss(model, inputs, num_items_in_batch=num_items_in_batch), given
        finally:
            self._given = before

    # What may be split, and whether it still may.

    def _facets(self, entries: Sequence[Mapping[str, Any]], loss: StockLoss) -> set[str]:
        """What a window shows before any of it has run."""
        keys = keys_of_losses(self._audits, self._trainer, entries, loss, self._kinds) if self._kinds else set()
        return window_facets(entries) | keys

    def _hear(self, loss: Tensor) -> None:
        self._audits.heard(self._audits.key_of(loss))

    def _audit(self, model: Any, passes: Passes, budget: int) -> None:
        """Finds out whether the window may run as its mode says; all ranks agree on it.

        Takes a forward pass of the window's chunks without a graph, and a few of one or two rows.
        """
        audits, window = self._audits, passes.window
        several = len(window.batches) > 1
        keys: list[str] = []
        told, difference = False, 0.0
        if audits.stands or self.mode == "replay" or several:
            listen = (lambda loss: keys.append(audits.key_of(loss))) if audits.stands else None
            need_rows = self.mode == "split"
            with self._waiting(model):
                own, difference = separates(self._trainer, model, passes, need_rows, listen)
            verdict = Verdict(int(self._topology.exchange([own])[:, 0].max()))
            told = own != Verdict.CANNOT_TELL
            changes = verdict in (Verdict.COUPLES, Verdict.NOT_OF_LOG_PROBS)
            self._must_not_be_split = changes and need_rows and not several
            if not self._must_not_be_split:
                self._heed(verdict, difference)
            audits.loss_is_open = audits.loss_is_open and verdict == Verdict.CANNOT_TELL
        if audits.stands or audits.model_is_open:
            batches, completion = window.batches, window.completion
            self._look_at_model(model, batches, completion, budget, loss=told, keys=keys, of_loss=difference)

    def _heed(self, verdict: Verdict, difference: float) -> None:
        """Goes over to a mode that is exact, or raises."""
        if verdict <= Verdict.SEPARATES:
            return
        since = self._audits.since()
        if verdict == Verdict.READS_PADDING:
            raise ConfigError(READS_PADDING + since)
        coupled = verdict == Verdict.COUPLES
        why = _COUPLES.format(difference) if coupled else _NOT_OF_LOG_PROBS
        fix = "replay" if coupled else "joint"
        if self._wanted != "auto":
            raise ConfigError(f"mode={self._wanted!r}: {why}. Set mode={fix!r} or mode='auto'{since}")
        self.mode = fix
        self._say(f"mode={fix!r}: {why}{since}")

    def _look_at_model(
        self,
        model: Any,
        batches: MicroBatches,
        completion: int,
        budget: int,
        *,
        loss: bool,
        keys: Sequence[str] = (),
        of_loss: float = 0.0,
    ) -> None:
        """Refuses a model that does not compute a row in a chunk as alone; `loss`: whether that of the loss was told.

        Raises:
            GradientCheckError: on all ranks.
        """
        trainer, audits = self._trainer, self._audits
        # Backward passes of an engine count, and ranks may hold parts of parameters.
        is_sharded = self._topology.kind in ("sharded", "engine")
        own = model if is_sharded else trainer.accelerator.unwrap_model(model)
        with self._waiting(model):
            passes = Isolated(own, trainer, partial(trl_stock.without_trace, trainer), values_only=is_sharded)
            check = ModelCheck(self._stock_scores, own, batches, completion, budget, passes, self._topology)
            found = check.found()
        found.refuse(audits.since())
        if found.words and not (found.own == Status.ROLLED and self._is_corrected):
            self._say(found.words)
        audits.model_is_open = audits.model_is_open and found.status == Status.CANNOT_TELL
        told = found.own != Status.CANNOT_TELL
        audits.passed(max(found.difference * (found.own == Status.SAME), of_loss), keys, loss=loss, model=told)

    # Counts, and what is said.

    def metrics(self) -> dict[str, float | int]:
        """`padmin/*` since the last call, over all ranks; to be called on every rank."""
        return self.session.metrics(self._topology)

    def _say(self, words: str) -> None:
        self.session.notices(words, key=words)


def _for_rows(config: PadMinConfig) -> PadMinConfig:
    """The options, for batches of `input_ids`, `attention_mask` and images, whose rows all count the same."""
    own = PadMinConfig()
    return replace(
        config,
        loss_reduction="row-mean",
        normalize="rank",
        label_shift=None,
        mask_key=own.mask_key,
        labels_key=own.labels_key,
        loss_mask_key=None,
        batch_schema=trl_images.FIELDS,
        static_keys=(),
    )


def _to_training_mode(trainer: Any, model: Any) -> None:
    """As the stock step does before it prepares inputs."""
    model.train()
    if callable(getattr(trainer.optimizer, "train", None)):
        trainer.optimizer.train()
