"""Traces of some runs, side by side: where a step's time went, on every rank.

    python -m solution.train_baseline --profile-steps 3
    torchrun --standalone --nproc-per-node=2 -m solution.train_ddp --profile-steps 3
    python -m solution.analyze_traces outputs/traces

    outputs/traces/          a folder of setups
        baseline/            one run
            rank0_trace.json
        ddp_bucketed/
            rank0_trace.json  rank1_trace.json

Prints a table and writes OUT/traces.json. The same as a notebook: `analyze_traces.ipynb`.

Exit status: 0 done, 2 bad input (no traces, a damaged file, files of several runs in one folder).
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from solution.console import aligned, significant
from solution.data.shards import write_atomically
from solution.measure.trace import listed, summarize_trace
from solution.measure.trace_file import TraceError

RECORD = "record some with `python -m solution.train_baseline --profile-steps 3`"
_NAME = re.compile(r"rank(\d+)_trace\.json(\.gz)?")

Summary = dict[str, Any]  # of one rank's trace: of `read_setup`
Setups = dict[str, list[Summary]]


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


def read_setup(paths: Sequence[Path]) -> list[Summary]:
    """Return all ranks of one run, in order.

    Returns:
        By rank, the keys of the contract (`summarize_trace`), and `path`.

    Raises:
        TraceError: a bad file, a rank that is missing or there twice, or files of several runs,
            whose mean would be meaningless.
    """
    ranks = [{**summarize_trace(path), "path": str(path)} for path in paths]
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


def setup_table(setups: Setups) -> str:
    """Return one line per rank: what a step takes, its parts, what was hidden, what was sent."""
    header = (
        *("setup", "rank", "steps", "step ms", "compute", "exposed", "idle"),
        *("overlapped", "collectives per step", "MB per step", "peak MB"),
    )
    rows = [(name, *_cells(rank)) for name, ranks in setups.items() for rank in ranks]
    return aligned([header, *rows])


def _cells(summary: Summary) -> tuple[str, ...]:
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
    options = parser.parse_args(arguments)
    try:
        setups = {name: read_setup(paths) for name, paths in find_setups(options.traces).items()}
    except TraceError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(setup_table(setups))
    warnings = warnings_of(setups)
    sys.stderr.writelines(f"warning: {text}\n" for text in warnings)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"setups": setups, "warnings": warnings}
    path = options.out / "traces.json"
    write_atomically(path, json.dumps(record, indent=1).encode() + b"\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
