"""The event log: one JSON object per line, the only source of truth about a run.

A log is a header, then what each clause says, results, problems of the run itself, then a footer:

    {"event": "header", "suite": "2026.1", "level": "correct", "implementations": [...], ...}
    {"event": "clause", "clause": "ddp.gradients.mean", "sentence": "Every rank MUST ...", ...}
    {"event": "result", "clause": "ddp.gradients.mean", "case": "ddp-w2-tied", "outcome": ...}
    {"event": "problem", "message": "mine.toml: entry 2 matched no result ..."}
    {"event": "footer", "counts": {...}, "complete": true, "exit_status": 0}

Lines are only ever appended and each is handed to the system at once, so a run that is killed
leaves every result that it had, and no footer: such a log renders as INCOMPLETE and has no verdict.
At most its last line is torn, and the reader drops that line alone.

    log = EventLog(path, level="correct", implementations=["solution"], ...)
    log.result(clause=..., implementation=..., outcome=Outcome.PASSED, ...)
    status = log.finish()           # writes the footer; without it the log stays incomplete
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from spec_tests.rig.outcomes import Event, count_outcomes, judge_run


class EventLog:
    """Writes one run's log.

    Args:
        path: the file; one that is there is replaced.
        implementations: what is judged.
        more: level, transport, profile, seed and ledger, which only the caller knows; the machine
            is looked up. `levels={"solution": "production"}` holds one implementation to its own.
    """

    def __init__(self, path: Path, *, implementations: Sequence[str], **more: Any) -> None:
        self.path = path
        self.events: list[Event] = []
        self._told: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        # One run is one log: an older one at this place is replaced, not continued. Append mode,
        # so that nothing which was written is ever written over.
        path.unlink(missing_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        command = {"command": shlex.join(sys.argv), "implementations": implementations}
        self._append({"event": "header", **environment(), **command, **more})

    def result(self, **result: Any) -> None:
        """Append what one case came to."""
        rounded = round(result["duration_s"], 6)
        self._append({**result, "event": "result", "duration_s": rounded})

    def tell(self, clause: str, **about: Any) -> None:
        """Append what a clause says, once: a report then needs the log and not the suite."""
        if clause not in self._told:
            self._told.add(clause)
            self._append({"event": "clause", "clause": clause, **about})

    def problem(self, message: str) -> None:
        """Append a defect of the run itself (a stale expectation, a crashed worker): status 2."""
        self._append({"event": "problem", "message": message})

    def finish(self) -> int:
        """Append the footer and close; returns the exit status that the events amount to."""
        status, counts = judge_run(self.events).status, count_outcomes(self.events)
        self._append({"event": "footer", "counts": counts, "complete": True, "exit_status": status})
        self.close()
        return status

    def close(self) -> None:
        """Close the file as it stands; without `finish` the log stays incomplete."""
        self._file.close()

    def _append(self, event: Event) -> None:
        plain: Event = _plain(event)
        self._file.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")
        self.events.append(plain)


def read_log(path: str | Path) -> list[Event]:
    """The events of a log; a torn last line, the trace of a killed run, is dropped.

    Args:
        path: a folder that --report wrote, or the log in it.

    Raises:
        ValueError: A line other than the last is no JSON object, or there is no line.
        OSError: There is no file, or it cannot be read.
    """
    path = Path(path)
    path = path / "events.jsonl" if path.is_dir() else path
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            events.append(event)
        elif number < len(lines):  # a whole line ends in a newline, so an empty rest follows it
            raise ValueError(
                f"{path}, line {number}: expected one JSON object per line, got {line[:60]!r}; "
                "the log was changed by hand or by another writer: run again"
            )
    if not events:
        raise ValueError(f"{path}: expected the log of a run, got no event")
    return events


def environment() -> Event:
    """What the header says about the machine and the versions, without importing torch."""
    return {
        "suite": suite_version(),
        "torch": _version_of("torch"),
        "python": platform.python_version(),
        "hypothesis": _version_of("hypothesis"),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")  # not on macOS
        else os.cpu_count() or 1,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def suite_version() -> str:
    """The suite's version: of the checkout around this file, else of the installed package."""
    project = Path(__file__).parents[3] / "pyproject.toml"
    if project.is_file():
        declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if declared.get("name") == "trainspec":
            return str(declared["version"])
    return _version_of("trainspec")


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _plain(value: Any) -> Any:
    """JSON types only: non-finite numbers by name, tuples as lists, enums as their words."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        # A lone surrogate (an undecodable byte of a rank's output) has no UTF-8.
        return str(value).encode("utf-8", "replace").decode("utf-8")
    return value
