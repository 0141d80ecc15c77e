"""A rank as its parent knows it: a process, two pipes, and the file that holds what it printed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from spec_tests.rig import received, wire

# What a rank may print within a call before the beginning of it is thrown away.
_OUTPUT_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Doing:
    """What a rank says of itself while it runs a body: stack, last collectives, how many in all."""

    stack: str
    collectives: tuple[str, ...] = ()
    issued: int = -1


@dataclass
class Member:
    """Asks after one rank; a dead one has a state, an output, and no answers."""

    rank: int
    process: BaseProcess
    tasks: Connection
    control: Connection
    output_path: Path
    _dropped_bytes: int = field(default=0)

    def send(self, task: object) -> None:
        """Hand over a task; with it the rank begins its output anew.

        Raises:
            BrokenPipeError: the rank has died.
        """
        self._dropped_bytes = 0
        self.tasks.send_bytes(wire.dumps(task))

    def trim_output(self) -> None:
        """Keep a rank that prints without end from filling the disk; ask several times a second."""
        with contextlib.suppress(OSError):
            size = self.output_path.stat().st_size
            if size > _OUTPUT_BYTES:
                os.truncate(self.output_path, 0)  # the rank appends: it goes on at the beginning
                self._dropped_bytes += size

    def output(self, limit: int = 16_000) -> str:
        """The tail of what the rank printed; of a crash, the body's own stack alone."""
        with contextlib.suppress(OSError), self.output_path.open("rb") as file:
            file.seek(max(0, self.output_path.stat().st_size - limit))
            # No more than that: a rank that goes on printing outruns whoever reads to the end.
            text = _without_rig(file.read(limit).decode(errors="replace"))
            dropped = self._dropped_bytes
            # At the end: a report shows the last lines.
            return f"{text}\n({dropped:,} bytes before this were dropped)" if dropped else text
        return ""

    def ask_what_it_does(self, wait_s: float) -> Doing:
        """Stack and last collectives; a rank that holds the interpreter lock cannot answer."""
        with contextlib.suppress(OSError, EOFError, received.NotPlain):
            while self.control.poll():  # an answer that came too late for its question
                self.control.recv_bytes()
            self.control.send_bytes(b"?")
            if self.control.poll(wait_s):
                return received.received(self.control.recv_bytes(), Doing)
        return Doing("(did not answer: busy inside C++ with the interpreter lock held)")

    def how_it_ended(self) -> str:
        """In words: killed by SIGKILL, exited with 3."""
        self.process.join(1.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with {code}"


def _without_rig(text: str) -> str:
    """A crash dump lists every thread and C module: keep the words and the body's own frames."""
    words, crash, dump = text.partition("Fatal Python error:")
    if not crash:
        return text
    what, _, threads = dump.partition("\n\n")
    body = [thread for thread in threads.split("\n\n") if " in _run\n" in thread]
    frames = [line for line in "".join(body[:1]).splitlines() if line.startswith("  File")]
    own = list(itertools.takewhile(lambda line: "/rig/rank.py" not in line, frames))
    return "\n".join([words.rstrip(), crash + what, *own])
