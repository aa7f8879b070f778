"""`PadMin`: the micro-batches of a batch in a training loop written with Accelerate, and its switch.

    pad = PadMin(accelerator)  # on or off: environment variables, then the Accelerate file, see `config.environment`
    for batch in loader:
        with accelerator.accumulate(model):
            for micro, weight in pad.micro_batches(batch, model):
                accelerator.backward(model(**micro).loss * weight)
            optimizer.step()
            optimizer.zero_grad()

Everything that can fail, and the one collective, come before the first micro-batch; from then on a loop only gathers
rows and decides whether gradients are reduced. Checked with accelerate 1.10.1 and 1.15.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError('PadMin needs Accelerate: pip install "accelerate>=1.10.1"') from error

import numpy as np
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_padmin.architectures import (
    ArchitectureError,
    HookWatch,
    batch_statistics,
    inspect_model,
    is_encoder_decoder,
    row_limit,
    with_scan_chunk,
)
from lightning_padmin.config import PadMinConfig, resolve, say_once
from lightning_padmin.distributed import (
    PATIENCE_OF_LOOPS,
    Announcement,
    Exchange,
    announce,
    exchange_all,
    exchange_alone,
)
from lightning_padmin.errors import BatchError, ConfigError
from lightning_padmin.integrations.common import find_engine
from lightning_padmin.microbatching import LoopGuard, MicroBatch, MicroBatcher
from lightning_padmin.stats import PaddingStats
from lightning_padmin.verification import refuse_unproven

__all__ = ["PadMin"]

_FIX_OF_HOOKS = "Do that once per batch, behind the loop over micro_batches and before optimizer.step()"


class PadMin:
    """Rolls, trims and splits the batches of an Accelerate training loop into micro-batches under a token budget.

    Gradients, clipping, schedulers and optimizer steps are those of the whole batch; switched off, the loop is the
    plain one. One object per training loop. Works on one device, with DDP, FSDP and DeepSpeed. It can be given to
    `accelerator.register_for_checkpointing`, which keeps its counters.

    Args:
        accelerator: the `Accelerator` of the loop.
        config: the options. None: `PADMIN_*` environment variables, then `dynamo_config: {padmin: ...}` in the file
            that `accelerate launch` reads, then off. Which of them it was is printed once, on the main process. All
            ranks must come to the same, so construct this object on all of them.

    Attributes:
        config: the options that hold.
        source: where they were found, in words.
        stats: `PaddingStats` of this rank, over all batches whose loop ran to its end.

    Raises:
        ConfigError: `accelerator` or `config` is something else, a variable or the file has an unknown name or a wrong
            value, ranks differ, or the way to distribute is not supported.
    """

    def __init__(self, accelerator: Accelerator, config: PadMinConfig | None = None) -> None:
        if not isinstance(accelerator, Accelerator):
            raise ConfigError(f"accelerator={accelerator!r}: expected an accelerate.Accelerator")
        resolved = resolve(config)
        say_once(resolved, accelerator.is_main_process)
        self.config, self.source = resolved.config, resolved.source
        self.accelerator = accelerator
        self.stats = PaddingStats()
        self._since_metrics = PaddingStats()
        self._announced: Announcement | None = announce("PadMin", self.config)
        if config is None:
            self._agree()  # files and variables of two machines may differ
        if self.config.enabled:
            _refuse_unsupported(accelerator, self.config)
            refuse_unproven(self.config, "PadMin.micro_batches")
        self._batchers: weakref.WeakKeyDictionary[nn.Module, MicroBatcher] = weakref.WeakKeyDictionary()
        self._hooks: weakref.WeakKeyDictionary[nn.Module, HookWatch] = weakref.WeakKeyDictionary()
        self._loops = LoopGuard()
        self._open: weakref.ref[nn.Module] | None = None

    @property
    def enabled(self) -> bool:
        """Whether batches are split."""
        return self.config.enabled

    def micro_batches(self, batch: Any, model: nn.Module) -> Iterator[MicroBatch]:
        """The micro-batches of one batch, for one forward pass and one `accelerator.backward(loss * weight)` each.

        The batch is planned, and all ranks agree, before this method returns. Forward and backward pass both belong
        into the body of the loop, which must run to its end. Inside of `accelerator.accumulate(model)` or without it;
        optimizer step, clipping and `accelerator.sync_gradients` belong after the loop.

        Args:
            batch: this rank's batch, on its device; it is only read.
            model: what `accelerator.prepare` returned.

        Returns:
            An iterator; unpack each item as `micro, weight`. Switched off: the batch itself, with weight 1.0.

        Raises:
            ConfigError: `model` was not prepared, or inside of `join_uneven_inputs`.
            PadMinError: on every rank when any rank has a batch that cannot be planned, a model that cannot be split,
                or a previous loop that was left before its end. From within the loop: `backward` was not called
                exactly once for a micro-batch.
        """
        self._agree()
        if not self.config.enabled:
            return iter([MicroBatch(batch, 1.0, np.empty(0, dtype=np.int64), 0, 1)])
        planned = self._batcher(model).prepare(batch)
        self._open = weakref.ref(model)
        return self._loops.start(planned, partial(self._around, model), partial(self._count, planned.stats))

    def discard(self) -> None:
        """Forgets a loop that was left before its end on purpose, and lets gradients be reduced again.

        After an error that you survive (a batch that ran out of memory, say): this, and `optimizer.zero_grad()`. If
        other ranks finished that batch, they wait for this one's gradients; that cannot be mended here.
        """
        self._loops.discard()

    def metrics(self) -> dict[str, float | int]:
        """What the batches since the last call cost: counts over all ranks first, ratios last.

        A collective: call it on every rank, between batches, once per optimizer step (`accelerator.sync_gradients`).

        Returns:
            `padmin/waste` and the others (with the prefix `log_prefix`), the same on every rank, ready for
            `accelerator.log`. Empty where no batch has been finished, and when switched off.
        """
        if not self.config.enabled:
            return {}
        merged = PaddingStats.merge_ranks(self._exchange(self._since_metrics.as_counts()))
        self._since_metrics = PaddingStats()
        return merged.metrics(self.config.log_prefix) if merged.batches else {}

    def state_dict(self) -> dict[str, Any]:
        """The counters of this rank."""
        return {"stats": self.stats.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on counting.

        Raises:
            PadMinError: a count is unknown or no integer.
        """
        if "stats" in state_dict:
            self.stats.load_state_dict(state_dict["stats"])

    def _agree(self) -> None:
        """Once: a rank that splits would wait for one that does not."""
        if self._announced is not None:
            announced, self._announced = self._announced, None
            try:
                announced.agree(PATIENCE_OF_LOOPS)
            except ConfigError as error:
                raise ConfigError(f"{error}. Here they come from: {self.source}") from None

    @property
    def _exchange(self) -> Exchange:
        return exchange_all if self.accelerator.num_processes > 1 else exchange_alone

    def _batcher(self, model: nn.Module) -> MicroBatcher:
        """One per model, since an encoder-decoder's labels run along the decoder."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model={type(model).__name__}: expected what accelerator.prepare returned")
        if model not in self._batchers:
            original = self._original(model)
            self._hooks[model] = HookWatch(_FIX_OF_HOOKS)
            self._batchers[model] = MicroBatcher(
                with_scan_chunk(self.config, original),
                exchange=self._exchange,
                encoder_decoder=is_encoder_decoder(original),
                # A reference to the model would keep the dictionary's weak key alive for ever.
                before_reading=partial(self._check, weakref.ref(model), []),
                row_limit=row_limit(inspect_model(original)),
            )
        return self._batchers[model]

    def _original(self, model: nn.Module) -> nn.Module:
        """The user's own module inside of what Accelerate returned (compiled or not)."""
        module = self.accelerator.unwrap_model(model)
        module = getattr(module, "_orig_mod", module)
        assert isinstance(module, nn.Module)
        return module

    def _check(self, model: weakref.ref[nn.Module], seen: list[bool]) -> None:
        """What must hold before a batch is read; all ranks hear of an error."""
        module = model()
        assert module is not None
        self._refuse_open_loop(module)
        original = self._original(module)
        wrong = batch_statistics(original)
        if wrong is not None:
            raise ArchitectureError(wrong)
        self._hooks[module].look(original, wrapper=module)
        if getattr(self.accelerator, "has_lomo_optimizer", False):
            raise ConfigError(
                "LOMO takes its steps in the backward pass, on parts of a batch's gradients here. Use another optimizer"
            )
        if seen:
            return
        _refuse_unprepared(self.accelerator, module)
        for finding in inspect_model(original):
            if finding.severity == "refuse" and finding.exact_up_to is None:
                raise ArchitectureError(f"{finding.where}: {finding.reason}")
            if finding.severity != "refuse" and self.accelerator.is_main_process:
                print(f"PadMin: {finding.where}: {finding.reason}", flush=True)
        seen.append(True)

    def _refuse_open_loop(self, model: nn.Module) -> None:
        previous = self._open() if self._open is not None else None
        try:
            self._loops.refuse_unfinished()
        except BatchError as error:
            if previous is None or previous is model:
                raise
            raise BatchError(
                f"{error}. That loop was for another model ({type(previous).__name__}): loops of two models run one "
                "after the other, not one inside of the other"
            ) from None

    @contextmanager
    def _around(self, model: nn.Module, micro: MicroBatch) -> Iterator[None]:
        """One forward and backward pass: gradients are reduced, and DeepSpeed's engine steps, in the last one only."""
        kind = self.accelerator.distributed_type
        with ExitStack() as stack:
            if not micro.is_last and kind == DistributedType.DEEPSPEED:
                stack.enter_context(_not_synchronised(self.accelerator))
            if not micro.is_last and _is_ddp(kind) and not _has_static_graph(model):
                # Inside of `accumulate`, while no step is due, this is a no_sync within another.
                stack.enter_context(self.accelerator.no_sync(model))
            stack.enter_context(self._hooks[model].around(micro.index, micro.count))
            calls = stack.enter_context(_counted_backward(self.accelerator, micro))
            yield
            if not calls:
                raise BatchError(
                    f"accelerator.backward was not called for micro-batch {micro.index + 1} of {micro.count}: call it "
                    "once for each, with loss * weight (loss.backward() goes past Accelerate)"
                )

    def _count(self, stats: PaddingStats) -> None:
        self.stats = self.stats + stats
        self._since_metrics = self._since_metrics + stats


