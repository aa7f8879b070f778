"""Every private hook of Lightning that the callback needs, in one place.

Checked against lightning 2.5.2 and 2.6.6. Replaced is `trainer.fit_loop.epoch_loop.automatic_optimization`, by a
subclass that overrides only `_make_closure`. It shares the attributes of the loop that it stands in for, so progress
and checkpoints are those of the stock loop, and taking it out again is one assignment.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol, cast

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops import utilities
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_padmin.errors import GradientCheckError, GradientHookError, PadMinError
from lightning_padmin.integrations.common import (
    BeforeStep,
    Kind,
    Ladder,
    Topology,
    accumulation_boundary,
    check_hooks,
    collected_outputs,
    defined,
    find_engine,
    release,
    replaced,
    zero_of_parameters,
)
from lightning_padmin.integrations.lightning.log_merge import (
    LogRecorder,
    LossMerge,
    LossNames,
    MetricGuard,
    merge_outputs,
    same_losses,
)
from lightning_padmin.microbatching import MemoryGuard, MicroBatches

OLDEST = (2, 5, 2)
# owner, name, first parameters
_EXPECTED: list[tuple[Any, str, list[str]]] = [
    (_AutomaticOptimization, "_make_closure", ["self", "kwargs", "optimizer", "batch_idx"]),
    (_AutomaticOptimization, "_training_step", ["self", "kwargs"]),
    (Closure, "__init__", ["self", "step_fn", "backward_fn", "zero_grad_fn"]),
    (_AutomaticOptimization, "_make_backward_fn", ["self", "optimizer"]),
    (_AutomaticOptimization, "_make_zero_grad_fn", ["self", "batch_idx", "optimizer"]),
    (_ResultCollection, "log", ["self", "fx", "name", "value"]),
    (utilities, "_block_parallel_sync_behavior", ["strategy", "block"]),
    (Precision, "post_backward", ["self", "tensor", "module"]),
]


def check_signatures() -> None:
    """Raises MisconfigurationException when this Lightning's private hooks are not those that were checked."""
    if release(lightning.__version__) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise MisconfigurationException(
            f"lightning {lightning.__version__}: PadMinCallback needs lightning>={wanted}. Upgrade it"
        )
    advice = "PadMinCallback was checked with 2.5.2 and 2.6.6; use one of these until it supports this version"
    check_hooks(_EXPECTED, "lightning", lightning.__version__, advice, MisconfigurationException)


Prepare = Callable[[OrderedDict[str, Any]], MicroBatches]
Progress = Callable[[int, int], None]
Around = Callable[[int, int], AbstractContextManager[Any]]


class Losses(Protocol):
    """Hears of the losses that passes of training take."""

    def hear(self, loss: object, rows: Iterable[int] = ()) -> None:
        """Of one pass, before its backward pass."""

    @property
    def are_new(self) -> bool:
        """Whether one was heard whose kind no check has seen."""

    def settle(self, *, is_last: bool) -> None:
        """Behind the backward pass: the batch is audited where its loss was of a new kind."""


class SplitOptimization(_AutomaticOptimization):
    """Automatic optimization with one forward and backward pass per micro-batch.

    Args:
        stock: the loop it stands in for; attributes are shared with it.
        prepare: plans a batch, from the arguments of training_step; called once per batch, before the optimizer asks
            for a closure.
        progress: told index and count before each micro-batch.
        log_reduce: how values merge, by logged name.
        logged: filled with the names that training_step has logged.
        guard: what stands around the passes of a batch, for errors that all ranks should hear of.
        hooks: what stands around the passes of a micro-batch, told its index and count, for hooks on gradients.
        look: called before each backward pass, told the same, for hooks that the step has put on parameters.
        losses: hears of the loss of each pass.
    """

    # So that the shared __dict__ stays the stock loop's own.
    __slots__ = (
        "_guard",
        "_hooks",
        "_log_reduce",
        "_logged",
        "_look",
        "_losses",
        "_prepare",
        "_progress",
        "loss_names",
    )

    def __init__(
        self,
        stock: _AutomaticOptimization,
        prepare: Prepare,
        progress: Progress,
        log_reduce: dict[str, str],
        logged: set[str],
        guard: Callable[[MicroBatches], MemoryGuard],
        hooks: Around,
        look: Progress,
        losses: Losses,
    ) -> None:
        object.__setattr__(self, "__dict__", stock.__dict__)
        self._prepare, self._progress, self._log_reduce, self._logged = prepare, progress, log_reduce, logged
        self._guard, self._hooks, self._look, self.loss_names = guard, hooks, look, LossNames()
        self._losses = losses

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        micro_batches = self._prepare(kwargs)
        if len(micro_batches) == 1 and micro_batches.weights[0] == 1.0 and micro_batches.table.has_loss:
            self._progress(0, 1)
            whole = OrderedDict(kwargs, batch=micro_batches[0].batch)
            closure = super()._make_closure(whole, optimizer, batch_idx)
            return _guarded(closure, self._guard(micro_batches), self._losses)
        return _SplitClosure(self, micro_batches, kwargs, optimizer, batch_idx, self._guard(micro_batches))


