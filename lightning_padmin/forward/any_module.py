"""Calls of a module that nobody knows, in chunks: planned by their own mask, tried before they are trusted.

What sizes suggest of inputs, and small calls show of outputs, is proven on the call itself: run as it came and in
chunks, without a gradient, without dropout and without a trace, both must give each row the same. That is done once
for each structure of inputs, and again where rows begin behind padding for the first time. A module that reads padding,
couples rows, draws random numbers or writes to itself is found here, and its calls run as they came.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from lightning_padmin.architectures import refuse_batch_statistics, screen
from lightning_padmin.batch import BatchSpec, Field
from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import AsItCame, PadMinError
from lightning_padmin.forward.arguments import (
    VARIANTS,
    Entries,
    Reading,
    Readings,
    entries_of,
    leaves,
    readings_of,
    rebuilt,
    value_at,
)
from lightning_padmin.forward.calls import CallMask, CallSite
from lightning_padmin.forward.padded_forward import PaddedForward
from lightning_padmin.forward.places import (
    LEAST_WIDTH,
    Places,
    joined,
    places_of,
    real_slots,
    row_alone,
    same,
    sizes,
    with_fill,
)
from lightning_padmin.microbatching import MicroBatcher, MicroBatches, SlotMap
from lightning_padmin.runtime import ModuleState, without_dropout

_MASK = "mask"
_MOST_STRUCTURES = 24
_MOST_TRIES = 3
_MOST_ALONE = 6
# Whose forward hooks are not the user's.
_FRAMEWORKS = ("torch", "lightning", "lightning_fabric", "accelerate", "deepspeed", "transformers", "peft")
# max |chunks - whole| / max |whole| up to which outputs are the same but for rounding.
_LIMITS = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.bfloat16: 0.1, torch.float16: 0.1}
_LIMIT, _HALF_LIMIT = 1e-3, 0.1

Key = tuple[Any, ...]


@dataclass(eq=False)
class Memory:
    """What has been found out about one module's calls.

    Attributes:
        readings: of inputs, that were right.
        places: of outputs, by the structure of the call; a text where it runs as it came, and why.
        tries: proofs in which it has written to itself.
    """

    readings: Readings = field(default_factory=dict)
    places: dict[Key, Places | str] = field(default_factory=dict)
    tries: int = 0


class _Writes(AsItCame):
    """The module writes to itself."""


_MEMORIES: WeakKeyDictionary[nn.Module, Memory] = WeakKeyDictionary()


class AnyCalls:
    """Runs calls of one module in chunks.

    Args:
        site: the module.
        config: the options.
    """

    def __init__(self, site: CallSite, config: PadMinConfig) -> None:
        self._site, self._module = site, site.module
        self._config = config
        # Which entry is what is found out here, and whatever is reduced is so behind the call.
        plain: dict[str, Any] = {"labels_key": None, "loss_mask_key": None, "mask_key": _MASK, "layout": "pad"}
        plain |= {"batch_schema": {}, "static_keys": (), "shape_buckets": None, "mode": "joint"}
        launch_cost = config.launch_cost if isinstance(config.launch_cost, int) else PadMinConfig.launch_cost
        plain |= {"launch_cost": launch_cost}
        self._batcher = MicroBatcher(replace(config.without_loss(), **plain))
        self._memory = _MEMORIES.setdefault(site.module, Memory())

    def speaks_with(self, other: AnyCalls | PaddedForward) -> None:
        """What one of the two has said, the other does not say again."""
        self._batcher.speaks_with(other._batcher)

    def mask_of(self, arguments: Mapping[str, Any]) -> CallMask | None:
        """What says what is padding in a call; None where nothing does."""
        masks = self._site.masks or (CallMask("attention_mask", "mask"),)  # of a model of transformers
        return next((mask for mask in masks if value_at(arguments, mask.argument) is not None), None)

    def run(
        self,
        original: Callable[..., Any],
        bound: inspect.BoundArguments,
        given: CallMask,
        *,
        anew: bool = False,
        always: bool = False,
    ) -> tuple[Any, MicroBatches] | None:
        """Outputs of a call, and its micro-batches; None where there is no padding to remove, or no mask after all.

        Args:
            original: the module's own forward.
            bound: its arguments.
            given: which of them says what is padding.
            anew: whether what was proven is proven again, since attributes and buffers may have changed.
            always: whether it runs in chunks where no padding goes, too.

        Raises:
            AsItCame: it cannot run in chunks.
        """
        refuse_batch_statistics(self._module)
        hooked = hooked_inside(self._module)
        if hooked is not None:
            raise AsItCame(hooked)
        entries = entries_of(bound.arguments, given, self._memory.readings)
        if entries is None or (bool(entries.real.all()) and not always):
            return None
        tried: list[Mapping[str, Reading]] = []
        why: list[str] = []
        for variant in VARIANTS:
            readings = readings_of(entries, self._memory.readings, self._config, variant)
            if readings in tried:
                continue
            tried.append(readings)
            found = self._run(_Call(original, bound, entries, readings), anew, always)
            if not isinstance(found, str):
                return found
            why.append(found)
        if why[0]:  # of the likeliest reading
            raise AsItCame(why[0])
        return None

    def _run(self, call: _Call, anew: bool, always: bool) -> tuple[Any, MicroBatches] | str:
        """Outputs and micro-batches; or why not, "" where there is nothing to remove or the next call may tell."""
        batches = self._planned(call)
        if batches.stats.slots >= batches.stats.slots_before and not (always and len(batches) > 1):
            return ""
        key = _key(self._module, call.entries, call.readings, rolled=bool(batches.table.start.any()))
        places = self._memory.places.get(key)
        if places is None or (anew and not isinstance(places, str)):
            places = self._found_out(call, batches, key)
        if isinstance(places, str):
            return places
        return joined(places, self._parts(call, batches), batches), batches

    def _parts(self, call: _Call, batches: MicroBatches) -> list[Any]:
        pairs = zip(batches, batches.slot_maps, strict=True)
        try:
            return [call.chunk(micro.batch, slots) for micro, slots in pairs]
        except (torch.OutOfMemoryError, PadMinError):
            raise
        except Exception as error:  # a row alone, say, whose first dimension it has dropped
            raise AsItCame(f"a part of it raises {type(error).__name__}: {error}") from error

    def _planned(self, call: _Call) -> MicroBatches:
        batch, fields = call.as_batch()
        spec = BatchSpec(mask_key=_MASK, labels_key=None, fields=fields)
        return self._batcher.prepare_made(lambda: batch, names=spec)

    def _found_out(self, call: _Call, batches: MicroBatches, key: Key) -> Places | str:
        memory = self._memory
        if len(memory.places) >= _MOST_STRUCTURES and key not in memory.places:
            return f"its inputs have had {_MOST_STRUCTURES} structures already"
        if int(batches.table.length.max()) < LEAST_WIDTH:
            return f"no row has {LEAST_WIDTH} positions, which is too few to tell its outputs' dimensions"
        try:
            screen(self._module, tolerate={"batch-norm", "balance-loss"}).refuse()
            found: Places | str = self._proven(call, batches)
        except _Writes as refused:
            found = str(refused)
            memory.tries += 1
            if memory.tries < _MOST_TRIES:  # what it makes once, in its first call, is there in the next one
                return ""
        except (AsItCame, PadMinError) as refused:
            found = str(refused)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the module's own, for parts of the call
            found = f"parts of it raise {type(error).__name__}: {error}"
        memory.places[key] = found
        if not isinstance(found, str):
            for path, reading in call.readings.items():
                leaf = call.entries.leaves[path]
                known = memory.readings.setdefault((path, getattr(leaf, "ndim", -1)), [])
                if reading not in known:
                    known.append(reading)
        return found

    def _proven(self, call: _Call, batches: MicroBatches) -> Places:
        """The places of outputs, after the call has given the same whole and in chunks.

        Raises:
            AsItCame: it has not.
        """
        state = ModuleState(self._module)
        torch.clear_autocast_cache()
        try:
            with state.watching(), without_dropout(self._module) as watch, torch.no_grad():
                whole = call.whole()
                state.restart()
                tried = sizes(int(batches.table.length.max()))
                places = places_of([call.small(batches, *each) for each in tried], tried)
                state.restart()
                parts = self._parts(call, batches)
                found = joined(places, parts, batches)
                state.restart()
                alone = [(slots, call.alone(batches, slots)) for slots in _rows_alone(batches)]
                changes = state.changes()
        finally:
            state.restore()
            torch.clear_autocast_cache()  # of weights without a graph, which the step would use
        if changes:
            raise _Writes(f"it writes to itself in each call ({changes[0].path})")
        return _compared(places, whole, found, (parts, alone), batches, watch.saw_half)


def _rows_alone(batches: MicroBatches) -> list[SlotMap]:
    """Rows of a few lengths, each without padding and twice, since a module may drop a dimension of one."""
    table = batches.table
    length = table.length[:, 0]
    lengths, first = np.unique(length, return_index=True)
    rows = first[lengths < table.widths[0]]
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, _MOST_ALONE).round().astype(int))] if len(rows) else rows
    pairs = [np.array([row, row], dtype=np.int64) for row in chosen]
    source = table.widths, len(table)
    return [SlotMap(pair, table.start[pair], table.length[pair], (int(length[pair[0]]),), *source) for pair in pairs]


def hooked_inside(module: nn.Module) -> str | None:
    """A module inside that has a forward hook of the user, in words; that of the outer one is called with the whole."""
    for name, child in module.named_modules():
        hooks = (*child._forward_hooks.values(), *child._forward_pre_hooks.values()) if name else ()
        if any(_package_of(hook) not in _FRAMEWORKS for hook in hooks):
            return f"{name!r} inside of it has a forward hook, which would be called with each chunk"
    return None


def _package_of(hook: Any) -> str:
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", type(hook).__module__)).split(".")[0]


def _compared(
    places: Places,
    whole: Any,
    found: Any,
    passes: tuple[Sequence[Any], Sequence[tuple[SlotMap, Any]]],
    batches: MicroBatches,
    saw_half: bool,
) -> Places:
    """The places, with what stands at padding, of outputs that are the same whole, in chunks, and for rows alone."""
    parts, alone = passes
    wanted, got, own = leaves(whole), leaves(found), [leaves(part) for part in parts]
    if list(wanted) != list(got) or type(whole) is not type(found):
        raise AsItCame("its outputs have other entries in chunks")
    filled: Places = {}
    for path, place in places.items():
        filled[path] = place
        name, one, other = f"its output {path!r}" if path else "its output", wanted[path], got[path]
        if place is None:
            if not same(one, other):
                raise AsItCame(f"{name} is another one in chunks")
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            raise AsItCame(
                f"{name} is {tuple(one.shape)} {one.dtype}, and in chunks {tuple(other.shape)} {other.dtype}"
            )
        real = real_slots(place, [part[path] for part in own], batches)
        value = _difference(other[real], one[real])
        for slots, outputs in alone:
            row, is_real = row_alone(path, place, leaves(outputs).get(path), slots, one)
            value = _worse(value, _difference(row[is_real], one.select(place.row_dim, int(slots.rows[0]))[is_real]))
        limit = max(_LIMITS.get(one.dtype, _LIMIT), _HALF_LIMIT if saw_half else 0.0)
        if not value <= limit:
            raise AsItCame(
                f"{name} differs in chunks (relative difference {value:.2g}, limit {limit:.0e}): it reads padding, "
                "couples rows, draws random numbers, or an input is not what its sizes suggest"
            )
        filled[path] = with_fill(place, one, real) if place.position_dims else place
    return filled


def _worse(one: float, other: float) -> float:
    return other if not other <= one else one  # nan is


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Max |found - wanted| / max |wanted| of what is finite; infinite where values are not of one kind."""
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return 0.0 if torch.equal(found, wanted) else float("inf")
    finite = wanted.isfinite()
    odd, own = wanted[~finite], found[~finite]
    if not bool(((odd == own) | (odd.isnan() & own.isnan())).all()) or not wanted[finite].numel():
        return 0.0 if bool(((odd == own) | (odd.isnan() & own.isnan())).all()) else float("inf")
    scale = float(wanted[finite].abs().max()) or 1.0
    return float((found[finite] - wanted[finite]).abs().max()) / scale


