"""Synthetic traces: what happened when, written down as torch.profiler would have recorded it.

A timeline is built for a CPU with gloo or for a GPU with nccl by the same calls, so one clause with
one hand-computed answer speaks of both. Times are whole microseconds from the begin of the trace.
Around what a clause asks for stands what every real trace holds: names of threads, arrows from
forward to backward, a span over everything.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_tests.rig import judge

TRACE = ("summarize_trace",)
DEVICES = ("cpu", "cuda")
TIMES = ("duration_us", "compute_us", "communication_us", "overlap_us", "exposed_us", "idle_us")
CLOCK = 1_000_000  # where the clock of a trace stands at time 0

# What c10d, gloo and nccl call a collective.
NAMES = {
    "all_reduce": ("c10d::allreduce_", "gloo:all_reduce", "allreduce", "AllReduce_Sum_f32_RING_LL"),
    "all_gather": (
        "c10d::_allgather_base_",
        "gloo:all_gather",
        "_allgather_base",
        "AllGather_RING",
    ),
    "reduce_scatter": (
        "c10d::_reduce_scatter_base_",
        "gloo:all_reduce",
        "_reduce_scatter_base",
        "ReduceScatter_Sum_f32_RING_LL",
    ),
    "broadcast": ("c10d::broadcast_", "gloo:broadcast", "broadcast", "Broadcast_RING_LL"),
}
EVENT = re.compile(r"(\w+)(?: (\d+))? (\d+)-(\d+)(?: @(\d+))?(?: <(\d+))?(?: (\d+)>(\d+))?")
NCCL_DTYPES = {"float": "Float", "c10::BFloat16": "BFloat16", "long int": "Long"}


@dataclass
class Timeline:
    """A trace under construction.

    Attributes:
        device: "cpu" or "cuda".
        rank, world_size: of its distributedInfo; None leaves it out.
        events: so far.
    """

    device: str = "cpu"
    rank: int | None = None
    world_size: int = 1
    events: list[dict[str, Any]] = field(default_factory=list)
    correlations: int = 0

    @classmethod
    def of(cls, script, device="cpu", **options):
        """A timeline of the events that a script lists, see `play`."""
        line = cls(device, **options)
        line.play(script)
        return line

    def play(self, script, **options):
        """Add "step 3 0-1000, work 20-50 @1 <10, all_gather 60-80 10>20, update 90-95".

        After @ stands the lane, after < when it was launched; a collective takes 10 elements and
        gives 20. `options` are those of `send`.
        """
        for event in script.split(", "):
            found = EVENT.fullmatch(event)
            assert found, f"{event!r} is no event"
            word, *digits = found.groups()
            number, begin, end, lane, launched, takes, gives = (d and int(d) for d in digits)
            if word == "step":
                self.step(number, begin, end)
            elif word == "update":
                self.update(begin, end)
            elif word == "work":
                self.work(begin, end, lane=lane or 0, launched=launched)
            else:
                sizes = {"takes": takes, "gives": gives} if takes else {}
                placed = {"lane": lane or 0, "launched": launched}
                self.send(begin, end, word, **placed, **sizes, **options)

    def add(self, category, name, begin, end, *, thread: Any = 1, **args):
        """A span of any category."""
        at = {"ts": CLOCK + begin, "dur": end - begin}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread, **at, "args": args}
        )

    def step(self, number, begin, end):
        """A ProfilerStep."""
        self.add("user_annotation", f"ProfilerStep#{number}", begin, end)

    def update(self, begin, end):
        """A step of the optimizer, and the zero_grad after it."""
        self.add("user_annotation", "Optimizer.step#AdamW.step", begin, end)
        self.add("user_annotation", "Optimizer.zero_grad#AdamW.zero_grad", end, end)

    def work(self, begin, end, *, lane=0, name="aten::mm", launched=None):
        """An operator on thread `lane`, or a kernel on stream `lane`, asked for at `launched`."""
        if self.device == "cpu":
            self.add("cpu_op", name, begin, end, thread=1 + lane)
        else:
            self.kernel("gemm_" + name.replace("::", "_"), begin, end, lane, launched)

    def send(
        self, begin, end, kind="all_reduce", *, takes=64, gives=64, dtype="float", lane=0,
        launched=None,
    ):  # fmt: skip
        """A collective that is under way from `begin` to `end`."""
        operator, annotation, word, kernel = NAMES[kind]
        if self.device == "cuda":
            sizes = {"In msg nelems": takes, "Out msg nelems": gives, "dtype": NCCL_DTYPES[dtype]}
            self.kernel(
                f"ncclDevKernel_{kernel}", begin, end, 20 + lane, launched,
                **{"Collective name": word}, **sizes,
            )  # fmt: skip
            return
        if kind in ("all_gather", "reduce_scatter"):
            dims, types = [[gives], [takes], []], [dtype, dtype, ""]
        else:
            dims, types = [[[takes]], []], ["TensorList", ""]
        self.add("cpu_op", operator, begin, begin, **{"Input Dims": dims, "Input type": types})
        of_input = {"Input Dims": [[takes]], "Input type": [dtype]}
        self.add("user_annotation", annotation, begin, end, thread=100 + lane, **of_input)

    def kernel(self, name, begin, end, stream, launched=None, *, category="kernel", **args):
        """A kernel, and the call on the host that asked for it."""
        self.correlations += 1
        at = begin if launched is None else launched
        self.add("cuda_runtime", "cudaLaunchKernel", at, at, correlation=self.correlations)
        args |= {"stream": stream, "correlation": self.correlations}
        self.add(category, name, begin, end, thread=stream, **args)

    def memory(self, at, total, *, device_type):
        """An allocation after which `total` bytes are allocated."""
        args = {"Total Allocated": total, "Bytes": 8, "Device Type": device_type, "Device Id": 0}
        self.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7}
            | {"tid": 1, "ts": CLOCK + at, "args": args}
        )

    def whole(self):
        """The trace as one object, with what stands around in every one."""
        at = {"pid": 7, "tid": 1, "ts": CLOCK}
        spans = {"pid": "Spans", "tid": "x", "ts": CLOCK - 50, "dur": 99_999, "args": {}}
        around = [
            {"ph": "M", "name": "thread_name", **at, "args": {"name": "x"}},
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", **spans},
            {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, **at},
            {"ph": "i", "s": "g", "name": "Record Window End", **at},
        ]
        info = {"backend": "gloo", "rank": self.rank, "world_size": self.world_size}
        head = {} if self.rank is None else {"distributedInfo": info}
        return {"schemaVersion": 1, **head, "traceEvents": [*around, *self.events]}

    def data(self, form="indented"):
        """The bytes of the file: "indented" as PyTorch writes it, "compact", or "gzip"."""
        text = json.dumps(self.whole(), indent=2)
        if form == "compact":
            text = json.dumps(self.whole(), separators=(",", ":"))
        return gzip.compress(text.encode(), mtime=0) if form == "gzip" else text.encode()


def summary(ctx, data, name="rank0_trace.json"):
    """What the implementation says of a file with these bytes; None: a file that is not there."""
    with tempfile.TemporaryDirectory(dir=ctx.scratch) as folder:
        path = Path(folder) / name
        if data is not None:
            path.write_bytes(data)
        return ctx.impl.summarize_trace(path)


def observed(world, timeline, *, form="indented"):
    """The one rank's summary of a timeline."""
    name = "rank0_trace.json" + (".gz" if form == "gzip" else "")
    (found,) = world.run(summary, timeline.data(form), name)
    return found