def _guarded(closure: Closure, guard: MemoryGuard, losses: Losses) -> Closure:
    """A closure of one pass, with what `_SplitClosure` has around each of its own."""
    step, whole = closure._step_fn, closure.closure

    def step_fn() -> ClosureResult:
        result = step()
        guard.forward_is_done(0)
        losses.hear(result.closure_loss)
        return result

    @functools.wraps(whole)
    def run(*args: Any, **kwargs: Any) -> ClosureResult:
        with guard.around(0):
            result = whole(*args, **kwargs)
        losses.settle(is_last=True)
        return result

    closure._step_fn, closure.closure = step_fn, run
    return closure


class JointOptimization(_AutomaticOptimization):
    """Automatic optimization of whole batches, inside of whose training step model calls are chunked.

    Args:
        stock: the loop it stands in for; attributes are shared with it.
        prepare: reads a batch; called once per batch, before the optimizer asks for a closure.
        chunked: the context in which the training step runs.
        hooks: the context in which the whole closure runs, for hooks on gradients.
        losses: hears of the loss.
    """

    __slots__ = ("_chunked", "_hooks", "_losses", "_prepare")

    def __init__(
        self,
        stock: _AutomaticOptimization,
        prepare: Callable[[OrderedDict[str, Any]], Any],
        chunked: Callable[[], AbstractContextManager[Any]],
        hooks: Callable[[], AbstractContextManager[Any]],
        losses: Losses,
    ) -> None:
        object.__setattr__(self, "__dict__", stock.__dict__)
        self._prepare, self._chunked, self._hooks, self._losses = prepare, chunked, hooks, losses

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        self._prepare(kwargs)
        closure = super()._make_closure(kwargs, optimizer, batch_idx)
        whole, closed = closure._step_fn, closure.closure

        def step() -> ClosureResult:
            with self._chunked():
                result = whole()
            self._losses.hear(result.closure_loss)
            return result

        @functools.wraps(closed)
        def run(*args: Any, **kwargs: Any) -> ClosureResult:
            with self._hooks():
                result = closed(*args, **kwargs)
            self._losses.settle(is_last=True)
            return result

        closure._step_fn, closure.closure = step, run
        return closure


