"""Refusal: where the contract leaves a choice, an implementation is right or says that it cannot.

What it may never do is hang, end a process, or go on with wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spec_tests.rig import judge
from spec_tests.rig.errors import NotOffered, RankRaised
from spec_tests.rig.world import Ranks, World

# Nobody says with these that a situation is refused: they happen to code that did not foresee it.
_ACCIDENTS = (
    "KeyError",
    "IndexError",
    "AttributeError",
    "TypeError",
    "NameError",
    "ZeroDivisionError",
    "RecursionError",
    "SystemExit",
)


def answer_or_refusal(
    world: World, body: Callable[..., Any], *args: Any, **kwargs: Any
) -> Ranks | None:
    """Run `body`; its observations, or None if the implementation refused with a clear error.

    Raises:
        Violation: the error is an accident, or says nothing.
        RankRaised: the simulated world raised it: no refusal of the implementation's, a fault.
        RankHung, RankDied: as in `World.run`.
    """
    __tracebackhide__ = True
    try:
        return world.run(body, *args, **kwargs)
    except NotOffered:
        return None
    except RankRaised as failure:
        error = failure.error
        if error.is_a("SimError"):
            raise
        if error.message.strip() and not any(error.is_a(kind) for kind in _ACCIDENTS):
            return None
        raise judge.violated(
            f"rank {failure.ranks[failure.primary].rank}: expected the right answer or an error "
            f"that says what is wrong, got {error.kind}: {error.message!r}",
            likely="an accident: the situation was not thought of",
        ) from failure
