"""Where the slots of a run went, as counts.

Sums first, ratios last: a mean of per-batch ratios would weight short batches like long ones, and a mean over
ranks would hide the rank that all others wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_padmin.errors import PadMinError


@dataclass
class PaddingStats:
    """Counts of one rank, or of several merged. All are sums except `longest_row`, which is a maximum.

    The order of the fields below is the order of `as_counts`, which ranks send to each other.
    """

    batches: int = 0
    """Batches as the loader gave them."""
    rows: int = 0
    """Rows of those batches; dummies do not count."""
    real_tokens: int = 0
    """Attended tokens."""
    loss_tokens: int = 0
    """Tokens that carry loss."""
    slots_before: int = 0
    """Slots as the batches came: rows x width."""
    slots: int = 0
    """Slots that were run, dummies included."""
    micro_batches: int = 0
    """Micro-batches that were run, dummies included."""
    dummies: int = 0
    """Zero-weight micro-batches that only kept ranks in step."""
    over_budget_rows: int = 0
    """Rows that exceeded the token budget by themselves."""
    wait_slots: int = 0
    """Slots this rank waited for: per batch, those of the rank with most minus its own."""
    longest_row: int = 0
    """Length of the longest row, in tokens, axes summed."""

    def __add__(self, other: PaddingStats) -> PaddingStats:
        """Counts of both together, as a new object."""
        if not isinstance(other, PaddingStats):
            return NotImplemented
        return self.merge_ranks([self.as_counts(), other.as_counts()])

    def merge(self, other: PaddingStats) -> PaddingStats:
        """The same as `self + other`; neither is changed."""
        return self + other

    def as_counts(self) -> list[int]:
        """The counts in the order of the fields, for a collective over ranks."""
        return [int(getattr(self, name)) for name in _NAMES]

    @classmethod
    def from_counts(cls, row: ArrayLike) -> PaddingStats:
        """The inverse of `as_counts`.

        Args:
            row: (11,) integers.

        Raises:
            PadMinError: another number of counts, as sent by another version of the package.
        """
        return cls.merge_ranks(np.asarray(row)[None])

    @classmethod
    def merge_ranks(cls, table: ArrayLike) -> PaddingStats:
        """Counts of all ranks together.

        Args:
            table: (world, 11) integers, one `as_counts` per rank, as an exchange returns them.

        Raises:
            PadMinError: another number of counts, as sent by another version of the package.
        """
        counts = np.asarray(table)
        if counts.ndim != 2 or counts.shape[1] != len(_NAMES) or counts.dtype.kind not in "iu":
            raise PadMinError(
                f"counts have shape {counts.shape} of {counts.dtype}, expected integers as (ranks, {len(_NAMES)}): "
                "run the same version of lightning-padmin on every rank"
            )
        # Python integers: a long run's sum over many ranks may pass int64.
        columns = counts.T.tolist()
        return cls(**{n: max(c, default=0) if n in _MAXIMA else sum(c) for n, c in zip(_NAMES, columns, strict=True)})

    @property
    def waste(self) -> float:
        """Padding fraction of what was run, 1 - real_tokens / slots."""
        return 1.0 - self.real_tokens / self.slots if self.slots else 0.0

    @property
    def waste_before(self) -> float:
        """Padding fraction of the batches as they came, 1 - real_tokens / slots_before."""
        return 1.0 - self.real_tokens / self.slots_before if self.slots_before else 0.0

    @property
    def idle(self) -> float:
        """Share of slots that ranks waited for, wait_slots / (wait_slots + slots)."""
        return self.wait_slots / (self.wait_slots + self.slots) if self.wait_slots else 0.0

    def metrics(self, prefix: str = "padmin/") -> dict[str, float | int]:
        """What loggers get: ratios of the sums, and the counts that mean something on their own.

        Loss tokens are left out where none were counted: nobody has said which tokens carry loss, or none do.
        """
        values: dict[str, float | int] = {
            "waste": self.waste,
            "waste_before": self.waste_before,
            "real_tokens": self.real_tokens,
            "loss_tokens": self.loss_tokens,
            "slots": self.slots,
            "micro_batches": self.micro_batches,
            "longest_row": self.longest_row,
            "dummies": self.dummies,
            "over_budget_rows": self.over_budget_rows,
            "idle": self.idle,
        }
        if not self.loss_tokens:
            del values["loss_tokens"]
        return {prefix + name: value for name, value in values.items()}

    def state_dict(self) -> dict[str, int]:
        """All counts by name, as plain integers."""
        return dict(zip(_NAMES, self.as_counts(), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces all counts; one that is missing becomes 0, as in a state from before it existed.

        Raises:
            PadMinError: a key is unknown or its value is no integer; nothing has been changed then.
        """
        for name, value in state.items():
            if name not in _NAMES:
                raise PadMinError(f"{name!r} is no count of PaddingStats; expected {', '.join(_NAMES)}")
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise PadMinError(f"{name}={value!r} must be an integer count")
        for name in _NAMES:
            setattr(self, name, int(state.get(name, 0)))


