"""Run a watched script as `watch -- torchrun` would, from forks of a process that has torch.

torchrun and the import of torch take four seconds for each run; this takes one.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from spec_tests.rig.ranks.zygote import without_main
from spec_tests.tests.reference.launch import free_port
from spec_tests.tests.rig.watched import be_rank
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
            boot = str(agent.BOOT / "sitecustomize.py") if self._is_watched else ""
            processes.append(context.Process(target=be_rank, args=(list(words), own, log, boot)))
            with without_main():
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
        if begin := next(self._trainings, None):  # as a shell's loop goes on
            self._processes, self._until = begin(), time.monotonic() + LIMIT_SECONDS
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