@dataclass(frozen=True, eq=False)
class _Call:
    """One call: its arguments, and what they are."""

    original: Callable[..., Any]
    bound: inspect.BoundArguments
    entries: Entries
    readings: Mapping[str, Reading]

    def as_batch(self) -> tuple[dict[str, Any], dict[str, Field]]:
        """What is planned: the entries that are gathered, by number, and the mask of real positions."""
        real = self.entries.real
        if any(reading.kind == "shared" for reading in self.readings.values()):
            # Positions that all rows share cannot be rolled for each: rows begin in the first column.
            real = real.flip(1).cumsum(1).flip(1) > 0
        batch, fields = {_MASK: real.long()}, {_MASK: Field("position")}
        for name, path in self._names.items():
            batch[name], fields[name] = self.entries.leaves[path], self.readings[path].field
        return batch, fields

    @property
    def _names(self) -> dict[str, str]:
        gathered = [path for path, reading in self.readings.items() if reading.kind in ("row", "position")]
        return {f"entry {k}": path for k, path in enumerate(gathered)}

    def whole(self) -> Any:
        """As it came, on copies: what the module writes to its inputs is found.

        Raises:
            AsItCame: it writes to them.
        """
        copies = {
            path: leaf.clone() if isinstance(leaf, Tensor) else leaf for path, leaf in self.entries.leaves.items()
        }
        versions = {path: leaf._version for path, leaf in copies.items() if isinstance(leaf, Tensor)}
        outputs = self._run(copies)
        written = [path for path, version in versions.items() if copies[path]._version != version]
        if written:
            raise AsItCame(f"it writes to its input {written[0]!r}")
        return outputs

    def chunk(self, batch: Mapping[str, Any], slots: SlotMap) -> Any:
        """Outputs of a chunk."""
        values = dict(self.entries.leaves)
        values |= {path: batch[name] for name, path in self._names.items()}
        return self._run(self._narrowed(values, slots.widths[0]))

    def _narrowed(self, values: dict[str, Any], width: int) -> dict[str, Any]:
        for path, reading in self.readings.items():
            if reading.kind == "shared":
                for dim in reading.position_dims:
                    values[path] = values[path].narrow(dim, 0, width)
        return values

    def alone(self, batches: MicroBatches, slots: SlotMap) -> Any:
        """Outputs of one row."""
        return self.chunk(slots.take_batch(batches.source, batches.schema), slots)

    def small(self, batches: MicroBatches, rows: int, width: int, longest: int) -> Any:
        """Outputs of a small call cut from this one: the longest rows, over again, and none of more than `longest`."""
        table = batches.table
        index = np.argsort(-table.length[:, 0], kind="stable")
        index = np.resize(index, rows).astype(np.int64)
        length = np.minimum(table.length[index], longest)
        slots = SlotMap(index, table.start[index], length, (width,), table.widths, len(table))
        values = dict(self.entries.leaves)
        for path, reading in self.readings.items():
            leaf = values[path]
            if isinstance(leaf, Tensor):
                values[path] = slots.take(leaf, reading.field)
            elif reading.kind == "row":
                values[path] = type(leaf)([leaf[k] for k in index])
        values[self.entries.mask] = self._small_mask(values[self.entries.mask], slots)
        return self._run(self._narrowed(values, width))

    def _small_mask(self, mask: Any, slots: SlotMap) -> Any:
        length = slots.length[:, 0]
        if self.entries.kind == "lengths":
            if isinstance(mask, Tensor):
                return torch.as_tensor(length, device=mask.device).to(mask.dtype)
            return type(mask)(length.tolist())
        real = torch.arange(slots.widths[0]) < torch.as_tensor(length)[:, None]
        real = real.to(mask.device).view(len(slots), *[1] * (mask.ndim - 2), slots.widths[0])
        if self.entries.kind == "padding" and mask.is_floating_point():
            return torch.zeros_like(mask).masked_fill(~real, float("-inf"))
        return (real if self.entries.kind == "mask" else ~real).expand(mask.shape).to(mask.dtype)

    def _run(self, values: Mapping[str, Any]) -> Any:
        call = inspect.BoundArguments(self.bound.signature, rebuilt(dict(self.bound.arguments), values))
        return self.original(*call.args, **call.kwargs)


