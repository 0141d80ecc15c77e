"""State in an implementation's modules: each process has its own, and simulated ranks share one.

Recognised are a `global` statement, a cached function, an attribute of a class that is set, and an
empty container at the top of a module or class that a function fills: `seen = {}` and `seen[key] =
value`, `calls = []` and `calls.append(1)`, `next(numbers)`. The modules are those of the package,
or the file and the files beside it that it imports, and what ranks have loaded of packages that
these import and that use torch.distributed: other packages know no ranks, and what they keep
explains nothing. State in another form is not seen.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.target import Target

_CONTAINERS = (
    *("dict", "list", "set", "count", "deque", "defaultdict", "OrderedDict", "Counter"),
    *("WeakSet", "WeakKeyDictionary", "WeakValueDictionary"),
)
_IMPORTS = re.compile(r"^\s*(?:import|from) +(\w+)", re.MULTILINE)
_OURS = {*sys.stdlib_module_names, "torch", "triton", "numpy", "spec_tests"}
_KNOWS_RANKS = re.compile(r"\btorch(\.| import )distributed\b")
_CACHE = re.compile(r"\b(lru_)?cache\b")
_FILLS = ("append", "add", "update", "setdefault", "extend", "pop", "insert", "clear")


def state_of(target: Target, modules: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the first place where a module of the implementation keeps state, or "".

    Args:
        modules: files of what ranks have imported, by name; those count that its own files name.
    """
    own = [*_files(target)]
    named = {name for file in own for name in _IMPORTS.findall(file.read_text(errors="replace"))}
    for file in [*own, *_of_packages(named - _OURS, modules)]:
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # no Python, or not readable
            if place := _first(ast.parse(file.read_bytes())):
                return f"{file.name}:{place}"
    return ""


def loaded(ctx: Context) -> dict[str, str]:
    """Return the files of this rank's modules, by name (rank body)."""
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    return {name: file for name, file in files.items() if file}


def _files(target: Target) -> Iterator[Path]:
    if target.impostor is not None:
        return
    path = target.path
    if path is None:
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(target.module)
            path = Path(found.origin) if found and found.has_location and found.origin else None
            path = path.parent if path and path.name == "__init__.py" else path
    if path is not None and path.is_dir():
        yield from sorted(path.rglob("*.py"))
    elif path is not None:
        yield path
        text = path.read_text(errors="replace")
        for beside in sorted(path.parent.glob("*.py")):
            if re.search(rf"^\s*(import|from) {re.escape(beside.stem)}\b", text, re.MULTILINE):
                yield beside


def _of_packages(names: set[str], modules: Mapping[str, str]) -> Iterator[Path]:
    """Yield the loaded files of those packages that use torch.distributed."""
    for package in sorted(names):
        parts = [Path(f) for n, f in modules.items() if n.partition(".")[0] == package]
        files = [file for file in parts if file.suffix == ".py" and file.is_file()]
        if any(_KNOWS_RANKS.search(file.read_text(errors="replace")) for file in files):
            yield from files


def _first(tree: ast.Module) -> str:
    """Return line and words of the first state in a module, or ""."""
    filled: set[str] = set()
    nodes = list(ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    for node in nodes:
        if place := _changed(node, {"cls", *(kind.name for kind in classes)}):
            return place
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            filled |= {name for inner in ast.walk(node) for name in _filled(inner)}
    for statement in [*tree.body, *(inner for kind in classes for inner in kind.body)]:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_empty(statement.value):
            targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
            inside = [inner for target in targets for inner in ast.walk(target)]
            if any(isinstance(name, ast.Name) and name.id in filled for name in inside):
                return f"{statement.lineno}: `{ast.unparse(statement)}`"
    return ""


def _changed(node: ast.AST, classes: set[str]) -> str:
    """Return line and words of what a node alone shows to be state, or ""."""
    if isinstance(node, ast.Global):
        return f"{node.lineno}: `{node.names[0]}`"
    if isinstance(node, ast.FunctionDef):
        cached = (words for words in map(ast.unparse, node.decorator_list) if _CACHE.search(words))
        return next((f"{node.lineno}: `@{words}`" for words in cached), "")
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        is_of_class = isinstance(node.value, ast.Name) and node.value.id in classes
        return f"{node.lineno}: `{ast.unparse(node)}`" if is_of_class else ""
    return ""


def _filled(node: ast.AST) -> Iterator[str]:
    """Yield the name that an expression writes to, if it writes into a container."""
    written: ast.AST | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        written = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        written = node.func.value if node.func.attr in _FILLS else None
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "next" and node.args:
        written = node.args[0]
    if isinstance(written, ast.Name | ast.Attribute):
        yield written.id if isinstance(written, ast.Name) else written.attr


def _is_empty(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Tuple):
        return any(map(_is_empty, value.elts))
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func).rpartition(".")[2]
        holds = bool(value.args or value.keywords) and name not in ("count", "defaultdict")
        return name in _CONTAINERS and not holds
    held = getattr(value, "keys", getattr(value, "elts", None))
    return isinstance(value, ast.Dict | ast.List | ast.Set) and not held
