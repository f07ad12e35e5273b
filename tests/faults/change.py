"""Parts of a Python function, and what a fault makes of them.

A selector (``returned``, ``assigned``, ``argument``, ...) names a part of the function and must
find exactly one, unless ``of`` (a name that it must mention) or ``at`` (which one, from 1) says
which. In ``becomes``, ``_`` stands for what was there.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

Edit = Callable[[ast.AST], "ast.AST | None"]


class PlaceError(Exception):
    """The place of a fault is not there, or not once; the table of faults must follow the code."""


@dataclass(frozen=True)
class Change:
    """The one part that ``part`` selects, as ``edit`` makes it; None drops it."""

    part: Part
    edit: Edit

    def apply(self, function: ast.AST) -> None:
        target = self.part.the_one(function)
        _Exchange(target, self.edit(copy.deepcopy(target))).visit(function)
        ast.fix_missing_locations(function)


@dataclass(frozen=True)
class Part:
    """A part of a function. ``find`` yields the candidates in any order."""

    said: str
    find: Callable[[ast.AST], Iterable[ast.AST]]
    of: str = ""
    at: int | None = None

    def the_one(self, function: ast.AST) -> ast.AST:
        found = [node for node in self.find(function) if not self.of or self.of in _names(node)]
        found.sort(key=lambda node: (node.lineno, node.col_offset))
        said = f"{self.said} of {self.of!r}" if self.of else self.said
        if self.at is not None and self.at <= len(found):
            return found[self.at - 1]
        if self.at is not None or len(found) != 1:
            wanted = "once" if self.at is None else f"at least {self.at} times"
            lines = [node.lineno for node in found]
            raise PlaceError(f"{said}: found {len(found)} times (lines {lines}), expected {wanted}")
        return found[0]

    def becomes(self, new: str) -> Change:
        """Another expression, in which ``_`` is the old one; of a statement, other statements."""

        def edit(old: ast.AST) -> ast.AST:
            if isinstance(old, ast.stmt):
                return ast.If(ast.Constant(True), ast.parse(new).body, [])
            return _Fill(old).visit(ast.parse(new, mode="eval").body)

        return Change(self, edit)

    def dropped(self) -> Change:
        """Without this statement, or this part of a conjunction or list."""
        return Change(self, lambda old: ast.Pass() if isinstance(old, ast.stmt) else None)

    def swapped(self, one: int = 0, other: int = 1) -> Change:
        """Two arguments of a call, elements of a tuple or operands in each other's place."""

        def edit(old: ast.AST) -> ast.AST:
            if isinstance(old, ast.BinOp):
                old.left, old.right = old.right, old.left
                return old
            items = old.args if isinstance(old, ast.Call) else old.elts
            items[one], items[other] = items[other], items[one]
            return old

        return Change(self, edit)


class _Exchange(ast.NodeTransformer):
    def __init__(self, target: ast.AST, new: ast.AST | None) -> None:
        self.target, self.new = target, new

    def visit(self, node: ast.AST) -> ast.AST | None:
        if node is self.target:
            return self.new if self.new is None else ast.copy_location(self.new, node)
        return self.generic_visit(node)


class _Fill(ast.NodeTransformer):
    def __init__(self, old: ast.AST) -> None:
        self.old = old

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.old) if node.id == "_" else node


def _names(node: ast.AST) -> set[str]:
    """All names, attributes, keywords and words that a node mentions."""
    found: set[str] = set()
    for each in ast.walk(node):
        for field in ("id", "attr", "arg", "value"):
            if isinstance(word := getattr(each, field, None), str):
                found.add(word)
    return found


def _called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _every(kinds: type | tuple[type, ...]) -> Callable[[ast.AST], Iterator[ast.AST]]:
    return lambda function: (node for node in ast.walk(function) if isinstance(node, kinds))


# Where: one selector for each kind of part


def returned(*, of: str = "", at: int | None = None) -> Part:
    """The value that is returned or yielded."""
    kinds = (ast.Return, ast.Yield)

    def find(function: ast.AST) -> Iterator[ast.AST]:
        return (node.value for node in _every(kinds)(function) if node.value is not None)

    return Part("the returned value", find, of, at)


