"""The zygote: a process with torch preloaded from which every rank is forked.

This module imports nothing heavy, so that `start_zygote` can be called before the parent imports
torch: the zygote preloads while the parent imports and collects, and the first rank is ready a
second earlier.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from types import ModuleType
from typing import Any

# No implementation and no clause: it would be stale, and could not be patched. `museum.preload`
# adds them, and near-misses forget what they patch.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.nn.parallel",
    "torch._dynamo",  # the first optimizer of a process imports it: half a second
    "torch.utils.checkpoint",
    "numpy",
    "numpy.typing",
    "hypothesis",
    "pytest",
    "spec_tests.programs.preloaded",
)

# Where a worker of xdist finds the zygote of the process that started it.
_SHARED = "TRAINSPEC_ZYGOTE"

# Set before torch is imported, in the zygote and so in every rank. Two threads per rank on two
# cores made a training step 24 to 39 times slower.
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_FR_BUFFER_SIZE": "64",
}


def rank_environment(transport: str) -> dict[str, str]:
    """What the environment of a rank holds besides its own.

    Triton decides when a kernel is declared, so before the implementation is imported: a rank on
    CPU interprets kernels, one on a GPU compiles them. A rank on CPU sees no GPU either:
    `fully_shard` without a mesh takes the accelerator of the machine, wherever the model lies.
    """
    on_cpu = {} if transport == "cuda" else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**RANK_ENVIRONMENT, **on_cpu}


def start_zygote(*modules: str) -> None:
    """Begin to preload in the background; call it before the parent imports torch itself.

    A worker of xdist takes the zygote of the process that started it: one preload for all.

    Args:
        modules: to preload besides, where all ranks of this process will need them.
    """
    for name, value in RANK_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver  # type: ignore[attr-defined]  # not in stubs
    address = os.environ.pop(_SHARED, "")  # so that this process's own children do not take it
    has_no_key = not hasattr(server, "_forkserver_authkey")  # it has, from Python 3.14 on
    if address and "PYTEST_XDIST_WORKER" in os.environ and has_no_key:
        server._forkserver_address, server._forkserver_alive_fd = address, os.pipe()[1]
        share_zygote()
        return
    get_context("forkserver").set_forkserver_preload([*PRELOAD, *modules])
    forkserver.ensure_running()
    os.environ[_SHARED] = server._forkserver_address


def share_zygote() -> None:
    """Let what this process starts come from the zygote that its fork server names."""
    from multiprocessing import forkserver

    server: Any = forkserver
    # It would begin another one, since the process that listens there is not its own child.
    server.ensure_running = server._forkserver.ensure_running = lambda: None


def start_method() -> str:
    """The start method of ranks on this platform."""
    # Windows has no fork server. spawn is slower to start and otherwise the same.
    return "forkserver" if hasattr(os, "fork") else "spawn"


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keep multiprocessing from running the parent's `__main__` again in each rank.

    Bodies are named by their modules, so ranks need nothing of it; and a script without the usual
    guard, a notebook or standard input could not be run again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def forget_triton() -> None:
    """In a fork of the zygote, once TRITON_INTERPRET is set: let Triton be imported anew.

    The zygote has loaded Triton without that variable, and then not even its own library of
    functions (`tl.zeros`, `tl.cdiv`) can be interpreted. What is compiled of it stays loaded.
    """
    for name in list(sys.modules):
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
