"""Streams for code that assumes CUDA and runs on a CPU, where everything happens in order.

A stream on a GPU says what may run beside what; on a CPU nothing runs beside anything, so that
waiting for a stream or an event is always over. `give_streams` puts such streams in the place of
torch's *for one module*: its own names are bound to stand-ins, which hand through whatever is no
stream, each to the module of torch that it stands for. torch, and everybody else who uses it, stays
as it is, but that a tensor's record_stream takes a stand-in. Code that imports torch.cuda within a
function still meets the real one; that clause then says "not here".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.distributed import device_mesh


class Event:
    """Recorded and over at once."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Takes what torch.cuda.Event takes."""

    def record(self, stream: object = None) -> None:
        """Nothing is pending."""

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It is over."""
        return True

    synchronize = wait

    def elapsed_time(self, other: object) -> float:
        """Milliseconds; there is no clock here."""
        return 0.0


class Stream:
    """Everything that is issued is done."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Takes what torch.cuda.Stream takes."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that is over."""
        return event or Event()

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It is idle."""
        return True

    def synchronize(self) -> None:
        """It is idle."""

    def __enter__(self) -> Stream:
        """As the current one."""
        return self

    def __exit__(self, *exception: object) -> None:
        """As before."""


_STREAM = Stream()
_record_stream = torch.Tensor.record_stream


def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """The memory may be used again once the stream is done, which a stand-in always is."""
    if not isinstance(stream, Stream):
        _record_stream(tensor, stream)


@contextmanager
def _stream(stream: object) -> Iterator[None]:
    yield


class Device:
    """What torch.cuda is to code that asks it for streams; the rest is that module's own.

    Args:
        real: torch.cuda, torch.cpu or torch.accelerator.
    """

    Stream, Event = Stream, Event
    stream = staticmethod(_stream)

    def __init__(self, real: ModuleType) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        """Whatever has nothing to do with streams."""
        return getattr(self._real, name)

    @staticmethod
    def current_stream(device: object = None) -> Any:
        """The only one."""
        return _STREAM

    default_stream = current_stream

    @staticmethod
    def current_device() -> int:
        """The only one."""
        return 0

    current_device_index = current_device

    @staticmethod
    def synchronize(device: object = None) -> None:
        """All is done."""

    set_device = set_device_index = set_stream = synchronize


_CUDA, _CPU, _ACCELERATOR = (Device(real) for real in (torch.cuda, torch.cpu, torch.accelerator))


class _Torch(ModuleType):
    """torch, but for streams."""

    cuda, cpu, accelerator = _CUDA, _CPU, _ACCELERATOR
    Stream, Event = Stream, Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def give_streams(module: ModuleType) -> None:
    """Bind the names of `module` that mean torch's streams to stand-ins."""
    torch.Tensor.record_stream = record_stream  # type: ignore[assignment,method-assign]  # in this rank
    stand_ins: dict[int, Any] = {
        id(torch): _Torch("torch"),
        **{id(device._real): device for device in (_CUDA, _CPU, _ACCELERATOR)},
        id(torch.Stream): Stream,
        id(torch.Event): Event,
        id(device_mesh._get_device_handle): lambda device_type="cuda": getattr(
            _Torch, device_type, None
        ),
    }
    for name in ("Stream", "Event", "stream", "current_stream", "default_stream", "synchronize"):
        stand_ins[id(getattr(torch.cuda, name))] = getattr(_CUDA, name)
    for name, value in vars(module).items():
        if id(value) in stand_ins:
            setattr(module, name, stand_ins[id(value)])
