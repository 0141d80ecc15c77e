"""What a profiler's trace says of each step: computation, communication, their overlap, the rest.

Problem: operators nest, streams run side by side, and collectives show up as operators, annotations
and kernels; sums of durations count the same microsecond several times.

Idea: treat both kinds as sets of intervals. Sort all their borders; between two neighbours nothing
changes, so each stretch is computation, communication, both or neither.

Steps
    1. Steps are the profiler's ProfilerStep marks, each extended to its last kernel.
    2. Communication: NCCL kernels on a device, gloo's annotations on a host. Computation: all other
       kernels, or the host's operators less the time they wait for collectives.
    3. overlap = both; exposed = communication alone; idle = duration - computation - exposed.
    4. Collectives are counted with the larger of input and output bytes.

Use
    steps = PlainTrace("rank0_trace.json").summary()["steps"]

Cost: the whole file as JSON in memory; borders times intervals.

Source: the Chrome trace format, as torch.profiler writes it.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Spans = list[tuple[float, float]]

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
SIZES = {"float": 4, "double": 8, "bfloat16": 2, "half": 2, "long": 8, "long int": 8, "int": 4}


class PlainTrace:
    """One file; `summary` is the answer."""

    def __init__(self, path: Any) -> None:
        self.path = Path(path)
        self.whole = self.parsed(self.path.read_bytes())
        self.events: list[Event] = self.whole["traceEvents"]
        self.spans = [e for e in self.events if e.get("ph") == "X"]
        self.notes = [e for e in self.spans if e["cat"] == "user_annotation"]
        self.kernels = [e for e in self.spans if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
        self.device = "cuda" if self.kernels else "cpu"

    def parsed(self, data: bytes) -> dict[str, Any]:
        try:
            text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
            found = json.loads(text)
        except (EOFError, ValueError) as error:
            raise ValueError(f"{self.path}: expected a whole trace, got {error}") from error
        if not isinstance(found, dict) or "traceEvents" not in found:
            raise ValueError(f"{self.path}: expected traceEvents, got {str(found)[:80]}")
        return found

    def summary(self) -> dict[str, Any]:
        steps = self.steps()
        if not steps:
            raise ValueError(f"{self.path}: expected a ProfilerStep, got none")
        found = [self.of_step(*step) for step in steps]
        names = [name for name in found[0] if name.endswith("_us")]
        total = {name: sum(step[name] for step in found) for name in names}
        info = self.whole.get("distributedInfo", {"rank": 0, "world_size": 1})
        return {
            "device": self.device,
            "rank": info["rank"],
            "world_size": info["world_size"],
            "steps": found,
            "total": total | {"overlap_fraction": self.fraction(total)},
            "collectives": self.counted(self.collectives(steps[0][1], steps[-1][2])),
            "peak_memory_bytes": self.peak(),
        }

    # ------------------------------------------------------------------------------------- steps

    def step_marks(self) -> list[Event]:
        marks = [e for e in self.notes if e["name"].startswith("ProfilerStep#")]
        return sorted(marks, key=lambda e: e["ts"])

    def steps(self) -> list[tuple[int, float, float]]:
        """Number, begin and end."""
        found: list[tuple[int, float, float]] = []
        for mark in self.step_marks():
            begin, end = mark["ts"], mark["ts"] + mark["dur"]
            late = self.last_kernel(begin, end)
            begin = max(begin, found[-1][2]) if found else begin
            found.append((int(mark["name"].split("#")[1]), begin, max(end, late, begin)))
        return found

    def last_kernel(self, begin: float, end: float) -> float:
        launched = {
            e["args"]["correlation"]
            for e in self.spans
            if e["cat"] == "cuda_runtime" and begin <= e["ts"] < end
        }
        ends = [e["ts"] + e["dur"] for e in self.kernels if e["args"]["correlation"] in launched]
        return max(ends, default=end)

    def updates(self, begin: float, end: float) -> int:
        names = [e["name"] for e in self.notes if begin <= e["ts"] < end]
        return sum(name.startswith("Optimizer.step#") for name in names)

    # ------------------------------------------------------------------------------------- times

    def of_step(self, number: int, begin: float, end: float) -> dict[str, Any]:
        working, sending = self.working(), self.sending()
        times = self.times(self.inside(working, begin, end), self.inside(sending, begin, end))
        times = {"duration_us": end - begin, **times}
        times["idle_us"] = end - begin - times["compute_us"] - times["exposed_us"]
        return {
            "step": number,
            "optimizer_steps": self.updates(begin, end),
            **times,
            "overlap_fraction": self.fraction(times),
        }

    def inside(self, spans: Spans, begin: float, end: float) -> Spans:
        return [(max(b, begin), min(e, end)) for b, e in spans if b < end and e > begin]

    def times(self, working: Spans, sending: Spans) -> dict[str, float]:
        """Walk from border to border; what lies between two of them is of one kind."""
        borders = sorted({at for span in (*working, *sending) for at in span})
        found = dict.fromkeys(("compute_us", "communication_us", "overlap_us", "exposed_us"), 0.0)
        for begin, end in itertools.pairwise(borders):
            works = any(b <= begin and end <= e for b, e in working)
            sends = any(b <= begin and end <= e for b, e in sending)
            for name, counts in (
                ("compute_us", works),
                ("communication_us", sends),
                ("overlap_us", works and sends),
                ("exposed_us", sends and not works),
            ):
                found[name] += (end - begin) * counts
        return found

    def fraction(self, times: dict[str, float]) -> float | None:
        sent = times["communication_us"]
        return times["overlap_us"] / sent if sent else None

    def sending(self) -> Spans:
        nccl = [e for e in self.kernels if self.is_sending(e)]
        return self.ends([*nccl, *self.gloo()])

    def is_sending(self, kernel: Event) -> bool:
        return "nccl" in kernel["name"]

    def gloo(self) -> list[Event]:
        return [e for e in self.notes if e["name"].startswith("gloo:")]

    def working(self) -> Spans:
        if self.kernels:
            return self.ends([e for e in self.kernels if not self.is_sending(e)])
        found: Spans = []
        for thread in {e["tid"] for e in self.operators()}:
            spans = self.ends([e for e in self.operators() if e["tid"] == thread])
            found += self.without(spans, self.ends(self.waiting(thread)))
        return found

    def operators(self) -> list[Event]:
        return [e for e in self.spans if e["cat"] == "cpu_op" and self.does_work(e["name"])]

    def does_work(self, name: str) -> bool:
        namespace, separator, _ = name.partition("::")
        wrappers = ("autograd", "torch", "c10d", "_c10d_functional")
        return bool(separator) and namespace not in wrappers

    def waiting(self, thread: Any) -> list[Event]:
        """What is no computation on a thread: collectives, by operator and by annotation."""
        asked = [e for e in self.spans if e["cat"] == "cpu_op" and "c10d" in e["name"]]
        return [e for e in (*asked, *self.gloo()) if e["tid"] == thread]

    def without(self, spans: Spans, holes: Spans) -> Spans:
        for begin, end in holes:
            pieces = [((b, min(e, begin)), (max(b, end), e)) for b, e in spans]
            spans = [piece for pair in pieces for piece in pair if piece[0] < piece[1]]
        return spans

    def ends(self, events: list[Event]) -> Spans:
        return [(e["ts"], e["ts"] + e["dur"]) for e in events]

    # ------------------------------------------------------------------- collectives and memory

    def collectives(self, begin: float, end: float) -> list[Event]:
        asked = [e for e in self.spans if e["cat"] == "cpu_op" and e["name"].startswith("c10d::")]
        found = [e for e in self.kernels if self.is_sending(e)] or asked or self.gloo()
        return [e for e in found if begin <= e["ts"] <= end]

    def counted(self, events: list[Event]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for event in events:
            entry = found.setdefault(self.kind(event), {"count": 0, "bytes": 0})
            entry["count"] += 1
            entry["bytes"] = self.added(entry["bytes"], self.num_bytes(event["args"]))
        return found

    def added(self, total: int | None, more: int | None) -> int | None:
        return None if total is None or more is None else total + more

    def kind(self, event: Event) -> str:
        name = event["args"].get("Collective name", event["name"])
        squashed = name.replace("_", "").lower()
        return next(kind for kind in KINDS if kind.replace("_", "") in squashed)

    def num_bytes(self, args: dict[str, Any]) -> int | None:
        if "dtype" in args:
            elements = self.payload(args["In msg nelems"], args["Out msg nelems"])
            return elements * self.size(args["dtype"])
        if "Input Dims" not in args:
            return None
        sizes = []
        for dims, kind in zip(args["Input Dims"], args["Input type"], strict=True):
            if kind == "TensorList":
                kinds = next(
                    e["args"]["Input type"]
                    for e in self.gloo()
                    if e["args"].get("Input Dims") == dims
                )
                sizes.append(self.of_list(dims, kinds))
            elif kind.lower().removeprefix("c10::") in SIZES:
                sizes.append(math.prod(dims) * self.size(kind))
        return self.payload(*sizes)

    def of_list(self, dims: list[list[int]], kinds: list[str]) -> int:
        pairs = zip(dims, kinds, strict=True)
        return sum(math.prod(one) * self.size(kind) for one, kind in pairs)

    def payload(self, *sizes: int) -> int:
        return max(sizes)

    def size(self, dtype: str) -> int:
        return SIZES[dtype.lower().removeprefix("c10::")]

    def peak(self) -> int | None:
        totals = self.totals()
        return max(totals) if totals else None

    def totals(self) -> list[int]:
        own = 1 if self.device == "cuda" else 0
        found = [e["args"] for e in self.events if e["name"] == "[memory]"]
        return [args["Total Allocated"] for args in found if args["Device Type"] == own]

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function for this class."""
        return {"summarize_trace": lambda path: cls(path).summary()}
