"""What a function that is hooked to gradients does with them, read from its source and never run.

A gradient hook runs once per micro-batch, on that micro-batch's part of the gradient. That is the same as once on the
whole if what the hook returns is linear in the gradient (a mask, a factor), or if it only looks. Clamping, normalising
and optimizer steps are neither. What cannot be told from the source is `UNKNOWN`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from lightning_padmin.architectures import hook_terms as terms
from lightning_padmin.architectures.hook_source import MISSING, function_of, is_library, is_torch, member, node_of
from lightning_padmin.architectures.hook_terms import SHARED, Is

_DEPTH = 5  # of functions that call functions


class Effect(Enum):
    """What is known of a hook."""

    OBSERVES = "observes"
    LINEAR = "linear"
    CHANGES = "changes"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Reading:
    """What was read.

    Attributes:
        effect: for a hook on a parameter.
        why: of `CHANGES`, what it does, in words.
        steps: whether it writes parameters or their `.grad`, whatever it returns.
        reduces: whether what it returns or writes comes from a sum, norm or the like over the gradient.
    """

    effect: Effect
    why: str = ""
    steps: bool = False
    reduces: bool = False


def read_hook(hook: Any, *, gradients: Sequence[int] = (0,), is_parameter: bool = False) -> Reading:
    """Reads a hook.

    Args:
        hook: a function, a bound method, a partial, or an object that can be called.
        gradients: which of its arguments are gradients (or tuples of them).
        is_parameter: that argument is the parameter, whose `.grad` is the gradient.
    """
    try:
        found = function_of(hook)
        if found is None:
            return _of_builtin(hook)
        function, before = found
        reader = _Reader()
        arguments = [Is.NOTHING] * (len(before) + max(gradients, default=-1) + 1)
        for index in gradients:
            parameter = Is.PARAMETER if is_parameter else Is.NOTHING
            arguments[len(before) + index] = Is.GRADIENT | Is.ALIAS | parameter
        value = reader.run(function, arguments, {}, dict(enumerate(before)))
        return _judge(reader, Is.NONE if is_parameter else value)
    except (RecursionError, SyntaxError, ValueError, TypeError, AttributeError):
        return Reading(Effect.UNKNOWN)


def _of_builtin(hook: Any) -> Reading:
    """Of torch's own functions, hooked as they are: `partial(torch.clamp, min=-1)`."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = str(getattr(hook, "__name__", ""))
    if is_torch(hook) and name.rstrip("_") in terms.BENT | terms.NORMS | terms.RANDOM:
        return Reading(Effect.CHANGES, f"is {name}, which is not linear in the gradient", reduces=name in terms.NORMS)
    return Reading(Effect.UNKNOWN)


def _judge(reader: _Reader, value: Is) -> Reading:
    reduces = bool(value & Is.REDUCED) or reader.reduces
    if reader.certain:
        return Reading(Effect.CHANGES, reader.certain[0], steps=reader.steps, reduces=reduces)
    returned = value & ~Is.NONE
    if returned & Is.GRADIENT and returned & Is.BENT and not returned & Is.UNCLEAR:
        words = "returns something that is not linear in the gradient"
        return Reading(Effect.CHANGES, words, steps=reader.steps, reduces=reduces)
    unclear = reader.unclear or reader.perhaps
    if value == Is.NONE:
        return Reading(Effect.UNKNOWN if unclear else Effect.OBSERVES, steps=reader.steps)
    linear = returned & Is.GRADIENT and not returned & (Is.BENT | Is.UNCLEAR)
    settled = linear and not unclear and not reader.remembers
    return Reading(Effect.LINEAR if settled else Effect.UNKNOWN, steps=reader.steps, reduces=reduces)


