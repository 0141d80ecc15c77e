"""Near-misses of what else a trace holds: collectives, memory, the file itself."""

from __future__ import annotations

import math
from typing import Any

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_trace import Event, PlainTrace, card, offer


class RankOfFile(PlainTrace):
    """The rank from the name of the file."""

    def summary(self) -> dict[str, Any]:
        return {
            **super().summary(),
            "rank": int(self.path.name[4]) if "rank" in self.path.name else 0,
        }


class CountsBoth(PlainTrace):
    """Operators and annotations: each collective twice."""

    def collectives(self, begin: float, end: float) -> list[Event]:
        found = super().collectives(begin, end)
        return found if self.kernels else found + [e for e in self.gloo() if e not in found]


class CountsWhatRan(PlainTrace):
    """gloo's annotations: a reduce-scatter is an all-reduce, a gather has the size of a shard."""

    def collectives(self, begin: float, end: float) -> list[Event]:
        nccl = [e for e in self.kernels if self.is_sending(e)]
        return [e for e in nccl or self.gloo() if begin <= e["ts"] <= end]


class CountsFunctional(PlainTrace):
    def collectives(self, begin: float, end: float) -> list[Event]:
        functional = [
            e for e in self.spans if "_c10d_functional" in e["name"] and "wait" not in e["name"]
        ]
        return super().collectives(begin, end) + functional


class CountsOutside(PlainTrace):
    def collectives(self, begin: float, end: float) -> list[Event]:
        return super().collectives(-math.inf, math.inf)


class SizeOfInput(PlainTrace):
    def payload(self, *sizes: int) -> int:
        return sizes[0] if "dtype" in str(self.kernels) else sizes[-1]


class FourBytes(PlainTrace):
    def size(self, dtype: str) -> int:
        return 4


class FirstOfList(PlainTrace):
    def of_list(self, dims: list[list[int]], kinds: list[str]) -> int:
        return super().of_list(dims[:1], kinds[:1])


class UnknownIsZero(PlainTrace):
    def added(self, total: int | None, more: int | None) -> int | None:
        return (total or 0) + (more or 0)


class EveryKind(PlainTrace):
    def counted(self, events: list[Event]) -> dict[str, Any]:
        none = {"all_reduce": {"count": 0, "bytes": 0}}
        return super().counted(events) or none


class LastTotal(PlainTrace):
    def peak(self) -> int | None:
        totals = self.totals()
        return totals[-1] if totals else None


class AnyDevice(PlainTrace):
    def totals(self) -> list[int]:
        found = [e["args"] for e in self.events if e["name"] == "[memory]"]
        return [args["Total Allocated"] for args in found]


class NoPeakIsZero(PlainTrace):
    def peak(self) -> int | None:
        return super().peak() or 0


class NeedsBlanks(PlainTrace):
    """Finds the rank with a pattern that wants a blank after the colon."""

    def parsed(self, data: bytes) -> dict[str, Any]:
        found = super().parsed(data)
        if b'"rank": ' not in data:
            found.pop("distributedInfo", None)
        return found


class FirstIsBegin(PlainTrace):
    """Trusts that events lie in the order of time."""

    def step_marks(self) -> list[Event]:
        return [e for e in self.notes if e["name"].startswith("ProfilerStep#")]


class RepairsCut(PlainTrace):
    """Leaves out what is missing at the end: zeros for whatever was lost."""

    def parsed(self, data: bytes) -> dict[str, Any]:
        try:
            return super().parsed(data)
        except ValueError:
            empty = {
                "ph": "X",
                "cat": "user_annotation",
                "name": "ProfilerStep#0",
                "ts": 0,
                "dur": 1,
            }
            return {"traceEvents": [{**empty, "args": {}, "tid": 1}]}


class NoNameInError(PlainTrace):
    def summary(self) -> dict[str, Any]:
        try:
            return super().summary()
        except ValueError:
            raise ValueError("expected a trace") from None

    def parsed(self, data: bytes) -> dict[str, Any]:
        try:
            return super().parsed(data)
        except ValueError:
            raise ValueError("expected a trace") from None


