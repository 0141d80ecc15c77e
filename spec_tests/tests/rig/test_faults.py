"""How a blocked rank is told from a slow one, what a dying one still says, and in what time.

Ranks may have child processes: these count as part of the rank, and end with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spec_tests.rig.ranks import liveness
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import ONCE, Worlds
from spec_tests.tests.rig import bodies
from spec_tests.tests.rig.helpers import python, within


def test_peers_of_a_rank_that_is_long_in_going_are_released(worlds: Worlds):
    with pytest.raises(RankRaised, match="rank 0 of 2 raised KeyError") as caught:
        worlds.world(2).run(bodies.fail, "raise", 0, 1.0)
    assert [report.state for report in caught.value.ranks] == ["raised"] * 2
    assert worlds.world(2).run(bodies.who) == [(0, 2, ""), (1, 2, "")]


class Looks:
    """A process as seen every 0.2 s: seconds of processor per look, and who works at each."""

    def __init__(self, cpu_s: float, *working: set[str]) -> None:
        self.cpu_s, self.working, self.number = cpu_s, working, 0

    def __call__(self, pid: int) -> liveness._Sample:
        working = self.working[self.number % len(self.working)]
        self.number += 1
        cpu_s = self.cpu_s * self.number
        return liveness._Sample(0.2 * self.number, cpu_s, frozenset(working))


LOOKS = {
    "asleep": (Looks(0.0, set()), True),
    "asleep beside an event loop": (Looks(0.0, {"gloo"}, set()), True),
    "event loop": (Looks(0.005, set()), True),
    "event loop on a crowded machine": (Looks(0.005, {"gloo"}, set(), {"main"}), True),
    "computing": (Looks(0.2, {"main"}), False),
    "computing half of the time": (Looks(0.1, {"main"}), False),
    "computing in bursts": (Looks(0.1, set()), False),
    "child at work": (Looks(0.0, {"child"}), False),
    "starving": (Looks(0.0, {"main"}), False),
    "starving beside an event loop": (Looks(0.0, {"main"}, {"main", "gloo"}), False),
    "gets a quarter": (Looks(0.05, {"main"}, {"main", "gloo"}), False),
}


@pytest.mark.parametrize(("looks", "is_blocked"), LOOKS.values(), ids=LOOKS)
def test_blocked_is_told_from_slow_and_from_starving(monkeypatch, looks: Looks, is_blocked: bool):
    monkeypatch.setattr(liveness, "_sample", looks)
    watched = liveness.Liveness(1, window_s=2.0)
    answers = [watched.is_blocked() for _ in range(30)]
    assert any(answers) == is_blocked
    if is_blocked:
        assert answers.index(True) == 10, "as soon as the window is over"


STARTS = """
import subprocess, sys, threading
children = []
def start():
    children.append(subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1]]))
    print(flush=True)
    children[0].wait()
threading.Thread(target=start).start()
sys.stdin.read()
children[0].kill()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="read from /proc")
@pytest.mark.parametrize(
    ("does", "is_work"), [("while True: pass", True), ("import time; time.sleep(99)", False)]
)
def test_a_process_that_a_thread_has_started_works_for_it(does: str, is_work: bool):
    command = [sys.executable, "-S", "-c", STARTS, does]
    until = time.monotonic() + 60.0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as watched:
        assert watched.stdout is not None
        watched.stdout.readline()
        found = None
        while found != (is_work, is_work) and time.monotonic() < until:  # it takes time to begin
            first = liveness._sample(watched.pid)
            time.sleep(0.3)
            second = liveness._sample(watched.pid)
            assert first is not None
            assert second is not None
            found = "child" in second.working, second.cpu_s > first.cpu_s
    assert found == (is_work, is_work)


def deep_down(ctx: Context, depth: int, what: str) -> None:
    if depth:
        return deep_down(ctx, depth - 1, what)
    if what == "crash":
        ctypes.string_at(0)
    for size in (3, 5 + 100_000 * ctx.rank):
        torch.distributed.all_reduce(torch.ones(size))
    return None


def test_the_stack_of_a_crash_ends_where_it_crashed(worlds: Worlds):
    with pytest.raises(RankDied, match="killed by SIGSEGV") as caught:
        worlds.world(1).run(deep_down, 30, "crash")
    (dead,) = caught.value.ranks
    frames = [line for line in dead.stack.splitlines() if line.startswith("  File")]
    assert "in string_at" in frames[-1]
    assert "in deep_down" in frames[-2]
    assert "\n    ctypes.string_at(0)\n" in dead.stack
    assert dead.output == "Fatal Python error: Segmentation fault"


