"""Source patches: a near-miss of one changed line, or a few, applied at import.

A patch is `(module, find, replace)`: text within a line, or lines that end with a newline, and may
be indented further in the module. The module's source is changed as it is imported, inside the
rank and nowhere else; no file is touched. The reference is imported anew as a whole, of
`spec_tests.plain` a copy that nobody else sees. `find` must occur exactly once: a patch that no
longer fits is an error, not an impostor that silently behaves.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import itertools
import linecache
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

Patch = tuple[str, str, str]


class StalePatchError(Exception):
    """The text to replace is not there, or is there more than once."""


def patches_of(module: str, difference: Sequence[str]) -> tuple[Patch, ...]:
    """Return the patches that a difference says, see `card.Source`."""
    found: list[Patch] = []
    before: list[str] = []
    after: list[str] = []
    for line in (*difference, "..."):
        if line.startswith(("...", "@ ")):
            if before:
                found.append((module, "".join(before), "".join(after)))
            before, after = [], []
            module = line[2:] if line.startswith("@ ") else module
            continue
        if not line.startswith(("- ", "+ ", "  ")):
            raise ValueError(f'expected a line that begins with "- ", "+ " or "  ", got {line!r}')
        before += [f"{line[2:]}\n"] * (line[0] != "+")
        after += [f"{line[2:]}\n"] * (line[0] != "-")
    return tuple(found)


def changed(text: str, find: str, replace: str, name: str = "") -> str:
    """Return the text of a module with a patch.

    Raises:
        StalePatchError: what is to be replaced is not there, or is there more than once.
    """
    indents = range(0, 24, 4) if find.endswith("\n") else [0]
    places: list[tuple[str, str]] = []
    for spaces in indents:
        old, new = (textwrap.indent(part, " " * spaces) for part in (find, replace))
        place = ("(?m)^" if find.endswith("\n") else "") + re.escape(old)
        places += [(place, new)] * len(re.findall(place, text))
    if len(places) != 1:
        raise StalePatchError(f"{name}: expected {find!r} once, found it {len(places)} times")
    [(place, new)] = places
    return re.sub(place, lambda _: new, text)


class _PatchingLoader(importlib.machinery.SourceFileLoader):
    replacements: tuple[tuple[str, str], ...] = ()

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        if not path.endswith(".py"):
            raise OSError("no cached bytecode: it would be that of the unpatched source")
        text = data.decode()
        for find, replace in self.replacements:
            text = changed(text, find, replace, self.name)
        # Triton compiles what `inspect` says that the source is, which would be the file's.
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        return text.encode()

    def set_data(self, *args: object, **kwargs: object) -> None:
        """Write no bytecode of patched source."""


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, patches: Sequence[Patch]) -> None:
        self.patches = patches

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        own = tuple((find, replace) for name, find, replace in self.patches if name == fullname)
        found = importlib.machinery.PathFinder.find_spec(fullname, path) if own else None
        if found is None or found.origin is None:
            return None
        loader = _PatchingLoader(fullname, found.origin)
        loader.replacements = own
        found.loader = loader
        return found


@contextlib.contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    """Within the block, imports of the named modules see the changed source.

    Raises:
        StalePatchError: a patch does not fit, or its module was imported before or not at all.
    """
    early = [name for name, _, _ in patches if name in sys.modules]
    if early:
        raise StalePatchError(f"already imported, too late to patch: {', '.join(early)}")
    finder = _Finder(patches)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
    missed = [name for name, _, _ in patches if name not in sys.modules]
    if missed:
        raise StalePatchError(f"never imported, so never patched: {', '.join(missed)}")


def package_of(module: str, implementation: str) -> str:
    """Return what has to be imported anew where a module is patched.

    That is the implementation, or of a foreign module the innermost package with a public name.
    """
    if module.startswith(f"{implementation}."):
        return implementation
    public = itertools.takewhile(lambda part: not part.startswith("_"), module.split("."))
    return ".".join(public).removesuffix(f".{module.rpartition('.')[2]}")


def forget(package: str) -> None:
    """Let `package` be imported anew, so that it can be patched although the zygote has it."""
    inside = f"{package}."
    for name in [name for name in sys.modules if name == package or name.startswith(inside)]:
        for value in list(vars(sys.modules.pop(name)).values()):
            if type(value).__name__ == "Library":  # torch's: its operators are registered anew
                value._destroy()


def patched_class(code: type, patches: Sequence[Patch]) -> Any:
    """Return the class of that name from a copy of its package that has the patches.

    Raises:
        StalePatchError: a patch does not fit, or its module is not imported with the package.
    """
    package = code.__module__.rpartition(".")[0]
    inside = f"{package}."
    kept = {name: sys.modules[name] for name in sys.modules if f"{name}.".startswith(inside)}
    forget(package)
    # What the package itself imports is not wanted: this is a package of the same files alone.
    bare = sys.modules[package] = ModuleType(package)
    bare.__path__ = kept[package].__path__
    try:
        with patched(patches):
            return getattr(importlib.import_module(code.__module__), code.__name__)
    finally:
        forget(package)
        sys.modules.update(kept)
        parent, _, name = package.rpartition(".")
        setattr(sys.modules[parent], name, kept[package])