class AutoOptimization(_AutomaticOptimization):
    """Automatic optimization in the way that is exact, batch by batch; it goes over to another where one is not.

    Args:
        stock: the loop it stands in for; attributes are shared with it.
        split: the loop of the first way.
        joint: that of all others.
        ladder: says which way batches go.
        uncount: takes back what the batch that runs has been counted for.
    """

    __slots__ = ("_before", "_joint", "_ladder", "_split", "_uncount")

    def __init__(
        self,
        stock: _AutomaticOptimization,
        split: SplitOptimization,
        joint: JointOptimization,
        ladder: Ladder,
        uncount: Callable[[], None],
    ) -> None:
        object.__setattr__(self, "__dict__", stock.__dict__)
        self._split, self._joint, self._ladder, self._uncount = split, joint, ladder, uncount
        self._before: BeforeStep | None = None
        split._losses = _Heeded(split._losses, self._heed)

    @property
    def current(self) -> SplitOptimization | JointOptimization:
        """The loop of the way that batches go now."""
        return self._split if self._ladder.now == "split" else self._joint

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        while True:
            try:
                closure = self.current._make_closure(kwargs, optimizer, batch_idx)
                break
            except GradientCheckError as error:  # on all ranks
                self._ladder.go_over(error)
            except GradientHookError as error:
                if self.trainer.world_size > 1:  # which other ranks hear of otherwise
                    raise
                self._ladder.go_over(error)
        if self._before is None:
            self._ladder.heard()
        # Whole steps may write into whatever they like, so that none can be had back.
        if self._ladder.now != "split" or not self._ladder.left:
            return closure
        return _AutoClosure(self, closure, lambda: self._make_closure(kwargs, optimizer, batch_idx))

    def _run(self, closure: Closure, again: Callable[[], Closure]) -> tuple[ClosureResult, Closure]:
        """What a closure gives, and the one that is to be called the next time.

        Where a loss is told to be of another kind behind a pass, or the step fails on a part of the batch, the batch
        runs another way from its beginning.
        """
        module = self.trainer.lightning_module
        guard = MetricGuard(module, self.trainer.fit_loop.epoch_loop._results)
        self._before = before = BeforeStep(module, guard, zeroes=closure._zero_grad_fn is not None)
        try:
            return closure.closure(), closure
        except Exception as error:
            found = self._reason_of(error, closure)
            if found is None or not before.can_be_had_back:
                raise
            before.restore()
            self._ladder.go_over(found)
            self._uncount()
            closure = again()
            result = closure.closure()
            self._ladder.heard()  # not before: the step may fail on the whole of it, too
            return result, closure
        finally:
            self._before = None

    def _reason_of(self, error: Exception, closure: Closure) -> GradientCheckError | None:
        """Why the batch cannot be split, if that is what an error says; no rank hears of it but this one."""
        if isinstance(error, GradientCheckError):
            return error
        is_other = isinstance(error, PadMinError | torch.OutOfMemoryError | MemoryError)
        if is_other or getattr(closure, "failed", None) is not error or self.trainer.world_size > 1:
            return None
        found = GradientCheckError(f"the step fails on a part of a batch ({type(error).__name__}: {error})")
        found.__cause__ = error
        return found

    def _heed(self) -> None:
        """A loss was heard, and is sent backward next."""
        if self._before is not None:
            self._before.heed(self._split._losses.are_new)


class _AutoClosure(Closure):
    """A closure, or where that is refused the one of another way.

    Args:
        loop: whose it is.
        closure: of the way now.
        again: makes that of the way then.
    """

    def __init__(self, loop: AutoOptimization, closure: Closure, again: Callable[[], Closure]) -> None:
        super().__init__(closure._step_fn, closure._backward_fn, closure._zero_grad_fn)
        self._loop, self._inner, self._again = loop, closure, again

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        result, self._inner = self._loop._run(self._inner, self._again)
        return result


class _Heeded:
    """Hears of losses, and has somebody know that it has."""

    def __init__(self, losses: Losses, heed: Callable[[], None]) -> None:
        self._losses, self._heed = losses, heed

    def hear(self, loss: object, rows: Iterable[int] = ()) -> None:
        self._losses.hear(loss, rows)
        self._heed()

    @property
    def are_new(self) -> bool:
        return self._losses.are_new

    def settle(self, *, is_last: bool) -> None:
        self._losses.settle(is_last=is_last)


