"""The parent's side of a simulated world: one process, asked like a pool of live ranks.

Its one reply is that of every rank, and where no rank could go on the table of who waits where:
`Deadlock`. A process that blocks or computes without end is a rank that waits for something outside
of a collective, and keeps the others from running.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from spec_tests.rig.ranks import member as member_side
from spec_tests.rig.ranks import rank as live
from spec_tests.rig.ranks import wire
from spec_tests.rig.ranks.errors import RankHung, RankReport
from spec_tests.rig.ranks.member import Member
from spec_tests.rig.ranks.pool import Pool, Ranks, culprit, errors_in, is_damaged
from spec_tests.rig.sim import host
from spec_tests.rig.sim.faults import Deadlock
from spec_tests.rig.sim.schedule import Schedule


class SimPool(Pool):
    """Simulated ranks, in one process; for a torch that can be simulated (`hooks.needs`)."""

    def _start(self) -> None:
        (self._scratch / "baton").write_bytes(b"\0")
        self._members.append(member_side.start(self._config(0, "ranks.out"), host.main))

    def _task(self, task: live.Task, schedule: Schedule | None) -> host.SimTask:
        return host.SimTask(wire.dumps(task), schedule or Schedule())

    def _receive(self, member: Member, replies: dict[int, live.Reply]) -> None:
        self._reply = self._read(member, host.SimReply, replies)
        replies.update(enumerate(self._reply.replies))

    def _running(self, member: Member) -> int:
        return (self._scratch / "baton").read_bytes()[0]

    def _give_up(
        self, replies: dict[int, live.Reply], why: str, *, was_computing: bool = False
    ) -> NoReturn:
        (member,) = self._members
        doing, output = member.ask_what_it_does(0.3), member.output()
        rank = doing.rank if doing.rank >= 0 else self._running(member)  # who could not answer
        reports = [RankReport(other, "waits for its turn") for other in range(self.world_size)]
        told = (doing.stack, doing.collectives, output)
        reports[rank] = RankReport(rank, "in the body", None, *told)
        self.kill()
        raise RankHung(
            f"hang: rank {rank} {why}, outside of a collective: in a simulated world ranks are "
            "threads, and this one keeps the others from running",
            rank,
            reports,
            was_computing,
        )

    def _report_all(
        self, replies: dict[int, live.Reply], dead: Member | None = None
    ) -> list[RankReport]:
        """What is known when the process has ended."""
        (member,) = self._members
        reports = [RankReport(other, "was one process with it") for other in range(self.world_size)]
        rank, words = (
            self._running(member),
            (member.how_it_ended(), None, member.last_words().stack),
        )
        reports[rank] = RankReport(rank, *words, output=member.output())
        return reports

    def _conclude(self, replies: dict[int, live.Reply]) -> Ranks:
        reply, errors = self._reply, errors_in(replies)
        output = self._members[0].output() if errors else ""
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
        found = self._outcome(reply.replies)
        found.in_flight = reply.in_flight
        return found

    def _raise_deadlock(self, reply: host.SimReply) -> NoReturn:
        waits = {row.rank: row for row in reply.blocked}
        rows, reports = ["deadlock: no rank can go on"], []
        for rank, history in enumerate(reply.histories):
            row = waits.get(rank)
            state, stack = ("in the body", row.stack) if row else ("returned", "")
            reports.append(RankReport(rank, state, stack=stack, collectives=history))
            does = f"waits for {row.waits_for}" if row else "has left the body"
            rows.append(f"  rank {rank}: {does}")
        raise Deadlock("\n".join(rows), min(waits), reports)
