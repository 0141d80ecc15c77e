"""What a profiler trace says about one rank: what it computed, what it sent, what overlapped.

    |<-------------------------- step ----------------------------->|
    compute        ######   ##########        ######
    communication       =========    ======
    overlap             #     ####   #                              both at once
    exposed              =====    ... ====                          communication alone
    idle                                    ..      ...............  neither

Each line is a union of intervals: nested operators and concurrent kernels count once. So compute +
exposed + idle is the step, always. What computes and what communicates is said in
`spec_tests/contract/measure.py` (`SummarizeTrace`); in short: kernels and nccl kernels on a GPU,
operators and gloo's annotations on a CPU. The latter are times of the host, with the profiler's own
cost in them, and the waiting for slower ranks counts as communication on both.

Steps are ProfilerSteps, all of them. Holistic Trace Analysis (package `traceinsight`) leaves the
last one out and says nothing on traces without kernels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from solution.measure.collectives import collectives_between
from solution.measure.intervals import (
    Intervals,
    clipped,
    difference,
    intersection,
    length,
    merged,
)
from solution.measure.trace_file import Span, Trace, TraceError, read_trace

__all__ = ["Lanes", "step_lanes", "summarize", "summarize_trace"]

STEP, UPDATE, GLOO = "ProfilerStep#", "Optimizer.step#", "gloo:"
COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of operators
WRAPPERS = ("autograd", "torch", *COLLECTIVES)  # do no work of their own, or not computation
TIMES = ("duration_us", "compute_us", "communication_us", "overlap_us", "exposed_us", "idle_us")


@dataclass(frozen=True)
class Lanes:
    """One step of one rank as sets of time, for drawing; microseconds on the clock of the trace.

    Attributes:
        rank: whose.
        step: its number, N of ProfilerStep#N.
        optimizer_steps: updates that begin in it.
        begin, end: of the step.
        compute, communication, overlap, exposed: disjoint intervals, in order.
    """

    rank: int
    step: int
    optimizer_steps: int
    begin: float
    end: float
    compute: Intervals
    communication: Intervals
    overlap: Intervals
    exposed: Intervals

    def times(self) -> dict[str, Any]:
        """How long what took: the contract's keys of a step."""
        duration, compute = self.end - self.begin, length(self.compute)
        communication, exposed = length(self.communication), length(self.exposed)
        times = dict(
            zip(
                TIMES,
                (
                    *(duration, compute, communication),
                    *(length(self.overlap), exposed, duration - compute - exposed),
                ),
                strict=True,
            )
        )
        return {
            "step": self.step,
            "optimizer_steps": self.optimizer_steps,
            **times,
            "overlap_fraction": _fraction(times),
        }

    def from_begin(self) -> dict[str, Any]:
        """All of it as plain numbers for JSON, times counted from the begin of the step."""
        lanes = {
            name: [[begin - self.begin, end - self.begin] for begin, end in getattr(self, name)]
            for name in ("compute", "communication", "overlap", "exposed")
        }
        return {
            "rank": self.rank,
            "step": self.step,
            "duration_us": self.end - self.begin,
            **lanes,
        }


@dataclass
class _Step:
    """A step on the time line."""

    number: int
    begin: float
    end: float
    updates: int = 0
    last_kernel: float = field(default=float("-inf"))


def summarize_trace(path: str | PathLike[str]) -> dict[str, Any]:
    """The summary of one rank's trace; its keys stand in the contract.

    Args:
        path: a Chrome trace of torch.profiler, JSON or gzipped JSON.

    Raises:
        TraceError: a ValueError: missing, empty, cut off, foreign, or without a recorded step.
    """
    return summarize(read_trace(path))


def summarize(trace: Trace, lanes: list[Lanes] | None = None) -> dict[str, Any]:
    """`summarize_trace` of a trace that has been read, and perhaps cut into steps."""
    lanes = lanes or step_lanes(trace)
    steps = [step.times() for step in lanes]
    total: dict[str, Any] = {name: sum(step[name] for step in steps) for name in TIMES}
    used = [u.total_bytes for u in trace.memory if u.device_type == (trace.device == "cuda")]
    return {
        "device": trace.device,
        "rank": trace.rank,
        "world_size": trace.world_size,
        "steps": steps,
        "total": total | {"overlap_fraction": _fraction(total)},
        "collectives": collectives_between(trace, lanes[0].begin, lanes[-1].end),
        "peak_memory_bytes": max(used, default=None),
    }