@dataclass
class _Reader:
    """Goes through functions; what it finds on the way is kept.

    Attributes:
        certain: writes into gradients or parameters that are not linear, in words.
        perhaps: whether something is written that may be linear.
        steps: whether parameters or their `.grad` are written.
        reduces: whether what is written comes from all entries together.
        unclear: whether something got hold of the gradient that cannot be followed.
        remembers: whether it writes elsewhere, so that its next call may do something else.
    """

    certain: list[str] = field(default_factory=list)
    perhaps: bool = False
    steps: bool = False
    reduces: bool = False
    unclear: bool = False
    remembers: bool = False
    depth: int = 0
    under_way: list[types.CodeType] = field(default_factory=list)

    def run(
        self,
        function: types.FunctionType,
        arguments: Sequence[Is],
        keywords: Mapping[str, Is],
        objects: Mapping[int, Any],
    ) -> Is:
        """What a call of a function returns.

        Args:
            function: of the user's.
            arguments: what is known of its arguments.
            keywords: the same by name.
            objects: arguments that are known themselves, by position.
        """
        code = function.__code__
        if self.depth >= _DEPTH or code in self.under_way:
            return self.lost([*arguments, *keywords.values()])
        node = node_of(function)
        if node is None or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
            return self.lost([*arguments, *keywords.values()])
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        values = dict.fromkeys((*names, *(each.arg for each in node.args.kwonlyargs)), Is.NOTHING)
        values.update(zip(names, arguments, strict=False))
        rest = functools.reduce(lambda a, b: a | b, arguments[len(names) :], Is.NOTHING)
        if node.args.vararg is not None:
            values[node.args.vararg.arg] = rest
        for name, value in keywords.items():
            values[name] = value
        if node.args.kwarg is not None:
            values[node.args.kwarg.arg] = functools.reduce(lambda a, b: a | b, keywords.values(), Is.NOTHING)
        known = {names[index]: each for index, each in objects.items() if index < len(names)}
        self.depth += 1
        self.under_way.append(code)
        try:
            return _Body(self, function, values, known).run(node)
        finally:
            self.depth -= 1
            self.under_way.pop()

    def lost(self, arguments: Sequence[Is]) -> Is:
        """The result of what cannot be followed."""
        if any(each & Is.ALIAS for each in arguments):
            self.unclear = True
        depends = any(each & Is.GRADIENT for each in arguments)
        return Is.UNCLEAR | (Is.GRADIENT if depends else Is.NOTHING)

    def write(self, value: Is, words: str) -> None:
        """Something of this kind goes into a gradient or a parameter."""
        self.steps = self.steps or bool(value & (Is.PARAMETER | Is.STORED))
        self.reduces = self.reduces or bool(value & Is.REDUCED)
        if not value & Is.PARAMETER and (value & Is.UNCLEAR or not value & Is.BENT):
            self.perhaps = True
        else:
            self.certain.append(words)


