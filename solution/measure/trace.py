"""Summary of one rank's profiler trace: computation, communication, and their overlap.

    |<-------------------------- step ----------------------------->|
    compute        ######   ##########        ######
    communication       =========    ======
    overlap             #     ####   #                              both at once
    exposed              =====    ... ====                          communication alone
    idle                                    ..      ...............  neither

Each line is a union of intervals: nested operators and concurrent kernels count once. So compute +
exposed + idle is the step, always. `summarize_trace` in `spec_tests/contract/measure.py` says what
computes and what communicates; in short: kernels and nccl kernels on a GPU, operators and gloo's
annotations on a CPU. The latter are times of the host and include the profiler's own cost. Waiting
for slower ranks counts as communication on both.

Collectives are counted as what was asked for, not as a backend does them: gloo runs PyTorch's
reduce-scatter as an all-reduce, and its annotation says so, but the operator
`c10d::_reduce_scatter_base_` was called. So on a CPU the operators of c10d are counted; with nccl
the kernels, which bear the name and the sizes of what was asked for. Calls inside an annotation of
`solution.comm` (`comm.all_gather_rows`) count under its name, once, with their kinds beside it.
Bytes are of the payload on this rank, the larger of what goes in and what comes out, as
`solution.measure.traffic` counts them; they need `record_shapes=True`.
"""

import itertools
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from solution.comm import NAMED
from solution.measure.intervals import Intervals, clipped, difference, intersection, length, merged
from solution.measure.trace_file import Span, Trace, TraceError, read_trace

STEP, UPDATE, GLOO = "ProfilerStep#", "Optimizer.step#", "gloo:"
COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of operators
WRAPPERS = ("autograd", "torch", *COLLECTIVES)  # only call other operators, or communicate
# Longer words first: "allreduce" is no "reduce".
KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "monitoredbarrier": "barrier",
    **{
        word: word
        for word in ("broadcast", "gather", "scatter", "reduce", "send", "recv", "barrier")
    },
}
ITEM_BYTES = {
    **dict.fromkeys(("bool", "byte", "unsigned char", "char", "signed char"), 1),
    **dict.fromkeys(("half", "bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long", "long int", "complex<float>", "complexfloat"), 8),
    **dict.fromkeys(("complex<double>", "complexdouble"), 16),
}