def judged(world, timeline, *, steps=None, collectives=None, given="", **total):
    """What a trace is summarised as must be this.

    Args:
        steps: number to times; all that there are.
        collectives: kind to count and bytes; all that there are.
        total: times of all steps together.
    """
    __tracebackhide__ = True
    found = observed(world, timeline)
    if steps is not None:
        judge.equal([numbers(found)], [*steps], quantity="steps", given=given)
        for step in found["steps"]:
            times(step, steps[step["step"]], what=f"step {step['step']}", given=given)
    if total:
        times(found["total"], total, given=given)
    if collectives is not None:
        seen = {kind: (of["count"], of["bytes"]) for kind, of in found["collectives"].items()}
        judge.equal([seen], collectives, quantity="collectives: count, bytes", given=given)


def numbers(found):
    """The numbers of the steps, in order."""
    return [step["step"] for step in found["steps"]]


def times(found, expected, *, what="total", given=""):
    """The named times are these whole microseconds, and the fraction that one, to the nanosecond.

    `found` is a dict of times, of a step or of all.
    """
    __tracebackhide__ = True
    for name, value in expected.items():
        got = found.get(name, "nothing")
        is_number = isinstance(got, int | float) and value is not None
        judge.holds(
            got == value or (is_number and round(float(got), 3) == round(float(value), 3)),
            f"{what}: expected {name} = {value}, got {got}",
            likely=LIKELY.get(name, ""),
            given=given,
        )


LIKELY = {
    "compute_us": "durations are summed, so that nested and concurrent work counts twice",
    "communication_us": "collectives that are under way at once count each by itself",
    "overlap_us": "overlaps are summed pair by pair",
    "duration_us": "another span is taken for the step",
}
