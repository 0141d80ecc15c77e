"""What the traces of some runs say, side by side: where a step's time went, on every rank.

    python -m solution.train_baseline --profile-steps 3
    torchrun --standalone --nproc-per-node=2 -m solution.train_ddp --profile-steps 3
    python -m solution.analyze_traces outputs/traces --diff baseline ddp_bucketed

Prints a table and writes OUT/traces.json, OUT/traces.html (one file, opens anywhere) and, where
matplotlib is installed, OUT/traces.png. The same as a notebook: `analyze_traces.ipynb`.

Exit status: 0 done, 2 bad input (no traces, a damaged file, files of several runs in one folder, an
output that is there already).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from solution.measure.plots import can_plot, plot_traces
from solution.measure.trace_file import TraceError
from solution.measure.trace_folder import difference_of, find_setups, read_setup
from solution.measure.trace_report import as_json, diff_table, page, setup_table, warnings_of

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    data, html, picture = (options.out / f"traces.{kind}" for kind in ("json", "html", "png"))
    try:
        there = [str(path) for path in (data, html, picture) if path.exists()]
        if there and not options.overwrite:
            raise TraceError(
                f"expected nothing to overwrite, got {', '.join(there)}; give another --out, or "
                "--overwrite"
            )
        found = find_setups(options.traces)
        unknown = [name for name in options.diff or () if name not in found]
        if unknown:
            raise TraceError(f"--diff: expected two of {', '.join(found)}, got {unknown[0]!r}")
        setups = {name: read_setup(paths, step=options.step) for name, paths in found.items()}
    except TraceError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(setup_table(setups))
    diff = None
    if options.diff:
        first, second = options.diff  # their first ranks are compared
        changes = difference_of(setups[first][0]["operators"], setups[second][0]["operators"])
        diff = first, second, changes
        print(f"\n{diff_table(changes, first, second)}")
    for text in warnings_of(setups):
        sys.stderr.write(f"warning: {text}\n")
    options.out.mkdir(parents=True, exist_ok=True)
    data.write_text(json.dumps(as_json(setups, diff and diff[2]), indent=1) + "\n")
    html.write_text(page(setups, diff), encoding="utf-8")
    print(f"{data}\n{html}")
    if options.plots:
        plot_traces(setups, picture)
        print(picture)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m solution.analyze_traces",
        description="Say where a step's time went, from the traces of some runs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "traces",
        nargs="?",
        type=Path,
        default=Path("outputs/traces"),
        help="folder with SETUP/rankN_trace.json(.gz), or with the files of one run",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/analysis"), help="folder to write"
    )
    parser.add_argument(
        "--diff", nargs=2, metavar="SETUP", help="two setups whose operators differ"
    )
    parser.add_argument("--step", type=int, help="the step to draw (default: of median duration)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier analysis")
    parser.add_argument(
        "--plots",
        action=argparse.BooleanOptionalAction,
        default=can_plot(),
        help="whether to draw traces.png (default: where matplotlib is installed)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
