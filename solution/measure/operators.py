"""What was run how often and how long, the difference of two setups, and memory over time.

Counts and times are per step. An operator's time includes what it calls, so times of different
names do not add up to a step; on a GPU kernels are listed, which do not nest.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from solution.measure.trace import Lanes
from solution.measure.trace_file import Trace

__all__ = [
    "Change",
    "OperatorUse",
    "difference_of",
    "memory_over_time",
    "operators_per_step",
    "typical",
]


@dataclass(frozen=True)
class OperatorUse:
    """How often an operator ran per step, and how long in microseconds, what it calls included."""

    count: float = 0.0
    time_us: float = 0.0


@dataclass(frozen=True)
class Change:
    """One operator in two setups."""

    name: str
    first: OperatorUse
    second: OperatorUse

    @property
    def count(self) -> float:
        """How much more often the second runs it, per step."""
        return self.second.count - self.first.count

    @property
    def time_us(self) -> float:
        """How much longer the second spends in it, per step."""
        return self.second.time_us - self.first.time_us


def operators_per_step(trace: Trace, lanes: list[Lanes]) -> dict[str, OperatorUse]:
    """Operators that begin inside steps, or kernels where there are any; by name."""
    begins = [step.begin for step in lanes]
    spans = [launch.span for launch in trace.kernels] or trace.operators
    found: dict[str, list[float]] = {}
    for span in spans:
        index = bisect_right(begins, span.begin) - 1
        if index >= 0 and span.begin < lanes[index].end:
            entry = found.setdefault(span.name, [0, 0.0])
            entry[0] += 1
            entry[1] += span.end - span.begin
    return {
        name: OperatorUse(count / len(lanes), time_us / len(lanes))
        for name, (count, time_us) in found.items()
    }


def difference_of(first: dict[str, OperatorUse], second: dict[str, OperatorUse]) -> list[Change]:
    """What differs in number, of operators in either; the largest difference in time first.

    >>> a, b = {"aten::mm": OperatorUse(3, 30.0)}, {"aten::mm": OperatorUse(3, 50.0)}
    >>> difference_of(a, b)
    []
    >>> [(c.name, c.count) for c in difference_of(a, {**b, "c10d::allreduce_": OperatorUse(1, 5)})]
    [('c10d::allreduce_', 1.0)]
    """
    none = OperatorUse()
    changes = [
        Change(name, first.get(name, none), second.get(name, none))
        for name in sorted(first.keys() | second.keys())
    ]
    changed = [change for change in changes if change.count]
    return sorted(changed, key=lambda change: -abs(change.time_us))


def memory_over_time(
    trace: Trace, lanes: list[Lanes], *, points: int = 400
) -> list[tuple[float, int]]:
    """Microseconds since the first step, and bytes allocated then, at most about `points` of them.

    Each point is the largest of its stretch of time, so that no peak is lost. On a CPU bytes count
    from the begin of the recording: what was allocated before is not in the trace.
    """
    begin, end = lanes[0].begin, lanes[-1].end
    own = [use for use in trace.memory if use.device_type == (trace.device == "cuda")]
    width = (end - begin) / points or 1.0
    largest: dict[int, tuple[float, int]] = {}
    for at, _, total in own:
        if begin <= at <= end:
            stretch = int((at - begin) / width)
            if stretch not in largest or total > largest[stretch][1]:
                largest[stretch] = (at - begin, total)
    return [largest[stretch] for stretch in sorted(largest)]


def typical(lanes: list[Lanes]) -> int:
    """Where the step of median duration stands in the list: the one to show."""
    order = sorted(range(len(lanes)), key=lambda index: lanes[index].end - lanes[index].begin)
    return order[(len(order) - 1) // 2]
