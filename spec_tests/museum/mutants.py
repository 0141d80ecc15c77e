"""Mutants: one small change by machine, of a module that is right.

`--impl impostor:mutant.MODULE.NUMBER` judges one; `programs.meter` judges many. The operators are
kinds of change that were once missed: DeMillo, Lipton, Sayward 1978, Hints on Test Data Selection;
Jia and Harman 2011, An Analysis and Survey of the Development of Mutation Testing, section 3.
"""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spec_tests.museum.card import Impostor

PREFIX = "mutant."
_PAIRS = [
    (ast.And, ast.Or),
    (ast.Eq, ast.NotEq),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
]
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = dict(_PAIRS + [(b, a) for a, b in _PAIRS])
_NAMES = {"any": "all", "all": "any", "min": "max", "max": "min"}
_PASSED_THROUGH = ("clone", "detach", "contiguous", "wait")


def _changes(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield what a node may become; None where a statement goes."""
    if isinstance(node, ast.stmt):
        yield from _of_statement(node)
    match node:
        case ast.If() | ast.IfExp():
            for test in (
                ast.UnaryOp(ast.Not(), node.test),
                ast.Constant(True),
                ast.Constant(False),
            ):
                yield _with(node, test=test)
        case ast.BoolOp() | ast.BinOp() if type(node.op) in _SWAPPED:
            yield _with(node, op=_SWAPPED[type(node.op)]())
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            yield _with(node, ops=[_SWAPPED[type(op)]()])
        case ast.UnaryOp(ast.Not()):
            yield node.operand
        case ast.Call():
            yield from _of_call(node)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)


def _of_statement(node: ast.stmt) -> Iterator[ast.AST | None]:
    match node:
        case ast.Expr(ast.Constant() | ast.Yield()):
            return
        case ast.Expr() | ast.Assign() | ast.AugAssign():
            yield None
        case ast.Return(ast.expr()):
            yield _with(node, value=None)
        case ast.For():
            one = ast.Slice(None, ast.Constant(1))
            whole = ast.Call(ast.Name("list"), [node.iter], [])
            yield _with(node, iter=ast.Subscript(whole, one))


def _of_call(node: ast.Call) -> Iterator[ast.AST]:
    match node.func:
        case ast.Name(name) if name in _NAMES:
            yield _with(node, func=ast.Name(_NAMES[name]))
        case ast.Attribute(value, name) if name in _PASSED_THROUGH:
            yield value


def _with(node: ast.AST, **changes: Any) -> ast.AST:
    found = copy.copy(node)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@dataclass(frozen=True)
class Mutant:
    """A changed module: its number among the mutants of the module, and both sources.

    Attributes:
        function: the outermost function that was changed, and the line where it begins.
    """

    module: str
    number: int
    function: str
    before: str
    after: str

    @property
    def is_held_out(self) -> bool:
        """Whether its function is one of the third that is counted and not read."""
        return int(sha256(f"{self.module} {self.function}".encode()).hexdigest(), 16) % 3 == 0

    @property
    def id(self) -> str:
        """As `--impl impostor:` takes it."""
        return f"{PREFIX}{self.module}.{self.number}"

    def difference(self) -> str:
        """Return the changed lines."""
        before, after = (text.splitlines() for text in (self.before, self.after))
        return "\n".join([*difflib.unified_diff(before, after, lineterm="", n=1)][2:])


class Source:
    """A module's source without comments, and what single changes make of it.

    Args:
        text: Python source.
    """

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.before = ast.unparse(self.tree)
        self.changes = [
            (*place, ast.Pass() if change is None else change)
            for place in _places(self.tree)
            for change in _changes(place[-1])
        ]

    def after(self, number: int) -> str:
        """Return the source with that change alone."""
        _, parent, field, index, node, change = self.changes[number]
        _put(parent, field, index, change)
        found = ast.unparse(self.tree)
        _put(parent, field, index, node)
        return found


@cache
def source(module: str) -> Source:
    """Return the source of a module.

    Raises:
        ValueError: There is no such module with Python source.
    """
    spec = find_spec(module)
    if spec is None or not (spec.origin or "").endswith(".py"):
        raise ValueError(f"expected a module with Python source, got {module!r}")
    return Source(Path(str(spec.origin)).read_text(encoding="utf-8"))


def of(module: str, number: int) -> Mutant:
    """Return the mutant of that number; some are equal to others, or to what was changed."""
    found = source(module)
    return Mutant(module, number, found.changes[number][0], found.before, found.after(number))


def _places(tree: ast.AST) -> Iterator[tuple[str, ast.AST, str, int | None, ast.AST]]:
    """Yield every node inside of a function: that, and where the node hangs; annotations aside."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        name = f"{function.name} {function.lineno}"
        for parent in (child for stmt in function.body for child in ast.walk(stmt)):
            if isinstance(parent, ast.FunctionDef | ast.arguments | ast.JoinedStr | ast.Raise):
                continue
            for field, value in ast.iter_fields(parent):
                children = value if isinstance(value, list) else [value]
                for index, child in enumerate(children):
                    if isinstance(child, ast.AST) and field != "annotation":
                        at = index if isinstance(value, list) else None
                        yield name, parent, field, at, child
        for index, stmt in enumerate(function.body):
            yield name, function, "body", index, stmt


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def find(words: str) -> Impostor:
    """Return the card of `mutant.MODULE.NUMBER`.

    Raises:
        ValueError: There is no such mutant.
    """
    module, _, number = words.removeprefix(PREFIX).rpartition(".")
    count = len(source(module).changes)
    if not number.isdecimal() or int(number) >= count:
        raise ValueError(f"expected a number below {count} after {module}, got {number!r}")
    text = Path(str(find_spec(module).origin)).read_text(encoding="utf-8")  # type: ignore[union-attr]  # `source` found it
    mutant = of(module, int(number))
    patches = ((module, text, mutant.after),)
    return Impostor(words, mutant.difference(), "a machine", "", ("any",), patches=patches)
