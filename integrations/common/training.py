"""One model, as it is trained on these processes: what is known of it, and the way that every batch of it goes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from lightning_padmin.architectures import Findings, HookWatch, Tolerable, refuse_batch_statistics, screen, words_of
from lightning_padmin.batch import RowTable, Schema
from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import BatchError, GradientCheckError, PeerError
from lightning_padmin.integrations.common.backward import reenters
from lightning_padmin.integrations.common.topology import Topology
from lightning_padmin.microbatching import MemoryGuard, MicroBatcher, MicroBatches, PackStyle
from lightning_padmin.verification import (
    MOST_FACETS,
    Fingerprint,
    Outcome,
    PackCheck,
    PackGate,
    Values,
    batch_facets,
    check_gradients,
    fingerprint,
    is_from_check,
    model_facets,
    parts_of,
    plain_facets,
    reasons,
    row_facets,
    was_raised_in_check,
    what_changed,
)

if TYPE_CHECKING:
    from lightning_padmin.integrations.common.session import Session

T = TypeVar("T")
_FOUND = re.compile(r"first-batch check( \(rank \d+\))?: (.*)", re.DOTALL)
Read = tuple[Any, Schema, RowTable]
"""A batch, its schema and its row table."""
_BESIDE = " beside "  # between kinds of loss in one batch


class Training:
    """One model under one adapter; no reference to it is held that would keep it alive.

    Every batch of every adapter goes through one method, `_pass`: whichever way it is planned or read, packed or not.
    What is to hold for all batches alike (which way a batch runs, what is audited later on, how it is moved) belongs
    there.

    Args:
        session: of the adapter.
        model: the user's own, inside of all wrappers.
        topology: of the processes.
        fix_of_hooks: what the user may do instead of a hook on gradients; see `HookWatch`.
        wrapper: what the framework has made of the model, if it is known yet.
        check: called before each batch is read, in place of `check`; what it raises, all ranks hear of. None of it
            may hold a reference to the model.
        tolerate: findings that are no refusal here, see `screen`; `width` too.
        width: what widths are rounded to, where a model that needs another number is refused.

    Attributes:
        notices: says warnings, each once in this training.
        findings: what is known of the model.
        hooks: looks after hooks on gradients.
        gate: decides whether rows are packed; None: they are padded.
        packs: whether the step takes packs; None where nobody asks.
        has_passed: whether `heed` has found nothing to refuse.
        values: of entries of its batches, see `Values`.
        ledger: what was shown to checks that passed; None where nothing is audited.
        room: most slots of a batch that stays whole, where that is bounded.
        keeps: most slots of a batch whose calls run in chunks and keep their activations, where that is bounded;
            chunks of larger ones are replayed.
        inside: gives the modules whose calls run in chunks, where batches stay whole; None: batches are split.
        slots: of the batch that was read last, as it came.
        may_go_over: whether other ways are left where a check finds that this one is another training.
        audit_is_due: whether, on some rank, the batch that was read last should be checked before it is trained on.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        topology: Topology,
        *,
        fix_of_hooks: str | Callable[[], str],
        wrapper: nn.Module | None = None,
        check: Callable[[Training], None] | None = None,
        tolerate: Collection[Tolerable] = (),
        width: int | None = None,
    ) -> None:
        self._session, self.topology = session, topology
        self._model = weakref.ref(model)
        self._wrapper = weakref.ref(model if wrapper is None else wrapper)
        self._tolerate, self._width, self.has_passed = tolerate, width, False
        self._check = check or Training.check
        self.findings: Findings = screen(model, tolerate=tolerate, width=width)
        self._fix_of_hooks = fix_of_hooks
        self.hooks = HookWatch(fix_of_hooks)
        self.notices = session.new_notices()
        self.gate: PackGate | None = None
        self.packs: PackCheck | None = None
        self._batcher: MicroBatcher | None = None
        self.ledger = session.audits.ledger()
        self._way, self._is_auto = "split", session.config.mode == "auto"
        self.may_go_over = False
        self.room: int | None = None
        self.keeps: int | None = None
        self.inside: Callable[[], list[nn.Module]] | None = None
        self.slots = 0
        self.audit_is_due = self._has_begun = False
        self._shown: tuple[set[str], dict[str, Any]] = set(), {}
        self._rows, self._plan = 0, dict[str, int]()  # of the batch
        self.values, self._losses = Values(), _Losses()
        self._said_unseen: set[str] = set()  # facets; "" for all further ones

    @property
    def model(self) -> nn.Module:
        """The user's own, which is still there."""
        model = self._model()
        assert model is not None
        return model

    @property
    def wrapper(self) -> nn.Module:
        """What the framework has made of it."""
        wrapper = self._wrapper()
        assert wrapper is not None
        return wrapper

    # Which way batches run.

    @property
    def way(self) -> str:
        """How batches run: "split", "joint", "replay" or "as it came"; under `mode="auto"` checkpoints have it."""
        return self.ledger.way if self._is_auto and self.ledger is not None else self._way

    @way.setter
    def way(self, way: str) -> None:
        self._way = way
        if self.ledger is not None:
            self.ledger.way = way

    @property
    def is_in_chunks(self) -> bool:
        """Whether calls of models run in chunks inside of whole steps."""
        return self.way in ("joint", "replay")

    @property
    def replays(self) -> bool:
        """Whether they do not keep their activations, in the batch that was read last."""
        return self.way == "replay"

    def decide_by_size(self) -> None:
        """Whether a batch of so many `slots` is replayed, where that is found out batch by batch.

        Where parameters are sharded, chunks that run again are collective: there it is a collective, of all ranks.
        """
        if self.keeps is not None and self.is_in_chunks:
            slots = self.slots
            if self.topology.kind == "sharded":
                slots = int(self.topology.exchange([slots]).max())
            self.way = "replay" if slots > self.keeps else "joint"

    def go_over(self, way: str) -> None:
        """The batch that is about to run, and all that come, go another way; checks begin anew."""
        self._way, self._has_begun = way, True  # the batch is read again, and is one step
        self.gate = self.packs = self._batcher = None
        self.hooks = HookWatch(self._fix_of_hooks)
        self._losses.forget()
        if self.ledger is not None:
            self.ledger.restart(way)

    @property
    def hears_news(self) -> bool:
        """Whether a loss was heard of whose kind no check has seen, as far as that is known before a backward pass."""
        return self.ledger is not None and any(not self.ledger.has_seen(facet) for facet in self._losses.news)

    # What must hold of the model.

    def check(self) -> None:
        """Before each batch: the model can be regrouped as it is now, and its hooks can be called more than once."""
        self.refuse_batch_statistics()
        self.heed()
        self.look()

    def refuse_batch_statistics(self) -> None:
        """Raises ArchitectureError: what a module does now depends on which rows run together."""
        refuse_batch_statistics(self.model)

    def heed(self) -> None:
        """Refuses a model that cannot be regrouped, and tells what else is known of it; once it has passed, no more.

        Raises:
            ArchitectureError: names what refuses.
        """
        if self.has_passed:
            return
        findings = screen(self.model, tolerate=self._tolerate, width=self._width)
        findings.refuse()
        for finding in findings.told:
            self._session.tell(words_of(finding))
        self.has_passed = True

    def look(self, parts: Iterable[nn.Module] | None = None, *, wrapper: object = None, **how: Any) -> None:
        """Looks at hooks that are new; see `HookWatch.look`. Of batches that stay whole, at those of `inside` alone.

        Raises:
            GradientHookError: one makes something else of parts of gradients.
        """
        wrapper = self.wrapper if wrapper is None else wrapper
        if self.inside is None:
            self.hooks.look(self.model, parts, wrapper=wrapper, **how)
        else:
            modules = self.inside()
            # One backward pass per batch, unless checkpoints are passes of their own.
            self.hooks.look(self.model, modules, parameters=any(map(reenters, modules)), wrapper=wrapper)

    def around(self, index: int, count: int) -> AbstractContextManager[None]:
        """Around forward and backward pass of a micro-batch, for hooks on gradients."""
        return self.hooks.around(index, count)

    def look_late(self, index: int, count: int) -> None:
        """Looks, before a micro-batch's backward pass, at hooks that its step has put there."""
        self.hooks.look_late(self.model, index, count)

    # Batchers.

    def use_gate(self, gate: PackGate | None, *, asks_of_step: bool) -> None:
        """Rows may be packed; to be called before batchers are made.

        Args:
            gate: see `Session.pack_policy`.
            asks_of_step: not before `packs` has seen the training step take packs, too.
        """
        self.gate = gate
        if gate is not None and asks_of_step:
            self.packs = PackCheck(gate, self.topology.exchange, self.notices)

    def batcher(self, config: PadMinConfig | None = None, **differs: Any) -> MicroBatcher:
        """One for this model.

        Args:
            config: options that differ from the session's.
            differs: arguments of `MicroBatcher` that differ from what is known here.
        """
        known: dict[str, Any] = {
            "exchange": self.topology.exchange,
            "encoder_decoder": self.findings.is_encoder_decoder,
            "before_reading": self._before_reading,
            "row_limit": self.findings.row_limit,
            "gate": self.gate,
            "asks_of_step": self.packs is not None,
            "wants_audit": self._show if self.ledger is not None or self._is_auto else None,
        }
        return MicroBatcher(self.findings.options(config or self._session.config), **(known | differs))

    @property
    def main(self) -> MicroBatcher:
        """The one for whole batches, with the session's options."""
        if self._batcher is None:
            self._batcher = self.batcher()
        return self._batcher

    def _before_reading(self) -> None:
        self._check(self)

    # The way of a batch.

    def prepare(self, batch: Any, by: MicroBatcher | None = None, **wish: Any) -> MicroBatches:
        """The micro-batches of a batch, as many on every rank; see `MicroBatcher.prepare`.

        Args:
            batch: of the caller's type; it is only read.
            by: what plans it; default: `main`.
            wish: `token_budget`, `min_micro_batches`.
        """
        return self._pass(by, lambda batcher, may_pack: batcher.prepare(batch, may_pack=may_pack, **wish))

    def prepare_made(self, make: Callable[[], Any], by: MicroBatcher | None = None, **wish: Any) -> MicroBatches:
        """The same of what a function makes; see `MicroBatcher.prepare_made`."""
        return self._pass(by, lambda batcher, may_pack: batcher.prepare_made(make, may_pack=may_pack, **wish))

    def prepare_window(self, batches: Sequence[Any], by: MicroBatcher | None = None, **wish: Any) -> MicroBatches:
        """The same of the rows of several batches; see `MicroBatcher.prepare_window`."""
        return self._pass(by, lambda batcher, may_pack: batcher.prepare_window(batches, may_pack=may_pack, **wish))

    def read(self, batch: Any, by: MicroBatcher | None = None) -> tuple[Schema, RowTable]:
        """A batch that stays whole: its schema and its row table, on all ranks; see `MicroBatcher.read_together`."""
        return self._pass(by, lambda batcher, may_pack: batcher.read_together(batch), plans=False)

    def _pass(self, by: MicroBatcher | None, way: Callable[[MicroBatcher, bool], T], *, plans: bool = True) -> T:
        """The one place through which every batch of every adapter goes."""
        batcher = by or self.main
        self.begin_step()
        found = way(batcher, self.may_pack)
        self.audit_is_due, self._has_begun = batcher.audits, False
        if self.topology.kind == "sharded" and self.keeps is not None and self.is_in_chunks:
            self._decide_together()
        if isinstance(found, MicroBatches):
            self._plan = {"micro_batches": len(found), "slots": found.stats.slots}
        if plans and batcher.has_changed and self.packs is not None:
            self.packs.again()  # packs are proven anew for models that have become others
        return found

    # Audits.

    def begin_step(self) -> None:
        """Another batch comes; for adapters that check it before they have it prepared or read."""
        if self.ledger is not None and not self._has_begun:
            self.ledger.expect(self._losses.late())
            self.ledger.begin_step()
            self._losses.begin_batch()
            self._plan = {}
        self._has_begun = True

    def _show(self, leaves: Mapping[str, Any], schema: Schema, table: RowTable) -> bool:
        """Notes what a batch shows, and whether that is to be looked at.

        Raises:
            BatchError: it stays whole, and is too large for that.
        """
        self.slots = table.slots
        self.refuse_whole(table.slots)
        if self.topology.kind != "sharded":
            self.decide_by_size()
        if self.ledger is None or self.way == "as it came":
            return False
        rows = row_facets(leaves, schema, table, self.values)
        of_batch = batch_facets(leaves, schema, self.values) | model_facets(*parts_of(self.model))
        of_batch |= self._facets_of_way
        self._shown, self._rows = (of_batch, rows), len(table)
        self._let_go()
        self.ledger.show(of_batch | reasons(rows))
        return self.ledger.wants

    def _decide_together(self) -> None:
        """Whether a batch is replayed, when no rank has refused its own; and what that shows."""
        self.decide_by_size()
        if self.replays and self.ledger is not None:
            new = {each for each in self._facets_of_way if not self.ledger.has_seen(each)}
            self._shown[0].update(new)
            self.ledger.show(new)
            self.audit_is_due = bool(self.topology.exchange([int(self.audit_is_due or bool(new))]).any())

    @property
    def _facets_of_way(self) -> set[str]:
        return {"chunks that are replayed"} if self.replays else set()

    def refuse_whole(self, slots: int) -> None:
        """Raises BatchError: a batch of so many slots stays whole, and is too large for that."""
        if self.room is not None and slots > self.room:
            raise BatchError(
                f"mode='auto' runs batches {_words_of_way(self.way)} by now, in the memory of the whole batch: "
                f"{slots:,} slots, and token_budget={self.room}. Set token_budget={slots} or None, if a whole batch "
                "fits, as it does where it trained without padmin; or make batches smaller"
            )

    def _let_go(self) -> None:
        """Values of entries that have turned out to have many leave their places to what is told apart."""
        if self.ledger is not None and self.values.dropped:
            self.ledger.forget(self.values.dropped)
            self.values.dropped.clear()

    @property
    def was_audited(self) -> bool:
        """Whether an audit of this very step has passed; what its rows could not show, later batches may."""
        return self.ledger is not None and self.ledger.has_passed and self.ledger.last == self.ledger.step

    @property
    def wanted(self) -> frozenset[str]:
        """What the batch that was read last shows, and no check has seen."""
        return frozenset() if self.ledger is None else self.ledger.new

    def hear(self, loss: object, rows: Iterable[int] = ()) -> None:
        """Notes what kind of loss a pass of training has taken; to be called before it is sent backward.

        Args:
            loss: as the step has returned it; None, or one without a graph, says nothing.
            rows: which of the batch it is of.
        """
        is_asked = self.ledger is not None and self.way != "as it came"
        if is_asked and isinstance(loss, Tensor) and loss.grad_fn is not None:
            self._losses.hear(fingerprint(loss), [int(row) for row in rows])

    def settle(self, audit: Callable[[Sequence[int]], Outcome | None], *, is_last: bool = True) -> None:
        """Behind a backward pass, has the batch audited where its loss was of a new kind, before the optimizer steps.

        Where other ranks take part, the next batch is audited instead, on all of them.

        Args:
            audit: checks the batch on these of its rows, among others.
            is_last: whether it was the last pass of the batch.

        Raises:
            GradientCheckError: see `audited`.
        """
        ledger = self.ledger
        if ledger is None:
            return
        if is_last:
            self._losses.mix()
        new = {facet: rows for facet, rows in self._losses.take().items() if not ledger.has_seen(facet)}
        if not new:
            return
        ledger.expect(new)
        if self.topology.world > 1 or self.topology.kind == "sharded":
            return
        ledger.show_expected()
        rows = [row for each in new.values() for row in each]
        self._shown = self._shown[0], {}  # of another batch, where several were read since this one
        self.audited(lambda: audit(rows), new)

    def postpone(self) -> None:
        """Has the next batch audited in place of this one."""
        if self.ledger is not None:
            self.ledger.postpone()

    def to_audit(self, batches: Sequence[Mapping[str, Any]]) -> int | None:
        """For batches of one step that are neither prepared nor read: which is to be audited, if one is on any rank.

        One exchange of an integer where other ranks take part.

        Args:
            batches: as collators of trainers make them.
        """
        if self.ledger is None:
            return None
        self.begin_step()
        self._has_begun = False
        if self.way == "as it came":
            return None
        shown = [plain_facets(batch, self.values) for batch in batches]
        of_all = set().union(*shown) | model_facets(*parts_of(self.model)) | self._facets_of_way
        self._let_go()
        self.ledger.show(reasons(of_all))
        self.audit_is_due = bool(self.topology.exchange([int(self.ledger.wants)]).any())
        if not self.audit_is_due:
            return None
        new = self.ledger.new
        most = max(range(len(batches)), key=lambda k: len(new & shown[k]))
        self._shown = of_all - set().union(*shown) | shown[most], {}
        return most

    def audited(
        self, check: Callable[[], Outcome | None], seen_besides: Collection[str] = (), *, is_trial: bool = False
    ) -> Outcome | None:
        """Runs a check of the batch that was read last, and notes what it has seen.

        Args:
            check: compares gradients; all ranks run it, or none.
            seen_besides: what counts as seen if it passes.
            is_trial: another way is tried where it does not, so that a refusal is none of the training.

        Raises:
            GradientCheckError: training would change; in the middle of a training, it says since when.
        """
        if self.ledger is None:
            return check()
        try:
            outcome = self._outcome_of(check)
        except GradientCheckError as error:
            if is_trial:
                raise
            told = self._in_time(error)
            self._write("refused", facets=sorted(self.ledger.new), words=str(told))
            raise told from error.__cause__
        if outcome is None or not outcome.told:
            new = sorted(self.ledger.new)
            self.ledger.could_not_tell(for_want_of_gradients=outcome is not None)
            if outcome is not None:
                self._write("could not tell", facets=new, words=outcome.words, given_up=self.ledger.given_up)
            self._tell_of_limits()
            return outcome
        of_batch, by_row = self._shown
        by_row = {name: by_row[name] for name in reasons(by_row)}
        seen = {name for name, rows in by_row.items() if not outcome.rows or rows[list(outcome.rows)].any()}
        kinds = {_loss_facet(key) for key in outcome.losses}
        # A check that had passes of several kinds has seen these beside each other.
        seen |= kinds | {each for each in self.ledger.new if kinds >= set(each.split(_BESIDE))} | set(seen_besides)
        self.ledger.passed(outcome.difference, reasons(of_batch) | seen)
        self._write(
            "audit",
            facets=list(self.ledger.record[-1].facets),
            rows=len(outcome.rows) or self._rows or None,
            difference=outcome.difference,
            limit=outcome.limit,
        )
        self._tell_of_limits()
        return outcome

    def _outcome_of(self, check: Callable[[], Outcome | None]) -> Outcome | None:
        """A step that fails on a few rows, where other ways are left, is one that cannot be split; on all ranks."""
        try:
            return check()
        except Exception as error:
            is_of_step = was_raised_in_check(error)
            if not (self.may_go_over or self.replays):
                raise
            # What a rank raises in a check's passes, all others hear of, and raise.
            if self.topology.world > 1 and (isinstance(error, PeerError) or is_from_check(error)):
                is_of_step = bool(self.topology.exchange([int(is_of_step or isinstance(error, PeerError))]).all())
            if not is_of_step:
                raise
            raise GradientCheckError(
                f"first-batch check: the step fails on a few rows of a batch ({type(error).__name__}: {error})"
            ) from error

    def _tell_of_limits(self) -> None:
        """What audits are not going to see, each once."""
        assert self.ledger is not None
        for facet in self.ledger.given_up:
            if facet not in self._said_unseen:
                self._said_unseen.add(facet)
                words = self._losses.words(facet)
                self._session.tell(f"audits could not look at {words}: no row that shows it fits, or none can tell")
        if self.ledger.is_full and "" not in self._said_unseen:
            self._said_unseen.add("")
            self._session.tell(
                f"batches have shown {MOST_FACETS} facets. Further ones are no reason for an audit, only every "
                f"{self.ledger.every} steps are"
            )

    def _write(self, kind: str, **found: Any) -> None:
        """A line for the file of proof, see `Proof`; facets that are kinds of loss are explained."""
        if self.topology.rank != 0 or self.ledger is None:
            return
        words = {facet: self._losses.words(facet) for facet in found["facets"] if facet.startswith(_LOSS)}
        losses = {facet: told for facet, told in words.items() if told != facet}
        explained = {"losses": losses} if losses else {}
        where = {"step": self.ledger.step, "way": self.way}
        self._session.audits.note(kind, **where, **found, **explained, **self._plan)

    def _in_time(self, error: GradientCheckError) -> GradientCheckError:
        """What an audit has found, with what was new, and since when it may have been so."""
        ledger = self.ledger
        assert ledger is not None
        if not ledger.has_passed:
            return error
        new, since = sorted(map(self._losses.words, ledger.new)), max(0, ledger.step - ledger.last - 1)
        shown = f"the first with {', '.join(new[:4])}{', ...' if len(new) > 4 else ''}" if new else "looked at in turn"
        if not ledger.wants and self.topology.world > 1:
            shown = "for what it shows on another rank"
        had_passed = "other rows of it" if ledger.last == ledger.step else f"step {ledger.last}"
        undone = f"; {since} step{'s' if since > 1 else ''} since then {'are' if since > 1 else 'is'} not undone"
        found = _FOUND.match(str(error))
        rank, words = ("", str(error)) if found is None else (found[1] or "", found[2])
        made = GradientCheckError(
            f"audit of step {ledger.step}{rank} ({shown}; {had_passed} had passed{undone if since else ''}): {words}"
        )
        made.is_declaration = error.is_declaration
        return made

    @property
    def may_pack(self) -> bool:
        """Whether nothing is left to prove of the step; whether the model keeps rows apart, the gate knows."""
        return self.packs is None or self.packs.has_passed

    def prove(
        self,
        read: Callable[[MicroBatcher], Read],
        gradients: Callable[[PackStyle, Read], Outcome | None],
        by: MicroBatcher | None = None,
    ) -> None:
        """Finds out whether the step takes packs, while that is open; until it is known, rows are padded.

        Args:
            read: reads the batch that is about to run, on all ranks.
            gradients: compares the step on packs of it with the step on rows as they came.
            by: what is going to plan the batch; default: `main`.
        """
        if self.packs is None or not self.packs.is_due:
            return
        batcher = by or self.main
        found = read(batcher)
        self.packs(batcher.pack_style, lambda style: gradients(style, found))

    def gradients(self, loss: Callable[[Any], Tensor], read: Read, config: PadMinConfig, **how: Any) -> Outcome | None:
        """Compares gradients of a few rows of a batch as it came with those of the rows apart; on all ranks.

        Args:
            loss: of a batch, as training takes it.
            read: the batch.
            config: what is declared of it.
            how: see `check_gradients`.
        """
        known: dict[str, Any] = {
            "exchange": self.topology.exchange,
            "is_sharded": self.topology.kind == "sharded",
            "wanted": self.wanted,
            "values": self.values,
            "is_bounded": self.replays,
            "settled": self.ledger is not None and self.ledger.has_passed and not self.ledger.new,
        }
        return check_gradients(loss, *read, config, self.model, **(known | how))

    def guard(self, micro_batches: MicroBatches, *, last: int | None = None, tells: bool = True) -> MemoryGuard:
        """What stands around the passes of a batch, for memory that runs out; to be made on every rank.

        Args:
            micro_batches: of the batch.
            last: the index of the one that runs last; default: the last.
            tells: False for passes that other ranks need not hear of.
        """
        board = self.topology.board(micro_batches.grows and tells)
        return MemoryGuard(micro_batches, board, self.topology.rank, last)


