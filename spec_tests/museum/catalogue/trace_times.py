"""Near-misses of a trace's times: numbers that look right on the trace that somebody looked at."""

import math

from spec_tests.museum.card import near_miss
from spec_tests.plain.trace import PlainTrace


class Trace(PlainTrace):
    """The base of all near-misses of traces."""

    alone = True


@near_miss(
    "measure.sums-durations",
    rejected_by=("measure.trace.computation-is-a-union", "measure.trace.any-intervals"),
)
class SumsDurations(Trace):
    """Computation is the sum of durations.

    From: `events.groupby('name').dur.sum()` over operators that nest.
    Unseen: On one stream without nesting it is right.
    """

    def times(self, working, sending):
        return {**super().times(working, sending), "compute_us": sum(e - b for b, e in working)}


@near_miss(
    "measure.sums-communication",
    rejected_by=("measure.trace.communication-is-a-union", "measure.trace.any-intervals"),
)
class SumsCommunication(Trace):
    """Each collective counts by itself.

    From: The same sum over nccl kernels of several groups.
    Unseen: With one group they follow one another.
    """

    def times(self, working, sending):
        found = super().times(working, sending)
        sent = sum(e - b for b, e in sending)
        return {**found, "communication_us": sent, "exposed_us": sent - found["overlap_us"]}


@near_miss("measure.fraction-of-step", rejected_by="measure.trace.overlap")
class FractionOfStep(Trace):
    """The fraction is of the step, not of the communication.

    From: A plot of shares of a step.
    Unseen: It lies between 0 and 1.
    """

    def fraction(self, times):
        return times["overlap_us"] / times["duration_us"] if times["communication_us"] else None


@near_miss("measure.nan-fraction", rejected_by="measure.trace.no-communication")
class NaNFraction(Trace):
    """Without communication the fraction is NaN.

    From: Holistic Trace Analysis on a baseline; a course's notebook plots it.
    Unseen: Everybody looks at runs that communicate.
    """

    def fraction(self, times):
        found = super().fraction(times)
        return math.nan if found is None else found


@near_miss("measure.by-begin", rejected_by="measure.trace.only-inside-steps")
class ByBegin(Trace):
    """Whole events count where they begin.

    From: Holistic Trace Analysis, which gives each event an iteration.
    Unseen: Steps that end with a synchronisation have nothing across their border.
    """

    def inside(self, spans, begin, end):
        return [(b, e) for b, e in spans if begin <= b < end]


@near_miss("measure.wrappers-compute", rejected_by="measure.trace.wrappers-do-not-compute")
class WrappersCompute(Trace):
    """Autograd nodes count as computation.

    From: Outermost operators projected onto a stream.
    Unseen: Communication looks well hidden, which pleases.

    Every operator of the host computes, whatever it only calls.
    """

    def does_work(self, name):
        return "c10d" not in name


@near_miss("measure.waiting-computes", rejected_by="measure.trace.inside-a-collective")
class WaitingComputes(Trace):
    """Operators inside a collective count as computation.

    From: gloo's workers copy with operators of their own.
    Unseen: On a GPU there is no such thing.
    """

    def waiting(self, thread):
        return []


@near_miss("measure.steps-of-device", rejected_by="measure.trace.device-annotations")
class StepsOfDevice(Trace):
    """Steps are counted on host and device.

    From: A search by name over all events.
    Unseen: On a CPU it is right.
    """

    def step_marks(self):
        marks = [e for e in self.spans if e["name"].startswith("ProfilerStep#")]
        return sorted(marks, key=lambda e: e["ts"])


@near_miss("measure.numbers-from-zero", rejected_by="measure.trace.every-step")
class NumbersFromZero(Trace):
    """Steps are numbered anew.

    From: `enumerate`.
    Unseen: Traces that begin with step 0.
    """

    def steps(self):
        return [(number, *step[1:]) for number, step in enumerate(super().steps())]


@near_miss("measure.ends-with-host", rejected_by="measure.trace.late-kernels")
class EndsWithHost(Trace):
    """A step ends with the host's mark.

    From: ProfilerStep's own duration.
    Unseen: A loop that prints the loss waits for its device in every step.
    """

    def last_kernel(self, begin, end):
        return end


@near_miss("measure.step-per-micro-batch", rejected_by="measure.trace.optimizer-steps")
class OneUpdatePerStep(Trace):
    """Takes every ProfilerStep for an optimizer step.

    From: A course steps its profiler per micro-batch and compares 6 of them with 6 of another run.
    Unseen: The numbers are of the right size.
    """

    def updates(self, begin, end):
        return 1
