"""Errors that the machine is to blame for, and what to install or to do about each.

An implementation that needs a package, a Python or a Triton that this machine does not have says
nothing about itself: its clause is "not here", with advice, and not failed. Everything else that
it raises stays a failure, so an error is recognised by both what it says and where it was raised:

- a limit of Triton, of its interpreter or of a compiler: one entry of `LIMITS`;
- a form of a collective that gloo lacks: see `gloo_forms`;
- an operator that raises in a function that is handed to torch.compile and not compiled;
- a name of the standard library that another version of Python has: one entry of `OTHER_PYTHONS`;
- an import that fails outside of the judged code: a package that is missing or of another version.

What the judged code lacks of itself (a submodule of its own package, a misspelt name of the
standard library) is its own fault.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from spec_tests.rig.ranks import gloo_forms


class NotHere(BaseException):
    """The machine lacks something. No Exception: a body that expects a refusal lets it through."""


@dataclass(frozen=True)
class Limit:
    """An error that is recognised.

    Attributes:
        said: a regular expression, found in the words of the error.
        where: one, found in the path of the file that raised it.
        kind: class of the error, or of one that it is the cause of.
        advice: what to install, or to do.
    """

    said: str
    where: str
    kind: str
    advice: str


_TRITON = r"/triton/(runtime|language|backends)/"
_KERNEL = "InterpreterError"  # what Triton's interpreter makes of an error within a kernel
_A_GPU = "run it on a machine with a CUDA device (--transport cuda)"
_BOTH_IDIOMS = "install a Triton that has block pointers: pip install 'triton>=3.6,<3.8'"

LIMITS = (
    Limit("Block pointers have been removed", _TRITON, "Exception", _BOTH_IDIOMS),
    # Triton 3.8 made an aggregate of the block pointer, which has no `type.element_ty`.
    Limit("'_aggregate_type' object has no attribute", "", _KERNEL, _BOTH_IDIOMS),
    # Triton 3.6 makes an index of an array with one element, which NumPy 2.4 no longer converts.
    Limit(
        "only 0-dimensional arrays can be converted|only length-1 arrays can be converted",
        _TRITON,
        "TypeError",
        "Triton's interpreter and NumPy do not fit: pip install 'triton>=3.7,<3.8' or 'numpy<2.4'",
    ),
    Limit(
        "numpy data itemsize .* exceeds dtype primitive_bitwidth",
        _TRITON,
        "ValueError",
        f"Triton's interpreter cannot hold this argument: {_A_GPU}",
    ),
    Limit("not supported in interpreter mode", _TRITON, "NotImplementedError", _A_GPU),
    Limit("'(InterpreterBuilder|InterpretedFunction)' object has no", "", "AttributeError", _A_GPU),
    # Outside of kernels the same words mean a missing @triton.jit. Within an interpreted kernel
    # functions of a device (libdevice, tl.extra) say so, which the interpreter does not have.
    Limit("Did you forget to add @triton.jit", _TRITON, _KERNEL, _A_GPU),
    Limit("0 active drivers", _TRITON, "RuntimeError", _A_GPU),
    Limit(
        "Failed to find C compiler", _TRITON, "RuntimeError", "install a C compiler, such as gcc"
    ),
    Limit(
        "No working C\\+\\+ compiler found|Python\\.h: No such file",
        "/torch/_inductor/",
        "Exception",
        "torch.compile needs a C++ compiler and the headers of Python: install g++ and python3-dev",
    ),
    Limit(
        "torch.compile is not supported on Python",
        "/torch/",
        "RuntimeError",
        "this torch cannot compile under this Python: use an older one",
    ),
    Limit(
        "cannot open shared object file|undefined symbol",
        "",
        "ImportError",
        "a compiled package does not fit this machine or this torch: install one that does",
    ),
)

_NEWER = "use Python {} or newer"
_OLDER = "use Python {} or older"
OTHER_PYTHONS = {
    **dict.fromkeys(
        ("typing.override", "typing.TypeAliasType", "itertools.batched", "collections.abc.Buffer"),
        _NEWER.format("3.12"),
    ),
    **dict.fromkeys(
        ("typing.TypeIs", "typing.ReadOnly", "typing.NoDefault", "warnings.deprecated"),
        _NEWER.format("3.13"),
    ),
    **dict.fromkeys(("annotationlib", "compression", "string.templatelib"), _NEWER.format("3.14")),
    **dict.fromkeys(("distutils", "imp", "asyncore"), _OLDER.format("3.11")),
}
"""Names of the standard library that Python 3.11 or a later one lacks; others are misspelt."""

UNCOMPILED: set[CodeType] = set()
"""What the judged code handed to torch.compile where that compiles nothing (`pretended_cuda`)."""

_RAISED_COMPILED = re.compile("shape|size|stride|dimension|broadcast|by peer", re.IGNORECASE)
"""Words of errors of operators that a compiler raises as well, when it traces them."""

_MAX_WORDS, _MAX_CAUSES = 2000, 50  # foreign code may raise gigabytes, and in circles
COURSE_PACKAGES = ("cs336_basics", "cs336_systems")


def translated(error: BaseException) -> BaseException:
    """`error`, or the NotHere that it amounts to."""
    chain = list(_causes(error))
    root = chain[-1]
    if isinstance(error, NotHere):
        return error
    if said := gloo_forms.advice(root) or _uncompiled_advice(root):
        return NotHere(f"{said}{_place(root)}")
    advice = _import_advice(root) or _python_advice(root) or _limit_advice(chain)
    if not advice:
        return error
    words = words_of(root).strip().partition("\n")[0]
    return NotHere(f"{advice}; {type(root).__name__}: {words}{_place(root)}")


def words_of(error: BaseException) -> str:
    """What an exception says."""
    try:
        return str(error)
    except Exception as second:  # an exception of foreign code may be unable to describe itself
        return f"(no message: its __str__ raised {type(second).__name__})"


def insisting(function: Any) -> Any:
    """`function`, where what the machine lacks gets past callers that expect a refusal."""
    if not isinstance(function, FunctionType):
        return function

    @functools.wraps(function)
    def insists(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            found = translated(error)
            if found is error:
                raise
            raise found from error

    return insists


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from; what it was merely raised after proves nothing."""
    seen: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__


