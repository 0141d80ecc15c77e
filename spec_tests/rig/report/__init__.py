"""What is made of a log: one file per reader. Only `write_report` touches files.

| file | for whom |
|---|---|
| events.jsonl | the log itself, the only source of truth |
| summary.md | a pull request (`text`) |
| report.json | programs; the schema stands in `data` |
| index.html | a browser: one file that needs no network (`page`) |
| junit.xml | whatever reads test reports: pytest's own, each case with its outcome as a property |
| results.json | Gradescope, with the points of a course (`points`) |

All but the log and junit.xml are pure functions of the log, and need no torch: a log is read in a
moment. One without footer is stamped INCOMPLETE by each, and has no verdict and no points.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from spec_tests.rig.report.data import render_json
from spec_tests.rig.report.eventlog import read_log
from spec_tests.rig.report.page import render_page
from spec_tests.rig.report.points import render_gradescope
from spec_tests.rig.report.text import render_summary

_RENDERINGS = {
    "summary.md": render_summary,
    "report.json": render_json,
    "index.html": render_page,
    "results.json": render_gradescope,
}


def write_report(directory: str | Path, log_path: str | Path) -> list[Path]:
    """Write the log and everything that is made of it into the directory; returns their paths.

    The log is copied unless it lies there already. A log without footer is written as well, with
    the stamp INCOMPLETE. Each file is put in place whole.
    """
    target, log = Path(directory), Path(log_path)
    target.mkdir(parents=True, exist_ok=True)
    events = read_log(log)
    kept = target / "events.jsonl"
    if not (kept.exists() and kept.samefile(log)):
        shutil.copyfile(log, kept)
    written = [_write_whole(target / name, make(events)) for name, make in _RENDERINGS.items()]
    return [kept, *written]


def forget(directory: str | Path) -> None:
    """Remove the log of an earlier run and everything that was made of it."""
    for name in ("events.jsonl", "junit.xml", *_RENDERINGS):
        (Path(directory) / name).unlink(missing_ok=True)


def _write_whole(path: Path, text: str) -> Path:
    """Write beside and rename, so that a reader never sees half a page."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    return beside.replace(path)