class _SplitClosure(Closure):
    """Forward, `zero_grad` (once, after the first forward, as in the stock closure), backward; K times."""

    def __init__(
        self,
        loop: SplitOptimization,
        micro_batches: MicroBatches,
        kwargs: OrderedDict[str, Any],
        optimizer: Optimizer,
        batch_idx: int,
        guard: MemoryGuard,
    ) -> None:
        backward, zero_grad = loop._make_backward_fn(optimizer), loop._make_zero_grad_fn(batch_idx, optimizer)
        super().__init__(lambda: ClosureResult(None), backward, zero_grad)
        self._loop, self._micro_batches, self._kwargs, self._guard = loop, micro_batches, kwargs, guard
        self.failed: Exception | None = None  # what the step has raised for a part of a batch

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        trainer = self._loop.trainer
        results = trainer.fit_loop.epoch_loop._results
        accumulate, names = trainer.accumulate_grad_batches, self._loop.loss_names
        recorder = LogRecorder(self._micro_batches, self._loop._log_reduce, accumulate, names)
        results.log = torch.compiler.disable(recorder.log)  # type: ignore[no-untyped-call]  # as the original is
        try:
            outcomes = []
            for k in range(len(self._micro_batches)):
                outcomes.append(self._run(k, recorder))
                self._loop._losses.settle(is_last=k == len(self._micro_batches) - 1)
        finally:
            del results.log
        recorder.replay(results.log)
        self._loop._logged.update(recorder.names)
        return self._merge(outcomes, recorder.loss)

    def _run(self, k: int, recorder: LogRecorder) -> tuple[Tensor, dict[str, Any]] | None:
        """One micro-batch; returns its weighted, detached loss and the rest of training_step's output."""
        loop, trainer = self._loop, self._loop.trainer
        loop._progress(k, len(self._micro_batches))
        recorder.begin(k)
        with ExitStack() as stack:
            stack.enter_context(self._guard.around(k))
            micro = self._micro_batches[k]
            stack.enter_context(loop._hooks(k, len(self._micro_batches)))
            stack.enter_context(synchronised(trainer, micro.is_last))
            stack.enter_context(
                around_backward(trainer, micro.is_last, lambda: loop._look(k, len(self._micro_batches)))
            )
            if micro.is_dummy:
                stack.enter_context(MetricGuard(trainer.lightning_module))
            reduces_in_hooks = is_sharded(trainer) or find_engine(trainer.strategy) is not None
            if reduces_in_hooks and not self._micro_batches.table.has_loss:
                stack.enter_context(_zero_for_undefined_loss(trainer.lightning_module))
            try:
                result = loop._training_step(OrderedDict(self._kwargs, batch=micro.batch))
            except Exception as error:
                self.failed = error if len(self._micro_batches) > 1 else None
                raise
            self._guard.forward_is_done(k)
            if k == 0 and self._zero_grad_fn is not None:
                self._zero_grad_fn()
            if result.closure_loss is None:
                return None
            if micro.has_loss and not micro.is_dummy:
                self._loop._losses.hear(result.closure_loss, micro.rows)
            recorder.add_loss(k, result.closure_loss)
            loss = self._weighted(result.closure_loss, micro.weight)
            # Scaled precision changes the loss in place, hence the copy.
            detached = loss.detach().clone()
            if self._backward_fn is not None:
                self._backward_fn(loss)
        return detached, {key: _detached(value) for key, value in result.extra.items()}

    def _weighted(self, loss: Tensor, weight: float) -> Tensor:
        if self._micro_batches.table.has_loss or torch.isfinite(loss):
            return loss * weight
        return zero_of_parameters(self._loop.trainer.lightning_module.parameters(), loss)  # a mean over no tokens

    def _merge(self, outcomes: list[tuple[Tensor, dict[str, Any]] | None], loss: LossMerge) -> ClosureResult:
        present = [outcome for outcome in outcomes if outcome is not None]
        merged = ClosureResult(None)
        if not present:
            self.warning_cache.warn("`training_step` returned `None` for every micro-batch of a batch")
            return merged
        if len(present) < len(outcomes):
            raise MisconfigurationException(
                f"training_step returned None for {len(outcomes) - len(present)} of {len(outcomes)} micro-batches of "
                "one batch: a part of a batch cannot be skipped. Return a loss, or None for the whole batch from "
                "on_train_batch_start"
            )
        merged.loss = torch.stack([loss for loss, _ in present]).sum(dim=0)
        extras = [extra for _, extra in present[: len(self._micro_batches.plan)]]
        merged.extra = merge_outputs(self._micro_batches, extras, loss)
        return merged


@contextmanager
def _zero_for_undefined_loss(module: LightningModule) -> Iterator[None]:
    """Lets training_step return 0 in place of 0/0, a mean over no tokens, whose derivative is not finite either.

    For sharded parameters: they are gathered for the backward pass when a gradient reaches what modules have returned,
    the loss of the outermost one included. So zeros start at what the module's children return.
    """
    original = module.training_step

    with collected_outputs(_callable_children(module)) as found:

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            zero = None if loss is None else defined(loss, found)
            if zero is loss:
                return output
            return {**output, "loss": zero} if isinstance(output, Mapping) else zero

        with replaced(module, training_step=training_step):
            yield


def _callable_children(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):  # nobody calls these
            yield from _callable_children(child)
        else:
            yield child


def _detached(value: Any) -> Any:
    """What is kept until the other micro-batches have run must not keep activations alive."""
    return value.detach() if isinstance(value, Tensor) else value