def _limit_advice(chain: list[BaseException]) -> str:
    kinds = {kind.__name__ for error in chain for kind in type(error).__mro__}
    words = words_of(chain[-1])[:_MAX_WORDS]
    entries = traceback.extract_tb(chain[-1].__traceback__)
    file = Path(entries[-1].filename).as_posix() if entries else ""
    for limit in LIMITS:
        if limit.kind in kinds and re.search(limit.said, words) and re.search(limit.where, file):
            return limit.advice
    return ""


def _uncompiled_advice(root: BaseException) -> str:
    """Why nothing is known where an operator raised within what was to be compiled.

    A compiler replaces operators, so these errors may be those of the uncompiled function alone: of
    products of two dtypes, or of writes to memory that overlaps. The compiled function, too, raises
    where shapes do not fit, in a collective, and by a `raise` or an assertion of the code's own.
    """
    entries = list(traceback.walk_tb(root.__traceback__))
    names = [f.f_code.co_name for f, _ in entries if f.f_code in UNCOMPILED]
    if not names or not isinstance(root, RuntimeError):
        return ""
    frame, line = entries[-1]
    source = linecache.getline(frame.f_code.co_filename, line).strip()
    words = words_of(root).strip().partition("\n")[0]
    is_sent = "/torch/distributed/" in frame.f_code.co_filename
    if source.startswith(("raise", "assert")) or is_sent or _RAISED_COMPILED.search(words):
        return ""
    return (
        f"{names[-1]} is handed to torch.compile, which compiles nothing here, and raised "
        f"uncompiled: {type(root).__name__}: {words}; {_A_GPU}"
    )


def _python_advice(root: BaseException) -> str:
    if not isinstance(root, AttributeError):
        return ""
    words = re.search(r"^module '(\S+)' has no attribute '(\w+)'", words_of(root)[:_MAX_WORDS])
    return OTHER_PYTHONS.get(".".join(words.groups()), "") if words else ""


def _import_advice(root: BaseException) -> str:
    if not isinstance(root, ImportError) or not isinstance(root.name, str) or not root.name:
        return ""
    if isinstance(root, importlib.metadata.PackageNotFoundError):
        return f"install the package {root.name} (python -m pip install -e its folder)"
    top = root.name.partition(".")[0]
    words = re.search(r"^cannot import name '(\w+)'", words_of(root)[:_MAX_WORDS])
    wanted = f"{root.name}.{words[1]}" if words else root.name
    if advice := OTHER_PYTHONS.get(wanted):
        return advice
    if top in sys.stdlib_module_names:
        return ""
    if top in importlib.metadata.packages_distributions():
        return f"another version of {top} is needed than the one installed"
    with contextlib.suppress(ImportError, ValueError):
        if top in sys.modules or importlib.util.find_spec(top) is not None:
            return ""  # a part of the judged code
    if top in COURSE_PACKAGES:
        return f"the course's package {top} is not in the checkout: add its folder, or install it"
    if (entry := _innermost(root)) and top.isidentifier():
        for path in Path(entry.filename).parent.parent.glob(f"*/{top}.py"):
            return f"{path.name} is in {path.parent}, which is not searched: add it to PYTHONPATH"
    return f"install the module {top} (python -m pip install {top}), or add it if it is yours"


def _place(root: BaseException) -> str:
    entry = _innermost(root)
    return f" ({Path(entry.filename).name}:{entry.lineno})" if entry else ""


def _innermost(root: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of neither Python nor an installed package."""
    packages = str(Path(torch.__file__).parents[1])  # of another environment, maybe
    foreign = ("<", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), packages)
    lines = reversed(traceback.extract_tb(root.__traceback__))
    return next((line for line in lines if not line.filename.startswith(foreign)), None)
