"""`PadMin`: the micro-batches of a batch in a training loop written with Accelerate, and its switch.

    pad = PadMin(accelerator)  # on or off: environment variables, then the Accelerate file, see `config.environment`
    for batch in loader:
        with accelerator.accumulate(model):
            for micro, weight in pad.micro_batches(batch, model):
                accelerator.backward(model(**micro).loss * weight)
            optimizer.step()
            optimizer.zero_grad()

`pad.backward(batch, model, loss_fn)` is the inner loop in one call, which besides checks that splitting is exact.
Everything that can fail, and the one collective, come before the first micro-batch; from then on a loop only gathers
rows and decides whether gradients are reduced. Checked with accelerate 1.10.1 and 1.15.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError('PadMin needs Accelerate: pip install "accelerate>=1.10.1"') from error

from accelerate.utils import DistributedType
from torch import Tensor, nn

from lightning_padmin.config import PadMinConfig, resolve, say_once
from lightning_padmin.errors import BatchError, ConfigError
from lightning_padmin.integrations.common import (
    Kind,
    LossCheck,
    LossChecks,
    LossFunction,
    Session,
    Topology,
    Training,
    before_boundary,
    ddp_of,
    find_prepared,
    has_static_graph,
    refuse_shared_batches,
    run_loop,
)
from lightning_padmin.microbatching import MicroBatch
from lightning_padmin.stats import PaddingStats

__all__ = ["PadMin"]

_FIX_OF_HOOKS = "Do that once per batch, behind the loop over micro_batches and before optimizer.step()"
_KINDS: dict[DistributedType, Kind] = {DistributedType.FSDP: "sharded", DistributedType.DEEPSPEED: "engine"}


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
        self._session = Session("PadMin", self.config, tell=self._tell)
        self._session.announce()
        if config is None:
            self._agree()  # files and variables of two machines may differ
        if self.config.enabled:
            _refuse_unsupported(accelerator, self.config)
            self._session.refuse_packs("PadMin.micro_batches")
            folder = accelerator.logging_dir or accelerator.project_dir
            self._session.audits.prove_in(folder)
        self._open: weakref.ref[nn.Module] | None = None
        self._checks = LossChecks(self._session, nullcontext, accelerator.mixed_precision not in ("no", None))

    @property
    def stats(self) -> PaddingStats:
        """Counts of this rank, over all batches whose loop ran to its end."""
        return self._session.stats

    @stats.setter
    def stats(self, stats: PaddingStats) -> None:
        self._session.stats = stats

    @property
    def enabled(self) -> bool:
        """Whether batches are split."""
        return self.config.enabled

    def micro_batches(self, batch: Any, model: nn.Module) -> Iterator[MicroBatch]:
        """The micro-batches of one batch, for one forward pass and one `accelerator.backward(loss * weight)` each.

        The batch is planned, and all ranks agree, before this method returns. Forward and backward pass both belong
        into the body of the loop, which must run to its end. Inside of `accelerator.accumulate(model)` or without it;
        optimizer step, clipping and `accelerator.sync_gradients` belong after the loop. Nobody checks whether losses
        are what the options declare: `backward` does, this loop cannot.

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
        return self._start(batch, model)[0]

    def backward(self, batch: Any, model: nn.Module, loss_fn: LossFunction) -> Tensor:
        """The loop over `micro_batches` with its backward passes, for a loss that is all there is to a step.

        Unlike a loop of your own it is checked: gradients of a few rows, split and as they came, before the first
        batch that can tell is sent backward, and with `check="audit"` before later ones that show something new, and
        now and then. `loss_fn` is called for that too; what it writes into the model and into variables that it
        names is put back. And it gets over a batch without any loss tokens, whose mean loss is 0/0. With DeepSpeed
        there is no check, which is said once.

        Args:
            batch: this rank's batch, on its device; it is only read.
            model: what `accelerator.prepare` returned.
            loss_fn: takes a micro-batch of the batch's own type, calls `model`, returns the loss, one number, not
                divided by `gradient_accumulation_steps`: `accelerator.backward` does that.

        Returns:
            (), the loss of the whole batch on this rank, detached.

        Raises:
            ConfigError: `loss_fn` returns something else, besides what `micro_batches` refuses.
            GradientCheckError: splitting is not exact for this loss; names the fix. Before the batch is sent
                backward gradients stay as they are, those of batches before it in the same step included. Where the
                kind of the loss gives it away, that is known behind a backward pass only: gradients are of a part of
                the batch then, and all of `model` are dropped, as by `model.zero_grad(set_to_none=True)`.
            PadMinError: as `micro_batches` does, before the first call of `loss_fn`.

        Example:
            >>> for batch in loader:
            ...     with accelerator.accumulate(model):
            ...         loss = pad.backward(batch, model, lambda micro: model(**micro).loss)
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        steps, check = self._start(batch, model, loss_fn)
        # Looked up at each call: the loop over micro-batches puts its own in place of it.
        return run_loop(steps, check, loss_fn, lambda loss: self.accelerator.backward(loss))

    def _start(
        self, batch: Any, model: nn.Module, loss_fn: LossFunction | None = None
    ) -> tuple[Iterator[MicroBatch], LossCheck | None]:
        """The loop, and what checks losses in it; None where nothing is split."""
        self._agree()
        if not self.config.enabled:
            return self._session.loop_as_it_came(batch), None
        training = self._training(model)
        check = self._checks.of(training)
        planned = check.prepare(batch) if loss_fn is None else check.prepare_for(batch, loss_fn)
        self._open = weakref.ref(model)
        return self._session.loop(planned, lambda micro: self._around(model, training, micro)), check

    def discard(self) -> None:
        """Forgets a loop that was left before its end on purpose, and lets gradients be reduced again.

        After an error that you survive (a batch that ran out of memory, say): this, and `optimizer.zero_grad()`. If
        other ranks finished that batch, they wait for this one's gradients; that cannot be mended here.
        """
        self._session.discard()

    def metrics(self) -> dict[str, float | int]:
        """What the batches since the last call cost: counts over all ranks first, ratios last.

        A collective: call it on every rank, between batches, once per optimizer step (`accelerator.sync_gradients`).

        Returns:
            `padmin/waste` and the others (with the prefix `log_prefix`), the same on every rank, ready for
            `accelerator.log`. Empty where no batch has been finished, and when switched off.
        """
        return self._session.metrics(self._topology)

    def state_dict(self) -> dict[str, Any]:
        """The counters of this rank, and what was audited."""
        return self._session.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on counting.

        Raises:
            PadMinError: a count is unknown or no integer, or a record of audits is malformed.
        """
        self._session.load_state_dict(state_dict)

    def _agree(self) -> None:
        """Once: a rank that splits would wait for one that does not."""
        try:
            self._session.agree_in_loop()
        except ConfigError as error:
            raise ConfigError(f"{error}. Here they come from: {self.source}") from None

    def _tell(self, words: str) -> None:
        if self.accelerator.is_main_process:
            print(words, flush=True)

    @property
    def _topology(self) -> Topology:
        accelerator, distributed = self.accelerator, self.accelerator.distributed_type
        kind: Kind = "ddp" if _is_ddp(distributed) else _KINDS.get(distributed, "single")
        return Topology(accelerator.process_index, accelerator.num_processes, kind)

    def _training(self, model: nn.Module) -> Training:
        """One per model, since an encoder-decoder's labels run along the decoder."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model={type(model).__name__}: expected what accelerator.prepare returned")
        return self._session.training(
            model,
            lambda: Training(
                self._session,
                self._original(model),
                self._topology,
                fix_of_hooks=_FIX_OF_HOOKS,
                wrapper=model,
                check=self._check,
            ),
        )

    def _original(self, model: nn.Module) -> nn.Module:
        """The user's own module inside of what Accelerate returned (compiled or not)."""
        module = self.accelerator.unwrap_model(model)
        module = getattr(module, "_orig_mod", module)
        assert isinstance(module, nn.Module)
        return module

    def _check(self, training: Training) -> None:
        """What must hold before a batch is read; all ranks hear of an error."""
        self._refuse_open_loop(training.wrapper)
        training.refuse_batch_statistics()
        training.look()
        if getattr(self.accelerator, "has_lomo_optimizer", False):
            raise ConfigError(
                "LOMO takes its steps in the backward pass, on parts of a batch's gradients here. Use another optimizer"
            )
        if not training.has_passed:
            _refuse_unprepared(self.accelerator, training.wrapper)
            training.heed()

    def _refuse_open_loop(self, model: nn.Module) -> None:
        previous = self._open() if self._open is not None else None
        try:
            self._session.loops.refuse_unfinished()
        except BatchError as error:
            if previous is None or previous is model:
                raise
            raise BatchError(
                f"{error}. That loop was for another model ({type(previous).__name__}): loops of two models run one "
                "after the other, not one inside of the other"
            ) from None

    @contextmanager
    def _around(self, model: nn.Module, training: Training, micro: MicroBatch) -> Iterator[None]:
        """One forward and backward pass: gradients are reduced, and DeepSpeed's engine steps, in the last one only."""
        kind = self.accelerator.distributed_type
        with ExitStack() as stack:
            if not micro.is_last and kind == DistributedType.DEEPSPEED:
                stack.enter_context(before_boundary(self.accelerator))
            if not micro.is_last and _is_ddp(kind) and not has_static_graph(model):
                # Inside of `accumulate`, while no step is due, this is a no_sync within another.
                stack.enter_context(self.accelerator.no_sync(model))
            stack.enter_context(training.around(micro.index, micro.count))
            calls = stack.enter_context(_counted_backward(self.accelerator, micro))
            yield
            if not calls:
                raise BatchError(
                    f"accelerator.backward was not called for micro-batch {micro.index + 1} of {micro.count}: call it "
                    "once for each, with loss * weight (loss.backward() goes past Accelerate)"
                )


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


