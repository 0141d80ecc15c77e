"""Live ranks when something goes wrong: outcome, culprit, what is told, health afterwards."""

import inspect
import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from spec_tests.rig.judge import runner
from spec_tests.rig.ranks import pool
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised, RankReport, RigError
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.wire import RemoteError
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.report.causes import innermost
from spec_tests.tests.rig import bodies
from spec_tests.tests.rig.helpers import HANG_S, PROMPT_S

GRACE_S = 0.6
"""Shorter than the rig's own, or these tests would mostly wait."""


def line_of(body, text: str) -> int:
    """The line number at which `text` stands in `body`."""
    lines, first = inspect.getsourcelines(body)
    return first + next(i for i, line in enumerate(lines) if text in line)


def assert_healthy(worlds: Worlds, size: int) -> None:
    assert worlds.world(size).run(bodies.who) == [(rank, size, "") for rank in range(size)]


# ------------------------------------------------------------------------------------- it raises


@pytest.mark.parametrize(("how", "kind"), [("raise", "KeyError"), ("exit", "SystemExit")])
def test_a_raising_rank_is_named_and_its_peers_are_released(worlds: Worlds, how: str, kind: str):
    pids = worlds.pool(3, None, "gloo").pids()
    for culprit in range(3):
        begun = time.monotonic()
        with pytest.raises(RankRaised) as caught:
            worlds.world(3).run(bodies.fail, how, culprit)
        assert time.monotonic() - begun < PROMPT_S
        last = caught.traceback[-1]
        assert str(last.statement).strip() in ('raise KeyError("planted")', "sys.exit(3)")
        failure = caught.value
        assert (failure.primary, failure.error.kind) == (culprit, kind)
        assert failure.headline.startswith(f"rank {culprit} of 3 raised {kind}: ")
        assert [report.state for report in failure.ranks] == ["raised"] * 3
        peer = failure.ranks[(culprit + 1) % 3]
        assert f"line {line_of(bodies.fail, 'dist.barrier') - 1}, in fail" in peer.render()
        assert_healthy(worlds, 3)
    assert worlds.pool(3, None, "gloo").pids() == pids, "an exception costs no rank its life"


def all_alike(ctx: Context) -> None:
    raise ValueError("the same everywhere")


def test_what_all_ranks_raise_alike_is_told_once(worlds: Worlds):
    # Each failure makes the next call join a new group, and takes nobody along who still joins.
    for _ in range(5):
        with pytest.raises(RankRaised) as caught:
            worlds.world(4).run(all_alike)
    whole = "rank 0, 1, 2 and 3 of 4 raised ValueError: the same everywhere"
    assert caught.value.headline == whole
    assert str(caught.value).count("raised the same ValueError") == 3


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot say")


class Demanding(Exception):
    def __init__(self, one, *, two) -> None:
        super().__init__(f"{one} and {two}")


def raise_odd(ctx: Context, which: str) -> None:
    if which == "chained":
        try:
            raise KeyError("first")
        except KeyError as error:
            raise OSError("second") from error
    raise {
        "mute": Mute(),
        "demanding": Demanding(1, two=2),
        "group": ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    }[which]


@pytest.mark.parametrize(
    ("which", "kind", "told"),
    [
        ("mute", "Mute", "no message: its __str__ raised RuntimeError"),
        ("demanding", "Demanding", "1 and 2"),
        ("chained", "OSError", "KeyError: 'first'"),
        ("group", "ExceptionGroup", "several"),
    ],
)
def test_odd_exceptions_travel_too(worlds: Worlds, which: str, kind: str, told: str):
    with pytest.raises(RankRaised) as caught:
        worlds.world(2).run(raise_odd, which)
    assert caught.value.error.kind == kind
    assert told in caught.value.error.message + caught.value.error.text


def say_then_raise(ctx: Context) -> None:
    sys.stdout.write(f"out of rank {ctx.rank}\n")
    os.write(2, b"as C++ does\n")
    raise RuntimeError("now")


