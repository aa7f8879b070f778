"""What kind of loss this is, told from its autograd graph: a term that appears, or a factor that leaves 0, is another.

A fingerprint is a *set* of facts, each an operation or one thing that an operation saved for its backward pass. So it
does not depend on order or number: thousands of equal steps of a recurrent model, or a sum over however many terms,
give what one of each gives, and a batch of another shape gives the same. What a factor is does not matter, only whether
it is 0 (that is noted, for up to four of a kind); which side of a kink the loss lies on does (flooding), and whether
a selection leaves something out (top-k). So a factor that leaves 0 is a fact less: compare keys, not what is new.

Where the model begins. The walk goes from the loss down and does not look below an operation that multiplies, embeds or
normalises with a trained parameter (the head's product, a layer norm, an embedding, a fused loss that holds the head's
weight): below is the model, for which architectures and checks of their own exist. No hooks are needed, and nothing has
to be known about the model's outputs. Parameters in elementwise operations do not end the walk, since there they are
penalties (`p.pow(2).sum()`), temperatures and learned weights of terms. Where the layers on top are frozen (LoRA, a
frozen head), the walk goes on into the model. There and in long sums, the same ways from one operation to another come
again and again (layers of a deep model, steps of a recurrent one, terms). Those gone least often are gone first, and
none more than a few times; so what is left out is repetition, the set is the same for short and for long batches, and
`most`, the number of operations looked at, is hardly ever reached.

What it does not see: values of tensors with more than one entry (weights of tokens, a mask, a clamp that is active for
some) but coefficients of terms that were stacked, what a compiled or fused function does inside (its name is all there
is), what a checkpoint recomputes, factors in a sum beyond its first 16 terms of one kind, and terms that consist only
of operations that the loss had before, on outputs of the same width.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_padmin.runtime import is_freed

_ZERO, _ONE, _NEGATIVE, _POSITIVE = "zero", "one", "negative", "not negative"
_WHOLE, _PARTIAL = "all entries", "some entries"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Saved settings that do not depend on a batch's shape; wide integers are negative ones.
_SETTINGS = _words(
    "accumulate approximate blank correction dim dim0 dim1 dim2 dims ignore_index keepdim mode normalization ord p "
    "reduce reduction rounding_mode zero_infinity"
)
# Numbers that say another thing when they are exactly 1: (mean)**2 couples rows, (mean)**1 does not.
_POWERS = frozenset({"exponent", "ord", "p"})
# Saved tensors that switch a term on and off.
_FACTORS = {
    "Addcdiv": ("tensor1",),
    "Addcmul": ("tensor1", "tensor2"),
    "Div": ("self",),
    "Dot": ("self", "tensor"),
    "Lerp": ("weight",),
    "MaskedFill": ("mask",),
    "Mul": ("self", "other"),
    "NllLoss": ("total_weight",),
    "NllLoss2D": ("total_weight",),
    "Pow": ("exponent",),
    "Relu": ("result",),
    "Where": ("condition",),
}
# Saved tensors of which the side of a kink counts, and what they are held against (0 if nothing).
_KINKS = {
    "Abs": ("self",),
    "Clamp": ("self", "min", "max"),
    "ClampMax": ("self", "max"),
    "ClampMin": ("self", "min"),
    "Elu": ("self",),
    "Hardtanh": ("self", "min_val", "max_val"),
    "LeakyRelu": ("self",),
    "Maximum": ("self", "other"),
    "Minimum": ("self", "other"),
    "Threshold": ("self", "threshold"),
}
_SELECTIONS = _words("Gather Index IndexSelect MaskedSelect Slice Take Topk")
_MODEL = _words(
    "Addbmm Addmm Addmv Baddbmm Bmm Cdist Convolution CudnnBatchNorm CudnnConvolution CudnnRnn Embedding EmbeddingBag "
    "EuclideanDist FusedRmsNorm GroupedMm Linear MiopenBatchNorm MiopenRnn MkldnnConvolution MkldnnLinear "
    "MkldnnRnnLayer Mm Mv NativeBatchNorm NativeBatchNormLegit NativeGroupNorm NativeLayerNorm ScaledGroupedMm "
    "SparseAddmm ThnnFusedGruCell ThnnFusedLstmCell"
)
# What lies between a parameter and the operation that uses it, under autocast and sharding too.
_VIEWS = _words(
    "Alias AsStrided Clone Expand Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze T ToCopy Transpose "
    "UnsafeView Unsqueeze View"
)
# How memory lies, which is no part of a loss: reshaping is a view of one row, and a copy of several.
_LAYOUT = _words("Alias Clone ReshapeAlias UnsafeView View")
_WEIGHT = {"Addmm": 2, "Mm": 1}  # which input is the weight of a linear layer
# How often one way from an operation to another is gone, and below products, of which most are a frozen model's.
_REPEATS, _REPEATS_INSIDE = 16, 4
_MOST_ZEROS = 4
_REDUCTIONS = {"0": "'none'", "1": "'mean'", "2": "'sum'"}


_Key = tuple[str, str, str, str]


class Fact(NamedTuple):
    """One thing about a loss: an operation that it has (`name` empty), or what one of them saved.

    Attributes:
        operation: as autograd names it.
        name: of what is saved.
        state: what it is, in words.
        operand: what a factor is put to.
    """

    operation: str
    name: str = ""
    state: str = ""
    operand: str = ""

    def __str__(self) -> str:
        if not self.name:
            return self.operation
        if self.name == "selected":
            return f"{self.operation} that {'takes all' if self.state == _WHOLE else 'leaves'} entries" + (
                "" if self.state == _WHOLE else " out"
            )
        if self.state in (_NEGATIVE, _POSITIVE):
            number = "number" if self.name == "self" else f"number minus its {self.name.removeprefix('self-')}"
            return f"{self.operation} of a {self.state.replace('not negative', 'positive')} {number}"
        if self.is_factor:
            return self.with_factor("is")
        state = _REDUCTIONS.get(self.state, self.state) if self.name == "reduction" else self.state
        return f"{self.operation} with {self.name}={state}"

    @property
    def is_factor(self) -> bool:
        """Whether it says that a factor is 0 (or an exponent 1); others leave no fact."""
        return self.state.startswith((_ZERO, _ONE))

    def with_factor(self, verb: str) -> str:
        """In words, with "is" or "was"."""
        operand = f" of {self.operand}" if self.operand else ""
        number = self.state.replace(_ZERO, "0").replace(_ONE, "1")
        return f"{self.operation}{operand} with a factor ({self.name}) that {verb} {number}"


class _Unread(NamedTuple):
    """A number on an accelerator, and what of it counts: whether it is 0, or its sign."""

    operation: str
    name: str
    operand: str
    judge: Callable[[float], str]


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Facts about a loss; keeps nothing of its graph. Those of two losses are compared by `key`.

    Attributes:
        static: those known without waiting for an accelerator.
        scalars: (n,) copies of numbers that lie on accelerators, one tensor for each device and dtype.
    """

    static: frozenset[Fact]
    scalars: tuple[Tensor, ...] = ()
    _unread: tuple[_Unread, ...] = field(default=(), repr=False)

    def resolve(self) -> frozenset[Fact]:
        """All facts. Reads what lies on an accelerator, in one copy for each device, the first time it is asked."""
        return self._facts

    @cached_property
    def _facts(self) -> frozenset[Fact]:
        by_device: dict[torch.device, list[Tensor]] = {}
        for each in self.scalars:
            by_device.setdefault(each.device, []).append(each.to(_wide(each.device)))
        values = [value for parts in by_device.values() for value in torch.cat(parts).tolist()]
        return self.static.union(
            _counted(
                (what.operation, what.name, what.judge(value), what.operand)
                for what, value in zip(self._unread, values, strict=True)
            )
        )

    @cached_property
    def key(self) -> str:
        """Twelve hexadecimal digits, the same in every process."""
        return hashlib.blake2s(repr(sorted(map(tuple, self.resolve()))).encode(), digest_size=6).hexdigest()


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def what_changed(before: Fingerprint, after: Fingerprint) -> str:
    """What the loss `after` has that the one `before` had not, in words; else what it no longer has; else ""."""
    old, new = before.resolve(), after.resolve()
    gone, fresh = _main(old - new), _main(new - old)
    left = {(fact.operation, fact.name, fact.operand): fact for fact in gone if fact.is_factor}
    if not fresh and (not left or any(not fact.name for fact in gone)):  # terms are gone as a whole
        return ", ".join(f"no longer {fact}" for fact in gone)
    # Sorted: of several zeros of one kind the last is the largest number of them.
    return ", ".join([*(fact.with_factor("was") for fact in left.values()), *map(str, fresh)])


