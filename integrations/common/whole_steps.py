"""Whole steps of a trainer, as stock, with calls of models inside of them in chunks.

Whatever a step does (weights of classes, losses that couple rows, state, hooks, logs, several passes) it does once per
batch and on the whole of it; what is cut is the call of a model, which needs to know its own mask and nothing else. So
batches need no schema and no declaration.

Losses are compared, in chunks and as stock, where they are taken: in the trainer's own `compute_loss`, with the very
arguments that the step has given it.

Under `mode="auto"` nothing runs in chunks that is not compared: calls inside of `compute_loss` and of backward passes
alone do. Where they change training, the step goes on as it came from there, and so do all that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lightning_padmin.architectures import screen
from lightning_padmin.batch import map_leaves
from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import (
    ArchitectureError,
    GradientCheckError,
    GradientHookError,
    OnlyBackwardError,
    PadMinError,
)
from lightning_padmin.forward import Calls, CallSite, Forwards, call_sites, chunked
from lightning_padmin.integrations.common.first_batch import FirstBatches
from lightning_padmin.integrations.common.plain import few_rows, len_of, plain_stats, slots_of
from lightning_padmin.integrations.common.session import Session
from lightning_padmin.integrations.common.topology import Topology, un_reduced
from lightning_padmin.integrations.common.trainers import look_for_whole_steps
from lightning_padmin.integrations.common.training import Training
from lightning_padmin.integrations.common.two_ways import Apart, apart
from lightning_padmin.integrations.common.ways import Ladder
from lightning_padmin.runtime import RandomState, replaced
from lightning_padmin.stats import PaddingStats
from lightning_padmin.verification import Outcome

_MOST_LOSSES = 4  # of one step that are compared
_FEWEST_ROWS = 4  # in a check of a batch that is replayed: two pairs


@dataclass(frozen=True)
class Words:
    """How findings are told, where trainers differ.

    Attributes:
        part: what runs in chunks.
        reads: what may read padding.
        fix: how to go on, as a sentence.
        nothing: said once, if nothing has run in chunks in a step; None: nothing is.
    """

    part: str
    reads: str
    fix: str
    nothing: str | None = None


class WholeSteps:
    """Runs the steps of one trainer.

    Args:
        trainer: has an accelerator, a `compute_loss` and training steps, as Trainers of transformers and TRL do.
        session: of the adapter.
        training: of the model.
        sites: what runs in chunks, asked before each step.
        loss_tokens: of a batch, for counts.
        words: for messages.
        without_trace: a context in which calls of the loss change nothing in the trainer; default: what `Trainer` of
            transformers needs.
        looks_at_padding: whether it is looked at if loss, gradients and logged values move with outputs at padding.
        ladder: under `mode="auto"`, says which way steps go.
        own_loss: the name of a step that asks nobody for its loss, and whether it can be run for a check.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        training: Training,
        *,
        sites: Callable[[], Mapping[str, nn.Module | CallSite]],
        loss_tokens: Callable[[Any], int],
        words: Words,
        without_trace: Callable[[], AbstractContextManager[Any]] | None = None,
        looks_at_padding: bool = True,
        ladder: Ladder | None = None,
        own_loss: tuple[str, bool] | None = None,
    ) -> None:
        self._trainer, self._training, self._sites, self._words = trainer, training, sites, words
        self._session, self._topology = session, training.topology
        self._loss_tokens, self._looks_at_padding = loss_tokens, looks_at_padding
        self._logs: dict[str, Any] = {}
        self._without_trace = without_trace or self._unlogged
        config = replace(session.config, loss_reduction="row-mean", normalize="rank", layout="pad")
        self._config = training.findings.options(config)
        self._forwards: Forwards = {}
        self._is_sharded = self._topology.kind in ("sharded", "engine")
        # Ranks run equally many chunks only where forward passes are collective.
        self._exchange = self._topology.exchange if self._is_sharded else Topology().exchange
        self._first = FirstBatches(config.check != "off")
        self._is_inside = self._is_due = False
        self._losses: list[Callable[[], Any]] = []
        self._waste = PaddingStats()
        self._ladder, self._calls, self._own_loss = ladder, Calls(), own_loss
        self._wrote = False  # whether a loss has left something behind in the last check
        self._result: Callable[[], Any] = lambda: None  # the loss that was taken last, once more

    def in_place_of(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The stock training step, inside of which calls run in chunks; a step inside of one is a part of it."""

        @wraps(stock)
        def training_step(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            if self._is_inside:
                return stock(model, inputs, *args, **options)
            self._is_inside = True
            try:
                return self._step(stock, model, inputs, *args, **options)
            finally:
                self._is_inside = self._is_due = False
                self._losses.clear()  # nothing of the batch is kept
                self._result = lambda: None

        return training_step

    def _step(self, stock: Callable[..., Any], model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        own, is_mapping = self._unwrapped(model), isinstance(inputs, Mapping)
        self._training.slots = slots_of(inputs)
        if self._topology.kind != "sharded":  # there all batches of a window go one way
            self._training.decide_by_size()
        if self._ladder is not None:
            self._look_at_hooks(own)
        else:
            look_for_whole_steps(self._training.hooks, own, _modules(self._sites()))
        if not self._is_sharded:
            wants = self._training.to_audit([inputs if is_mapping else {}]) is not None
            self._is_due = (wants or self._first.is_due) and self._training.way != "as it came"
        tokens = self._loss_tokens(inputs)
        if self._ladder is None:
            with self._training.around(0, 2), self._chunked(self._sites()) as self._calls, self._listening():
                result = stock(model, inputs, *args, **options)
        else:
            self._calls = Calls()
            if self._own_loss is not None:
                self._look_at_step(stock, model, (inputs, *args), options)
            whole = nullcontext() if self._own_loss is None else self._in_loss()
            with self._training.around(0, 2), self._listening(), self._in_backward(), whole:
                result = stock(model, inputs, *args, **options)
            self._ladder.heard()
        self._settle(own)
        if not self._calls and self._words.nothing is not None and self._training.way != "as it came":
            self._session.notices(self._words.nothing)
        if self._calls:
            self._session.count(replace(self._calls.total, loss_tokens=tokens))
        elif self._ladder is not None:
            self._session.count(replace(plain_stats(inputs), loss_tokens=tokens))
        return result

    # Under `mode="auto"`.

    @contextmanager
    def _in_loss(self) -> Iterator[None]:
        """A loss that was compared; where another way may follow, its calls are the only ones that run in chunks."""
        if self._ladder is None or not self._training.is_in_chunks:
            yield
            return
        with self._chunked(self._sites()) as calls:
            yield
        self._calls.extend(calls)

    def _in_backward(self) -> AbstractContextManager[None]:
        """Passes that losses hold back until they are sent backward run as their first ones did."""
        accelerator = self._trainer.accelerator
        stock = accelerator.backward

        @wraps(stock)
        def backward(loss: Any, *args: Any, **options: Any) -> Any:
            if self._own_loss is not None:  # all of the step runs in chunks
                self._training.hear(loss)
                return stock(loss, *args, **options)
            with self._in_loss():
                return stock(loss, *args, **options)

        return replaced(accelerator, backward=backward)

    def _look_at_step(self, step: Callable[..., Any], model: Any, args: Any, options: Any) -> None:
        """Has a step that asks nobody for its loss checked, where that is due, by what it would send backward."""
        assert self._own_loss is not None
        if not self._training.is_in_chunks:
            return
        name, can_run = self._own_loss
        given, accelerator = (_shallow(args), _shallow(options)), self._trainer.accelerator

        def again() -> Any:
            sent: list[Any] = []
            with replaced(accelerator, backward=lambda loss, *_, **__: sent.append(loss)):
                step(model, *_fresh(given[0]), **_fresh(given[1]))
            if not sent:
                raise GradientCheckError(f"{name} sends nothing backward by accelerator.backward")
            return sum(sent)

        self._losses.append(again)
        if not self._is_due and not self._is_sharded:
            return
        try:
            if not can_run or self._topology.world > 1:
                raise GradientCheckError(f"{name} takes its loss by itself, which cannot be compared")
            self._judge([again])
        except (GradientCheckError, ArchitectureError) as error:
            self._go_over(error)
        except (PadMinError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            words = f"{name} fails without its backward pass ({type(error).__name__}: {error}), so that it"
            self._go_over(GradientCheckError(f"{words} cannot be compared"))

    def _look_at_hooks(self, model: nn.Module) -> None:
        if not self._training.is_in_chunks:
            return
        try:
            look_for_whole_steps(self._training.hooks, model, _modules(self._sites()))
        except GradientHookError as error:
            if self._topology.world > 1:  # which other ranks hear of otherwise
                raise
            self._go_over(error)

    def _go_over(self, error: PadMinError) -> None:
        """The rest of the step, and all that come, run as they came."""
        assert self._ladder is not None
        self._ladder.go_over(error)
        self._is_due = self._first.is_due = False
        self._training.to_audit([])  # the step has been counted

    def _refuse_large(self, batches: Sequence[Any]) -> None:
        """Before a window is trained on, on all ranks."""
        if self._ladder is not None and self._training.room is not None and batches:
            slots = max(map(slots_of, batches))
            self._training.refuse_whole(int(self._topology.exchange([slots]).max()))

    # Losses, as the step takes them.

    def _listening(self) -> AbstractContextManager[None]:
        return replaced(self._trainer, compute_loss=self._hearing(self._trainer.compute_loss))

    def _hearing(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Every loss is checked, where that is due, before it is trained on, and its kind is noted."""
        is_nested = False

        @wraps(compute_loss)
        def heard(*args: Any, **options: Any) -> Any:
            nonlocal is_nested
            if is_nested or (self._ladder is not None and self._own_loss is not None):
                return compute_loss(*args, **options)
            is_nested = True
            try:
                if not self._is_sharded:
                    self._look(compute_loss, args, options)
                if self._ladder is not None:
                    self._ladder.heard()
                before = RandomState() if self._may_take_back else None
                with self._in_loss():
                    result = compute_loss(*args, **options)
                self._training.hear(_loss_of(result))
                if before is not None and self._training.hears_news and self._refuses_news():
                    before.restore()
                    result = self._result()
            finally:
                is_nested = False
            return result

        return heard

    def _look(self, compute_loss: Callable[..., Any], args: Any, options: Any) -> None:
        """Has a loss checked, where that is due, and keeps it for the end of the step."""
        is_more = len(self._losses) >= _MOST_LOSSES
        if self._training.way == "as it came" or (is_more and (self._ladder is None or not self._is_due)):
            return
        whole = _shallow(args), _shallow(options)
        few = self._within_budget(*whole)
        given = few or whole

        def again() -> Any:
            try:
                return _loss_of(compute_loss(*_fresh(given[0]), **_fresh(given[1])))
            except (PadMinError, OnlyBackwardError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if few is None or self._topology.world > 1:
                    raise
                raise _of_few_rows(error) from error

        if not is_more:
            self._losses.append(again)
        self._result = lambda: compute_loss(*_fresh(whole[0]), **_fresh(whole[1]))
        if not self._is_due:
            return
        try:
            self._judge([again])
        except (GradientCheckError, ArchitectureError) as error:  # on all ranks
            if self._ladder is None:
                raise
            self._go_over(error)

    def _within_budget(self, args: Any, options: Any) -> tuple[Any, Any] | None:
        """Arguments of a loss for a check: of batches that are replayed no more rows than the budget holds, or four.

        None where the whole batch is no more than that.
        """
        may_replay = self._training.keeps is not None or self._session.config.mode == "replay"
        if not may_replay or (not self._is_due and self._topology.world > 1 and not self._is_sharded):
            return None
        inputs = args[1] if len(args) > 1 else options.get("inputs")
        number = len_of(inputs)
        if self._training.replays and number:
            fitting = (self._config.token_budget or self._training.slots) * number // max(self._training.slots, 1)
            number = min(number, max(_FEWEST_ROWS, fitting - fitting % 2))
        number = int(self._topology.exchange([number]).min())  # losses may gather what ranks compute
        if not 0 < number < len_of(inputs):
            return None
        few = few_rows(inputs, number)
        return ((args[0], few, *args[2:]), options) if len(args) > 1 else (args, options | {"inputs": few})

    @property
    def _may_take_back(self) -> bool:
        """Whether a loss may be taken once more, as stock: where it leaves nothing behind, and no other rank waits."""
        can = self._ladder is not None and self._own_loss is None and len(self._losses) == 1
        return can and not self._is_sharded and self._topology.world == 1 and self._training.is_in_chunks

    def _refuses_news(self) -> bool:
        """Audits a loss of a new kind before it is sent backward; whether the step goes on as it came."""
        try:
            self._training.settle(lambda rows: self._check(self._losses))
        except GradientCheckError as error:
            if self._wrote:
                raise
            self._go_over(error)
            assert self._ladder is not None
            self._ladder.heard()
            return True
        return False

    def _judge(self, losses: Sequence[Callable[[], Any]]) -> None:
        outcome = self._training.audited(lambda: self._check(losses))
        if self._ladder is not None and outcome is not None and outcome.final and not outcome.told:
            raise GradientCheckError(outcome.words)
        if self._first.is_due:
            self._first.heard(outcome)

    def _settle(self, model: nn.Module) -> None:
        losses = list(self._losses)
        try:
            self._training.settle(lambda rows: self._check(losses) if losses else None)
        except GradientCheckError:
            model.zero_grad(set_to_none=True)  # which are of another loss than stock's
            raise

    # What a check runs.

    def _check(self, losses: Sequence[Callable[[], Any]]) -> Outcome:
        """Gradients of losses with and without chunks; raises on all ranks."""
        model, trainer = self._trainer.model_wrapped, self._trainer
        module, settled = self._unwrapped(model), self._is_settled
        outcomes, self._wrote = [], False
        for loss in losses:
            self._waste = PaddingStats()
            with un_reduced(model):
                found = apart(
                    loss,
                    module,
                    self._ways,
                    trainer=trainer,
                    without_trace=self._without_trace,
                    exchange=self._topology.exchange,
                    logged=self._logged,
                    settled=settled,
                )
            self._wrote = self._wrote or found.writes or bool(self._logs)
            outcomes.append(self._judged(found))
        worst = max(outcomes, key=lambda each: (not each.told, each.difference))
        kinds = frozenset().union(*(each.losses for each in outcomes))
        if worst.notable and (worst.told or self._ladder is None):
            self._session.notices(worst.words, key=worst.words)
        return replace(worst, losses=kinds)

    def before_window(self, batches: Sequence[Any], num_items_in_batch: Any = None) -> None:
        """Checks a batch where parameters are sharded: passes are collective, and gradients are reduced.

        Not in the training step, which may run where their reduction waits for the end of a window.
        """
        self._refuse_large(batches)
        if not (self._is_sharded and batches) or (self._ladder is not None and not self._training.is_in_chunks):
            return
        self._training.slots = max(map(slots_of, batches))
        if self._topology.kind == "sharded":
            self._training.decide_by_size()
        most = self._training.to_audit(batches)
        if most is None and not self._first.is_due:
            return
        if self._topology.kind == "sharded":
            try:
                outcome = self._training.audited(lambda: self._check_shards(batches[most or 0], num_items_in_batch))
            except GradientCheckError as error:
                if self._ladder is None:
                    raise
                self._training.slots = max(map(slots_of, batches))
                self._go_over(error)
                return
            self._first.heard(outcome)
            return
        self._first.is_due = False
        self._session.notices(
            f"under DeepSpeed the first batch of {type(self._trainer).__name__} is not checked (its engine takes "
            "every backward pass for a step's). A few steps on one device, or under DDP or FSDP, tell whether your "
            "loss reads padding; check='off' silences this"
        )

    def _check_shards(self, inputs: Any, num_items_in_batch: Any) -> Outcome:
        """`_check` on shards: each rank sketches its own, and differences are taken over all ranks."""
        model, trainer = self._trainer.model_wrapped, self._trainer
        whole = {"inputs": inputs}
        few = self._within_budget((), whole)
        prepared = trainer._prepare_inputs((few[1] if few is not None else whole)["inputs"])

        def loss() -> Any:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(model, _fresh(prepared), num_items_in_batch=num_items_in_batch)

        self._waste = PaddingStats()
        found = apart(
            loss,
            model,
            self._ways,
            trainer=trainer,
            without_trace=self._without_trace,
            exchange=self._topology.exchange,
            logged=self._logged,
            settled=self._is_settled,
            is_sharded=True,
        )
        return self._judged(found)

    @property
    def _ways(self) -> list[Callable[[], AbstractContextManager[Any]]]:
        return [self._as_stock, self._in_chunks]

    @contextmanager
    def _as_stock(self) -> Iterator[None]:
        """Models run whole, inside of a step in chunks too."""
        with ExitStack() as stack:
            for module in _modules(self._sites()):
                forward = vars(module).get("forward")
                if forward is not None and hasattr(forward, "padmin_stands_for"):
                    own = forward.padmin_stands_for or type(module).forward.__get__(module)
                    stack.enter_context(replaced(module, forward=own))
            yield

    @contextmanager
    def _in_chunks(self) -> Iterator[None]:
        """In the check as in training, so that what is said once is."""
        with ExitStack() as stack:
            stack.enter_context(self._as_stock())
            calls = stack.enter_context(self._chunked(self._sites(), anew=True))
            try:
                yield
            except (PadMinError, OnlyBackwardError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise GradientCheckError(
                    f"first-batch check: the step fails with {self._words.part} in chunks, and not without "
                    f"({type(error).__name__}: {error}): what one call leaves for the rest of the step is there for "
                    f"the last chunk alone. {self._words.fix}"
                ) from error
            self._waste = calls.total

    def _chunked(
        self, sites: Mapping[str, nn.Module | CallSite], *, anew: bool = False
    ) -> AbstractContextManager[Calls]:
        # Where a way was asked for, what cannot be had is an error.
        replays, tell = self._training.replays, None
        if self._ladder is not None:
            tell = self._ladder.refuses_left if replays else self._session.notices
        verifies = not anew and self._training.was_audited
        return chunked(sites, self._config, self._exchange, None, self._forwards, tell, anew, replays, verifies)

    def _judged(self, found: Apart) -> Outcome:
        part, words = self._words.part, self._words
        if found.is_too_far:
            raise GradientCheckError(
                f"first-batch check: gradients with {part} in chunks differ from the stock ones: relative "
                f"difference {found.value:.2g} (limit {found.limit:.0e}), {found.where}. {words.reads} reads padding. "
                f"{words.fix}"
            )
        if found.reads_padding:
            what = ", ".join(found.moved[:4]) or "what another rank computes"
            raise GradientCheckError(
                f"first-batch check: {what} of the step depends on outputs where rows have padding, which are not "
                f"computed with {part} in chunks: zeros stand there. Mask outputs by the attention mask. {words.fix}"
            )
        if found.advances:
            what = found.advanced or "what another rank keeps"
            raise GradientCheckError(
                f"first-batch check: each call of a model writes into {what}, and with {part} in chunks it is called "
                "several times per batch: counters and averages run ahead. Do that once per batch, in the step, or use "
                "PadMinConfig(enabled=False). What changes nothing that is trained may be named in its class: "
                "padmin_per_call = ('name',)"
            )
        # A batch without padding, or one of which nothing ran in chunks, tells nothing of later ones.
        had_padding = bool(self._topology.exchange([int(self._waste.waste_before > 0)]).any())
        if found.is_random:
            told = "the loss is another function at each call, so whether chunks change it cannot be told"
        elif not found.told:
            told = "stock gradients are zero or not finite, which tells nothing"
        else:
            told = f"gradients with {part} in chunks are the stock ones (relative difference {found.value:.1e})"
        return Outcome(
            found.value,
            found.told,
            (found.told or found.is_random) and had_padding,
            found.is_random,
            told,
            losses=found.losses,
            limit=found.limit,
        )

    @property
    def _is_settled(self) -> bool:
        ledger = self._training.ledger
        return ledger is not None and ledger.has_passed and not ledger.new and not self._first.is_due

    @property
    def _logged(self) -> Callable[[], Mapping[str, Any]] | None:
        return (lambda: self._logs) if self._looks_at_padding else None

    @contextmanager
    def _unlogged(self) -> Iterator[None]:
        """What the trainer logs inside is listened to, and not logged; nothing stays in it."""
        self._logs = {}

        def log(logs: Mapping[str, Any], *args: Any, **options: Any) -> None:
            self._logs |= logs

        with replaced(self._trainer, log=log):
            yield

    def _unwrapped(self, model: Any) -> nn.Module:
        module: nn.Module = self._trainer.accelerator.unwrap_model(model)
        return module


class Sites:
    """Calls of modules that a Trainer holds which can run in chunks, as they are now, by name.

    Of a model of transformers that has a backbone it is that one's, so that its head sees the whole batch.

    Args:
        trainer: its own attributes are looked through, and lists and dictionaries in these: a teacher, the module of a
            loss.
        config: see `call_sites`.
    """

    def __init__(self, trainer: Any, config: PadMinConfig) -> None:
        self._trainer, self._config = trainer, config
        self._held: list[nn.Module] = []
        self._found: dict[str, CallSite] = {}

    def __call__(self) -> dict[str, CallSite]:
        """Looks through them when the trainer holds others than at the last call."""
        named = dict(_held_by(self._trainer))
        held = list(named.values())
        if len(held) != len(self._held) or any(a is not b for a, b in zip(held, self._held, strict=True)):
            self._held, self._found = held, _sites(named, self._config)
        return self._found

    def refuse(self) -> None:
        """Raises ArchitectureError where outputs of a model for a row depend on the rows that run with it."""
        for site in self().values():
            if site.is_model and not site.has_inside:
                screen(site.module, tolerate={"batch-norm", "balance-loss"}).refuse()


def _held_by(trainer: Any) -> Iterator[tuple[str, nn.Module]]:
    yield "model", trainer.accelerator.unwrap_model(trainer.model)
    for name, value in vars(trainer).items():
        if name in ("model", "model_wrapped"):
            continue
        if isinstance(value, nn.Module):
            yield name, value
        elif type(value) in (list, tuple, dict):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(each, nn.Module):
                    yield f"{name}[{key!r}]", each


def _sites(held: Mapping[str, nn.Module], config: PadMinConfig) -> dict[str, CallSite]:
    found: dict[str, CallSite] = {}
    seen: set[int] = set()
    for where, module in held.items():
        declared = config if where == "model" else replace(config, call_masks={})  # whose names are of the model
        inside = call_sites(module, declared, with_itself=True)
        modules = {id(site.module) for site in inside.values()}
        for name, site in inside.items():
            backbone = _backbone(site.module) if site.is_model else site.module
            has_backbone = backbone is not site.module and id(backbone) in modules
            if id(site.module) not in seen and not has_backbone:
                full = f"{where}.{name}" if name else where
                found[full] = replace(site, name=full)
        seen |= modules
    return {
        name: replace(site, has_inside=any(other.startswith(name + ".") for other in found))
        for name, site in found.items()
    }


def _backbone(module: nn.Module) -> nn.Module:
    """What a model has inside of its head, and of what PEFT has put around it; the model itself where that is all."""
    get_base: Any = getattr(module, "get_base_model", None)
    whole: nn.Module = get_base() if callable(get_base) else module
    inner = getattr(whole, "base_model", None)
    return inner if isinstance(inner, nn.Module) else whole


def _modules(sites: Mapping[str, nn.Module | CallSite]) -> list[nn.Module]:
    return [each.module if isinstance(each, CallSite) else each for each in sites.values()]


def _of_few_rows(error: Exception) -> GradientCheckError:
    return GradientCheckError(
        f"first-batch check: the step fails on a few rows of a batch ({type(error).__name__}: {error}), and on all of "
        "it a check would take the memory that replay is there to save. Use mode='joint' if a whole batch fits, or "
        "make sure of it on smaller batches and set check='off'"
    )


def _loss_of(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _shallow(node: Any) -> Any:
    """Containers of a batch copied, so that entries that somebody takes out of them are still there."""
    if isinstance(node, tuple | list) and type(node) in (tuple, list):
        return type(node)(_shallow(each) for each in node)
    if isinstance(node, Mapping):
        try:
            return map_leaves(node, lambda path, leaf: leaf)
        except Exception:  # of a kind that cannot be made anew
            return node
    return node


def _fresh(node: Any) -> Any:
    """The same with tensors copied, which a pass may write into."""
    if type(node) in (tuple, list):
        return type(node)(_fresh(each) for each in node)
    if type(node) is dict:
        return {name: _fresh(each) for name, each in node.items()}
    if isinstance(node, Mapping):
        try:
            return map_leaves(node, lambda path, leaf: _fresh(leaf))
        except Exception:
            return node
    return node.clone() if isinstance(node, Tensor) and not node.requires_grad else node


__all__ = ["Sites", "WholeSteps", "Words"]
