"""Puts a fault into a Python function: found by its name, changed in its syntax tree.

    Fault(
        "the recent window is off by one",
        "caches.eviction:Eviction.start",
        returned().becomes("_ + 1"),
        check,
    )

``change`` has the selectors. A place that is not found, or found more than once, or that the
change leaves as it was, is a PlaceError.

The changed function keeps its identity: its code object alone is exchanged, so that everybody who
holds the function, the class or the module runs the fault.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from faults.change import Change, PlaceError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
NOTICED = (AssertionError, ValueError)


@dataclass(frozen=True)
class Fault:
    """A change of ``place``, "module:function" below mlx_h2o, and the check that must fail then.

    A function of a class is "module:Class.function"; an inner one "module:function.inner".
    """

    what: str
    place: str
    change: Change
    check: Callable[[], object]


@contextmanager
def seeded(fault: Fault) -> Iterator[None]:
    """The product with the fault in it. Raises PlaceError where its place is not found."""
    try:
        function, code = _changed(fault)
    except PlaceError as error:
        raise PlaceError(f"{fault.what!r} in {fault.place}: {error}") from None
    before = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before


def assert_caught(fault: Fault) -> None:
    """The check passes without the fault and notices it."""
    fault.check()
    with seeded(fault), pytest.raises(NOTICED) as found:
        fault.check()
    print(f"{fault.what}: {found.value!r:.120}")


def _changed(fault: Fault) -> tuple[FunctionType, CodeType]:
    """The function that runs, and its code with the fault."""
    name, _, path = fault.place.partition(":")
    try:
        module = importlib.import_module(f"mlx_h2o.{name}")
    except ModuleNotFoundError as error:
        raise PlaceError(str(error)) from None
    file = module.__file__ or ""
    tree = ast.parse(Path(file).read_text("utf-8"))
    nodes = _definitions(tree, path.split("."))
    function, depth = _function(module, path.split("."))
    before = ast.dump(tree)
    fault.change.apply(nodes[-1])
    if ast.dump(tree) == before:
        raise PlaceError("the change leaves the function as it was")
    code: CodeType = compile(tree, file, "exec")
    for node in nodes[: depth + 1]:
        code = _code_of(code, node)
    if code.co_freevars != function.__code__.co_freevars:
        raise PlaceError(f"the change takes a variable of the enclosing scope: {code.co_freevars}")
    return function, code


def _definitions(tree: ast.AST, path: list[str]) -> list[Definition]:
    """The nodes of the path; of several of one name the last, which is the one in force."""
    found: list[Definition] = []
    for name in path:
        inside = found[-1] if found else tree
        same = [node for node in _directly_in(inside) if node.name == name]
        if not same:
            raise PlaceError(f"{name!r} is not defined there")
        found.append(same[-1])
    return found


def _directly_in(node: ast.AST) -> Iterator[Definition]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _directly_in(child)


def _function(module: object, path: list[str]) -> tuple[FunctionType, int]:
    """The outermost function of the path, without its decorators, and its depth."""
    found: object = module
    for depth, name in enumerate(path):
        found = inspect.getattr_static(found, name)
        for inner in ("__func__", "fget", "func"):
            found = getattr(found, inner, found) if not inspect.isfunction(found) else found
        found = inspect.unwrap(found) if callable(found) else found  # type: ignore[arg-type]
        if isinstance(found, FunctionType):
            return found, depth
    raise PlaceError("it is not a function")


def _code_of(outer: CodeType, node: Definition) -> CodeType:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    for code in outer.co_consts:
        if isinstance(code, CodeType) and (code.co_name, code.co_firstlineno) == (node.name, first):
            return code
    raise PlaceError(f"{node.name!r} is not compiled there")
