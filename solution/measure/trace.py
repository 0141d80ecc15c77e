"""What a profiler trace says about one rank: what it computed, what it sent, what overlapped.

    |<-------------------------- step ----------------------------->|
    compute        ######   ##########        ######
    communication       =========    ======
    overlap             #     ####   #                              both at once
    exposed              =====    ... ====                          communication alone
    idle                                    ..      ...............  neither

Each line is a union of intervals: nested operators and concurrent kernels count once. So compute +
exposed + idle is the step, always. `spec_tests/contract/measure.py` (`SummarizeTrace`) defines what
computes and what communicates; in short: kernels and nccl kernels on a GPU, operators and gloo's
annotations on a CPU. The latter are times of the host and include the profiler's own cost. Waiting
for slower ranks counts as communication on both.

Steps are ProfilerSteps, all of them. Holistic Trace Analysis (package `traceinsight`) leaves the
last one out and has no answer for traces without kernels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
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

__all__ = ["LANES", "Lanes", "step_lanes", "summarize", "summarize_trace"]

STEP, UPDATE, GLOO = "ProfilerStep#", "Optimizer.step#", "gloo:"
COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of operators
WRAPPERS = ("autograd", "torch", *COLLECTIVES)  # only call other operators, or communicate
LANES = ("compute", "communication", "overlap", "exposed")


@dataclass(frozen=True)
class Lanes:
    """One step of one rank as sets of time; microseconds on the clock of the trace.

    Attributes:
        rank: of the process.
        step: N of ProfilerStep#N.
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

    @cached_property
    def overlap(self) -> Intervals:
        """Return when the rank computed and communicated."""
        return intersection(self.compute, self.communication)

    @cached_property
    def exposed(self) -> Intervals:
        """Return when the rank communicated and did not compute."""
        return difference(self.communication, self.compute)

    def times(self) -> dict[str, float]:
        """Return the contract's times of a step, in microseconds."""
        duration = self.end - self.begin
        covered = {f"{lane}_us": length(getattr(self, lane)) for lane in LANES}
        idle = duration - covered["compute_us"] - covered["exposed_us"]
        return {"duration_us": duration, **covered, "idle_us": idle}

    def from_begin(self) -> dict[str, Any]:
        """Return rank, step, `duration_us` and lanes for JSON, counted from the step's begin."""
        lanes = {
            lane: [[begin - self.begin, end - self.begin] for begin, end in getattr(self, lane)]
            for lane in LANES
        }
        duration = self.end - self.begin
        return {"rank": self.rank, "step": self.step, "duration_us": duration, **lanes}


def summarize_trace(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the summary of one rank's trace, with the keys of the contract.

    Args:
        path: a Chrome trace of torch.profiler, JSON or gzipped JSON.

    Raises:
        TraceError: a ValueError: missing, empty, cut off, foreign, or without a recorded step.
    """
    trace = read_trace(path)
    return summarize(trace, step_lanes(trace))


def summarize(trace: Trace, lanes: list[Lanes]) -> dict[str, Any]:
    """Return what `summarize_trace` does, of a trace that has been read and cut into steps."""
    times = [step.times() for step in lanes]
    total = {name: sum(one[name] for one in times) for name in times[0]}
    return {
        "device": trace.device,
        "rank": trace.rank,
        "world_size": trace.world_size,
        "steps": [
            {"step": step.step, "optimizer_steps": step.optimizer_steps, **_with_fraction(one)}
            for step, one in zip(lanes, times, strict=True)
        ],
        "total": _with_fraction(total),
        "collectives": collectives_between(trace, lanes[0].begin, lanes[-1].end),
        "peak_memory_bytes": max((use.total_bytes for use in trace.device_memory), default=None),
    }


def _with_fraction(times: dict[str, float]) -> dict[str, Any]:
    """Add the fraction of the communication that was hidden; None where there is none."""
    sent = times["communication_us"]
    return {**times, "overlap_fraction": float(times["overlap_us"] / sent) if sent else None}


def step_lanes(trace: Trace) -> list[Lanes]:
    """Return the recorded steps, in order.

    Raises:
        TraceError: there is none.
    """
    marks = [note for note in trace.annotations if note.name.startswith(STEP)]
    if not marks:
        raise TraceError(
            f"{trace.path}: expected annotations {STEP}N, got none among {len(trace.annotations)}; "
            "call the profiler's step() once after each optimizer step"
        )
    begins = [mark.begin for mark in marks]

    def holder(moment: float | None) -> int | None:
        """Return the index of the mark around a moment; None where there is none."""
        if moment is None:
            return None
        index = bisect_right(begins, moment) - 1
        return index if index >= 0 and moment <= marks[index].end else None

    updates = Counter(holder(n.begin) for n in trace.annotations if n.name.startswith(UPDATE))
    last_kernel: dict[int | None, float] = defaultdict(lambda: float("-inf"))
    for kernel in trace.kernels:
        index = holder(trace.launches.get(kernel.args.get("correlation")))
        last_kernel[index] = max(last_kernel[index], kernel.end)
    compute, communication = _computation(trace), _communication(trace)
    lanes, previous = [], float("-inf")
    for index, mark in enumerate(marks):
        begin = max(mark.begin, previous)
        end = previous = max(begin, mark.end, last_kernel[index])
        lanes.append(
            Lanes(
                *(trace.rank, int(mark.name.removeprefix(STEP)), updates[index], begin, end),
                clipped(compute, begin, end),
                clipped(communication, begin, end),
            )
        )
    return lanes


def _communication(trace: Trace) -> Intervals:
    kernels = (kernel for kernel in trace.kernels if _is_nccl(kernel))
    return _union([*kernels, *_gloo(trace)])


def _computation(trace: Trace) -> Intervals:
    if trace.kernels:
        return _union(kernel for kernel in trace.kernels if not _is_nccl(kernel))
    working: dict[Any, list[Span]] = defaultdict(list)  # by thread
    sending: dict[Any, list[Span]] = defaultdict(list)
    for span in trace.operators:
        namespace, separator, _ = span.name.partition("::")
        if namespace in COLLECTIVES:
            sending[span.thread].append(span)
        elif separator and namespace not in WRAPPERS:
            working[span.thread].append(span)
    for span in _gloo(trace):
        sending[span.thread].append(span)
    return merged(
        interval
        for thread, spans in working.items()
        for interval in difference(_union(spans), _union(sending[thread]))
    )


def _gloo(trace: Trace) -> list[Span]:
    return [note for note in trace.annotations if note.name.startswith(GLOO)]


def _is_nccl(span: Span) -> bool:
    return "nccl" in span.name.lower()


def _union(spans: Iterable[Span]) -> Intervals:
    return merged((span.begin, span.end) for span in spans)
