"""What `trainspec check` shows while it judges: a line per chapter, and the first finding at once.

Everything is counted in clauses, as in the verdict: a clause's cases make one outcome. pytest's
letters and its last line count cases, most of them of what is not offered, so neither is shown.
With xdist chapters come mixed, so that their lines wait for the end.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from spec_tests.rig.clause import MUST
from spec_tests.rig.outcome_hooks import clause_of_item, result_of
from spec_tests.rig.outcomes import REFUTED, SILENT, Cell, Event, Outcome, cells
from spec_tests.rig.progress import Progress
from spec_tests.rig.report.ending import FEW
from spec_tests.rig.report.text import WORDS, chapter, clip

_MAX_LINES = 20  # of the first finding; the whole stands in the report


class Live:
    """A plugin of pytest, registered by `--live`.

    Args:
        write: takes a line.
        is_mixed: chapters come mixed.
        shown: the line of progress, if there is one.
        everything: show findings whole.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        is_mixed: bool,
        shown: Progress | None = None,
        everything: bool = False,
    ) -> None:
        self._write, self._shown = write, shown
        self._is_mixed, self._everything = is_mixed, everything
        self._began_s = time.monotonic()
        self._found: dict[str, list[Event]] = {}  # results by chapter
        self._now = ""
        self._waits_for_finding = False
        self._left: Counter[str] = Counter()  # cases of a test that have not ended
        self._ids: dict[str, str] = {}  # the clause of a test

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """See whether there are so few clauses that the end shows every finding in full."""
        found = {item.nodeid: clause for item in session.items if (clause := clause_of_item(item))}
        self._ids = {_test(node): clause.id for node, clause in found.items()}
        self._waits_for_finding = len(self._ids) > FEW
        self._expect(found)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """Know what the workers will run; each of them collects the same."""
        self._expect(ids)
        self._waits_for_finding = len(self._left) > FEW

    def _expect(self, nodes: Iterable[str]) -> None:
        self._left = Counter(map(_test, nodes))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say which clause is judged."""
        self._end_if_asked()
        self._tell_progress(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Count a clause when its last case has ended."""
        self._left[_test(nodeid)] -= 1

    def _end_if_asked(self) -> None:
        if self._shown and self._shown.is_to_end:  # an import of torch swallowed the interrupt
            raise KeyboardInterrupt

    def _tell_progress(self, node: str) -> None:
        named = self._ids.get(_test(node))  # a worker's is known when its first case has ended
        if named and self._shown:
            self._shown.say(f"{self.done}, {'last' if self._is_mixed else 'now'} {named}")

    @property
    def done(self) -> str:
        """How many clauses were judged, in words."""
        return f"{sum(left <= 0 for left in self._left.values())} of {len(self._left)} clauses"

    @property
    def seconds(self) -> float:
        """How long the command has run, or this plugin."""
        return self._shown.seconds if self._shown else time.monotonic() - self._began_s

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Say which file of clauses does not load."""
        self._end_if_asked()
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
        title, outcome = chapter(result["clause"]), Outcome(result["outcome"])
        if title != self._now and not self._is_mixed:
            self._tell(self._now)
            self._now = title
        self._found.setdefault(title, []).append({"event": "result", **result})
        self._ids.setdefault(_test(report.nodeid), result["clause"])
        self._tell_progress(report.nodeid)
        if outcome in REFUTED and result["strength"] == MUST and self._waits_for_finding:
            self._waits_for_finding = False
            seconds = time.monotonic() - self._began_s
            self._write(
                f"first finding, after {seconds:.1f} s of judging; the causes stand at the end:"
            )
            message = result["message"].rstrip()
            self._write(message if self._everything else clip(message, _MAX_LINES))
            self._write("")

    def pytest_sessionfinish(self) -> None:
        """Tell of the last chapter, or of all."""
        for title in self._found if self._is_mixed else [self._now]:
            self._tell(title)
        if self._shown:
            self._shown.close()

    def _tell(self, title: str) -> None:
        found = self._found.get(title, [])
        names = dict.fromkeys(result["implementation"] for result in found)
        told = {name: _counts(cells(found, name)) for name in names}
        if any(told.values()):
            words = "; ".join(f"{name} {of}" if len(names) > 1 else of for name, of in told.items())
            seconds = sum(result["duration_s"] for result in found)
            self._write(f"{title:<12}{words:<44}{seconds:7.1f} s of ranks")


def _counts(found: Sequence[Cell]) -> str:
    """MUST clauses by outcome, as in the table at the end; of others only those that fail."""
    counts = Counter(cell.outcome for cell in found if cell.strength == MUST)
    judged = [f"{WORDS[o]} {n}" for o, n in sorted(counts.items()) if o not in SILENT]
    advice = sum(cell.strength != MUST and cell.outcome in REFUTED for cell in found)
    return ", ".join(judged + [f"SHOULD fails {advice}"] * bool(advice))


def _test(node: str) -> str:
    """The test of a case: a clause is one test."""
    return node.partition("[")[0]


class _Ending:
    """A plugin of pytest: once it has begun, the ending is written whole."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def register(config: pytest.Config) -> None:
    """Show a run of `trainspec check` as it goes on."""
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    if not config.getoption("--live") or terminal is None:
        return
    shown = Progress.current

    def write(line: str) -> None:
        with shown.hidden() if shown else contextlib.nullcontext():
            terminal.write_line(line)
            terminal.flush()

    live = Live(
        write,
        is_mixed=bool(config.getoption("numprocesses", None)),
        shown=shown,
        everything=config.getoption("--all"),
    )
    config.pluginmanager.register(live, "trainspec-live")
    config.pluginmanager.register(_Ending())
    # pytest's last lines: cases that passed and were deselected, and where Ctrl-C found the suite.
    terminal.summary_stats = terminal._report_keyboardinterrupt = lambda: None
    if xdist := config.pluginmanager.get_plugin("dsession"):  # and what xdist says of its workers
        config.pluginmanager.unregister(name="terminaldistreporter")
        xdist.terminal = None
