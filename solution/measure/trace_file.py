"""Read a profiler trace: Chrome's JSON as torch.profiler writes it, plain or gzipped.

Events are taken one by one from the text and only what an analysis needs is kept, so a trace of
100 MB costs its text and some tens of MB; `json.load` makes ten dicts of every event first. What is
cut off, empty or foreign is a `TraceError` that says what was expected, what came, what to do.

    kept         events (ph, cat)
    operators    X, cpu_op              name, begin, end, thread
    annotations  X, user_annotation     likewise; ProfilerStep#N, Optimizer.step#*, gloo:*
    kernels      X, kernel, gpu_memcpy, gpu_memset    and when the host launched them
    memory       i, cpu_instant_event, [memory]       bytes allocated in total, by device

Times are microseconds on the clock of the trace. `gpu_user_annotation` is left out: it repeats on
the device's time line what the host has annotated.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Launch", "MemoryUse", "Span", "Trace", "TraceError", "read_trace"]

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHERS = ("cuda_runtime", "cuda_driver")
COLLECTIVE_MARKS = ("c10d::", "gloo:", "nccl")
_BLANKS = re.compile(r"[\s,]*")
_decode = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # not in stubs


class TraceError(ValueError):
    """A file that is no trace of torch.profiler, or not a whole one."""


class Span(NamedTuple):
    """One event with a beginning and an end, in microseconds."""

    name: str
    begin: float
    end: float
    thread: Any  # of the host; on a GPU the stream
    args: dict[str, Any] | None  # of collectives and kernels; the rest's are not kept


class Launch(NamedTuple):
    """A kernel, and when the host asked for it; None where the trace does not say."""

    span: Span
    launched: float | None


class MemoryUse(NamedTuple):
    """Bytes allocated on one kind of device at one moment."""

    at: float
    device_type: int  # 0 a CPU, 1 a GPU
    total_bytes: int


@dataclass
class Trace:
    """What is kept of one file, each list ordered by begin.

    Attributes:
        path: of the file.
        rank, world_size: of the process; 0 and 1 where the trace does not say.
        operators, annotations, kernels, memory: see the module.
    """

    path: Path
    rank: int = 0
    world_size: int = 1
    operators: list[Span] = field(default_factory=list)
    annotations: list[Span] = field(default_factory=list)
    kernels: list[Launch] = field(default_factory=list)
    memory: list[MemoryUse] = field(default_factory=list)

    @property
    def device(self) -> str:
        """Where the work was done: "cuda" where there are kernels, else "cpu"."""
        return "cuda" if self.kernels else "cpu"


def read_trace(path: str | PathLike[str]) -> Trace:
    """The trace in a file.

    Raises:
        TraceError: the file is missing, empty, cut off, no JSON, or not of torch.profiler.
    """
    path = Path(path)
    trace, kept = Trace(path), _Kept()
    for key, value in _members(path, _text(path), kept):
        if key == "distributedInfo" and isinstance(value, dict):
            trace.rank, trace.world_size = int(value["rank"]), int(value["world_size"])
    if not kept.num_events:
        raise TraceError(
            f"{path}: expected traceEvents of torch.profiler, got none; export the trace with "
            "`export_chrome_trace` after at least one recorded step"
        )
    for spans in (kept.operators, kept.annotations, kept.device):
        spans.sort(key=lambda span: span.begin)
    trace.operators, trace.annotations = kept.operators, kept.annotations
    trace.kernels = [
        Launch(span, kept.launches.get((span.args or {}).get("correlation")))
        for span in kept.device
    ]
    trace.memory = sorted(kept.memory)
    return trace


class _Kept:
    """What is kept of the events, as they come."""

    def __init__(self) -> None:
        self.num_events = 0
        self.operators: list[Span] = []
        self.annotations: list[Span] = []
        self.device: list[Span] = []
        self.launches: dict[Any, float] = {}
        self.memory: list[MemoryUse] = []

    def take(self, event: dict[str, Any]) -> None:
        """Keep what an analysis needs of one event."""
        self.num_events += 1
        category = event.get("cat")
        if event.get("ph") == "i":
            if event.get("name") == "[memory]":
                args = event["args"]
                self.memory.append(
                    MemoryUse(event["ts"], args["Device Type"], args["Total Allocated"])
                )
        elif category == "cpu_op":
            self.operators.append(_span(event))
        elif category == "user_annotation":
            self.annotations.append(_span(event))
        elif category in KERNELS:
            self.device.append(_span(event, is_kernel=True))
        elif category in LAUNCHERS and "correlation" in (args := event.get("args", {})):
            self.launches[args["correlation"]] = event["ts"]


def _span(event: dict[str, Any], *, is_kernel: bool = False) -> Span:
    name, begin, args = sys.intern(event["name"]), event["ts"], event.get("args")
    thread = event.get("tid")
    if is_kernel:
        args = args or {}
        thread = args.get("stream", thread)
        if "nccl" not in name.lower():
            args = {"correlation": args.get("correlation")}
    elif not name.startswith(COLLECTIVE_MARKS):
        args = None
    return Span(name, begin, begin + event.get("dur", 0), thread, args)


# ------------------------------------------------------------------------------------- the file


def _text(path: Path) -> str:
    """The whole text; gzip is known by its first bytes, not by the name."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode()
    except OSError as error:  # gzip's own complaints are of this kind, too
        raise TraceError(
            f"{path}: expected a trace, got {error.strerror or error}; see what was recorded with "
            "`ls`, or record it again with --profile"
        ) from None
    except (EOFError, zlib.error):
        raise TraceError(
            f"{path}: expected a whole gzip file, got one that ends early; the run that wrote it "
            "was probably killed, record it again"
        ) from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: expected JSON, got bytes that are no text ({error})") from None
    if not text.strip():
        raise TraceError(f"{path}: expected a trace, got an empty file; record it again")
    return text


