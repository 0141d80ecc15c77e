"""The ending and the pages of a log, also of one whose run was killed.

python -m spec_tests report outputs/report        a folder that --report wrote, or its events.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spec_tests.rig.outcomes import verdict
from spec_tests.rig.report import write_report
from spec_tests.rig.report.ending import render_ending
from spec_tests.rig.report.eventlog import read_log
from spec_tests.rig.report.points import render_points


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status of the run: 2 where it did not reach its end."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_tests report", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("log", type=Path, help="a folder that --report wrote, or its events.jsonl")
    parser.add_argument("--all", action="store_true", help="show each finding and clause")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to write; beside the log")
    flags = parser.parse_args(arguments)
    log = flags.log / "events.jsonl" if flags.log.is_dir() else flags.log
    try:
        events = read_log(log)
        folder = flags.to or log.parent
        write_report(folder, log)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the command's product
        return 2
    shown = [render_points(events), render_ending(events, everything=flags.all)]
    print("\n\n".join(filter(None, shown)))  # noqa: T201 - likewise
    print(f"report: {folder}/index.html")  # noqa: T201 - likewise
    return verdict(events).status
