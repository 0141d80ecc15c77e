"""What crosses the pipe between the parent and a rank, and how failures keep their shape.

Values are pickled (protocol 5) with one change: a tensor travels as NumPy bytes plus its dtype.
That costs 28-54 us for eight small matrices and opens no descriptor, whereas the reducers of
torch.multiprocessing leak one descriptor per tensor. A DTensor is refused, because its local
piece without its mesh is easily mistaken for the whole.

What a rank sends is read as data; nothing that it names runs in the parent. A pickle names the
classes that it needs, and whoever reads it imports and calls them. A rank holds foreign code:
reading what it sent as pickle does would run that code in the parent, where one `os._exit(0)` ends
the run with the status of success. Admitted are builtin containers and exceptions, what NumPy and
torch need for arrays, dtypes, shapes and devices, and records of the suite itself, classes only, of
modules that are already imported.

Exceptions travel as text plus frames. `RemoteError.rebuild_traceback` turns the frames into a real
traceback, so pytest shows the rank's own source lines, and hypothesis, which tells bugs apart
by exception type and innermost line, keeps two bugs two.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import linecache
import pickle
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch

from spec_tests.rig.ranks import not_here
from spec_tests.rig.target import without_method

# bfloat16 and the 8-bit floats have no NumPy twin: their bits travel as integers of equal width.
_BITS_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


def _rebuild_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    # A copy: arrays that come out of a pickle are read-only and torch would warn.
    tensor = torch.from_numpy(array.copy())
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    if hasattr(tensor, "to_local"):
        raise TypeError(
            f"expected a plain tensor, got a {type(tensor).__name__} of shape "
            f"{tuple(tensor.shape)}: return "
            "tensor.full_tensor() where the whole is meant, tensor.to_local() for this rank's part"
        )
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    if plain.dtype not in _NUMPY_DTYPES:
        plain = plain.view(_BITS_BY_ITEMSIZE[plain.dtype.itemsize])
    return _rebuild_tensor, (plain.numpy(), tensor.dtype)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, torch.Tensor):
            return _reduce_tensor(obj)
        return NotImplemented


def dumps(value: object) -> bytes:
    """Pickle `value`; tensors by content. Raises TypeError or PicklingError with the reason."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """The inverse of `dumps`, in a rank. What comes *from* a rank is for `received` to read."""
    return pickle.loads(data)


# ------------------------------------------------------------------------- what comes from a rank

_BUILTINS = (bool, int, float, complex, str, bytes, bytearray)
_CONTAINERS = (list, tuple, dict, set, frozenset, range, slice)
_COLLECTIONS = (collections.OrderedDict, collections.defaultdict, collections.Counter)
_OTHERS = frozenset(
    {
        *((kind.__module__, kind.__qualname__) for kind in (*_BUILTINS, *_CONTAINERS)),
        *((kind.__module__, kind.__qualname__) for kind in (*_COLLECTIONS, collections.deque)),
        *(("torch", name) for name in ("Size", "device")),
        *(("numpy", name) for name in ("ndarray", "dtype")),
        *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
        *((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
        *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
        (__name__, _rebuild_tensor.__name__),
    }
)

_Kind = TypeVar("_Kind")


class NotPlain(Exception):
    """What a rank sent is more than data, or no data at all."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if not _is_admitted(found, module):
            raise NotPlain(
                f"expected plain data, got what only {module}.{name} can rebuild, and nothing that "
                "belongs to an implementation is looked up or called outside of its ranks; return "
                "bool, int, float, str, None, tensors, or tuples, lists and dicts of them: of an "
                "object of a class of your own, its plain value"
            )
        return found


def _is_admitted(found: Any, module: str) -> bool:
    if module == "torch":
        return isinstance(found, torch.dtype)
    if not isinstance(found, type) or found.__module__ != module:
        return False
    if module == "builtins":
        return issubclass(found, BaseException)
    is_record = dataclasses.is_dataclass(found) or issubclass(found, tuple | enum.Enum)
    return is_record and module.startswith("spec_tests.")