def test_what_a_rank_printed_comes_with_its_failure(worlds: Worlds, capfd):
    with pytest.raises(RankRaised) as caught:
        worlds.world(2).run(say_then_raise)
    assert "out of rank 0\n" in str(caught.value)
    assert "as C++ does\n" in caught.value.ranks[1].output
    assert capfd.readouterr() == ("", ""), "ranks print to their own files"
    with pytest.raises(RankRaised) as caught:
        worlds.world(2).run(all_alike)
    assert caught.value.ranks[0].output == "", "output of an earlier call is not told again"


def dtensor(ctx: Context) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    return distribute_tensor(torch.ones(2), mesh, [Replicate()])


@pytest.mark.parametrize("transport", ["gloo", "sim"])
def test_a_result_that_cannot_travel_is_an_error_of_the_body(worlds: Worlds, transport: str):
    world = worlds.world(2, transport=transport)
    with pytest.raises(RankRaised, match=r"cannot pickle '_thread\.lock' object"):
        world.run(bodies.unpicklable)
    with pytest.raises(RankRaised, match=r"got a DTensor of shape .*tensor.to_local\(\)"):
        world.run(dtensor)
    with pytest.raises(TypeError, match="cannot pickle"):
        world.run(bodies.who, threading.Lock())
    assert_healthy(worlds, 2)


def test_a_body_that_has_no_name_is_refused_before_anything_runs(worlds: Worlds):
    with pytest.raises(RigError, match="must be a module-level function of an importable module"):
        worlds.world(2).run(lambda ctx: None)


# --------------------------------------------------------------------------------------- it dies


@pytest.mark.parametrize(("how", "state"), [("os-exit", "exited with 3"), ("sigkill", "SIGKILL")])
def test_a_dead_rank_is_named_at_once(worlds: Worlds, how: str, state: str):
    assert_healthy(worlds, 3)
    begun = time.monotonic()
    with pytest.raises(RankDied) as caught:
        worlds.world(3).run(bodies.fail, how, 1)
    assert time.monotonic() - begun < PROMPT_S
    assert caught.value.primary == 1
    assert state in caught.value.headline
    assert "all_reduce [" in str(caught.value), "the last collectives of the living"
    assert_healthy(worlds, 3)
    os.kill(worlds.pool(3, None, "gloo").pids()[0], signal.SIGKILL)  # between two calls
    with pytest.raises(RankDied, match="rank 0 of 3: killed by SIGKILL"):
        worlds.world(3).run(bodies.empty)


# --------------------------------------------------------------------------------------- it hangs


def test_a_hanging_rank_is_reported_with_its_stack(worlds: Worlds):
    worlds.drop(None)  # collectives are numbered from the start of a pool
    assert_healthy(worlds, 2)
    begun = time.monotonic()
    with pytest.raises(RankHung) as caught:
        worlds.world(2).run(bodies.fail, "hang", 1, grace_s=GRACE_S)
    assert time.monotonic() - begun < HANG_S
    assert f"blocked, nothing moved for {GRACE_S} s" in caught.value.headline
    stack = caught.value.ranks[1].stack
    assert f"line {line_of(bodies.fail, 'time.sleep')}, in fail" in stack
    assert "rig/ranks/rank.py" not in stack
    peer = caught.value.ranks[0]
    assert peer.state == "in the body"
    assert peer.collectives[-1] == "all_reduce [[4]] #2 of 0"
    assert_healthy(worlds, 2)


def test_who_left_early_is_told_from_who_still_waits(worlds: Worlds):
    worlds.drop(None)  # collectives are numbered from the start of a pool
    with pytest.raises(RankHung) as caught:
        worlds.world(3).run(bodies.fail, "leave", 2, grace_s=GRACE_S)
    assert caught.value.headline.startswith("hang: rank 0 and 1 blocked")
    assert caught.value.headline.endswith("rank 2 had already left the body")
    assert caught.value.ranks[2].collectives[-1] == "all_reduce [[4]] #1 of 0"


def extra_collective(ctx: Context) -> None:
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(2), async_op=True)


def test_ranks_out_of_step_get_a_new_group_and_are_no_finding(worlds: Worlds):
    # No failure: sends and receives are counted too, and a star of them is right.
    assert worlds.world(2).run(extra_collective).leaks == ()
    assert_healthy(worlds, 2)