class PaddingMeter:
    """Counts of a whole run, and of the batches since they were logged last.

    Args:
        prefix: of the names in what `flush` returns.

    Attributes:
        total: counts of this rank so far.
        unlogged: those of them that no `flush` has returned yet.

    Example:
        >>> meter = PaddingMeter()
        >>> meter.add(micro_batches.stats)
        >>> logs.update(meter.flush(exchange_all))
    """

    def __init__(self, prefix: str = "padmin/") -> None:
        self.prefix = prefix
        self.total, self.unlogged = PaddingStats(), PaddingStats()

    def add(self, stats: PaddingStats) -> None:
        """Counts a batch of this rank."""
        self.total, self.unlogged = self.total + stats, self.unlogged + stats

    def drop_unlogged(self) -> None:
        """Leaves out of the next `flush` what has been counted until now; the total keeps it."""
        self.unlogged = PaddingStats()

    @overload
    def flush(
        self, exchange: Callable[[Sequence[int]], NDArray[np.int64]], *, is_copy: bool = False
    ) -> dict[str, float | int]: ...

    @overload
    def flush(
        self, exchange: Callable[[Sequence[int]], NDArray[np.int64] | None], *, is_copy: bool = False
    ) -> dict[str, float | int] | None: ...

    def flush(
        self, exchange: Callable[[Sequence[int]], NDArray[np.int64] | None], *, is_copy: bool = False
    ) -> dict[str, float | int] | None:
        """What the batches since the last time cost: counts over all ranks first, ratios last.

        To be called wherever the exchange is to be: on every rank, for a collective.

        Args:
            exchange: takes this rank's counts, returns those of all ranks.
            is_copy: this rank ran the batches of another one (in a tensor-parallel group, say), which count once.

        Returns:
            `PaddingStats.metrics`, the same on every rank; empty where no rank has counted a batch. None where the
            exchange gave None, since not all ranks came: all stays as it was then.
        """
        gathered = exchange((PaddingStats() if is_copy else self.unlogged).as_counts())
        if gathered is None:
            return None
        merged = PaddingStats.merge_ranks(gathered)
        self.unlogged = PaddingStats()
        return merged.metrics(self.prefix) if merged.batches else {}

    def state_dict(self, *, with_unlogged: bool = False) -> dict[str, dict[str, int]]:
        """The counts of this rank.

        Args:
            with_unlogged: also those that have not been logged, so that a resumed run logs them.
        """
        state = {"stats": self.total.state_dict()}
        return state | {"since_log": self.unlogged.state_dict()} if with_unlogged else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting. What the state does not have stays as it is.

        Raises:
            PadMinError: a count is unknown or no integer; nothing has been changed then.
        """
        loaded = {name: PaddingStats() for name in ("stats", "since_log") if name in state}
        for name, stats in loaded.items():
            stats.load_state_dict(state[name])
        self.total, self.unlogged = loaded.get("stats", self.total), loaded.get("since_log", self.unlogged)


_NAMES = tuple(f.name for f in fields(PaddingStats))
_MAXIMA = frozenset({"longest_row"})