def received(data: bytes, kind: type[_Kind]) -> _Kind:
    """The inverse of `dumps` for what comes from a rank.

    Args:
        data: the bytes as they came.
        kind: what they must be; `object` where any data will do.

    Raises:
        NotPlain: they name what is not admitted, are no pickle, or are something else than `kind`.
    """
    try:
        found = _Reader(io.BytesIO(data)).load()
    except NotPlain:
        raise
    except Exception as error:  # bytes of foreign code may be anything
        raise NotPlain(
            f"expected plain data, got what cannot be read: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(found, kind):
        raise NotPlain(f"expected a {kind.__name__}, got {type(found).__name__}")
    return found


# ------------------------------------------------------------------------------------ exceptions

# What is kept of an exception: of its words, and of a recursion's frames.
_MAX_TEXT = 20_000
_MAX_FRAMES = 200


@dataclass(frozen=True)
class Frame:
    """One line of a remote traceback."""

    filename: str
    lineno: int
    name: str


@dataclass(frozen=True)
class RemoteError:
    """An exception as a rank raised it.

    `kind` is the type's name, `bases` the names of its base classes: enough to ask "was it a
    ValueError?" about a type that the parent cannot import.
    """

    kind: str
    bases: tuple[str, ...]
    message: str
    frames: tuple[Frame, ...]
    text: str
    raised_ns: int

    @property
    def is_echo(self) -> bool:
        """True for an error that says no more than "another rank has gone away"."""
        if self.kind == "PeerGone":  # on simulated ranks
            return True
        phrases = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
        return any(phrase in self.message for phrase in phrases)

    @classmethod
    def of(cls, error: BaseException, raised_ns: int) -> RemoteError:
        """Describe `error`, or what machine or implementation lack; without frames of the rig."""
        error = without_method(not_here.translated(error))
        entries = [
            Frame(f.filename, f.lineno or 1, f.name)
            for f in traceback.extract_tb(error.__traceback__)
            if not f.filename.endswith(("/rig/ranks/rank.py", "/rig/ranks/not_here.py"))
        ]
        return cls(
            kind=type(error).__name__,
            bases=tuple(base.__name__ for base in type(error).__mro__),
            message=_shortened(not_here.words_of(error)),
            frames=tuple(entries[-_MAX_FRAMES:]),
            text=_shortened("".join(traceback.format_exception(error))),
            raised_ns=raised_ns,
        )

    @property
    def headline(self) -> str:
        """Kind and words; of an error without words, the line that raised it."""
        if self.message.strip() or not self.frames:
            return f"{self.kind}: {self.message}"
        last = self.frames[-1]
        line = linecache.getline(last.filename, last.lineno).strip()
        return f"{self.kind} at {last.filename}:{last.lineno}: {line}"

    def is_a(self, name: str) -> bool:
        """True if the remote type or one of its bases is called `name`."""
        return name in self.bases

    def is_like(self, other: RemoteError) -> bool:
        """True if both say the same, whichever rank raised them."""
        return (self.kind, self.message) == (other.kind, other.message)

    def rebuild_traceback(self) -> types.TracebackType | None:
        """A traceback with the remote files and lines, innermost last; None if there were none."""
        trace: types.TracebackType | None = None
        for frame in reversed(self.frames):
            trace = types.TracebackType(trace, _frame_at(frame), 0, frame.lineno)
        return trace


def described(error: NotPlain) -> RemoteError:
    """The same as an error of the rank that sent it."""
    return RemoteError.of(error.with_traceback(None), 0)


def _shortened(text: str) -> str:
    """Both ends of a text: an exception of foreign code may hold gigabytes."""
    text = str.__str__(text)  # without the class that foreign code may have given to its words
    if len(text) <= _MAX_TEXT:
        return text
    kept = _MAX_TEXT // 2
    return f"{text[:kept]}\n... ({len(text) - 2 * kept} characters left out)\n{text[-kept:]}"


def _frame_at(where: Frame) -> types.FrameType:
    """A live frame object whose code claims the file and name of `where`."""
    code = compile("raise RuntimeError", where.filename, "exec").replace(
        co_name=where.name, co_qualname=where.name, co_firstlineno=where.lineno
    )
    try:
        exec(code, {"__name__": "remote", "__file__": where.filename})
    except RuntimeError as error:
        inner = cast(types.TracebackType, error.__traceback__).tb_next
        return cast(types.TracebackType, inner).tb_frame
    raise AssertionError("the compiled raise did not raise")
