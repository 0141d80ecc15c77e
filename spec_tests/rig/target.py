"""Which implementation is judged, and how a rank loads it.

What `--impl` takes is resolved to a `Target` by spec_tests/impls, in the parent. The code is loaded
in the ranks: it may patch torch, exit or hang, and it never sees an expected value. A function that
an implementation leaves out becomes a stand-in that says so when it is called.
"""

from __future__ import annotations

import dis
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from spec_tests.contract import DEFAULTS, FUNCTIONS, OPTIONAL_METHODS
from spec_tests.rig.ranks import not_here

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
REPOSITORY_ROOT = PACKAGE_ROOT.parent
ADAPTERS = PACKAGE_ROOT / "impls"


class NotOfferedError(NotImplementedError):
    """Raised by the stand-in of a contract function that the implementation leaves out."""


@dataclass(frozen=True)
class Target:
    """An implementation, named but not loaded.

    Attributes:
        name: as the report shows it.
        module: name under which it is imported.
        path: file or package folder to load, or None for an importable module.
        impostor: id of the near-miss to build on top of it, if any.
        layout: the course whose layout `path` has, a module of spec_tests/impls; None for a plain
            one.
        pretends_cuda: ranks on a CPU stand in for CUDA, see `rig.ranks.pretended_cuda`.
    """

    name: str
    module: str
    path: Path | None = None
    impostor: str | None = None
    layout: str | None = None
    pretends_cuda: bool = False

    def __repr__(self) -> str:
        # Hypothesis prints it next to the drawn values.
        return self.name

    @property
    def expectations(self) -> Path | None:
        """The TOML file of declared deviations that belongs to this implementation."""
        if self.path is None or self.impostor is not None:
            return None
        beside = self.path / "expectations.toml" if self.path.is_dir() else self.path
        return beside.with_suffix(".toml")


class Implementation:
    """The functions of an implementation, by the names of the contract.

    Attribute access gives the function, its default (see `contract.DEFAULTS`), or a stand-in that
    raises NotOfferedError. `offered` names what the implementation itself brings; what it only
    works with and did not write, its `BORROWED`, is there and not judged. `misfits` says which of
    the offered cannot be called as the contract calls it, and why.
    """

    def __init__(self, name: str, namespace: object) -> None:
        self.name = name
        self.namespace = namespace
        borrowed = getattr(namespace, "BORROWED", ())
        self.offered = tuple(
            function
            for function in FUNCTIONS
            if callable(own := getattr(namespace, function, None))
            and not is_left_open(own)
            and function not in borrowed
        )
        reasons = {name: _misfit(name, getattr(namespace, name)) for name in self.offered}
        self.misfits = {name: reason for name, reason in reasons.items() if reason}

    def __getattr__(self, function: str) -> Callable[..., Any]:
        found = getattr(self.namespace, function, None)
        if callable(found):
            return not_here.insisting(found)  # type: ignore[no-any-return]  # foreign code
        if function in DEFAULTS:
            return DEFAULTS[function]
        if function in FUNCTIONS:
            return _stand_in(self.name, function)
        raise AttributeError(f"{function!r} is no function of the contract")


