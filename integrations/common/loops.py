"""`backward(batch, model, loss_fn)` of loops of the user's own: losses of micro-batches, and the checks of these."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_padmin.errors import ConfigError, GradientCheckError, PadMinError
from lightning_padmin.forward import Calls, CallSite, Forwards, call_sites, chunked
from lightning_padmin.integrations.common.empty_loss import collected_outputs, defined
from lightning_padmin.integrations.common.first_batch import FirstBatches
from lightning_padmin.integrations.common.session import Session
from lightning_padmin.integrations.common.shards import reducing
from lightning_padmin.integrations.common.topology import un_reduced
from lightning_padmin.integrations.common.training import Read, Training
from lightning_padmin.integrations.common.ways import Ladder, Way, Whole, why_way_is_kept
from lightning_padmin.microbatching import MicroBatch, MicroBatcher, MicroBatches
from lightning_padmin.verification import Advice, Outcome

LossFunction: TypeAlias = Callable[[Any], Tensor]
Quiet: TypeAlias = Callable[[], AbstractContextManager[Any]]

_STOP = "use PadMinConfig(enabled=False)"
_COUPLED = f"Call the model through lightning_padmin.PaddedForward in a loop over whole batches, or {_STOP}"
_ENGINE = (
    "DeepSpeed's engine runs every backward pass, so that gradients of a few rows cannot be compared: losses of "
    "PadMin.backward are not checked. Use verify_equivalence once"
)
_MOST_WITHOUT_GRADIENT = 5


class LossChecks:
    """Those of one adapter, for each model.

    Args:
        session: of the adapter.
        quiet: a context in which calls of a loss function are no steps of the framework's; see `LossCheck`.
        is_half: whether the framework computes in half precision.
    """

    def __init__(self, session: Session, quiet: Quiet, is_half: bool) -> None:
        self._session, self._quiet, self._is_half = session, quiet, is_half
        self._checks: weakref.WeakKeyDictionary[nn.Module, LossCheck] = weakref.WeakKeyDictionary()

    def of(self, training: Training) -> LossCheck:
        """The one of a model."""
        model = training.wrapper
        if model not in self._checks:
            self._checks[model] = LossCheck(self._session, training, self._quiet, self._is_half)
        return self._checks[model]


class LossCheck:
    """The losses of one model in a loop of the user's, and whether splitting them is exact.

    The first batches are checked until they have told, later ones as the training's ledger says. A check runs on a
    few rows, without the wrappers that reduce gradients; nothing is left of it in the model, in the random state, or
    in what the loss function closes over.

    Args:
        session: says what is found.
        training: of the model.
        quiet: a context in which calls of a loss function are no steps of the framework's.
        is_half: whether the framework computes in half precision.
    """

    def __init__(self, session: Session, training: Training, quiet: Quiet, is_half: bool) -> None:
        self._session, self._training, self._quiet, self._is_half = session, training, quiet, is_half
        self._can = training.topology.kind != "engine"
        most = _MOST_WITHOUT_GRADIENT if session.config.check == "first-batch" else None
        is_on = self._can and session.config.check != "off"
        self._first = FirstBatches(is_on, most_without_gradient=most)
        self._without: MicroBatcher | None = None
        self._said: set[str] = set()
        self._batch: Read | None = None
        self._stays: Whole | None = None
        config = session.config
        self._forwards: Forwards = {}
        self._config_of_whole = replace(config, loss_reduction="row-mean", normalize="rank", layout="pad")
        may_change = config.mode == "auto" and is_on
        has_sites = may_change and bool(self._found_sites())
        ways: list[Way] = ["split", "joint", "as it came"] if has_sites else ["split", "as it came"]
        self._ladder = Ladder(
            training, ways if may_change else [], config.token_budget, self._why_kept, may_replay=True
        )
        self._of_whole_batches: MicroBatcher | None = None
        self._loss_fn: LossFunction | None = None
        self._kinds: frozenset[str] = frozenset()

    def _found_sites(self) -> dict[str, CallSite]:
        return call_sites(self._training.model, self._session.config, with_itself=True)

    @cached_property
    def _sites(self) -> dict[str, CallSite]:
        """Of a model that is known to run in chunks; not before, since they keep it alive."""
        return self._found_sites()

    def _why_kept(self) -> str | None:
        return why_way_is_kept(self._training.wrapper)

    @property
    def _of_whole(self) -> MicroBatcher:
        if self._of_whole_batches is None:
            self._of_whole_batches = self._training.batcher(self._config_of_whole)
        return self._of_whole_batches

    def _go_over(self, error: PadMinError) -> None:
        self._ladder.go_over(error)
        most = _MOST_WITHOUT_GRADIENT if self._session.config.check == "first-batch" else None
        self._first = FirstBatches(self._ladder.now == "joint", most_without_gradient=most)

    def _modules(self) -> list[nn.Module]:
        return [site.module for site in self._sites.values()] if self._training.is_in_chunks else []

    def _whole(self, batch: Any, loss_fn: LossFunction) -> Whole:
        """A batch that stays whole; checked first, where that is due."""
        training = self._training
        schema, table = training.read(batch, by=self._of_whole)
        self._stays = whole = Whole(batch, table)
        if training.is_in_chunks:
            self._batch, self._loss_fn = (batch, schema, table), loss_fn
            is_due = self._first.is_due or training.audit_is_due
            if is_due and self._may_check():
                self._check((batch, schema, table), loss_fn)
            elif is_due:
                training.postpone()
        return whole

    def _in_chunks(self, *, anew: bool = False, **differs: Any) -> AbstractContextManager[Calls]:
        training, config = self._training, replace(self._config_of_whole, **differs)
        # Ranks run equally many chunks where forward passes are collective.
        exchange = training.topology.exchange if training.topology.kind == "sharded" else None
        kept, replays = None if differs else self._forwards, training.replays and not differs
        verifies = not anew and training.was_audited
        tell = self._ladder.refuses_left if replays else self._session.notices
        return chunked(
            self._sites, config, exchange, kept=kept, tell=tell, anew=anew, replays=replays, verifies=verifies
        )

    def prepare(self, batch: Any) -> MicroBatches:
        """The micro-batches of a batch whose loop has no loss function that could be asked."""
        self._batch = self._loss_fn = self._stays = self._training.inside = None
        if self._training.ledger is None:
            return self._training.prepare(batch)
        if self._without is None:
            self._without = self._training.batcher(wants_audit=None)  # so that nobody waits for an audit
        return self._training.prepare(batch, by=self._without)

    def prepare_for(self, batch: Any, loss_fn: LossFunction) -> MicroBatches | Whole:
        """The micro-batches of a batch, which is checked first where that is due, on all ranks or on none.

        Under `mode="auto"` the batch itself, where splitting it would change training.

        Raises:
            GradientCheckError: training would change; on all ranks, before anything is sent backward.
        """
        while True:
            self._training.inside = None if self._training.way == "split" else self._modules
            try:
                if self._training.way == "split":
                    planned: MicroBatches | Whole = self._split(batch, loss_fn)
                else:
                    planned = self._whole(batch, loss_fn)
                break
            except GradientCheckError as error:
                self._go_over(error)
        self._ladder.heard()
        return planned

    def _split(self, batch: Any, loss_fn: LossFunction) -> MicroBatches:
        training = self._training
        if not self._can:
            if self._session.config.check != "off":
                training.notices(_ENGINE, key=_ENGINE)
            return self.prepare(batch)
        if training.ledger is not None:
            self._kinds = frozenset({f"the loss of {_name(loss_fn)}"})
            training.ledger.expect(each for each in self._kinds if not training.ledger.has_seen(each))
        planned = training.prepare(batch)
        read = planned.source, planned.schema, planned.table
        self._batch, self._loss_fn = read, loss_fn
        # Sharded gradients that earlier passes have not reduced yet would be mixed with those of a check.
        is_due = self._first.is_due or training.audit_is_due
        if is_due and self._may_check():
            self._check(read, loss_fn)
        elif is_due:
            training.postpone()
        if self._first.first_is_open and training.main.shows_first and self._may_check():
            self._first.heard_of_first_labels(self._outcome(read, loss_fn, first_labels=True))
        return planned

    def weighted(self, micro: MicroBatch, loss_fn: LossFunction) -> Tensor:
        """The loss of a micro-batch as it goes backward: times its weight; a mean over no tokens is a zero.

        Returns:
            (), in the graph.

        Raises:
            ConfigError: the function has returned something else.
        """
        if self._training.is_in_chunks:
            with self._in_chunks() as calls:
                loss = self._weighted(micro, loss_fn)
            if calls and self._stays is not None:
                self._stays.stats = replace(calls.total, loss_tokens=self._stays.stats.loss_tokens)
            return loss
        return self._weighted(micro, loss_fn)

    def _weighted(self, micro: MicroBatch, loss_fn: LossFunction) -> Tensor:
        if micro.weight != 0 and micro.has_loss:
            loss = one_number(loss_fn(micro.batch))
            self._hear(loss, micro)
            return loss * micro.weight
        with collected_outputs([self._training.wrapper]) as outputs:
            loss = one_number(loss_fn(micro.batch))
        self._hear(loss, micro)
        # Of a mean over no tokens, a zero at what the model returned: strategies wait for gradients there.
        return defined(loss, outputs) * micro.weight

    def settle(self, micro: MicroBatch) -> None:
        """Behind a backward pass: audits the batch where its loss was of a new kind, before the optimizer steps.

        Raises:
            GradientCheckError: training would change. Gradients of a part of a batch are of no use: they are gone.
        """
        read, loss_fn = self._batch, self._loss_fn
        if micro.is_last:
            self._stays = None
        if read is None or loss_fn is None:
            return
        if micro.is_last:
            self._batch = self._loss_fn = self._stays = None  # nothing of it is kept
        try:
            self._training.settle(lambda rows: self._outcome(read, loss_fn, prefer=rows), is_last=micro.is_last)
        except GradientCheckError:
            self._session.discard()
            self._training.wrapper.zero_grad(set_to_none=True)
            raise

    def _hear(self, loss: Tensor, micro: MicroBatch) -> None:
        if self._batch is not None and micro.has_loss and not micro.is_dummy:
            self._training.hear(loss, micro.rows)

    def _may_check(self) -> bool:
        if self._training.topology.kind != "sharded":
            return True
        with reducing(self._training.wrapper) as clean:
            return clean

    def _check(self, read: Read, loss_fn: LossFunction) -> None:
        training, first = self._training, self._first
        had_told, was_due = first.told, first.is_due
        more = had_told and not training.audit_is_due
        outcome = training.audited(lambda: self._outcome(read, loss_fn, more_than_told=more), self._kinds)
        if was_due:
            first.heard(outcome)
        if outcome is None:
            if was_due and not had_told and not first.is_due:
                self._session.tell(f"none of the first {first.count} batches has two rows that carry loss: not checked")
        elif outcome.notable or (was_due and not had_told):
            self._say(outcome)

    def _say(self, outcome: Outcome) -> None:
        if outcome.words in self._said:
            return
        self._said.add(outcome.words)
        if outcome.notable and not (outcome.told and self._training.findings.corrects):
            self._training.notices(outcome.words, key=outcome.words)
        else:
            self._session.tell(outcome.words)

    def _outcome(self, read: Read, loss_fn: LossFunction, **options: Any) -> Outcome | None:
        training, config = self._training, self._session.config
        if training.is_in_chunks:
            config = self._config_of_whole
            alone = partial(self._in_chunks, max_rows=1, token_budget=None)
            options |= {"joint": partial(self._in_chunks, anew=True), "alone": alone}
        holders, names = reached_by(loss_fn)
        with ExitStack() as stack:
            stack.enter_context(names)
            stack.enter_context(self._quiet())
            stack.enter_context(_apart(training))
            return training.gradients(
                lambda batch: one_number(loss_fn(batch)),
                read,
                config,
                holders=holders,
                is_half=self._is_half,
                advice=Advice(_COUPLED, _STOP),
                **options,
            )


def run_loop(
    steps: Iterable[MicroBatch], check: LossCheck | None, loss_fn: LossFunction, send: Callable[[Tensor], object]
) -> Tensor:
    """Forward and backward passes of a batch.

    Args:
        steps: its micro-batches, each with its context around it.
        check: of the loss; None where nothing is split.
        loss_fn: of a micro-batch.
        send: sends a loss backward, as the framework does.

    Returns:
        (), the loss of the whole batch on this rank, detached.
    """
    total: Tensor | None = None
    for micro in steps:
        loss = one_number(loss_fn(micro.batch)) if check is None else check.weighted(micro, loss_fn)
        part = loss.detach().clone()  # a copy: scaled precision may change the loss in place
        total = part if total is None else total + part
        send(loss)
        if check is not None:
            check.settle(micro)
    assert total is not None
    return total


@contextmanager
def _apart(training: Training) -> Iterator[None]:
    """Passes inside run as the framework's own do, but no rank waits for another unless parameters are sharded."""
    with ExitStack() as stack:
        if training.topology.kind == "sharded":
            stack.enter_context(reducing(training.wrapper))
        stack.enter_context(un_reduced(training.wrapper))
        yield


