"""`LengthBucketBatchSampler`: batches of rows of similar length, for people who build their batches themselves.

    lengths -> buckets -> shuffled inside -> cut under the token budget -> in a random order -> dealt over ranks

What it costs: rows of a batch have similar lengths, so batches are correlated with whatever goes along with length,
and an optimizer step sees a narrower slice of the data than a random batch. Splitting random batches (`PadMinCallback`
and the other adapters) has no such cost: the rows of a step stay those that the loader drew. Buckets of several batches
keep the correlation small; accumulation over batches reduces it further.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from lightning_padmin.distributed import world_size
from lightning_padmin.errors import ConfigError, PadMinWarning

Ints = NDArray[np.int64]

_MOST = 2**40  # of a length or an option, so that sums stay far inside int64


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
        self.shuffle, self.seed, self.longest_first = shuffle, seed, longest_first
        self.count_multiple_of, self._place = count_multiple_of, (rank, world_size)
        self.epoch, self._done = 0, 0
        self._dealt: tuple[tuple[int, int], list[list[int]]] | None = None
        over = int((self._lengths > token_budget).sum())
        if over:
            warnings.warn(
                f"{over} of {len(self._lengths)} rows are longer than token_budget={token_budget}; each makes up a "
                f"batch by itself, the longest with {int(self._lengths.max())} slots",
                PadMinWarning,
                stacklevel=2,
            )

    @property
    def sampler(self) -> LengthBucketBatchSampler:
        """Itself: Lightning sets the epoch of a batch sampler's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The order of an epoch; to be called before each, as Lightning and Accelerate do."""
        if epoch != self.epoch:
            self.epoch, self._done = epoch, 0

    def __len__(self) -> int:
        """Batches of this rank in the whole epoch."""
        return len(self._own())

    def __iter__(self) -> Iterator[list[int]]:
        """From where a loaded state says, else from the beginning."""
        batches = self._own()
        for batch in batches[self._done :]:
            self._done += 1
            yield list(batch)
        self._done = 0

    def state_dict(self, done: int | None = None) -> dict[str, int]:
        """Where this rank is in its epoch.

        Args:
            done: batches that have been trained on; default: those that have been asked for. A loader with workers asks
                ahead, so there it must be given.
        """
        return {"epoch": self.epoch, "done": self._done if done is None else done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration gives the batches that remained.

        Raises:
            ConfigError: the state is of another epoch length.
        """
        epoch, done = int(state["epoch"]), int(state["done"])
        before, self.epoch = self.epoch, epoch
        if not 0 <= done <= len(self):
            self.epoch = before
            raise ConfigError(
                f"done={done}: an epoch has {len(self)} batches here; load with the same data and options"
            )
        self._done = done

    def _own(self) -> list[list[int]]:
        """This rank's batches of the epoch."""
        rank, world = self._place
        if rank is None or world is None:
            world = world_size()
            rank = dist.get_rank() if world > 1 else 0
        if self._dealt is None or self._dealt[0] != (self.epoch, world):
            self._dealt = (self.epoch, world), self._batches(world)
        return self._dealt[1][rank::world]

    def _batches(self, world: int) -> list[list[int]]:
        generator = np.random.default_rng((self.seed, self.epoch))
        groups = self._groups(generator)
        groups = _to_multiple(groups, self._lengths, world * self.count_multiple_of)
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