def raise_while_peer_sleeps(ctx: Context) -> None:
    if ctx.rank == 1:
        raise ValueError("first")
    time.sleep(3600)


def test_an_error_is_told_although_a_peer_cannot_be_released(worlds: Worlds):
    with pytest.raises(RankRaised, match="rank 1 of 2 raised ValueError: first") as caught:
        worlds.world(2).run(raise_while_peer_sleeps)
    assert caught.value.ranks[0].state == "in the body"
    assert "time.sleep(3600)" in caught.value.ranks[0].stack
    assert_healthy(worlds, 2)


def test_a_call_that_is_interrupted_leaves_no_old_reply(worlds: Worlds, monkeypatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    pids = worlds.world(2).run(bodies.pid)
    for pid in pids:
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches the ranks too, which ignore it
    assert worlds.world(2).run(bodies.pid) == pids
    with monkeypatch.context() as patch:
        patch.setattr(pool.Pool, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worlds.world(2).run(bodies.who, "old")
    assert worlds.world(2).run(bodies.who, "new") == [(0, 2, "new"), (1, 2, "new")]


QUICK = settings(settings.get_profile("default"), deadline=None, derandomize=True, database=None)
REPORT = RankReport(0, "raised", RemoteError("IndexError", (), "", (), "", 0))


@pytest.mark.parametrize("kind", [RankRaised, RankHung, RankDied])
def test_an_error_is_shrunk_and_a_hang_or_a_death_ends_the_property(kind: type[BaseException]):
    seen: list[list[int]] = []

    @settings(QUICK, max_examples=60, phases=(Phase.generate, Phase.shrink))
    @given(sizes=st.lists(st.integers(min_value=1, max_value=9), max_size=4))
    def property_on_ranks(sizes: list[int]) -> None:
        seen.append(sizes)
        if len(sizes) > 1:
            raise kind("a headline", 0, [REPORT])

    with pytest.raises(kind) as caught:
        property_on_ranks()
    if kind is RankRaised:
        assert seen[-1] == [1, 1]
        assert any("sizes=[1, 1]" in note for note in caught.value.__notes__)
    else:
        assert [len(sizes) > 1 for sizes in seen].count(True) == 1


def differing(*lists: tuple[str, ...]) -> str:
    """What a message says of ranks whose last collectives were these."""
    ranks = [RankReport(rank, "killed", collectives=of) for rank, of in enumerate(lists)]
    return runner.message_of(RankDied("rank 0 of 2: killed", 0, ranks))


def test_ranks_that_issue_different_collectives_are_told_where_they_part():
    first, mine, yours = (f"all_reduce [[{n}]] #{at} of 0" for n, at in ((3, 7), (4, 8), (5, 8)))

    said = differing((first, mine), (first, yours))

    wanted = "differ from #8 on: all_reduce [[4]] on rank 0, all_reduce [[5]] on rank 1"
    assert f"likely: the ranks' collectives {wanted}" in said
    others = [(first,), ("send [[1]] #8 of 0",), ("all_reduce [[4]] #8 of 1",)]
    assert "likely" not in differing((first, mine), *others), "not known, or of another group"


@pytest.mark.parametrize(
    ("output", "is_damaged"),
    [
        ("free(): double free detected in tcache 2\n", True),
        ("step(): begin\nskipping corrupt sample 7\nterminate called after throwing\n", False),
    ],
)
def test_an_abort_is_of_damaged_memory_where_the_allocator_says_so(output: str, is_damaged: bool):
    report = RankReport(0, "killed by SIGABRT", output=output)
    assert RankDied("died", 0, [report]).is_memory_fault is is_damaged


CHAINED = "\n\nThe above exception was the direct cause of the following exception:\n\n"
MINE, TORCHS = (
    'File "/anywhere/mine.py", line 12, in f',
    'File "/lib/python3/torch/x.py", line 3, in g',
)


@pytest.mark.parametrize("message", [TORCHS + CHAINED + MINE + TORCHS, MINE + CHAINED + TORCHS])
def test_an_error_that_other_code_made_of_another_has_a_line_of_the_users(message: str):
    assert innermost(message) == ("/anywhere/mine.py", 12)
