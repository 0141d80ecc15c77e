"""The matrix, side by side: processes that each judge one impostor after another.

Ranks spend much of their time waiting for each other, and starting one world leaves a core idle: on
two cores two processes take little more than half of the time of one. They are processes and no
threads, for the oracle draws from torch's one generator. Each has a zygote that has imported the
suite and the reference (see `preload`), so that ranks start in a fifth of the time, and every job
has ranks that no other job has touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from spec_tests.museum import find, matrix, panel
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.target import PACKAGE_ROOT


@dataclass(frozen=True)
class Job:
    """What to find out about one impostor.

    Attributes:
        impostor: its id.
        repeat: how often each clause that it names must reject it.
        accepted_by: ids of the clauses that must let it pass.
        transport: where the ranks live.
        brief: whether it must be accepted in one case of each clause, on two ranks.
        signature: whether to take its signature, see `signatures`.
    """

    impostor: str
    repeat: int = 0
    accepted_by: tuple[str, ...] = ()
    transport: str = "gloo"
    brief: bool = False
    signature: bool = False


@dataclass(frozen=True)
class Verdict:
    """What came out.

    Attributes:
        complaints: about clauses that should have said otherwise.
        margins: clause to the largest error that it saw over its tolerance, if it is of numbers.
        judged: ids of the clauses that were asked.
        modes: clause to how it noticed: "assertion", "deadlock", "mismatch", "un-waited", ...
        symptoms, seconds: its signature, and what the clauses took.
    """

    impostor: str
    complaints: list[str]
    margins: dict[str, float]
    judged: list[str]
    duration_s: float
    modes: dict[str, str] = field(default_factory=dict)
    symptoms: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def do(job: Job, worlds: Worlds) -> Verdict:
    """Do a job here and now, in worlds that nobody else uses; they are closed afterwards."""
    begun = time.perf_counter()
    complaints: list[str] = []
    findings: list[matrix.Finding] = []
    symptoms: dict[str, str] = {}
    seconds: dict[str, float] = {}
    try:
        impostor, clauses = find(job.impostor), matrix.by_id()
        for _ in range(job.repeat):
            found = matrix.rejections(impostor, worlds)
            complaints += matrix.must_reject(found)
            findings += found
        found = [
            matrix.probe(clauses[name], impostor, worlds, brief=job.brief)
            for name in job.accepted_by
        ]
        complaints += matrix.must_accept(found)
        findings += found
        if job.signature:
            symptoms, seconds = panel.take(impostor, worlds)
    except Exception as error:  # one bad card is one complaint, and no end of the others
        complaints.append(f"{job.impostor}: {type(error).__name__}: {error}")
    finally:
        worlds.close()
    margins = {f.clause.id: f.margin for f in findings if f.margin is not None}
    judged = [f.clause.id for f in findings]
    modes = {f.clause.id: f.decisive.mode for f in findings if f.decisive is not None}
    duration_s = time.perf_counter() - begun
    taken = (modes, symptoms, seconds)
    return Verdict(job.impostor, complaints, margins, judged, duration_s, *taken)


class Crew:
    """Processes that do jobs, as many at a time as it has members; close it, or use it in `with`.

    Args:
        size: how many processes; they start with their first job.
    """

    def __init__(self, size: int) -> None:
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="crew")
        self._mine = threading.local()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, job: Job) -> Future[Verdict]:
        """Have `job` done; jobs are begun in the order in which they come.

        The future raises a ChildProcessError if the process that did it ended.
        """
        return self._threads.submit(self._do, job)

    def close(self) -> None:
        """Drop the jobs that are not begun, wait for the others, end the processes."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()

    def _do(self, job: Job) -> Verdict:
        process = self._process()
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asdict(job)), file=process.stdin, flush=True)
            line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise ChildProcessError(
                f"expected a verdict on {job.impostor}, but the process that judged it ended with "
                f"{process.wait()}; python -m spec_tests --impl impostor:{job.impostor} shows more"
            )
        return Verdict(**json.loads(line))

    def _process(self) -> subprocess.Popen[str]:
        """This thread's process, begun anew if it has ended."""
        process: subprocess.Popen[str] | None = getattr(self._mine, "process", None)
        if process is None or process.poll() is not None:
            process = self._mine.process = subprocess.Popen(
                [sys.executable, "-m", "spec_tests", "impostors", "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                text=True,
            )
            self._processes.append(process)
        return process


def _environment() -> dict[str, str]:
    # A process within a run of xdist would take itself for a worker.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT.parent), kept.get("PYTHONPATH", "")]))
    return {**kept, "PYTHONPATH": path}


def serve() -> int:
    """The other end: read jobs from standard input until it ends, write verdicts."""
    # Whatever else prints must not get between the verdicts.
    with os.fdopen(os.dup(1), "w") as verdicts:
        os.dup2(2, 1)
        with contextlib.suppress(KeyboardInterrupt):
            _answer(sys.stdin, verdicts)
    return 0


def _answer(jobs: TextIO, verdicts: TextIO) -> None:
    for line in jobs:
        asked: dict[str, Any] = json.loads(line)
        job = Job(**{**asked, "accepted_by": tuple(asked["accepted_by"])})
        print(json.dumps(asdict(do(job, Worlds(job.transport)))), file=verdicts, flush=True)
