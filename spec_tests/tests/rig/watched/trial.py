"""Run a watched script as `watch -- torchrun` would, from forks of a process that has torch.

torchrun and the import of torch take four seconds for each run; this takes one.
"""

from __future__ import annotations

import argparse
import atexit
import os
import re
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import Any

from spec_tests.tests.reference.launch import free_port
from spec_tests.watch import agent, command
from spec_tests.watch.verdict import Verdict

LIMIT_SECONDS = 60
GRACE_SECONDS = 2  # for the other ranks, once one has failed
_FINGERPRINT = re.compile(r"fingerprint (\d+) ([0-9a-f]{64})")
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.optim", "torch._dynamo"]


@dataclass(frozen=True)
class Outcome:
    """What a run said: the verdict, and what the script printed."""

    verdict: Verdict
    status: int
    output: str
    records: list[Any]  # what a later run is compared with

    @property
    def norms(self) -> dict[str, int]:
        """Norm to the first step of its finding: of causes, and 0 for what follows from them."""
        effects = {effect: 0 for cause in self.verdict.causes for effect in cause.effects}
        return effects | {c.finding.norm: c.finding.step for c in self.verdict.causes}

    @property
    def fingerprints(self) -> dict[str, str]:
        """Rank to the hash of its weights."""
        return dict(_FINGERPRINT.findall(self.output))


def run(
    script: Path,
    world: int,
    *arguments: str,
    options: Sequence[str] = (),
    is_watched: bool = True,
    trainings: int = 1,
) -> Outcome:
    """Run a script on `world` ranks, under the watcher or without it; `trainings` times in turn."""
    with tempfile.TemporaryDirectory() as scratch:
        forks = Forks(command.parse(options)[0], scratch, world, is_watched)
        forks.trainings = trainings
        status = forks.run_command([str(script), *arguments])
        verdict = forks.verdict(status)
        return Outcome(verdict, forks.exit_status(status), forks.output(), forks.run.records)


class Forks(agent.Agent):
    """An agent whose command is forks that run a script."""

    def __init__(
        self, options: argparse.Namespace, scratch: str, world: int, is_watched: bool
    ) -> None:
        super().__init__(options, scratch)
        self._world, self._is_watched = world, is_watched
        self.trainings = 1

    def start(self, words: Sequence[str], environment: dict[str, str]) -> Any:
        """Start the ranks; returns what the agent waits for."""
        told = {name: environment[name] for name in ("TRAINSPEC_WATCH", "TORCH_FR_BUFFER_SIZE")}
        every = range(self.trainings)
        return Started(partial(self._begin, words, told | {"TRAINING": str(n)}) for n in every)

    def _begin(self, words: Sequence[str], told: dict[str, str]) -> list[Any]:
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        context = get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        processes = []
        for rank in range(self._world):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._world}
            place["LOCAL_WORLD_SIZE"] = self._world
            own = told | {name: str(value) for name, value in place.items()}
            log = f"{self._scratch}/rank{rank}.log"
            given = (list(words), own, log, self._is_watched)
            processes.append(context.Process(target=_be_rank, args=given))
            processes[-1].start()
        return processes

    def output(self) -> str:
        """What the ranks printed."""
        return "".join(p.read_text() for p in sorted(Path(self._scratch).glob("rank*.log")))


class Started:
    """The forks of one run, in the form of one child process."""

    def __init__(self, trainings: Iterable[Callable[[], list[Any]]]) -> None:
        self._trainings = iter(trainings)
        self._processes = next(self._trainings)()
        self._until = time.monotonic() + LIMIT_SECONDS

    def poll(self) -> int | None:
        """Return the status once all have ended; as with torchrun, one failure ends the others."""
        codes = [process.exitcode for process in self._processes]
        if any(codes):
            self._until = min(self._until, time.monotonic() + GRACE_SECONDS)
        if None in codes and time.monotonic() > self._until:
            self.stop()
        if None in codes:
            return None
        if not any(codes) and (begin := next(self._trainings, None)):
            self._processes = begin()
            return None
        return next((code for code in codes if code), 0)

    def stop(self, number: int = 0) -> None:
        """End all."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def wait(self) -> int:
        """Wait for all; returns the exit status."""
        for process in self._processes:
            process.join(LIMIT_SECONDS)
        return self.poll() or 0


def _be_rank(words: list[str], environment: dict[str, str], log: str, is_watched: bool) -> None:
    """In a fork: be the process that torchrun would have started."""
    os.environ |= {**environment, "OMP_NUM_THREADS": "1"}
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))  # as Python does for a script
    set_start_method("fork", force=True)  # of workers; a forkserver's fork would ask a forkserver
    if is_watched:
        runpy.run_path(str(agent.BOOT / "sitecustomize.py"))["_start"]()
        # A rank of torchrun's connects at once; a fork might be a worker that loads data.
        sys.modules["trainspec_watch.guard"].Current.probe.connect()  # type: ignore[attr-defined]
    status = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)
