"""`LengthBucketBatchSampler`: batches of rows of similar length, for people who build their batches themselves.

    lengths -> buckets -> shuffled inside -> cut under the token budget -> in a random order -> dealt over ranks

What it costs: rows of a batch have similar lengths, so batches are correlated with whatever goes along with length,
and an optimizer step sees a narrower slice of the data than a random batch. Splitting random batches (`PadMinCallback`
and the other adapters) has no such cost: the rows of a step stay those that the loader drew. Buckets of several batches
keep the correlation small; accumulation over batches reduces it further.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from lightning_padmin.distributed import world_size
from lightning_padmin.errors import ConfigError
from lightning_padmin.runtime import warn

Ints = NDArray[np.int64]

_MOST = 2**40  # of a length or an option, so that sums stay far inside int64
_FORMAT = 1  # of a saved state
# What the order of an epoch depends on, beside the epoch and the lengths.
_OPTIONS = (
    "token_budget",
    "batches_per_bucket",
    "shuffle",
    "seed",
    "pad_to_multiple_of",
    "max_rows",
    "longest_first",
)


class _Leg(NamedTuple):
    """A part of an epoch, dealt over one number of ranks, of which `done` batches have been given to each."""

    world_size: int
    count_multiple_of: int
    done: int


_OVER = (_Leg(0, 0, 0),)  # nothing of the epoch is left


@dataclass(eq=False)
class _Place:
    """Where one iterator stands.

    Attributes:
        before: parts of the epoch that other numbers of ranks have had.
        world_size: number of ranks that share what these left.
        done: batches of each rank that have been asked for.
        has_begun: whether any has been asked for; until then the other attributes mean nothing.
        is_over: whether the last one has been asked for; a loader that asks ahead may not have given it.
    """

    before: tuple[_Leg, ...] = ()
    world_size: int = 1
    done: int = 0
    has_begun: bool = False
    is_over: bool = False


class LengthBucketBatchSampler(Sampler[list[int]]):
    """Batches of row indices, for `DataLoader(dataset, batch_sampler=...)`.

    Every index comes once per epoch, over all ranks together; every rank gets the same number of batches, in every
    epoch; rows x longest row of a batch stay within the token budget. Nothing is dropped or repeated: where the number
    of batches is no multiple of the number of ranks, the largest batches are halved.

    Args:
        lengths: (N,) tokens of each row, at least 1.
        token_budget: most slots (rows x longest row, after rounding) of a batch. A longer row makes up a batch by
            itself, with one warning.
        batches_per_bucket: how many batches of rows a bucket holds; rows are shuffled inside of buckets. Larger: more
            mixing, more padding.
        shuffle: False: the same batches in every epoch, longest first.
        seed: of the order; the epoch is added.
        pad_to_multiple_of: to what the collator rounds widths.
        max_rows: most rows of a batch.
        longest_first: the batches with most slots come first, one on each rank, so that memory which does not suffice
            shows at once.
        rank: of this process, and `world_size`: default: those of the process group when iteration begins. With
            Accelerate's `prepare`, which deals batches over processes itself: 0 and 1, and `count_multiple_of`.
        world_size: number of ranks that share the data.
        count_multiple_of: the number of batches of a rank is a multiple of this, for whoever deals them further.

    Raises:
        ConfigError: lengths below 1, an option out of range, fewer rows than ranks.

    Example:
        >>> sampler = LengthBucketBatchSampler([9, 3, 8, 2, 2], token_budget=18, shuffle=False)
        >>> list(sampler)
        [[0, 2], [1, 3, 4]]
    """

    def __init__(
        self,
        lengths: ArrayLike,
        token_budget: int,
        *,
        batches_per_bucket: int = 4,
        shuffle: bool = True,
        seed: int = 0,
        pad_to_multiple_of: int = 1,
        max_rows: int | None = None,
        longest_first: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        count_multiple_of: int = 1,
    ) -> None:
        self._lengths = _checked_lengths(lengths, pad_to_multiple_of)
        least = {"token_budget": token_budget, "batches_per_bucket": batches_per_bucket, "max_rows": max_rows}
        for name, value in (least | {"count_multiple_of": count_multiple_of, "world_size": world_size}).items():
            may_be_none = name in ("max_rows", "world_size") and value is None
            if not may_be_none and not (_is_integer(value) and 1 <= value <= _MOST):
                raise ConfigError(f"{name}={value!r}: expected an integer of at least 1, and at most {_MOST}")
        if not (_is_integer(seed) and seed >= 0):
            raise ConfigError(f"seed={seed!r}: expected an integer of at least 0")
        if rank is not None and not _is_integer(rank):
            raise ConfigError(f"rank={rank!r}: expected an integer")
        if (rank is None) != (world_size is None) or (rank is not None and not 0 <= rank < (world_size or 1)):
            raise ConfigError(f"rank={rank!r}, world_size={world_size!r}: give both, or neither, with 0 <= rank < size")
        self.token_budget, self.batches_per_bucket, self.max_rows = token_budget, batches_per_bucket, max_rows
        self.pad_to_multiple_of = pad_to_multiple_of
        self.shuffle, self.seed, self.longest_first = shuffle, seed, longest_first
        self.count_multiple_of, self._place = count_multiple_of, (rank, world_size)
        self.epoch = 0
        self._loaded: tuple[_Leg, ...] = ()  # where the next iteration begins, once
        self._newest: _Place | None = None
        self._dealt: tuple[tuple[int, tuple[_Leg, ...], int], list[list[int]]] | None = None
        self._digest: tuple[tuple[int, int, int], str] | None = None
        over = int((self._lengths > token_budget).sum())
        if over:
            warn(
                f"{over} of {len(self._lengths)} rows are longer than token_budget={token_budget}; each makes up a "
                f"batch by itself, the longest with {int(self._lengths.max())} slots"
            )

    @property
    def sampler(self) -> LengthBucketBatchSampler:
        """Itself: Lightning sets the epoch of a batch sampler's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The order of an epoch; to be called before each, as Lightning and Accelerate do."""
        if epoch != self.epoch:
            self.epoch, self._loaded, self._newest = epoch, (), None

    def __len__(self) -> int:
        """Batches of this rank in the whole epoch."""
        rank, world = self._rank()
        return len(self._order((), world)[rank::world])

    def __iter__(self) -> Iterator[list[int]]:
        """From where a loaded state says, once; else from the beginning. Iterators know nothing of each other."""
        place = _Place()
        self._newest = place
        return self._batches_from(place)

    def _batches_from(self, place: _Place) -> Iterator[list[int]]:
        rank, world = self._rank()
        place.before, place.done = self._continued(world)
        batches = self._order(place.before, world)[rank::world]
        place.world_size, place.has_begun, self._loaded = world, True, ()
        if self._newest is None:  # the epoch was set after this iterator was made
            self._newest = place
        for batch in batches[place.done :]:
            place.done += 1
            yield list(batch)
        place.is_over = True

    def state_dict(self, done: int | None = None) -> dict[str, Any]:
        """Where the newest iterator is in its epoch, and all that its order depends on. The same on every rank.

        Args:
            done: batches that have been trained on since the epoch began (since the number of ranks has changed, if it
                has); default: those that have been asked for. A loader that asks ahead (one with workers, or
                prepared by Accelerate) needs it. With `count_multiple_of`, those of all who share them.

        Raises:
            ConfigError: `done` is no number of batches of the epoch.
        """
        place = self._newest
        world = place.world_size if place is not None and place.has_begun else self._rank()[1]
        before, asked = (place.before, place.done) if place is not None and place.has_begun else self._continued(world)
        if done is None and place is not None and place.is_over:
            before, asked = (), 0  # the next iteration is of a whole epoch
        done = asked if done is None else done
        is_middle = bool(before) or done != 0
        count = len(self._order(before, world)) // world if is_middle else None
        if not _is_count(done) or (count is not None and done > count):
            raise ConfigError(f"done={done!r}: expected an integer of at least 0, and at most {count} batches")
        first = before[0] if before else _Leg(world, self.count_multiple_of, 0)
        return {
            "format": _FORMAT,
            "epoch": int(self.epoch),
            "done": int(done),
            "batches": count,
            "world_size": world,
            "count_multiple_of": self.count_multiple_of,
            "before": [list(leg) for leg in before],
            "order": self._digest_of(first.world_size, first.count_multiple_of) if is_middle else None,
            "rows": len(self._lengths),
            "lengths": _digest(self._lengths),
            **{name: getattr(self, name) for name in _OPTIONS},
            "numpy": np.__version__,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration gives the batches that remained.

        A state of the beginning or the end of an epoch can be loaded with any data and options. In the middle, what
        remains is dealt over the ranks that there are now, and everything else must give the same order.

        Raises:
            ConfigError: malformed, or rows would come twice or never: what differs, both values, and the fix. Nothing
                has changed then.
        """
        epoch, legs, is_over = self._read(state)
        kept = self.epoch, self._loaded
        self.epoch, self._loaded = epoch, _OVER if is_over else legs
        try:
            if legs and not is_over:
                self._refuse_another_order(state, legs[0])
                self._deal_the_rest()
        except ConfigError:
            self.epoch, self._loaded = kept
            raise
        self._newest = None

    def _deal_the_rest(self) -> None:
        """Refuses what cannot be dealt now, where the number of ranks is known already."""
        world = self._rank()[1]
        try:
            self._order(self._continued(world)[0], world)
        except ConfigError as error:
            raise ConfigError(f"what is left of epoch {self.epoch}: {error}. {_fix(self.epoch)}") from None

    def _read(self, state: Mapping[str, Any]) -> tuple[int, tuple[_Leg, ...], bool]:
        """Epoch, the parts of it that have been given, and whether nothing is left."""
        if not isinstance(state, Mapping):
            raise ConfigError(f"state={state!r}: expected what state_dict() has returned")
        for name in ("epoch", "done"):
            if not _is_count(state.get(name)):
                raise ConfigError(f"{name}={state.get(name)!r} in the state: expected an integer of at least 0")
        epoch, done, before = int(state["epoch"]), int(state["done"]), state.get("before", [])
        if done == 0 and not before:
            return epoch, (), False
        if "format" not in state and done > len(self):  # as many in every epoch
            raise ConfigError(f"done={done}: an epoch has {len(self)} batches here, so the state is of other data")
        if "format" not in state:
            raise ConfigError(
                f"the state says epoch={epoch}, done={done} and nothing else, as version 0.1 has saved it: whether "
                "data, options and number of ranks are the same cannot be told. If they are: sampler.set_epoch("
                f"{epoch}), then sampler.load_state_dict(sampler.state_dict(done={done})). {_fix(epoch)}"
            )
        if state["format"] != _FORMAT:
            raise ConfigError(
                f"format={state['format']!r} in the state: this version reads {_FORMAT}. Upgrade lightning-padmin. "
                f"{_fix(epoch)}"
            )
        for name in ("world_size", "count_multiple_of", "batches"):
            if not _is_count(state.get(name), least=1):
                raise ConfigError(f"{name}={state.get(name)!r} in the state: expected an integer of at least 1")
        parts = list(before) if isinstance(before, Sequence) and not isinstance(before, str) else [before]
        for leg in parts:
            is_leg = isinstance(leg, Sequence) and len(leg) == len(_Leg._fields)
            if not (is_leg and _is_count(leg[0], 1) and _is_count(leg[1], 1) and _is_count(leg[2], 0)):
                raise ConfigError(f"before={before!r} in the state: expected parts (ranks, multiple, batches)")
        if not isinstance(state.get("order"), str):
            raise ConfigError(f"order={state.get('order')!r} in the state: expected a digest")
        if done > state["batches"]:
            raise ConfigError(f"done={done} in the state: there were batches={state['batches']} in that epoch")
        last = _Leg(int(state["world_size"]), int(state["count_multiple_of"]), done)
        return epoch, (*(_Leg(*map(int, leg)) for leg in parts), last), done == state["batches"]

    def _refuse_another_order(self, state: Mapping[str, Any], first: _Leg) -> None:
        if self._digest_of(first.world_size, first.count_multiple_of) == state["order"]:
            return
        own = {name: getattr(self, name) for name in _OPTIONS} | {"rows": len(self._lengths)}
        own |= {"lengths": _digest(self._lengths), "numpy": np.__version__}
        other = [name for name, value in own.items() if state.get(name) != value]
        if "pad_to_multiple_of" in other and "lengths" in other:
            other.remove("lengths")  # rounded ones
        told = "; ".join(f"{name}: {state.get(name)!r} when it was saved, {own[name]!r} here" for name in other)
        raise ConfigError(
            f"the state is from the middle of epoch {self.epoch}, whose batches are others here, so rows would come "
            f"twice or never ({told or 'this version makes another order'}). Load it with the same data and options. "
            f"{_fix(self.epoch)}"
        )

    def _rank(self) -> tuple[int, int]:
        """Of this process, and how many there are."""
        rank, world = self._place
        if rank is None or world is None:
            world = world_size()
            rank = dist.get_rank() if world > 1 else 0
        return rank, world

    def _continued(self, world: int) -> tuple[tuple[_Leg, ...], int]:
        """For the next iteration: the parts before, and how many batches of this part have been given already."""
        if self._loaded == _OVER:
            return (), len(self._order((), world)) // world
        *before, last = self._loaded or (_Leg(world, self.count_multiple_of, 0),)
        if last[:2] == (world, self.count_multiple_of):
            return tuple(before), last.done
        return self._loaded, 0

    def _order(self, before: tuple[_Leg, ...], world: int) -> list[list[int]]:
        """Batches of all ranks in turn: of the epoch, or of what the parts before have left."""
        key = (self.epoch, before, world)
        if self._dealt is None or self._dealt[0] != key:
            legs = [*before, _Leg(world, self.count_multiple_of, 0)]
            batches = self._batches(legs[0].world_size, legs[0].count_multiple_of)
            for leg, following in pairwise(legs):
                rest = [np.array(batch) for batch in batches[leg.done * leg.world_size :]]
                if rest:
                    rest = _to_multiple(rest, self._lengths, following.world_size * following.count_multiple_of)
                batches = [batch.tolist() for batch in rest]
            self._dealt = key, batches
        return self._dealt[1]

    def _digest_of(self, world: int, multiple: int) -> str:
        """Of the batches of an epoch, and of the lengths that halving goes by."""
        key = (self.epoch, world, multiple)
        if self._digest is None or self._digest[0] != key:
            batches = self._order((), world) if multiple == self.count_multiple_of else self._batches(world, multiple)
            sizes = np.array([len(batch) for batch in batches], dtype=np.int64)
            self._digest = key, _digest(self._lengths, sizes, np.concatenate(batches).astype(np.int64))
        return self._digest[1]

    def _batches(self, world: int, multiple: int) -> list[list[int]]:
        generator = np.random.default_rng((self.seed, self.epoch))
        groups = self._groups(generator)
        groups = _to_multiple(groups, self._lengths, world * multiple)
        order = generator.permutation(len(groups)) if self.shuffle else np.arange(len(groups))
        if self.longest_first:
            slots = np.array([self._slots(group) for group in groups])
            first = np.argsort(-slots, kind="stable")[:world]
            order = np.concatenate([first, order[~np.isin(order, first)]])
        return [groups[k].tolist() for k in order]

    def _groups(self, generator: np.random.Generator) -> list[Ints]:
        """Rows from long to short, bucket by bucket, each in a random order and cut into batches of as many rows.

        How many rows that is says the longest row of the bucket, so that every epoch has as many batches.
        """
        rows = generator.permutation(len(self._lengths)) if self.shuffle else np.arange(len(self._lengths))
        rows = rows[np.argsort(-self._lengths[rows], kind="stable")]
        groups: list[Ints] = []
        start = 0
        while start < len(rows):
            size = max(1, self.token_budget // int(self._lengths[rows[start]]))
            size = size if self.max_rows is None else min(size, self.max_rows)
            bucket = rows[start : start + size * (self.batches_per_bucket if self.shuffle else 1)]
            # Rows that are much shorter would be as few to a batch as the longest one.
            bucket = bucket[4 * self._lengths[bucket] >= 3 * self._lengths[bucket[0]]]
            start += len(bucket)
            if self.shuffle:
                bucket = generator.permutation(bucket)
            groups += [bucket[k : k + size] for k in range(0, len(bucket), size)]
        return groups

    def _slots(self, group: Ints) -> int:
        return len(group) * int(self._lengths[group].max())


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object, least: int = 0) -> bool:
    """An integer of at least so much, numpy's included."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= int(value) <= _MOST


def _digest(*arrays: Ints) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return found.hexdigest()[:16]


def _fix(epoch: int) -> str:
    return (
        f"Or load {{'epoch': {epoch}, 'done': 0}} to begin this epoch again, {{'epoch': {epoch + 1}, 'done': 0}} to go "
        "on with the next one"
    )


def _checked_lengths(lengths: ArrayLike, multiple: int) -> Ints:
    """Rounded lengths (N,) int64."""
    try:
        array = np.asarray(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"lengths: expected integers as (rows,) ({error})") from None
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ConfigError(f"lengths: expected integers as (rows,), got shape {array.shape} of {array.dtype}")
    if array.min() < 1:
        raise ConfigError(f"lengths[{int(array.argmin())}]={int(array.min())}: a row has at least one token")
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise ConfigError(f"pad_to_multiple_of={multiple!r}: expected an integer of at least 1")
    if multiple > _MOST or array.max() > _MOST:
        raise ConfigError(f"lengths up to {int(array.max())}, pad_to_multiple_of={multiple}: expected at most {_MOST}")
    rounded: Ints = -(-array.astype(np.int64) // multiple) * multiple
    return rounded


def _to_multiple(groups: Sequence[Ints], lengths: Ints, multiple: int) -> list[Ints]:
    """Halves the batches with most slots until there is a multiple of some number of them."""
    found = list(groups)
    rows = sum(map(len, found))
    if rows < multiple:
        raise ConfigError(f"{rows} rows cannot be dealt over {multiple} ranks: every rank needs a batch")
    missing = -len(found) % multiple
    if len(found) + missing > rows:
        raise ConfigError(f"{rows} rows make up no multiple of {multiple} batches within the budget: raise the budget")
    for _ in range(missing):
        sizes = [len(group) * int(lengths[group].max()) if len(group) > 1 else 0 for group in found]
        largest = found.pop(int(np.argmax(sizes)))
        largest = largest[np.argsort(-lengths[largest], kind="stable")]
        found += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return found


__all__ = ["LengthBucketBatchSampler"]
