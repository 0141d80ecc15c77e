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

    Args:
        modules: to preload besides, where all ranks of this process will need them.
    """
    for name, value in RANK_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from multiprocessing import forkserver

    get_context("forkserver").set_forkserver_preload([*PRELOAD, *modules])
    forkserver.ensure_running()


def share_zygote() -> None:
    """Let what this process starts come from the zygote that its fork server names."""
    from multiprocessing import forkserver

    server: Any = forkserver
    # It would begin another one, since the process that listens there is not its own child.
    server.ensure_running = server._forkserver.ensure_running = lambda: None


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