def _misfit(name: str, function: Callable[..., Any]) -> str:
    """Why `function` cannot take what the contract's callers must pass; empty if it can.

    What the contract gives a default for is passed by some clauses only, and those say so.
    """
    promised = FUNCTIONS[name]
    every = inspect.signature(promised).parameters.values()
    needed = [p for p in every if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):  # built in, or with a signature of its own making
        return ""
    args = [None for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kwargs = {p.name: None for p in needed if p.kind is p.KEYWORD_ONLY}
    try:
        own.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join([p.name for p in needed[: len(args)]] + [f"{k}=" for k in kwargs])
        return (
            f"expected a function that can be called as {name}({names}), got {name}{own}: {error}; "
            f"see `{name}` in {promised.__module__.replace('.', '/')}.py"
        )
    return ""


def is_left_open(function: object) -> bool:
    """Whether a function does nothing but raise NotImplementedError: announced, not offered.

    Told from its code, since a refusal is a right answer to some calls: one that refuses them all
    would pass every clause on refusals.
    """
    code = getattr(function, "__code__", None)
    if code is None or code.co_names != ("NotImplementedError",):
        return False
    return not any(
        step.opname.startswith(("RETURN", "YIELD")) for step in dis.get_instructions(code)
    )


def _stand_in(name: str, function: str) -> Callable[..., Any]:
    def not_offered(*args: object, **kwargs: object) -> Any:
        raise NotOfferedError(f"{name} does not offer {function}()")

    return not_offered


def without_method(error: BaseException) -> BaseException:
    """Return `error`, or what it amounts to where the suite asked an object for a method.

    One that the contract lets it lack is a NotOfferedError; of any other the words say what was
    expected. What other code asks for is that code's fault: the line that asked decides, before any
    `__getattr__` that answered.
    """
    if not isinstance(error, AttributeError) or error.name is None:
        return error
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name not in _ANSWERS]
    if not frames or not Path(frames[-1].filename).resolve().is_relative_to(PACKAGE_ROOT):
        return error
    kind, name = type(error.obj).__name__, error.name
    found: BaseException = error
    if name in _OPTIONAL and error.obj is not None:
        found = NotOfferedError(f"not offered: {kind}.{name}()")
    elif name in _REQUIRED:
        found = AttributeError(f"expected {_REQUIRED[name]}, which has {name}, got {kind}")
    return found.with_traceback(error.__traceback__)


_REQUIRED = {
    "step": "a trainer or an optimizer",
    "full_parameters": "a trainer",
    **dict.fromkeys(("zero_grad", "param_groups", "state", "defaults"), "an optimizer"),
    **dict.fromkeys(("parameters", "named_parameters", "modules", "train", "eval"), "a module"),
}
"""What the contract says that an object is which must have a method."""
_OPTIONAL = frozenset(name for names in OPTIONAL_METHODS.values() for name in names)
_ANSWERS = ("__getattr__", "__getattribute__")


class OffersNothingError(ValueError):
    """An implementation that loads, and has none of the contract's functions."""


def load(target: Target, *, device: str = "cpu") -> Implementation:
    """Import the implementation. Called in ranks only.

    Args:
        device: type of the device that the rank computes on, or says that it does.

    Raises:
        whatever the implementation raises when it is imported.
        OffersNothingError: if it has none of the contract's functions.
    """
    if target.impostor is not None:
        namespace: object = resolve_name("spec_tests.museum:build")(target.impostor, target)
    elif target.layout is not None:
        offer = resolve_name(f"spec_tests.impls.{target.layout}:offer")
        namespace = offer(target.path, device)
    else:
        namespace = import_target(target)
    implementation = Implementation(target.name, namespace)
    if not any(callable(getattr(namespace, function, None)) for function in FUNCTIONS):
        raise OffersNothingError(
            f"{target.name} offers none of the contract's functions; expected at least one of "
            f"{', '.join(FUNCTIONS)}. See spec_tests/contract"
        )
    return implementation


def import_target(target: Target) -> ModuleType:
    """Import the module or file that `target` names, without any impostor on top."""
    if target.path is None:
        return importlib.import_module(target.module)
    file = target.path / "__init__.py" if target.path.is_dir() else target.path
    folders = [str(target.path)] if target.path.is_dir() else None
    # Its own folder first, as if it had been started there: helpers beside it are found. Not the
    # adapters' folder: their files have the names of the libraries that they import.
    if target.path.parent != ADAPTERS:
        sys.path.insert(0, str(target.path.parent))
    return execute(target.module, file, folders)


def execute(name: str, file: Path, folders: list[str] | None = None) -> ModuleType:
    """Import a file as the module `name`; `folders` are a package's, for its own modules."""
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