@contextmanager
def _counted_backward(accelerator: Accelerator, micro: MicroBatch) -> Iterator[list[int]]:
    """Refuses a second `accelerator.backward` meanwhile; gives the list of calls."""
    original = accelerator.backward
    calls: list[int] = []

    def backward(loss: Any, **options: Any) -> None:
        if calls:
            raise BatchError(
                f"accelerator.backward was called twice for micro-batch {micro.index + 1} of {micro.count}: add losses "
                "up and call it once"
            )
        calls.append(1)
        original(loss, **options)

    before = vars(accelerator).get("backward")
    accelerator.backward = backward
    try:
        yield calls
    finally:
        if before is None:
            del accelerator.backward
        else:
            accelerator.backward = before


@contextmanager
def _not_synchronised(accelerator: Accelerator) -> Iterator[None]:
    """DeepSpeed: `accelerator.backward` would let the engine step. It tells the engine's boundary too."""
    state = accelerator.gradient_state
    before = state.sync_gradients
    state._set_sync_gradients(False)
    try:
        yield
    finally:
        state._set_sync_gradients(before)


def _is_ddp(kind: DistributedType) -> bool:
    return str(kind.value).startswith("MULTI_")


def _ddp_of(model: nn.Module) -> list[DistributedDataParallel]:
    return [child for child in model.modules() if isinstance(child, DistributedDataParallel)]


