"""The parent's side of a simulated world: one process, asked like a pool of live ranks.

send the task
wait for the one answer, the process's end and the clock
  answer with values     -> values
  ... with an error      -> RankRaised, the cause before its echoes
  ... with a table       -> Deadlock
  the process ended      -> RankDied, with the rank that was running
  blocked, or time over  -> RankHung: a rank waits for something outside of a collective
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any, NoReturn

from spec_tests.rig.ranks import member as member_side
from spec_tests.rig.ranks import rank as live
from spec_tests.rig.ranks import wire
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankReport, RigError
from spec_tests.rig.ranks.liveness import Liveness
from spec_tests.rig.ranks.member import Member
from spec_tests.rig.ranks.pool import (
    PATIENCE,
    POLL_S,
    BasePool,
    Ranks,
    culprit,
    is_damaged,
    progress_of,
    refusal,
)
from spec_tests.rig.sim import hooks, host
from spec_tests.rig.sim.faults import Deadlock
from spec_tests.rig.sim.schedule import Schedule


class SimPool(BasePool):
    """Simulated ranks, in one process.

    Raises:
        RigError: this torch cannot be simulated.
    """

    def _start(self) -> None:
        missing = hooks.needs()
        if missing:
            raise RigError(
                f"this torch cannot be simulated: it lacks {', '.join(missing)}; use gloo"
            )
        (self._scratch / "baton").write_bytes(b"\0")
        self._members.append(member_side.start(self._config(0, "ranks.out"), host.main))

    @property
    def _member(self) -> Member:
        return self._members[0]

    def call(
        self,
        body: tuple[str, str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        seed: int,
        timeout_s: float,
        grace_s: float,
        schedule: Schedule | None = None,
    ) -> Ranks:
        """Run `body` on every rank.

        Raises:
            RankRaised, RankHung (Deadlock), RankDied: see `spec_tests.rig.ranks.errors`.
        """
        own = wire.dumps(live.Task(0, 0, *body, args, kwargs, seed))
        task = host.SimTask(own, schedule or Schedule())
        try:
            with contextlib.suppress(BrokenPipeError):  # it died idle; the wait will see it
                self._member.send(task)
            reply = self._wait(timeout_s, grace_s)
        except BaseException:
            self.kill()
            raise
        return self._conclude(reply)

    def _wait(self, timeout_s: float, grace_s: float) -> host.SimReply:
        member = self._member
        begun = time.monotonic()
        watched = Liveness(member.process.pid or -1, grace_s, progress=progress_of(member))
        while not member.tasks.poll(POLL_S):
            elapsed = time.monotonic() - begun
            if watched.is_blocked():
                self._give_up(
                    f"is blocked outside of a collective, nothing moved for {grace_s:g} s"
                )
            if elapsed > timeout_s and watched.is_idle:
                self._give_up(f"gave no answer within {timeout_s:g} s")
            if elapsed > PATIENCE * timeout_s:
                self._give_up(f"is still computing after {PATIENCE * timeout_s:g} s")
        try:
            return wire.received(member.tasks.recv_bytes(), host.SimReply)
        except (EOFError, ConnectionResetError):
            self._raise_died()
        except wire.NotPlain as error:
            raise refusal(error, self._running(), self.world_size) from None

    def _running(self) -> int:
        return (self._scratch / "baton").read_bytes()[0]

    def _give_up(self, why: str) -> NoReturn:
        doing, output = self._member.ask_what_it_does(0.3), self._member.output()
        rank = doing.rank if doing.rank >= 0 else self._running()  # who could not answer
        reports = [RankReport(other, "waits for its turn") for other in range(self.world_size)]
        told = (doing.stack, doing.collectives, output)
        reports[rank] = RankReport(rank, "in the body", None, *told)
        self.kill()
        raise RankHung(
            f"hang: rank {rank} {why}; in a simulated world ranks are threads, and this one keeps "
            "the others from running",
            rank,
            reports,
        )

    def _raise_died(self) -> NoReturn:
        rank, state = self._running(), self._member.how_it_ended()
        reports = [RankReport(other, "was one process with it") for other in range(self.world_size)]
        stack = self._member.last_words().stack
        reports[rank] = RankReport(rank, state, None, stack, output=self._member.output())
        self.kill()
        raise RankDied(f"rank {rank} of {self.world_size}: {state}", rank, reports)

    def _conclude(self, reply: host.SimReply) -> Ranks:
        errors = {r: each.error for r, each in enumerate(reply.replies) if each.error is not None}
        output = self._member.output() if errors else ""
        if is_damaged(reply.replies):
            self.kill()
        if reply.blocked:
            self._raise_deadlock(reply)
        if errors:
            reports = [
                RankReport(rank, "raised" if each.error else "returned", each.error, "", history)
                for rank, (each, history) in enumerate(
                    zip(reply.replies, reply.histories, strict=True)
                )
            ]
            primary = culprit(errors)
            reports[primary] = replace(reports[primary], output=output)
            self._raise_error(errors, reports)
        return self._outcome(reply.replies)

    def _raise_deadlock(self, reply: host.SimReply) -> NoReturn:
        waits = {row.rank: row for row in reply.blocked}
        rows, reports = ["deadlock: no rank can go on"], []
        for rank, history in enumerate(reply.histories):
            row = waits.get(rank)
            state, stack = ("in the body", row.stack) if row else ("returned", "")
            reports.append(RankReport(rank, state, stack=stack, collectives=history))
            rows.append(f"  rank {rank}: " + (f"waits for {row.waits_for}" if row else _LEFT))
        raise Deadlock("\n".join(rows), min(waits), reports)


_LEFT = "has left the body"
