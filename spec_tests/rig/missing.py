"""Modules that an implementation imports first thing and that are not installed.

A rank would find out, once torch is loaded. Read from the source are imports at the top level of a
file, and of the files beside it that those lead to; nothing is run. Silent where there is doubt: in
a `try`, in an `if`, or where a file changes where modules are looked for.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from spec_tests.rig.not_here import translated

CHANGES = ("sys.path", "sys.modules", "meta_path", "site.addsitedir")
"""Words of a file that may find modules in places of its own."""
MAX_FILES = 200


def missing(spec: str) -> str:
    """What to install, and which line asks for it; empty if nothing is known to be missing.

    Args:
        spec: an implementation, as `--impl` takes it.
    """
    layout, colon, path = spec.partition(":")
    if colon and layout == "cs336":
        root = Path(path).absolute()
        return _missing(root / "tests" / "adapters.py", [root, *sorted(root.glob("*/"))])
    root = Path(path if colon and layout == "effdl" else spec).absolute()
    return _missing(root / "__init__.py" if root.is_dir() else root, [root.parent])


def _missing(entry: Path, folders: list[Path]) -> str:
    waiting, seen = [entry], {entry}
    while waiting and len(seen) <= MAX_FILES:
        file = waiting.pop(0)
        try:
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            return ""
        if any(word in text for word in CHANGES):
            return ""
        for line, name in _imports(tree):
            top = name.partition(".")[0]
            homes = [f for f in folders if (f / top).is_dir() or (f / f"{top}.py").is_file()]
            if homes:
                own = [path for path in _run_by(homes[0], name) if path not in seen]
                waiting += own
                seen.update(own)
            elif not _is_found(top):
                error = ModuleNotFoundError(f"No module named {name!r}", name=name)
                return f"{translated(error)} ({file.name}:{line})"
    return ""


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def _run_by(folder: Path, name: str) -> list[Path]:
    """Files in that folder that an import of `name` runs."""
    parts = name.split(".")
    packages = [folder.joinpath(*parts[:n], "__init__.py") for n in range(1, len(parts) + 1)]
    module = folder.joinpath(*parts).with_suffix(".py")
    return [path for path in [*packages, module] if path.is_file()]


def _is_found(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return True  # in doubt
