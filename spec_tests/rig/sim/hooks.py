"""Where the simulated world hooks into torch, once per process, and whether it can.

1. `distributed_c10d._world`, which holds the groups of a process, becomes one per rank's thread,
   and so do the dicts beside it; C++'s registry of groups has a mode for that.
2. A group that asks for gloo gets torch's fake backend; the group itself is a real one.
3. The CPU kernels of the `c10d` operators become those of `kernels`.

Nothing of it is public, so `needs` looks for every piece first.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from spec_tests.rig.sim.baton import Baton
from spec_tests.rig.sim.collectives import Collectives
from spec_tests.rig.sim.faults import NotSimulated
from spec_tests.rig.sim.kernels import OPERATORS, Kernels

_c10d: Any = getattr(torch._C, "_distributed_c10d", None)
_ISOLATION = "_set_thread_isolation_mode"


def needs() -> list[str]:
    """What this torch lacks that the simulated world needs; empty if it can be simulated."""
    hooks = {
        "torch.distributed.distributed_c10d._world": hasattr(c10d, "_world"),
        "..._new_process_group_helper": hasattr(c10d, "_new_process_group_helper"),
        f"..._distributed_c10d.{_ISOLATION}": hasattr(_c10d, _ISOLATION),
        "..._distributed_c10d.FakeProcessGroup": hasattr(_c10d, "FakeProcessGroup"),
        "ProcessGroup.unbox": hasattr(dist.ProcessGroup, "unbox"),
        "Work.boxed": hasattr(dist.Work, "boxed"),
        "numpy.random.set_bit_generator": hasattr(np.random, "set_bit_generator"),
    }
    missing = [name for name, is_there in hooks.items() if not is_there]
    return [*missing, *_missing_operators()]


@functools.cache
def _missing_operators() -> tuple[str, ...]:
    # Asked before every case, and torch lists some thousands: once.
    operators = {f"c10d::{name}" for name in OPERATORS}
    found = set(torch._C._dispatch_get_all_op_names()) if _c10d is not None else set()
    return tuple(sorted(operators - found - _OPTIONAL))


# Absent from some of the supported versions; who calls one of them there gets torch's own error.
_OPTIONAL = {"c10d::monitored_barrier_", "c10d::allgather_coalesced_"}


class _Worlds(threading.local):
    """Stands for `_world`: what `distributed_c10d` keeps of the groups of a process, per rank.

    torch asks it some ten times per operation, so nothing stands between.
    """

    def __init__(self, baton: Callable[[], Baton]) -> None:
        # Runs in each thread that looks at it for the first time.
        if threading.current_thread() is not threading.main_thread():
            baton().me()  # raises for a thread that is no rank
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []


class _OfTheRank(UserDict[Any, Any]):
    """Stands for a dict of the module beside `_world`, such as `_pg_group_ranks`."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def data(self) -> dict[Any, Any]:  # type: ignore[override]  # UserDict's is an attribute
        found: dict[Any, Any] = getattr(c10d._world, self._name)
        return found


class _FakeMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _c10d.FakeProcessGroup)


_KEPT: list[object] = []  # the kernels live as long as their library


def install(baton: Callable[[], Baton], now: Callable[[], Collectives]) -> None:
    """Hook in, where `needs` is empty."""
    c10d._world = _Worlds(baton)  # type: ignore[assignment]  # stands for it
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag"):
        setattr(c10d, f"_{name}", _OfTheRank(name))
    _c10d._set_thread_isolation_mode(True)
    _stand_in_for_gloo(now)
    library, kernels = torch.library.Library("c10d", "IMPL"), Kernels(now)
    present = set(torch._C._dispatch_get_all_op_names())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced is what is meant
        for name in OPERATORS:
            if f"c10d::{name}" in present:
                library.impl(name, getattr(kernels, name), "CPU", allow_override=True)
                library.impl(name, _refuse_cuda, "CUDA", allow_override=True)
    _KEPT.append(library)


def _refuse_cuda(*args: Any, **kwargs: Any) -> Any:
    raise NotSimulated("the simulated world carries CPU tensors only, got a CUDA tensor")


def _stand_in_for_gloo(now: Callable[[], Collectives]) -> None:
    fake = _c10d.FakeProcessGroup

    class ProcessGroupGloo(metaclass=_FakeMeta):
        """What a group that wants gloo gets while `_new_process_group_helper` makes it."""

        def __new__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
            if not making:
                raise NotSimulated(
                    "ProcessGroupGloo was made directly: a simulated rank has groups of "
                    "torch.distributed only (init_process_group, new_group); judge it with "
                    "--transport gloo"
                )
            return getattr(fake, "_create_internal", fake)(rank, size)

    making: list[int] = []
    original = c10d._new_process_group_helper

    def make_group(*args: Any, **kwargs: Any) -> Any:
        if str(args[3] if len(args) > 3 else kwargs["backend"]) == "fake":
            raise NotSimulated(
                "a group of backend fake was made: a simulated rank has groups that send; judge it "
                "with --transport gloo"
            )
        making.append(1)
        try:
            group, store = original(*args, **kwargs)
        finally:
            making.pop()
        if isinstance(group, dist.ProcessGroup):
            _disguise(group)
            given = args[2] if len(args) > 2 else kwargs["global_ranks_in_group"]
            ranks = given or range(group.size())
            now().enter(now().baton.me().index, group.group_name, ranks, group.rank())
        return group, store

    c10d._new_process_group_helper = make_group  # type: ignore[assignment]  # stands for it
    fake._set_sequence_number_for_group = lambda self: None
    modules: list[Any] = [c10d, dist, _c10d]
    for module in modules:
        if hasattr(module, "ProcessGroupGloo"):
            module.ProcessGroupGloo = ProcessGroupGloo

    def issued(group: Any) -> int:
        return now().issued[now().baton.me().index].get(group.group_name, 0)

    dist.ProcessGroup._get_sequence_number_for_group = issued  # type: ignore[attr-defined]  # not in stubs


def _disguise(group: Any) -> None:
    # DDP's logger casts what calls itself gloo to its C++ class, so C++ is told another type.
    kind = dist.ProcessGroup.BackendType.CUSTOM
    backend = group._get_backend(torch.device("cpu"))
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