DAMAGE: list[int] = []


def leave_damage(ctx: Context, is_cause: bool) -> int:
    """Crash if an earlier call in this process left damage behind; or leave it."""
    if is_cause:
        DAMAGE.append(ctx.rank)
    elif DAMAGE:
        ctypes.string_at(0)
    return ctx.rank


@pytest.mark.parametrize("transport", ["gloo", "sim"])
def test_a_crash_that_does_not_come_again_in_new_processes_is_a_notice(worlds: Worlds, transport):
    world, known = worlds.world(2, transport=transport), len(worlds.leaks)
    world.run(leave_damage, True)
    assert world.run(leave_damage, False) == [0, 1]
    said = worlds.leaks[known:]
    assert any("killed by SIGSEGV" in each and each.endswith(ONCE) for each in said), said


def test_a_rank_that_gloo_aborts_shows_its_last_collectives_and_where_it_was(worlds: Worlds):
    with pytest.raises(RankDied, match="killed by SIGABRT") as caught:
        worlds.world(2).run(deep_down, 30, "reduce")
    dead = caught.value.ranks[caught.value.primary]
    other = caught.value.ranks[1 - dead.rank]
    sizes = {0: "[[5]]", 1: "[[100005]]"}
    for report in (dead, other):
        words = [collective.split(" ", 2) for collective in report.collectives[-2:]]
        assert [(what, size) for what, size, _ in words] == [
            ("all_reduce", "[[3]]"),
            ("all_reduce", sizes[report.rank]),
        ]
    assert "torch.distributed.all_reduce(torch.ones(size))" in dead.stack.rpartition("depth - 1")[2]
    assert "Received data size doesn't match expected size" in dead.output


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")


def write(seconds: float) -> None:
    """Hand over a little at a time, and sleep in between."""
    end = time.monotonic() + seconds
    with Path(os.devnull).open("wb", buffering=0) as file:
        while time.monotonic() < end:
            file.write(b"a batch")
            time.sleep(0.1)


def with_a_child(ctx: Context, does: Callable[[float], None], seconds: float) -> str:
    child = multiprocessing.Process(target=does, args=(seconds,))
    child.start()
    child.join()
    return "done"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="read from /proc")
@pytest.mark.parametrize("does", [bodies.work, write, time.sleep])
def test_who_waits_for_a_child_is_blocked_where_that_is(worlds: Worlds, does):
    if does is not time.sleep:
        assert worlds.world(1).run(with_a_child, does, 2.0, grace_s=0.6) == ["done"]
        return
    with pytest.raises(RankHung, match="blocked, nothing moved for"):
        worlds.world(1).run(with_a_child, does, 99.0, grace_s=0.6)


def start_a_child(ctx: Context) -> int:
    child = multiprocessing.Process(target=time.sleep, args=(99,))
    child.start()
    assert child.pid is not None
    return child.pid


def die(ctx: Context) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """True if there is no such process, or only what its parent has not asked after yet."""
    try:
        return liveness._stat(Path(f"/proc/{pid}"))[0] == "Z"
    except OSError:
        return True


def test_children_end_with_a_rank_that_is_killed(worlds: Worlds):
    (child,) = worlds.world(1).run(start_a_child)
    begun = time.monotonic()
    with pytest.raises(RankDied, match="killed by SIGKILL"):
        worlds.world(1).run(die, grace_s=90.0, timeout_s=90.0)
    assert time.monotonic() - begun < 60.0, "seen at once, although the child held its pipes"
    assert within(30, lambda: has_ended(child))


def test_ranks_and_their_children_end_with_a_parent_that_is_killed(tmp_path: Path):
    script = (
        "import os, signal\n"
        "from spec_tests.rig.ranks.world import Worlds\n"
        "from spec_tests.tests.rig import test_faults\n"
        "worlds = Worlds()\n"
        "print(*worlds.world(2).run(test_faults.start_a_child))\n"
        "print(*worlds.pool(2, None, 'gloo').pids(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    # The parent, which would have removed the ranks' folder, is gone.
    ended = python("-c", script, TMPDIR=str(tmp_path))
    pids = [int(word) for word in ended.stdout.split()]
    assert len(set(pids)) == 4, ended.stderr
    assert within(30, lambda: all(map(has_ended, pids)))