def _members(path: Path, text: str, kept: _Kept) -> Iterator[tuple[str, Any]]:
    """The members of the outermost object; traceEvents go to `kept`, one by one."""
    at = _skip(text, 0)
    if text[at] != "{":
        raise TraceError(
            f"{path}: expected a JSON object with traceEvents, got {text[at : at + 20]!r}...; give "
            "a file that torch.profiler's `export_chrome_trace` wrote"
        )
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}":
        key, at = _value(path, text, at, kept)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise _cut(path, text, at, kept)
        at = _skip(text, at + 1)
        if key == "traceEvents" and text[at : at + 1] == "[":
            at = _events(path, text, at + 1, kept)
        else:
            value, at = _value(path, text, at, kept)
            yield key, value
        at = _skip(text, at)


def _events(path: Path, text: str, at: int, kept: _Kept) -> int:
    """Every event of the list that begins at `at`; returns where it ends."""
    skip, take = _BLANKS.match, kept.take
    try:
        at = skip(text, at).end()  # type: ignore[union-attr]  # matches everywhere
        while text[at] != "]":
            event, at = _decode(text, at)
            take(event)
            at = skip(text, at).end()  # type: ignore[union-attr]  # as above
    except (StopIteration, IndexError, json.JSONDecodeError):
        raise _cut(path, text, at, kept) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{path}: expected events of torch.profiler, got number {kept.num_events} without "
            f"{error}: {str(event)[:120]}; this trace comes from another tool"
        ) from None
    return at + 1


def _value(path: Path, text: str, at: int, kept: _Kept) -> tuple[Any, int]:
    try:
        return _decode(text, at)
    except (StopIteration, IndexError, json.JSONDecodeError):
        raise _cut(path, text, at, kept) from None


def _cut(path: Path, text: str, at: int, kept: _Kept) -> TraceError:
    """What does not go on as JSON: cut off, most of the time."""
    return TraceError(
        f"{path}: expected JSON to its end, got none at character {at:,} of {len(text):,}, after "
        f"{kept.num_events:,} events: {text[at : at + 30]!r}; the file is cut off or damaged, "
        "probably by a run that was killed: record it again"
    )


def _skip(text: str, at: int) -> int:
    return _BLANKS.match(text, at).end()  # type: ignore[union-attr]  # matches everywhere