IMPOSTORS = (
    card(
        RankOfFile,
        "rank-of-file",
        "The rank is that of the file's name.",
        "`int(path.stem[4])`.",
        "Nobody renames a trace.",
        "rank",
    ),
    card(
        CountsBoth,
        "counts-twice",
        "A collective counts as operator and as annotation.",
        "A search for reduce in the names of all events.",
        "Ratios between runs are right.",
        "collectives",
        "collective-bytes",
        "lists-of-tensors",
        "of-a-run",
    ),
    card(
        CountsWhatRan,
        "counts-what-ran",
        "A reduce-scatter over gloo is an all-reduce.",
        "gloo's own annotations.",
        "With nccl it is right.",
        "collectives",
        "collective-bytes",
    ),
    card(
        CountsFunctional,
        "counts-functional",
        "A functional collective and the one that it asks for count both.",
        "Two namespaces, one list.",
        "Few wrappers use DTensor's collectives.",
        "functional-collectives",
    ),
    card(
        CountsOutside,
        "counts-outside",
        "Collectives of the warm-up count.",
        "Counting over the whole file.",
        "The profiler's schedule hides most of them.",
        "collectives-outside",
    ),
    card(
        SizeOfInput,
        "size-of-input",
        "A gather has the size of what a rank gives.",
        "The first size that a trace shows.",
        "Right for all-reduce.",
        "collectives",
        "collective-bytes",
    ),
    card(
        FourBytes,
        "four-bytes",
        "Every element has four bytes.",
        "`numel * 4`.",
        "Right for float32.",
        "collective-bytes",
    ),
    card(
        FirstOfList,
        "first-of-list",
        "Of a list of tensors the first one counts.",
        "`dims[0]`.",
        "Most lists hold one tensor.",
        "lists-of-tensors",
    ),
    card(
        UnknownIsZero,
        "unknown-is-zero",
        "Unknown bytes are zero.",
        "`args.get('Out msg nelems', 0)`.",
        "Somebody else recorded the shapes.",
        "unknown-bytes",
    ),
    card(
        EveryKind,
        "kinds-of-zero",
        "A run of one rank has all-reduces, none of them.",
        "A table with a fixed row.",
        "Zero is right, in a way.",
        "no-collectives",
    ),
    card(
        LastTotal,
        "last-total",
        "The peak is what is allocated at the end.",
        "A course prints memory_allocated as the peak: five times too little.",
        "It is a plausible number.",
        "peak-memory",
    ),
    card(
        AnyDevice,
        "any-device",
        "Memory of the host counts as the device's.",
        "Device Type is not looked at.",
        "On a CPU there is one device.",
        "peak-memory",
    ),
    card(
        NoPeakIsZero,
        "no-peak-is-zero",
        "Without a record of memory the peak is zero.",
        "A course promises a memory analysis of traces recorded without profile_memory.",
        "Whoever looks for it has recorded it.",
        "peak-memory",
    ),
    card(
        NeedsBlanks,
        "needs-blanks",
        "The rank is read with a pattern that wants a blank.",
        "Holistic Trace Analysis: compact files all belong to rank 0.",
        "PyTorch writes blanks.",
        "any-form",
    ),
    card(
        FirstIsBegin,
        "trusts-the-order",
        "Steps are taken in the order of the file.",
        "A file that happened to be sorted.",
        "Most are.",
        "any-order",
    ),
    card(
        RepairsCut,
        "repairs-cut-files",
        "What is cut off is an empty trace.",
        "`except Exception: return None` in a course's notebook.",
        "Zeros look like a fast run.",
        "refuses",
    ),
    card(
        NoNameInError,
        "no-name-in-error",
        "The message does not say which file.",
        "A bare JSONDecodeError.",
        "With one file it is known.",
        "names-the-file",
    ),
    Impostor(
        "benign.trace-plain",
        "The base of the traces' near-misses: all of the file, border by border.",
        "",
        "",
        (),
        functions=lambda: offer(PlainTrace),
        alone=True,
    ),
)