def _counted(found: Iterable[_Key]) -> frozenset[Fact]:
    """Each once; but factors that are 0 up to `_MOST_ZEROS` times, since terms of one kind may come in one by one."""
    counts: dict[_Key, int] = {}
    for each in found:
        if each[2] or not each[1]:
            counts[each] = counts.get(each, 0) + 1
    facts = set()
    for (operation, name, state, operand), count in counts.items():
        facts.add(Fact(operation, name, state, operand))
        if state == _ZERO:
            several = (f"{_ZERO} ({number} times)" for number in range(2, min(count, _MOST_ZEROS) + 1))
            facts.update(Fact(operation, name, each, operand) for each in several)
    return frozenset(facts)


def _main(facts: frozenset[Fact]) -> list[Fact]:
    """Without the settings of an operation that is new as a whole."""
    whole = {fact.operation for fact in facts if not fact.name}
    return sorted(
        fact
        for fact in facts
        if not fact.name or fact.operation not in whole or fact.is_factor or fact.state in (_NEGATIVE, _PARTIAL)
    )


def fingerprint(loss: Tensor, *, most: int = 512, stop: Collection[Any] = ()) -> Fingerprint:
    """What kind of loss this is. Call it before the backward pass, which frees what is looked at.

    It runs no hooks, recomputes no checkpoint, does not wait for an accelerator, and never fails: an operation that
    cannot be looked into is its name.

    Args:
        loss: with its graph; without one the fingerprint is empty.
        most: operations that are looked at.
        stop: `grad_fn`s of the model's outputs, where they are known; these and what is below is left out.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return _fingerprint(loss, most, frozenset(stop))


def _fingerprint(loss: Tensor, most: int, stop: frozenset[Any]) -> Fingerprint:
    """Outside of modes: under one, a saved number does not lie where it is looked for."""
    found: list[_Key] = []
    waiting: dict[tuple[torch.device, torch.dtype], list[tuple[_Unread, Tensor]]] = {}
    for node, how in _walk(loss.grad_fn, most, stop):
        operation = how.name or node.name()
        if how.is_layout:
            continue
        found.append((operation, "", "", ""))
        for name, value, judge, *operand in _saved(node, how) if how.readers else ():
            to = operand[0] if operand else ""
            if not isinstance(value, Tensor):
                found.append((operation, name, judge(value), to))
            elif _is_near(value):
                found.append((operation, name, judge(value.item()), to))
            else:
                entry = (_Unread(operation, name, to, judge), value)
                waiting.setdefault((value.device, value.dtype), []).append(entry)
    by_device = sorted(waiting.items(), key=lambda item: str(item[0]))
    with torch.no_grad():
        stacks = tuple(torch.stack([value.reshape(()) for _, value in entries]) for _, entries in by_device)
    unread = tuple(what for _, entries in by_device for what, _ in entries)
    return Fingerprint(_counted(found), stacks, unread)


def _is_near(value: Tensor) -> bool:
    """Whether reading it waits for nobody."""
    return value.device.type == "cpu"


def _walk(root: Any, most: int, stop: frozenset[Any]) -> Iterator[tuple[Any, _How]]:
    """At most `most` nodes from `root` down, those first whose way from their parent was gone least often."""
    seen: set[Any] = {*stop, None}
    gone: dict[tuple[_How, _How, bool], int] = {}
    queue: list[tuple[int, int, Any, _How, bool]] = [] if root in seen else [(0, 0, root, _of(root), False)]
    seen.add(root)
    serial = looked = 0
    while queue and looked < most:
        _, _, node, how, is_inside = heapq.heappop(queue)
        looked += 1
        yield node, how
        if how.may_begin_model and _begins_model(node, how):
            continue
        is_inside = is_inside or how.may_begin_model
        for below, _ in node.next_functions:
            if below in seen:
                continue
            seen.add(below)
            below_how = _of(below)
            if below_how.is_leaf:
                continue
            way = (how, below_how, is_inside)
            times = gone.get(way, 0)
            if times == (_REPEATS_INSIDE if is_inside else _REPEATS):
                continue
            gone[way] = times + 1
            serial += 1
            heapq.heappush(queue, (times, serial, below, below_how, is_inside))


def _begins_model(node: Any, how: _How) -> bool:
    """Whether it multiplies, embeds or normalises with a trained parameter."""
    if how.is_python:
        return any(_is_leaf(below) and below.variable.ndim > 1 for below, _ in node.next_functions)
    return any(_is_parameter(below) for below, _ in node.next_functions)


def _is_leaf(node: Any) -> bool:
    return node is not None and _of(node).is_leaf


def _is_parameter(node: Any) -> bool:
    while node is not None:
        how = _of(node)
        if how.is_leaf:
            return True
        if not how.is_view:
            return False
        node = node.next_functions[0][0] if node.next_functions else None
    return False


# What a node saved


_Facts = Iterator[tuple[Any, ...]]  # name, value, how it is judged, and what a factor is put to


@dataclass(frozen=True, eq=False)
class _How:
    """How nodes of a type are read.

    Attributes:
        name: of the operation; empty if nodes of the type have names of their own.
        operation: that without `Backward0`.
        is_leaf: the end of a graph.
        is_view: may lie between a parameter and the operation that uses it.
        is_layout: leaves numbers and their order as they are.
        is_python: an `autograd.Function`, of which the name is all that is looked at.
        may_begin_model: where it is given a parameter, the model begins.
        readers: what looks at what a node saved.
        plain: names of saved settings and numbers.
        factors: names of saved tensors that switch a term on and off.
        kink: the name of the saved tensor of which the side counts, and of its bounds.
        optional: names of saved tensors that are there or not.
    """

    name: str
    operation: str
    is_leaf: bool = False
    is_view: bool = False
    is_layout: bool = False
    is_python: bool = False
    may_begin_model: bool = False
    readers: tuple[Callable[[Any, _How], _Facts], ...] = ()
    plain: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()
    kink: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_known: dict[type, _How] = {}


def _of(node: Any) -> _How:
    kind = type(node)
    how = _known.get(kind)
    if how is None:
        how = _known[kind] = _learnt(node, kind)
    return how


def _learnt(node: Any, kind: type) -> _How:
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return _How(node.name(), node.name(), is_python=True, may_begin_model=True)
    name = kind.__name__
    if name == "AccumulateGrad":
        return _How(name, name, is_leaf=True)
    operation = name.rstrip("0123456789").removesuffix("Backward")
    if operation == name:  # no type of its own
        return _How("" if name != node.name() else name, name)
    saved = {each.removeprefix("_saved_") for each in dir(kind) if each.startswith("_saved_")}
    tensors = {each for each in saved if hasattr(kind, f"_raw_saved_{each}")}
    plain = tuple(each for each in sorted(saved - tensors) if "sym_" not in each)
    factors = tuple(each for each in _FACTORS.get(operation, ()) if each in tensors)
    kink = _KINKS.get(operation, ())
    optional = tuple(sorted(tensors & {"weight", "pos_weight"})) if "Loss" in name or "CrossEntropy" in name else ()
    readers = {
        _settings: bool(plain),
        _factors: bool(factors),
        _kinks: bool(kink) and kink[0] in tensors,
        _selected: operation in _SELECTIONS,
        _width: operation in _WEIGHT,
        _given: bool(optional),
    }
    return _How(
        name,
        operation,
        is_view=operation in _VIEWS,
        is_layout=operation in _LAYOUT,
        may_begin_model=operation in _MODEL,
        readers=tuple(reader for reader, is_used in readers.items() if is_used),
        plain=plain,
        factors=factors,
        kink=kink,
        optional=optional,
    )


def _saved(node: Any, how: _How) -> list[tuple[Any, ...]]:
    """Each thing that counts, see `_Facts`; values are plain, or tensors of one entry."""
    found: list[tuple[Any, ...]] = []
    for reader in how.readers:
        try:
            found.extend(reader(node, how))
        except Exception:  # a freed graph, symbolic sizes, another release: then the name must do
            continue
    return found


def _settings(node: Any, how: _How) -> _Facts:
    for name in how.plain:
        value = getattr(node, f"_saved_{name}")
        if value is None:
            continue
        if name in _SETTINGS or isinstance(value, bool | str):
            yield name, _unwrapped(value), str
        if isinstance(value, float) or name in _POWERS or name == "alpha":
            yield name, value, _power if name in _POWERS else _zero, _operand(node, name)


def _factors(node: Any, how: _How) -> _Facts:
    for name in how.factors:
        value = _tensor(node, name)
        if value is None:
            continue
        if value.ndim == 0 or (value.numel() == 1 and _is_of_scalars(node)):
            yield name, value, _power if name == "exponent" else _zero, _operand(node, name)
        elif value.ndim == 1 and len(value) <= _REPEATS and _is_of_terms(node):
            for number, each in enumerate(value, 1):
                place = f"{name}, term {number}" if len(value) <= _MOST_ZEROS else name
                yield place, each, _zero, _operand(node, name)


def _operand(node: Any, name: str) -> str:
    """What the factor `name` is put to; of a sum, the second term."""
    inputs = [below for below, _ in node.next_functions]
    if len(inputs) == 2 and name in ("other", "self", "alpha"):
        inputs = inputs[:1] if name == "other" else inputs[1:]
    inputs = [_past_layout(below) for below in inputs]
    return " and ".join(_of(below).name or below.name() for below in inputs if below is not None)


def _past_layout(node: Any) -> Any:
    while node is not None and _of(node).is_layout and node.next_functions:
        node = node.next_functions[0][0]
    return node


def _kinks(node: Any, how: _How) -> _Facts:
    name, *bounds = how.kink
    value = _tensor(node, name)
    if value is None or value.ndim:
        return
    if not bounds:
        yield name, value, _sign
    for bound in bounds:
        limit = _tensor(node, bound) if hasattr(node, f"_raw_saved_{bound}") else getattr(node, f"_saved_{bound}")
        if limit is not None and (not isinstance(limit, Tensor) or limit.ndim == 0):
            with torch.no_grad():
                yield f"{name}-{bound}", value - limit, _sign


def _selected(node: Any, how: _How) -> _Facts:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:
        value = _tensor(node, "self")
        if value is None:
            return
        sizes = value.shape
    taken, size = math.prod(node._input_metadata[0].shape), math.prod(sizes)
    if how.operation != "Slice":
        yield "selected", _WHOLE if taken >= size else _PARTIAL, str
    elif taken < size:  # the shift of labels and a limit on columns are two things
        dim, end = _unwrapped(node._saved_dim), _unwrapped(node._saved_end)
        sides = ["start"] * (node._saved_start != 0)
        sides += ["end"] if end < 0 else ["part beyond a limit"] * (end < sizes[dim])
        yield "cut", f"the {' and the '.join(sides)} of dimension {dim}", str


def _width(node: Any, how: _How) -> _Facts:
    """Columns of a trained weight: another head."""
    if _is_parameter(node.next_functions[_WEIGHT[how.operation]][0]):
        yield "outputs", node._saved_mat2_sym_sizes[1], str


def _given(node: Any, how: _How) -> _Facts:
    for name in how.optional:
        if getattr(node, f"_raw_saved_{name}").data is None:
            continue
        yield name, "given", str
        value = _tensor(node, name)
        if value is not None and value.ndim == 1 and len(value) > 1:  # of classes, which may come in later
            with torch.no_grad():
                yield f"{name} of all classes", (value != value[0]).any().to(torch.float32), _evenness


def _tensor(node: Any, name: str) -> Tensor | None:
    """A saved tensor as it lies there; None where reading it would run a hook (a checkpoint's) or a collective."""
    saved = getattr(node, f"_raw_saved_{name}")
    if getattr(saved, "unpack_hook", saved) is not None:  # older releases do not tell: better not
        return None
    value = saved.data
    is_plain = type(value) in (Tensor, nn.Parameter) and not value.is_complex()
    return value.detach() if is_plain and not is_freed(value) else None


def _is_of_scalars(node: Any) -> bool:
    """Whether another operand is a single number without dimensions: then no batch of one row is meant."""
    return any(below is not None and len(below._input_metadata[i].shape) == 0 for below, i in node.next_functions)


def _is_of_terms(node: Any) -> bool:
    """Whether another operand is made of single numbers, put together: then its entries are terms, hardly rows."""
    for below, _ in node.next_functions:
        while below is not None and _of(below).is_view and below.next_functions:
            below = below.next_functions[0][0]
        if below is not None and _of(below).operation in ("Stack", "Cat"):
            return all(
                term is None or math.prod(term._input_metadata[i].shape) == 1 for term, i in below.next_functions
            )
    return False


def _unwrapped(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_unwrapped(each) for each in value)
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def _zero(value: Any) -> str:
    return _ZERO if value == 0 else ""


def _evenness(value: Any) -> str:
    return "equal" if value == 0 else "not equal"


def _power(value: Any) -> str:
    return _ONE if value == 1 else _zero(value)


def _sign(value: Any) -> str:
    return _NEGATIVE if value < 0 else _POSITIVE