def summarize_trace(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the summary of one rank's trace, with the keys of the contract.

    Args:
        path: a Chrome trace of torch.profiler, JSON or gzipped JSON.

    Raises:
        TraceError: a ValueError: missing, empty, cut off, foreign, or without a recorded step.
    """
    trace = read_trace(path)
    marks, updates, ends = _steps(trace)
    compute, communication = _computation_and_communication(trace)
    steps, total, previous = [], Counter[str](), float("-inf")
    for mark, num_updates, end in zip(marks, updates, ends, strict=True):
        begin = max(mark.begin, previous)
        end = previous = max(begin, end)
        own, sent = clipped(compute, begin, end), clipped(communication, begin, end)
        exposed = length(difference(sent, own))
        times = {
            "duration_us": end - begin,
            "compute_us": length(own),
            "communication_us": length(sent),
            "overlap_us": length(intersection(own, sent)),
            "exposed_us": exposed,
            "idle_us": end - begin - length(own) - exposed,
        }
        total.update(times)  # type: ignore[arg-type]  # a Counter adds floats as well
        number = int(mark.name.removeprefix(STEP))
        steps.append({"step": number, "optimizer_steps": num_updates, **_with_fraction(times)})
    return {
        "device": trace.device,
        "rank": trace.rank,
        "world_size": trace.world_size,
        "steps": steps,
        "total": _with_fraction(dict(total)),
        "collectives": collectives_between(trace, marks[0].begin, previous),
        "peak_memory_bytes": max((size for _, size in trace.device_memory), default=None),
    }


def _with_fraction(times: Mapping[str, float]) -> dict[str, Any]:
    """Add the fraction of the communication that was hidden; None where there is none."""
    sent = times["communication_us"]
    return {**times, "overlap_fraction": float(times["overlap_us"] / sent) if sent else None}


def _steps(trace: Trace) -> tuple[list[Span], list[int], list[float]]:
    """Return the marks of the recorded steps, the updates that begin in each, and their ends.

    A step ends with the last kernel that was launched in it.

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
    ends = [mark.end for mark in marks]
    for kernel in trace.kernels:
        index = holder(trace.launches.get(kernel.args.get("correlation")))
        if index is not None:
            ends[index] = max(ends[index], kernel.end)
    return marks, [updates[index] for index in range(len(marks))], ends


def _computation_and_communication(trace: Trace) -> tuple[Intervals, Intervals]:
    gloo = [note for note in trace.annotations if note.name.startswith(GLOO)]
    if trace.kernels:
        own = [kernel for kernel in trace.kernels if not _is_nccl(kernel)]
        return _union(own), _union([*filter(_is_nccl, trace.kernels), *gloo])
    working: dict[Any, list[Span]] = defaultdict(list)  # by thread
    sending: dict[Any, list[Span]] = defaultdict(list)
    for span in itertools.chain(trace.operators, gloo):
        namespace, separator, _ = span.name.partition("::")
        if namespace in COLLECTIVES or span.name.startswith(GLOO):
            sending[span.thread].append(span)
        elif separator and namespace not in WRAPPERS:
            working[span.thread].append(span)
    own_time = merged(
        interval
        for thread, spans in working.items()
        for interval in difference(_union(spans), _union(sending[thread]))
    )
    return own_time, _union(gloo)


def _is_nccl(span: Span) -> bool:
    return "nccl" in span.name.lower()


def _union(spans: Iterable[Span]) -> Intervals:
    return merged((span.begin, span.end) for span in spans)


def collectives_between(trace: Trace, begin: float, end: float) -> dict[str, dict[str, Any]]:
    """Return kind to `count` and `bytes` of the collectives that begin between two moments.

    `bytes` is None for a kind of which some collective has no sizes in the trace.
    """
    names = [note for note in trace.annotations if note.name.startswith(NAMED)]
    begins = [note.begin for note in names]

    def asked(moment: float) -> tuple[int, str] | None:
        index = bisect_right(begins, moment) - 1
        if index < 0 or moment > names[index].end:
            return None
        return index, names[index].name.removeprefix(NAMED)

    return tally(
        (kind, num_bytes, asked(host))
        for kind, at, num_bytes, host in _collectives(trace)
        if begin <= at <= end
    )


def tally(
    calls: Iterable[tuple[str, int | None, tuple[int, str] | None]],
) -> dict[str, dict[str, Any]]:
    """Return name to `count` and `bytes` of collectives, in the order in which names first came.

    Args:
        calls: kind, bytes, and number and name of the collective that the call is part of. With a
            name, one such collective counts once, and `calls` has the kinds that it was made of.

    >>> tally([("broadcast", 4, (0, "all_gather_rows")), ("broadcast", 4, (0, "all_gather_rows"))])
    {'all_gather_rows': {'count': 1, 'bytes': 8, 'calls': {'broadcast': 2}}}
    """
    found: dict[str, dict[str, Any]] = {}
    seen = set()
    for kind, num_bytes, asked in calls:
        entry = found.setdefault(asked[1] if asked else kind, {"count": 0, "bytes": 0})
        entry["count"] += asked not in seen
        if asked:
            seen.add(asked)
            made_of = entry.setdefault("calls", {})
            made_of[kind] = made_of.get(kind, 0) + 1
        is_known = num_bytes is not None and entry["bytes"] is not None
        entry["bytes"] = entry["bytes"] + num_bytes if is_known else None
    return found


def listed(collectives: dict[str, dict[str, Any]], num_steps: int = 1) -> str:
    """Return what `tally` found as words, per step.

    >>> listed({"all_gather_rows": {"count": 2, "bytes": 8, "calls": {"broadcast_": 4}}}, 2)
    '1 all_gather_rows (2 broadcast)'
    """

    def counted(name: str, entry: dict[str, Any]) -> str:
        calls = ", ".join(f"{n / num_steps:g} {kind_of(call)}" for call, n in entry.items())
        return f"{name} ({calls})" if calls else name

    words = (
        f"{entry['count'] / num_steps:g} "
        + counted(name if "calls" in entry else kind_of(name), entry.get("calls", {}))
        for name, entry in collectives.items()
    )
    return ", ".join(words) or "none"


def kind_of(name: str) -> str:
    """Return the kind of a collective from the name of an operator, kernel or annotation.

    >>> kind_of("c10d::_allgather_base_"), kind_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    ('all_gather', 'all_reduce')
    >>> kind_of("gloo:reduce_scatter")
    'reduce_scatter'
    """
    bare = re.sub(r"^(c10d::|gloo:|nccl\w*?Kernel_|nccl:)", "", name).strip("_")
    word = bare.replace("_", "").lower()
    return next((kind for stem, kind in KINDS.items() if word.startswith(stem)), bare)


def _collectives(trace: Trace) -> list[tuple[str, float, int | None, float]]:
    """Return kind, begin, bytes and when the host asked for each.

    They are taken from kernels, else operators, else annotations.
    """
    kernels = [kernel for kernel in trace.kernels if _is_nccl(kernel)]
    if kernels:
        return [_of_kernel(kernel, trace.launches) for kernel in kernels]
    noted = [note for note in trace.annotations if note.name.startswith(("gloo:", "nccl:"))]
    # A trace does not give the types of a list of tensors, but an annotation of the same dims does.
    types = {repr(n.args.get("Input Dims")): n.args.get("Input type", []) for n in noted}
    asked = [span for span in trace.operators if span.name.startswith("c10d::")]
    return [
        (kind_of(span.name), span.begin, _payload_bytes(span, types), span.begin)
        for span in asked or noted
    ]


def _of_kernel(kernel: Span, launches: dict[Any, float]) -> tuple[str, float, int | None, float]:
    args = kernel.args
    sizes = [args[key] for key in ("In msg nelems", "Out msg nelems") if key in args]
    item = _item_bytes(args.get("dtype"))
    num_bytes = int(max(sizes)) * item if sizes and item is not None else None
    kind = kind_of(args.get("Collective name") or kernel.name)
    host = launches.get(args.get("correlation"), kernel.begin)
    return kind, kernel.begin, num_bytes, host


def _payload_bytes(span: Span, types: dict[str, list[str]]) -> int | None:
    """Return the bytes of the largest argument: a tensor, or a list of tensors."""
    largest = None
    arguments = zip(span.args.get("Input Dims", ()), span.args.get("Input type", ()), strict=False)
    for dims, kind in arguments:
        if kind == "GenericList":
            return None  # lists of lists bear no sizes, and are the larger side
        is_list = kind == "TensorList"
        if not is_list and _item_bytes(kind) is None:
            continue  # no tensor: a group, a number
        tensors, kinds = (dims, types.get(repr(dims), [])) if is_list else ([dims], [kind])
        items = [_item_bytes(one) for one in kinds]
        if len(items) != len(tensors) or None in items:
            return None
        size = sum(math.prod(t) * (i or 0) for t, i in zip(tensors, items, strict=True))
        largest = max(size, largest or 0)
    return largest


def _item_bytes(dtype: Any) -> int | None:
    """Return bytes per element by the profiler's names of a dtype; None if it is none."""
    word = str(dtype).lower().removeprefix("c10::")
    return 1 if word.startswith("float8") else ITEM_BYTES.get(word)
