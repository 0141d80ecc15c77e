"""State in an implementation's modules: each process has its own, and simulated ranks share one.

Recognised are a `global` statement, and an empty container or a counter at the top of a module,
which is there to be filled: `seen = {}`, `calls = []`, `numbers = count()`. State in another form
(a cache, a class attribute, another file's module) is not seen.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from spec_tests.rig.target import Target

_CONTAINERS = ("dict", "list", "set", "count", "deque", "defaultdict")


def state_of(target: Target) -> str:
    """Return the first place where a module of the implementation keeps state, or ""."""
    for file in _files(target):
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # no Python, or not readable
            if place := _first(ast.parse(file.read_bytes())):
                return f"{file.name}:{place}"
    return ""


def _files(target: Target) -> Iterator[Path]:
    if target.impostor is not None:
        return
    path = target.path
    if path is None:
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(target.module)
            path = Path(found.origin) if found and found.has_location and found.origin else None
            path = path.parent if path and path.name == "__init__.py" else path
    if path is not None:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _first(tree: ast.Module) -> str:
    """Return line and words of the first state in a module, or ""."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            return f"{node.lineno}: `{node.names[0]}`"
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_empty(statement.value):
            return f"{statement.lineno}: `{ast.unparse(statement)}`"
    return ""


def _is_empty(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func).rpartition(".")[2]
        holds = bool(value.args or value.keywords) and name not in ("count", "defaultdict")
        return name in _CONTAINERS and not holds
    held = getattr(value, "keys", getattr(value, "elts", None))
    return isinstance(value, ast.Dict | ast.List | ast.Set) and not held