def one_number(loss: object) -> Tensor:
    """A loss as a tensor of shape ().

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(f"loss_fn returned {found}: expected the loss of the micro-batch, a tensor of one number")
    return loss.reshape(())


# What a loss function may write into besides the model.


def reached_by(function: Any) -> tuple[list[object], AbstractContextManager[None]]:
    """What a function of the user's closes over, for calls that are none of the training.

    Args:
        function: a function, a method, a partial, or an object that can be called.

    Returns:
        Objects whose attributes it may write into, see `ModuleState`; and a context at whose end the names that it
        may assign to (`nonlocal`, `global`) are what they were.
    """
    holders: list[object] = []
    cells: dict[int, tuple[CellType, Any]] = {}
    globals_: list[tuple[dict[str, Any], str, Any]] = []
    waiting, seen = [function], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, partial):
            waiting.append(each.func)
            holders.append(SimpleNamespace(arguments=each.args, options=dict(each.keywords)))
        elif isinstance(each, MethodType):
            waiting += [each.__func__, each.__self__]
        elif isinstance(each, FunctionType):
            found = _names(each, cells, globals_)
            holders.append(SimpleNamespace(**found))
            waiting += [value for value in found.values() if isinstance(value, FunctionType | MethodType | partial)]
        elif not isinstance(each, nn.Module):
            holders.append(each)

    @contextmanager
    def kept() -> Iterator[None]:
        try:
            yield
        finally:
            for cell, value in cells.values():
                cell.cell_contents = value
            for space, name, value in globals_:
                space[name] = value

    return holders, kept()


def _names(
    function: FunctionType, cells: dict[int, tuple[CellType, Any]], globals_: list[tuple[dict[str, Any], str, Any]]
) -> dict[str, Any]:
    """Variables of enclosing functions and of the module that a function names."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        cells[id(cell)] = cell, value
        found[name] = value
    if function.__module__.partition(".")[0] in _LIBRARIES:
        return found
    space = function.__globals__
    for name in function.__code__.co_names:
        if name in space and name not in found:
            globals_.append((space, name, space[name]))
            found[name] = space[name]
    return found


_LIBRARIES = ("torch", "transformers", "accelerate", "lightning", "lightning_padmin", "trl", "peft")


def _name(function: Any) -> str:
    """The same for each function that is made at one place, for a user."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return type(function).__qualname__
    return f"{code.co_qualname} (line {code.co_firstlineno})"


__all__ = ["LossCheck", "LossChecks", "LossFunction", "one_number", "reached_by", "run_loop"]
