"""What torch.cuda is where CUDA is stood in for: everything is there, and nothing is pending.

A stream on a GPU says what may run beside what; on a CPU nothing runs beside anything, so waiting
for a stream or an event is always over. Memory statistics are zero. Random states are the CPU's,
since whatever a GPU would draw is drawn there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

PRETENDED_CUDA = (
    "CUDA is stood in for: tensors are on the CPU, torch.compile compiles nothing, triton.autotune "
    "takes its first valid configuration; speed, streams and device memory are not judged"
)
"""What a verdict says of it."""

_GIB = 2**30


def nothing(*args: Any, **kwargs: Any) -> None:
    """Nothing is pending on a CPU, and there is nothing to set."""


def device_index(*args: object) -> int:
    """The device of this rank: one rank, one device, as torchrun numbers them."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _num_devices() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class Event:
    """Recorded and over at once; only its time is kept."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Takes what torch.cuda.Event takes."""
        self._recorded_s = 0.0

    def record(self, stream: object = None) -> None:
        """Keep the time: everything that was issued is done."""
        self._recorded_s = time.perf_counter()

    wait = synchronize = nothing

    def query(self) -> bool:
        """It is over."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between two records, of the CPU's clock."""
        return 1e3 * (end_event._recorded_s - self._recorded_s)


class Within(contextlib.ContextDecorator):
    """torch.cuda.stream, torch.cuda.device: a block on another stream or device."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Takes what they take."""

    def __enter__(self) -> Any:
        """Nothing changes."""
        return self

    __exit__ = nothing


class Stream(Within):
    """Everything that is issued is done."""

    cuda_stream = stream_id = device_index = priority = 0
    device = property(lambda self: torch.device("cuda", device_index()))
    wait_event = wait_stream = synchronize = nothing

    def record_event(self, event: Event | None = None) -> Event:
        """An event that is over."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """It is idle."""
        return True


_STREAM = Stream()
_NAME = "stand-in for CUDA"
_PROPERTIES = SimpleNamespace(  # of a common GPU
    name=_NAME,
    major=8,
    minor=0,
    total_memory=80 * _GIB,
    multi_processor_count=108,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=163 * 1024,
    regs_per_multiprocessor=65536,
    L2_cache_size=40 * 2**20,
)


def _set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


def _constant(value: Any) -> Any:
    return lambda *args, **kwargs: value


_ZERO = [f"{most}memory_{kind}" for most in ("", "max_") for kind in ("allocated", "reserved")]
_NOTHING = (
    *("init", "_lazy_init", "set_device", "set_device_index", "set_device_idx", "set_stream"),
    *("synchronize", "empty_cache", "ipc_collect", "_sleep", "set_per_process_memory_fraction"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated"),
    *("_record_memory_history", "_dump_snapshot"),
)

FOR_EVERYBODY: dict[str, Any] = {
    "Stream": Stream,
    "ExternalStream": Stream,
    "Event": Event,
    **dict.fromkeys(("stream", "StreamContext", "device", "device_of"), Within),
    **{name: _constant(_STREAM) for name in ("current_stream", "default_stream")},
    **{name: _constant(None) for name in _NOTHING},
    **{name: _constant(0) for name in (*_ZERO, "initial_seed", "utilization", "memory_usage")},
    "memory_stats": lambda device=None: defaultdict(int),
    "memory_summary": _constant(_NAME),
    "mem_get_info": _constant((80 * _GIB, 80 * _GIB)),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state_all": lambda states: _set_rng_state(states[0]),
    "get_device_properties": _constant(_PROPERTIES),
    "get_device_name": _constant(_NAME),
    "get_device_capability": _constant((8, 0)),
    **dict.fromkeys(("current_device", "current_device_index", "current_device_idx"), device_index),
}
"""What changes nothing for torch and the suite, by its name in torch.cuda or torch.accelerator.

No function stands for two names: torch._dynamo has rules by function, and refuses to be imported.
"""

FOR_FOREIGN_CODE: dict[str, Any] = {
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), _constant(True)),
    "device_count": _num_devices,
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
}
"""Answers that torch and the suite would act on: they get the true ones."""

NVTX = SimpleNamespace(
    rangePushA=_constant(0),
    rangePop=_constant(0),
    rangeStartA=_constant(0),
    rangeEnd=nothing,
    markA=nothing,
)
"""The C library below torch.cuda.nvtx."""
