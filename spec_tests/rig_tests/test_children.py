"""Ranks may have child processes: these count as part of the rank, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spec_tests.data import test_partition
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks import liveness
from spec_tests.rig.ranks.errors import RankDied, RankHung
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig_tests import bodies
from spec_tests.rig_tests.helpers import judged, python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")

WORKERS = """
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):
    def __init__(self, paths, length):
        self.length = length
        self.shards = [np.fromfile(path, dtype=np.uint16, offset=1024) for path in paths]
        self.firsts = [
            (shard, number * length)
            for shard, tokens in enumerate(self.shards)
            for number in range((len(tokens) - 1) // length)
        ]

    def __getitem__(self, number):
        shard, first = self.firsts[number]
        row = torch.from_numpy(self.shards[shard][first :][: self.length + 1].astype(np.int64))
        return row[:-1], row[1:]


def token_loader(paths, *, batch_size, sequence_length, rank=0, world_size=1):
    data, window = Sequences(paths, sequence_length), batch_size * world_size
    batches = [
        list(range(first + SHIFT + rank * batch_size, first + SHIFT + (rank + 1) * batch_size))
        for first in range(0, len(data.firsts) - window - SHIFT + 1, window)
    ]
    return DataLoader(data, batch_sampler=batches, num_workers=2)
"""


@pytest.mark.parametrize(
    ("shift", "outcome", "said"),
    [(0, Outcome.PASSED, ""), (1, Outcome.FAILED, "rank 0, batch 0: expected inputs[0, 0] to be")],
    ids=["right", "one sequence too far"],
)
def test_a_loader_with_workers_is_judged(worlds: Worlds, mine, shift, outcome, said):
    which = mine(f"SHIFT = {shift}\n{WORKERS}")
    test = test_partition.test_one_rank_reads_a_shard_from_front_to_back
    result = judged(which, worlds, test)
    worlds.drop(which)
    assert result.outcome is outcome, result.message
    assert said in result.message


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
@pytest.mark.parametrize("does", [bodies.work, write])
def test_who_waits_for_a_child_that_gets_on_is_not_blocked(worlds: Worlds, does):
    assert worlds.world(1).run(with_a_child, does, 2.0, grace_s=0.6) == ["done"]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="read from /proc")
def test_who_waits_for_a_child_that_sleeps_is(worlds: Worlds):
    with pytest.raises(RankHung, match="blocked, nothing moved for"):
        worlds.world(1).run(with_a_child, time.sleep, 99.0, grace_s=0.6)


def start_a_child(ctx: Context) -> int:
    child = multiprocessing.Process(target=time.sleep, args=(99,))
    child.start()
    assert child.pid is not None
    return child.pid


def die(ctx: Context) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ends(pid: int) -> bool:
    """True once there is no such process, or only what its parent has not asked after yet."""
    until = time.monotonic() + 30.0
    while time.monotonic() < until:
        try:
            if liveness._stat(Path(f"/proc/{pid}"))[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_children_end_with_a_rank_that_is_killed(worlds: Worlds):
    (child,) = worlds.world(1).run(start_a_child)
    begun = time.monotonic()
    with pytest.raises(RankDied, match="killed by SIGKILL"):
        worlds.world(1).run(die, grace_s=90.0, timeout_s=90.0)
    assert time.monotonic() - begun < 60.0, "seen at once, although the child held its pipes"
    assert ends(child)


def test_ranks_and_their_children_end_with_a_parent_that_is_killed(tmp_path: Path):
    script = (
        "import os, signal\n"
        "from spec_tests.rig.ranks.world import Worlds\n"
        "from spec_tests.rig_tests import test_children\n"
        "worlds = Worlds()\n"
        "print(*worlds.world(2).run(test_children.start_a_child))\n"
        "print(*worlds.pool(2, None, 'gloo').pids(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    # The parent, which would have removed the ranks' folder, is gone.
    ended = python("-c", script, TMPDIR=str(tmp_path))
    pids = [int(word) for word in ended.stdout.split()]
    assert len(set(pids)) == 4, ended.stderr
    assert [pid for pid in pids if not ends(pid)] == []
