"""Refusal: where the contract leaves a choice, an implementation is right or says that it cannot.

It may never hang, end a process, or continue with wrong numbers. Any exception is a refusal, also a
`TypeError` from deep inside its code: training stops, and the user sees where. An exception counts
as an answer only if the implementation does the ordinary case. One that raises at every call has
refused nothing, and `NotImplementedError` means "not offered" there. A wrapper whose forward has
other parameters than its module's has refused nothing either.
"""

from __future__ import annotations

import contextlib
import re
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spec_tests.rig import judge
from spec_tests.rig.ranks.errors import Absent, NotOffered, RankRaised, RigError
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Ranks, World
from spec_tests.rig.sim.faults import SimError
from spec_tests.rig.target import PACKAGE_ROOT, without_method

Kinds = type[BaseException] | tuple[type[BaseException], ...]

# Exceptions that are no refusal: the function is not offered, or the rig raised them.
NO_ANSWERS = (NotImplementedError, unittest.SkipTest, RigError, SimError)


@contextlib.contextmanager
def caught(kinds: Kinds = Exception) -> Iterator[dict[str, Any]]:
    """Within the block, note what is raised, as plain data that a body may return.

    Yields:
        `kinds`, names of the error's classes, its own first; `text`, its message; `error`, both in
        one line. All are empty where nothing was raised.
    """
    found: dict[str, Any] = {"kinds": [], "text": "", "error": ""}
    try:
        yield found
    except NO_ANSWERS:
        raise
    except kinds as error:
        if without_method(error) is not error:
            raise
        found["kinds"] = [kind.__name__ for kind in type(error).__mro__]
        found["text"] = str(error)
        found["error"] = f"{type(error).__name__}: {error}"


def raised(ctx: Context, body: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What another body raises, as `caught` notes it, or `returned`, its words (rank body)."""
    returned = ""
    with caught() as error:
        found = body(ctx, *args, **kwargs)
        returned = "" if found is None else str(found)
    return error | {"returned": returned}


def of_kinds(
    errors: Sequence[dict[str, Any]], *kinds: str, given: str = "", when: str = ""
) -> None:
    """Every rank must have raised an error of one of these kinds.

    Args:
        errors: of `raised`.
        when: it is due, for messages.
    """
    __tracebackhide__ = True
    wanted = " ".join(filter(None, (" or ".join(kinds), when)))
    for rank, error in enumerate(errors):
        none = f"no error, but {error['returned']}" if error["returned"] else "no error"
        judge.holds(
            not {*kinds}.isdisjoint(error["kinds"]),
            f"rank {rank}: expected a {wanted}, got {error['error'] or none}",
            given=given,
        )


def on_all_ranks(errors: Sequence[str], *, likely: str = "", given: str) -> None:
    """Every rank must have raised: none may go on in silence."""
    __tracebackhide__ = True
    silent = [rank for rank, error in enumerate(errors) if not error]
    judge.holds(
        not silent,
        f"expected an error on all {len(errors)} ranks, got none on ranks {silent}",
        likely=likely,
        given=given,
    )


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
            a forward does not take its module's arguments; or the ordinary was refused as well.
        NotOffered: likewise, or a function or method is absent.
        RankHung, RankDied: as in `World.run`.
    """
    __tracebackhide__ = True
    try:
        return world.run(body, *args, **kwargs)
    except (NotOffered, RankRaised) as failure:
        if isinstance(failure, Absent) or (isinstance(failure, NotOffered) and not ordinary):
            raise
        if isinstance(failure, RankRaised):
            if failure.error.is_a("SimError") or _does_not_take_its_arguments(failure):
                raise
            if not failure.error.is_a("Exception"):
                raise judge.violated(
                    f"rank {failure.ranks[failure.primary].rank}: expected the right answer or an "
                    f"error, got {failure.error.kind}, which ends the process",
                ) from failure
        refused = failure
    if ordinary:
        judge.SITUATION.get().given = "the ordinary case, which is tried after a refusal"
        try:
            world.run(*ordinary)
        except RankRaised as later:
            later.add_note(f"refused before: {_headline(refused)}")
            raise
    return None


def _does_not_take_its_arguments(failure: RankRaised) -> bool:
    """Whether a wrapper's forward, as the suite calls it, lacks parameters of its module's."""
    if not re.search(r"^TypeError: \S*forward\(\) (takes|got|missing) ", _headline(failure)):
        return False
    files = re.findall(r'^ *File "(.*?)", line', failure.error.text, re.MULTILINE)
    callers = [file for file in files if not file.endswith("torch/nn/modules/module.py")]
    return bool(callers) and callers[-1].startswith(str(PACKAGE_ROOT))


def _headline(failure: Exception) -> str:
    return failure.error.headline if isinstance(failure, RankRaised) else str(failure)
