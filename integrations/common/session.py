"""What an adapter is for its whole life: its options, what it has counted and said, the loop that is open.

An adapter has one `Session`, and one `Training` for each model (see `training`), through which every batch goes. It
keeps what differs between frameworks: who calls backward, when gradients are zeroed, how micro-batches map to steps.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from torch import nn

from lightning_padmin.config import PadMinConfig
from lightning_padmin.distributed import (
    PATIENCE_OF_LOOPS,
    Announcement,
    announce,
    exchange_at_end,
    explain,
    forget_last_words,
    go_on,
    telling_others,
)
from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common.audits import Audits, KeptAudits
from lightning_padmin.integrations.common.topology import Topology
from lightning_padmin.integrations.common.training import Training
from lightning_padmin.integrations.common.ways import Whole
from lightning_padmin.microbatching import LoopGuard, MicroBatch, MicroBatches
from lightning_padmin.runtime import Notices
from lightning_padmin.stats import PaddingMeter, PaddingStats
from lightning_padmin.verification import PackGate, gate_of, refuse_unproven

Around = Callable[[MicroBatch], AbstractContextManager[object]]


class Session:
    """One adapter object's options, counts, and words to the user and to other ranks.

    Copies of it (a callback is copied, sent to other processes) count on, and are part of no training.

    Args:
        name: of the adapter, as users know it.
        config: its options.
        tell: how the user hears of what is worth knowing but no warning; default: not at all.
        is_main: whether this process warns, or a function that tells when there is something to say.
        signs: whether warnings begin with the name.
        refusal: what is raised for an option that cannot be had here.

    Attributes:
        meter: counts of this rank.
        audits: what was audited, of all trainings.
        kept: the same in the checkpoints of Trainers of transformers and TRL.
        loops: the loop over micro-batches that is open, where loops are the user's own.
        notices: says warnings, each once.
    """

    def __init__(
        self,
        name: str,
        config: PadMinConfig,
        *,
        tell: Callable[[str], None] | None = None,
        is_main: bool | Callable[[], bool] = True,
        signs: bool = True,
        refusal: type[Exception] = ConfigError,
    ) -> None:
        self.name, self.config, self._tell, self._refusal = name, config, tell, refusal
        self.meter, self.loops = PaddingMeter(config.log_prefix), LoopGuard()
        self._speaker = name if signs else "", is_main
        self.notices = self.new_notices()
        self.audits = Audits(name, config, self.notices)
        self.kept = KeptAudits(self.audits)
        self._announced: Announcement | None = None
        self._has_agreed = False
        self._trainings: weakref.WeakKeyDictionary[nn.Module, Training] | None = None  # which cannot be pickled

    # What is said.

    def tell(self, words: str) -> None:
        """Tells the user, under the adapter's name; no warning."""
        if self._tell is not None:
            self._tell(f"{self.name}: {words}")

    def new_notices(self) -> Notices:
        """Says warnings, each once in the life of what is returned."""
        return Notices(*self._speaker)

    # Ranks are set up alike.

    def announce(self, **facts: str) -> None:
        """Writes options, and further facts, down for the other ranks; see `distributed.announce`."""
        self._announced = announce(self.name, self.config, **facts)

    def agree(self, patience: float | None = None) -> list[dict[str, str]]:
        """Refuses ranks that were set up otherwise, or not at all; once for each announcement.

        Args:
            patience: seconds to wait for a rank; default: few, since all have come as far as this one.

        Returns:
            What each rank has announced; nothing where all is said already.

        Raises:
            ConfigError: on every rank.
        """
        announced, self._announced = self._announced, None
        if announced is None:
            return []
        return announced.agree() if patience is None else announced.agree(patience)

    def agree_in_loop(self) -> None:
        """The first time: announces, unless that is done, and agrees, where nothing says how far other ranks are."""
        if not self._has_agreed:
            self._has_agreed = True
            if self._announced is None:
                self.announce()
            self.agree(PATIENCE_OF_LOOPS)

    def explaining(self) -> AbstractContextManager[None]:
        """Around what may break because a rank that was refused has left, before ranks have come to `agree`.

        Raises:
            ConfigError: in place of an error from inside: ranks differ in what must be the same.
        """
        return nullcontext() if self._announced is None else self._announced.explaining()

    # A training begins, goes on, ends.

    def begin(self) -> None:
        """A training begins: what ended an earlier one does not count."""
        forget_last_words()

    def goes_on(self) -> None:
        """This rank has further batches, for those that wait for it at their end."""
        go_on()

    def ends_with(self, error: BaseException) -> None:
        """Tells other ranks what ends this one, and the user what ended another."""
        self._announced = None
        if self.config.enabled:
            explain(error)

    @contextmanager
    def telling_others(self) -> Iterator[None]:
        """`begin`, `explaining` and `ends_with` around a training that is one call."""
        with self.explaining(), telling_others() if self.config.enabled else nullcontext():
            yield

    def training(self, model: nn.Module, make: Callable[[], Training]) -> Training:
        """The training of a model that comes with every batch; made when it comes first, kept as long as the model."""
        if self._trainings is None:
            self._trainings = weakref.WeakKeyDictionary()
        if model not in self._trainings:
            self._trainings[model] = make()
        return self._trainings[model]

    # Loops of the user's own.

    def loop(self, planned: MicroBatches | Whole, around: Around) -> Iterator[MicroBatch]:
        """An iterator over the micro-batches of a batch, which counts once it has run to its end.

        Args:
            planned: what `Training.prepare` returned, or a batch that stays whole.
            around: the context of each one's forward and backward pass.
        """
        return self.loops.start(planned, around, lambda: self.count(planned.stats))

    def loop_as_it_came(self, batch: Any, around: Around = lambda micro: nullcontext()) -> Iterator[MicroBatch]:
        """The same where the adapter is switched off: the batch itself, of weight 1; nothing is counted."""
        whole = MicroBatch(batch, 1.0, np.empty(0, dtype=np.int64), 0, 1)
        return LoopGuard().start([whole], around, lambda: None)

    def discard(self) -> None:
        """Forgets a loop that was left before its end on purpose."""
        self.loops.discard()

    # Packs.

    def refuse_packs(self, where: str) -> None:
        """Refuses `layout="pack"` in loops whose steps nobody compares with un-packed ones."""
        refuse_unproven(self.config, where)

    def pack_policy(
        self,
        why_not: Callable[[], str | None],
        models: Callable[[], Mapping[str, nn.Module]],
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **more: Any,
    ) -> PackGate | None:
        """What decides whether rows are packed; None where they are not.

        Args:
            why_not: what speaks against packs here, in words; asked only where the options want packs.
            models: those that are going to get packs, by name.
            around: context of a forward pass.
            more: see `gate_of`.

        Raises:
            ConfigError: or `refusal`: `layout="pack"`, and something speaks against it.
        """
        if self.config.layout == "pad":
            return None
        why = why_not()
        if why is None:
            return gate_of(models(), self.config, around, **more)
        if self.config.layout == "pack":
            raise self._refusal(f"layout='pack': {why}. Use layout='pad'")
        self.tell(f"layout='pad': {why}")
        return None

    # Counts.

    @property
    def stats(self) -> PaddingStats:
        """Counts of this rank, of its whole life."""
        return self.meter.total

    @stats.setter
    def stats(self, stats: PaddingStats) -> None:
        self.meter.total = stats

    def count(self, stats: PaddingStats) -> None:
        """Counts a batch of this rank."""
        self.meter.add(stats)

    def metrics(self, topology: Topology, *, is_copy: bool = False) -> dict[str, float | int]:
        """What the batches since the last time cost, over all ranks. A collective; see `PaddingMeter.flush`.

        Where batches are audited, also how many have passed so far.
        """
        if not self.config.enabled:
            return {}
        return self._with_audits(self.meter.flush(topology.exchange_of_counts, is_copy=is_copy))

    def metrics_at_end(self, topology: Topology, *, is_copy: bool = False) -> dict[str, float | int] | None:
        """The same at the end of a training, without a collective; None where not all ranks came to it together."""
        exchange = exchange_at_end if topology.world > 1 else topology.exchange
        found = self.meter.flush(exchange, is_copy=is_copy)
        return None if found is None else self._with_audits(found)

    def _with_audits(self, metrics: dict[str, float | int]) -> dict[str, float | int]:
        return metrics | self.audits.metrics(self.meter.prefix) if metrics else metrics

    # Checkpoints.

    def state_dict(self, *, with_unlogged: bool = False) -> dict[str, Any]:
        """Counts of this rank, and what was audited; plain numbers, texts, lists and dictionaries of these.

        Args:
            with_unlogged: see `PaddingMeter.state_dict`.
        """
        audits = self.audits.state()
        return self.meter.state_dict(with_unlogged=with_unlogged) | ({"audits": audits} if audits else {})

    def load_state_dict(self, state: Mapping[str, Any], *, counts: bool = True) -> None:
        """Goes on counting; what the state does not have stays as it is.

        Args:
            state: as `state_dict` has returned it, or an earlier version of it.
            counts: False: audits alone, which are the same on all ranks.

        Raises:
            PadMinError: something in it is malformed; nothing has been changed then.
        """
        audits = self.audits.read(state["audits"]) if "audits" in state else None
        if counts:
            self.meter.load_state_dict(state)
        if audits is not None:
            self.audits.take(audits)

    def __getstate__(self) -> dict[str, Any]:
        without: dict[str, Any] = {"_announced": None, "loops": LoopGuard(), "_trainings": None}
        audits = copy.copy(self.audits)
        return vars(self) | without | {"meter": copy.copy(self.meter), "audits": audits, "kept": KeptAudits(audits)}


__all__ = ["Around", "Session"]
