"""What `trainspec check` shows while it judges: a line per chapter, and the first finding at once.

pytest's letters say nothing to who waits for a verdict, most of them stand for what is not offered.
With xdist chapters come mixed, so that their lines wait for the end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from spec_tests.clause import MUST
from spec_tests.outcome_hooks import clause_of_item, result_of
from spec_tests.rig.outcomes import REFUTED, SILENT, Outcome
from spec_tests.rig.report import WORDS
from spec_tests.rig.report.ending import FEW
from spec_tests.rig.report.text import chapter, clip

_MAX_LINES = 14  # of the first finding; the whole stands in the report


class Live:
    """A plugin of pytest, registered by `--live`; `write` takes a line."""

    def __init__(self, write: Callable[[str], None], *, is_mixed: bool) -> None:
        self._write, self._is_mixed = write, is_mixed
        self._began_s = time.monotonic()
        self._counts: dict[str, Counter[Outcome]] = {}
        self._seconds: Counter[str] = Counter()
        self._now = ""
        self._waits_for_finding = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """See whether there are so few clauses that the end shows every finding in full."""
        clauses = {clause.id for item in session.items if (clause := clause_of_item(item))}
        self._waits_for_finding = len(clauses) > FEW

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Say which file of clauses does not load."""
        if report.failed:
            why = (report.longreprtext.strip().splitlines() or [""])[-1]
            self._write(f"{report.nodeid} does not load: {why.removeprefix('E').strip()}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Count as pytest does, without its letters."""
        if result_of(report) is None:
            return None
        kind = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        return kind, "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell of a chapter when the next one begins, and of the first finding."""
        result = result_of(report)
        if result is None:
            return
        title = chapter(result["clause"])
        if title != self._now and not self._is_mixed:
            self._tell(self._now)
            self._now = title
        outcome = Outcome(result["outcome"])
        self._counts.setdefault(title, Counter())[outcome] += 1
        self._seconds[title] += result["duration_s"]
        if outcome in REFUTED and result["strength"] == MUST and self._waits_for_finding:
            self._waits_for_finding = False
            seconds = time.monotonic() - self._began_s
            self._write(
                f"first finding, after {seconds:.1f} s of judging; the causes stand at the end:"
            )
            self._write(clip(result["message"].rstrip(), _MAX_LINES))
            self._write("")

    def pytest_sessionfinish(self) -> None:
        """Tell of the last chapter, or of all."""
        for title in self._counts if self._is_mixed else [self._now]:
            self._tell(title)

    def _tell(self, title: str) -> None:
        counts = self._counts.get(title, Counter())
        judged = [f"{WORDS[o]} {n}" for o, n in sorted(counts.items()) if o not in SILENT]
        if judged:
            words = ", ".join(judged)
            self._write(f"{title:<12}{words:<44}{self._seconds[title]:7.1f} s of ranks")


def register(config: pytest.Config) -> None:
    """Show a run of `trainspec check` as it goes on."""
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    if config.getoption("--live") and terminal is not None:
        is_mixed = bool(config.getoption("numprocesses", None))
        config.pluginmanager.register(Live(terminal.write_line, is_mixed=is_mixed))
