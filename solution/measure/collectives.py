"""The collectives of a trace: how many of each kind, and how many bytes.

Counted is what was asked for, not how a backend does it: gloo runs PyTorch's reduce-scatter as an
all-reduce, and its annotation says so, but the operator `c10d::_reduce_scatter_base_` was called.
So on a CPU the operators of c10d are counted; with nccl the kernels, which bear the name and the
sizes of what was asked for. Bytes are of the payload on this rank, the larger of what goes in and
what comes out, as `solution.measure.traffic` counts them; they need `record_shapes=True`.
"""

from __future__ import annotations

import math
import re
from typing import Any

from solution.measure.trace_file import Span, Trace

__all__ = ["collectives_between", "kind_of"]

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


def collectives_between(trace: Trace, begin: float, end: float) -> dict[str, dict[str, Any]]:
    """Return kind to `count` and `bytes` of the collectives that begin between two moments.

    `bytes` is None for a kind of which some collective has no sizes in the trace.
    """
    found: dict[str, dict[str, Any]] = {}
    for kind, at, num_bytes in _collectives(trace):
        if begin <= at <= end:
            entry = found.setdefault(kind, {"count": 0, "bytes": 0})
            entry["count"] += 1
            is_known = num_bytes is not None and entry["bytes"] is not None
            entry["bytes"] = entry["bytes"] + num_bytes if is_known else None
    return found


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


def _collectives(trace: Trace) -> list[tuple[str, float, int | None]]:
    """Return kind, begin and bytes of each: from kernels, else operators, else annotations."""
    kernels = [kernel for kernel in trace.kernels if "nccl" in kernel.name.lower()]
    if kernels:
        return [_of_kernel(kernel) for kernel in kernels]
    noted = [note for note in trace.annotations if note.name.startswith(("gloo:", "nccl:"))]
    # A trace does not give the types of a list of tensors, but an annotation of the same dims does.
    types = {repr(n.args.get("Input Dims")): n.args.get("Input type", []) for n in noted}
    asked = [span for span in trace.operators if span.name.startswith("c10d::")]
    return [
        (kind_of(span.name), span.begin, _payload_bytes(span, types)) for span in asked or noted
    ]


def _of_kernel(kernel: Span) -> tuple[str, float, int | None]:
    args = kernel.args
    sizes = [args[key] for key in ("In msg nelems", "Out msg nelems") if key in args]
    item = _item_bytes(args.get("dtype"))
    num_bytes = int(max(sizes)) * item if sizes and item is not None else None
    return kind_of(args.get("Collective name") or kernel.name), kernel.begin, num_bytes


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
