"""What a body may leave behind in a rank that goes on living: snapshot, restore, report.

Ranks are reused between tests, so whatever one body changes, the next one inherits. Everything
cheap to read is read before and after each task (some 70 us); what can be put back is put back,
and every difference is reported by name. What cannot be put back makes the pool end.

What importing an implementation replaced in torch is reported as well, by name. Foreign code may
patch what it likes in its own rank; nobody else lives there. But what a clause observes then passes
through the patch, so a reader of the result should know of it. The rig itself keeps the functions
that it needs, bound before the import (see `rank`).
"""

from __future__ import annotations

import builtins
import contextlib
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.modules.module as module_hooks
from torch import nn
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
    "_global_buffer_registration_hooks",
)


@dataclass(frozen=True)
class _Probe:
    """One piece of process state: how to read it and, where that is possible, how to set it.

    What is harmless is reported and left alone: nothing that comes later depends on it.
    """

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object] | None = None
    is_harmless: bool = False


def _environment() -> dict[Any, Any]:
    # Undecoded where the platform keeps it so: a tenth of the time.
    return dict(getattr(os.environ, "_data", os.environ))


def _default_device() -> torch.device | None:
    # Not torch.get_default_device: to set what it says would leave a function mode behind.
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _restore_environment(before: dict[Any, Any]) -> None:
    os.environ.clear()
    os.environ.update({os.fsdecode(key): os.fsdecode(value) for key, value in before.items()})


def _restore_hooks(before: dict[str, tuple[int, ...]]) -> None:
    for name in _GLOBAL_HOOKS:
        hooks = getattr(module_hooks, name)
        for key in [key for key in hooks if key not in before[name]]:
            del hooks[key]


def _restore_filters(before: list[Any]) -> None:
    # In place: the interpreter's C code holds this very list.
    filters = cast(list[Any], warnings.filters)
    filters[:] = before


def _group_names() -> tuple[str, ...]:
    return tuple(dist.distributed_c10d._world.pg_names.values())  # none without a default group


class _OpenFiles:
    """Paths of this process's open files, each with how often. Linux only; elsewhere always empty.

    Sockets and pipes are not among them: gloo opens its own when a group first talks. What the
    numbers stand for is looked up anew only when there are others, for a lookup costs 50 us.
    """

    def __init__(self) -> None:
        self._numbers: list[str] = []
        self._paths: dict[str, int] = {}

    def __call__(self) -> dict[str, int]:
        try:
            numbers = os.listdir("/proc/self/fd")  # noqa: PTH208 - a third of the time of a Path
        except OSError:
            return {}
        if numbers != self._numbers:
            self._numbers, self._paths = numbers, {}
            for number in numbers:
                with contextlib.suppress(OSError):  # the listing's own is closed by now
                    path = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - as above
                    if path.startswith("/"):
                        self._paths[path] = self._paths.get(path, 0) + 1
        return self._paths


_PROBES = (
    _Probe("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Probe("default device", _default_device, torch.set_default_device),
    _Probe("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Probe("inference mode", torch.is_inference_mode_enabled),
    _Probe(
        "deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    _Probe("threads", torch.get_num_threads, torch.set_num_threads),
    _Probe(
        "autocast on CPU",
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    _Probe("anomaly mode", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _Probe(
        "float32 matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    _Probe("dispatch modes", lambda: len(_get_current_dispatch_mode_stack())),
    _Probe("function modes", lambda: len(_get_current_function_mode_stack())),
    _Probe(
        "global module hooks",
        lambda: {name: tuple(getattr(module_hooks, name)) for name in _GLOBAL_HOOKS},
        _restore_hooks,
    ),
    # An implementation may keep a group of its own from one call to the next.
    _Probe("process groups", _group_names, is_harmless=True),
    _Probe("environment", _environment, _restore_environment),
    _Probe("working directory", os.getcwd, os.chdir),
    _Probe(
        "Python threads",
        lambda: sorted(thread.name for thread in threading.enumerate()),
        is_harmless=True,
    ),
    _Probe("open files", _OpenFiles(), is_harmless=True),
    _Probe("warning filters", lambda: list(warnings.filters), _restore_filters),
    _Probe(
        "alarm handler",
        lambda: signal.getsignal(signal.SIGALRM),
        lambda handler: signal.signal(signal.SIGALRM, handler),
    ),
)


@dataclass(frozen=True)
class Leak:
    """One piece of state that a body changed: its name, before and after, and if it is back."""

    name: str
    before: str
    after: str
    restored: bool
    is_harmless: bool = False

    def __str__(self) -> str:
        verb = "restored" if self.restored else "kept" if self.is_harmless else "not restorable"
        return f"{self.name}: {self.before} -> {self.after} ({verb})"


def snapshot() -> tuple[Any, ...]:
    """The present state, one entry per probe."""
    return tuple(probe.read() for probe in _PROBES)


def restore(before: tuple[Any, ...]) -> list[Leak]:
    """Put back what differs from `before`; the list says what differed."""
    leaks = []
    for probe, old in zip(_PROBES, before, strict=True):
        new = probe.read()
        if new != old:
            if probe.restore is not None:
                probe.restore(old)
            was_restored = probe.restore is not None
            leaks.append(Leak(probe.name, *_shorten(old, new), was_restored, probe.is_harmless))
    return leaks


def _shorten(old: object, new: object) -> tuple[str, str]:
    if isinstance(old, dict) and isinstance(new, dict):
        changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        old, new = ({key: each.get(key) for key in changed} for each in (old, new))
    return str(old)[:200], str(new)[:200]


def keeps_groups() -> bool:
    """True while there are process groups besides the default one."""
    return len(_group_names()) > 1


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and random, as each task needs before its body runs."""
    # Not torch.manual_seed: without CUDA it queues a call with its stack each time, 0.1 ms.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


_WATCHED: dict[str, Any] = {
    "builtins": builtins,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.autograd": torch.autograd,
    "torch.distributed": dist,
    "torch.nn.Module": nn.Module,
    "torch.nn.functional": nn.functional,
    "torch.optim.Optimizer": Optimizer,
}

Attributes = dict[str, dict[str, Any]]


def attributes() -> Attributes:
    """Everything that these modules and classes hold now."""
    return {name: dict(vars(holder)) for name, holder in _WATCHED.items()}


def replaced(before: Attributes) -> tuple[str, ...]:
    """Public names that hold something else than they did; what was added counts for nothing."""
    return tuple(
        f"{holder}.{name}"
        for holder, names in before.items()
        for name, old in names.items()
        if (not name.startswith("_") or name in ("__call__", "__init__"))
        and vars(_WATCHED[holder]).get(name) is not old
    )
