"""Read a profiler trace: Chrome's JSON as torch.profiler writes it, plain or gzipped.

    kept         events (ph, cat)
    operators    X, cpu_op              name, begin, end, thread
    annotations  X, user_annotation     likewise; ProfilerStep#N, Optimizer.step#*, gloo:*
    kernels      X, kernel, gpu_memcpy, gpu_memset
    launches     X, cuda_runtime, cuda_driver         when the host launched which kernel
    memory       i, cpu_instant_event, [memory]       bytes allocated in total, by device

Only what an analysis needs is kept, and dropped from the JSON as soon as an event is parsed: an
object for each event of a trace of 100 MB would take ten times as much.

Times are microseconds on the clock of the trace. `gpu_user_annotation` is left out: it repeats the
host's annotations on the device's time line.
"""

import gzip
import json
import sys
import zlib
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHERS = ("cuda_runtime", "cuda_driver")
COLLECTIVE_MARKS = ("c10d::", "gloo:", "nccl")


class TraceError(ValueError):
    """A file that is not a whole trace of torch.profiler."""


class Span(NamedTuple):
    """One event with a beginning and an end, in microseconds."""

    name: str
    begin: float
    end: float
    thread: Any  # of the host; on a GPU the stream
    args: dict[str, Any]  # kept for collectives and kernels only


@dataclass
class Trace:
    """The events of one file that are kept, each list ordered by begin."""

    path: Path
    rank: int = 0  # where the trace does not say
    world_size: int = 1
    operators: list[Span] = field(default_factory=list)
    annotations: list[Span] = field(default_factory=list)
    kernels: list[Span] = field(default_factory=list)
    memory: list[tuple[float, int, int]] = field(default_factory=list)  # when, 1 on a GPU, bytes
    launches: dict[Any, float] = field(default_factory=dict)  # a kernel's correlation to when
    num_events: int = 0

    @property
    def device(self) -> str:
        """Return "cuda" where there are kernels, else "cpu"."""
        return "cuda" if self.kernels else "cpu"

    @property
    def device_memory(self) -> list[tuple[float, int]]:
        """Return the bytes allocated on that device, with the moment of each change."""
        is_gpu = self.device == "cuda"
        return [(at, size) for at, device_type, size in self.memory if device_type == is_gpu]

    def take(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Keep what an analysis needs of an event and drop it; return other objects unchanged."""
        if "ph" not in event:
            return event  # not an event: the arguments of one, or metadata of the file
        self.num_events += 1
        category, args = event.get("cat"), event.get("args", {})
        if event["ph"] == "i":
            if event.get("name") == "[memory]":
                self.memory.append((event["ts"], args["Device Type"], args["Total Allocated"]))
        elif category in LAUNCHERS and "correlation" in args:
            self.launches[args["correlation"]] = event["ts"]
        elif category in ("cpu_op", "user_annotation", *KERNELS):
            name, begin, thread = sys.intern(event["name"]), event["ts"], event.get("tid")
            spans = self.operators if category == "cpu_op" else self.annotations
            if category in KERNELS:
                spans, thread = self.kernels, args.get("stream", thread)
                if "nccl" not in name.lower():
                    args = {"correlation": args.get("correlation")}
            elif not name.startswith(COLLECTIVE_MARKS):
                args = {}
            spans.append(Span(name, begin, begin + event.get("dur", 0), thread, args))
        return None


def read_trace(path: str | PathLike[str]) -> Trace:
    """Return the trace in a file; gzip is recognised by its first bytes, not by the name.

    Raises:
        TraceError: the file cannot be read, is cut off or no JSON, or is not of torch.profiler.
    """
    trace = Trace(Path(path))
    try:
        data = trace.path.read_bytes()
    except OSError as error:
        raise TraceError(
            f"{path}: expected a trace, got {error.strerror}; see which files are there, or record "
            "one with --profile-steps"
        ) from None
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        whole = json.loads(data, object_hook=trace.take)
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise TraceError(
            f"{path}: expected the whole JSON of a trace, got {error}; what is cut off or damaged "
            "was probably written by a run that was killed: record it again"
        ) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{path}: expected events of torch.profiler, got number {trace.num_events} without "
            f"{error}; this trace comes from another tool"
        ) from None
    if not trace.num_events or not isinstance(whole, dict):
        raise TraceError(
            f"{path}: expected a JSON object with traceEvents of torch.profiler, got none; export "
            "the trace with `export_chrome_trace` after at least one recorded step"
        )
    info = whole.get("distributedInfo")
    if isinstance(info, dict):
        trace.rank, trace.world_size = int(info["rank"]), int(info["world_size"])
    for spans in (trace.operators, trace.annotations, trace.kernels):
        spans.sort(key=lambda span: span.begin)
    trace.memory.sort()
    return trace
