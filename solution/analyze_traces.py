"""Traces of some runs, side by side: where a step's time went, on every rank.

    python -m solution.train_baseline --profile-steps 3
    torchrun --standalone --nproc-per-node=2 -m solution.train_ddp --profile-steps 3
    python -m solution.analyze_traces outputs/traces --diff baseline ddp_bucketed

    outputs/traces/          a folder of setups
        baseline/            one run
            rank0_trace.json
        ddp_bucketed/
            rank0_trace.json  rank1_trace.json

Prints a table and writes OUT/traces.json. The same as a notebook: `analyze_traces.ipynb`.

Counts and times of operators are per step. An operator's time includes what it calls, so times of
different names do not add up to a step; on a GPU kernels are listed, which do not nest.

Exit status: 0 done, 2 bad input (no traces, a damaged file, files of several runs in one folder).
"""

import argparse
import json
import re
import statistics
import sys
from bisect import bisect_right
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from solution.console import aligned, significant
from solution.data.shards import write_atomically
from solution.measure.trace import Lanes, listed, step_lanes, summarize
from solution.measure.trace_file import Trace, TraceError, read_trace

RECORD = "record some with `python -m solution.train_baseline --profile-steps 3`"
MOST_CHANGES = 15  # operators that are listed
_NAME = re.compile(r"rank(\d+)_trace\.json(\.gz)?")

Uses = dict[str, dict[str, float]]  # operator to `count` and `time_us` per step
RankTrace = dict[str, Any]  # what is kept of one rank's trace: of `read_setup`
Setups = dict[str, list[RankTrace]]
Changes = list[dict[str, Any]]  # of `difference_of`


def find_setups(folder: str | PathLike[str]) -> dict[str, list[Path]]:
    """Return setup to its files: those of each subfolder, or of the folder itself.

    Raises:
        TraceError: there is none.
    """
    folder = Path(folder)
    own = [folder, *(sub for sub in sorted(folder.glob("*")) if sub.is_dir())]
    found = {
        sub.resolve().name: paths
        for sub in own
        if (paths := [path for path in sub.glob("*") if _NAME.fullmatch(path.name)])
    }
    if not found:
        raise TraceError(f"{folder}: expected SETUP/rankN_trace.json, got no such file; {RECORD}")
    return found


def read_setup(paths: Sequence[Path]) -> list[RankTrace]:
    """Return all ranks of one run, in order.

    Returns:
        By rank, the keys of the contract (`summarize_trace`), `path`, and `operators` per step (on
        a GPU kernels).

    Raises:
        TraceError: a bad file, a rank that is missing or there twice, or files of several runs,
            whose mean would be meaningless.
    """
    ranks: list[RankTrace] = []
    for path in paths:
        trace = read_trace(path)
        lanes = step_lanes(trace)
        operators = _operators_per_step(trace, lanes)
        ranks.append({**summarize(trace, lanes), "path": str(path), "operators": operators})
    ranks.sort(key=lambda one: one["rank"])
    whole = set(range(ranks[0]["world_size"]))
    if [one["rank"] for one in ranks] != [*whole]:
        raise TraceError(
            f"{paths[0].parent}: expected the traces of ranks {whole}, once each, got those of "
            f"{[one['rank'] for one in ranks]}; copy the others there as well"
        )
    runs = [(one["world_size"], one["device"], [s["step"] for s in one["steps"]]) for one in ranks]
    if any(run != runs[0] for run in runs):
        raise TraceError(
            f"{paths[0].parent}: expected the files of one run, got world size, device and steps "
            f"{runs}; files of different runs lie in one folder"
        )
    return ranks


def _operators_per_step(trace: Trace, lanes: list[Lanes]) -> Uses:
    """Return the operators that begin inside steps, or kernels where there are any; by name."""
    begins = [step.begin for step in lanes]
    found: Uses = {}
    for span in trace.kernels or trace.operators:
        index = bisect_right(begins, span.begin) - 1
        if index >= 0 and span.begin < lanes[index].end:
            use = found.setdefault(span.name, {"count": 0, "time_us": 0.0})
            use["count"] += 1 / len(lanes)
            use["time_us"] += (span.end - span.begin) / len(lanes)
    return found


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
        if abs(uses["first"]["count"] - uses["second"]["count"]) > 1e-6:
            changes.append({"name": name, **uses})
    return sorted(changes, key=lambda c: -abs(c["second"]["time_us"] - c["first"]["time_us"]))


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
    found = [
        f"{name}, rank {rank['rank']}: expected one optimizer step per ProfilerStep, got "
        f"{step['optimizer_steps']} in {step['step']}; its times are of another amount of work"
        for name, ranks in setups.items()
        for rank in ranks
        for step in rank["steps"]
        if step["optimizer_steps"] != 1
    ]
    devices = {ranks[0]["device"] for ranks in setups.values()}
    if len(devices) > 1:
        found.append(f"expected traces of one device, got {sorted(devices)}; times do not compare")
    if "cpu" in devices:
        found.append(
            "no kernels on a CPU: times are of the host, with the profiler's own cost in them"
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m solution.analyze_traces",
        description="Say where a step's time went, from the traces of some runs.",
        allow_abbrev=False,
    )
    add, traces = parser.add_argument, Path("outputs/traces")
    text = "folder with SETUP/rankN_trace.json(.gz), or with the files of one run"
    add("traces", nargs="?", type=Path, default=traces, help=text)
    add("--out", type=Path, default=Path("outputs/analysis"), help="folder of traces.json")
    add("--diff", nargs=2, metavar="SETUP", help="two setups whose operators differ")
    options = parser.parse_args(arguments)
    try:
        found = find_setups(options.traces)
        unknown = [name for name in options.diff or () if name not in found]
        if unknown:
            raise TraceError(f"--diff: expected two of {', '.join(found)}, got {unknown[0]!r}")
        setups = {name: read_setup(paths) for name, paths in found.items()}
    except TraceError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(setup_table(setups))
    changes = None
    if options.diff:
        first, second = options.diff  # their first ranks are compared
        changes = difference_of(setups[first][0]["operators"], setups[second][0]["operators"])
        print(f"\n{diff_table(changes, first, second)}")
    warnings = warnings_of(setups)
    sys.stderr.writelines(f"warning: {text}\n" for text in warnings)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"setups": setups, "diff": changes, "warnings": warnings}
    path = options.out / "traces.json"
    write_atomically(path, json.dumps(record, indent=1).encode() + b"\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