def _has_static_graph(model: nn.Module) -> bool:
    # With a static graph DistributedDataParallel cannot be told to wait.
    return any(child.static_graph for child in _ddp_of(model))


def _refuse_unprepared(accelerator: Accelerator, model: nn.Module) -> None:
    """What would train each rank alone, or leave a rank waiting."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        _refuse_engine(accelerator, model)
    if not _is_ddp(kind):
        return
    wrappers = _ddp_of(model)
    if not wrappers:
        raise ConfigError(
            f"model={type(model).__name__}: its gradients are reduced by nobody. Give what accelerator.prepare returned"
        )
    if any(getattr(getattr(wrapper, "_join_config", None), "enable", False) for wrapper in wrappers):
        raise ConfigError(
            "join_uneven_inputs: a rank without batches would be waited for when ranks agree on micro-batches. Leave "
            "it out, and let the loader keep batches even (even_batches=True)"
        )


def _refuse_engine(accelerator: Accelerator, model: nn.Module) -> None:
    if find_engine(model) is None:
        raise ConfigError(f"model={type(model).__name__}: expected the engine that accelerator.prepare returned")
    if "sync_gradients" not in inspect.signature(accelerator.deepspeed_engine_wrapped.backward).parameters:
        raise ConfigError(
            "DeepSpeed: this version of Accelerate does not tell backward passes that end a window from others; 1.10.1 "
            "and 1.15 were checked"
        )


def _refuse_unsupported(accelerator: Accelerator, config: PadMinConfig) -> None:
    kind = accelerator.distributed_type
    known = (DistributedType.NO, DistributedType.FSDP, DistributedType.DEEPSPEED)
    if kind not in known and not _is_ddp(kind):
        raise ConfigError(
            f"distributed_type={kind.value}: PadMin does not know when it reduces gradients. Use one device, DDP, FSDP "
            "or DeepSpeed, or enabled=False"
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    cut = [name for name in ("cp", "sp", "tp") if getattr(parallelism, f"{name}_enabled", False)]
    if cut:
        raise ConfigError(f"parallelism_config with {', '.join(cut)}: not supported. Switch it off, or enabled=False")
    if config.mode not in ("auto", "split"):
        raise ConfigError(
            f"mode={config.mode!r}: PadMin splits batches. Use mode='split', or call the model through "
            "lightning_padmin.PaddedForward in a loop over whole batches"
        )
