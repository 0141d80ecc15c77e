"""What a profiler's trace says of each step: computation, communication, their overlap, the rest.

Problem: operators nest, streams run side by side, and collectives show up as operators, annotations
and kernels; sums of durations count the same microsecond several times.

Idea: treat both kinds as sets of intervals. Sort all their borders; between two neighbours nothing
changes, so each stretch is computation, communication, both or neither.

Steps
    1. Steps are the profiler's ProfilerStep marks, each extended to its last kernel.
    2. Communication: NCCL kernels on a device, gloo's annotations on a host. Computation: all other
       kernels, or the host's operators less the time they wait for collectives.
    3. overlap = both; exposed = communication alone; idle = neither.
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
WRAPPERS = ("autograd", "torch", "c10d", "_c10d_functional")  # they only call others


def size_of(dtype: str) -> int:
    """Return the bytes of an element, 0 for what is none; the profiler and NCCL differ in names."""
    return SIZES.get(dtype.lower().removeprefix("c10::"), 0)


def ends(events: list[Event]) -> Spans:
    """Return the begin and the end of each event."""
    return [(e["ts"], e["ts"] + e["dur"]) for e in events]


def times_of(begin: float, end: float, working: Spans, sending: Spans) -> dict[str, float]:
    """Walk from border to border; what lies between two of them is of one kind."""
    inside = {at for span in (*working, *sending) for at in span if begin < at < end}
    stretches = []
    for left, right in itertools.pairwise(sorted({begin, end, *inside})):
        works = any(b <= left and right <= e for b, e in working)
        sends = any(b <= left and right <= e for b, e in sending)
        stretches.append((right - left, works, sends))
    return {
        "duration_us": end - begin,
        "compute_us": sum(length for length, works, _ in stretches if works),
        "communication_us": sum(length for length, _, sends in stretches if sends),
        "overlap_us": sum(length for length, works, sends in stretches if works and sends),
        "exposed_us": sum(length for length, works, sends in stretches if sends and not works),
        "idle_us": sum(length for length, works, sends in stretches if not works and not sends),
    }


def fraction(times: dict[str, float]) -> float | None:
    """Return the part of communication that computation hides; None without communication."""
    sent = times["communication_us"]
    return times["overlap_us"] / sent if sent else None


class PlainTrace:
    """One file; `summary` is the answer."""

    def __init__(self, path: Any) -> None:
        self.path = Path(path)
        self.whole = self.read()
        self.spans = [e for e in self.whole["traceEvents"] if e.get("ph") == "X"]
        self.notes = [e for e in self.spans if e["cat"] == "user_annotation"]
        self.gloo = [e for e in self.notes if e["name"].startswith("gloo:")]
        self.operators = [e for e in self.spans if e["cat"] == "cpu_op"]
        self.kernels = [e for e in self.spans if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
        self.nccl = [e for e in self.kernels if "nccl" in e["name"]]

    def read(self) -> dict[str, Any]:
        data = self.path.read_bytes()
        try:
            found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        except (EOFError, ValueError) as error:
            raise ValueError(f"{self.path}: expected a whole trace, got {error}") from error
        if not isinstance(found, dict) or "traceEvents" not in found:
            raise ValueError(f"{self.path}: expected traceEvents, got {str(found)[:80]}")
        return found

    def summary(self) -> dict[str, Any]:
        steps = self.steps()
        if not steps:
            raise ValueError(f"{self.path}: expected a ProfilerStep, got none")
        working, sending = self.working(), ends([*self.nccl, *self.gloo])
        found: list[dict[str, Any]] = []
        for number, begin, end in steps:
            names = [e["name"] for e in self.notes if begin <= e["ts"] < end]
            updates = sum(name.startswith("Optimizer.step#") for name in names)
            times = times_of(begin, end, working, sending)
            step = {"step": number, "optimizer_steps": updates, **times}
            found.append(step | {"overlap_fraction": fraction(times)})
        names = [name for name in found[0] if name.endswith("_us")]
        total = {name: sum(step[name] for step in found) for name in names}
        info = self.whole.get("distributedInfo", {"rank": 0, "world_size": 1})
        return {
            "device": "cuda" if self.kernels else "cpu",
            "rank": info["rank"],
            "world_size": info["world_size"],
            "steps": found,
            "total": total | {"overlap_fraction": fraction(total)},
            "collectives": self.collectives(steps[0][1], steps[-1][2]),
            "peak_memory_bytes": self.peak(),
        }

    def steps(self) -> list[tuple[int, float, float]]:
        """Return the number, begin and end of each step."""
        marks = [e for e in self.notes if e["name"].startswith("ProfilerStep#")]
        launches = [e for e in self.spans if e["cat"] == "cuda_runtime"]
        found: list[tuple[int, float, float]] = []
        for mark in sorted(marks, key=lambda e: e["ts"]):
            begin, end = mark["ts"], mark["ts"] + mark["dur"]
            launched = {e["args"]["correlation"] for e in launches if begin <= e["ts"] < end}
            kernels = [e for e in self.kernels if e["args"]["correlation"] in launched]
            begin = max(begin, found[-1][2]) if found else begin
            end = max(begin, end, *(e["ts"] + e["dur"] for e in kernels))
            found.append((int(mark["name"].split("#")[1]), begin, end))
        return found

    def working(self) -> Spans:
        if self.kernels:
            return ends([e for e in self.kernels if "nccl" not in e["name"]])
        named = [e for e in self.operators if "::" in e["name"]]
        working = [e for e in named if e["name"].split("::")[0] not in WRAPPERS]
        # A thread that waits for a collective does not work: operators of c10d, gloo's annotations.
        waiting = [e for e in self.operators if "c10d" in e["name"]] + self.gloo
        found: Spans = []
        for thread in {e["tid"] for e in working}:
            spans = ends([e for e in working if e["tid"] == thread])
            for begin, end in ends([e for e in waiting if e["tid"] == thread]):
                before = [(b, min(e, begin)) for b, e in spans]
                after = [(max(b, end), e) for b, e in spans]
                spans = [(b, e) for b, e in before + after if b < e]
            found += spans
        return found

    def collectives(self, begin: float, end: float) -> dict[str, Any]:
        """Return the count and the bytes of each kind of collective that begins in this time."""
        asked = [e for e in self.operators if e["name"].startswith("c10d::")]
        sent = self.nccl or asked or self.gloo
        found: dict[str, Any] = {}
        for event in [e for e in sent if begin <= e["ts"] <= end]:
            name = event["args"].get("Collective name", event["name"]).replace("_", "").lower()
            kind = next(kind for kind in KINDS if kind.replace("_", "") in name)
            entry = found.setdefault(kind, {"count": 0, "bytes": 0})
            entry["count"] += 1
            size, total = self.num_bytes(event["args"]), entry["bytes"]
            entry["bytes"] = None if size is None or total is None else total + size
        return found

    def num_bytes(self, args: dict[str, Any]) -> int | None:
        """Return the larger of input and output; None if the trace does not say."""
        if "dtype" in args:
            return max(args["In msg nelems"], args["Out msg nelems"]) * size_of(args["dtype"])
        if "Input Dims" not in args:
            return None
        sizes = []
        for dims, kind in zip(args["Input Dims"], args["Input type"], strict=True):
            if kind == "TensorList":  # its dtypes are those of the annotation of the same dims
                noted = [e["args"] for e in self.gloo if e["args"].get("Input Dims") == dims]
                pairs = zip(dims, noted[0]["Input type"], strict=True)
                sizes.append(sum(math.prod(one) * size_of(dtype) for one, dtype in pairs))
            elif size_of(kind):
                sizes.append(math.prod(dims) * size_of(kind))
        return max(sizes)

    def peak(self) -> int | None:
        memory = [e["args"] for e in self.whole["traceEvents"] if e["name"] == "[memory]"]
        own = 1 if self.kernels else 0
        totals = [args["Total Allocated"] for args in memory if args["Device Type"] == own]
        return max(totals, default=None)

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function for this class."""
        return {"summarize_trace": lambda path: cls(path).summary()}