def step_lanes(trace: Trace) -> list[Lanes]:
    """The sets of time of every step, in order: compute, communication, overlap, exposed.

    >>> [lanes.from_begin() for lanes in step_lanes(read_trace(path))]  # doctest: +SKIP
    """
    compute, communication = _computation(trace), _communication(trace)
    return [_lanes(trace, step, compute, communication) for step in _steps(trace)]


def _lanes(trace: Trace, step: _Step, compute: Intervals, communication: Intervals) -> Lanes:
    compute = clipped(compute, step.begin, step.end)
    communication = clipped(communication, step.begin, step.end)
    return Lanes(
        trace.rank,
        step.number,
        step.updates,
        step.begin,
        step.end,
        compute,
        communication,
        intersection(compute, communication),
        difference(communication, compute),
    )


# ------------------------------------------------------------------------ what lies where in time


def _communication(trace: Trace) -> Intervals:
    kernels = (launch.span for launch in trace.kernels if _is_nccl(launch.span))
    return merged(_ends([*kernels, *_gloo(trace)]))


def _computation(trace: Trace) -> Intervals:
    if trace.kernels:
        return merged(_ends(k.span for k in trace.kernels if not _is_nccl(k.span)))
    working: dict[Any, list[Span]] = {}
    sending: dict[Any, list[Span]] = {}
    for span in trace.operators:
        namespace, separator, _ = span.name.partition("::")
        if namespace in COLLECTIVES:
            sending.setdefault(span.thread, []).append(span)
        elif separator and namespace not in WRAPPERS:
            working.setdefault(span.thread, []).append(span)
    for span in _gloo(trace):
        sending.setdefault(span.thread, []).append(span)
    return merged(
        interval
        for thread, spans in working.items()
        for interval in difference(merged(_ends(spans)), merged(_ends(sending.get(thread, []))))
    )


def _steps(trace: Trace) -> list[_Step]:
    """The recorded steps, in order.

    Raises:
        TraceError: there is none.
    """
    found = [
        _Step(int(note.name.removeprefix(STEP)), note.begin, note.end)
        for note in trace.annotations
        if note.name.startswith(STEP)
    ]
    if not found:
        raise TraceError(
            f"{trace.path}: expected annotations {STEP}N, got none among {len(trace.annotations)}; "
            "call the profiler's step() once after each optimizer step"
        )
    for note in trace.annotations:
        step = _at(found, note.begin) if note.name.startswith(UPDATE) else None
        if step is not None:
            step.updates += 1
    for span, launched in trace.kernels:
        step = None if launched is None else _at(found, launched)
        if step is not None:
            step.last_kernel = max(step.last_kernel, span.end)
    previous = float("-inf")
    for step in found:
        step.begin = max(step.begin, previous)
        step.end = previous = max(step.begin, step.end, step.last_kernel)
    return found


def _at(steps: list[_Step], moment: float) -> _Step | None:
    """The step whose ProfilerStep holds that moment."""
    index = bisect_right(steps, moment, key=lambda step: step.begin) - 1
    return steps[index] if index >= 0 and moment <= steps[index].end else None


def _gloo(trace: Trace) -> Iterator[Span]:
    return (note for note in trace.annotations if note.name.startswith(GLOO))


def _is_nccl(span: Span) -> bool:
    return "nccl" in span.name.lower()


def _ends(spans: Iterable[Span]) -> Iterator[tuple[float, float]]:
    return ((span.begin, span.end) for span in spans)


def _fraction(times: dict[str, Any]) -> float | None:
    """The part of the communication that was hidden; None where there is nothing to hide."""
    if not times["communication_us"]:
        return None
    return float(times["overlap_us"] / times["communication_us"])