def _is_ddp(kind: DistributedType) -> bool:
    return str(kind.value).startswith("MULTI_")


def _refuse_unprepared(accelerator: Accelerator, model: nn.Module) -> None:
    """What would train each rank alone, or leave a rank waiting."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        find_prepared(accelerator, model)
    if not _is_ddp(kind):
        return
    wrappers = ddp_of(model)
    if not wrappers:
        raise ConfigError(
            f"model={type(model).__name__}: its gradients are reduced by nobody. Give what accelerator.prepare returned"
        )
    if any(getattr(getattr(wrapper, "_join_config", None), "enable", False) for wrapper in wrappers):
        raise ConfigError(
            "join_uneven_inputs: a rank without batches would be waited for when ranks agree on micro-batches. Leave "
            "it out, and let the loader keep batches even (even_batches=True)"
        )


def _refuse_unsupported(accelerator: Accelerator, config: PadMinConfig) -> None:
    kind = accelerator.distributed_type
    known = (DistributedType.NO, DistributedType.FSDP, DistributedType.DEEPSPEED)
    if kind not in known and not _is_ddp(kind):
        raise ConfigError(
            f"distributed_type={kind.value}: PadMin does not know when it reduces gradients. Use one device, DDP, FSDP "
            "or DeepSpeed, or enabled=False"
        )
    refuse_shared_batches(accelerator)
    if config.mode not in ("auto", "split"):
        raise ConfigError(
            f"mode={config.mode!r}: PadMin splits batches. Use mode='split', or call the model through "
            "lightning_padmin.PaddedForward in a loop over whole batches"
        )