def synchronised(trainer: Trainer, is_last: bool) -> AbstractContextManager[Any]:
    """The context of a micro-batch's forward and backward pass; gradients are reduced in the last one.

    DistributedDataParallel decides in the forward pass whether the backward pass reduces gradients. With a static graph
    it cannot be told not to. DeepSpeed's engine counts backward passes, and must be told which is the last; Lightning's
    own context would put it under `no_sync`, which ZeRO does not know.
    """
    engine = find_engine(trainer.strategy)
    if engine is not None:
        return accumulation_boundary(engine, is_last=is_last)
    if is_sharded(trainer):
        # Lightning would enter FSDP1's no_sync, in which gradients are kept whole on every rank.
        return nullcontext()
    has_static_graph = bool(getattr(trainer.strategy.model, "static_graph", False))
    context = utilities._block_parallel_sync_behavior(trainer.strategy, block=not is_last and not has_static_graph)
    return cast("AbstractContextManager[Any]", context)


@contextmanager
def around_backward(trainer: Trainer, is_last: bool, look: Callable[[], None]) -> Iterator[None]:
    """`on_after_backward` is for whole gradients: inside, it fires for the last micro-batch of a batch only.

    `look` is called just before the backward pass, when the step and `on_before_backward` have done what they do.
    """
    plugin, before, after = trainer.precision_plugin, Precision.pre_backward, Precision.post_backward

    # Of the class, since plugins that add something of their own call it by `super()`.
    def pre_backward(self: Precision, tensor: Tensor, module: LightningModule) -> Tensor:
        found: Tensor = before(self, tensor, module)
        if self is plugin:
            look()
        return found

    def post_backward(self: Precision, tensor: Tensor, module: LightningModule) -> Tensor:
        return tensor.detach() if self is plugin and not is_last else after(self, tensor, module)

    Precision.pre_backward, Precision.post_backward = pre_backward, post_backward
    try:
        yield
    finally:
        Precision.pre_backward, Precision.post_backward = before, after


def install(trainer: Trainer, make: Callable[[_AutomaticOptimization], _AutomaticOptimization]) -> Callable[[], None]:
    """Puts a loop in the stock one's place; returns a function that takes it out again (at any time, repeatedly).

    Args:
        trainer: the Trainer.
        make: makes the loop from the one that it stands in for.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    stock = epoch_loop.automatic_optimization
    if type(stock) is not _AutomaticOptimization:
        raise MisconfigurationException(
            f"the automatic optimization loop is a {type(stock).__name__}: something else has replaced it, and "
            "PadMinCallback cannot split batches inside of that. Use one of the two"
        )
    ours = make(stock)
    epoch_loop.automatic_optimization = ours

    def restore() -> None:
        if epoch_loop.automatic_optimization is ours:
            epoch_loop.automatic_optimization = stock

    return restore


def topology_of(trainer: Trainer) -> Topology:
    """Of a Trainer whose strategy is set up."""
    strategy = trainer.strategy
    # DeepSpeed's strategy is one of DDP, and its ranks tell each other of errors in the same places.
    kind: Kind = "sharded" if is_sharded(trainer) else "ddp" if isinstance(strategy, DDPStrategy) else "single"
    has_static_graph = bool(getattr(strategy.model, "static_graph", False))
    return Topology(trainer.global_rank, trainer.world_size, kind, has_static_graph)


def is_sharded(trainer: Trainer) -> bool:
    """Whether each rank holds a part of the parameters, so that forward and backward passes are collective."""
    return isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)


def has_collective_forwards(trainer: Trainer) -> bool:
    """Whether ranks gather parameters together in each forward pass, and must run equally many of these."""
    is_zero_3 = isinstance(trainer.strategy, DeepSpeedStrategy) and trainer.strategy.zero_stage_3
    return is_sharded(trainer) or bool(is_zero_3)


def may_replay(trainer: Trainer) -> bool:
    """Whether a module may run again in the backward pass, in which DeepSpeed's engine has hooks of its own."""
    return not isinstance(trainer.strategy, DeepSpeedStrategy)


def has_own_batch(trainer: Trainer) -> bool:
    """Whether no other rank of this one's tensor-parallel group counts the same batch."""
    if not isinstance(trainer.strategy, ModelParallelStrategy):
        return True
    return cast(int, trainer.strategy.device_mesh["tensor_parallel"].get_local_rank()) == 0


