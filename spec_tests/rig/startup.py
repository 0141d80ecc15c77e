"""From a fork to a rank that answers: start it, and hear what it says of the implementation.

A rank imports the implementation at its start, so this is where foreign code may first exit, hang
or flood its output. None of that is the rig's fault, and all of it ends in one exception that says
what the rank was doing.
"""

from __future__ import annotations

import selectors
import time
from multiprocessing import get_context
from pathlib import Path

from spec_tests.rig import rank as rank_side
from spec_tests.rig import received
from spec_tests.rig.errors import RankDied, RankHung, RankReport
from spec_tests.rig.loading import Greeting
from spec_tests.rig.member import Member
from spec_tests.rig.zygote import start_method, without_main

START_TIMEOUT_S = 60.0
_POLL_S = 0.2


def start(config: rank_side.RankConfig) -> Member:
    """Fork the rank; it begins to import at once."""
    context = get_context(start_method())
    tasks, their_tasks = context.Pipe()
    control, their_control = context.Pipe()
    process = context.Process(  # type: ignore[attr-defined]  # both contexts have it
        target=rank_side.main,
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
        greeting = received.received(member.tasks.recv_bytes(), Greeting)
    except (EOFError, ConnectionResetError):
        report = RankReport(member.rank, member.how_it_ended(), output=member.output())
        raise RankDied(
            f"rank {member.rank} {report.state} while it imported the implementation", 0, [report]
        ) from None
    except received.NotPlain as error:
        return Greeting(preloaded=False, error=received.described(error))
    return greeting


def _late(member: Member) -> RankHung:
    doing = member.ask_what_it_does(0.5)
    report = RankReport(member.rank, "did not start", stack=doing.stack, output=member.output())
    return RankHung(
        f"rank {member.rank} did not come up in {START_TIMEOUT_S:.0f} s: importing the "
        "implementation does not end",
        0,
        [report],
    )


def watch(selector: selectors.BaseSelector, member: Member) -> None:
    """Let the pool hear of it when this rank answers or ends."""
    selector.register(member.tasks, selectors.EVENT_READ, member)
