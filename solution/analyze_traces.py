"""Traces of some runs, side by side: where a step's time went, on every rank.

    python -m solution.train_baseline --profile-steps 3
    torchrun --standalone --nproc-per-node=2 -m solution.train_ddp --profile-steps 3
    python -m solution.analyze_traces outputs/traces --diff baseline ddp_bucketed

Prints a table and writes OUT/traces.json. The same as a notebook: `analyze_traces.ipynb`.

Exit status: 0 done, 2 bad input (no traces, a damaged file, files of several runs in one folder).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from solution.data.shards import write_atomically
from solution.measure.trace_file import TraceError
from solution.measure.traces import (
    diff_table,
    difference_of,
    find_setups,
    read_setup,
    setup_table,
    warnings_of,
)


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
