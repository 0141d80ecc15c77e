"""The traces of a run, all ranks together, and of several runs side by side.

    outputs/traces/          a folder of setups
        baseline/            one run
            rank0_trace.json
        ddp/
            rank0_trace.json  rank1_trace.json

Files are read one after another and dropped again; what is kept is small. Files of different runs
in one folder are refused: their mean would be meaningless.

Counts and times of operators are per step. An operator's time includes what it calls, so times of
different names do not add up to a step; on a GPU kernels are listed, which do not nest.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from os import PathLike
from pathlib import Path
from typing import Any

from solution.measure.trace import Lanes, step_lanes, summarize
from solution.measure.trace_file import Trace, TraceError, read_trace

__all__ = ["RankTrace", "difference_of", "find_setups", "read_rank", "read_setup"]

RECORD = "record some with `python -m solution.train_baseline --profile-steps 3`"
POINTS = 400  # of memory over time, about
_NAME = re.compile(r"rank(\d+)_trace\.json(\.gz)?")

Uses = dict[str, dict[str, float]]
"""Operator to `count` and `time_us` per step."""


RankTrace = dict[str, Any]
"""What is kept of one rank's trace: the keys of the contract (`summarize_trace`), and

path: of the file.
operators: per step; on a GPU the kernels.
memory: microseconds since the first step, bytes.
timeline: one typical step as lanes of intervals (`Lanes.from_begin`).
"""


def read_rank(path: Path, *, step: int | None = None) -> RankTrace:
    """Read one file; `step` is the number of the step to show, None takes the median one.

    Raises:
        TraceError: no whole trace, or none of that step.
    """
    trace = read_trace(path)
    lanes = step_lanes(trace)
    found = {one.step: one for one in lanes}
    if step is not None and step not in found:
        raise TraceError(f"{path}: expected step {step}, got {[*found]}; choose one of these")
    by_duration = sorted(lanes, key=lambda one: one.end - one.begin)
    shown = by_duration[(len(lanes) - 1) // 2] if step is None else found[step]
    return {
        **summarize(trace, lanes),
        "path": str(path),
        "operators": _operators_per_step(trace, lanes),
        "memory": _memory_over_time(trace, lanes),
        "timeline": shown.from_begin(),
    }


def _operators_per_step(trace: Trace, lanes: list[Lanes]) -> Uses:
    """Return the operators that begin inside steps, or kernels where there are any; by name."""
    begins = [step.begin for step in lanes]
    found: Uses = {}
    for span in trace.kernels or trace.operators:
        index = bisect_right(begins, span.begin) - 1
        if index >= 0 and span.begin < lanes[index].end:
            use = found.setdefault(span.name, {"count": 0, "time_us": 0.0})
            use["count"] += 1
            use["time_us"] += span.end - span.begin
    return {
        name: {key: total / len(lanes) for key, total in use.items()} for name, use in found.items()
    }


def _memory_over_time(trace: Trace, lanes: list[Lanes]) -> list[tuple[float, int]]:
    """Return microseconds since the first step, and bytes allocated then.

    Each point is the largest of its stretch of time, so that no peak is lost. On a CPU bytes count
    from the begin of the recording: what was allocated before is not in the trace.
    """
    begin, end = lanes[0].begin, lanes[-1].end
    width = (end - begin) / POINTS or 1.0
    largest: dict[int, tuple[float, int]] = {}
    for at, _, total in trace.device_memory:
        stretch = int((at - begin) / width)
        if begin <= at <= end and total > largest.get(stretch, (0.0, float("-inf")))[1]:
            largest[stretch] = (at - begin, total)
    return [largest[stretch] for stretch in sorted(largest)]


def difference_of(first: Uses, second: Uses) -> list[dict[str, Any]]:
    """Return the operators whose counts differ, as `name`, `first` and `second`.

    The largest difference in time comes first.

    >>> a = {"aten::mm": {"count": 3, "time_us": 30.0}}
    >>> b = {"aten::mm": {"count": 3, "time_us": 50.0}, "c10d::send": {"count": 1, "time_us": 5.0}}
    >>> [(change["name"], change["first"]["count"]) for change in difference_of(a, b)]
    [('c10d::send', 0.0)]
    """
    none = {"count": 0.0, "time_us": 0.0}
    changes: list[dict[str, Any]] = [
        {"name": name, "first": first.get(name, none), "second": second.get(name, none)}
        for name in sorted(first.keys() | second.keys())
    ]
    changed = [one for one in changes if one["first"]["count"] != one["second"]["count"]]
    return sorted(changed, key=lambda c: -abs(c["second"]["time_us"] - c["first"]["time_us"]))


def find_setups(folder: str | PathLike[str]) -> dict[str, list[Path]]:
    """Return setup to its files, by rank: those of each subfolder, or of the folder itself.

    Raises:
        TraceError: there is none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TraceError(f"{folder}: expected a folder of traces, got none; {RECORD}")
    if own := _ranks(folder):
        return {folder.resolve().name: own}
    found = {sub.name: _ranks(sub) for sub in sorted(folder.iterdir()) if sub.is_dir()}
    if not any(found.values()):
        raise TraceError(f"{folder}: expected SETUP/rankN_trace.json, got no such file; {RECORD}")
    return {name: paths for name, paths in found.items() if paths}


def _ranks(folder: Path) -> list[Path]:
    found = {path: match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return sorted(found, key=lambda path: (int(found[path][1]), path.name))


def read_setup(paths: list[Path], *, step: int | None = None) -> list[RankTrace]:
    """Return all ranks of one run, in order.

    Raises:
        TraceError: a bad file, a rank that is missing or there twice, or files of several runs.
    """
    ranks: list[RankTrace] = []
    for path in paths:
        rank = read_rank(path, step=step)
        _check(rank, ranks)
        ranks.append(rank)
        step = rank["timeline"]["step"]  # all ranks show the same one
    world_size = ranks[0]["world_size"]
    if len(ranks) != world_size:
        there = [rank["rank"] for rank in ranks]
        raise TraceError(
            f"{paths[0].parent}: expected the traces of {world_size} ranks, got those of "
            f"{there}; copy the others there as well"
        )
    return ranks


def _check(new: RankTrace, earlier: list[RankTrace]) -> None:
    """Raise a TraceError unless a file belongs to those before it."""
    path, first, reported = new["path"], (earlier or [new])[0], new["rank"]
    match = _NAME.fullmatch(Path(path).name)
    named = int(match[1]) if match else reported
    if reported != named:
        raise TraceError(
            f"{path}: expected the trace of rank {named}, got one of rank {reported}; it was "
            "renamed, or belongs to another run"
        )
    if any(reported == other["rank"] for other in earlier):
        raise TraceError(f"{path}: expected one trace of rank {reported}, got two; remove one")

    def facts(rank: RankTrace) -> dict[str, Any]:
        numbers = [step["step"] for step in rank["steps"]]
        return {"world_size": rank["world_size"], "device": rank["device"], "steps": numbers}

    for key, wanted in facts(first).items():
        if facts(new)[key] != wanted:
            raise TraceError(
                f"{path}: expected {key} {wanted} as in {Path(first['path']).name}, got "
                f"{facts(new)[key]}; files of different runs lie in one folder"
            )