class _Losses:
    """The kinds of loss that the passes of one training have taken."""

    def __init__(self) -> None:
        self._first: Fingerprint | None = None
        self._words: dict[str, str] = {}
        self._rows: dict[str, Sequence[int]] = {}  # of the batch, by kind
        self._new: dict[str, Sequence[int]] = {}
        self._unread: list[Fingerprint] = []

    def begin_batch(self) -> None:
        self._rows, self._new = {}, {}

    def hear(self, found: Fingerprint, rows: Sequence[int]) -> None:
        """Of one pass; what lies on an accelerator is read when the next batch comes, so that nothing waits for it."""
        if found.scalars:
            self._unread.append(found)
            return
        facet = self._facet(found)
        self._rows.setdefault(facet, rows)
        self._new.setdefault(facet, rows)

    @property
    def news(self) -> Collection[str]:
        """What was heard since the last time that was asked what is new."""
        return self._new

    def forget(self) -> None:
        """What was heard does not count any more."""
        self._rows, self._new, self._unread = {}, {}, []

    def late(self) -> list[str]:
        """What is known now of the batch before."""
        found = [self._facet(each) for each in self._unread]
        self._unread.clear()
        return found

    def mix(self) -> None:
        """Passes of one batch whose losses are of several kinds, as where flooding has begun for some, are one more."""
        if len(self._rows) > 1:
            facet = _BESIDE.join(sorted(self._rows))
            self._words[facet] = "losses of several kinds in one batch"
            self._new[facet] = [int(row) for rows in self._rows.values() for row in list(rows)[:2]]

    def take(self) -> dict[str, Sequence[int]]:
        """What was heard since the last time, with the rows of the batch that have it."""
        new, self._new = self._new, {}
        return new

    def words(self, facet: str) -> str:
        """For a user."""
        return self._words.get(facet, facet)

    def _facet(self, found: Fingerprint) -> str:
        facet = _loss_facet(found.key)
        if self._first is None:
            self._first = found
        if facet not in self._words:
            changed = what_changed(self._first, found)
            self._words[facet] = f"another kind of loss than at first ({changed})" if changed else "this kind of loss"
        return facet


_LOSS = "loss "


def _words_of_way(way: str) -> str:
    return "as they came" if way == "as it came" else f"as with mode={way!r}"


def _loss_facet(key: str) -> str:
    return _LOSS + key
