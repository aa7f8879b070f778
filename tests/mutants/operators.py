"""Small faults that may be made in a Python file: where, which, and how the file reads then.

A fault is known by what surrounds it and not by its place: the qualified name of the function or class, the statement
as `ast.unparse` writes it, what is changed, and which of several equal ones in that function. So it is found again
after the code has moved to another file.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}
_PAIRS = (("min", "max"), ("all", "any"), ("minimum", "maximum"), ("amin", "amax"), ("argmin", "argmax"))
_NAMES = dict(_PAIRS) | {second: first for first, second in _PAIRS}
# Calls whose arguments are read by people, and keywords that change no result.
_TOLD = {
    "warn",
    "warning",
    "info",
    "debug",
    "error",
    "exception",
    "print",
    "say",
    "printable",
    "repr",
    "cast",
    "TypeVar",
}
_KEYWORDS = {"strict", "stacklevel"}
_UNTOUCHED = {"__repr__", "__str__"}


@dataclass(frozen=True)
class Identity:
    """What a fault is known by."""

    name: str
    statement: str
    operator: str
    occurrence: int


@dataclass(frozen=True)
class Fault:
    """A fault at its place in a file.

    Attributes:
        start, end: the bytes that are replaced.
        lines: first and last line of the statement (of its head, where it has a body).
        in_function: whether it is executed later than at import.
    """

    identity: Identity
    start: int
    end: int
    replacement: str
    lines: tuple[int, int]
    in_function: bool

    def apply(self, source: bytes) -> bytes:
        """The file with the fault in it."""
        return source[: self.start] + self.replacement.encode() + source[self.end :]


@dataclass(frozen=True)
class _Place:
    name: str
    statement: str
    lines: tuple[int, int]
    in_function: bool


def faults(source: bytes) -> list[Fault]:
    """Every fault that may be made in a file, in the order of the file."""
    found: list[Fault] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for place, operator, node, replacement in _block(ast.parse(source).body, "", False):
        key = (place.name, place.statement, operator)
        identity = Identity(*key, seen[key])
        seen[key] += 1
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        found.append(Fault(identity, start, end, replacement, place.lines, place.in_function))
    return found


_Site = tuple[_Place, str, "ast.expr | ast.stmt", str]


def _block(body: Iterable[ast.stmt], name: str, in_function: bool) -> Iterator[_Site]:
    known: set[str] = set()  # names assigned so far: to delete a later assignment is no NameError
    for statement in body:
        yield from _statement(statement, name, in_function, known)
        known |= {each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and _is_stored(each)}


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _statement(node: ast.stmt, name: str, in_function: bool, known: set[str]) -> Iterator[_Site]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            is_text = isinstance(node.returns, ast.Name) and node.returns.id == "str"
            if node.name not in _UNTOUCHED and not is_text:
                yield from _block(node.body, f"{name}.{node.name}".lstrip("."), True)
        case ast.ClassDef():
            yield from _block(node.body, f"{name}.{node.name}".lstrip("."), in_function)
        case ast.If() | ast.While():
            if "TYPE_CHECKING" in ast.unparse(node.test) or "__name__ ==" in ast.unparse(node.test):
                return
            place = _head(node, node.test, name, in_function)
            if isinstance(node, ast.If) and not isinstance(node.test, ast.Constant):
                yield place, "if->True", node.test, "True"
                yield place, "if->False", node.test, "False"
            yield from _expression(node.test, place)
            yield from _block(node.body, name, in_function)
            yield from _block(node.orelse, name, in_function)
        case ast.For():
            yield from _expression(node.iter, _head(node, node.iter, name, in_function))
            yield from _block(node.body, name, in_function)
            yield from _block(node.orelse, name, in_function)
        case ast.With():
            for item in node.items:
                yield from _expression(item.context_expr, _head(node, item.context_expr, name, in_function))
            yield from _block(node.body, name, in_function)
        case ast.Try():
            for body in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                yield from _block(body, name, in_function)
        case ast.Match():
            for case in node.cases:
                yield from _block(case.body, name, in_function)
        case _:
            place = _Place(name, ast.unparse(node), (node.lineno, node.end_lineno or node.lineno), in_function)
            yield from _simple(node, place, known)


def _head(node: ast.stmt, last: ast.expr, name: str, in_function: bool) -> _Place:
    """A statement with a body is known by its head."""
    bare = copy.copy(node)
    for part in ("body", "orelse"):
        if hasattr(bare, part):
            setattr(bare, part, [ast.Pass()] if part == "body" else [])
    text = ast.unparse(bare).rsplit("\n", 1)[0]
    return _Place(name, text, (node.lineno, last.end_lineno or node.lineno), in_function)


def _simple(node: ast.stmt, place: _Place, known: set[str]) -> Iterator[_Site]:
    match node:
        case ast.Return(value=ast.expr() as value):
            if not isinstance(value, ast.Constant) and not _is_text(value):
                yield place, "return->None", node, "return None"
            yield from _expression(value, place)
        case ast.Expr(value=ast.Call() as call):
            if not _is_told(call):
                yield place, "delete call", node, "pass"
                yield from _expression(call, place)
        case ast.Expr(value=ast.Yield() | ast.YieldFrom() | ast.Await() as value):
            yield from _expression(value, place)
        case ast.Assign(targets=targets, value=value):
            if all(_can_stay(target, known) for target in targets) and place.in_function:
                yield place, "delete assignment", node, "pass"
            for target in targets:
                yield from _expression(target, place)
            yield from _expression(value, place)
        case ast.AnnAssign(value=ast.expr() as value):
            yield from _expression(value, place)
        case ast.AugAssign():
            if _is_text(node.value):
                return
            yield place, "delete assignment", node, "pass"
            other = _BINARY.get(type(node.op))
            if other is not None:
                turned = ast.AugAssign(node.target, other(), node.value)
                yield place, f"{type(node.op).__name__}->{other.__name__}", node, ast.unparse(turned)
            yield from _expression(node.value, place)
        case ast.Delete():
            yield place, "delete del", node, "pass"
        case ast.Break():
            yield place, "break->continue", node, "continue"
        case ast.Continue():
            yield place, "continue->break", node, "break"


def _can_stay(target: ast.expr, known: set[str]) -> bool:
    """Whether a target has some value without this assignment."""
    if isinstance(target, ast.Tuple):
        return all(_can_stay(each, known) for each in target.elts)
    return isinstance(target, ast.Attribute | ast.Subscript) or (isinstance(target, ast.Name) and target.id in known)


def _is_text(node: ast.expr) -> bool:
    match node:
        case ast.JoinedStr() | ast.Constant(value=str()):
            return True
        case ast.BinOp(left=left, right=right):
            return _is_text(left) or _is_text(right)
        case ast.Call(func=ast.Attribute(value=value, attr="join" | "format" | "replace")):
            return _is_text(value)
    return False


def _is_told(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in _TOLD or name.endswith(("Error", "Warning"))


def _expression(node: ast.expr, place: _Place) -> Iterator[_Site]:
    """The faults of an expression and of what is in it."""
    if _is_text(node) or (isinstance(node, ast.Call) and _is_told(node)):
        return
    yield from _own(node, place)
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.expr():
                yield from _expression(child, place)
            case ast.keyword(arg=arg, value=value) if arg not in _KEYWORDS:
                yield from _expression(value, place)
            case ast.comprehension():
                yield from _expression(child.iter, place)
                for condition in child.ifs:
                    yield place, "filter->True", condition, "True"
                    yield from _expression(condition, place)


def _own(node: ast.expr, place: _Place) -> Iterator[_Site]:
    def replaced(operator: str, new: ast.expr) -> _Site:
        return place, operator, node, f"({ast.unparse(new)})"

    match node:
        case ast.Compare(ops=ops):
            for k, old in enumerate(ops):
                other = _COMPARE[type(old)]
                changed = [*ops[:k], other(), *ops[k + 1 :]]
                new = ast.Compare(node.left, changed, node.comparators)
                yield replaced(f"{type(old).__name__}->{other.__name__}", new)
        case ast.BinOp(op=operation) if type(operation) in _BINARY:
            counterpart = _BINARY[type(operation)]
            new_op = ast.BinOp(node.left, counterpart(), node.right)
            yield replaced(f"{type(operation).__name__}->{counterpart.__name__}", new_op)
        case ast.BoolOp(op=ast.And()):
            yield replaced("And->Or", ast.BoolOp(ast.Or(), node.values))
        case ast.BoolOp(op=ast.Or()):
            yield replaced("Or->And", ast.BoolOp(ast.And(), node.values))
        case ast.UnaryOp(op=ast.Not()):
            yield replaced("not dropped", node.operand)
        case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
            yield replaced("minus dropped", node.operand)
        case ast.UnaryOp(op=ast.Invert()):
            yield replaced("invert dropped", node.operand)
        case ast.IfExp():
            yield place, "if->True", node.test, "True"
            yield place, "if->False", node.test, "False"
        case ast.Constant(value=bool() as truth):
            yield replaced(f"{truth}->{not truth}", ast.Constant(not truth))
        case ast.Constant(value=(int() | float()) as number):
            yield replaced("n->n+1", ast.Constant(number + 1))
        case ast.Call(func=ast.Name(id=name) as function) if name in _NAMES:
            yield place, f"{name}->{_NAMES[name]}", function, _NAMES[name]
        case ast.Call(func=ast.Attribute(attr=name) as method) if name in _NAMES:
            turned = ast.Attribute(method.value, _NAMES[name], ast.Load())
            yield place, f"{name}->{_NAMES[name]}", method, ast.unparse(turned)
    if isinstance(node, ast.Call):
        yield from _order(node, place)


def _order(node: ast.Call, place: _Place) -> Iterator[_Site]:
    """Sorted the other way round."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    named = {keyword.arg for keyword in node.keywords}
    if name == "sorted" or (name == "sort" and not node.args and (not named or "key" in named)):
        if "reverse" not in named:
            turned = ast.Call(node.func, node.args, [*node.keywords, ast.keyword("reverse", ast.Constant(True))])
            yield place, "order turned", node, ast.unparse(turned)
    elif name in ("argsort", "sort", "lexsort") and not {"descending", "dim"} & named:
        yield place, "order turned", node, f"({ast.unparse(node)})[::-1]"
