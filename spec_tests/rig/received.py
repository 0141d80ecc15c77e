"""What a rank sends is read as data; nothing that it names runs in the parent.

A pickle names the classes that it needs, and whoever reads it imports and calls them. A rank holds
foreign code: reading what it sent as pickle does would run that code in the parent, where one
`os._exit(0)` ends the run with the status of success. Admitted are builtin containers and
exceptions, what NumPy and torch need for arrays, dtypes, shapes and devices, and records of the
suite itself, classes only, of modules that are already imported.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from spec_tests.rig import wire
from spec_tests.rig.errors import RankRaised, RankReport

_BUILTINS = (bool, int, float, complex, str, bytes, bytearray)
_CONTAINERS = (list, tuple, dict, set, frozenset, range, slice)
_COLLECTIONS = (collections.OrderedDict, collections.defaultdict, collections.Counter)
_OTHERS = frozenset(
    {
        *((kind.__module__, kind.__qualname__) for kind in (*_BUILTINS, *_CONTAINERS)),
        *((kind.__module__, kind.__qualname__) for kind in (*_COLLECTIONS, collections.deque)),
        *(("torch", name) for name in ("Size", "device")),
        *(("numpy", name) for name in ("ndarray", "dtype")),
        *(
            (f"numpy.{core}.{place}", name)
            for core in ("core", "_core")
            for place, name in (
                *(("multiarray", "_reconstruct"), ("multiarray", "scalar")),
                ("numeric", "_frombuffer"),
            )
        ),
        (wire.__name__, wire._rebuild_tensor.__name__),
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
    """The inverse of `wire.dumps` for what comes from a rank.

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


def values(sent: Sequence[bytes | None]) -> list[Any]:
    """What the bodies returned, one per rank.

    Raises:
        RankRaised: a rank returned more than data.
    """
    found: list[Any] = []
    for rank, data in enumerate(sent):
        try:
            found.append(received(data or b"", object))
        except NotPlain as error:
            raise refusal(error, rank, len(sent)) from None
    return found


def refusal(error: NotPlain, rank: int, world_size: int) -> RankRaised:
    """The failure that stands for something that rank `rank` should not have sent."""
    reports = [RankReport(each, "returned") for each in range(world_size)]
    reports[rank] = RankReport(rank, "returned", described(error))
    return RankRaised(f"rank {rank} of {world_size}: {error}", rank, reports)


def described(error: NotPlain) -> wire.RemoteError:
    """The same as an error of the rank that sent it."""
    return wire.RemoteError.of(error.with_traceback(None), 0)
