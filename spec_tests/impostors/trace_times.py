"""Near-misses of a trace's times: numbers that look right on the trace that somebody looked at."""

from __future__ import annotations

import math
from typing import Any

from spec_tests.impostors.plain_trace import Event, PlainTrace, Spans, card


class SumsDurations(PlainTrace):
    def times(self, working: Spans, sending: Spans) -> dict[str, float]:
        return {**super().times(working, sending), "compute_us": sum(e - b for b, e in working)}


class SumsCommunication(PlainTrace):
    """Each collective by itself: two at once count twice."""

    def times(self, working: Spans, sending: Spans) -> dict[str, float]:
        found = super().times(working, sending)
        sent = sum(e - b for b, e in sending)
        return {**found, "communication_us": sent, "exposed_us": sent - found["overlap_us"]}


class SumsOverlaps(PlainTrace):
    """Pair by pair: the overlap of one collective with each operator."""

    def times(self, working: Spans, sending: Spans) -> dict[str, float]:
        pairs = [min(e, f) - max(b, a) for b, e in working for a, f in sending]
        both = sum(length for length in pairs if length > 0)
        return {**super().times(working, sending), "overlap_us": both}


class FractionOfStep(PlainTrace):
    def fraction(self, times: dict[str, float]) -> float | None:
        return times["overlap_us"] / times["duration_us"] if times["communication_us"] else None


class NaNFraction(PlainTrace):
    def fraction(self, times: dict[str, float]) -> float | None:
        found = super().fraction(times)
        return math.nan if found is None else found


class ByBegin(PlainTrace):
    """Whole events, by where they begin."""

    def inside(self, spans: Spans, begin: float, end: float) -> Spans:
        return [(b, e) for b, e in spans if begin <= b < end]


class WrappersCompute(PlainTrace):
    """Every operator of the host computes, whatever it only calls."""

    def does_work(self, name: str) -> bool:
        return "c10d" not in name


class WaitingComputes(PlainTrace):
    def waiting(self, thread: Any) -> list[Event]:
        return []


class TakesDeviceAnnotations(PlainTrace):
    """Whatever lies on the device's time line is a kernel."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        shown = [e for e in self.spans if e["cat"] == "gpu_user_annotation"]
        self.kernels += [{**e, "args": {"correlation": None}} for e in shown]


class StepsOfDevice(PlainTrace):
    def step_marks(self) -> list[Event]:
        marks = [e for e in self.spans if e["name"].startswith("ProfilerStep#")]
        return sorted(marks, key=lambda e: e["ts"])


class DropsLast(PlainTrace):
    def step_marks(self) -> list[Event]:
        marks = super().step_marks()
        return marks[:-1] if len(marks) > 1 else marks


class NumbersFromZero(PlainTrace):
    def steps(self) -> list[tuple[int, float, float]]:
        return [(number, *step[1:]) for number, step in enumerate(super().steps())]


class EndsWithHost(PlainTrace):
    def last_kernel(self, begin: float, end: float) -> float:
        return end


class AllOptimizerNotes(PlainTrace):
    """zero_grad is an annotation of the optimizer, too."""

    def updates(self, begin: float, end: float) -> int:
        names = [e["name"] for e in self.notes if begin <= e["ts"] < end]
        return sum(name.startswith("Optimizer.") for name in names)


class OneUpdatePerStep(PlainTrace):
    def updates(self, begin: float, end: float) -> int:
        return 1


IMPOSTORS = (
    card(
        SumsDurations,
        "sums-durations",
        "Computation is the sum of durations.",
        "`events.groupby('name').dur.sum()` over operators that nest.",
        "On one stream without nesting it is right.",
        "computation-is-a-union",
        "any-intervals",
    ),
    card(
        SumsCommunication,
        "sums-communication",
        "Each collective counts by itself.",
        "The same sum over nccl kernels of several groups.",
        "With one group they follow one another.",
        "communication-is-a-union",
        "any-intervals",
    ),
    card(
        SumsOverlaps,
        "sums-overlaps",
        "Overlaps are summed pair by pair.",
        "Two loops over events in a notebook.",
        "Right as long as one stream computes.",
        "overlap",
        "any-intervals",
    ),
    card(
        FractionOfStep,
        "fraction-of-step",
        "The fraction is of the step, not of the communication.",
        "A plot of shares of a step.",
        "It lies between 0 and 1.",
        "overlap",
    ),
    card(
        NaNFraction,
        "nan-fraction",
        "Without communication the fraction is NaN.",
        "Holistic Trace Analysis on a baseline; a course's notebook plots it.",
        "Everybody looks at runs that communicate.",
        "no-communication",
    ),
    card(
        ByBegin,
        "by-begin",
        "Whole events count where they begin.",
        "Holistic Trace Analysis, which gives each event an iteration.",
        "Steps that end with a synchronisation have nothing across their border.",
        "only-inside-steps",
    ),
    card(
        WrappersCompute,
        "wrappers-compute",
        "Autograd nodes count as computation.",
        "Outermost operators projected onto a stream.",
        "Communication looks well hidden, which pleases.",
        "wrappers-do-not-compute",
    ),
    card(
        WaitingComputes,
        "waiting-computes",
        "Operators inside a collective count as computation.",
        "gloo's workers copy with operators of their own.",
        "On a GPU there is no such thing.",
        "inside-a-collective",
    ),
    card(
        TakesDeviceAnnotations,
        "device-annotations",
        "Annotations on the device's time line are kernels.",
        "A filter by stream in place of category.",
        "The device looks busy, which pleases.",
        "device-annotations",
    ),
    card(
        StepsOfDevice,
        "steps-of-device",
        "Steps are counted on host and device.",
        "A search by name over all events.",
        "On a CPU it is right.",
        "device-annotations",
    ),
    card(
        DropsLast,
        "drops-last",
        "The last step is left out.",
        "Holistic Trace Analysis: include_last_profiler_step is False.",
        "Fractions hardly change.",
        "every-step",
        "late-kernels",
    ),
    card(
        NumbersFromZero,
        "numbers-from-zero",
        "Steps are numbered anew.",
        "`enumerate`.",
        "Traces that begin with step 0.",
        "every-step",
    ),
    card(
        EndsWithHost,
        "ends-with-host",
        "A step ends with the host's mark.",
        "ProfilerStep's own duration.",
        "A loop that prints the loss waits for its device in every step.",
        "late-kernels",
    ),
    card(
        AllOptimizerNotes,
        "counts-zero-grad",
        "zero_grad counts as an update.",
        "A search for `Optimizer.`.",
        "The same factor in every trace.",
        "optimizer-steps",
    ),
    card(
        OneUpdatePerStep,
        "step-per-micro-batch",
        "Takes every ProfilerStep for an optimizer step.",
        "A course steps its profiler per micro-batch and compares 6 of them with 6 of another run.",
        "The numbers are of the right size.",
        "optimizer-steps",
    ),
)
