"""A pool of live ranks: started once, called many times, killed as the universal recovery.

Ranks are forked from a zygote (multiprocessing's fork server) that has torch preloaded: a rank
starts in tens of milliseconds and a call on live ranks takes a fraction of one. Because killing
the pool and forking a new one is that cheap, every hard failure ends the same way: collect
what is known, kill, raise. Nothing is repaired in place.

One call, as the parent sees it:

    send the task to every rank
    wait for replies, process ends and the clock
      all replied            -> values, or the earliest error that is no echo of another rank's
      one process ended      -> RankDied, with what the others were doing
      every silent rank has been blocked for `grace_s`, or `timeout_s` is over -> RankHung
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from spec_tests.rig.ranks import member as member_side
from spec_tests.rig.ranks import rank as rank_side
from spec_tests.rig.ranks import wire
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised, RankReport
from spec_tests.rig.ranks.liveness import Liveness
from spec_tests.rig.ranks.member import Member
from spec_tests.rig.ranks.watcher import Doing
from spec_tests.rig.ranks.zygote import rank_environment
from spec_tests.rig.target import Target

# A rank that has raised closes its sockets, which releases its peers: at once, unless what it has
# made is long in going. A peer that is not released is killed.
_RELEASE_S = 5.0
POLL_S = 0.2
# How many times its time limit a body may take while it visibly computes.
PATIENCE = 4.0

_Reply = TypeVar("_Reply")

Errors = dict[int, wire.RemoteError]
"""Rank to what it raised."""


class Ranks(list[Any]):
    """What a successful call returns: one observation per rank.

    Attributes:
        leaks: what the ranks left behind.
        in_flight: what simulated ranks have launched and not waited for.
    """

    leaks: tuple[str, ...] = ()
    in_flight: tuple[str, ...] = ()


class Pool:
    """`world_size` ranks with one implementation loaded, a process each.

    Args:
        world_size: how many ranks.
        target: the implementation to load; None for a world that only runs the rig's own bodies.
        transport: "gloo" (CPU), "cuda" (one device per rank, shared where there are fewer) or
            "sim" (simulated).

    Raises:
        RankHung, RankDied: a process does not come up.
    """

    def __init__(
        self,
        world_size: int,
        *,
        target: Target | None = None,
        transport: str = "gloo",
    ) -> None:
        self.world_size, self.target, self.transport = world_size, target, transport
        self.load_error: wire.RemoteError | None = None
        self.offered: tuple[str, ...] = ()
        self.misfits: dict[str, str] = {}
        self.leaks: tuple[str, ...] = ()  # what importing the implementation changed
        self.is_alive = True
        self.has_served = False  # a call ended well
        self._group = 0
        self._scratch = Path(tempfile.mkdtemp(prefix="trainspec-"))
        self._members: list[Member] = []
        self._selector = selectors.DefaultSelector()
        (self._scratch / "shared").mkdir()
        try:
            self._start()
            for member in self._members:
                self._selector.register(member.tasks, selectors.EVENT_READ, member)
                self._greet(member)
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        """Start every process of the pool."""
        # Owned by the parent and on a port that the system picks: no port is ever fixed.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            config = self._config(rank, f"rank{rank}.out", self._store.port)
            self._members.append(member_side.start(config))

    def _config(self, rank: int, output: str, store_port: int = 0) -> rank_side.RankConfig:
        return rank_side.RankConfig(
            rank=rank,
            world_size=self.world_size,
            store_port=store_port,
            output_path=str(self._scratch / output),
            scratch=str(self._scratch / "shared"),
            target=self.target,
            transport=self.transport,
            environment=rank_environment(self.transport),
        )

    def _greet(self, member: Member) -> None:
        greeting = member_side.greet(member)
        self.load_error = self.load_error or greeting.error
        self.offered, self.misfits = greeting.offered, greeting.misfits or {}
        self.leaks += tuple(f"rank {member.rank}, at import: {each}" for each in greeting.leaks)

    def pids(self) -> list[int]:
        """Process ids of the ranks; simulated ones share a process."""
        return [member.process.pid or -1 for member in self._members]

    def _outcome(self, replies: Sequence[rank_side.Reply]) -> Ranks:
        """Return what the ranks observed; the replies hold no error."""
        named = [f"rank {rank}: {leak}" for rank, r in enumerate(replies) for leak in r.leaks]
        found = Ranks()
        for rank, reply in enumerate(replies):
            try:
                found.append(wire.received(reply.value or b"", object))
            except wire.NotPlain as error:  # it returned more than data
                raise refusal(error, rank, len(replies)) from None
        found.leaks = tuple(named)
        self.has_served = True
        return found

    def _raise_error(self, errors: Errors, reports: Sequence[RankReport]) -> NoReturn:
        """Raise the earliest error that is no echo of another rank's."""
        primary = culprit(errors)
        error = errors[primary]
        same = [rank for rank in sorted(errors) if errors[rank].is_like(error)]
        headline = f"rank {_and(same)} of {self.world_size} raised {error.headline}"
        shown = [
            report
            if report.rank == primary or report.rank not in same
            else dataclasses.replace(
                report, state=f"raised the same {error.kind}", error=None, stack=""
            )
            for report in reports
        ]
        raise RankRaised(headline, primary, shown).with_traceback(error.rebuild_traceback())

    def kill(self) -> None:
        """End every rank now and remove what the pool wrote. May be called twice."""
        self.is_alive = False
        self._selector.close()
        for member in self._members:
            with contextlib.suppress(OSError, ValueError):
                member.process.kill()
            if member.process.pid is not None:
                with contextlib.suppress(OSError):  # compilers and the like that it has started
                    os.killpg(member.process.pid, signal.SIGKILL)
        for member in self._members:
            member.process.join(5.0)
            member.tasks.close()
            member.control.close()
        self._members.clear()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def call(
        self,
        body: tuple[str, str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        seed: int,
        timeout_s: float,
        grace_s: float,
        patience: float = PATIENCE,
        schedule: Any = None,
    ) -> Ranks:
        """Run `body` on every rank.

        Args:
            patience: how many times `timeout_s` a body may take while it visibly computes.
            schedule: of simulated ranks.

        Raises:
            RankRaised, RankHung, RankDied: see `spec_tests.rig.ranks.errors`.
        """
        try:
            own = rank_side.Task(self._group, *body, args, kwargs, seed)
            task = self._task(own, schedule)
            for member in self._members:
                with contextlib.suppress(BrokenPipeError):  # it died idle; the wait will see it
                    member.send(task)
            replies = self._collect(min(1.0, patience) * timeout_s, grace_s, patience * timeout_s)
        except BaseException:
            # Replies of an interrupted task must not be taken for those of the next.
            self.kill()
            raise
        return self._conclude(replies)

    def _task(self, task: rank_side.Task, schedule: Any) -> object:
        """What every process is sent."""
        return task

    def _collect(
        self, timeout_s: float, grace_s: float, limit_s: float
    ) -> dict[int, rank_side.Reply]:
        replies: dict[int, rank_side.Reply] = {}
        deadline = time.monotonic() + timeout_s
        patience_ends = time.monotonic() + limit_s
        watched = {
            m.rank: Liveness(m.process.pid or -1, grace_s, m.progress) for m in self._members
        }
        while len(replies) < self.world_size:
            ready = self._selector.select(POLL_S)
            for key, _ in ready:
                self._receive(key.data, replies)
            errors = [reply for reply in replies.values() if reply.error]
            if errors:
                deadline = min(deadline, time.monotonic() + _RELEASE_S)
            if ready or len(replies) == self.world_size:
                continue
            self._trim_outputs()
            silent = [m.rank for m in self._members if m.rank not in replies]
            blocked = [watched[rank].is_blocked() for rank in silent]
            if all(blocked):
                self._give_up(replies, f"blocked, nothing moved for {grace_s:g} s")
            now = time.monotonic()
            if now > deadline:
                # Who computes (compiles, interprets) is slow, not hung, for a good while longer.
                if errors or all(watched[rank].is_idle for rank in silent):
                    self._give_up(replies, f"no answer within {timeout_s:g} s")
                if now > patience_ends:
                    self._give_up(
                        replies, f"still computing after {limit_s:g} s", was_computing=True
                    )
        return replies

    def _trim_outputs(self) -> None:
        for member in self._members:
            member.trim_output()

    def _read(
        self, member: Member, kind: type[_Reply], replies: dict[int, rank_side.Reply]
    ) -> _Reply:
        """Return what a process has sent; where that is no reply, end the call with the reason."""
        try:
            return wire.received(member.tasks.recv_bytes(), kind)
        except (EOFError, ConnectionResetError):
            self._raise_died(member, replies)
        except wire.NotPlain as error:
            raise refusal(error, self._running(member), self.world_size) from None

    def _running(self, member: Member) -> int:
        """The rank that runs in a process."""
        return member.rank

    def _receive(self, member: Member, replies: dict[int, rank_side.Reply]) -> None:
        replies[member.rank] = self._read(member, rank_side.Reply, replies)

    def _give_up(
        self, replies: dict[int, rank_side.Reply], why: str, *, was_computing: bool = False
    ) -> NoReturn:
        """Nobody will answer any more. An error that a rank already posted is the better story."""
        reports = self._report_all(replies)
        self.kill()
        if errors := errors_in(replies):
            self._raise_error(errors, reports)
        waiting = [report.rank for report in reports if report.state == "in the body"]
        returned = [report.rank for report in reports if report.state == "returned"]
        headline = f"hang: rank {_and(waiting)} {why}"
        if returned:
            headline += f"; rank {_and(returned)} had already left the body"
        raise RankHung(headline, waiting[0], reports, was_computing)

    def _raise_died(self, dead: Member, replies: dict[int, rank_side.Reply]) -> NoReturn:
        time.sleep(0.02)  # a peer that dies of the same cause, or is released by it, says so now
        rank, reports = self._running(dead), self._report_all(replies, dead=dead)
        self.kill()
        raise RankDied(f"rank {rank} of {self.world_size}: {reports[rank].state}", rank, reports)

    def _report_all(
        self, replies: dict[int, rank_side.Reply], dead: Member | None = None
    ) -> list[RankReport]:
        reports = []
        for member in self._members:
            reply = replies.get(member.rank)
            error = reply.error if reply is not None else None
            if reply is None and (member is dead or not member.process.is_alive()):
                state, doing = member.how_it_ended(), member.last_words()
            elif error is not None and dead is None:  # its traceback says where it was
                state, doing = "raised", Doing("")
            else:
                state = "in the body" if reply is None else "raised" if error else "returned"
                doing = member.ask_what_it_does(0.3)
            stack = doing.stack if reply is None else ""
            reports.append(
                RankReport(member.rank, state, error, stack, doing.collectives, member.output())
            )
        return reports

    def _conclude(self, replies: dict[int, rank_side.Reply]) -> Ranks:
        ordered = [replies[rank] for rank in range(self.world_size)]
        issued = [reply.collectives for reply in ordered]
        errors = errors_in(replies)
        reports = self._report_all(replies) if errors else []
        # Ranks that issued different numbers of operations are out of step: the next body gets a
        # new group. That is no verdict, for sends and receives are counted as well.
        needs_new_group = bool(errors) or len(set(issued)) > 1 or issued[0] < 0
        self._group += needs_new_group
        keeps_groups = any(reply.keeps_groups for reply in ordered)
        if (needs_new_group and keeps_groups) or is_damaged(ordered):
            self.kill()
        if errors:
            self._raise_error(errors, reports)
        return self._outcome(ordered)


def refusal(error: wire.NotPlain, rank: int, world_size: int) -> RankRaised:
    """The failure that stands for something that rank `rank` should not have sent."""
    reports = [RankReport(each, "returned") for each in range(world_size)]
    reports[rank] = RankReport(rank, "returned", wire.described(error))
    return RankRaised(f"rank {rank} of {world_size}: {error}", rank, reports)


def is_damaged(replies: Sequence[rank_side.Reply]) -> bool:
    """Return whether a body left something behind that cannot be put back."""
    leaks = [leak for reply in replies for leak in reply.leaks]
    return not all(leak.restored or leak.is_harmless for leak in leaks)


def errors_in(replies: Mapping[int, rank_side.Reply]) -> Errors:
    """Return what ranks raised."""
    return {rank: reply.error for rank, reply in replies.items() if reply.error is not None}


def culprit(errors: Errors) -> int:
    """Return the rank that raised first, other than as an echo of another rank's failure."""
    return min(errors, key=lambda rank: (errors[rank].is_echo, errors[rank].raised_ns))


def _and(ranks: Sequence[int]) -> str:
    words = [str(rank) for rank in ranks] or ["?"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
