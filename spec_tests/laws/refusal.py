"""Refusal: where the contract leaves a choice, an implementation is right or says that it cannot.

What it may never do is hang, end a process, or go on with wrong numbers. Any exception says that it
cannot, a `TypeError` from the depth of its code as well: whoever trains stops, and sees where. An
exception is an answer only of an implementation that does the ordinary thing, though. One that
raises at every call has refused nothing, and `NotImplementedError` means "not offered" there.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

from spec_tests.rig import judge
from spec_tests.rig.errors import NotOffered, RankRaised, RigError
from spec_tests.rig.sim.faults import SimError
from spec_tests.rig.world import Ranks, World

# What is no word of the implementation on what was asked: it has left that out, or the rig speaks.
NO_ANSWERS = (NotImplementedError, unittest.SkipTest, RigError, SimError)


def answer_or_refusal(
    world: World,
    body: Callable[..., Any],
    *args: Any,
    ordinary: tuple[Any, ...] = (),
    **kwargs: Any,
) -> Ranks | None:
    """Run `body`; its observations, or None if the implementation refused with an error.

    Args:
        ordinary: a body and its arguments, run after an error: what no implementation may refuse.

    Raises:
        Violation: a rank left the program in place of raising.
        RankRaised: the simulated world raised it: no refusal of the implementation's, a fault; or
            the ordinary was refused as well.
        NotOffered: likewise.
        RankHung, RankDied: as in `World.run`.
    """
    __tracebackhide__ = True
    try:
        return world.run(body, *args, **kwargs)
    except (NotOffered, RankRaised) as failure:
        if isinstance(failure, NotOffered) and not ordinary:
            raise
        if isinstance(failure, RankRaised):
            if failure.error.is_a("SimError"):
                raise
            if not failure.error.is_a("Exception"):
                raise judge.violated(
                    f"rank {failure.ranks[failure.primary].rank}: expected the right answer or an "
                    f"error, got {failure.error.kind}, which ends the process",
                ) from failure
    if ordinary:
        world.run(*ordinary)
    return None