def assigned(name: str, *, of: str = "", at: int | None = None) -> Part:
    """What is assigned (or added) to a variable or an attribute: "start", "self.offset"."""

    def find(function: ast.AST) -> Iterator[ast.AST]:
        for node in _every((ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr))(function):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None and name in map(ast.unparse, targets):
                yield node.value

    return Part(f"the value of {name!r}", find, of, at)


def argument(call: str, which: int | str, *, of: str = "", at: int | None = None) -> Part:
    """An argument of a call, by its place from 0 or by its keyword."""

    def find(function: ast.AST) -> Iterator[ast.AST]:
        for node in _every(ast.Call)(function):
            if _called(node) != call:
                continue
            if isinstance(which, str):
                yield from (word.value for word in node.keywords if word.arg == which)
            elif which < len(node.args):
                yield node.args[which]

    return Part(f"argument {which!r} of {call}()", find, of, at)


def called(name: str, *, of: str = "", at: int | None = None) -> Part:
    """A call, arguments included."""

    def find(function: ast.AST) -> Iterator[ast.AST]:
        return (node for node in _every(ast.Call)(function) if _called(node) == name)

    return Part(f"the call of {name}()", find, of, at)


def condition(*, of: str = "", at: int | None = None) -> Part:
    """What an ``if``, ``while``, ``assert``, conditional expression or comprehension tests."""

    def find(function: ast.AST) -> Iterator[ast.AST]:
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
                yield node.test
            elif isinstance(node, ast.comprehension):
                yield from node.ifs

    return Part("the condition", find, of, at)


def operator(old: str, *, of: str = "", at: int | None = None) -> Part:
    """An expression with this operator: ">=", "+", "and", "not", "is not"."""
    kind = _operator_of(old)

    def find(function: ast.AST) -> Iterator[ast.AST]:
        for node in _every((ast.Compare, ast.BinOp, ast.BoolOp, ast.UnaryOp))(function):
            operators = node.ops if isinstance(node, ast.Compare) else [node.op]
            if kind in map(type, operators):
                yield node

    return Part(f"the operator {old!r}", find, of, at)


def replaced(old: str, new: str, *, of: str = "", at: int | None = None) -> Change:
    """Another operator in the place of one: ``replaced(">=", ">")``."""
    before, after = _operator_of(old), _operator_of(new)

    def edit(node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Compare):
            node.ops = [after() if isinstance(each, before) else each for each in node.ops]
        else:
            node.op = after()
        return node

    return Change(operator(old, of=of, at=at), edit)


def _operator_of(symbol: str) -> type:
    unary = symbol in ("not", "~")
    node = ast.parse(f"{symbol} a" if unary else f"a {symbol} b", mode="eval").body
    return type(node.ops[0] if isinstance(node, ast.Compare) else node.op)


def constant(value: object, *, at: int | None = None) -> Part:
    """A literal number, string, True, False or None."""

    def find(function: ast.AST) -> Iterator[ast.AST]:
        for node in _every(ast.Constant)(function):
            if node.value == value and type(node.value) is type(value):
                yield node

    return Part(f"the constant {value!r}", find, "", at)


def named(name: str, *, at: int | None = None) -> Part:
    """Where a variable, or "self.attribute", is read."""

    def find(function: ast.AST) -> Iterator[ast.AST]:
        for node in _every((ast.Name, ast.Attribute))(function):
            if isinstance(node.ctx, ast.Load) and ast.unparse(node) == name:
                yield node

    return Part(f"the name {name!r}", find, "", at)


def subscript(*, of: str = "", at: int | None = None) -> Part:
    """An expression ``x[...]`` that is read."""

    def find(function: ast.AST) -> Iterator[ast.AST]:
        return (n for n in _every(ast.Subscript)(function) if isinstance(n.ctx, ast.Load))

    return Part("the subscript", find, of, at)


def statement(*, of: str = "", at: int | None = None) -> Part:
    """A simple statement, or an ``if`` without its blocks' names, that mentions ``of``."""
    kinds = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise)
    kinds += (ast.Delete, ast.Break, ast.Continue)

    def find(function: ast.AST) -> Iterator[ast.AST]:
        for node in _every(kinds)(function):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not is_text:
                yield node

    return Part("the statement", find, of, at)
