"""How a file out of somebody's checkout is imported, in a rank, as if Python had started there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from spec_tests.rig.target import execute, is_left_open


def import_file(root: Path, name: str, *, search: Sequence[str] = ()) -> ModuleType:
    """Import `a.b` from `root/a/b.py`; its own imports find `root` and the folders of `search`.

    Under its own name and with its packages, since files of a checkout import each other by them;
    by location, so that a package called `tests` or `data` elsewhere is no clash.

    Raises:
        whatever the file raises.
        ImportError: there is no such file, or it is no Python.
    """
    for folder in [*search, "."]:
        if (path := root / folder).is_dir():
            sys.path.insert(0, str(path.resolve()))
    package, _, _ = name.rpartition(".")
    if package:
        _import_package(root, package)
    return execute(name, root.joinpath(*name.split(".")).with_suffix(".py"))


class _Uninstalled(Distribution):
    """What pip would know of a package, had it been installed out of its checkout."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        """Its name, and a version that nothing depends on."""
        return f"Name: {self._name}\nVersion: 0\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """Where it would lie, if it had files."""
        return Path(path)


class _Versions(DistributionFinder):
    """Asked last: packages that read their own version at import need not be installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, *ignored: object) -> None:
        """Nothing is imported from here."""

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """The one that is asked for, if it is one of ours."""
        for name in self._names:
            if name == getattr(context, "name", None):
                yield _Uninstalled(name)


def give_versions(*names: str) -> None:
    """Let `importlib.metadata` know these packages, where it would not."""
    sys.meta_path.append(_Versions(names))


def _import_package(root: Path, name: str) -> None:
    folder = root / name
    if str(folder) in getattr(sys.modules.get(name), "__path__", ()):
        return
    if (folder / "__init__.py").is_file():
        execute(name, folder / "__init__.py", [str(folder)])
    else:
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(folder)]


def offered(module: ModuleType, *names: str) -> Callable[..., Any] | None:
    """The first of these functions that the module has and does not leave open."""
    for name in names:
        found = getattr(module, name, None)
        if callable(found) and not is_left_open(found):
            return found  # type: ignore[no-any-return]  # foreign code
    return None


def refuse_group(name: str, process_group: object) -> None:
    """Say that a course's function knows no groups.

    Raises:
        NotImplementedError: a group was asked for.
    """
    if process_group is not None:
        raise NotImplementedError(f"{name} takes no process_group: the exercise asks for none")
