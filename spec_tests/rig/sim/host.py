"""The process that a simulated world lives in: threads for ranks, a pipe to the parent.

It lives like a rank of the pool (`rig.rank`): forked from the zygote, output to a file, a watcher
that says what is going on. One task is one body on all ranks; one answer holds a reply per rank
and, if no rank could go on, the table of who waited where.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.rig import hygiene, wire
from spec_tests.rig import rank as live
from spec_tests.rig.rank import prepare_device
from spec_tests.rig.sim import hooks
from spec_tests.rig.sim.baton import Baton, Blocked, stack_of
from spec_tests.rig.sim.collectives import Collectives
from spec_tests.rig.sim.faults import UnwaitedWork
from spec_tests.rig.sim.schedule import Schedule
from spec_tests.rig.sim.store import SimStore
from spec_tests.rig.watcher import Doing, watch
from spec_tests.rig.zygote import forget_triton
from spec_tests.target import Implementation, load


@dataclass(frozen=True)
class SimTask:
    """One call: the body and, pickled once per rank so that ranks share nothing, its arguments."""

    serial: int
    module: str
    qualname: str
    arguments: tuple[bytes, ...]
    seed: int
    schedule: Schedule


@dataclass(frozen=True)
class SimReply:
    """What became of a task on all ranks; if it failed, with the last operations of each."""

    serial: int
    replies: tuple[live.Reply, ...]
    blocked: tuple[Blocked, ...]
    histories: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class SimDoing(Doing):
    """What the world does right now: the rank that holds the baton."""

    rank: int = -1


class _Context(live.Context):
    """A simulated rank's: no time passes here, so being late is a matter of order."""

    baton: Baton

    def be_late(self, seconds: float) -> None:
        self.baton.step_aside()


@dataclass
class _Host:
    """The ranks of this process and the groups that they have."""

    config: live.RankConfig
    impl: Implementation | None
    baton: Baton
    now: Collectives = field(init=False)
    generation: int = -1
    joined: list[int] = field(default_factory=list)
    store: SimStore = field(init=False)
    clean: list[Any] = field(default_factory=list)
    contexts: list[live.Context | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.config.world_size
        self.joined, self.clean = [-1] * size, [None] * size
        self.contexts = [None] * size
        self.renew()

    def renew(self) -> None:
        """From now on ranks have new groups."""
        self.generation += 1
        self.now = Collectives(self.baton)
        self.store = SimStore(self.baton)

    def do(self, task: SimTask) -> SimReply:
        """Run one task on all ranks."""
        replies: list[live.Reply | None] = [None] * len(self.baton.ranks)
        leaks: list[tuple[hygiene.Leak, ...]] = [()] * len(self.baton.ranks)
        keeps: list[bool] = [False] * len(self.baton.ranks)
        self.now.begin()

        def job(rank: int) -> None:
            self._join(rank)
            replies[rank] = self._call(rank, task)
            self.baton.end()
            # One rank after the other: what belongs to the process is put back by the first.
            leaks[rank] = tuple(hygiene.restore(self.clean[rank]))
            if leaks[rank]:
                self.clean[rank] = hygiene.snapshot()
            keeps[rank] = hygiene.keeps_groups()

        blocked = self.baton.run(job, task.schedule)
        answered = [reply for reply in replies if reply is not None]
        has_failed = bool(blocked) or any(reply.error for reply in answered)
        histories = [self.now.history(i) for i in range(len(replies))] if has_failed else []
        if has_failed or not self.now.is_tidy:
            self.renew()
        return SimReply(
            task.serial,
            tuple(
                live.Reply(r.serial, r.value, r.error, r.collectives, keeps[i], leaks[i])
                for i, r in enumerate(answered)
            ),
            tuple(blocked),
            tuple(histories),
        )

    def _join(self, rank: int) -> None:
        if self.joined[rank] == self.generation:
            return
        if dist.is_initialized():
            self.contexts[rank] = None
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=self.store, rank=rank, world_size=self.config.world_size
        )
        self.joined[rank] = self.generation
        self.clean[rank] = hygiene.snapshot()

    def _call(self, rank: int, task: SimTask) -> live.Reply:
        try:
            body = live._resolve(task.module, task.qualname)
            hygiene.seed_everything(1000 * task.seed + rank)
            args, kwargs = wire.loads(task.arguments[rank])
            config = live.RankConfig(
                rank, self.config.world_size, 0, "", "", self.config.scratch, None, "sim"
            )
            told = live.Task(task.serial, 0, task.module, task.qualname, args, kwargs, task.seed)
            context = _Context(config, told, self.impl)
            context.baton = self.baton
            value = wire.dumps(body(context, *args, **kwargs))
            self._require_waited(rank, task.schedule)
            context.close()
            return live.Reply(task.serial, value, None, live._issued_collectives())
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: the rank lives on
            self.baton.fail()
            described = wire.RemoteError.of(error, time.monotonic_ns())
            traceback.clear_frames(error.__traceback__)
            return live.Reply(task.serial, None, described, -1)

    def _require_waited(self, rank: int, schedule: Schedule) -> None:
        left = self.now.unwaited(rank) if schedule.unwaited == "error" else []
        if left:
            raise UnwaitedWork(
                f"rank {rank} has left the body and nobody has waited for "
                + "; ".join(left[:4])
                + (f"; and {len(left) - 4} more" if len(left) > 4 else "")
                + ". Call wait() on the handle before the result is used or the buffer reused"
            )


def main(config: live.RankConfig, tasks: Connection, control: Connection) -> None:
    """Serve until told to stop. Entry point of the forked process."""
    live._may_have_children(tasks, control)
    preloaded = "torch.distributed.fsdp" in sys.modules
    output = live._redirect_output(config.output_path)
    os.environ.update(config.environment, WORLD_SIZE=str(config.world_size))
    if os.environ.get("TRITON_INTERPRET"):
        forget_triton()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    impl, load_error = _load(config)
    baton = Baton(config.world_size, {}, _mark_in(Path(config.scratch).parent))
    host = _Host(config, impl, baton)
    kept = hooks.install(lambda: baton, lambda: host.now)
    threading.Thread(
        target=_watch, args=(control, config.scratch, host), name="watcher", daemon=True
    ).start()
    gc.freeze()
    brings = (impl.offered, impl.misfits) if impl is not None else ((), {})
    tasks.send_bytes(wire.dumps((preloaded, load_error, *brings)))
    while True:
        task: SimTask | None = wire.loads(tasks.recv_bytes())
        if task is None:
            break
        os.ftruncate(output, 0)
        tasks.send_bytes(wire.dumps(host.do(task)))
    del kept


def _load(config: live.RankConfig) -> tuple[Implementation | None, wire.RemoteError | None]:
    if config.target is None:
        return None, None
    try:
        return load(config.target, device=prepare_device(config.target, "sim")), None
    except BaseException as error:  # a module may exit as well
        return None, wire.RemoteError.of(error, time.monotonic_ns())


def _mark_in(folder: Path) -> mmap.mmap:
    with (folder / "baton").open("r+b") as file:
        return mmap.mmap(file.fileno(), 1)


def _watch(control: Connection, scratch: str, host: _Host) -> None:
    def answer() -> SimDoing:
        holder = host.baton.holder
        if holder is None:
            return SimDoing("", (), host.baton.steps)
        history = host.now.history(holder.index)
        return SimDoing(stack_of(holder), history, host.baton.steps, holder.index)

    watch(control, scratch, answer)