def _key(module: nn.Module, entries: Entries, readings: Mapping[str, Reading], *, rolled: bool) -> Key:
    """What a proof holds for: whether it trains, which of its numbers are 0, and of each entry what it is."""
    parts: list[Any] = [module.training, rolled, entries.mask, entries.kind, _switches(module)]
    for path, leaf in entries.leaves.items():
        if path in readings:
            reading = readings[path]
            parts.append((path, reading.kind, reading.row_dim, reading.position_dims, getattr(leaf, "dtype", None)))
        else:
            parts.append((path, leaf if isinstance(leaf, bool | str | None) else _switch(leaf)))
    return tuple(parts)


def _switches(module: nn.Module) -> int:
    """A digest of which numbers among attributes, and among buffers of one number on the host, are 0."""
    found = []
    for number, child in enumerate(module.modules()):
        plain = [(name, each == 0) for name, each in vars(child).items() if isinstance(each, int | float)]
        held = [
            (name, not each.item())
            for name, each in child._buffers.items()
            if each is not None and each.ndim == 0 and each.device.type == "cpu"
        ]
        found.append((number, tuple(plain + held)))
    return hash(tuple(found))


def _switch(leaf: Any) -> Any:
    """What a number may switch on or off: only whether it is 0 counts, since rates change at every step."""
    return type(leaf), leaf == 0 if isinstance(leaf, int | float) else None


__all__ = ["AnyCalls", "hooked_inside"]
