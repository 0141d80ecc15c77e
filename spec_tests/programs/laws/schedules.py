"""Schedules: in whichever order ranks run and operations complete, the answer is the same.

Ranks of a job run at different speeds, and a network completes operations in any order. Code that
assumes part of that order (the handle launched last is done last, the same operation is done first
on all ranks, the buffer is free by now) passes every test on one quiet machine. Here the order is
an input: the ranks are simulated (`rig.sim`), hypothesis draws which rank runs next, which one is a
straggler and how late an operation reports its completion, and shrinks what fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import example, given

from spec_tests.rig import strategies
from spec_tests.rig.ranks.world import World
from spec_tests.rig.sim import Schedule

SIM = ("sim",)
"""The transport of such clauses: the scheduling of live ranks cannot be controlled."""

LAUNCH_ORDER = (
    "c10d: collectives of a group are ordered by their launch, and nothing else is ordered"
)
WAITED_FOR = "c10d: the tensors of an asynchronous collective may be used once wait() has returned"


def drawn(test: Callable[..., None]) -> Callable[..., None]:
    """Give a clause its `schedule`: drawn ones, and two that every run tries first."""
    for pinned in (Schedule("seeded", seed=1, late=3), Schedule("reversed")):
        test = example(schedule=pinned)(test)
    return given(schedule=strategies.schedules_of_ranks())(test)


def under(world: World, schedule: Schedule) -> World:
    """The world by a schedule; another clause judges work that is never waited for."""
    return world.scheduled(replace(schedule, unwaited="ignore"))


def strict(world: World) -> World:
    """The world in which every launch has to be waited for, also a gather that nobody uses."""
    return world.scheduled(Schedule(unwaited="error"))
