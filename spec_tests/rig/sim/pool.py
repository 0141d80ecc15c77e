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
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

from spec_tests.rig import rank as live
from spec_tests.rig import received, wire
from spec_tests.rig.errors import RankDied, RankHung, RankRaised, RankReport, RigError
from spec_tests.rig.liveness import Liveness
from spec_tests.rig.member import Member
from spec_tests.rig.pool import Outcome
from spec_tests.rig.sim import hooks, host
from spec_tests.rig.sim.faults import Deadlock
from spec_tests.rig.sim.schedule import Schedule
from spec_tests.rig.zygote import rank_environment, start_method, without_main
from spec_tests.target import Target

_START_TIMEOUT_S = 60.0
_POLL_S = 0.2
_PATIENCE = 4
_ECHOES = ("PeerGone", "Abandoned")


class SimPool:
    """`world_size` simulated ranks with one implementation loaded, in one process.

    Offers what `rig.pool.Pool` offers.

    Raises:
        RigError: this torch cannot be simulated.
    """

    def __init__(
        self,
        world_size: int,
        *,
        target: Target | None = None,
        transport: str = "sim",
        environment: dict[str, str] | None = None,
    ) -> None:
        missing = hooks.needs()
        if missing:
            raise RigError(
                f"this torch cannot be simulated: it lacks {', '.join(missing)}; use gloo"
            )
        self.world_size, self.target = world_size, target
        self.load_error: wire.RemoteError | None = None
        self.offered: tuple[str, ...] = ()
        self.misfits: dict[str, str] = {}
        self.is_alive = True
        self.was_preloaded = True
        self._serial = 0
        self._scratch = Path(tempfile.mkdtemp(prefix="trainspec-"))
        try:
            self._member = self._start(transport, environment or {})
            self._greet()
        except BaseException:
            self.kill()
            raise

    def _start(self, transport: str, environment: dict[str, str]) -> Member:
        context = get_context(start_method())
        tasks, their_tasks = context.Pipe()
        control, their_control = context.Pipe()
        scratch = self._scratch / "shared"
        scratch.mkdir()
        (self._scratch / "baton").write_bytes(b"\0")
        config = live.RankConfig(
            rank=0,
            world_size=self.world_size,
            store_port=0,
            store_prefix="",
            output_path=str(self._scratch / "ranks.out"),
            scratch=str(scratch),
            target=self.target,
            transport=transport,
            environment={**rank_environment(transport), **environment},
        )
        process = context.Process(  # type: ignore[attr-defined]  # both contexts have it
            target=host.main, args=(config, their_tasks, their_control), name="ranks", daemon=True
        )
        with without_main():
            process.start()
        their_tasks.close()
        their_control.close()
        return Member(0, process, tasks, control, Path(config.output_path))

    def _greet(self) -> None:
        member = self._member
        if not member.tasks.poll(_START_TIMEOUT_S):
            raise RankHung(
                f"the simulated world did not come up in {_START_TIMEOUT_S:.0f} s", 0, []
            )
        try:
            greeting = received.received(member.tasks.recv_bytes(), tuple)
        except EOFError:
            report = RankReport(0, member.how_it_ended(), output=member.output())
            raise RankDied(
                f"the simulated world {report.state} while it started", 0, [report]
            ) from None
        except received.NotPlain as error:
            self.load_error = received.described(error)
            return
        self.was_preloaded, self.load_error, self.offered, self.misfits = greeting

    def pids(self) -> list[int]:
        """The one process."""
        return [self._member.process.pid or -1]

    def call(
        self,
        body: tuple[str, str],
        args: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        *,
        seed: int,
        timeout_s: float,
        grace_s: float,
        schedule: Schedule | None = None,
    ) -> Outcome:
        """Run `body` on every rank, `args[rank]` being its positional arguments.

        Raises:
            RankRaised, RankHung (Deadlock), RankDied: see `spec_tests.rig.errors`.
        """
        self._serial += 1
        pickled = tuple(wire.dumps((own, kwargs)) for own in args)
        task = host.SimTask(self._serial, *body, pickled, seed, schedule or Schedule())
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
        watched = Liveness(
            member.process.pid or -1, grace_s, progress=lambda: self._asks(0.1).issued
        )
        while not member.tasks.poll(_POLL_S):
            elapsed = time.monotonic() - begun
            if watched.is_blocked():
                self._give_up(
                    f"is blocked outside of a collective, nothing moved for {grace_s:g} s"
                )
            if elapsed > timeout_s and watched.is_idle:
                self._give_up(f"gave no answer within {timeout_s:g} s")
            if elapsed > _PATIENCE * timeout_s:
                self._give_up(f"is still computing after {_PATIENCE * timeout_s:g} s")
        try:
            reply = received.received(member.tasks.recv_bytes(), host.SimReply)
        except (EOFError, ConnectionResetError):
            self._raise_died()
        except received.NotPlain as error:
            raise received.refusal(error, max(self._running(), 0), self.world_size) from None
        return reply

    def _asks(self, wait_s: float) -> host.SimDoing:
        doing = self._member.ask_what_it_does(wait_s)
        if isinstance(doing, host.SimDoing):
            return doing
        return host.SimDoing(doing.stack, doing.collectives, doing.issued, self._running())

    def _running(self) -> int:
        return (self._scratch / "baton").read_bytes()[0]

    def _give_up(self, why: str) -> NoReturn:
        doing = self._asks(0.3)
        rank = max(doing.rank, 0)
        reports = [
            RankReport(other, "waits for its turn", output="")
            if other != rank
            else RankReport(
                rank, "in the body", None, doing.stack, doing.collectives, self._output()
            )
            for other in range(self.world_size)
        ]
        self.kill()
        raise RankHung(
            f"hang: rank {rank} {why}; in a simulated world ranks are threads, and this one keeps "
            "the others from running",
            rank,
            reports,
        )

    def _output(self) -> str:
        return self._member.output()

    def _raise_died(self) -> NoReturn:
        rank, state = self._running(), self._member.how_it_ended()
        reports = [
            RankReport(other, state if other == rank else "was one process with it")
            for other in range(self.world_size)
        ]
        stack = self._member.last_words().stack
        reports[rank] = RankReport(rank, state, None, stack, output=self._output())
        self.kill()
        raise RankDied(f"rank {rank} of {self.world_size}: {state}", rank, reports)

    def _conclude(self, reply: host.SimReply) -> Outcome:
        replies = reply.replies
        leaks = [leak for each in replies for leak in each.leaks]
        if not all(leak.restored or leak.is_harmless for leak in leaks):
            self.kill()
        if reply.blocked:
            self._raise_deadlock(reply)
        if any(each.error for each in replies):
            self._raise_error(reply)
        named = [f"rank {rank}: {leak}" for rank, r in enumerate(replies) for leak in r.leaks]
        issued = [each.collectives for each in replies]
        if len(set(issued)) > 1:
            named.append(f"ranks issued different numbers of operations: {issued}")
        return Outcome(received.values([each.value for each in replies]), tuple(named))

    def _raise_deadlock(self, reply: host.SimReply) -> NoReturn:
        waits = {row.rank: row for row in reply.blocked}
        rows = [
            f"  rank {rank}: waits for {waits[rank].waits_for}"
            if rank in waits
            else f"  rank {rank}: has left the body"
            for rank in range(self.world_size)
        ]
        reports = [
            RankReport(
                rank,
                "in the body" if rank in waits else "returned",
                stack=waits[rank].stack if rank in waits else "",
                collectives=reply.histories[rank],
            )
            for rank in range(self.world_size)
        ]
        raise Deadlock("deadlock: no rank can go on\n" + "\n".join(rows), min(waits), reports)

    def _raise_error(self, reply: host.SimReply) -> NoReturn:
        errors = {r: each.error for r, each in enumerate(reply.replies) if each.error is not None}
        primary = min(
            errors, key=lambda rank: (errors[rank].kind in _ECHOES, errors[rank].raised_ns)
        )
        error = errors[primary]
        same = [rank for rank in sorted(errors) if errors[rank].is_like(error)]
        ranks = " and ".join(map(str, same))
        headline = f"rank {ranks} of {self.world_size} raised {error.headline}"
        reports = []
        for rank in range(self.world_size):
            state = "returned" if rank not in errors else "raised"
            if rank in same and rank != primary:
                reports.append(RankReport(rank, f"raised the same {error.kind}"))
            else:
                history, output = reply.histories[rank], self._output() if rank == primary else ""
                reports.append(RankReport(rank, state, errors.get(rank), "", history, output))
        raise RankRaised(headline, primary, reports).with_traceback(error.rebuild_traceback())

    def stop(self) -> None:
        """Ask the process to leave, then make sure that it has."""
        if self.is_alive:
            with contextlib.suppress(OSError):
                self._member.tasks.send_bytes(wire.dumps(None))
            self._member.process.join(0.2)
        self.kill()

    def kill(self) -> None:
        """End the process now and remove what it wrote. May be called twice."""
        was_alive, self.is_alive = self.is_alive, False
        member = getattr(self, "_member", None)
        if member is not None and was_alive:
            with contextlib.suppress(OSError, ValueError):
                member.process.kill()
            if member.process.pid is not None:
                with contextlib.suppress(OSError):
                    os.killpg(member.process.pid, signal.SIGKILL)
            member.process.join(5.0)
            member.tasks.close()
            member.control.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
