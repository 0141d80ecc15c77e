"""A rank as its parent knows it: a process, two pipes, and the file that holds what it printed.

A rank imports the implementation at its start, so this is where foreign code may first exit, hang
or flood its output. None of that is the rig's fault, and all of it ends in one exception that says
what the rank was doing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from spec_tests.rig.ranks import rank as rank_side
from spec_tests.rig.ranks import wire
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankReport
from spec_tests.rig.ranks.rank import Greeting
from spec_tests.rig.ranks.watcher import LAST_WORDS, Doing
from spec_tests.rig.ranks.zygote import without_main

Main = Callable[[rank_side.RankConfig, Connection, Connection], None]
"""Entry point of a forked process: what it is told at its start, and its ends of the two pipes."""

START_TIMEOUT_S = 60.0
_POLL_S = 0.2
# What a rank may print within a call before the beginning of it is thrown away.
_OUTPUT_BYTES = 32 * 2**20
# How faulthandler writes: a headline, a block per thread, the innermost frame first.
_CRASH, _END = "Fatal Python error:", "\n\n"
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


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
        """The tail of what the rank printed; of a crash dump, the headline alone."""
        text, dropped = _without_dump(self._tail(limit)), self._dropped_bytes
        # At the end: a report shows the last lines.
        return f"{text}\n({dropped:,} bytes before this were dropped)" if dropped else text

    def _tail(self, limit: int = 16_000) -> str:
        with contextlib.suppress(OSError), self.output_path.open("rb") as file:
            file.seek(max(0, self.output_path.stat().st_size - limit))
            # No more than that: a rank that goes on printing outruns whoever reads to the end.
            return file.read(limit).decode(errors="replace")
        return ""

    def last_words(self) -> Doing:
        """What a rank was doing when it died: what it wrote as it aborted, or its crash dump."""
        with contextlib.suppress(OSError, wire.NotPlain):
            return wire.received(self.output_path.with_suffix(LAST_WORDS).read_bytes(), Doing)
        return Doing(_stack_of(self._tail()))

    def ask_what_it_does(self, wait_s: float) -> Doing:
        """Stack and last collectives; a rank that holds the interpreter lock cannot answer."""
        with contextlib.suppress(OSError, EOFError, wire.NotPlain):
            while self.control.poll():  # an answer that came too late for its question
                self.control.recv_bytes()
            self.control.send_bytes(b"?")
            if self.control.poll(wait_s):
                return wire.received(self.control.recv_bytes(), Doing)
        return Doing("(did not answer: busy inside C++ with the interpreter lock held)")

    def progress(self) -> int:
        """How many operations it has issued: what tells `Liveness` that it gets on."""
        return self.ask_what_it_does(0.1).issued

    def how_it_ended(self) -> str:
        """In words: killed by SIGKILL, exited with 3."""
        self.process.join(1.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with {code}"


def start(config: rank_side.RankConfig, main: Main = rank_side.main) -> Member:
    """Fork the process that runs `main`; it begins to import the implementation at once."""
    context = get_context("forkserver")
    tasks, their_tasks = context.Pipe()
    control, their_control = context.Pipe()
    process = context.Process(
        target=main,
        args=(config, their_tasks, their_control),
        name=f"rank{config.rank}",
        daemon=True,
    )
    with without_main():
        process.start()
    their_tasks.close()
    their_control.close()
    return Member(config.rank, process, tasks, control, Path(config.output_path))


def greet(member: Member) -> Greeting:
    """Wait until the rank has imported the implementation.

    Raises:
        RankHung: it has not in `START_TIMEOUT_S`.
        RankDied: its process ended.
    """
    patience_ends = time.monotonic() + START_TIMEOUT_S
    while not member.tasks.poll(_POLL_S):
        member.trim_output()
        if time.monotonic() > patience_ends:
            raise _late(member)
    try:
        return wire.received(member.tasks.recv_bytes(), Greeting)
    except (EOFError, ConnectionResetError):
        report = RankReport(member.rank, member.how_it_ended(), output=member.output())
        raise RankDied(
            f"rank {member.rank} {report.state} while it imported the implementation", 0, [report]
        ) from None
    except wire.NotPlain as error:
        return Greeting(wire.described(error))


def _late(member: Member) -> RankHung:
    doing = member.ask_what_it_does(0.5)
    report = RankReport(member.rank, "did not start", stack=doing.stack, output=member.output())
    return RankHung(
        f"rank {member.rank} did not come up in {START_TIMEOUT_S:.0f} s: importing the "
        "implementation does not end",
        0,
        [report],
    )


def _without_dump(text: str) -> str:
    """A crash dump lists every thread and C module: keep the words before it and its headline."""
    words, crash, dump = text.partition(_CRASH)
    return f"{words.rstrip()}\n{crash}{dump.partition(_END)[0]}".strip() if crash else text


def _stack_of(dump: str) -> str:
    """The body's own frames in a crash dump, in the order of a traceback: the innermost last."""
    threads = dump.partition(_CRASH)[2].split(_END)
    body = next((thread for thread in threads if " in _run\n" in thread), "")
    frames = [(m[1], int(m[2]), m[3], None) for m in _FRAME.finditer(body)]
    own = itertools.takewhile(lambda frame: not frame[0].endswith("/rig/ranks/rank.py"), frames)
    return "".join(traceback.StackSummary.from_list(reversed([*own])).format())
