"""The process that a simulated world lives in: threads for ranks, a pipe to the parent.

It lives like a rank of the pool (`rig.ranks.rank`): forked from the zygote, output to a file, a
watcher that says what is going on. One task is one body on all ranks; one answer holds a reply per
rank and, if no rank could go on, the table of who waited where.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spec_tests.rig.ranks import hygiene, thrift, wire
from spec_tests.rig.ranks import rank as live
from spec_tests.rig.ranks.watcher import Doing, stack_of_body
from spec_tests.rig.sim import hooks
from spec_tests.rig.sim.baton import Baton, Blocked
from spec_tests.rig.sim.collectives import Collectives
from spec_tests.rig.sim.faults import UnwaitedWork
from spec_tests.rig.sim.schedule import Schedule
from spec_tests.rig.sim.store import SimStore
from spec_tests.rig.target import Implementation


@dataclass(frozen=True)
class SimTask:
    """One call: the task of every rank, pickled so that ranks share no argument."""

    task: bytes
    schedule: Schedule


@dataclass(frozen=True)
class SimReply:
    """What became of a task on all ranks; if it failed, with the last operations of each.

    Attributes:
        in_flight: what nobody had waited for in the end.
    """

    replies: tuple[live.Reply, ...]
    blocked: tuple[Blocked, ...]
    histories: tuple[tuple[str, ...], ...]
    in_flight: tuple[str, ...]


_MAY_BE_LEFT = {"all": (), "but gathers": ("all_gather",), "none": ("",)}
"""How the names of operations begin that nobody must have waited for, see `Schedule`."""


class _Context(live.Context):
    """A simulated rank's: no time passes here, so being late is a matter of order."""

    owns_process = False

    def __init__(self, host: _Host, rank: int, task: live.Task, schedule: Schedule) -> None:
        config = dataclasses.replace(host.config, rank=rank)
        super().__init__(config, task, host.impl)
        self.host, self.schedule = host, schedule

    def be_late(self, seconds: float) -> None:
        self.host.baton.step_aside()

    def was_interrupted(self) -> None:
        self.host.now.give_up_guard(self.rank)

    def finish(self) -> None:
        left = self.host.now.unwaited(self.rank, _MAY_BE_LEFT[self.schedule.unwaited])
        if left:
            raise UnwaitedWork(
                f"rank {self.rank} has left the body and nobody has waited for "
                + "; ".join(left[:4])
                + (f"; and {len(left) - 4} more" if len(left) > 4 else "")
                + ". Call wait() on the handle before the result is used or the buffer reused; "
                "or the line that calls it was not reached"
            )
        super().finish()


class _Host:
    """The ranks of this process and the groups that they have."""

    now: Collectives
    store: SimStore

    def __init__(self, config: live.RankConfig, impl: Implementation | None, baton: Baton) -> None:
        self.config, self.impl, self.baton = config, impl, baton
        self.generation = -1
        self.joined = [-1] * config.world_size
        self.clean: list[Any] = [None] * config.world_size
        self.renew()

    def renew(self) -> None:
        """From now on ranks have new groups."""
        self.generation += 1
        self.now = Collectives(self.baton)
        self.store = SimStore(self.baton)

    def do(self, task: SimTask) -> SimReply:
        """Run one task on all ranks."""
        replies: dict[int, live.Reply] = {}
        tasks = [wire.loads(task.task) for _ in self.baton.ranks]
        self.now.begin()

        def job(rank: int) -> None:
            self._join(rank)
            reply = live._run(tasks[rank], _Context(self, rank, tasks[rank], task.schedule))
            if reply.error is not None:
                self.baton.fail()
            self.baton.end()
            # One rank after the other: what belongs to the process is put back by the first.
            leaks = tuple(hygiene.restore(self.clean[rank]))
            if leaks:
                self.clean[rank] = hygiene.snapshot()
            replies[rank] = dataclasses.replace(reply, leaks=leaks)

        blocked = self.baton.run(job, task.schedule)
        has_failed = bool(blocked) or any(reply.error for reply in replies.values())
        histories = [self.now.history(i) for i in range(len(replies))] if has_failed else []
        left = [(i, words) for i in range(len(tasks)) for words in self.now.unwaited(i)]
        in_flight = tuple(f"on rank {i}: {words}" for i, words in left)
        if has_failed or not self.now.is_tidy:
            self.renew()
        ordered = tuple(replies[rank] for rank in range(len(tasks)))
        return SimReply(ordered, tuple(blocked), tuple(histories), in_flight)

    def _join(self, rank: int) -> None:
        if self.joined[rank] == self.generation:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=self.store, rank=rank, world_size=self.config.world_size
        )
        self.joined[rank] = self.generation
        self.clean[rank] = hygiene.snapshot()


def main(config: live.RankConfig, tasks: Connection, control: Connection) -> None:
    """Serve until the parent ends it. Entry point of the forked process."""
    output = live.begin(config, tasks, control, {})
    impl, greeting = live.load_implementation(config.target, "sim")
    with (Path(config.scratch).parent / "baton").open("r+b") as file:
        baton = Baton(config.world_size, mmap.mmap(file.fileno(), 1))
    host = _Host(config, impl, baton)
    hooks.install(lambda: baton, lambda: host.now)
    live.start_watcher(control, config, lambda: _doing(host))
    live.greet(tasks, greeting)
    modules = len(sys.modules)
    while True:
        modules = thrift.freeze_imports(modules)
        task: SimTask = wire.loads(tasks.recv_bytes())
        os.ftruncate(output, 0)
        tasks.send_bytes(wire.dumps(host.do(task)))


def _doing(host: _Host) -> Doing:
    """What the world does right now: the rank that holds the baton."""
    holder = host.baton.holder
    if holder is None:
        return Doing("", (), host.baton.steps)
    history = host.now.history(holder.index)
    return Doing(stack_of_body(holder.thread), history, host.baton.steps, holder.index)
