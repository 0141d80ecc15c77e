"""Read a profiler trace: Chrome's JSON as torch.profiler writes it, plain or gzipped.

The JSON decoder hands over each event as soon as it is parsed, and only what an analysis needs is
kept. So a trace of 100 MB costs its text and some tens of MB; `json.load` alone keeps ten dicts of
every event.

    kept         events (ph, cat)
    operators    X, cpu_op              name, begin, end, thread
    annotations  X, user_annotation     likewise; ProfilerStep#N, Optimizer.step#*, gloo:*
    kernels      X, kernel, gpu_memcpy, gpu_memset
    launches     X, cuda_runtime, cuda_driver         when the host launched which kernel
    memory       i, cpu_instant_event, [memory]       bytes allocated in total, by device

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

    def take(self, value: dict[str, Any]) -> dict[str, Any] | None:
        """Keep what an analysis needs of an event and drop it; return other objects unchanged."""
        if "ph" not in value:
            return value  # not an event: the arguments of one, or metadata of the file
        self.num_events += 1
        try:
            self._take_event(value)
        except (KeyError, TypeError, AttributeError) as error:
            raise TraceError(
                f"{self.path}: expected events of torch.profiler, got number {self.num_events} "
                f"without {error}: {str(value)[:120]}; this trace comes from another tool"
            ) from None
        return None

    def _take_event(self, event: dict[str, Any]) -> None:
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


def read_trace(path: str | PathLike[str]) -> Trace:
    """Return the trace in a file.

    Raises:
        TraceError: the file is missing, empty, cut off, no JSON, or not of torch.profiler.
    """
    trace = Trace(Path(path))
    text = _text(trace.path)
    start = text.lstrip()[:20]
    if start[:1] != "{":
        raise TraceError(
            f"{path}: expected a JSON object with traceEvents, got {start!r}...; give a file that "
            "torch.profiler's `export_chrome_trace` wrote"
        )
    try:
        whole = json.loads(text, object_hook=trace.take)
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{path}: expected JSON to its end, got none at character {error.pos:,} of "
            f"{len(text):,}, after {trace.num_events:,} events: "
            f"{text[error.pos : error.pos + 30]!r}; the file is cut off or damaged, probably by a "
            "run that was killed: record it again"
        ) from None
    if not trace.num_events:
        raise TraceError(
            f"{path}: expected traceEvents of torch.profiler, got none; export the trace with "
            "`export_chrome_trace` after at least one recorded step"
        )
    info = whole.get("distributedInfo")
    if isinstance(info, dict):
        trace.rank, trace.world_size = int(info["rank"]), int(info["world_size"])
    for spans in (trace.operators, trace.annotations, trace.kernels):
        spans.sort(key=lambda span: span.begin)
    trace.memory.sort()
    return trace


def _text(path: Path) -> str:
    """Return the whole text; gzip is recognised by its first bytes, not by the name."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode()
    except OSError as error:  # includes gzip's own errors
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
