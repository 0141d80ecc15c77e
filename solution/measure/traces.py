"""The traces of a run, all ranks together, and of several runs side by side, as tables.

    outputs/traces/          a folder of setups
        baseline/            one run
            rank0_trace.json
        ddp/
            rank0_trace.json  rank1_trace.json

Files of different runs in one folder are refused: their mean would be meaningless.

Counts and times of operators are per step. An operator's time includes what it calls, so times of
different names do not add up to a step; on a GPU kernels are listed, which do not nest.
"""

import re
import statistics
from bisect import bisect_right
from os import PathLike
from pathlib import Path
from typing import Any

from solution.console import aligned, significant
from solution.measure.trace import Lanes, listed, step_lanes, summarize
from solution.measure.trace_file import Trace, TraceError, read_trace

RECORD = "record some with `python -m solution.train_baseline --profile-steps 3`"
MOST_CHANGES = 15  # operators that are listed
_NAME = re.compile(r"rank(\d+)_trace\.json(\.gz)?")

Uses = dict[str, dict[str, float]]  # operator to `count` and `time_us` per step
RankTrace = dict[str, Any]  # what is kept of one rank's trace: of `read_rank`
Setups = dict[str, list[RankTrace]]
Changes = list[dict[str, Any]]  # of `difference_of`


def read_rank(path: Path) -> RankTrace:
    """Read one file.

    Returns:
        The keys of the contract (`summarize_trace`), `path`, and `operators` per step (on a GPU
        kernels).

    Raises:
        TraceError: no whole trace, or none of a step.
    """
    trace = read_trace(path)
    lanes = step_lanes(trace)
    operators = _operators_per_step(trace, lanes)
    return {**summarize(trace, lanes), "path": str(path), "operators": operators}


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


def difference_of(first: Uses, second: Uses) -> Changes:
    """Return the operators whose counts differ, as `name`, `first` and `second`.

    The largest difference in time comes first.

    >>> a = {"aten::mm": {"count": 3, "time_us": 30.0}}
    >>> b = {"aten::mm": {"count": 3, "time_us": 50.0}, "c10d::send": {"count": 1, "time_us": 5.0}}
    >>> [(change["name"], change["first"]["count"]) for change in difference_of(a, b)]
    [('c10d::send', 0.0)]
    """
    none = {"count": 0.0, "time_us": 0.0}
    changes: Changes = []
    for name in sorted(first.keys() | second.keys()):
        uses = {"first": first.get(name, none), "second": second.get(name, none)}
        if uses["first"]["count"] != uses["second"]["count"]:
            changes.append({"name": name, **uses})
    return sorted(changes, key=lambda c: -abs(c["second"]["time_us"] - c["first"]["time_us"]))


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


def read_setup(paths: list[Path]) -> list[RankTrace]:
    """Return all ranks of one run, in order.

    Raises:
        TraceError: a bad file, a rank that is missing or there twice, or files of several runs.
    """
    ranks: dict[int, RankTrace] = {}
    for path in paths:
        found = read_rank(path)
        rank = found["rank"]
        _require_one_run(found, next(iter(ranks.values()), found))
        if rank in ranks:
            raise TraceError(f"{path}: expected one trace of rank {rank}, got two; remove one")
        ranks[rank] = found
    world_size = next(iter(ranks.values()))["world_size"]
    if len(ranks) != world_size:
        raise TraceError(
            f"{paths[0].parent}: expected the traces of {world_size} ranks, got those of "
            f"{[*ranks]}; copy the others there as well"
        )
    return [*ranks.values()]


def _require_one_run(new: RankTrace, first: RankTrace) -> None:
    """Raise a TraceError unless a file is of the rank that it names, and of the first one's run."""
    path, reported = new["path"], new["rank"]
    match = _NAME.fullmatch(Path(path).name)
    if match and reported != int(match[1]):
        raise TraceError(
            f"{path}: expected the trace of rank {int(match[1])}, got one of rank {reported}; it "
            "was renamed, or belongs to another run"
        )
    for key in ("world_size", "device", "steps"):
        wanted, got = (
            [step["step"] for step in rank[key]] if key == "steps" else rank[key]
            for rank in (first, new)
        )
        if got != wanted:
            raise TraceError(
                f"{path}: expected {key} {wanted} as in {Path(first['path']).name}, got {got}; "
                "files of different runs lie in one folder"
            )


def setup_table(setups: Setups) -> str:
    """Return one line per rank: what a step takes, its parts, what was hidden, what was sent."""
    header = (
        *("setup", "rank", "steps", "step ms", "compute", "exposed", "idle"),
        *("overlapped", "collectives per step", "MB per step", "peak MB"),
    )
    rows = [(name, *_cells(rank)) for name, ranks in setups.items() for rank in ranks]
    return aligned([header, *rows])


def _cells(summary: RankTrace) -> tuple[str, ...]:
    total, num_steps = summary["total"], len(summary["steps"])
    collectives = summary["collectives"]
    sizes = [entry["bytes"] for entry in collectives.values()]
    fraction, peak = total["overlap_fraction"], summary["peak_memory_bytes"]
    whole = total["duration_us"] or 1
    parts = [total[f"{part}_us"] / whole for part in ("compute", "exposed", "idle")]
    return (
        str(summary["rank"]),
        str(num_steps),
        significant(statistics.median(step["duration_us"] for step in summary["steps"]) / 1e3),
        *(f"{100 * part:.1f} %" for part in parts),
        "-" if fraction is None else f"{100 * fraction:.1f} %",
        listed(collectives, num_steps),
        "?" if None in sizes else significant(sum(sizes) / num_steps / 1e6),
        "?" if peak is None else significant(peak / 1e6),
    )


def diff_table(changes: Changes, first: str, second: str) -> str:
    """Return the operators that one setup runs more often than the other."""
    header = ("operator", f"{first}: per step", f"{second}: per step", "difference", "ms per step")
    rows = []
    for change in changes[:MOST_CHANGES]:
        (count_a, us_a), (count_b, us_b) = change["first"].values(), change["second"].values()
        counts = (f"{count_a:g}", f"{count_b:g}", f"{count_b - count_a:+g}")
        rows.append((change["name"], *counts, f"{(us_b - us_a) / 1e3:+.3f}"))
    rest = len(changes) - MOST_CHANGES
    return aligned([header, *rows]) + (f"\n... and {rest} more" if rest > 0 else "")


def warnings_of(setups: Setups) -> list[str]:
    """Return the reasons why a comparison of these setups would mislead."""
    found = []
    for name, ranks in setups.items():
        for rank in ranks:
            counts = [step["optimizer_steps"] for step in rank["steps"]]
            if set(counts) != {1}:
                found.append(
                    f"{name}, rank {rank['rank']}: expected one optimizer step per "
                    f"ProfilerStep, got {counts}; its times are of another amount of work"
                )
    devices = {ranks[0]["device"] for ranks in setups.values()}
    if len(devices) > 1:
        found.append(f"expected traces of one device, got {sorted(devices)}; times do not compare")
    if "cpu" in devices:
        found.append(
            "no kernels on a CPU: times are of the host, with the profiler's own cost in them"
        )
    return found