class _Muted(DummyLogger):
    """Tells what a logger tells (its directory, say), and logs nothing."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name == "experiment":
            return object.__getattribute__(self, name)
        value = getattr(object.__getattribute__(self, "_logger"), name)
        return value if not callable(value) else lambda *args, **kwargs: None

    @property
    def experiment(self) -> Any:
        return _MutedExperiment(lambda: self._logger.experiment)


class _MutedExperiment:
    def __init__(self, experiment: Callable[[], Any]) -> None:
        self._experiment = experiment

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experiment(), name)
        return value if not callable(value) else lambda *args, **kwargs: None


@contextmanager
def quiet_training_step(
    trainer: Trainer, kwargs: OrderedDict[str, Any], said: dict[str, Any] | None = None
) -> Iterator[Callable[[Any], Tensor]]:
    """The module's own training step as a function batch -> loss, which logs nothing and synchronises no gradients.

    Args:
        trainer: a Trainer in the middle of its training loop.
        kwargs: what training_step is called with, the batch first.
        said: filled with what the last call would have logged, by name.
    """
    module, results = trainer.lightning_module, trainer.fit_loop.epoch_loop._results
    # DistributedDataParallel would take a call of its wrapper for a step; FSDP gathers parameters in it.
    step = trainer.strategy.training_step if is_sharded(trainer) else module.training_step
    loggers, hook = trainer.loggers, module._current_fx_name
    trainer.loggers = [_Muted(logger) for logger in loggers]
    module._current_fx_name = "training_step"
    loop, said = trainer.fit_loop.epoch_loop.automatic_optimization, {} if said is None else said
    loop = loop.current if isinstance(loop, AutoOptimization) else loop

    def heard(fx: str, name: str, value: Any, **arguments: Any) -> None:
        said[name] = value

    stood = vars(results).get("log")  # in the middle of a batch
    results.log = torch.compiler.disable(heard)  # type: ignore[no-untyped-call]

    def loss(batch: Any) -> Tensor:
        said.clear()
        with trainer.precision_plugin.train_step_context():
            output = step(*OrderedDict(kwargs, batch=batch).values())
        result = ClosureResult.from_training_step_output(output)
        if isinstance(loop, SplitOptimization) and result.closure_loss is not None:
            for name, value in said.items():  # a check has passes of several rows, which tell
                loop.loss_names.tell(name, same_losses([value], [result.closure_loss.detach()]))
        return torch.zeros(()) if result.closure_loss is None else result.closure_loss

    try:
        yield loss
    finally:
        del results.log
        if stood is not None:
            results.log = stood
        trainer.loggers, module._current_fx_name = loggers, hook


def is_logging_step(trainer: Trainer, every: int | None = None) -> bool:
    """Whether Lightning writes training metrics for the batch that has just ended, and it ended a window.

    Args:
        trainer: the Trainer.
        every: steps between two logs on the first rank, by which all go; None: on this one.
    """
    if every is None or every == trainer.log_every_n_steps:
        due = trainer._logger_connector.should_update_logs
    else:
        due = every > 0 and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0
    return bool(due or trainer.fast_dev_run) and not trainer.fit_loop._should_accumulate()


def has_more_batches(trainer: Trainer) -> bool:
    """Whether this rank goes on in this epoch, as far as is known at the end of a batch."""
    loop = trainer.fit_loop.epoch_loop
    return not (loop.batch_progress.is_last_batch or loop.done)


def log_folder(trainer: Trainer) -> str | None:
    """The folder in which loggers of rank 0 write; no collective, as `trainer.log_dir` is one.

    None: on other ranks, and where nobody has asked for files.
    """
    if not trainer.loggers or trainer.fast_dev_run or trainer.global_rank != 0:
        return None
    found: list[Any] = []
    for logger in trainer.loggers:
        with suppress(Exception):  # of a logger of the user's own
            found += [getattr(logger, "log_dir", None), logger.save_dir]
    if Path(trainer.default_root_dir) != Path.cwd():
        found.append(trainer.default_root_dir)
    folders = (os.fspath(each) for each in found if isinstance(each, str | os.PathLike))
    return next((each for each in folders if isinstance(each, str) and each and "://" not in each), None)


def logging_step(trainer: Trainer) -> int:
    """The step under which Lightning writes the metrics of the batch that has just ended."""
    return cast(int, trainer.fit_loop.epoch_loop._batches_that_stepped)


def last_step(trainer: Trainer) -> int:
    """The same for the last batch of a training that is over."""
    return max(0, logging_step(trainer) - 1)