class _Body:
    """One call of one function."""

    def __init__(
        self, reader: _Reader, function: types.FunctionType, values: dict[str, Is], known: dict[str, Any]
    ) -> None:
        self._reader, self._function, self._values, self._known = reader, function, values, known
        self._returned = Is.NOTHING
        self._control = Is.NOTHING  # what decides whether we are here
        self._inner: set[str] = set()

    def run(self, node: ast.FunctionDef | ast.Lambda) -> Is:
        if isinstance(node, ast.Lambda):
            return self._value(node.body)
        self._statements(node.body)
        ends = node.body and isinstance(node.body[-1], ast.Return | ast.Raise)
        return self._returned | (Is.NOTHING if ends else Is.NONE)

    # Statements.

    def _statements(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Return):
            value = Is.NONE if node.value is None else self._value(node.value)
            only_none = value == Is.NONE
            self._returned |= value if only_none else value | self._control
        elif isinstance(node, ast.Expr):
            self._value(node.value)
        elif isinstance(node, ast.Assign):
            value = self._value(node.value)
            for target in node.targets:
                self._assign(target, value, node.value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, self._value(node.value), node.value)
        elif isinstance(node, ast.AugAssign):
            self._in_place(node)
        elif isinstance(node, ast.If | ast.While):
            self._branch(node)
        elif isinstance(node, ast.For):
            value = self._value(node.iter)
            self._assign(node.target, value, None)
            for _ in range(2):  # what the first round assigns, the second reads
                self._statements(node.body)
            self._statements(node.orelse)
        elif isinstance(node, ast.With):
            for item in node.items:
                self._value(item.context_expr)
            self._statements(node.body)
        elif isinstance(node, ast.Try):
            for part in (node.body, *(each.body for each in node.handlers), node.orelse, node.finalbody):
                self._statements(part)
        elif isinstance(node, ast.Delete):
            if any(isinstance(each, ast.Attribute) and each.attr == "grad" for each in node.targets):
                self._reader.write(Is.BENT | Is.STORED, "deletes gradients")
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            self._inner.add(node.name)
        elif isinstance(node, ast.Nonlocal | ast.Global):
            self._reader.remembers = True
        elif not isinstance(
            node, ast.Pass | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.Continue | ast.Break
        ):
            self._reader.unclear = True

    def _branch(self, node: ast.If | ast.While) -> None:
        test, before = self._value(node.test), self._control
        if test & Is.GRADIENT:
            kind = Is.UNCLEAR if _asks_finite(node.test) else Is.BENT  # what is finite stays as it is, by all signs
            self._control |= Is.GRADIENT | kind | (test & Is.REDUCED)
        self._statements(node.body)
        self._statements(node.orelse)
        leaves = any(isinstance(each, ast.Return) for part in node.body + node.orelse for each in ast.walk(part))
        self._control = self._control if leaves else before

    def _assign(self, target: ast.expr, value: Is, source: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            own = value & ~Is.NONE
            self._values[target.id] = own | self._control if self._control and own & Is.GRADIENT else own
            self._known.pop(target.id, None)
            if source is not None:
                found = self._object(source)
                if found is not MISSING:
                    self._known[target.id] = found
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._assign(each, value, None)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, value, None)
        elif isinstance(target, ast.Attribute):
            if target.attr in ("grad", "data"):
                linear = value & Is.GRADIENT and not value & Is.BENT
                kind = value | self._control if linear or value & Is.UNCLEAR else Is.BENT
                self._reader.write(kind | Is.STORED, f"assigns .{target.attr}")
            else:
                self._value(target.value)
                self._reader.remembers = True
        elif isinstance(target, ast.Subscript):
            base = self._value(target.value)
            if not base & Is.GRADIENT:
                self._reader.remembers = True
                return
            is_zero = isinstance(source, ast.Constant) and source.value in (0, False)
            index = self._value(target.slice)
            bent = index & Is.GRADIENT or self._control or not (is_zero or value & Is.GRADIENT)
            kind = value & ~SHARED | Is.GRADIENT | (Is.BENT if bent else Is.NOTHING)
            self._written(target.value, base, kind, "writes into the gradient")

    def _in_place(self, node: ast.AugAssign) -> None:
        load: Any = ast.copy_location(_loaded(node.target), node.target)
        base = self._value(load)
        result = self._binary(node.op, base, self._value(node.value)) | self._control
        if base & Is.GRADIENT:
            self._written(load, base, result & ~SHARED, "changes the gradient in place")
        elif isinstance(node.target, ast.Attribute) and node.target.attr == "data":
            self._reader.write(Is.BENT | Is.PARAMETER, "writes into .data")
        elif isinstance(node.target, ast.Name):
            self._values[node.target.id] = result
        else:
            self._reader.remembers = True

    def _written(self, target: ast.expr, base: Is, result: Is, words: str) -> None:
        if base & Is.ALIAS:
            parameter = base & Is.PARAMETER
            kind = result | (base & (Is.PARAMETER | Is.STORED))
            self._reader.write(kind, "writes into parameters" if parameter else words)
        if isinstance(target, ast.Name):
            self._values[target.id] = result | (base & Is.ALIAS)

    # Expressions.

    def _value(self, node: ast.expr) -> Is:
        if isinstance(node, ast.Constant):
            return Is.NONE if node.value is None else Is.NOTHING
        if isinstance(node, ast.Name):
            return self._values.get(node.id, Is.NOTHING)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            index, base = self._value(node.slice), self._value(node.value)
            if not base & Is.GRADIENT and index & Is.ALIAS:  # what is kept for a parameter, by the parameter
                return base
            return base | (Is.GRADIENT | Is.BENT if index & Is.GRADIENT else Is.NOTHING)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.BinOp):
            return self._binary(node.op, self._value(node.left), self._value(node.right)) & ~SHARED
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand) & ~SHARED
            return value | Is.BENT if value & Is.GRADIENT and isinstance(node.op, ast.Not) else value
        if isinstance(node, ast.Compare):
            values = [self._value(each) for each in (node.left, *node.comparators)]
            if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
                return Is.NOTHING
            return _bent(_any(values)) & ~SHARED
        if isinstance(node, ast.IfExp):
            test = self._value(node.test)
            return _any([self._value(node.body), self._value(node.orelse)]) | (_bent(test) & ~SHARED)
        if isinstance(node, ast.BoolOp):
            return _any([self._value(each) for each in node.values])
        if isinstance(node, ast.NamedExpr):
            value = self._value(node.value)
            self._assign(node.target, value, node.value)
            return value
        if isinstance(node, ast.Lambda):
            return Is.NOTHING
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
            for each in node.generators:
                self._assign(each.target, self._value(each.iter), None)
            inner = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return _any([self._value(each) for each in inner])
        if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
            self._reader.unclear = True
            return Is.UNCLEAR
        # Tuples, lists, dictionaries, f-strings, slices: what they are made of.
        value = _any([self._value(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)])
        return Is.NOTHING if isinstance(node, ast.JoinedStr | ast.FormattedValue) else value & ~Is.NONE

    def _attribute(self, node: ast.Attribute) -> Is:
        value = self._value(node.value)
        if node.attr == "grad":  # of any parameter
            return Is.GRADIENT | Is.ALIAS | Is.STORED | (value & Is.BENT)
        if not value & Is.GRADIENT:
            return value & ~Is.NONE
        if node.attr in terms.LOOKS:
            return Is.NOTHING
        return value if node.attr in terms.VIEWS else value | Is.UNCLEAR

    def _binary(self, op: ast.operator, left: Is, right: Is) -> Is:
        both = left | right
        if not both & Is.GRADIENT:
            return both & ~Is.NONE
        two = bool(left & Is.GRADIENT and right & Is.GRADIENT)
        if isinstance(op, ast.Add | ast.Sub):
            return both if two else both | Is.BENT
        if isinstance(op, ast.Mult | ast.MatMult):
            return both | Is.BENT if two else both
        if isinstance(op, ast.Div):
            return both | Is.BENT if right & Is.GRADIENT else both
        return both | Is.BENT

    def _call(self, node: ast.Call) -> Is:
        arguments = [self._value(each) for each in node.args]
        keywords = {each.arg or "": self._value(each.value) for each in node.keywords}
        given = _any([*arguments, *keywords.values()])
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        called = self._object(node.func)
        if isinstance(node.func, ast.Attribute):
            owner = self._value(node.func.value)
            if name in ("step", "zero_grad") and self._may_be_optimizer(node.func.value):
                what = "takes an optimizer step" if name == "step" else "empties gradients"
                self._reader.write(Is.BENT | Is.PARAMETER, f"{what} ({ast.unparse(node.func)}())")
                return Is.NONE
            if owner & Is.GRADIENT:
                return self._of_tensor(name, owner, node, [owner, *arguments], node.func.value)
        else:
            owner = Is.NOTHING
        if name in terms.CLIPS:
            self._reader.write(Is.BENT | Is.STORED, f"clips gradients ({name})")
            return Is.UNCLEAR
        if isinstance(called, torch.optim.Optimizer):
            self._reader.unclear = True
        found = None if called is MISSING or isinstance(called, type) else function_of(called)
        own = found is not None and not is_library(found[0])
        if found is not None and own:
            function, before = found
            values = [*([Is.NOTHING] * len(before)), *arguments]
            if any(isinstance(each, ast.Starred) for each in node.args):  # where its values go is not known
                values += [given & ~Is.NONE] * len(function.__code__.co_varnames)
            objects = dict(enumerate(before))
            for index, each in enumerate(node.args):
                value = self._object(each)
                if value is not MISSING and not isinstance(each, ast.Starred):
                    objects[len(before) + index] = value
            return self._reader.run(function, values, keywords, objects)
        if name in terms.RANDOM:
            return Is.GRADIENT | Is.BENT
        if not given & Is.GRADIENT:
            return self._without_gradient(node, name, called)
        if is_torch(called):
            rest = [*arguments, *keywords.values()]
            first = node.args[0] if node.args else node.keywords[0].value
            return self._of_tensor(name, given if name in terms.COPIES else rest[0], node, rest, first)
        if called is getattr(builtins, name, MISSING) and name in terms.QUIET:
            return Is.NOTHING
        if called is getattr(builtins, name, MISSING) and name in terms.NUMBERS:
            return given & ~Is.NONE
        if called is getattr(builtins, name, MISSING) and name in ("abs", "max", "min", "sum", "any", "all", "sorted"):
            return (_bent(given) if name != "sum" else given) & ~SHARED | Is.REDUCED
        if isinstance(node.func, ast.Attribute) and name in terms.KEEPS and not owner & Is.GRADIENT:
            self._reader.remembers = True
            return Is.NONE
        return self._reader.lost([given])

    def _without_gradient(self, node: ast.Call, name: str, called: Any) -> Is:
        """A call that gets no gradient."""
        if name.endswith("_") and not name.endswith("__") and isinstance(node.func, ast.Attribute):
            self._reader.unclear = True  # of a buffer of its own, or of a parameter
            return Is.NOTHING
        if name in terms.KEEPS:
            self._reader.remembers = True
            return Is.NONE
        if called is MISSING and isinstance(node.func, ast.Name) and node.func.id in self._inner:
            self._reader.unclear = True
        return Is.NOTHING

    def _of_tensor(self, name: str, owner: Is, node: ast.Call, values: Sequence[Is], first: ast.expr) -> Is:
        """A method of a tensor, or a function of torch; `values` are all that it is given, the tensor first."""
        rest = _any(values[1:])
        in_place = name.endswith("_") and not name.endswith("__")
        base = name.rstrip("_") if in_place else name
        fresh = (owner | rest) & ~(SHARED | Is.NONE)
        if base == "zero":
            result = fresh
        elif base in ("copy", "set"):
            result = rest & ~Is.NONE if rest & Is.GRADIENT else fresh | Is.UNCLEAR
        elif base == "requires_grad" or base in terms.VIEWS:
            return owner | (rest & Is.BENT)
        elif base in terms.LOOKS:
            return Is.NOTHING
        elif base in terms.COPIES:
            result = fresh
        elif base in terms.PRODUCTS:
            result = self._binary(ast.Mult(), owner, rest)
        elif base in terms.QUOTIENTS:
            result = self._binary(ast.Div(), owner, rest)
        elif base in terms.SUMS:
            result = self._binary(ast.Add(), owner, rest)
        elif base in ("masked_fill", "where", "index_fill"):
            result = self._masked(base, node, values)
        elif base in terms.TOTALS:
            result = fresh | Is.REDUCED
        elif base in terms.NORMS:
            result = fresh | Is.BENT | Is.REDUCED
        elif base in terms.BENT:
            result = fresh | Is.BENT
        elif base in ("save", "add_histogram", "add_scalar"):
            return Is.NONE
        else:
            result = fresh | Is.UNCLEAR
        result = result & ~SHARED
        if in_place:
            self._written(first, owner, result | self._control, f"changes the gradient in place ({name})")
            return result | (owner & Is.ALIAS)
        if result & Is.UNCLEAR and base.startswith(("_foreach", "_fused", "all_reduce", "reduce", "broadcast")):
            self._reader.unclear = True
        out = next((each.value for each in node.keywords if each.arg == "out"), None)
        if out is not None:
            self._written(out, self._value(out), result, f"changes the gradient in place ({name})")
        return result

    def _masked(self, name: str, node: ast.Call, values: Sequence[Is]) -> Is:
        """Linear where the mask does not depend on the gradient and what stands elsewhere is 0."""
        parts = [each for each in node.args if not self._value(each) & Is.GRADIENT]
        fill = parts[-1] if parts else None
        zero = isinstance(fill, ast.Constant) and fill.value in (0, False)
        zero = zero or (isinstance(fill, ast.Call) and "zeros" in ast.unparse(fill.func))
        mask = values[0] if name == "where" else values[1] if len(values) > 1 else Is.NOTHING
        bent = bool(mask & Is.GRADIENT) or not zero
        return _any(values) & ~(SHARED | Is.NONE) | (Is.BENT if bent else Is.NOTHING)

    def _may_be_optimizer(self, node: ast.expr) -> bool:
        """What cannot be looked up is taken for one."""
        found = self._object(node)
        if found is MISSING and isinstance(node, ast.Subscript):
            found = self._object(node.value)
            if isinstance(found, Mapping):
                found = next(iter(found.values()), MISSING)
            elif isinstance(found, Sequence):
                found = found[0] if found else MISSING
        return found is MISSING or found is None or hasattr(found, "param_groups")

    def _object(self, node: ast.expr) -> Any:
        """What an expression is, where that can be looked up without running anything."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._object(node.value)
            return MISSING if owner is MISSING else member(owner, node.attr)
        return MISSING

    def _named(self, name: str) -> Any:
        if name in self._known:
            return self._known[name]
        if name in self._values or name in self._inner:
            return MISSING
        code, closure = self._function.__code__, self._function.__closure__ or ()
        if name in code.co_freevars:
            try:
                return closure[code.co_freevars.index(name)].cell_contents
            except ValueError:  # empty so far
                return MISSING
        known: Mapping[str, Any] = self._function.__globals__
        return known.get(name, getattr(builtins, name, MISSING))


def _any(values: Sequence[Is]) -> Is:
    return functools.reduce(lambda a, b: a | b, values, Is.NOTHING)


def _bent(value: Is) -> Is:
    return value | Is.BENT if value & Is.GRADIENT else value


def _asks_finite(test: ast.expr) -> bool:
    """Whether all that a test asks is whether something is nan or infinite."""
    calls = {
        each.func.attr if isinstance(each.func, ast.Attribute) else ""
        for each in ast.walk(test)
        if isinstance(each, ast.Call)
    }
    return (
        bool(calls & terms.FINITE)
        and calls <= terms.FINITE | {"any", "all", "item", "bool"}
        and not any(isinstance(each, ast.Compare | ast.IfExp) for each in ast.walk(test))
    )


def _loaded(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body


__all__ = ["Effect", "Reading", "read_hook"]
