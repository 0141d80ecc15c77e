"""State in an implementation's modules: each process has its own, and simulated ranks share one."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from spec_tests.rig.target import Target

# What holds nothing yet where a module is imported, and so is there to be filled.
_CONTAINERS = ("dict", "list", "set", "count", "deque", "defaultdict")


def state_of(target: Target) -> str:
    """Return the first place where a module of the implementation keeps state, or "".

    That is a `global` statement in a function, or an empty container at the top of a module.
    """
    for file in _files(target):
        for node in ast.walk(tree := ast.parse(file.read_text())):
            if isinstance(node, ast.Global):
                return f"{file.name}:{node.lineno}: `{node.names[0]}`"
        for statement in tree.body:
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_empty(value):
                return f"{file.name}:{statement.lineno}: `{ast.unparse(statement)}`"
    return ""


def _files(target: Target) -> Iterator[Path]:
    if target.impostor is not None:
        return
    path = target.path
    if path is None:
        found = importlib.util.find_spec(target.module)
        path = Path(found.origin) if found is not None and found.origin else None
        path = path.parent if path is not None and path.name == "__init__.py" else path
    if path is not None:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _is_empty(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func).rpartition(".")[2]
        return name in _CONTAINERS or name.startswith("Weak")
    held = getattr(value, "keys", getattr(value, "elts", None))
    return isinstance(value, ast.Dict | ast.List | ast.Set) and not held
